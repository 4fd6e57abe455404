// Blocks of blockint with Lloyd levels, in lanes of bytes.
#pragma once

#include "cpu_instructions.h"

namespace hybridcomp {
namespace blockint {

// Encodes the first `blocks` blocks of a tile of 1024 values; the other blocks must be zero. Returns false and writes
// nothing if the machine lacks the instructions, or the tile has a NaN or Inf.
bool lloyd_in_lanes(const float* values, int blocks, u8* levels, u8* scales, u8* base);

}  // namespace blockint
}  // namespace hybridcomp
