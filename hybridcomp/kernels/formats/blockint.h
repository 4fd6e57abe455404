// blockint: symmetric integers of 2..8 bits under one 8-bit logarithmic scale per block of 32.
//
// Format of a message of n values, nb = ceil(n / 32) blocks, nt = ceil(n / 1024) tiles:
//   levels   nb * 4 * bits bytes   packed levels, 4 * bits bytes a block
//   scales   nb bytes              scale code of each block
//   bases    nt bytes              exponent that the scale codes of a tile count down from
//   zeros up to a multiple of 16 bytes
// The last block is filled up with zeros (+0.0).
//
// Scale. T, the top of a block, is its absmax rounded up to a float with a 4-bit mantissa; as an
// integer, top = ceil(bits(absmax) / 2^19), sixteen steps an octave. The base E of a tile is the
// exponent byte of the largest top among its finite blocks, at least MIN_BASE, and
// scale code = 16 E + 15 - top, limited to 253: about fifteen octaves below the tile's absmax. The
// step is T / qmax, qmax = 2^(bits-1) - 1; a block below the range takes the smallest step there is.
// This costs on average 2 % of T over an exact scale, as a table of 1/16 octaves would, without
// the table and without a pass over the message.
//   |decoded - value| <= 0.5001 / qmax * max(17/16 A, 1.125 * 2^-110), A the absmax of the tile
// T may be 2^128, so T / 2 is what is computed with; decoding then clamps to the largest float.
// Code 255: the block held a NaN or Inf; its levels are zero bytes and it decodes to NaN.
//
// Gaussian levels (4 bits only): sixteen levels where values of a Gaussian block gather, instead of
// fifteen evenly spaced ones. Level L = 0..15 stands for j = 2 L - 15 and decodes to
// T * j * (0.04768 + 6.594e-5 j^2), within 0.4 % of the error of the optimal (Lloyd) levels; the
// encoder inverts that by a polynomial, 0.1 % worse than the nearest level. No level is zero, so code
// 254 is a block of zeros. |decoded - value| <= 0.0925 max(17/16 A, 1.125 * 2^-110).
//
// Rotated (2..4 bits): every whole group of 64 values goes through rotation.h first and comes back
// through it last; values after the last whole group stay as they are. Bounds, with A the absmax of
// the tile's values: the rotated values are at most A, and the squares of a group's sum up to at most
// A^2, so errors of e_b in each value of block b become errors of at most
// 8 sqrt(32 sum of e_b^2) <= sqrt(2048) e, e the bound of an encoding without rotation.
//
// Levels. u = round_to_even(x * inv) + 2^(bits-1), never 0. Rounded at random (dither.h; not with
// Gaussian levels) it is the level below or above x, and bounds hold with 1.0001 in place of 0.5001.
// Eight little-endian words hold the levels of a block: byte b of word k is u of value k + 8 b. The
// width is split into fields of 4, 2 and 1 bits, from the top of u down; 8 bits are the eight words
// as they are. A field of w bits takes w words: word j holds, from the lowest bit of each byte up, the
// fields of words j, j + w, j + 2w, ...
// So packing is shifts of whole 32-bit lanes, eight on AVX2, one on a GPU, and never a byte shuffle.
#pragma once

#include "dither.h"
#include "portable.h"

