// What the CUDA kernels of radix have beside radix.h: 16 values of a thread, the step of a segment worked
// out by a warp, and classes without a search.
#pragma once

#include "cuda_tiles.h"

#include "radix.h"

#ifndef HC_ARCH
#ifdef __CUDA_ARCH__
#define HC_ARCH __CUDA_ARCH__
#else
#define HC_ARCH 0
#endif
#endif

namespace hybridcomp {
namespace radix {

// What decoding has to know of a class, in 16 bytes: all reciprocals are at hand.
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

HC_INLINE u32 greater(u32 a, u32 b) { return a > b ? a : b; }

HC_INLINE u32 greatest_in_warp(u32 value) {
#if HC_ARCH >= 800
    return __reduce_max_sync(FULL_WARP, value);
#else
    return largest_of<1, 2, 4, 8, 16>(value);
#endif
}

HC_INLINE u32 union_in_warp(u32 value) {
#if HC_ARCH >= 800
    return __reduce_or_sync(FULL_WARP, value);
#else
    return union_of<1, 2, 4, 8, 16>(value);
#endif
}

// The larger magnitude; a NaN is larger than all numbers, and comes out as some NaN.
HC_INLINE float greater_magnitude(float a, float b) {
#if HC_ARCH >= 800
    float found;
    asm("{.reg .f32 x, y; abs.f32 x, %1; abs.f32 y, %2; max.NaN.f32 %0, x, y;}"
        : "=f"(found) : "f"(a), "f"(b));
    return found;
#else
    return bits_float(greater(magnitude_bits(a), magnitude_bits(b)));
#endif
}

// 16 bytes of values each.
HC_INLINE uint4 quad_at(const void* at) { return *(const uint4*)at; }

// What is different for bf16 and fp16: two values of a register at a time. `narrow` is for numbers;
// signs of `largest` mean nothing.
struct PairsBf16 {
    typedef BFloat16 T;
    static constexpr int MANTISSA = 7, LOWEST = 1;
    HC_INLINE float low(u32 both) { return bits_float(both << 16); }
    HC_INLINE float high(u32 both) { return bits_float(both & 0xffff0000u); }
    HC_INLINE u32 narrow(float low, float high) {
#if HC_ARCH >= 800
        u32 both;
        asm("cvt.rn.satfinite.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
        return both;
#else
        return pair(float_to_bf16(low), float_to_bf16(high));
#endif
    }
    HC_INLINE u32 largest(u32 a, u32 b) {
#if HC_ARCH >= 860
        u32 found;
        asm("max.NaN.xorsign.abs.bf16x2 %0, %1, %2;" : "=r"(found) : "r"(a), "r"(b));
        return found;
#else
        u32 x = a & 0x7fff7fffu, y = b & 0x7fff7fffu;
        return greater(x & 0xffffu, y & 0xffffu) | greater(x & 0xffff0000u, y & 0xffff0000u);
#endif
    }
    HC_INLINE u32 difference(u32 a, u32 b) {
#if HC_ARCH >= 800
        u32 found;
        asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(found) : "r"(b), "r"(0xbf80bf80u), "r"(a));
        return found;
#else
        return narrow(low(a) - low(b), high(a) - high(b));
#endif
    }
    HC_INLINE u32 magnitude(u32 half) { return half << 16; }
};

struct PairsFp16 {
    typedef Float16 T;
    static constexpr int MANTISSA = 10, LOWEST = 113;
    HC_INLINE float widen(u32 half) {
#if HC_ARCH >= 530
        float value;
        asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"((u16)half));
        return value;
#else
        return fp16_to_float((u16)half);
#endif
    }
    HC_INLINE float low(u32 both) { return widen(both & 0xffffu); }
    HC_INLINE float high(u32 both) { return widen(both >> 16); }
    HC_INLINE u32 narrow(float low, float high) {
#if HC_ARCH >= 800
        u32 both;
        asm("cvt.rn.satfinite.f16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
        return both;
#else
        return pair(float_to_fp16(low), float_to_fp16(high));
#endif
    }
    HC_INLINE u32 largest(u32 a, u32 b) {
#if HC_ARCH >= 860
        u32 found;
        asm("max.NaN.xorsign.abs.f16x2 %0, %1, %2;" : "=r"(found) : "r"(a), "r"(b));
        return found;
#else
        u32 x = a & 0x7fff7fffu, y = b & 0x7fff7fffu;
        return greater(x & 0xffffu, y & 0xffffu) | greater(x & 0xffff0000u, y & 0xffff0000u);
#endif
    }
    HC_INLINE u32 difference(u32 a, u32 b) {
#if HC_ARCH >= 530
        u32 found;
        asm("sub.rn.f16x2 %0, %1, %2;" : "=r"(found) : "r"(a), "r"(b));
        return found;
#else
        return narrow(low(a) - low(b), high(a) - high(b));
#endif
    }
    HC_INLINE u32 magnitude(u32 half) { return half > 0x7c00 ? QUIET_NAN_BITS : float_bits(widen(half)); }
};

// The 16 values of a block, as they are stored.
template <class P>
struct Narrow16 {
    typedef P Pairs;
    typedef u16 Stored;
    static constexpr bool NARROW = true;
    static constexpr u32 RAW_BITS = 16;
    u32 pairs[8];

