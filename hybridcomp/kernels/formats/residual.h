// Residuals of error feedback in 8, 4 or 16 bits a value, for blocks of 32 values.
//
// 8 and 4 bits: levels -qmax..qmax, qmax = 2^(bits-1) - 1, and a step for each block, two arrays:
//   levels   bits words of 32 bits a block, two's complement. 8 bits: byte b of word k is value k + 8 b.
//            4 bits: byte b of word k is value k + 8 b in its lower half and value k + 8 b + 4 in the upper
//   steps    2 bytes a block: the exponent and the upper 8 bits of the mantissa of the step
// The step is absmax / qmax of the block, rounded up to 9 significant bits, at least 2^-126.
//   |kept - value| <= 0.5001 step, and step <= 1.004 absmax / qmax
// A block that is read and written again stays as it is: qmax * step is exact, the division gives the step
// back, and the largest value is always at level qmax, as 127 / (1 + 2^-8) > 126.5. So a checkpoint, or a
// neighbour in the same block, changes nothing. A block of zero bytes is zeros.
// 16 bits: the values as bf16, without steps.
// NaN and Inf are kept as 0.
#pragma once

#include "portable.h"

namespace hybridcomp {
namespace residual {

constexpr int BLOCK = 32;
constexpr int STEP_SHIFT = 15;  // sign, exponent and 8 bits of 23 stay
constexpr u32 MIN_STEP = 0x00800000u >> STEP_SHIFT;
constexpr float ROUNDING = 12582912.0f;  // 1.5 * 2^23: its last byte becomes the rounded level

HC_INLINE constexpr int top_level(int bits) { return (1 << (bits - 1)) - 1; }

// Largest step of which top_level is finite.
HC_INLINE constexpr u32 max_step(int bits) { return bits == 8 ? 0xf802u : 0xfc24u; }

// `absmax`: bits of the largest magnitude of a block, finite.
template <int BITS>
HC_INLINE u32 step_code(u32 absmax) {
    float step = bits_float(absmax) / (float)top_level(BITS);
    u32 code = (float_bits(step) + ((1u << STEP_SHIFT) - 1)) >> STEP_SHIFT;
    code = code < MIN_STEP ? MIN_STEP : code;
    return code > max_step(BITS) ? max_step(BITS) : code;
}

HC_INLINE float step_of(u32 code) { return bits_float(code << STEP_SHIFT); }

// Returns the error of a sent value, or 0 if that is not finite: an overflow must not persist.
HC_INLINE float left_out(float value, float sent) {
    float left = value - sent;
    return magnitude_bits(left) < INF_BITS ? left : 0.0f;
}

// The level in the lowest bits, the others undefined.
HC_INLINE u32 level_of(float value, float inverse) { return float_bits(value * inverse + ROUNDING); }

}  // namespace residual
}  // namespace hybridcomp