namespace hybridcomp {
namespace blockint {

constexpr int BLOCK = 32;
constexpr int TILE_BLOCKS = 32;
constexpr int TILE = BLOCK * TILE_BLOCKS;
constexpr u32 MIN_BASE = 32;           // smallest T is 1.125 * 2^-110: inverse steps stay finite
constexpr u32 LAST_CODE = 253;
constexpr u32 ZERO_CODE = 254;         // Gaussian levels only
constexpr u32 NONFINITE_CODE = 255;
constexpr u32 OVERFLOW_TOP = 0xff0;    // T = 2^128: decoding needs the clamp

HC_INLINE constexpr int top_level(int bits) { return (1 << (bits - 1)) - 1; }

HC_INLINE u32 absmax_bits(const float* values) {
    u32 largest = 0;
    for (int i = 0; i < BLOCK; ++i) {
        u32 magnitude = magnitude_bits(values[i]);
        largest = magnitude > largest ? magnitude : largest;
    }
    return largest;
}

HC_INLINE u32 top_of(u32 absmax) { return (absmax + 0x7ffffu) >> 19; }

// `absmax`: bits of the largest finite magnitude among the finite blocks of the tile.
HC_INLINE u32 base_of(u32 absmax) {
    u32 base = top_of(absmax) >> 4;
    return base < MIN_BASE ? MIN_BASE : base;
}

template <bool GAUSSIAN>
HC_INLINE u32 scale_code(u32 absmax, u32 base) {
    u32 code = 16 * base + 15 - top_of(absmax);
    code = code > LAST_CODE ? LAST_CODE : code;
    if (GAUSSIAN) code = absmax == 0 ? ZERO_CODE : code;
    return absmax >= INF_BITS ? NONFINITE_CODE : code;
}

HC_INLINE float half_top(u32 code, u32 base) {
    return bits_float(((16 * base + 15 - code) << 19) - 0x800000u);
}

// What values are multiplied with before quantize; Gaussian levels are relative to T itself.
template <int BITS, bool GAUSSIAN>
HC_INLINE float inverse_step(u32 code, u32 base) {
    return (GAUSSIAN ? 0.5f : 0.5f * (float)top_level(BITS)) / half_top(code, base);
}

template <int BITS, bool GAUSSIAN>
HC_INLINE float step_of(u32 code, u32 base) {
    float step = half_top(code, base) * (GAUSSIAN ? 2.0f : 2.0f / (float)top_level(BITS));
    if (GAUSSIAN) step = code == ZERO_CODE ? 0.0f : step;
    return code == NONFINITE_CODE ? bits_float(QUIET_NAN_BITS) : step;
}

// Gaussian levels, for floats and for lanes of them.
template <class F>
HC_INLINE F gaussian_value(F j) { return j * (j * j * 6.594e-5f + 0.04768f); }

// Half-open cells: the level is round_to_even(cell - 1/2) + 8. `scaled` is at most 1.
template <class F>
HC_INLINE F gaussian_cell(F scaled) {
    F square = scaled * scaled;
    return scaled * ((square * 2.1503f - 4.5472f) * square + 10.3521f);
}

constexpr int WORDS = BLOCK / 4;

template <int WIDTH>
HC_INLINE constexpr u32 field_mask() { return ((1u << WIDTH) - 1) * 0x01010101u; }

// Field of WIDTH bits at SHIFT of all levels -> WIDTH words.
template <int WIDTH, int SHIFT>
HC_INLINE void pack_field(const u32* levels, u32* out) {
    for (int j = 0; j < WIDTH; ++j) {
        u32 word = 0;
        for (int i = 0; i < WORDS / WIDTH; ++i) {
            word |= ((levels[j + WIDTH * i] >> SHIFT) & field_mask<WIDTH>()) << (WIDTH * i);
        }
        out[j] = word;
    }
}

template <int WIDTH, int SHIFT>
HC_INLINE void unpack_field(const u32* in, u32* levels) {
    for (int i = 0; i < WORDS / WIDTH; ++i) {
        for (int j = 0; j < WIDTH; ++j) {
            levels[j + WIDTH * i] |= ((in[j] >> (WIDTH * i)) & field_mask<WIDTH>()) << SHIFT;
        }
    }
}

// Eight words of levels <-> BITS words.
template <int BITS>
HC_INLINE void pack_levels(const u32* levels, u32* out) {
    if constexpr (BITS == 8) {
        for (int i = 0; i < WORDS; ++i) out[i] = levels[i];
    }
    if constexpr ((BITS & 4) != 0) pack_field<4, BITS & 3>(levels, out);
    if constexpr ((BITS & 2) != 0) pack_field<2, BITS & 1>(levels, out + (BITS & 4));
    if constexpr ((BITS & 1) != 0) pack_field<1, 0>(levels, out + (BITS & 6));
}

template <int BITS>
HC_INLINE void unpack_levels(const u32* in, u32* levels) {
    for (int i = 0; i < WORDS; ++i) levels[i] = BITS == 8 ? in[i] : 0;
    if constexpr ((BITS & 4) != 0) unpack_field<4, BITS & 3>(in, levels);
    if constexpr ((BITS & 2) != 0) unpack_field<2, BITS & 1>(in + (BITS & 4), levels);
    if constexpr ((BITS & 1) != 0) unpack_field<1, 0>(in + (BITS & 6), levels);
}

// Finite blocks only. Adding 1.5 * 2^23 + bias leaves the rounded level in the low byte; the bias is
// even, so ties still go to the even level.
// `at`: the value's index in the message.
template <int BITS, bool GAUSSIAN, bool RANDOM>
HC_INLINE u32 quantize(float value, float inverse, u32 at) {
    constexpr float offset = (float)(1 << (BITS - 1));
    float scaled = value * inverse;
    if (RANDOM) {
        u32 random = dither::random_bits(float_bits(value), dither::seed_of(at, inverse));
        return dither::level_of(float_bits(scaled + (dither::MAGIC + offset)), random) & 255u;
    }
    if (GAUSSIAN) scaled = gaussian_cell(scaled) - 0.5f;
    return float_bits(scaled + (12582912.0f + offset)) & 255u;
}

template <int BITS, bool GAUSSIAN, bool RANDOM>
HC_INLINE void quantize_block(const float* values, float inverse, u32 first, u32* levels) {
    for (int k = 0; k < WORDS; ++k) {
        levels[k] = 0;
        for (int i = k; i < BLOCK; i += WORDS) {
            levels[k] |= quantize<BITS, GAUSSIAN, RANDOM>(values[i], inverse, first + i) << (i & ~7);
        }
    }
}

template <int BITS, bool GAUSSIAN>
HC_INLINE float dequantize(u32 level, float step) {
    if (GAUSSIAN) return gaussian_value((float)(2 * (i32)level - 15)) * step;
    return (float)((i32)level - (1 << (BITS - 1))) * step;
}

template <int BITS, bool GAUSSIAN>
HC_INLINE void dequantize_block(const u32* levels, float step, float* values) {
    for (int b = 0; b < 4; ++b) {
        for (int k = 0; k < WORDS; ++k) {
            values[k + 8 * b] = dequantize<BITS, GAUSSIAN>((levels[k] >> (8 * b)) & 255u, step);
        }
    }
}

// 32 values from index `first` on -> BITS words, given the block's scale code and its tile's base.
template <int BITS, bool GAUSSIAN, bool RANDOM>
HC_INLINE void encode_block(const float* values, u32 first, u32 code, u32 base, u32* out) {
    if (code == NONFINITE_CODE) {
        for (int i = 0; i < BITS; ++i) out[i] = 0;
        return;
    }
    u32 levels[WORDS];
    float inverse = inverse_step<BITS, GAUSSIAN>(code, base);
    quantize_block<BITS, GAUSSIAN, RANDOM>(values, inverse, first, levels);
    pack_levels<BITS>(levels, out);
}

template <int BITS, bool GAUSSIAN>
HC_INLINE void decode_block(const u32* in, u32 code, u32 base, float* values) {
    u32 levels[WORDS];
    unpack_levels<BITS>(in, levels);
    float step = step_of<BITS, GAUSSIAN>(code, base);
    bool overflow = 16 * base + 15 - code >= OVERFLOW_TOP && code != NONFINITE_CODE;
    // at 2 bits, and with Gaussian levels, the step itself is 2^128
    if (overflow) step = half_top(code, base) * (GAUSSIAN ? 1.0f : 1.0f / (float)top_level(BITS));
    dequantize_block<BITS, GAUSSIAN>(levels, step, values);
    if (overflow) {
        for (int i = 0; i < BLOCK; ++i) values[i] = finite(values[i] * 2.0f);
    }
}

}  // namespace blockint
}  // namespace hybridcomp
