#include "bind.h"
#include "cpu_residual.h"

namespace hybridcomp {
namespace residual {
namespace {

void bind_load(int bits, uintptr_t levels, uintptr_t steps, size_t numel, uintptr_t out, int threads) {
    require(possible(bits), "bits are out of range");
    py::gil_scoped_release release;
    load(bits, {bytes(levels), (u16*)steps}, numel, (float*)out, threads);
}

void bind_store(int bits, uintptr_t in, size_t numel, uintptr_t levels, uintptr_t steps, int threads) {
    require(possible(bits), "bits are out of range");
    py::gil_scoped_release release;
    store(bits, (const float*)in, numel, {bytes(levels), (u16*)steps}, threads);
}

}  // namespace

const Binding binding("residual", [](py::module_& module) {
    module.def("load", &bind_load);
    module.def("store", &bind_store);
});

}  // namespace residual
}  // namespace hybridcomp
