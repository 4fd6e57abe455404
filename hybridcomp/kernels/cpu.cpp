// Python bindings of the CPU loops. Pointers are integers, so that the extension builds without
// torch; the codecs check tensors before they come here, and the sizes are checked once more.
#include <pybind11/pybind11.h>

#include "cpu_loops.h"

namespace py = pybind11;
using namespace hybridcomp;

namespace {

template <class T>
T* pointer(uintptr_t address) { return reinterpret_cast<T*>(address); }

void blockint_encode(int bits, int dtype, uintptr_t values, size_t numel, uintptr_t out,
                     size_t out_nbytes, int threads) {
    require(bits >= 2 && bits <= 8 && dtype >= 0 && dtype <= 2, "blockint: bits or dtype");
    require(out_nbytes >= blockint::wire_nbytes(numel, bits), "blockint: out is too short");
    py::gil_scoped_release release;
    blockint::encode(bits, dtype, pointer<const void>(values), numel, pointer<u8>(out), threads);
}

void blockint_decode(int bits, int dtype, uintptr_t payload, size_t payload_nbytes, uintptr_t out,
                     size_t numel, bool add, int threads) {
    require(bits >= 2 && bits <= 8 && dtype >= 0 && dtype <= 2, "blockint: bits or dtype");
    require(payload_nbytes >= blockint::wire_nbytes(numel, bits), "blockint: payload is too short");
    require(!add || dtype == (int)Dtype::fp32, "blockint: sums are fp32");
    py::gil_scoped_release release;
    blockint::decode(bits, dtype, pointer<const u8>(payload), pointer<void>(out), numel, add,
                     threads);
}

}  // namespace

PYBIND11_MODULE(_cpu, m) {
    m.def("blockint_wire_nbytes", &blockint::wire_nbytes);
    m.def("blockint_encode", &blockint_encode);
    m.def("blockint_decode", &blockint_decode);
}
