// Encoder of expcode: values of a tile, its zero blocks, and the coding of a tile with zero blocks.
#pragma once

#include "expcode_choice.h"

namespace hybridcomp {
namespace expcode {

// The blocks of a tile that are not zero.
template <class F>
struct Present {
    u32 masks[Lanes<F>::ROUNDS];  // the bit of a block's first lane
    u32 total;
};

// The number of this lane's block of a round, among those that are not zero.
template <class F>
HC_INLINE u32 number_of(const Present<F>& present, u32 round) {
    u32 before = 0;
#pragma unroll
    for (u32 r = 0; r < Lanes<F>::ROUNDS; ++r) {
        u32 lower = r < round ? FULL_WARP : r == round ? (1u << Lanes<F>::first_lane()) - 1 : 0;
        before += ones_in(present.masks[r] & lower);
    }
    return before;
}

template <class F>
HC_INLINE bool is_there(const Present<F>& present, u32 round) {
    u32 mask = 0;
#pragma unroll
    for (u32 r = 0; r < Lanes<F>::ROUNDS; ++r) mask = r == round ? present.masks[r] : mask;
    return mask >> Lanes<F>::first_lane() & 1;
}

// A tile's values, where they are and how many.
template <class F>
struct Source {
    typedef typename Quad<F>::Item Item;
    const Item* values;
    u32 count, blocks;
    bool vectors;  // a whole tile, aligned

    HC_INLINE_MEMBER Source(const void* in, u64 numel, u32 tile) {
        u64 first = (u64)tile * TILE, left = first < numel ? numel - first : 0;
        values = (const Item*)in + first;
        count = (u32)(left < TILE ? left : TILE);
        blocks = (count + BLOCK - 1) / BLOCK;
        vectors = count == TILE && whole_vectors(values);
    }
    HC_INLINE_MEMBER void load_round(u32 round, Quad<F>* quads) const {
        u32 block = round * Lanes<F>::ROUND_BLOCKS + lane_id() / Lanes<F>::LANES;
        if (vectors) {
            Quad<F>::load(values + block * BLOCK, Lanes<F>::part(), quads);
            return;
        }
#pragma unroll
        for (u32 q = 0; q < Lanes<F>::WORDS; ++q) {
            // the last block is filled up with copies of the last value
            u32 word = Lanes<F>::WORDS * Lanes<F>::part() + q;
            quads[q] = Quad<F>::zero();
            if (block < blocks) quads[q] = Quad<F>::at(values, block * BLOCK, word, count - 1);
        }
    }
    // Words 2 (lane % 4) and the next of a block.
    HC_INLINE_MEMBER void load_two(u32 block, Quad<F>* quads) const {
        u32 word = 2 * (lane_id() % 4);
        if (vectors) {
            Quad<F>::load_two(values + block * BLOCK, word, quads);
            return;
        }
        quads[0] = Quad<F>::at(values, block * BLOCK, word, count - 1);
        quads[1] = Quad<F>::at(values, block * BLOCK, word + 1, count - 1);
    }
};

// The first lanes of blocks of which some lane is in `mask`.
template <class F>
HC_INLINE u32 blocks_of_lanes(u32 mask) {
    mask |= mask >> 1;
    if (Lanes<F>::LANES == 4) mask |= mask >> 2;
    return mask & (Lanes<F>::LANES == 4 ? 0x11111111u : 0x55555555u);
}

// Reads a tile for the first time; later reads hit the caches. `low`: a low half of an fp32 value is nonzero.
template <class F>
HC_INLINE Present<F> find_present(const Source<F>& source, bool& low) {
    Present<F> present;
    u32 lows = 0;
    present.total = 0;
#pragma unroll
    for (u32 r = 0; r < Lanes<F>::ROUNDS; ++r) {
        Quad<F> quads[Quad<F>::WORDS];
        source.load_round(r, quads);
        u32 any = 0;
#pragma unroll
        for (u32 q = 0; q < Lanes<F>::WORDS; ++q) any |= quads[q].any(), lows |= quads[q].any_low();
        present.masks[r] = blocks_of_lanes<F>(ballot(any != 0));
        present.total += ones_in(present.masks[r]);
    }
    low = F::ITEM_BYTES == 4 && ballot(lows != 0) != 0;
    return present;
}

// Counts the exponents of a sampled block by four lanes. `counts` and `sampled` are in shared memory.
template <class F>
HC_INLINE Coding sample(const Source<F>& source, const Present<F>& present, u32* counts, u32* sampled) {
    clear_counts(counts);
    u32 index = lane_id() / 4, stride = present.total / SAMPLED_BLOCKS;
    stride = stride ? stride : 1;
    u32 looked_at = (present.total + stride - 1) / stride;
    looked_at = looked_at < SAMPLED_BLOCKS ? looked_at : SAMPLED_BLOCKS;
#pragma unroll 1
    for (u32 r = 0; r < Lanes<F>::ROUNDS; ++r) {
        u32 number = number_of<F>(present, r), which = number / stride;
        bool taken = which * stride == number && which < SAMPLED_BLOCKS;
        if (Lanes<F>::part() == 0 && is_there<F>(present, r) && taken) {
            sampled[which] = r * Lanes<F>::ROUND_BLOCKS + lane_id() / Lanes<F>::LANES;
        }
    }
    sync_warp();
    Quad<F> quads[2];
    if (index < looked_at) source.load_two(sampled[index], quads);
    return choose_for<F>(quads, index < looked_at, looked_at, counts);
}

}  // namespace expcode
}  // namespace hybridcomp
