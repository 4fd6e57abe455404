// The 16 values of a block in the registers of a thread, those of 16 bits two to a register.
#pragma once

#include "cuda_tiles.h"
#include "packed.h"

#include "radix.h"

namespace hybridcomp {
namespace radix {

// What is different for bf16 and fp16: two values of a register at a time. `narrow` is for numbers;
// signs of `largest` mean nothing.
struct PairsBf16 {
    typedef BFloat16 T;
    static constexpr int MANTISSA = 7, LOWEST = 1;
    HC_INLINE float low(u32 both) { return bits_float(both << 16); }
    HC_INLINE float high(u32 both) { return bits_float(both & 0xffff0000u); }
    HC_INLINE u32 narrow(float low, float high) { return narrow_bf16(low, high); }
    HC_INLINE u32 largest(u32 a, u32 b) { return larger_pair_bf16(a, b); }
    HC_INLINE u32 difference(u32 a, u32 b) { return difference_bf16(a, b); }
    HC_INLINE u32 magnitude(u32 half) { return NarrowBf16::magnitude(half); }
};

struct PairsFp16 {
    typedef Float16 T;
    static constexpr int MANTISSA = 10, LOWEST = 113;
    HC_INLINE float low(u32 both) { return widen_fp16(both & 0xffffu); }
    HC_INLINE float high(u32 both) { return widen_fp16(both >> 16); }
    HC_INLINE u32 narrow(float low, float high) { return narrow_fp16(low, high); }
    HC_INLINE u32 largest(u32 a, u32 b) { return larger_pair_fp16(a, b); }
    HC_INLINE u32 difference(u32 a, u32 b) { return difference_fp16(a, b); }
    HC_INLINE u32 magnitude(u32 half) { return NarrowFp16::magnitude(half); }
};

// The 16 values of a block, as they are stored.
template <class P>
struct Narrow16 {
    typedef P Pairs;
    typedef u16 Stored;
    static constexpr bool NARROW = true;
    static constexpr u32 RAW_BITS = 16;
    static constexpr u32 AT_ONCE = 5;
    u32 pairs[8];

    HC_INLINE_MEMBER void load(const u16* at, u32 left, bool vectors) {
        if (vectors && left >= BLOCK) {
            uint4 a = load16(at), b = load16(at + 8);
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
        return P::magnitude(larger(top & 0x7fffu, top >> 16 & 0x7fffu));
    }
    HC_INLINE float load_one(u16 stored) { return P::T::load(stored); }
    HC_INLINE u32 bits_of(u16 stored) { return stored; }
};

struct Fp32Block {
    typedef float Stored;
    static constexpr bool NARROW = false;
    static constexpr u32 RAW_BITS = 32;
    static constexpr u32 AT_ONCE = 4;
    float values[BLOCK];

    HC_INLINE_MEMBER void load(const float* at, u32 left, bool vectors) {
        if (vectors && left >= BLOCK) {
#pragma unroll
            for (int q = 0; q < 4; ++q) {
                uint4 v = load16(at + 4 * q);
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
        float top = larger_magnitude(values[0], values[1]);
#pragma unroll
        for (int i = 2; i < BLOCK; ++i) top = larger_magnitude(top, values[i]);
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
        if (magnitude < INF_BITS) top = larger(top, magnitude);
    }
    return top;
}

}  // namespace radix
}  // namespace hybridcomp
