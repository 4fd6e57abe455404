#include "bind.h"
#include "cpu_stepcode.h"
#include "shares.h"

namespace hybridcomp {
namespace stepcode {
namespace {

void check(int dtype, size_t numel) {
    require(dtype == (int)Dtype::bf16 || dtype == (int)Dtype::fp16, "values must be bf16 or fp16");
    require(numel <= 0xffffffffu, "the format counts 4-byte units in 32 bits");
}

const u16* halves(uintptr_t address) { return reinterpret_cast<const u16*>(address); }

size_t bind_encode(int dtype, uintptr_t in, uintptr_t reference, size_t numel, uintptr_t out,
                   size_t nbytes, int threads) {
    check(dtype, numel);
    require(nbytes >= wire_nbytes(numel), "out is too short");
    py::gil_scoped_release release;
    return encode(dtype, halves(in), halves(reference), numel, bytes(out), threads);
}

void bind_decode(int dtype, uintptr_t payload, size_t nbytes, uintptr_t reference, uintptr_t out,
                 size_t numel, int threads) {
    check(dtype, numel);
    py::gil_scoped_release release;
    decode(dtype, bytes(payload), nbytes, halves(reference), (u16*)values(out), numel, threads);
}

}  // namespace

const Binding binding("stepcode", [](py::module_& module) {
    module.def("wire_nbytes", &wire_nbytes);
    module.def("encode", &bind_encode);
    module.def("decode", &bind_decode);
});

}  // namespace stepcode
}  // namespace hybridcomp
