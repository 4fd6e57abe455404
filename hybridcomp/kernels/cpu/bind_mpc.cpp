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

size_t bind_encode(int dim, int dtype, uintptr_t in, size_t numel, uintptr_t out, size_t nbytes,
                   int threads) {
    check(dim, dtype, numel);
    require(nbytes >= wire_nbytes(numel, dtype), "mpc: out is too short");
    py::gil_scoped_release release;
    return encode(dim, dtype, values(in), numel, bytes(out), threads);
}

void bind_decode(int dim, int dtype, uintptr_t payload, size_t nbytes, uintptr_t out, size_t numel,
                 bool add, int threads) {
    check(dim, dtype, numel);
    py::gil_scoped_release release;
    decode(dim, dtype, bytes(payload), nbytes, values(out), numel, add, threads);
}

}  // namespace

const Binding binding("mpc", [](py::module_& module) {
    module.def("encode", &bind_encode);
    module.def("decode", &bind_decode);
});

}  // namespace mpc
}  // namespace hybridcomp
