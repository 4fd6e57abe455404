// Eight 32-bit lanes, in the vector extensions that g++ and clang share: AVX2 where there is, two or
// more narrower vectors elsewhere. CPU loops only; the codec headers stay plain C++.
#pragma once

#include "portable.h"

// Nothing here is called across a library boundary, so how vectors are passed does not matter.
#pragma GCC diagnostic ignored "-Wpsabi"

namespace hybridcomp {

typedef u32 U8 __attribute__((vector_size(32)));
typedef i32 I8 __attribute__((vector_size(32)));
typedef float F8 __attribute__((vector_size(32)));
typedef u64 Q4 __attribute__((vector_size(32)));
typedef u32 U4 __attribute__((vector_size(16)));
typedef i32 I4 __attribute__((vector_size(16)));
typedef u16 H8 __attribute__((vector_size(16)));

template <class V>
HC_INLINE V load_lanes(const void* bytes) {
    V lanes;
    __builtin_memcpy(&lanes, bytes, sizeof lanes);
    return lanes;
}

template <class V>
HC_INLINE void store_lanes(V lanes, void* bytes) { __builtin_memcpy(bytes, &lanes, sizeof lanes); }

// Lanes and limit below 2^31.
HC_INLINE U8 smaller(U8 lanes, u32 limit) {
    U8 limits = (U8){} + limit;
    return (I8)lanes < (I8)limits ? lanes : limits;
}

// Whether every lane is zero.
HC_INLINE bool none(I8 lanes) {
    Q4 words = (Q4)lanes;
    return ((words[0] | words[1]) | (words[2] | words[3])) == 0;
}

HC_INLINE u32 largest_lane(I8 lanes) {
    I4 half = __builtin_shufflevector(lanes, lanes, 0, 1, 2, 3), other = __builtin_shufflevector(lanes, lanes, 4, 5, 6, 7);
    half = half > other ? half : other;
    other = __builtin_shufflevector(half, half, 2, 3, 0, 1);
    half = half > other ? half : other;
    return (u32)(half[0] > half[1] ? half[0] : half[1]);
}

// WIDTH words, repeated until eight lanes are full.
template <int WIDTH>
HC_INLINE U8 repeat(const void* words) {
    if constexpr (WIDTH == 4) {
        U4 half = load_lanes<U4>(words);
        return __builtin_shufflevector(half, half, 0, 1, 2, 3, 0, 1, 2, 3);
    } else if constexpr (WIDTH == 2) {
        u64 pair = load_lanes<u64>(words);
        return (U8)Q4{pair, pair, pair, pair};
    } else {
        u32 word = load_lanes<u32>(words);
        return U8{word, word, word, word, word, word, word, word};
    }
}

// The WIDTH words that are the OR of each WIDTH-th lane.
template <int WIDTH>
HC_INLINE void fold(U8 lanes, void* words) {
    U4 half = __builtin_shufflevector(lanes, lanes, 0, 1, 2, 3) |
              __builtin_shufflevector(lanes, lanes, 4, 5, 6, 7);
    if constexpr (WIDTH == 4) {
        store_lanes(half, words);
    } else if constexpr (WIDTH == 2) {
        store_lanes((u64)(half[0] | half[2]) | (u64)(half[1] | half[3]) << 32, words);
    } else {
        store_lanes(half[0] | half[1] | half[2] | half[3], words);
    }
}

// How far lane k is shifted in a field of WIDTH bits: lane k is word k / WIDTH of its repetition.
template <int WIDTH>
HC_INLINE U8 field_shifts() {
    if constexpr (WIDTH == 4) return U8{0, 0, 0, 0, 4, 4, 4, 4};
    if constexpr (WIDTH == 2) return U8{0, 0, 2, 2, 4, 4, 6, 6};
    return U8{0, 1, 2, 3, 4, 5, 6, 7};
}

// One stage of mpc::transpose for eight pairs of words: swaps bit B of the word index with bit B of
// the bit index, and writes the pairs one after the other.
template <int B>
HC_INLINE void transpose_lanes(U8 a, U8 b, U8& first, U8& second) {
    constexpr u32 masks[5] = {0x55555555u, 0x33333333u, 0x0f0f0f0fu, 0x00ff00ffu, 0x0000ffffu};
    U8 t = ((a >> (1 << B)) ^ b) & masks[B];
    a ^= t << (1 << B), b ^= t;
    first = __builtin_shufflevector(a, b, 0, 8, 1, 9, 2, 10, 3, 11);
    second = __builtin_shufflevector(a, b, 4, 12, 5, 13, 6, 14, 7, 15);
}

template <int B>
HC_INLINE void transpose_stage_lanes(U8* v) {
    U8 w[4];
    transpose_lanes<B>(v[0], v[2], w[0], w[1]);
    transpose_lanes<B>(v[1], v[3], w[2], w[3]);
    v[0] = w[0], v[1] = w[1], v[2] = w[2], v[3] = w[3];
}

// float_to_bf16 and float_to_fp16 of eight lanes. Left to itself, g++ narrows every intermediate
// and takes twice as long. A vector comparison is -1 where it holds.

HC_INLINE H8 lanes_to_bf16(F8 values) {
    U8 bits = (U8)values;
    I8 magnitude = (I8)(bits & MAGNITUDE);
    I8 rounded = (I8)(((bits & MAGNITUDE) + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
    I8 limit = 0x7f7f - (magnitude > (i32)MAX_FINITE_BITS);
    rounded = rounded < limit ? rounded : limit;
    I8 quiet = (magnitude > (i32)INF_BITS) & 0x40;
    return __builtin_convertvector(((bits >> 16) & 0x8000u) | (U8)(rounded | quiet), H8);
}

HC_INLINE H8 lanes_to_fp16(F8 values) {
    U8 bits = (U8)values;
    I8 magnitude = (I8)(bits & MAGNITUDE);
    I8 tiny = (I8)((F8)magnitude + 0.5f) - 0x3f000000;
    // unsigned: the compiler may add in any order, and of a NaN that would overflow
    I8 normal = (I8)((U8)magnitude - 0x38000000u + 0xfffu + ((bits >> 13) & 1u)) >> 13;
    I8 limit = 0x7bff - (magnitude > (i32)MAX_FINITE_BITS);
    normal = normal < limit ? normal : limit;
    normal |= (magnitude > (i32)INF_BITS) & 0x200;
    I8 rounded = magnitude < 0x38800000 ? tiny : normal;
    return __builtin_convertvector(((bits >> 16) & 0x8000u) | (U8)rounded, H8);
}

}  // namespace hybridcomp
