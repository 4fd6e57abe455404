#include "bind.h"
#include "cpu_expcode.h"

namespace hybridcomp {
namespace expcode {
namespace {

void check(int dtype, size_t numel) {
    require(numel <= 0xffffffffu, "the format counts 4-byte units in 32 bits");
    check_dtype(dtype);
}

size_t bind_encode(int dtype, uintptr_t in, size_t numel, uintptr_t out, size_t nbytes,
                   int threads) {
    check(dtype, numel);
    require(nbytes >= wire_nbytes(numel, dtype), "out is too short");
    py::gil_scoped_release release;
    return encode(dtype, values(in), numel, bytes(out), threads);
}

void bind_decode(int dtype, uintptr_t payload, size_t nbytes, uintptr_t out, size_t numel, bool add,
                 int threads) {
    check(dtype, numel);
    py::gil_scoped_release release;
    decode(dtype, bytes(payload), nbytes, values(out), numel, add, threads);
}

}  // namespace

const Binding binding("expcode", [](py::module_& module) {
    module.def("encode", &bind_encode);
    module.def("decode", &bind_decode);
});

}  // namespace expcode
}  // namespace hybridcomp
