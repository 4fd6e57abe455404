// The loops of expcode. `dtype` is a Dtype; sizes and ranges were checked by the caller.
#pragma once

#include "cpu.h"

namespace hybridcomp {
namespace expcode {

// The most that encode may write.
size_t wire_nbytes(size_t numel, int dtype);
// Returns the bytes used. May write anywhere in the wire_nbytes of `out`.
size_t encode(int dtype, const void* in, size_t numel, u8* out, int threads);
// Throws std::invalid_argument for a payload that `encode` cannot have written. `dtype` is the encoded one.
void decode(int dtype, const u8* in, size_t nbytes, void* out, size_t numel, bool add, int threads);

}  // namespace expcode
}  // namespace hybridcomp
