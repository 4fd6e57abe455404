// forward and back of rotation.h on eight lanes: 64 values are eight rows of eight.
#pragma once

#include "lanes.h"
#include "rotation.h"

namespace hybridcomp {
namespace rotation {

constexpr int ROWS = LENGTH / 8;

// The sign bits of D in one row, as a mask to XOR with.
HC_INLINE U8 row_signs(int row) {
    u32 bits = (u32)(SIGNS >> (8 * row)) & 255u;
    return ((U8{} + bits) << U8{31, 30, 29, 28, 27, 26, 25, 24}) & 0x80000000u;
}

// A stage inside a row: lane k becomes its partner's value plus its own, or minus it in the upper
// half of a pair; a - b = a + (-b) to the bit.
template <int HALF>
HC_INLINE F8 lane_stage(F8 row) {
    constexpr u32 S = 0x80000000u;
    F8 other;
    U8 upper;
    if constexpr (HALF == 1) {
        other = __builtin_shufflevector(row, row, 1, 0, 3, 2, 5, 4, 7, 6);
        upper = U8{0, S, 0, S, 0, S, 0, S};
    } else if constexpr (HALF == 2) {
        other = __builtin_shufflevector(row, row, 2, 3, 0, 1, 6, 7, 4, 5);
        upper = U8{0, 0, S, S, 0, 0, S, S};
    } else {
        other = __builtin_shufflevector(row, row, 4, 5, 6, 7, 0, 1, 2, 3);
        upper = U8{0, 0, 0, 0, S, S, S, S};
    }
    return other + (F8)((U8)row ^ upper);
}

HC_INLINE void transform_rows(F8* rows) {
    for (int r = 0; r < ROWS; ++r) {
        rows[r] = lane_stage<4>(lane_stage<2>(lane_stage<1>(rows[r])));
    }
    for (int half = 1; half < ROWS; half *= 2) {
        for (int i = 0; i < ROWS; i += 2 * half) {
            for (int j = i; j < i + half; ++j) {
                F8 a = rows[j], b = rows[j + half];
                rows[j] = a + b;
                rows[j + half] = a - b;
            }
        }
    }
}

HC_INLINE void forward_lanes(float* values) {
    F8 rows[ROWS];
    for (int r = 0; r < ROWS; ++r) {
        U8 bits = load_lanes<U8>(values + 8 * r) ^ row_signs(r);
        rows[r] = (F8)bits * FORWARD_SCALE;
    }
    transform_rows(rows);
    for (int r = 0; r < ROWS; ++r) store_lanes(rows[r], values + 8 * r);
}

HC_INLINE void back_lanes(float* values) {
    F8 rows[ROWS];
    for (int r = 0; r < ROWS; ++r) rows[r] = load_lanes<F8>(values + 8 * r) * BACK_SCALE;
    transform_rows(rows);
    for (int r = 0; r < ROWS; ++r) {
        U8 bits = (U8)(rows[r] * (1.0f / BACK_SCALE));
        U8 magnitude = bits & MAGNITUDE;  // finite() of eight lanes: only an Inf is one too large
        bits -= (U8)(magnitude == (U8{} + INF_BITS)) & 1u;
        store_lanes(bits ^ row_signs(r), values + 8 * r);
    }
}

}  // namespace rotation
}  // namespace hybridcomp
