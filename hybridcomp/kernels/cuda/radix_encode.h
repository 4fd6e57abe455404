// Encoder of radix: TILE_WARPS warps per segment, HC_TILES segments per look-back. A thread quantizes its
// blocks directly into words and stores whole words; the bits of words that two threads share are added after
// a barrier. Five barriers.
#pragma once

#include "radix_head.h"

#ifndef HC_TILES
#define HC_TILES 2
#endif

namespace hybridcomp {
namespace radix {

constexpr u32 TILES = HC_TILES;
constexpr u32 ENCODE_THREADS = TILE_THREADS * TILES;
constexpr u32 FIRST_ARRIVAL = 1u << 24;  // above the words of all segments of a block of threads

constexpr u32 HEAD_WORDS = (TILE_HEADER_BYTES + 7 * MAX_BLOCKS / 8) / 4;  // mask and six planes

template <class B>
struct TileMemory {
    u32 buffer[HEAD_WORDS + MAX_TILE * B::RAW_BITS / 32 + 1];
    u32 sums[TILE_WARPS], tops[TILE_WARPS];
    u32 classes[2];  // bits of those that there are
};

// State that the segments of a thread block share.
struct Shared {
    u32 lengths[TILES];  // in words
    u32 arrived;         // words, and FIRST_ARRIVAL for each segment that has come so far
    u32 begin;           // of the first segment, in words from the first tile
};

// The values of a segment that a thread has.
template <class B>
struct Share {
    const typename B::Stored* source;  // the first of them
    u32 left;                          // how many there are from there on
    B blocks[EACH];
    u32 absmax[EACH];

