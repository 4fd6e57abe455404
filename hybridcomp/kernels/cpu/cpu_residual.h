// The loops of residuals in few bits (residual.h). `bits` is 4, 8 or 16; `steps` are not used at 16.
// Levels and steps are those of whole blocks of 32 values, the last one filled up with zeros.
#pragma once

#include "cpu.h"

namespace hybridcomp {
namespace residual {

inline bool possible(int bits) { return bits == 4 || bits == 8 || bits == 16; }

struct Place {
    u8* levels;
    u16* steps;
};

// Where value `first`, a multiple of 32, is.
inline Place place_of(int bits, Place all, size_t first) {
    return {all.levels + first / 8 * bits, all.steps + first / 32};
}

// sums = residual + values (`dtype`, or null: none), and zeros up to the end of the last block of 32.
void add(int bits, Place from, int dtype, const void* values, size_t count, float* sums);
// residual = sums - sent (null: zeros), 0 where that is not finite. `sums` and `sent` have zeros up to the
// end of the last block.
void keep(int bits, const float* sums, const float* sent, size_t count, Place to);

// `add` and `keep` for a whole residual, from and to fp32 values without zeros after them.
void load(int bits, Place from, size_t numel, float* out, int threads);
void store(int bits, const float* values, size_t numel, Place to, int threads);

}  // namespace residual
}  // namespace hybridcomp
