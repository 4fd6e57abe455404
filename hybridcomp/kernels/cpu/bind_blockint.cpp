#include "bind.h"
#include "cpu_blockint.h"

namespace hybridcomp {
namespace blockint {
namespace {

void bind_encode_kept(int setting, int dtype, uintptr_t in, size_t numel, uintptr_t out, size_t nbytes,
                      int bits, uintptr_t levels, uintptr_t steps, int threads) {
    require(possible(setting), "setting is out of range");
    require(residual::possible(bits), "bits are out of range");
    require(nbytes >= wire_nbytes(numel, setting), "out is too short");
    check_dtype(dtype);
    py::gil_scoped_release release;
    encode_kept(setting, dtype, values(in), numel, bytes(out), bits, {bytes(levels), (u16*)steps}, threads);
}

}  // namespace

const Binding binding("blockint", [](py::module_& module) {
    bind_fixed<wire_nbytes, encode, decode, possible>(module);
    module.def("encode_kept", &bind_encode_kept);
});

}  // namespace blockint
}  // namespace hybridcomp
