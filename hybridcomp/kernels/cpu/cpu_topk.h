// The loops of topk. `dtype` is a Dtype; sizes and ranges were checked by the caller.
#pragma once

#include "cpu.h"

namespace hybridcomp {
namespace topk {

struct Settings {
    int bits;   // of a value kept, 2..8
    int rice;   // low bits of a gap, 0..11
    u32 most;   // values kept of a whole chunk
    u32 last;   // and of the last one
};

// Returns the bytes used. Throws std::invalid_argument where they are more than `nbytes`.
size_t encode(const Settings& settings, int dtype, const void* in, size_t numel, u8* out,
              size_t nbytes, int threads);
// Throws std::invalid_argument for a payload that `encode` cannot have written with these arguments.
void decode(const Settings& settings, int dtype, const u8* in, size_t nbytes, void* out, size_t numel,
            bool add, int threads);

}  // namespace topk
}  // namespace hybridcomp
