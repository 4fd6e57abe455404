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
// Lloyd levels (4 bits only): fifteen levels, of which one is zero, where the rest of a Gaussian block
// gathers, and the better of two scales. Level L = 1..15 stands for k = L - 8 and decodes to
// T' * k * (0.10026 + 7.925e-4 k^2), within 0.5 % of the error of the optimal levels; T' is T or the
// next top below it, whose code is one more. The encoder rounds each value to an integer a of 127ths of T,
// adds up `lloyd_gain` of the magnitudes, which says within 0.5 % which of the two has less error,
// and takes the level next to a. |decoded - value| <= 0.1037 max(17/16 A, 1.125 * 2^-110): what is
// decoded depends on a, the mantissa of T and the choice alone, and a test goes through all of them, with
// the values at both ends of what is rounded to a.
//
// Rotated (2..4 bits): every whole group of 64 values goes through rotation.h first and comes back
// through it last; values after the last whole group stay as they are. Bounds, with A the absmax of
// the tile's values: the rotated values are at most A, and the squares of a group's sum up to at most
// A^2, so errors of e_b in each value of block b become errors of at most
// 8 sqrt(32 sum of e_b^2) <= sqrt(2048) e, e the bound of an encoding without rotation.
//
// Levels. u = round_to_even(x * inv) + 2^(bits-1), never 0. Rounded at random (dither.h; with
// uniform levels alone) it is the level below or above x, and bounds hold with 1.0001 in place of 0.5001.
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

// Places of the parts of a message, in bytes.
struct Layout {
    u64 blocks, tiles, scales, bases, used, total;
    HC_INLINE_MEMBER Layout(u64 numel, int bits)
        : blocks(ceil_div(numel, BLOCK)), tiles(ceil_div(numel, TILE)), scales(blocks * 4 * bits),
          bases(scales + blocks), used(bases + tiles), total(align16(used)) {}
    HC_INLINE_MEMBER u32 blocks_of(u64 tile) const {
        u64 left = blocks - tile * TILE_BLOCKS;
        return left < TILE_BLOCKS ? (u32)left : TILE_BLOCKS;
    }
};

// How the levels of a block are spaced.
enum class Spacing { uniform, gaussian, lloyd };

constexpr u32 MIN_BASE = 32;           // smallest T is 1.125 * 2^-110: inverse steps stay finite
constexpr u32 LAST_CODE = 253;
constexpr u32 ZERO_CODE = 254;         // Gaussian levels only
constexpr u32 NONFINITE_CODE = 255;
constexpr int FINE = 127;              // Lloyd levels only
constexpr float ROUNDING = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer
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

template <Spacing SPACING>
HC_INLINE u32 scale_code(u32 absmax, u32 base) {
    u32 code = 16 * base + 15 - top_of(absmax);
    code = code > LAST_CODE ? LAST_CODE : code;
    if (SPACING == Spacing::gaussian) code = absmax == 0 ? ZERO_CODE : code;
    return absmax >= INF_BITS ? NONFINITE_CODE : code;
}

HC_INLINE float half_top(u32 code, u32 base) {
    return bits_float(((16 * base + 15 - code) << 19) - 0x800000u);
}

// What values are multiplied with before quantize: a uniform level is a number of steps, a Gaussian one
// relative to T itself, and a Lloyd one to FINE parts of it.
template <int BITS, Spacing SPACING>
HC_INLINE float inverse_step(u32 code, u32 base) {
    constexpr float parts = SPACING == Spacing::uniform    ? (float)top_level(BITS)
                            : SPACING == Spacing::gaussian ? 1.0f
                                                           : (float)FINE;
    return 0.5f * parts / half_top(code, base);
}

