// Walsh-Hadamard rotation of 64 values: spreads an outlier over the two blocks that hold it.
//
// Forward, before encoding: y = H D x / 64. Back, after decoding: x = D H y. H is the matrix of the
// transform in natural order, entries +-1 (H H = 64 I), D a diagonal of fixed signs (bit i of SIGNS
// set: value i is negated). Without D a mean, or any pattern of period 2^k, would gather in a few
// coefficients instead of spreading. Stage s = 0..5 replaces each pair (a, b), b 2^s behind a, by
// (a + b, a - b): one order of additions, so the same bits everywhere.
//
// Nothing overflows: a sum after s stages is at most 2^s / 64 of the largest magnitude, a float, and
// rounding is monotone. On the way back quantization may have added to the sums, so they run at
// 1/128 and the last step saturates. Every sum holds every value: a NaN or Inf reaches all 64.
#pragma once

#include "portable.h"

namespace hybridcomp {
namespace rotation {

constexpr int LENGTH = 64;
constexpr u64 SIGNS = 0x9e3779b97f4a7c15ull;  // 2^64 over the golden ratio: any flat pattern would do
constexpr float FORWARD_SCALE = 1.0f / 64;
constexpr float BACK_SCALE = 1.0f / 128;

HC_INLINE float with_sign(float value, int index) {
    return bits_float(float_bits(value) ^ ((u32)(SIGNS >> index) & 1u) << 31);
}

// Constant trip counts, so that a device keeps the values in registers.
template <int HALF>
HC_INLINE void stage(float* values) {
    for (int pair = 0; pair < LENGTH / 2; ++pair) {
        int first = pair / HALF * 2 * HALF + pair % HALF;
        float a = values[first], b = values[first + HALF];
        values[first] = a + b;
        values[first + HALF] = a - b;
    }
}

// H of the values, in place.
HC_INLINE void transform(float* values) {
    stage<1>(values), stage<2>(values), stage<4>(values);
    stage<8>(values), stage<16>(values), stage<32>(values);
}

HC_INLINE void forward(float* values) {
    for (int i = 0; i < LENGTH; ++i) values[i] = with_sign(values[i], i) * FORWARD_SCALE;
    transform(values);
}

HC_INLINE void back(float* values) {
    for (int i = 0; i < LENGTH; ++i) values[i] *= BACK_SCALE;
    transform(values);
    for (int i = 0; i < LENGTH; ++i) {
        values[i] = finite(with_sign(values[i], i) * (1.0f / BACK_SCALE));
    }
}

}  // namespace rotation
}  // namespace hybridcomp
