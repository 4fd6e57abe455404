// Loads and stores tiles of values in the registers of a warp; error feedback of a tile whose residual has few
// bits (blockint_kept.h): values + residual, and the quantization error.
#pragma once

#include "blockint_kept.h"
#include "blockint_rotated.h"

namespace hybridcomp {
namespace blockint {

// Values [first, first + 1024) of `count`, zeros after the end. `whole`: all of them are there, aligned.
template <class E>
HC_INLINE void load_tile(E* held, const typename E::Stored* values, u64 first, u64 count, bool whole) {
    if (whole) {
        const auto* at = values + first + lane_id() * EACH;
#pragma unroll
        for (int i = 0; i < ROUNDS; ++i) held[i].load(at + i * ROUND);
        return;
    }
#pragma unroll
    for (int i = 0; i < ROUNDS; ++i) {
        u64 at = first + lane_id() * EACH + i * ROUND;
        held[i].load_some(values + at, eight_of(at, count));
    }
}

// Eight values of each lane, from `at` on.
HC_INLINE void store_eight(const float* values, float* out, u64 at, u64 count, bool whole) {
    if (whole) {
        store_sectors(values, out + at);
        return;
    }
    u32 there = eight_of(at, count);
#pragma unroll
    for (int k = 0; k < EACH; ++k) {
        if ((u32)k < there) out[at + k] = values[k];
    }
}

// Error feedback of a tile with a residual of few bits, which is 0 past the end of the message; values of E.
template <class E>
struct FewFeedback {
    const typename E::Stored* values;
    FewBits residual;
    u64 tile, count;
    bool full;  // the tile is
    HC_INLINE_MEMBER u32 blocks() const { return Layout(count).blocks_of(tile); }

    // sums = values + residual, rotated where values are.
    HC_INLINE_MEMBER void load(EightFp32* sums) const {
        E held[ROUNDS];
        Place place;
        KeptTile<HC_KEPT> kept;
        load_tile(held, values, tile * TILE, count, full && whole_vectors(values));
        kept.load(residual, tile, blocks(), place);
#pragma unroll
        for (int i = 0; i < ROUNDS; ++i) {
            kept.values(i, place, sums[i].values);
#pragma unroll
            for (int k = 0; k < EACH; ++k) sums[i].values[k] = sums[i].values[k] + held[i].value(k);
            u64 at = tile * TILE + i * ROUND + lane_id() * EACH;
            if constexpr (ROTATE) rotate(sums[i].values, full || in_group(at, count));
        }
    }

    // Returns the sums of a round before rotation. For 16 bits their place is recomputed instead of kept, to save
    // registers.
    HC_INLINE_MEMBER void reload(int round, EightFp32& sums) const {
        E mine;
        Place place;
        KeptTile<HC_KEPT> kept;
        u32 lane = sizeof(typename E::Stored) == 2 ? anew(lane_id()) : lane_id();
        u64 at = tile * TILE + round * ROUND + lane * EACH;
        kept.load(residual, tile, blocks(), place);
        kept.values(round, place, sums.values);
        if (full && whole_vectors(values)) mine.load(values + at);
        else mine.load_some(values + at, eight_of(at, count));
#pragma unroll
        for (int k = 0; k < EACH; ++k) sums.values[k] = sums.values[k] + mine.value(k);
    }

    // Replaces `sums` by the error of the levels `q` of a round.
    HC_INLINE_MEMBER void settle(EightFp32& sums, int round, const u32* q, u32 code, u32 base) const {
        bool twice;
        float step = careful_step(code, base, twice), sent[EACH];
        u64 at = tile * TILE + round * ROUND + lane_id() * EACH;
#pragma unroll
        for (int k = 0; k < EACH; ++k) {
            sent[k] = sent_value(q[k], step);
            if (twice) sent[k] = finite(sent[k] * 2.0f);
        }
        if constexpr (ROTATE) {
            reload(round, sums);
            rotate_back_any(sent, full || in_group(at, count));
        }
        u32 there = full ? EACH : eight_of(at, count);
#pragma unroll
        for (int k = 0; k < EACH; ++k) {
            float left = residual::left_out(sums.values[k], sent[k]);
            sums.values[k] = (u32)k < there ? left : 0.0f;
        }
        if constexpr (ROTATE) {
            Place place;
            u32 block = place.block(round);
            store_kept_blocks<HC_KEPT>(sums, residual, tile * TILE_BLOCKS + block, block < blocks(),
                                       place.part);
        }
    }

    HC_INLINE_MEMBER void finish(const EightFp32* left, const Place& place) const {
        if constexpr (!ROTATE) store_kept_tile<HC_KEPT>(left, residual, tile, blocks(), place);
    }
};

}  // namespace blockint
}  // namespace hybridcomp
