#include "bind.h"
#include "cpu_casts.h"

namespace hybridcomp {
namespace {

void bind_cast(int from, int to, uintptr_t in, uintptr_t out, size_t numel, bool add, int threads) {
    check_dtype(from);
    check_dtype(to, add);
    py::gil_scoped_release release;
    cast(from, to, values(in), values(out), numel, add, threads);
}

}  // namespace

const Binding casts("casts", [](py::module_& module) { module.def("cast", &bind_cast); });
const Binding scaled("fp8", bind_fixed<fp8::wire_nbytes, fp8::encode, fp8::decode, in_range<0, 1>>);

}  // namespace hybridcomp
