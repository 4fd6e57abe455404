// Rounding at random, without a state: a value goes up with the probability that its distance from the
// level below says, so the mean of what is decoded is the value. The random number is a hash of the value's
// own bits, its index in the message and its block's inverse step: the same bytes from every device, thread
// count and repetition, others on a rank whose values are others, and nothing to save or restore.
//
// The hash is "lowbias32" (C. Wellons, hash-prospector) without its last step, as only the upper 14 bits
// are used. Without the first step x and -x would be rounded alike. For u32 and for lanes of them.
#pragma once

#include "portable.h"

namespace hybridcomp {
namespace dither {

constexpr int BITS = 14;
constexpr u32 SPREAD = 0x9e3779b9u;  // 2^32 over the golden ratio: neighbours' indices lie far apart
// 1.5 * 2^9: a sum in [512, 1024) is a number of steps of 2^-14
constexpr float MAGIC = 768.0f;

// Of a value of block `inverse` at index `at` of the message.
HC_INLINE u32 seed_of(u32 at, float inverse) { return at * SPREAD + float_bits(inverse); }

template <class U>
HC_INLINE U random_bits(U value, U seed) {
    U hash = value ^ seed;
    hash = (hash ^ (hash >> 16)) * 0x7feb352du;
    hash = (hash ^ (hash >> 15)) * 0x846ca68bu;
    return hash >> (32 - BITS);
}

// `sum`: the bits of value * inverse + MAGIC + an offset. The low byte becomes the level plus the offset:
// below the value if what is left of it, plus the random bits, stays below a step.
template <class U>
HC_INLINE U level_of(U sum, U random) { return (sum + random) >> BITS; }

}  // namespace dither
}  // namespace hybridcomp
