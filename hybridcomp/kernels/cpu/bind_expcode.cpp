#include "bind.h"
#include "cpu_expcode.h"

namespace hybridcomp {
namespace expcode {
namespace {

void check(int dtype, size_t numel) {
    require(numel <= 0xffffffffu, "the format counts 4-byte units in 32 bits");
    check_dtype(dtype);
}

size_t bind_encode(int dtype, const void* in, size_t numel, u8* out, size_t nbytes, int threads) {
    check(dtype, numel);
    require(nbytes >= wire_nbytes(numel, dtype), "out is too short");
    return encode(dtype, in, numel, out, threads);
}

void bind_decode(int dtype, const u8* in, size_t nbytes, void* out, size_t numel, bool add, int threads) {
    check(dtype, numel);
    decode(dtype, in, nbytes, out, numel, add, threads);
}

const Binding binding("expcode", {function<bind_encode>("encode"), function<bind_decode>("decode")});

}  // namespace
}  // namespace expcode
}  // namespace hybridcomp
