// Functions for kernels in which each warp has a tile and needs no barrier.
#pragma once

#include "cuda_tiles.h"

namespace hybridcomp {

constexpr u32 EACH_BYTE = 0x01010101u, TOP_BITS = 0x80808080u;

HC_INLINE u32 smallest_in_warp(u32 value) { return ~largest_in_warp(~value); }

// Whether data at this address can move 16 bytes at a time.
HC_INLINE bool whole_vectors(const void* at) { return ((u64)at & 15) == 0; }

// Returns the top bit of each nonzero byte.
HC_INLINE u32 nonzero_bytes(u32 bytes) { return (((bytes & ~TOP_BITS) + ~TOP_BITS) | bytes) & TOP_BITS; }

// 0x7f in each byte whose top bit is set in `flags`, else 0.
HC_INLINE u32 spread_flags(u32 flags) { return flags - (flags >> 7); }

// 16 bytes to shared memory.
HC_INLINE void fetch(void* shared, const void* from) { fetch16(shared_at(shared), from); }

// Makes data that any lane fetched visible to the whole warp.
HC_INLINE void await_fetched() {
    await_all_fetches();
    sync_warp();
}

// Sums numbers below 32, one per lane: over the lanes before this one, and over all.
struct Few {
    u32 before, total;
};

HC_INLINE Few sum_few(u32 value) {
    u32 lower = (1u << lane_id()) - 1;
    u32 ones = ballot(value & 1), twos = ballot(value & 2);
    Few few = {ones_in(ones & lower) + 2 * ones_in(twos & lower),
               ones_in(ones) + 2 * ones_in(twos)};
    if (ballot(value > 3)) {
#pragma unroll
        for (u32 bit = 2; bit < 5; ++bit) {
            u32 some = ballot(value >> bit & 1);
            few.before += ones_in(some & lower) << bit, few.total += ones_in(some) << bit;
        }
    }
    return few;
}

// Lengths of the parts of a block's warps; the block looks back once for all of them. Reading 128 or 256 states
// at once instead of 32 gained nothing (H100), since a block waits for one that still computes. Without waiting
// expcode would encode at 0.98 of a copy's speed instead of 0.71.
template <int WARPS>
struct Lengths {
    u32 lengths[WARPS], place;

    // Words before this warp's, of all groups of warps before and of this one; `total`: of this one.
    // `states`: of the message, zero before its first group.
    HC_INLINE_MEMBER u32 look(u64* states, u32 group, u32 mine, u32& total) {
        u32 warp = threadIdx.x / WARP, before = 0;
        if (lane_id() == 0) lengths[warp] = mine;
        __syncthreads();
        total = 0;
#pragma unroll
        for (u32 w = 0; w < WARPS; ++w) {
            u32 length = lengths[w];
            before += w < warp ? length : 0, total += length;
        }
        if (warp == 0) {
            u32 found = look_back(states, group, total);
            if (lane_id() == 0) place = found;
        }
        __syncthreads();
        return place + before;
    }
};

}  // namespace hybridcomp
