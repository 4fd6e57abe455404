// XXH3-128 without a seed of 241 bytes and more, as github.com/Cyan4973/xxHash specifies it: eight sums of 64
// bits over stripes of 64 bytes, mixed after every 1024 bytes.
#pragma once

#include "cpu.h"

namespace hybridcomp {
namespace xxh3 {

constexpr size_t STRIPE = 64, STRIPES = 16, SPAN = STRIPE * STRIPES;

struct Sums {
    u64 of[8];
};

Sums begin();
// Adds `spans` times 1024 bytes.
void absorb(Sums& sums, const u8* in, size_t spans);
// Computes the hash of `nbytes` bytes at `in`, after (nbytes - 1) / 1024 spans of them were absorbed.
void finish(Sums& sums, const u8* in, size_t nbytes, u8* out);

}  // namespace xxh3
}  // namespace hybridcomp
