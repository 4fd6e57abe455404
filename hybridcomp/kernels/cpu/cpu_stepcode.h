// The loops of stepcode. `dtype` is Dtype::bf16 or Dtype::fp16; sizes and ranges were checked by the caller.
#pragma once

#include "cpu.h"

namespace hybridcomp {
namespace stepcode {

// The most that encode may write.
size_t wire_nbytes(size_t numel);
// Returns the bytes used. May write anywhere in the wire_nbytes of `out`.
size_t encode(int dtype, const u16* values, const u16* reference, size_t numel, u8* out, int threads);
// Throws std::invalid_argument for a payload that `encode` cannot have written with these arguments; `out` is
// then undefined. `out` may be `reference`.
void decode(int dtype, const u8* in, size_t nbytes, const u16* reference, u16* out, size_t numel,
            int threads);

}  // namespace stepcode
}  // namespace hybridcomp
