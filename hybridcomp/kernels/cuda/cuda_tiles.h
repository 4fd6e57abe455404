// Messages of variable size on a GPU, in one pass: the length of a tile depends on its values, and each block
// of threads computes where its tile begins from the lengths that earlier blocks have published (decoupled
// look-back, Merrill and Garland 2016). Payloads have the same bytes as the CPU's.
#pragma once

#include "cuda_device.h"

namespace hybridcomp {

// Workspace of a call, zero before it starts: a ticket, then a word for each tile.
struct Workspace {
    u64 ticket;
    u64 states[1];
};
constexpr u64 AGGREGATE = 1ull << 32, PREFIX = 2ull << 32;

// Blocks start in any order. A block takes the tile of its ticket, so a block that waits for an earlier tile
// waits for a block that already runs.
HC_INLINE u32 take_ticket(Workspace* work) {
    __shared__ u32 ticket;
    if (threadIdx.x == 0) ticket = (u32)atomicAdd(&work->ticket, 1ull);
    __syncthreads();
    return ticket;
}

HC_INLINE u32 sum_of_lanes(u32 value) {
    value += other_lane<1>(value);
    value += other_lane<2>(value);
    value += other_lane<4>(value);
    value += other_lane<8>(value);
    return value + other_lane<16>(value);
}

// Sum of `value` over the lanes up to this one.
HC_INLINE u32 scan_lanes(u32 value) {
#pragma unroll
    for (u32 step = 1; step < WARP; step *= 2) value = plus_lane_before(value, step);
    return value;
}

// Publishes the length of this tile for later ones; called by one thread.
HC_INLINE void announce(u64* states, u32 tile, u32 mine) {
    publish(states + tile, (tile ? AGGREGATE : PREFIX) | mine);
}

// Returns the sum of all tiles before `tile`, which was announced; called by a whole warp.
HC_INLINE u32 sum_of_tiles(u64* states, u32 tile, u32 mine) {
    u32 lane = lane_id(), total = 0;
    for (u32 end = tile; end > 0;) {
        u64 state = PREFIX;
        if (lane < end) {
            do state = load_state(states + end - 1 - lane);
            while ((state >> 32) == 0);
        }
        u32 whole = ballot((state >> 32) == 2);
        u32 nearest = whole & (0u - whole);  // the lane of the nearest prefix, as a bit
        bool counts = whole == 0 || (1u << lane) <= nearest;
        total += counts ? (u32)state : 0;
        end = whole || end < WARP ? 0 : end - WARP;
    }
    total = sum_of_lanes(total);
    if (lane == 0 && tile) publish(states + tile, PREFIX | (u64)(total + mine));
    return total;
}

// Announces `mine`, the length of this tile, and returns the sum before it.
HC_INLINE u32 look_back(u64* states, u32 tile, u32 mine) {
    if (lane_id() == 0) announce(states, tile, mine);
    return sum_of_tiles(states, tile, mine);
}

// Writes `count` bits, at most 32, into zeroed words that several threads write.
HC_INLINE void put_word(u32* words, u32 position, u32 bits) {
    u32 shift = position % 32;
    atomicOr(words + position / 32, bits << shift);
    u32 carry = (bits >> 1) >> (31 - shift);
    if (carry) atomicOr(words + position / 32 + 1, carry);
}

// Reports that no encoder can have written a payload. The flag stays set until the host reads it.
HC_INLINE void report_damage(u32* damage) {
    if (threadIdx.x == 0) atomicOr(damage, 1u);
}

// Writes the header of kernels/cpu/shares.h, the zeros after the last tile, and the bytes of the whole payload
// to `size`; called by the block of the last tile.
HC_INLINE void finish_message(u8* out, u64 data, u32 magic, u32 version, u32 dtype, u32 mode,
                              u64 numel, u32 tile, u32 bound, u32 length, u64 tail, u64* size) {
    u64 used = data + (u64)length * 4, nbytes = align16(used + tail);
    if (threadIdx.x == 0) {
        u32* words = (u32*)out;
        words[0] = magic, words[1] = version | dtype << 8 | mode << 16;
        words[2] = (u32)numel, words[3] = (u32)(numel >> 32);
        words[4] = tile, words[5] = bound, words[6] = length, words[7] = 0;
        *size = nbytes;
    }
    for (u64 at = used + threadIdx.x; at < nbytes; at += blockDim.x) out[at] = 0;
}

}  // namespace hybridcomp
