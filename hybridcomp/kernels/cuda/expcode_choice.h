// expcode: a warp chooses the coding of a tile from the sampled blocks.
#pragma once

#include "expcode_quads.h"

namespace hybridcomp {
namespace expcode {

constexpr int COUNTS = 256 + 16;  // zeros follow the last exponent

// Returns the coding that expcode::choose returns; each lane tries every 32nd base. Among codings of equal cost
// the first wins, then the lowest base; width E comes last.
template <class F>
HC_INLINE Coding choose_in_warp(const u32* counts, u32 total, u32 first, u32 last) {
    u32 best = F::WIDEST * total << 11 | 7u << 8, zeros = counts[0];
#pragma unroll 1
    for (u32 start = first; start <= last; start += WARP) {
        u32 base = start + lane_id(), inside = 0;
        if (base > last) base = last;  // again: changes nothing
#pragma unroll
        for (u32 i = 0; i < 15; ++i) {
            u32 size = i + 1;  // of the window
            inside += counts[base + i];
            if (size == 3 || size == 7 || size == 15) {
                u32 width = size == 3 ? 2 : size == 7 ? 3 : 4;
                u32 key = (width * total + 8 * (total - inside)) << 11 | (width - 2) << 8 | base;
                best = key < best ? key : best;
            }
            if ((size == 2 || size == 6 || size == 14) && zeros && base != 0) {
                u32 width = size == 2 ? 2 : size == 6 ? 3 : 4;
                u32 key = (width * total + 8 * (total - inside - zeros)) << 11 | (width + 1) << 8 | base;
                best = key < best ? key : best;
            }
        }
    }
    best = smallest_in_warp(best);
    u32 order = best >> 8 & 7;
    if (order == 7) return Coding{0, F::WIDEST, false, false};
    return Coding{best & 255, order % 3 + 2, order >= 3, false};
}

HC_INLINE void clear_counts(u32* counts) {
#pragma unroll
    for (u32 i = 0; i < COUNTS; i += 4 * WARP) {
        u32 at = i + 4 * lane_id();
        if (at < COUNTS) *(uint4*)(counts + at) = make_uint4(0, 0, 0, 0);
    }
    sync_warp();
}

// The coding for `looked_at` blocks, of which four lanes hold two words each, where `mine`.
template <class F>
HC_INLINE Coding choose_for(const Quad<F>* quads, bool mine, u32 looked_at, u32* counts) {
    u32 first = 255, last = 0;
    if (mine) {
#pragma unroll
        for (int q = 0; q < 2; ++q) {
            u32 four = exponents<F>(quads[q].bytes().high);
#pragma unroll
            for (int k = 0; k < 4; ++k) {
                u32 e = four >> (8 * k) & 255u;
                atomicAdd(counts + e, 1u);
                first = e < first ? e : first;
                last = e > last ? e : last;
            }
        }
    }
    sync_warp();
    return choose_in_warp<F>(counts, looked_at * BLOCK, smallest_in_warp(first), largest_in_warp(last));
}

}  // namespace expcode
}  // namespace hybridcomp
