// The loops that cpu.cpp binds. `dtype` is a Dtype; sizes and ranges were checked by the caller.
#pragma once

#include "cpu.h"

namespace hybridcomp {

namespace blockint {
size_t wire_nbytes(size_t numel, int bits);
void encode(int bits, int dtype, const void* values, size_t numel, u8* out, int threads);
void decode(int bits, int dtype, const u8* in, void* out, size_t numel, bool add, int threads);
}  // namespace blockint

}  // namespace hybridcomp
