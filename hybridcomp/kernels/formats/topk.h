// topk: the largest values of every 4096, in few bits, with their places. Sections begin at a byte, bits
// are filled in from the lowest, zeros fill up to a multiple of 16 bytes.
//
//   header  4 x int32            values kept, bits of the last section, values of the message, 0
//   scales  bf16 for each 4096   the median of the magnitudes kept; NaN where a value is NaN or Inf, which
//                                all 4096 decode to
//   low     r bits x kept        the low bits of the gap to the value kept before, less one; r is the
//                                largest with 2^r at most ln 2 / density
//   values  bits x kept          lowest bit: the sign; the others: the level k of L = 2^(bits - 1), for
//                                (0.8 + 0.6 (k + 1/2) / L) times the scale
//   high    as the header says   the gap without its low bits, as so many zeros and a one
//
// Of equal magnitudes the first are kept.
#pragma once

#include "portable.h"

namespace hybridcomp {
namespace topk {

constexpr u32 CHUNK = 4096;
constexpr u32 HEADER = 16;
// Magnitudes lie on levels from LOW to LOW + WIDTH times the scale.
constexpr double LOW = 0.8, WIDTH = 0.6;
constexpr u16 BROKEN = 0x7fc0;  // the scale of a chunk with NaN or Inf

// Bytes at which the sections of a message begin. `rice`: low bits of a gap.
struct Sections {
    u64 scales, low, codes, unary, end;
    HC_INLINE_MEMBER Sections(u64 numel, u64 kept, u64 unary_bits, u64 rice, u64 bits)
        : scales(HEADER), low(scales + 2 * ((numel + CHUNK - 1) / CHUNK)), codes(low + (kept * rice + 7) / 8),
          unary(codes + (kept * bits + 7) / 8), end(unary + (unary_bits + 7) / 8) {}
};

// Returns the scale of a chunk; `median`: the bits of the median of its kept magnitudes, which is finite. Rounds
// to nearest even; the largest become Inf.
HC_INLINE u16 scale_of(u32 median) { return (u16)((median + 0x7fffu + ((median >> 16) & 1u)) >> 16); }

// Returns the code of a value with these bits.
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

// Selects values: of the smallest kept magnitude only the first ones, until the chunk has its number.
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
