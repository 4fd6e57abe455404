// radix, encode: a segment's header, mask and planes, by HC_TILE_WARPS warps.
#pragma once

#include "radix_words.h"

#ifndef HC_TILE_WARPS
#define HC_TILE_WARPS 4
#endif

namespace hybridcomp {
namespace radix {

constexpr u32 TILE_WARPS = HC_TILE_WARPS;
constexpr u32 TILE_THREADS = TILE_WARPS * WARP;
constexpr u32 EACH = MAX_BLOCKS / TILE_THREADS;  // blocks of a thread, one behind the other
static_assert(EACH == 1 || EACH == 2 || EACH == 4, "planes are put together for these");

// What all threads of a segment know of it.
struct Head {
    u32 base, span, present, mask_bytes, planes, plane_bytes, bytes, words;
    bool mixed;
};

// `classes`: a bit for each class that there is; `sums`: bits + 2^20 * blocks that are not zero.
HC_INLINE Head make_head(u32 low, u32 high, u32 sums, u32 blocks) {
    constexpr u32 RAW_BIT = 1u << (RAW - 32);
    Head head;
    u32 coded = high & ~RAW_BIT;
    bool some = (low | coded) != 0;
    u32 top = coded ? 63 - leading_zeros(coded) : 31 - leading_zeros(low | 1);
    u32 base = low ? lowest_bit(low) : 32 + lowest_bit(coded ? coded : 1);
    head.base = some ? base : RAW, head.span = some ? top - base : 0;
    head.mixed = some && (high & RAW_BIT) != 0;
    head.present = sums >> 20;
    head.mask_bytes = head.present < blocks ? (blocks + 7) / 8 : 0;
    head.planes = 32 - leading_zeros(head.span + head.mixed);
    head.plane_bytes = (head.present + 7) / 8;
    head.bytes = TILE_HEADER_BYTES + head.mask_bytes + head.planes * head.plane_bytes;
    head.words = head.present ? (8 * head.bytes + (sums & 0xfffff) + 31) / 32 : 0;
    return head;
}

// Every EACH-th bit: bit i goes to bit EACH * i.
HC_INLINE u32 spread(u32 bits) {
    if (EACH == 2) {
        bits = (bits | bits << 8) & 0x00ff00ffu;
        bits = (bits | bits << 4) & 0x0f0f0f0fu;
        bits = (bits | bits << 2) & 0x33333333u;
        bits = (bits | bits << 1) & 0x55555555u;
    } else if (EACH == 4) {
        bits = (bits | bits << 12) & 0x000f000fu;
        bits = (bits | bits << 6) & 0x03030303u;
        bits = (bits | bits << 3) & 0x11111111u;
    }
    return bits;
}

// A bit of each of a warp's blocks, in `rows` rows that are `stride` bits apart. Bit `at` is that of
// the warp's first block. Lane EACH * r + part has a word of row r.
HC_INLINE void put_rows(const u32* fields, u32 rows, u32 at, u32 stride, u32* buffer) {
    constexpr u32 LANES = WARP / EACH;  // of a word
    u32 lane = lane_id(), part = lane % EACH, word = 0;
    u32 mine[EACH];
#pragma unroll
    for (u32 k = 0; k < EACH; ++k) mine[k] = 0;
    for (u32 r = 0; r < rows; ++r) {
#pragma unroll
        for (u32 k = 0; k < EACH; ++k) {
            u32 found = ballot(fields[k] >> r & 1);
            mine[k] = lane / EACH == r ? found : mine[k];
        }
    }
#pragma unroll
    for (u32 k = 0; k < EACH; ++k) {
        u32 bits = EACH == 1 ? mine[k] : mine[k] >> (part * LANES % 32) & ((1u << LANES % 32) - 1);
        word |= spread(bits) << k;
    }
    if (word) put_word(buffer, at + lane / EACH * stride + 32 * part, word);
}

// Header, mask and planes. `b`: the thread of the segment; `index`: of its first block among those
// that are not zero.
HC_INLINE void put_head(const Head& head, float step, const Chosen* chosen, u32 b, u32 index,
                        u32* buffer) {
    u32 fields[EACH], at = 8 * TILE_HEADER_BYTES, first = b / WARP * WARP * EACH;
    if (b == 0) {
        buffer[0] = float_bits(step);
        u32 flags = (head.mask_bytes ? ZEROS : 0) | (head.mixed ? RAWS : 0);
        buffer[1] = head.base | head.span << 8 | flags << 16;
    }
    if (head.mask_bytes) {
#pragma unroll
        for (u32 k = 0; k < EACH; ++k) fields[k] = chosen[k].cls() <= RAW;
        put_rows(fields, 1, at + first, 0, buffer);
        at += 8 * head.mask_bytes;
    }
#pragma unroll
    for (u32 k = 0; k < EACH; ++k) {
        u32 cls = chosen[k].cls();
        fields[k] = cls < RAW ? cls - head.base : cls == RAW && head.mixed ? head.span + 1 : 0;
    }
    if (!head.mask_bytes) {
        put_rows(fields, head.planes, at + first, 8 * head.plane_bytes, buffer);
        return;
    }
#pragma unroll
    for (u32 k = 0; k < EACH; ++k) {
        if (chosen[k].cls() > RAW) continue;
        for (u32 plane = 0; fields[k] >> plane; ++plane) {
            u32 bit = at + plane * 8 * head.plane_bytes + index;
            if (fields[k] >> plane & 1) atomicOr(buffer + bit / 32, 1u << bit % 32);
        }
        ++index;
    }
}

}  // namespace radix
}  // namespace hybridcomp
