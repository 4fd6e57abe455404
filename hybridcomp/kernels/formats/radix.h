// radix: error-bounded, variable size. One step per segment; per block of 16 values a class, which is a
// number of levels L and how many base-L digits share a word.
//
// Format, little-endian, of a message of n values in segments of s values (the last one shorter):
//   0    u32   magic 0x58524348, the bytes "HCRX"
//   4    u8    version, 1
//   5    u8    dtype: 0 fp32, 1 bf16, 2 fp16
//   6    u8    mode: 0 bound relative to the segment's absmax, 1 absolute
//   7    u8    0
//   8    u64   n
//   16   u32   s, a multiple of 16 from 64 to 4096
//   20   f32   error bound
//   24   u32   length of all tiles in units of 4 bytes
//   28   u32   0
//   32   u32   for each segment: where its tile begins, in units of 4 bytes from the first tile
//   then the tiles, then at least 8 zero bytes up to a multiple of 16.
// n == 0 is no bytes at all. A tile, which may be empty (every block of it is zero):
//   0    f32   step
//   4    u8    base, the smallest class of the tile that is not raw (45: all are raw)
//   5    u8    span, largest such class - base
//   6    u8    flags: 1 some blocks are zero, 2 some blocks are raw (and some are not)
//   7    u8    0
//   8    only with flag 1: bit b % 8 of byte b / 8 says that block b is not zero
//   then W bit planes of ceil(k / 8) bytes over the k blocks that are not zero: bit i % 8 of byte
//   i / 8 of plane p is bit p of the i-th one's field; W = bits of (span + (flag 2 ? 1 : 0)); class =
//   base + field, a field above span is raw
//   then the words of these blocks, bit after bit without gaps, lowest first; zeros to 4 bytes.
//
// Classes. A block is a number of words of some bits each. Word j holds the digits of values j,
// j + words, j + 2 words, ..., the first in the lowest digit. A digit is q + (L - 1) / 2.
//   class        words  bits        L, the largest odd number that fits
//   0            4      7           3
//   1            4      10          5
//   2  .. 22     4      12 .. 32    7, 9, 11, 13, 15, 19, 21, ... 255
//   23 .. 38     8      17 .. 32    361, 511, ... 65535
//   39 .. 44     16     17 .. 22    2^bits - 1
//   45           16     16 or 32    raw: the values of the message's dtype themselves
// So a level costs steps of a quarter bit, and a class of four per octave costs 3 to 5 bits a block.
//
// Bound. E = bound * absmax of the finite values of the segment (relative) or bound, rounded down to
// fp32. A block whose absmax is at most E is zero. step = 2 H, H below E by what fp32 arithmetic may
// add; value q * step rounded to fp32. The encoder decodes and compares: a block in which
//   |decoded - value| < E
// does not hold for every value is raw, and so is one that holds a NaN or an Inf or needs more levels.
// For 16-bit messages the decoded value after rounding to the message's dtype has to pass as well, so
// the bound includes that rounding. To make this the rule, H then also stays below (k + 1/2) u for
// every spacing u of the dtype in the segment, k = floor(E / u): an error under it rounds to at most
// k u. Decoding a message to another 16-bit dtype than its own adds that dtype's rounding.
#pragma once

#include "portable.h"

