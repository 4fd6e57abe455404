// Blocks of blockint with Lloyd levels, in lanes of bytes.
#pragma once

#include "cpu_instructions.h"

namespace hybridcomp {
namespace blockint {

// Encode the first `blocks` blocks of a tile of 1024 values, those behind them zeros. False where the machine lacks
// the instructions, or the tile holds a NaN or Inf: nothing was written.
bool lloyd_in_lanes(const float* values, int blocks, u8* levels, u8* scales, u8* base);

}  // namespace blockint
}  // namespace hybridcomp
