// rotation.h on the values of a warp. With eight values per lane, eight lanes hold a group of 64, this lane the
// values from 8 * (lane % 8) on: stages inside a lane come first, then three across lanes. With a block per lane,
// two lanes hold a group, and only the last stage is across lanes.
#pragma once

#include "blockint_quads.h"

namespace hybridcomp {
namespace blockint {

// A stage inside a lane.
template <int HALF>
HC_INLINE void stage_inside(float* v) {
#pragma unroll
    for (int pair = 0; pair < EACH / 2; ++pair) {
        int first = pair / HALF * 2 * HALF + pair % HALF;
        float a = v[first], b = v[first + HALF];
        v[first] = a + b, v[first + HALF] = a - b;
    }
}

// A stage over lanes that differ in MASK.
template <int MASK>
HC_INLINE void stage_across(float* v) {
    float sign = lane_id() & MASK ? -1.0f : 1.0f;
#pragma unroll
    for (int k = 0; k < EACH; ++k) v[k] = plus_signed(v[k], sign, other_lane_float(v[k], MASK));
}

HC_INLINE void transform(float* v) {
    stage_inside<1>(v), stage_inside<2>(v), stage_inside<4>(v);
    stage_across<1>(v), stage_across<2>(v), stage_across<4>(v);
}

// The signs of this lane's values in D, that of value k in bit k.
HC_INLINE u32 signs_of_lane() { return (u32)(rotation::SIGNS >> (8 * (lane_id() % 8))) & 255u; }
HC_INLINE u32 sign_of(u32 signs, int k) { return signs << (31 - k) & 0x80000000u; }
HC_INLINE float with_sign(float value, u32 signs, int k) {
    return bits_float(float_bits(value) ^ sign_of(signs, k));
}

// Whether the group of 64 values around value `at` of the message is whole.
HC_INLINE bool in_group(u64 at, u64 count) { return at / 64 * 64 + 64 <= count; }

// Values outside whole groups stay unchanged; all lanes take part.
HC_INLINE void rotate(float* v, bool whole) {
    u32 signs = signs_of_lane();
    float y[EACH];
#pragma unroll
    for (int k = 0; k < EACH; ++k) y[k] = with_sign(v[k], signs, k) * rotation::FORWARD_SCALE;
    transform(y);
#pragma unroll
    for (int k = 0; k < EACH; ++k) v[k] = whole ? y[k] : v[k];
}

// For tiles below LARGE_BASE without a NaN, which need no scaling.
HC_INLINE void rotate_back(float* v, bool whole) {
    u32 signs = signs_of_lane();
    float x[EACH];
#pragma unroll
    for (int k = 0; k < EACH; ++k) x[k] = v[k];
    transform(x);
#pragma unroll
    for (int k = 0; k < EACH; ++k) v[k] = whole ? with_sign(x[k], signs, k) : v[k];
}

// For any tile; a NaN has the CPU's bits.
HC_INLINE void rotate_back_any(float* v, bool whole) {
    u32 signs = signs_of_lane();
    float x[EACH];
#pragma unroll
    for (int k = 0; k < EACH; ++k) x[k] = v[k] * rotation::BACK_SCALE;
    transform(x);
#pragma unroll
    for (int k = 0; k < EACH; ++k) {
        u32 nan = QUIET_NAN_BITS | sign_of(signs, k);
        float value = finite(with_sign(x[k], signs, k) * (1.0f / rotation::BACK_SCALE));
        value = magnitude_bits(value) > INF_BITS ? bits_float(nan) : value;
        v[k] = whole ? value : v[k];
    }
}

// The rotation of a block that a lane has, the neighbour having the other one of the group.

template <int HALF>
HC_INLINE void stage_in_block(float* v) {
#pragma unroll
    for (int pair = 0; pair < BLOCK / 2; ++pair) {
        int first = pair / HALF * 2 * HALF + pair % HALF;
        float a = v[first], b = v[first + HALF];
        v[first] = a + b, v[first + HALF] = a - b;
    }
}

HC_INLINE float odd_sign() { return lane_id() & 1 ? -1.0f : 1.0f; }

HC_INLINE void stages_in_block(float* v) {
    stage_in_block<1>(v), stage_in_block<2>(v), stage_in_block<4>(v);
    stage_in_block<8>(v), stage_in_block<16>(v);
}

HC_INLINE void stage_across_blocks(float* v, bool whole) {
    float sign = odd_sign();
#pragma unroll
    for (int k = 0; k < BLOCK; ++k) {
        float other = other_lane_float(v[k], 1);
        if (whole) v[k] = plus_signed(v[k], sign, other);
    }
}

// held + value k of D x: the sign is known here, or that lanes differ in it.
HC_INLINE float plus_in_d(float held, float x, int k, float odd) {
    bool low = rotation::SIGNS >> k & 1, high = rotation::SIGNS >> (32 + k) & 1;
    if (low == high) return low ? held - x : held + x;
    return plus_signed(x, low ? -odd : odd, held);
}

HC_INLINE u32 block_signs() { return anew((u32)(rotation::SIGNS >> (32 * (lane_id() & 1)))); }

// Blocks outside whole groups stay unchanged, in their registers.
HC_INLINE void rotate_block(float* v, bool whole) {
    u32 signs = block_signs();
    if (whole) {
#pragma unroll
        for (int k = 0; k < BLOCK; ++k) v[k] = with_sign(v[k], signs, k) * rotation::FORWARD_SCALE;
        stages_in_block(v);
    }
    stage_across_blocks(v, whole);
}

// `rotate_back_any` of a block.
HC_INLINE void rotate_block_back(float* v, bool whole) {
    if (whole) {
#pragma unroll
        for (int k = 0; k < BLOCK; ++k) v[k] *= rotation::BACK_SCALE;
        stages_in_block(v);
    }
    stage_across_blocks(v, whole);
    if (!whole) return;
    u32 signs = block_signs();
#pragma unroll
    for (int k = 0; k < BLOCK; ++k) {
        float value = finite(v[k] * (1.0f / rotation::BACK_SCALE));
        value = magnitude_bits(value) > INF_BITS ? bits_float(QUIET_NAN_BITS) : value;
        v[k] = with_sign(value, signs, k);
    }
}

}  // namespace blockint
}  // namespace hybridcomp
