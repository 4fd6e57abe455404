// Functions that all block codecs share, for the host (g++, clang) and for devices (NVRTC, hipRTC): no libc,
// no allocation, no exceptions, no host-only types.
//
// Build without -ffast-math and with contraction off (-ffp-contract=off, -fmad=false): the bytes of
// a codec must not depend on whether a machine has fused multiply-add.
#pragma once

#if defined(__CUDACC__) || defined(__HIP__)
#define HC_INLINE static __host__ __device__ __forceinline__
#define HC_INLINE_MEMBER __host__ __device__ __forceinline__
#else
#define HC_INLINE static inline __attribute__((always_inline))
#define HC_INLINE_MEMBER inline __attribute__((always_inline))
#endif

namespace hybridcomp {

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef int i32;

HC_INLINE u64 ceil_div(u64 a, u64 b) { return (a + b - 1) / b; }
HC_INLINE u64 align16(u64 nbytes) { return (nbytes + 15) & ~15ull; }

HC_INLINE u32 float_bits(float value) {
#ifdef __CUDA_ARCH__
    return __float_as_uint(value);
#else
    u32 bits;
    __builtin_memcpy(&bits, &value, 4);
    return bits;
#endif
}

HC_INLINE float bits_float(u32 bits) {
#ifdef __CUDA_ARCH__
    return __uint_as_float(bits);
#else
    float value;
    __builtin_memcpy(&value, &bits, 4);
    return value;
#endif
}

// Returns the position of the highest bit of a nonzero word.
HC_INLINE u32 log2_floor(u32 word) {
#ifdef __CUDA_ARCH__
    return 31 - (u32)__clz((int)word);
#else
    return 31 - (u32)__builtin_clz(word);
#endif
}

HC_INLINE u64 reverse_bytes(u64 word) {
#ifdef __CUDA_ARCH__
    u32 low = (u32)word, high = (u32)(word >> 32);
    return (u64)__byte_perm(low, 0, 0x0123) << 32 | __byte_perm(high, 0, 0x0123);
#else
    return __builtin_bswap64(word);
#endif
}

// Magnitudes are compared as integers: fmax drops NaN, and integers order NaN > Inf > finite.
constexpr u32 MAGNITUDE = 0x7fffffffu;
constexpr u32 INF_BITS = 0x7f800000u;
constexpr u32 MAX_FINITE_BITS = 0x7f7fffffu;
constexpr u32 QUIET_NAN_BITS = 0x7fc00000u;

HC_INLINE u32 magnitude_bits(float value) { return float_bits(value) & MAGNITUDE; }

// Finite overflow becomes the largest finite magnitude; meant for products of finite numbers,
// where an Inf can only be an overflow. NaN stays.
HC_INLINE float finite(float value) {
    u32 bits = float_bits(value);
    u32 magnitude = bits & MAGNITUDE;
    return bits_float(magnitude == INF_BITS ? (bits & ~MAGNITUDE) | MAX_FINITE_BITS : bits);
}

// Rounds a nonnegative number down to a float.
HC_INLINE float rounded_down(double exact) {
    float found = (float)exact;
    return (double)found > exact ? bits_float(float_bits(found) - 1) : found;
}

// 16-bit floats. Narrowing rounds to nearest even and saturates finite overflow, so that only a
// NaN or an Inf becomes non-finite.

HC_INLINE float bf16_to_float(u16 half) { return bits_float((u32)half << 16); }

// Magnitudes are below 2^31, and signed comparisons are what AVX2 has.
HC_INLINE i32 smaller(i32 a, i32 b) { return a < b ? a : b; }

HC_INLINE u32 pair(u16 low, u16 high) { return (u32)low | (u32)high << 16; }

HC_INLINE u16 float_to_bf16(float value) {
    u32 bits = float_bits(value);
    i32 magnitude = (i32)(bits & MAGNITUDE);
    i32 rounded = (i32)(((u32)magnitude + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
    rounded = smaller(rounded, 0x7f7f + (magnitude >= (i32)INF_BITS));
    i32 quiet = (magnitude > (i32)INF_BITS) << 6;
    return (u16)(((bits >> 16) & 0x8000u) | (u32)rounded | (u32)quiet);
}

HC_INLINE float fp16_to_float(u16 half) {
    u32 sign = ((u32)half & 0x8000u) << 16;
    i32 magnitude = half & 0x7fff;
    // subnormals go through an integer conversion: exact, and immune to flush-to-zero modes
    u32 tiny = float_bits((float)magnitude * 5.9604644775390625e-8f);
    u32 normal = ((u32)magnitude << 13) + (magnitude >= 0x7c00 ? 0x70000000u : 0x38000000u);
    return bits_float(sign | (magnitude < 0x400 ? tiny : normal));
}

HC_INLINE u16 float_to_fp16(float value) {
    u32 bits = float_bits(value);
    i32 magnitude = (i32)(bits & MAGNITUDE);
    // below 2^-14: adding 0.5 aligns the mantissa to units of 2^-24 and rounds to nearest even
    i32 tiny = (i32)float_bits(bits_float((u32)magnitude) + 0.5f) - 0x3f000000;
    i32 normal = (magnitude - 0x38000000 + 0xfff + (i32)((bits >> 13) & 1u)) >> 13;
    normal = smaller(normal, 0x7bff + (magnitude >= (i32)INF_BITS));
    i32 quiet = (magnitude > (i32)INF_BITS) << 9;
    i32 rounded = magnitude < 0x38800000 ? tiny : normal | quiet;
    return (u16)(((bits >> 16) & 0x8000u) | (u32)rounded);
}

}  // namespace hybridcomp
