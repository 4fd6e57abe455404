// The loops of the casts. `dtype`, `from` and `to` are Dtypes; sizes and ranges were checked by the caller.
#pragma once

#include "cpu.h"

namespace hybridcomp {

// Casts between Dtypes; `add` accumulates into fp32.
void cast(int from, int to, const void* in, void* out, size_t numel, bool add, int threads);

namespace fp8 {
// What encode writes.
size_t wire_nbytes(size_t numel, int format);
void encode(int format, int dtype, const void* in, size_t numel, u8* out, int threads);
void decode(int format, int dtype, const u8* in, void* out, size_t numel, bool add, int threads);
}  // namespace fp8

}  // namespace hybridcomp
