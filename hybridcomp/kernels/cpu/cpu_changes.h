// Checksums of weights, and differences between two versions of them. Addresses need no alignment.
#pragma once

#include "cpu.h"

namespace hybridcomp {
namespace changes {

constexpr size_t BLOCK = size_t(1) << 20;  // bytes; threads share the blocks of a message
constexpr size_t LEAST = 256;              // what is hashed has zeros behind it up to so many bytes
constexpr size_t DIGEST = 16;
constexpr size_t WORD = 32;  // values of a word of a mask

// Computes the checksum of `nbytes` bytes: the canonical 16 bytes of the XXH3-128 of all blocks' XXH3-128s,
// followed by `nbytes` as u64.
void digest(const u8* in, size_t nbytes, u8* out, int threads);
// Returns the number of values that differ, and computes the checksum of `values`, in one pass. Sets in `mask`,
// unless it is null, a bit for each value, from the lowest bit of each u32 up; the last word ends in zeros.
size_t compare(const u16* values, const u16* old, size_t numel, u32* mask, u8* out, int threads);
// Copies the values whose bit is set to consecutive places of `out`; returns their number.
size_t pick(const u16* values, const u32* mask, size_t numel, u16* out);
// Copies values from `pick` back to their places.
void put(const u16* picked, const u32* mask, size_t numel, u16* out);
// Writes the places of the bits that are set.
void places(const u32* mask, size_t numel, int64_t* out);

}  // namespace changes
}  // namespace hybridcomp
