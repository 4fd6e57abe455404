// The loops of zfp. `dtype` is a Dtype; sizes and ranges were checked by the caller.
#pragma once

#include "cpu.h"

namespace hybridcomp {
namespace zfp {

// What encode writes.
size_t wire_nbytes(size_t numel, int maxbits);
void encode(int maxbits, int dtype, const void* in, size_t numel, u8* out, int threads);
void decode(int maxbits, int dtype, const u8* in, void* out, size_t numel, bool add, int threads);

}  // namespace zfp
}  // namespace hybridcomp
