// The 16 values of a block in the registers of a thread, those of 16 bits two to a register. What the
// hardware does with one instruction has a fallback that gives the same bits, for the emulator and
// for Turing.
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
    HC_INLINE u32 magnitude(u32 half) {
        return half > 0x7c00 ? QUIET_NAN_BITS : float_bits(widen(half));
    }
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
    HC_INLINE_MEMBER float value(int i) const {
        return i & 1 ? P::high(pairs[i / 2]) : P::low(pairs[i / 2]);
    }
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

}  // namespace radix
}  // namespace hybridcomp
