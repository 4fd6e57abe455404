// Encoder of topk. 1. A thread block chooses the values of a chunk by histograms of its magnitudes, 8 bits at a
// time: exponents, then mantissas. 2. One block computes where each chunk's bits begin. 3. A warp per chunk writes.
#pragma once

#include "topk_bits.h"

namespace hybridcomp {
namespace topk {

constexpr u32 EACH = CHUNK / THREADS;  // values of a thread: THREADS apart

// State of a chunk between the kernels; HEAD_WORDS in topk.py is its size.
struct Head {
    u32 kept, unary;   // values kept; bits of their gaps, but for the first
    u32 next;          // the place behind its last value, 0 where there is none
    u32 kept_before, unary_before, next_before;
};

// Heads of all chunks, then places in their chunk and codes, `most` for each.
struct Scratch {
    Head* heads;
    u16* places;
    u8* codes;
    HC_INLINE_MEMBER Scratch(void* at, u64 chunks, u64 most)
        : heads((Head*)at), places((u16*)(heads + chunks)), codes((u8*)(places + chunks * most)) {}
};

struct Choosing {
    u32 histogram[256], sums[WARPS], table[EACH * WARPS + 1];
    u32 bin, before, broken;
};

// Sum over the block of the values of the threads up to this one; two barriers.
HC_INLINE u32 scan_block(u32 value, u32* sums, u32& total) {
    u32 warp = threadIdx.x / WARP, included = scan_lanes(value);
    __syncthreads();
    if (lane_id() == WARP - 1) sums[warp] = included;
    __syncthreads();
    total = 0;
    for (u32 w = 0; w < WARPS; ++w) included += w < warp ? sums[w] : 0, total += sums[w];
    return included;
}

// The magnitude that is number `rank` from the largest on, from 1 on; `rank` becomes its number among equals.
HC_INLINE u32 select(const u32 (&bits)[EACH], u32& rank, Choosing& shared) {
    u32 found = 0, known = 0;
#pragma unroll 1
    for (u32 shift = 23;; shift = shift < 8 ? 0 : shift - 8) {
        __syncthreads();
        shared.histogram[threadIdx.x] = 0;
        __syncthreads();
#pragma unroll
        for (u32 k = 0; k < EACH; ++k) {
            u32 magnitude = bits[k] & MAGNITUDE;
            if ((magnitude & known) == found) atomicAdd(shared.histogram + (magnitude >> shift & 255), 1u);
        }
        __syncthreads();
        u32 bin = 255 - threadIdx.x, mine = shared.histogram[bin], total;
        u32 included = scan_block(mine, shared.sums, total);
        if (included >= rank && included - mine < rank) shared.bin = bin, shared.before = included - mine;
        __syncthreads();
        found |= shared.bin << shift, known |= 255u << shift, rank -= shared.before;
        if (shift == 0) return found;
    }
}

// Numbers the marked values of a block in the order of the message: `before` of value k, those in front of it.
// Bit k of `marks` is that of value k. Returns how many there are.
HC_INLINE u32 number(u32 marks, u32 (&before)[EACH], u32* table) {
    u32 warp = threadIdx.x / WARP, lane = lane_id(), lower = (1u << lane) - 1;
    __syncthreads();
#pragma unroll
    for (u32 k = 0; k < EACH; ++k) {
        u32 mask = ballot(marks >> k & 1);
        before[k] = ones_in(mask & lower);
        if (lane == 0) table[k * WARPS + warp] = ones_in(mask);
    }
    __syncthreads();
    if (warp == 0) {
        constexpr u32 PART = EACH * WARPS / WARP;
        u32 mine[PART], sum = 0;
        for (u32 i = 0; i < PART; ++i) mine[i] = table[PART * lane + i], sum += mine[i];
        u32 at = scan_lanes(sum) - sum;
        for (u32 i = 0; i < PART; ++i) table[PART * lane + i] = at, at += mine[i];
        if (lane == WARP - 1) table[EACH * WARPS] = at;
    }
    __syncthreads();
#pragma unroll
    for (u32 k = 0; k < EACH; ++k) before[k] += table[k * WARPS + warp];
    return table[EACH * WARPS];
}

// A bit for each of this thread's values that is kept, at most `most` of the block; `scale` of these.
HC_INLINE u32 choose_marks(const u32 (&bits)[EACH], u32 most, Choosing& shared, u16& scale) {
    u32 there = 0, total, before[EACH];
    if (threadIdx.x == 0) shared.broken = 0;
    __syncthreads();
#pragma unroll
    for (u32 k = 0; k < EACH; ++k) {
        there |= (bits[k] & MAGNITUDE ? 1u : 0u) << k;
        if ((bits[k] & MAGNITUDE) >= INF_BITS) shared.broken = 1;
    }
    scan_block(ones_in(there), shared.sums, total);
    scale = shared.broken ? BROKEN : 0;
    if (shared.broken || !total) return 0;
    u32 middle = ((total < most ? total : most) - 1) / 2 + 1;
    scale = scale_of(select(bits, middle, shared));
    if (scale == 0) return 0;
    if (total <= most) return there;
    u32 room = most, least = select(bits, room, shared), marks = 0, equal = 0;
#pragma unroll
    for (u32 k = 0; k < EACH; ++k) {
        marks |= ((bits[k] & MAGNITUDE) > least ? 1u : 0u) << k;
        equal |= ((bits[k] & MAGNITUDE) == least ? 1u : 0u) << k;
    }
    number(equal, before, shared.table);
#pragma unroll
    for (u32 k = 0; k < EACH; ++k) marks |= (before[k] < room ? equal & 1u << k : 0);
    return marks;
}

// Zeroes the place of the bits; called by all blocks.
HC_INLINE void clear_sections(u8* out, u64 low, u64 nbytes) {
    u64 thread = (u64)blockIdx.x * blockDim.x + threadIdx.x, threads = (u64)gridDim.x * blockDim.x;
    if (thread == 0 && low % 4) *(u16*)(out + low) = 0;
    for (u64 word = (low + 3) / 4 + thread; word < nbytes / 4; word += threads) ((u32*)out)[word] = 0;
}

template <class T>
HC_INLINE void choose(Settings settings, const void* in, u64 numel, Scratch scratch, u8* out, u64 nbytes) {
    __shared__ Choosing shared;
    u64 chunk = blockIdx.x, first = chunk * CHUNK, slot = chunk * settings.most;
    bool last = chunk + 1 == gridDim.x;
    u32 bits[EACH], before[EACH];
    clear_sections(out, HEADER + 2 * (u64)gridDim.x, nbytes);
#pragma unroll
    for (u32 k = 0; k < EACH; ++k) {
        u64 i = first + k * THREADS + threadIdx.x;
        bits[k] = i < numel ? float_bits(T::load(((const typename T::Stored*)in)[i])) : 0;
    }
    u16 scale;
    u32 marks = choose_marks(bits, last ? settings.last : settings.most, shared, scale);
    u32 kept = number(marks, before, shared.table), unary = 0, total;
    float wide = bf16_to_float(scale);
#pragma unroll
    for (u32 k = 0; k < EACH; ++k) {
        if (!(marks >> k & 1)) continue;
        scratch.places[slot + before[k]] = (u16)(k * THREADS + threadIdx.x);
        scratch.codes[slot + before[k]] = (u8)code_of(bits[k], wide, (int)settings.bits);
    }
    __syncthreads();
    const u16* places = scratch.places + slot;
    for (u32 i = 1 + threadIdx.x; i < kept; i += THREADS) {
        unary += ((places[i] - places[i - 1] - 1u) >> settings.rice) + 1;
    }
    scan_block(unary, shared.sums, total);
    if (threadIdx.x) return;
    ((u16*)(out + HEADER))[chunk] = scale;
    scratch.heads[chunk] = Head{kept, total, kept ? (u32)first + places[kept - 1] + 1 : 0, 0, 0, 0};
}

// The largest of the values of the threads in front of this one, and of all; two barriers.
HC_INLINE u32 largest_before(u32 value, u32* sums, u32& top) {
    u32 warp = threadIdx.x / WARP, lane = lane_id();
#pragma unroll
    for (u32 step = 1; step < WARP; step *= 2) {
        u32 other = lane_before(value, step);
        value = lane >= step && other > value ? other : value;
    }
    __syncthreads();
    if (lane == WARP - 1) sums[warp] = value;
    u32 found = lane_before(value, 1);
    found = lane ? found : 0;
    __syncthreads();
    top = 0;
    for (u32 w = 0; w < WARPS; ++w) {
        found = w < warp && sums[w] > found ? sums[w] : found, top = sums[w] > top ? sums[w] : top;
    }
    return found;
}

// Computes where each chunk's values begin, and writes the header; called by one block.
HC_INLINE void add_up(Settings settings, u64 numel, Scratch scratch, u8* out, u64* size) {
    __shared__ u32 sums[WARPS];
    u32 chunks = (u32)ceil_div(numel, CHUNK), next = 0, kept = 0, unary = 0;
#pragma unroll 1
    for (u32 base = 0; base < chunks; base += THREADS) {
        u32 chunk = base + threadIdx.x, top, all;
        Head head = chunk < chunks ? scratch.heads[chunk] : Head{0, 0, 0, 0, 0, 0};
        u32 before = largest_before(head.next, sums, top);
        head.next_before = before > next ? before : next;
        u32 first = head.kept ? chunk * CHUNK + scratch.places[(u64)chunk * settings.most] : 0;
        u32 mine = head.kept ? head.unary + ((first - head.next_before) >> settings.rice) + 1 : 0;
        head.kept_before = kept + scan_block(head.kept, sums, all) - head.kept, kept += all;
        head.unary_before = unary + scan_block(mine, sums, all) - mine, unary += all;
        next = top > next ? top : next;
        if (chunk < chunks) scratch.heads[chunk] = head;
    }
    if (threadIdx.x) return;
    u32* words = (u32*)out;
    words[0] = kept, words[1] = unary, words[2] = (u32)numel, words[3] = 0;
    *size = align16(Sections(numel, kept, unary, settings.rice, settings.bits).end);
}

// Writes the bits of a chunk into zeroed memory; called by one warp.
HC_INLINE void write(Settings settings, u64 numel, Scratch scratch, u8* out) {
    u64 chunk = warp_id();
    if (chunk >= ceil_div(numel, CHUNK)) return;
    const u32* header = (const u32*)out;
    Sections at(numel, header[0], header[1], settings.rice, settings.bits);
    Head head = scratch.heads[chunk];
    const u16* places = scratch.places + chunk * settings.most;
    const u8* codes = scratch.codes + chunk * settings.most;
    u32 first = (u32)chunk * CHUNK;
    u64 unary = 8 * at.unary + head.unary_before;
    for (u32 i = lane_id(); i - lane_id() < head.kept; i += WARP) {
        bool active = i < head.kept;
        u32 place = active ? first + places[i] : 0;
        u32 before = i == 0 ? head.next_before : active ? first + places[i - 1] + 1 : 0;
        u32 gap = place - before, high = active ? (gap >> settings.rice) + 1 : 0;
        u32 included = scan_lanes(high);
        u64 index = (u64)head.kept_before + i;
        if (active) {
            put_bits(out, unary + included - 1, 1);
            put_bits(out, 8 * at.low + index * settings.rice, gap & ((1u << settings.rice) - 1));
            put_bits(out, 8 * at.codes + index * settings.bits, codes[i]);
        }
        unary += lane_value(included, WARP - 1);
    }
}

}  // namespace topk
}  // namespace hybridcomp
