// The loops of radix. `dtype` is a Dtype; sizes and ranges were checked by the caller.
#pragma once

#include "cpu.h"

namespace hybridcomp {
namespace radix {

struct Settings {
    int segment;  // a multiple of 16 from 64 to 4096
    bool relative;
    float bound;
};
// The most that encode may write.
size_t wire_nbytes(size_t numel, int segment, int dtype);
// Returns the bytes used. May write anywhere in the wire_nbytes of `out`.
size_t encode(const Settings& settings, int dtype, const void* in, size_t numel, u8* out,
              int threads);
// Throws std::invalid_argument for a payload that `encode` cannot have written with these settings. `dtype`
// is that of `out`; the payload names the encoded one.
void decode(const Settings& settings, int dtype, const u8* in, size_t nbytes, void* out,
            size_t numel, bool add, int threads);

}  // namespace radix
}  // namespace hybridcomp
