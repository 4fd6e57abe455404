// fp8: e4m3 (largest 448, no Inf) and e5m2 (largest 57344) under one fp32 scale per block of 4096.
//
// Format of a message of n values, nb = ceil(n / 4096):
//   values   n bytes, zeros up to a multiple of 4
//   absmax   nb floats: the largest finite magnitude of each block, at least 2^-90
//   zeros up to a multiple of 16 bytes
// A value is round_to_even(x * (largest / absmax)), so finite values never overflow; it decodes to
// value * (absmax / largest), clamped to the largest float. A NaN or Inf becomes the NaN 0x7f | sign.
//   e4m3: |decoded - value| <= 1.0001 / 28 * max(absmax, 2^-90);  e5m2: 1.0001 / 14
// The narrowing of bf16 and fp16 is in portable.h.
#pragma once

#include "portable.h"

namespace hybridcomp {
namespace fp8 {

constexpr int BLOCK = 4096;
constexpr u32 NAN_CODE = 0x7f;
constexpr float MIN_ABSMAX = 8.0779356694631608874e-28f;  // 2^-90: subnormal inputs round to zero

struct E4M3 {
    static constexpr int mantissa = 3, bias = 7;
    static constexpr float largest = 448.0f;
    static constexpr u32 first_nan = 0x7f;
};
struct E5M2 {
    static constexpr int mantissa = 2, bias = 15;
    static constexpr float largest = 57344.0f;
    static constexpr u32 first_nan = 0x7c;
};

// Places of the parts of a message, in bytes.
struct Layout {
    u64 blocks, scales, used, total;
    HC_INLINE_MEMBER explicit Layout(u64 numel)
        : blocks(ceil_div(numel, BLOCK)), scales(ceil_div(numel, 4) * 4), used(scales + 4 * blocks),
          total(align16(used)) {}
};

template <class F>
HC_INLINE u8 narrow(float value, float inverse_scale) {
    u32 magnitude = magnitude_bits(value);
    u32 sign = (float_bits(value) >> 24) & 0x80u;
    u32 bits = magnitude_bits(value * inverse_scale);
    constexpr int shift = 23 - F::mantissa;
    constexpr u32 rebias = (u32)(127 - F::bias) << 23;
    // below the smallest normal: adding 2^(24 - bias - mantissa) rounds to units of the subnormals
    constexpr u32 aligner = (u32)(127 + 24 - F::bias - F::mantissa) << 23;
    u32 tiny = float_bits(bits_float(bits) + bits_float(aligner)) - aligner;
    u32 normal = (bits - rebias + ((1u << (shift - 1)) - 1) + ((bits >> shift) & 1u)) >> shift;
    u32 rounded = bits < rebias + 0x800000u ? tiny : normal;
    return (u8)(sign | (magnitude >= INF_BITS ? NAN_CODE : rounded));
}

template <class F>
HC_INLINE float widen(u8 stored, float scale) {
    u32 magnitude = stored & 0x7fu;
    u32 sign = ((u32)stored & 0x80u) << 24;
    constexpr u32 unit = (u32)(127 + 1 - F::bias - F::mantissa) << 23;
    float tiny = (float)(i32)magnitude * bits_float(unit);
    u32 normal = (magnitude << (23 - F::mantissa)) + ((u32)(127 - F::bias) << 23);
    u32 bits = magnitude < (1u << F::mantissa) ? float_bits(tiny) : normal;
    float value = finite(bits_float(sign | bits) * scale);
    return magnitude >= F::first_nan ? bits_float(sign | QUIET_NAN_BITS) : value;
}

}  // namespace fp8
}  // namespace hybridcomp
