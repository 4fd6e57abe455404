// What kernels share that give each warp a tile of its own and need no barrier in it.
#pragma once

#include "cuda_tiles.h"

namespace hybridcomp {

constexpr u32 EACH_BYTE = 0x01010101u, TOP_BITS = 0x80808080u;

HC_INLINE u32 smallest_in_warp(u32 value) { return ~largest_in_warp(~value); }

// Whether what begins here can move 16 bytes at a time.
HC_INLINE bool whole_vectors(const void* at) { return ((u64)at & 15) == 0; }

// Top bit of each byte that is not zero.
HC_INLINE u32 nonzero_bytes(u32 bytes) { return (((bytes & ~TOP_BITS) + ~TOP_BITS) | bytes) & TOP_BITS; }

// 0x7f in each byte whose top bit is set in `flags`, else 0.
HC_INLINE u32 spread_flags(u32 flags) { return flags - (flags >> 7); }

// 16 bytes to shared memory.
HC_INLINE void fetch(void* shared, const void* from) { fetch16(shared_at(shared), from); }

// What the lanes of this warp fetched is there for all of them.
HC_INLINE void await_fetched() {
    await_all_fetches();
    sync_warp();
}

// Of a few numbers below 32, one a lane, those of the lanes before and of all.
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

// What the warps of a block have, one after the other; the block looks back once for all of them. To look
// at 128 or 256 states together in place of 32 gained nothing (H100): who waits, waits for a block that is
// still at work. Without any waiting, encoders of expcode would reach 0.98 of a copy instead of 0.71.
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
