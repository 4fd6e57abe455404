#include "bind.h"
#include "cpu_mpc.h"

namespace hybridcomp {
namespace mpc {
namespace {

void check(int dim, int dtype, size_t numel) {
    require(dim >= 1 && dim <= 32, "mpc: dim is out of range");
    require(numel <= 0xffffffffu, "mpc: the format counts values in 32 bits");
    check_dtype(dtype);
}

size_t bind_encode(int dim, int dtype, const void* in, size_t numel, u8* out, size_t nbytes, int threads) {
    check(dim, dtype, numel);
    require(nbytes >= wire_nbytes(numel, dtype), "mpc: out is too short");
    return encode(dim, dtype, in, numel, out, threads);
}

void bind_decode(int dim, int dtype, const u8* in, size_t nbytes, void* out, size_t numel, bool add, int threads) {
    check(dim, dtype, numel);
    decode(dim, dtype, in, nbytes, out, numel, add, threads);
}

const Binding binding("mpc", {function<bind_encode>("encode"), function<bind_decode>("decode")});

}  // namespace
}  // namespace mpc
}  // namespace hybridcomp
