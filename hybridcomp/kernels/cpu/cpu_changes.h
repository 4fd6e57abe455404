// Checksums of weights, and what differs between two versions of them. Addresses need no alignment.
#pragma once

#include "cpu.h"

namespace hybridcomp {
namespace changes {

constexpr size_t BLOCK = size_t(1) << 20;  // bytes; threads share the blocks of a message
constexpr size_t LEAST = 256;              // what is hashed has zeros behind it up to so many bytes
constexpr size_t DIGEST = 16;
constexpr size_t WORD = 32;  // values of a word of a mask

// The checksum of `nbytes` bytes: XXH3-128, as its canonical 16 bytes, of the XXH3-128s of each block and
// of `nbytes` as u64.
void digest(const u8* in, size_t nbytes, u8* out, int threads);
// Returns how many of the values differ, and the checksum of `values`, in one pass. `mask`, where it is not
// null, gets a bit for each value, from the lowest bit of u32 words up, zeros at its end.
size_t compare(const u16* values, const u16* old, size_t numel, u32* mask, u8* out, int threads);
// Copies the values whose bit is set to `out`, one behind the other; returns how many.
size_t pick(const u16* values, const u32* mask, size_t numel, u16* out);
// Copies values that `pick` has taken to where they were.
void put(const u16* picked, const u32* mask, size_t numel, u16* out);
// Writes the places of the bits that are set.
void places(const u32* mask, size_t numel, int64_t* out);

}  // namespace changes
}  // namespace hybridcomp
