// The loops of mpc. `dtype` is a Dtype; sizes and ranges were checked by the caller.
#pragma once

#include "cpu.h"

namespace hybridcomp {
namespace mpc {

// The most that encode may write.
size_t wire_nbytes(size_t numel, int dtype);
// Returns the bytes used. May write anywhere in the wire_nbytes of `out`.
size_t encode(int dim, int dtype, const void* in, size_t numel, u8* out, int threads);
// Throws std::invalid_argument for a payload that `encode` cannot have written with these arguments.
void decode(int dim, int dtype, const u8* in, size_t nbytes, void* out, size_t numel, bool add,
            int threads);

}  // namespace mpc
}  // namespace hybridcomp