template <int BITS, Spacing SPACING>
HC_INLINE float step_of(u32 code, u32 base) {
    float step = half_top(code, base) * (SPACING != Spacing::uniform ? 2.0f : 2.0f / (float)top_level(BITS));
    if (SPACING == Spacing::gaussian) step = code == ZERO_CODE ? 0.0f : step;
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

// Lloyd levels, for floats and for lanes of them: level 8 + k stands for k in -7..7.
template <class F>
HC_INLINE F lloyd_value(F k) { return k * (k * k * 7.925e-4f + 0.10026f); }

// The cell k of a value in -1..1, to be rounded.
template <class F>
HC_INLINE F lloyd_cell(F value) {
    F square = value * value;
    return value * ((square * 2.44921f - 4.88653f) * square + 9.74921f);
}

// A value as a whole number of 127ths of its block's T, -127..127.
HC_INLINE float lloyd_fine(float value, float inverse) {
    return (value * inverse + ROUNDING) - ROUNDING;
}

// 127ths of the first T -> shares of the one that was chosen: `lower` says that it is the next below.
HC_INLINE float lloyd_share(u32 code, u32 base, bool lower) {
    constexpr float part = 1.0f / (float)FINE;
    return lower ? half_top(code, base) / half_top(code + 1, base) * part : part;
}

// Into -1..1: cells stay within -7..7.
template <class F>
HC_INLINE F lloyd_clipped(F value) {
    F one = F() + 1.0f;
    value = value > one ? one : value;
    return value < -one ? -one : value;
}

// How much more squared error a value has under the first T than under the next below, by magnitude in
// 4 / 127 of T: means over Gaussian blocks and gradients, the largest 127. Eight to a word.
HC_INLINE constexpr u64 lloyd_gains(u32 eighth) {
    return eighth == 0   ? 0xf2010ffafe060200ull
           : eighth == 1 ? 0xd4f41524e3f70e0eull
           : eighth == 2 ? 0x21591ab8e00b3611ull
                         : 0xb8ea3a7f4f9ab2eaull;
}
HC_INLINE constexpr i32 lloyd_gain(u32 bin) { return (i32)(signed char)(lloyd_gains(bin / 8) >> (8 * (bin % 8))); }
HC_INLINE u32 lloyd_bin(float fine) {
    return float_bits(bits_float(magnitude_bits(fine)) + 8388608.0f) >> 2 & 31u;
}

// The code that a finite block is sent with, given that of its T: `gain` is the sum of its gains.
HC_INLINE u32 lloyd_code(u32 code, i32 gain) { return code + (u32)((gain > 0) & (code < LAST_CODE)); }

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
// `at`: the value's index in the message; `share`: of Lloyd levels.
template <int BITS, Spacing SPACING, bool RANDOM>
HC_INLINE u32 quantize(float value, float inverse, float share, u32 at) {
    constexpr float offset = (float)(1 << (BITS - 1));
    float scaled = value * inverse;
    if (RANDOM) {
        u32 random = dither::random_bits(float_bits(value), dither::seed_of(at, inverse));
        return dither::level_of(float_bits(scaled + (dither::MAGIC + offset)), random) & 255u;
    }
    if (SPACING == Spacing::gaussian) scaled = gaussian_cell(scaled) - 0.5f;
    if (SPACING == Spacing::lloyd) scaled = lloyd_cell(lloyd_clipped(lloyd_fine(value, inverse) * share));
    return float_bits(scaled + (ROUNDING + offset)) & 255u;
}

template <int BITS, Spacing SPACING, bool RANDOM>
HC_INLINE void quantize_block(const float* values, float inverse, float share, u32 first, u32* levels) {
    for (int k = 0; k < WORDS; ++k) {
        levels[k] = 0;
        for (int i = k; i < BLOCK; i += WORDS) {
            levels[k] |= quantize<BITS, SPACING, RANDOM>(values[i], inverse, share, first + i) << (i & ~7);
        }
    }
}

template <int BITS, Spacing SPACING>
HC_INLINE float dequantize(u32 level, float step) {
    if (SPACING == Spacing::gaussian) return gaussian_value((float)(2 * (i32)level - 15)) * step;
    if (SPACING == Spacing::lloyd) return lloyd_value((float)((i32)level - 8)) * step;
    return (float)((i32)level - (1 << (BITS - 1))) * step;
}

template <int BITS, Spacing SPACING>
HC_INLINE void dequantize_block(const u32* levels, float step, float* values) {
    for (int b = 0; b < 4; ++b) {
        for (int k = 0; k < WORDS; ++k) {
            values[k + 8 * b] = dequantize<BITS, SPACING>((levels[k] >> (8 * b)) & 255u, step);
        }
    }
}

// 32 values from index `first` on -> BITS words, given the code of the block's T and its tile's base;
// returns the code that they are sent with.
template <int BITS, Spacing SPACING, bool RANDOM>
HC_INLINE u32 encode_block(const float* values, u32 first, u32 code, u32 base, u32* out) {
    if (code == NONFINITE_CODE) {
        for (int i = 0; i < BITS; ++i) out[i] = 0;
        return code;
    }
    u32 levels[WORDS], sent = code;
    float inverse = inverse_step<BITS, SPACING>(code, base), share = 0.0f;
    if (SPACING == Spacing::lloyd) {
        i32 gain = 0;
        for (int i = 0; i < BLOCK; ++i) gain += lloyd_gain(lloyd_bin(lloyd_fine(values[i], inverse)));
        sent = lloyd_code(code, gain);
        share = lloyd_share(code, base, sent != code);
    }
    quantize_block<BITS, SPACING, RANDOM>(values, inverse, share, first, levels);
    pack_levels<BITS>(levels, out);
    return sent;
}

template <int BITS, Spacing SPACING>
HC_INLINE void decode_block(const u32* in, u32 code, u32 base, float* values) {
    u32 levels[WORDS];
    unpack_levels<BITS>(in, levels);
    float step = step_of<BITS, SPACING>(code, base);
    bool overflow = 16 * base + 15 - code >= OVERFLOW_TOP && code != NONFINITE_CODE;
    // at 2 bits, and with levels that are not uniform, the step itself is 2^128
    if (overflow) step = half_top(code, base) * (SPACING != Spacing::uniform ? 1.0f : 1.0f / (float)top_level(BITS));
    dequantize_block<BITS, SPACING>(levels, step, values);
    if (overflow) {
        for (int i = 0; i < BLOCK; ++i) values[i] = finite(values[i] * 2.0f);
    }
}

}  // namespace blockint
}  // namespace hybridcomp