    HC_INLINE_MEMBER void load(const u16* at, u32 left, bool vectors) {
        if (vectors && left >= BLOCK) {
            uint4 a = quad_at(at), b = quad_at(at + 8);
            pairs[0] = a.x, pairs[1] = a.y, pairs[2] = a.z, pairs[3] = a.w;
            pairs[4] = b.x, pairs[5] = b.y, pairs[6] = b.z, pairs[7] = b.w;
            return;
        }
#pragma unroll
        for (u32 m = 0; m < 8; ++m) {
            pairs[m] = pair(2 * m < left ? at[2 * m] : 0, 2 * m + 1 < left ? at[2 * m + 1] : 0);
        }
    }
    HC_INLINE_MEMBER float value(int i) const { return i & 1 ? P::high(pairs[i / 2]) : P::low(pairs[i / 2]); }
    // As bits of a float; from INF_BITS on if there is an Inf or a NaN.
    HC_INLINE_MEMBER u32 absmax() const {
        u32 top = P::largest(pairs[0], pairs[1]);
#pragma unroll
        for (int m = 2; m < 8; ++m) top = P::largest(top, pairs[m]);
        return P::magnitude(greater(top & 0x7fffu, top >> 16 & 0x7fffu));
    }
    HC_INLINE float load_one(u16 stored) { return P::T::load(stored); }
    HC_INLINE u32 bits_of(u16 stored) { return stored; }
};

struct Fp32Block {
    typedef float Stored;
    static constexpr bool NARROW = false;
    static constexpr u32 RAW_BITS = 32;
    float values[BLOCK];

    HC_INLINE_MEMBER void load(const float* at, u32 left, bool vectors) {
        if (vectors && left >= BLOCK) {
#pragma unroll
            for (int q = 0; q < 4; ++q) {
                uint4 v = quad_at(at + 4 * q);
                values[4 * q] = bits_float(v.x), values[4 * q + 1] = bits_float(v.y);
                values[4 * q + 2] = bits_float(v.z), values[4 * q + 3] = bits_float(v.w);
            }
            return;
        }
#pragma unroll
        for (u32 i = 0; i < BLOCK; ++i) values[i] = i < left ? at[i] : 0.0f;
    }
    HC_INLINE_MEMBER float value(int i) const { return values[i]; }
    HC_INLINE_MEMBER u32 absmax() const {
        float top = greater_magnitude(values[0], values[1]);
#pragma unroll
        for (int i = 2; i < BLOCK; ++i) top = greater_magnitude(top, values[i]);
        return magnitude_bits(top);
    }
    HC_INLINE float load_one(float stored) { return stored; }
    HC_INLINE u32 bits_of(float stored) { return float_bits(stored); }
};
typedef Narrow16<PairsBf16> Bf16Block;
typedef Narrow16<PairsFp16> Fp16Block;

// The largest finite magnitude of a block that has an Inf or a NaN.
template <class B>
HC_INLINE u32 finite_top(const B& block) {
    u32 top = 0;
#pragma unroll
    for (int i = 0; i < BLOCK; ++i) {
        u32 magnitude = magnitude_bits(block.value(i));
        if (magnitude < INF_BITS) top = greater(top, magnitude);
    }
    return top;
}

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
            float edge = ((float)(u32)(some ? limit * bits_float((u32)(254 - scale) << 23) : 0.0f) + 0.5f) * unit;
            u32 found = some && float_bits(edge) < half ? float_bits(edge) : half;
            half = ~greatest_in_warp(~found);
            if (__ballot_sync(FULL_WARP, some) != FULL_WARP) return bits_float(half);
        }
    }
}

HC_INLINE float limit_of(float bound, bool relative, u32 absmax) {
#if HC_ARCH
    return relative ? __fmul_rd(bound, bits_float(absmax)) : bound;
#else
    return error_limit(bound, relative, absmax);
#endif
}

// Whether arithmetic in fp32 cannot carry an error to E or beyond: no comparison is needed then. With
// A = absmax and H = step / 2 <= E - A 2^-22 rounded, x * inverse is off by 2^-23 of x / step, q * step
// by 2^-24 of it, so the error is at most H + 1.5 A 2^-23 + E 2^-23 or so, which is below E - E 2^-24
// for E <= A / 4; E - E 2^-24 is what the difference may round to at most.
HC_INLINE bool is_safe(const Step& made, float half, u32 absmax) {
    float margin = bits_float(absmax) * 2.384185791015625e-7f;
    return made.limit * 4.0f <= bits_float(absmax) && half - margin > half * 0.5f && made.step >= MIN_STEP;
}

// What a block is coded as. `width`: bits of a word.
struct Coded {
    u32 cls, width;
};

// class_of and class_bits of radix.h: L digits share a word of as many bits as L^4, L^2 or L have.
template <class B>
HC_INLINE Coded coded_of(u32 level) {
    u32 n = 2 * level + 1, power = n * n;
    bool quads = level < 128, pairs = level < 32768;
    power = quads ? power * power : pairs ? power : n;
    u32 bits = 32 - (u32)__clz((int)power);
    u32 least = quads ? 7 : 17;
    bits = bits < least ? least : bits;
    u32 cls = quads ? (bits < 12 ? (bits > 7 ? 1 : 0) : bits - 10) : pairs ? bits + (FIRST_PAIR - 17) : bits + (FIRST_SINGLE - 17);
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
