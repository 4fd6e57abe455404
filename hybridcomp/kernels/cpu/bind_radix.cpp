#include "bind.h"
#include "cpu_radix.h"

namespace hybridcomp {
namespace radix {
namespace {

Settings checked(int segment, bool relative, float bound, int dtype, size_t numel) {
    require(segment >= 64 && segment <= 4096 && segment % 16 == 0, "segment is out of range");
    require(bound > 0 && bound <= 3.4028234663852886e38f, "error bound is out of range");
    require(numel <= 0xffffffffu, "the format counts 4-byte units in 32 bits");
    check_dtype(dtype);
    return {segment, relative, bound};
}

size_t bind_encode(int segment, bool relative, float bound, int dtype, uintptr_t in, size_t numel,
                   uintptr_t out, size_t nbytes, int threads) {
    Settings settings = checked(segment, relative, bound, dtype, numel);
    require(nbytes >= wire_nbytes(numel, segment, dtype), "out is too short");
    py::gil_scoped_release release;
    return encode(settings, dtype, values(in), numel, bytes(out), threads);
}

void bind_decode(int segment, bool relative, float bound, int dtype, uintptr_t payload,
                 size_t nbytes, uintptr_t out, size_t numel, bool add, int threads) {
    Settings settings = checked(segment, relative, bound, dtype, numel);
    check_dtype(dtype, add);
    py::gil_scoped_release release;
    decode(settings, dtype, bytes(payload), nbytes, values(out), numel, add, threads);
}

}  // namespace

const Binding binding("radix", [](py::module_& module) {
    module.def("encode", &bind_encode);
    module.def("decode", &bind_decode);
});

}  // namespace radix
}  // namespace hybridcomp
