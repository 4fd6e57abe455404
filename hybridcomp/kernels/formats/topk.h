// topk: the largest values of a chunk, each as a sign and a level. What a message looks like stands in
// docs/wire_formats.md; here is the arithmetic of one value, one scale and one selection.
#pragma once

#include "portable.h"

namespace hybridcomp {
namespace topk {

constexpr u32 CHUNK = 4096;
constexpr u32 HEADER = 16;
// Magnitudes lie on levels from LOW to LOW + WIDTH times the scale.
constexpr double LOW = 0.8, WIDTH = 0.6;
constexpr u16 BROKEN = 0x7fc0;  // the scale of a chunk with NaN or Inf

// The scale of a chunk whose median of the magnitudes kept is `median`, finite, as bits. Rounds to
// nearest even; the largest become Inf.
HC_INLINE u16 scale_of(u32 median) { return (u16)((median + 0x7fffu + ((median >> 16) & 1u)) >> 16); }

// The code of a value of these bits.
HC_INLINE u32 code_of(u32 bits, float scale, int width) {
    u32 levels = 1u << (width - 1);
    float at = (bits_float(bits & MAGNITUDE) / scale - (float)LOW) * (float)(levels / WIDTH);
    u32 level = at >= (float)(levels - 1) ? levels - 1 : at > 0.0f ? (u32)at : 0u;
    return 2 * level + (bits >> 31);
}

// The value of a code, at most `most` in magnitude.
HC_INLINE float value_of(u32 code, float scale, int width, float most) {
    u32 levels = 1u << (width - 1);
    float size = ((float)(code >> 1) + 0.5f) * (float)(WIDTH / levels) + (float)LOW;
    float magnitude = size * scale;
    magnitude = magnitude > most ? most : magnitude;
    return code & 1 ? -magnitude : magnitude;
}

// How many values of one magnitude are kept yet: the first ones, until the chunk has its number.
struct Cut {
    u32 least;  // of the magnitudes kept
    u32 room;   // for values of that magnitude

    HC_INLINE_MEMBER bool keeps(u32 magnitude) {
        if (magnitude != least) return magnitude > least;
        if (room == 0) return false;
        --room;
        return true;
    }
};

}  // namespace topk
}  // namespace hybridcomp
