// Blocks of blockint with Lloyd levels, in lanes of bytes.
#pragma once

#include "cpu_instructions.h"

namespace hybridcomp {
namespace blockint {

// Encode `blocks` finite blocks of 32 values, given the code of the T of each and its inverse step: levels
// and the codes that are sent. All of the last four blocks may be read. False where the machine lacks the instructions: nothing was done.
bool lloyd_in_lanes(const float* values, int blocks, const u32* codes, const float* inverse, u8* levels,
                    u8* scales);

}  // namespace blockint
}  // namespace hybridcomp
