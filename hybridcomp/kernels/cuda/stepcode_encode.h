// Encoder of stepcode on a GPU. Each tile is coded twice: first for its length, then, when the block has
// learned where its tiles lie, to write it.
#pragma once

#include "stepcode_plan.h"

namespace hybridcomp {
namespace stepcode {

// Counts of every stride-th run, [exponents][ROW]. Most values stay: those are added up in shared memory.
HC_INLINE void count(const u16* values, const u16* reference, u64 numel, u32 dtype, u32* counts) {
    __shared__ u32 unchanged[256];
    for (u32 i = threadIdx.x; i < 256; i += blockDim.x) unchanged[i] = 0;
    __syncthreads();
    u64 stride = stride_of(numel) * RUN, runs = ceil_div(numel, stride);
    for (u64 run = blockIdx.x; run < runs; run += gridDim.x) {
        u64 first = run * stride, left = numel - first;
        for (u32 i = threadIdx.x; i < RUN && i < left; i += blockDim.x) {
            u32 old = reference[first + i], step = step_between(old, values[first + i]);
            u32 exponent = exponent_of(old, dtype);
            if (step == 0) atomicAdd(unchanged + exponent, 1u);
            else atomicAdd(counts + exponent * ROW + code_of(step).symbol, 1u);
        }
    }
    __syncthreads();
    for (u32 e = threadIdx.x; e < 256; e += blockDim.x) {
        if (unchanged[e]) atomicAdd(counts + e * ROW, unchanged[e]);
    }
}

// The model of the counts, by one block: ranges and sizes into the plan, its bytes into the payload.
HC_INLINE void make_model(const u32* counts, u64 numel, u32 dtype, Plan* plan, u8* out) {
    __shared__ u32 totals[256], sums[CONTEXTS][ROW], ranges[CONTEXTS][ROW], begins[CONTEXTS], lowest;
    __shared__ u64 costs[CONTEXTS], sampled[CONTEXTS];
    for (u32 e = threadIdx.x; e < exponents(dtype); e += blockDim.x) {
        totals[e] = 0;
        for (u32 s = 0; s < SYMBOLS; ++s) totals[e] += counts[e * ROW + s];
    }
    for (u32 i = threadIdx.x; i < CONTEXTS * ROW; i += blockDim.x) sums[i / ROW][i % ROW] = 0;
    __syncthreads();
    if (threadIdx.x == 0) lowest = lowest_exponent(totals, dtype);
    __syncthreads();
    for (u32 s = threadIdx.x; s < SYMBOLS; s += blockDim.x) {
        for (u32 e = 0; e < exponents(dtype); ++e) {
            sums[context_of(e << mantissa_bits(dtype), dtype, lowest)][s] += counts[e * ROW + s];
        }
    }
    __syncthreads();
    u32 c = threadIdx.x;
    if (c < CONTEXTS) {
        frequencies_from(sums[c], least_count(numel), ranges[c]);
        costs[c] = cost_of(sums[c], ranges[c]), sampled[c] = 0;
        for (u32 s = 0; s < ESCAPE; ++s) sampled[c] += sums[c][s];
        begins[c] = 1 + 3 * listed_symbols(ranges[c]);
        ranges_from(ranges[c]);
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        u64 cost = 0, all = 0;
        u32 at = 0;
        for (u32 i = 0; i < CONTEXTS; ++i) {
            u32 length = begins[i];
            cost += costs[i], all += sampled[i];
            begins[i] = at, at += length;
        }
        plan->model = (at + 3) / 4 * 4, plan->lowest = lowest, plan->tile = 1u << tile_log(cost, all);
        for (; at % 4; ++at) out[at] = 0;
    }
    __syncthreads();
    if (c < CONTEXTS) write_context(ranges[c], out + begins[c]);
    for (u32 i = threadIdx.x; i < CONTEXTS * SYMBOLS; i += blockDim.x) {
        plan->ranges[i / SYMBOLS][i % SYMBOLS] = ranges[i / SYMBOLS][i % SYMBOLS];
    }
}

// What a tile comes to.
struct Lots {
    u32 words, extra, state;  // extra: bits
    bool changed;
};

struct Pair {
    const u16* values;
    const u16* reference;
    u32 dtype, lowest;
};

// Codes a tile, from its last 32 values to its first, by one warp. With WRITE the words end at
// `words` + `lots.words`, the extra bits at bit `lots.extra` of zeroed words.
template <bool WRITE>
HC_INLINE Lots code(const Pair& from, const Bounds& tile, const u32 (*ranges)[ROW], Lots lots, u16* words,
                    u32* extra) {
    Lots found = {0, 0, LEAST_STATE, false};
    u32 lane = lane_id(), moved = 0;
    for (u32 group = (tile.count + WARP - 1) / WARP; group-- > 0;) {
        u32 i = group * WARP + lane;
        bool active = i < tile.count;
        u32 old = active ? from.reference[tile.first + i] : 0;
        u32 step = active ? step_between(old, from.values[tile.first + i]) : 0;
        Coded coded = code_of(step);
        const u32* row = ranges[context_of(old, from.dtype, from.lowest)];
        if (!row[coded.symbol]) coded = Coded{ESCAPE, 16, step};
        u32 range = row[coded.symbol], number = active ? coded.count : 0;
        bool over = active && overflows(found.state, range);
        u32 mask = ballot(over);
        found.words += ones_in(mask);
        if (WRITE && over) words[lots.words - found.words + lanes_before(mask)] = (u16)found.state;
        found.state = over ? found.state >> 16 : found.state;
        found.state = active ? push_symbol(found.state, range) : found.state;
        moved |= step;
        if (ballot(number != 0)) {
            u32 included = scan_lanes(number);
            found.extra += lane_value(included, WARP - 1);
            if (WRITE && number) {
                put_word(extra, lots.extra - found.extra + included - number, coded.bits);
            }
        }
    }
    found.changed = ballot(moved != 0) != 0;
    return found;
}

HC_INLINE void encode(const u16* values, const u16* reference, u64 numel, u32 dtype, Plan* plan, u8* out,
                      Workspace* work) {
    __shared__ u32 ranges[CONTEXTS][ROW];
    __shared__ Lengths<WARPS> shared;
    u32 group = take_ticket(work), warp = threadIdx.x / WARP, lane = lane_id(), size = plan->tile;
    u64 tiles = ceil_div(numel, size), index = (u64)group * WARPS + warp;
    if ((u64)group * WARPS >= tiles) return;
    copy_words(plan->ranges[0], ranges[0], CONTEXTS * ROW);
    __syncthreads();
    Pair from = {values, reference, dtype, plan->lowest};
    Bounds tile(numel, size, index);
    Lots lots = code<false>(from, tile, ranges, Lots{}, nullptr, nullptr);
    u32 after = STATE_BYTES / 4 + (lots.words + 1) / 2, stored = 1 + (tile.count + 1) / 2;
    u32 length = after + (lots.extra + 31) / 32, total;
    bool raw = length >= stored;
    length = !lots.changed ? 0 : raw ? stored : length;
    u32 place = shared.look(work, group, length, total);
    u32* offsets = (u32*)(out + HEADER_BYTES + plan->model);
    if (index < tiles && lane == 0) offsets[index] = place;
    if (index + 1 == tiles && lane == 0) plan->length = place + length;
    if (!length) return;
    u32* to = offsets + tiles + place;
    u16* words = (u16*)(to + STATE_BYTES / 4);
    if (raw) {
        if (lane == 0) to[0] = STORED, to[length - 1] = 0;
        sync_warp();
        copy_values(values + tile.first, (u16*)(to + 1), tile.count, lane, WARP);
        return;
    }
    if (lane == 0) to[0] = lots.words;
    if (lane == 0 && lots.words % 2) words[lots.words] = 0;
    for (u32 i = after + lane; i < length; i += WARP) to[i] = 0;
    sync_warp();
    to[1 + lane] = code<true>(from, tile, ranges, lots, words, to + after).state;
}

// The header, or the values unencoded where that is shorter.
HC_INLINE void finish(const u16* values, u64 numel, u32 dtype, const Plan* plan, u8* out, u64* size) {
    u64 tiles = ceil_div(numel, plan->tile), plain = HEADER_BYTES + 2 * numel;
    u64 used = HEADER_BYTES + plan->model + 4 * (tiles + plan->length);
    bool raw = used >= plain;
    used = raw ? plain : used;
    u64 thread = (u64)blockIdx.x * blockDim.x + threadIdx.x;
    if (raw) copy_values(values, (u16*)(out + HEADER_BYTES), numel, thread, (u64)gridDim.x * blockDim.x);
    if (blockIdx.x) return;
    if (threadIdx.x == 0) {
        u32* head = (u32*)out;
        head[0] = MAGIC;
        head[1] = VERSION | dtype << 8 | (raw ? UNENCODED : STEPS) << 16 | (raw ? 0 : plan->lowest << 24);
        head[2] = (u32)numel, head[3] = (u32)(numel >> 32);
        head[4] = raw ? 0 : plan->tile, head[5] = raw ? 0 : plan->length;
        head[6] = raw ? 0 : plan->model, head[7] = 0;
        *size = align16(used);
    }
    if (threadIdx.x < WARP) pad_payload(out, used, align16(used));
}

}  // namespace stepcode
}  // namespace hybridcomp