    HC_INLINE_MEMBER u32 left_of(u32 k) const { return left > k * BLOCK ? left - k * BLOCK : 0; }
    // Loads them; returns the bits of the largest finite magnitude.
    HC_INLINE_MEMBER u32 load() {
        bool vectors = whole_vectors(source);
        u32 top = 0;
#pragma unroll
        for (u32 k = 0; k < EACH; ++k) blocks[k].load(source + k * BLOCK, left_of(k), vectors);
#pragma unroll
        for (u32 k = 0; k < EACH; ++k) {
            absmax[k] = blocks[k].absmax();
            top = larger(top, absmax[k] < INF_BITS ? absmax[k] : finite_top(blocks[k]));
        }
        return top;
    }
};

// The largest of `value` in a segment; a barrier.
HC_INLINE u32 largest_in_tile(u32 value, u32 warp, u32* tops) {
    value = largest_in_warp(value);
    if (lane_id() == 0) tops[warp] = value;
    __syncthreads();
#pragma unroll
    for (u32 w = 0; w < TILE_WARPS; ++w) value = larger(value, tops[w]);
    return value;
}

struct Sums {
    u32 before, all;
};

// Sizes and classes of a segment put together; a barrier. A size is bits + 2^20 * blocks.
template <class B>
HC_INLINE Sums sum_up(const Chosen* chosen, u32 warp, TileMemory<B>& mine) {
    u32 size = 0, low = 0, high = 0;
#pragma unroll
    for (u32 k = 0; k < EACH; ++k) {
        u32 cls = chosen[k].cls();
        size += cls <= RAW ? size_of(cls, chosen[k].width()) + (1u << 20) : 0;
        low |= cls < 32 ? 1u << cls : 0, high |= cls >= 32 && cls <= RAW ? 1u << (cls - 32) : 0;
    }
    low = union_in_warp(low), high = union_in_warp(high);
    u32 included = scan_lanes(size);
    if (lane_id() == WARP - 1) {
        mine.sums[warp] = included;
        if (low) atomicOr(mine.classes, low);
        if (high) atomicOr(mine.classes + 1, high);
    }
    __syncthreads();
    Sums sums = {included - size, 0};
#pragma unroll
    for (u32 w = 0; w < TILE_WARPS; ++w) {
        sums.before += w < warp ? mine.sums[w] : 0, sums.all += mine.sums[w];
    }
    return sums;
}

// By the first warp of each segment. The last one to come here says how long all are, and will look
// back: it gets their words + FIRST_ARRIVAL, the others 0.
HC_INLINE u32 arrive(u32 words, u32 which, u32 group, Shared& shared, u64* states) {
    u32 total = 0;
    if (lane_id() == 0) {
        shared.lengths[which] = words;
        u32 arrived = atomicAdd(&shared.arrived, words + FIRST_ARRIVAL);
        if (arrived / FIRST_ARRIVAL == TILES - 1) {
            total = arrived % FIRST_ARRIVAL + words + FIRST_ARRIVAL;
            announce(states, group, total % FIRST_ARRIVAL);
        }
    }
    return lane_value(total, 0);
}

// All blocks of a segment into its memory; a barrier.
template <class B>
HC_INLINE void put_tile(const Share<B>& share, const Chosen* chosen, const Head& head, const Sums& sums,
                        const Step& step, u32 b, u32* buffer) {
    u32 start = 8 * head.bytes, end = start + (sums.all & 0xfffff);
    if (b == 0 && end % 32) buffer[end / 32] = 0;  // nobody has a whole word there
    Writer writer(buffer, start + (sums.before & 0xfffff));
#pragma unroll
    for (u32 k = 0; k < EACH; ++k) {
        put_block<B>(share.source + k * BLOCK, share.left_of(k), chosen[k], step, writer);
    }
    __syncthreads();
    if (writer.held) atomicOr(writer.at, writer.held);
    if (head.present) put_head(head, step.step, chosen, b, sums.before >> 20, buffer);
}

template <class B>
HC_INLINE void encode(const void* in, u64 numel, u64 segment, u64 bound, u64 relative, u64 dtype,
                      u8* out, u64* states, u32 group, u64* size) {
    __shared__ TileMemory<B> memory[TILES];
    __shared__ Shared shared;
    u32 which = threadIdx.x / TILE_THREADS, b = threadIdx.x % TILE_THREADS, warp = b / WARP;
    TileMemory<B>& mine = memory[which];
    for (u32 i = b; i < HEAD_WORDS; i += TILE_THREADS) mine.buffer[i] = 0;
    if (b < 2) mine.classes[b] = 0;
    if (threadIdx.x == 0) shared.arrived = 0;
    u32 tile = group * TILES + which, tiles = (u32)ceil_div(numel, segment);
    u64 first = (u64)tile * segment;
    u32 count = first >= numel ? 0 : (u32)(numel - first < segment ? numel - first : segment);
    u32 at = b * EACH * BLOCK;
    Share<B> share;
    share.source = (const typename B::Stored*)in + first + at, share.left = at < count ? count - at : 0;
    u32 top = largest_in_tile(share.load(), warp, mine.tops);
    float limit = limit_of(bits_float((u32)bound), relative != 0, top), half = half_of<B>(limit, top);
    Step step = make_step(limit, half, top);
    bool safe = is_safe(step, half, top);
    Chosen chosen[EACH];
#pragma unroll
    for (u32 k = 0; k < EACH; ++k) {
        chosen[k] = choose(share.blocks[k], share.absmax[k], step, safe, share.source + k * BLOCK,
                           share.left_of(k));
    }
    Sums sums = sum_up(chosen, warp, mine);
    Head head = make_head(mine.classes[0], mine.classes[1], sums.all, (count + BLOCK - 1) / BLOCK);
    u32 total = warp == 0 ? arrive(head.words, which, group, shared, states) : 0;
    put_tile(share, chosen, head, sums, step, b, mine.buffer);
    if (total) {
        u32 found = sum_of_tiles(states, group, total % FIRST_ARRIVAL);
        if (lane_id() == 0) shared.begin = found;
    }
    __syncthreads();
    u32 place = shared.begin, end = shared.begin;
#pragma unroll
    for (u32 t = 0; t < TILES; ++t) {
        place += t < which ? shared.lengths[t] : 0, end += shared.lengths[t];
    }
    u64 data = HEADER_BYTES + 4ull * tiles;
    u32* target = (u32*)(out + data) + place;
#pragma unroll 4
    for (u32 i = b; i < head.words; i += TILE_THREADS) target[i] = mine.buffer[i];
    if (b == 0 && tile < tiles) ((u32*)(out + HEADER_BYTES))[tile] = place;
    if ((group + 1) * TILES >= tiles) {
        finish_message(out, data, MAGIC, VERSION, (u32)dtype, relative ? 0 : 1, numel, (u32)segment,
                       (u32)bound, end, TAIL_BYTES, size);
    }
}

}  // namespace radix
}  // namespace hybridcomp