namespace hybridcomp {
namespace radix {

constexpr int BLOCK = 16;
constexpr int MAX_TILE = 4096;
constexpr int MAX_BLOCKS = MAX_TILE / BLOCK;
constexpr u32 MAGIC = 0x58524348u;
constexpr u32 VERSION = 1;
constexpr int HEADER_BYTES = 32;
constexpr int TILE_HEADER_BYTES = 8;
constexpr int TAIL_BYTES = 8;  // readers load 8 bytes at any byte of a tile

constexpr u32 FIRST_PAIR = 23, FIRST_SINGLE = 39, RAW = 45;
constexpr u32 ZEROS = 1, RAWS = 2;  // flags of a tile
constexpr float MAX_LEVEL = 2097151.0f;
constexpr float ROUND = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer
constexpr u32 ROUND_BITS = 0x4b400000u;
constexpr float MIN_STEP = 7.52316384526264e-37f;  // 2^-120: its inverse and E are normal

HC_INLINE constexpr u32 class_words(u32 cls) {
    return cls < FIRST_PAIR ? 4 : (cls < FIRST_SINGLE ? 8 : 16);
}

// `raw_bits`: bits of the message's dtype.
HC_INLINE constexpr u32 class_bits(u32 cls, u32 raw_bits) {
    if (cls < 2) return 7 + 3 * cls;
    if (cls < FIRST_PAIR) return cls + 10;
    if (cls < FIRST_SINGLE) return cls - FIRST_PAIR + 17;
    return cls < RAW ? cls - FIRST_SINGLE + 17 : raw_bits;
}

// The largest odd L whose `digits`-th power is at most 2^bits, and at least 3.
HC_INLINE constexpr u32 class_levels(u32 cls) {
    u32 bits = class_bits(cls, 0);
    if (cls >= FIRST_SINGLE) return (1u << bits) - 1;
    u32 levels = 1;
    for (u32 bit = 1u << 16; bit >= 2; bit >>= 1) {
        u64 square = (u64)(levels + bit) * (levels + bit);
        if (cls >= FIRST_PAIR ? square <= (u64)1 << bits
                              : square <= 65536 && square * square <= (u64)1 << bits) {
            levels += bit;
        }
    }
    return levels;
}

// Classes that cost as much as raw are not used.
HC_INLINE constexpr u32 last_class(u32 raw_bits) { return raw_bits == 32 ? RAW - 1 : FIRST_SINGLE - 2; }

// x / D = (x * multiplier >> 32) >> shift for x < min(D * D, 2^32), D odd. For words of one digit
// there is nothing to divide.
struct Class {
    u32 words, levels, divisor, multiplier, shift;
};

HC_INLINE constexpr Class make_class(u32 cls) {
    Class made = {class_words(cls), cls < RAW ? class_levels(cls) : 0, 0, 0, 0};
    if (cls >= FIRST_SINGLE) return made;
    made.divisor = cls < FIRST_PAIR ? made.levels * made.levels : made.levels;
    u64 largest = (u64)made.divisor * made.divisor - 1;
    for (u32 shift = 0; shift < 16; ++shift) {
        u64 power = (u64)1 << (32 + shift);
        u64 multiplier = power / made.divisor + 1;
        if (largest * (multiplier * made.divisor - power) < power) {
            made.multiplier = (u32)multiplier;
            made.shift = shift;
            break;
        }
    }
    return made;
}

struct Tables {
    Class classes[RAW + 1];
    u8 of_level[128];  // class of a largest |q| up to 127
};

HC_INLINE constexpr Tables make_tables() {
    Tables tables = {};
    for (u32 c = 0; c <= RAW; ++c) tables.classes[c] = make_class(c);
    for (u32 level = 0, c = 0; level < 128; ++level) {
        if (tables.classes[c].levels < 2 * level + 1) ++c;
        tables.of_level[level] = (u8)c;
    }
    return tables;
}

// Class of a block whose largest |q| is `level`; classes above `last` cost as much as raw.
HC_INLINE u32 class_of(u32 level, u32 last, const Tables& tables) {
    if (level < 128) return tables.of_level[level];
    u32 c = FIRST_PAIR;
    while (c <= last && tables.classes[c].levels < 2 * level + 1) ++c;
    return c <= last ? c : RAW;
}

// Digits below 65536 are divided by L <= 255 with a multiplication of 32 bits: the product stays
// below 2^32 for x < L * L, and x times the error of the inverse below 2^24.
HC_INLINE constexpr u32 small_inverse(u32 levels) { return ((1u << 24) + levels - 1) / levels; }

HC_INLINE u32 bits_of(u32 number) {
    u32 bits = 0;
    for (; number; number >>= 1) ++bits;
    return bits;
}

// E, from the setting and the bits of the segment's largest finite magnitude.
HC_INLINE float error_limit(float bound, bool relative, u32 absmax) {
    if (!relative) return bound;
    return rounded_down((double)bound * (double)bits_float(absmax));
}

// The largest H for which an error below it stays within `limit` after rounding to a dtype of
// `mantissa` explicit bits and smallest exponent `lowest`. Spacings above 4096 u change nothing that
// the encoder's comparison could not catch cheaply.
HC_INLINE float rounded_limit(float limit, u32 absmax, int mantissa, i32 lowest) {
    float half = limit;
    for (i32 e = (i32)(absmax >> 23); e >= lowest && e > mantissa; --e) {
        float unit = bits_float((u32)(e - mantissa) << 23);
        if (!(limit < 4096.0f * unit)) break;
        float whole = (float)(u32)(limit / unit);
        float edge = (whole + 0.5f) * unit;
        half = edge < half ? edge : half;
    }
    return half;
}

struct Step {
    float limit, step, inverse;
};

// `half`: E, or what rounded_limit made of it.
HC_INLINE Step make_step(float limit, float half, u32 absmax) {
    // x * inverse, inverse and q * step are each off by 2^-24 of a value at most
    float margin = bits_float(absmax) * 2.384185791015625e-7f;
    float lower = half * 0.5f;
    half = half - margin > lower ? half - margin : lower;
    half = half < 8.5e37f ? half : 8.5e37f;
    Step made = {limit, 2.0f * half, 0.0f};
    made.inverse = made.step < MIN_STEP ? bits_float(INF_BITS) : 1.0f / made.step;
    return made;
}

// Largest |q| of a block, from the bits of its absmax; above MAX_LEVEL: raw. Inf and NaN are above.
HC_INLINE u32 top_level(u32 absmax, float inverse) {
    float scaled = bits_float(absmax) * inverse;
    scaled = scaled < MAX_LEVEL ? scaled : MAX_LEVEL + 1.0f;
    return float_bits(scaled + ROUND) - ROUND_BITS;
}

// Digits of 16 values of a class that is not raw. Returns the largest error, as bits of a float.
template <class T>
HC_INLINE u32 quantize(const float* values, Step step, u32 middle, u32* digits) {
    u32 worst = 0;
    for (int i = 0; i < BLOCK; ++i) {
        float rounded = values[i] * step.inverse + ROUND;
        digits[i] = float_bits(rounded) - ROUND_BITS + middle;
        float decoded = (rounded - ROUND) * step.step;
        u32 error = magnitude_bits(decoded - values[i]);
        worst = error > worst ? error : worst;
        if (T::NARROW) {
            error = magnitude_bits(T::load(T::store(decoded)) - values[i]);
            worst = error > worst ? error : worst;
        }
    }
    return worst;
}

HC_INLINE void pack_digits(const u32* digits, const Class& cls, u32* words) {
    u32 count = cls.words;
    for (u32 j = 0; j < count; ++j) {
        u32 word = 0;
        for (u32 i = BLOCK - count + j; i >= count; i -= count) word = (word + digits[i]) * cls.levels;
        words[j] = word + digits[j];
    }
}

HC_INLINE u32 divide(u32 number, const Class& cls) {
    return (u32)(((u64)number * cls.multiplier) >> 32) >> cls.shift;
}

// Words of a class that is not raw -> 16 digits. Words that no encoder wrote give wrong digits.
HC_INLINE void unpack_digits(const u32* words, const Class& cls, u32* digits) {
    if (cls.words == 4) {
        u32 inverse = small_inverse(cls.levels);
        for (int j = 0; j < 4; ++j) {
            u32 high = divide(words[j], cls), low = words[j] - high * cls.divisor;
            u32 third = (high * inverse) >> 24, first = (low * inverse) >> 24;
            digits[12 + j] = third;
            digits[8 + j] = high - third * cls.levels;
            digits[4 + j] = first;
            digits[j] = low - first * cls.levels;
        }
    } else if (cls.words == 8) {
        for (int j = 0; j < 8; ++j) {
            digits[8 + j] = divide(words[j], cls);
            digits[j] = words[j] - digits[8 + j] * cls.divisor;
        }
    } else {
        for (int j = 0; j < BLOCK; ++j) digits[j] = words[j];
    }
}

HC_INLINE float dequantize(u32 digit, u32 middle, float step) {
    return (float)(i32)(digit - middle) * step;
}

}  // namespace radix
}  // namespace hybridcomp
