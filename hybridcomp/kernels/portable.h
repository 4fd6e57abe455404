// What every block codec shares. Compiles for the host (g++, clang) and for a device (nvcc, NVRTC):
// no libc, no allocation, no exceptions, no host-only types.
//
// Build without -ffast-math and with contraction off (-ffp-contract=off, -fmad=false): the bytes of
// a codec must not depend on whether a machine has fused multiply-add.
#pragma once

#ifdef __CUDACC__
#define HC_INLINE __host__ __device__ __forceinline__
#else
#define HC_INLINE static inline __attribute__((always_inline))
#endif

namespace hybridcomp {

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef int i32;

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

// 16-bit floats. Narrowing rounds to nearest even and saturates finite overflow, so that only a
// NaN or an Inf becomes non-finite.

HC_INLINE float bf16_to_float(u16 half) { return bits_float((u32)half << 16); }

HC_INLINE u16 float_to_bf16(float value) {
    u32 bits = float_bits(value);
    u32 magnitude = bits & MAGNITUDE;
    u32 sign = (bits >> 16) & 0x8000u;
    u32 rounded = (magnitude + 0x7fffu + ((magnitude >> 16) & 1u)) >> 16;
    rounded = rounded > 0x7f7fu ? 0x7f7fu : rounded;
    rounded = magnitude >= INF_BITS ? (magnitude > INF_BITS ? 0x7fc0u : 0x7f80u) : rounded;
    return (u16)(sign | rounded);
}

HC_INLINE float fp16_to_float(u16 half) {
    u32 sign = ((u32)half & 0x8000u) << 16;
    u32 magnitude = (u32)half & 0x7fffu;
    // subnormals go through an integer conversion: exact, and immune to flush-to-zero modes
    u32 tiny = float_bits((float)(i32)magnitude * 5.9604644775390625e-8f);
    u32 normal = (magnitude << 13) + 0x38000000u;
    normal += magnitude >= 0x7c00u ? 0x38000000u : 0u;
    return bits_float(sign | (magnitude < 0x400u ? tiny : normal));
}

HC_INLINE u16 float_to_fp16(float value) {
    u32 bits = float_bits(value);
    u32 magnitude = bits & MAGNITUDE;
    u32 sign = (bits >> 16) & 0x8000u;
    // below 2^-14: adding 0.5 aligns the mantissa to units of 2^-24 and rounds to nearest even
    u32 tiny = float_bits(bits_float(magnitude) + 0.5f) - 0x3f000000u;
    u32 normal = (magnitude - 0x38000000u + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
    normal = normal > 0x7bffu ? 0x7bffu : normal;
    u32 rounded = magnitude < 0x38800000u ? tiny : normal;
    rounded = magnitude >= INF_BITS ? (magnitude > INF_BITS ? 0x7e00u : 0x7c00u) : rounded;
    return (u16)(sign | rounded);
}

}  // namespace hybridcomp
