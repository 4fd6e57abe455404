// expcode: the lanes that share a block pack and unpack its levels.
#pragma once

#include "expcode_quads.h"

namespace hybridcomp {
namespace expcode {

// Reads and writes 4-byte words at any byte; in nearly all tiles they are aligned.
template <bool WHOLE>
HC_INLINE void put_word_at(u8* bytes, u32 word) {
    if constexpr (WHOLE) {
        *(u32*)bytes = word;
    } else {
        for (u32 i = 0; i < 4; ++i) bytes[i] = (u8)(word >> (8 * i));
    }
}

template <bool WHOLE>
HC_INLINE u32 get_word_at(const u8* bytes) {
    if constexpr (WHOLE) return *(const u32*)bytes;
    u32 word = 0;
    for (u32 i = 0; i < 4; ++i) word |= (u32)bytes[i] << (8 * i);
    return word;
}

// The field of WIDTH bits at SHIFT of a level, moved up by `UP`.
template <int WIDTH, int SHIFT, int UP>
HC_INLINE u32 moved_field(u32 level) {
    constexpr u32 mask = ((1u << WIDTH) - 1) * EACH_BYTE << UP;
    if constexpr (UP >= SHIFT) return level << (UP - SHIFT) & mask;
    else return level >> (SHIFT - UP) & mask;
}

// Packs a block's levels of BITS bits; called by its two lanes.
template <int BITS, bool WHOLE>
HC_INLINE void put_levels(const u32 (&levels)[4], u32 half, bool there, u8* out) {
    if constexpr (BITS == 8) {
#pragma unroll
        for (int q = 0; q < 4; ++q) {
            if (there) put_word_at<WHOLE>(out + 16 * half + 4 * q, levels[q]);
        }
        return;
    }
    if constexpr ((BITS & 4) != 0) {
        u32 x[4];
#pragma unroll
        for (int q = 0; q < 4; ++q) x[q] = moved_field<4, BITS & 3, 0>(levels[q]) << (4 * half);
        // lane 0 puts words 0 and 1, lane 1 puts 2 and 3
        u32 first = other_lane<1>(half ? x[0] : x[2]) | (half ? x[2] : x[0]);
        u32 second = other_lane<1>(half ? x[1] : x[3]) | (half ? x[3] : x[1]);
        if (there) {
            put_word_at<WHOLE>(out + 8 * half, first);
            put_word_at<WHOLE>(out + 8 * half + 4, second);
        }
        out += 16;
    }
    if constexpr ((BITS & 2) != 0) {
        u32 x = moved_field<2, BITS & 1, 0>(levels[0]) | moved_field<2, BITS & 1, 2>(levels[2]);
        u32 y = moved_field<2, BITS & 1, 0>(levels[1]) | moved_field<2, BITS & 1, 2>(levels[3]);
        x <<= 4 * half, y <<= 4 * half;
        u32 word = other_lane<1>(half ? x : y) | (half ? y : x);
        if (there) put_word_at<WHOLE>(out + 4 * half, word);
        out += 8;
    }
    if constexpr ((BITS & 1) != 0) {
        u32 word = moved_field<1, 0, 0>(levels[0]) | moved_field<1, 0, 1>(levels[1]) |
                   moved_field<1, 0, 2>(levels[2]) | moved_field<1, 0, 3>(levels[3]);
        word <<= 4 * half;
        word |= other_lane<1>(word);
        if (there && half == 0) put_word_at<WHOLE>(out, word);
    }
}

// Packs a block's levels; called by its four lanes.
template <int BITS, bool WHOLE>
HC_INLINE void put_levels(const u32 (&levels)[2], u32 part, bool there, u8* out) {
    bool upper = part & 2, odd = part & 1;
    if constexpr (BITS == 8) {
        if (there) {
            put_word_at<WHOLE>(out + 8 * part, levels[0]);
            put_word_at<WHOLE>(out + 8 * part + 4, levels[1]);
        }
        return;
    }
    if constexpr ((BITS & 4) != 0) {
        u32 x = moved_field<4, BITS & 3, 0>(levels[0]) << (upper ? 4 : 0);
        u32 y = moved_field<4, BITS & 3, 0>(levels[1]) << (upper ? 4 : 0);
        u32 word = other_lane<2>(upper ? x : y) | (upper ? y : x);
        if (there) put_word_at<WHOLE>(out + 8 * (part & 1) + (upper ? 4 : 0), word);
        out += 16;
    }
    if constexpr ((BITS & 2) != 0) {
        u32 x = moved_field<2, BITS & 1, 0>(levels[0]) << (2 * part);
        u32 y = moved_field<2, BITS & 1, 0>(levels[1]) << (2 * part);
        u32 word = other_lane<1>(odd ? x : y) | (odd ? y : x);
        word |= other_lane<2>(word);
        if (there && !upper) put_word_at<WHOLE>(out + 4 * part, word);
        out += 8;
    }
    if constexpr ((BITS & 1) != 0) {
        u32 word = (moved_field<1, 0, 0>(levels[0]) | moved_field<1, 0, 1>(levels[1])) << (2 * part);
        word = union_of<1, 2>(word);
        if (there && part == 0) put_word_at<WHOLE>(out, word);
    }
}

// Unpacks this lane's words of levels.
template <int BITS, bool WHOLE>
HC_INLINE void get_levels(u32 (&levels)[4], u32 half, const u8* in) {
#pragma unroll
    for (int q = 0; q < 4; ++q) levels[q] = 0;
    if constexpr (BITS == 8) {
#pragma unroll
        for (int q = 0; q < 4; ++q) levels[q] = get_word_at<WHOLE>(in + 16 * half + 4 * q);
        return;
    }
    if constexpr ((BITS & 4) != 0) {
#pragma unroll
        for (int q = 0; q < 4; ++q) {
            levels[q] = (get_word_at<WHOLE>(in + 4 * q) >> (4 * half) & (15 * EACH_BYTE)) << (BITS & 3);
        }
        in += 16;
    }
    if constexpr ((BITS & 2) != 0) {
        u32 x = get_word_at<WHOLE>(in) >> (4 * half), y = get_word_at<WHOLE>(in + 4) >> (4 * half);
        constexpr int shift = BITS & 1;
        levels[0] |= (x & 3 * EACH_BYTE) << shift, levels[1] |= (y & 3 * EACH_BYTE) << shift;
        levels[2] |= (x >> 2 & 3 * EACH_BYTE) << shift, levels[3] |= (y >> 2 & 3 * EACH_BYTE) << shift;
        in += 8;
    }
    if constexpr ((BITS & 1) != 0) {
        u32 x = get_word_at<WHOLE>(in) >> (4 * half);
#pragma unroll
        for (int q = 0; q < 4; ++q) levels[q] |= x >> q & EACH_BYTE;
    }
}

template <int BITS, bool WHOLE>
HC_INLINE void get_levels(u32 (&levels)[2], u32 part, const u8* in) {
    levels[0] = levels[1] = 0;
    if constexpr (BITS == 8) {
        levels[0] = get_word_at<WHOLE>(in + 8 * part), levels[1] = get_word_at<WHOLE>(in + 8 * part + 4);
        return;
    }
    if constexpr ((BITS & 4) != 0) {
        u32 up = part & 2 ? 4 : 0;
        levels[0] = (get_word_at<WHOLE>(in + 8 * (part & 1)) >> up & (15 * EACH_BYTE)) << (BITS & 3);
        levels[1] = (get_word_at<WHOLE>(in + 8 * (part & 1) + 4) >> up & (15 * EACH_BYTE)) << (BITS & 3);
        in += 16;
    }
    if constexpr ((BITS & 2) != 0) {
        levels[0] |= (get_word_at<WHOLE>(in) >> (2 * part) & 3 * EACH_BYTE) << (BITS & 1);
        levels[1] |= (get_word_at<WHOLE>(in + 4) >> (2 * part) & 3 * EACH_BYTE) << (BITS & 1);
        in += 8;
    }
    if constexpr ((BITS & 1) != 0) {
        u32 x = get_word_at<WHOLE>(in) >> (2 * part);
        levels[0] |= x & EACH_BYTE, levels[1] |= x >> 1 & EACH_BYTE;
    }
}

}  // namespace expcode
}  // namespace hybridcomp
