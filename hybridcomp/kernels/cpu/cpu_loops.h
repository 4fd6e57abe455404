// The loops that cpu.cpp binds. `dtype` is a Dtype; sizes and ranges were checked by the caller.
// wire_nbytes is what encode writes; for codecs whose encode returns a size, the most it may write.
#pragma once

#include "cpu.h"

namespace hybridcomp {

// Casts between Dtypes; `add` accumulates into fp32.
void cast(int from, int to, const void* in, void* out, size_t numel, bool add, int threads);

namespace fp8 {
size_t wire_nbytes(size_t numel);
void encode(int format, int dtype, const void* in, size_t numel, u8* out, int threads);
void decode(int format, int dtype, const u8* in, void* out, size_t numel, bool add, int threads);
}  // namespace fp8

namespace blockint {
// A setting is bits + 16 when rotated + 32 with Gaussian levels; the others require a possible one.
bool possible(int setting);
size_t wire_nbytes(size_t numel, int setting);
void encode(int setting, int dtype, const void* in, size_t numel, u8* out, int threads);
void decode(int setting, int dtype, const u8* in, void* out, size_t numel, bool add, int threads);
}  // namespace blockint

namespace zfp {
size_t wire_nbytes(size_t numel, int maxbits);
void encode(int maxbits, int dtype, const void* in, size_t numel, u8* out, int threads);
void decode(int maxbits, int dtype, const u8* in, void* out, size_t numel, bool add, int threads);
}  // namespace zfp

namespace mpc {
size_t wire_nbytes(size_t numel, int dtype);
// Returns the bytes used. May write anywhere in the wire_nbytes of `out`.
size_t encode(int dim, int dtype, const void* in, size_t numel, u8* out, int threads);
// Throws std::invalid_argument on a payload that is not what encode made for these arguments.
void decode(int dim, int dtype, const u8* in, size_t nbytes, void* out, size_t numel, bool add,
            int threads);
}  // namespace mpc

namespace radix {
struct Settings {
    int segment;  // a multiple of 16 from 64 to 4096
    bool relative;
    float bound;
};
size_t wire_nbytes(size_t numel, int segment, int dtype);
// Returns the bytes used. May write anywhere in the wire_nbytes of `out`.
size_t encode(const Settings& settings, int dtype, const void* in, size_t numel, u8* out,
              int threads);
// Throws std::invalid_argument on a payload that no encode made with these settings. `dtype` is that
// of `out`; the payload knows the encoded one.
void decode(const Settings& settings, int dtype, const u8* in, size_t nbytes, void* out,
            size_t numel, bool add, int threads);
}  // namespace radix

namespace expcode {
size_t wire_nbytes(size_t numel, int dtype);
// Returns the bytes used. May write anywhere in the wire_nbytes of `out`.
size_t encode(int dtype, const void* in, size_t numel, u8* out, int threads);
// Throws std::invalid_argument on a payload that no encode made. `dtype` is the encoded one.
void decode(int dtype, const u8* in, size_t nbytes, void* out, size_t numel, bool add, int threads);
}  // namespace expcode

}  // namespace hybridcomp
