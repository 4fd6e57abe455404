// Symbols without branches, and the model of a message for stepcode's encoder.
#pragma once

#include "cpu_stepcode_shared.h"

namespace hybridcomp {
namespace stepcode {

// Tables of code_of without branches, by the logarithm of the folded step, for unchanged and flipped signs.
struct Rules {
    u8 shift[2][16], base[2][16], mask[2][16];
    constexpr Rules() : shift{}, base{}, mask{} {
        for (u32 k = 0; k < 15; ++k) {
            bool direct = k < 5;
            shift[0][k] = (u8)(direct ? 0 : k - 2), mask[0][k] = direct ? DIRECT - 1 : 3;
            base[0][k] = (u8)(direct ? 0 : DIRECT + 4 * (k - 5));
            shift[1][k] = (u8)(k ? k - 1 : 0), mask[1][k] = 1, base[1][k] = (u8)(FLIPPED + 2 * k);
        }
    }
};
constexpr Rules RULES;

HC_INLINE u32 folded(u32 step) { return ((step << 1) ^ (0u - (step >> 14 & 1))) & 0x7fffu; }

HC_INLINE Coded coded_of(u32 z, u32 flip) {
    u32 k = log2_floor(z | 1), shift = RULES.shift[flip][k];
    return Coded{RULES.base[flip][k] + (z >> shift & RULES.mask[flip][k]), shift, z & ((1u << shift) - 1)};
}

// Writes the model, sets `lowest`, `tile` and `model` of `head`, whose dtype and numel are set; returns the ranges.
Ranges make_model(const u16* values, const u16* reference, Head& head, u8* out);

}  // namespace stepcode
}  // namespace hybridcomp
