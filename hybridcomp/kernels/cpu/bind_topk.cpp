#include "bind.h"
#include "cpu_topk.h"

namespace hybridcomp {
namespace topk {
namespace {

Settings checked(int bits, int rice, uint32_t most, uint32_t last, int dtype, size_t numel, bool add) {
    require(bits >= 2 && bits <= 8, "topk: bits are out of range");
    require(rice >= 0 && rice <= 11, "topk: low bits of gaps are out of range");
    require(most >= 1 && most <= 4096 && last <= most, "topk: values kept are out of range");
    require(numel <= 0x7fffffffu, "topk: the format counts values in 31 bits");
    check_dtype(dtype, add);
    return Settings{bits, rice, most, last};
}

size_t bind_encode(int bits, int rice, uint32_t most, uint32_t last, int dtype, uintptr_t in,
                   size_t numel, uintptr_t out, size_t nbytes, int threads) {
    Settings settings = checked(bits, rice, most, last, dtype, numel, false);
    py::gil_scoped_release release;
    return encode(settings, dtype, values(in), numel, bytes(out), nbytes, threads);
}

void bind_decode(int bits, int rice, uint32_t most, uint32_t last, int dtype, uintptr_t payload,
                 size_t nbytes, uintptr_t out, size_t numel, bool add, int threads) {
    Settings settings = checked(bits, rice, most, last, dtype, numel, add);
    py::gil_scoped_release release;
    decode(settings, dtype, bytes(payload), nbytes, values(out), numel, add, threads);
}

}  // namespace

const Binding binding("topk", [](py::module_& module) {
    module.def("encode", &bind_encode);
    module.def("decode", &bind_decode);
});

}  // namespace topk
}  // namespace hybridcomp
