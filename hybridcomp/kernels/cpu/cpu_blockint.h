// The loops of blockint. `dtype` is a Dtype; sizes and ranges were checked by the caller.
#pragma once

#include "cpu_residual.h"

namespace hybridcomp {
namespace blockint {

// A setting is bits + 16 when rotated + 32 with Gaussian levels + 64 when rounded at random
// + 128 with Lloyd levels.
inline int bits_of(int setting) { return setting & 15; }
inline bool rotated(int setting) { return (setting & 16) != 0; }
inline bool gaussian(int setting) { return (setting & 32) != 0; }
inline bool lloyd(int setting) { return (setting & 128) != 0; }
inline bool at_random(int setting) { return (setting & 64) != 0; }

// All other functions require a possible setting.
bool possible(int setting);
// What encode writes.
size_t wire_nbytes(size_t numel, int setting);
void encode(int setting, int dtype, const void* in, size_t numel, u8* out, int threads);
// Encodes values + residual, and stores the quantization error in the residual, which has `bits` bits.
void encode_kept(int setting, int dtype, const void* values, size_t numel, u8* out, int bits,
                 residual::Place kept, int threads);
void decode(int setting, int dtype, const u8* in, void* out, size_t numel, bool add, int threads);

}  // namespace blockint
}  // namespace hybridcomp
