#include "bind.h"
#include "cpu_radix.h"

namespace hybridcomp {
namespace radix {
namespace {

Settings checked(int segment, bool relative, float bound, int dtype, size_t numel, bool add = false) {
    require(segment >= 64 && segment <= 4096 && segment % 16 == 0, "segment is out of range");
    require(bound > 0 && bound <= 3.4028234663852886e38f, "error bound is out of range");
    require(numel <= 0xffffffffu, "the format counts 4-byte units in 32 bits");
    check_dtype(dtype, add);
    return {segment, relative, bound};
}

size_t bind_encode(int segment, bool relative, float bound, int dtype, const void* in, size_t numel, u8* out,
                   size_t nbytes, int threads) {
    Settings settings = checked(segment, relative, bound, dtype, numel);
    require(nbytes >= wire_nbytes(numel, segment, dtype), "out is too short");
    return encode(settings, dtype, in, numel, out, threads);
}

void bind_decode(int segment, bool relative, float bound, int dtype, const u8* in, size_t nbytes, void* out,
                 size_t numel, bool add, int threads) {
    Settings settings = checked(segment, relative, bound, dtype, numel, add);
    decode(settings, dtype, in, nbytes, out, numel, add, threads);
}

const Binding binding("radix", {function<bind_encode>("encode"), function<bind_decode>("decode")});

}  // namespace
}  // namespace radix
}  // namespace hybridcomp
