// Functions of radix's CUDA kernels beyond radix.h: tables, the step of a segment computed by a warp, and
// classes without a search.
#pragma once

#include "radix_values.h"

namespace hybridcomp {
namespace radix {

// A class for the decoder, in 16 bytes, with all reciprocals.
struct alignas(16) Entry {
    u32 levels;  // and `shift` of Class << 24
    u32 divisor, multiplier, inverse;
};
struct Entries {
    Entry of[RAW + 1];
};

HC_INLINE constexpr Entries make_entries() {
    Entries entries = {};
    for (u32 c = 0; c < RAW; ++c) {
        Class cls = make_class(c);
        entries.of[c].levels = cls.levels | cls.shift << 24;
        entries.of[c].divisor = cls.divisor;
        entries.of[c].multiplier = cls.multiplier;
        entries.of[c].inverse = small_inverse(cls.levels);
    }
    return entries;
}

__device__ const Entries ENTRIES = make_entries();

HC_INLINE u32 levels_of(u32 cls) { return ENTRIES.of[cls].levels & 0xffffffu; }

// rounded_limit of radix.h, a spacing a lane.
template <class B>
HC_INLINE float half_of(float limit, u32 absmax) {
    if constexpr (!B::NARROW) {
        return limit;
    } else {
        constexpr i32 MANTISSA = B::Pairs::MANTISSA, LOWEST = B::Pairs::LOWEST;
        constexpr i32 END = LOWEST > MANTISSA ? LOWEST : MANTISSA + 1;
        u32 half = float_bits(limit);  // positive floats are in the order of their bits
        for (i32 e = (i32)(absmax >> 23) - (i32)lane_id();; e -= WARP) {
            bool some = e >= END;
            i32 scale = (some ? e : END) - MANTISSA;
            float unit = bits_float((u32)scale << 23);
            some = some && limit < 4096.0f * unit;
            // a power of two: as if divided
            float whole = some ? limit * bits_float((u32)(254 - scale) << 23) : 0.0f;
            float edge = ((float)(u32)whole + 0.5f) * unit;
            u32 found = some && float_bits(edge) < half ? float_bits(edge) : half;
            half = ~largest_in_warp(~found);
            if (ballot(some) != FULL_WARP) return bits_float(half);
        }
    }
}

HC_INLINE float limit_of(float bound, bool relative, u32 absmax) {
    return relative ? product_down(bound, bits_float(absmax)) : bound;
}

// Whether rounding in fp32 cannot raise an error to E: then decoded values need not be compared.
// With A = absmax, H = step / 2 is at most E - A 2^-22, off by 2^-24 of itself; x * inverse is off by
// 2^-23 of x / step, q * step by 2^-24 of itself. So an error is at most
//   H + A (2^-23 + 2^-24) + E 2^-23 <= E - A 2^-24 + E 2^-23,
// which for E <= A / 4 stays below E - E 2^-24: it cannot round to E either.
HC_INLINE bool is_safe(const Step& made, float half, u32 absmax) {
    float margin = bits_float(absmax) * 2.384185791015625e-7f;
    return made.limit * 4.0f <= bits_float(absmax) && half - margin > half * 0.5f &&
           made.step >= MIN_STEP;
}

// Coding of a block. `width`: bits of a word.
struct Coded {
    u32 cls, width;
};

// class_of and class_bits of radix.h: L digits share a word of as many bits as L^4, L^2 or L have.
template <class B>
HC_INLINE Coded coded_of(u32 level) {
    u32 n = 2 * level + 1, power = n * n;
    bool quads = level < 128, pairs = level < 32768;
    power = quads ? power * power : pairs ? power : n;
    u32 bits = 32 - leading_zeros(power);
    u32 least = quads ? 7 : 17;
    bits = bits < least ? least : bits;
    u32 cls = bits + (pairs ? FIRST_PAIR : FIRST_SINGLE) - 17;
    if (quads) cls = bits < 12 ? (bits > 7 ? 1 : 0) : bits - 10;
    return Coded{cls <= last_class(B::RAW_BITS) ? cls : RAW, bits};
}

// class_bits of radix.h, and the bits of all words of a block, without branches.
HC_INLINE u32 width_of(u32 cls, u32 raw_bits) {
    u32 bits = cls >= FIRST_PAIR ? cls - (FIRST_PAIR - 17) : cls + 10;
    bits = cls >= FIRST_SINGLE ? cls - (FIRST_SINGLE - 17) : bits;
    bits = cls < 2 ? 3 * cls + 7 : bits;
    return cls == RAW ? raw_bits : bits;
}
HC_INLINE u32 size_of(u32 cls, u32 width) {
    return width << (2 + (cls >= FIRST_PAIR ? 1 : 0) + (cls >= FIRST_SINGLE ? 1 : 0));
}

}  // namespace radix
}  // namespace hybridcomp
