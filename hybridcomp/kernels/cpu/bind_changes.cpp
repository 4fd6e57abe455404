#include "bind.h"
#include "cpu_changes.h"

namespace hybridcomp {
namespace changes {
namespace {

const u16* halves(uintptr_t address) { return reinterpret_cast<const u16*>(address); }
u32* words(uintptr_t address) { return reinterpret_cast<u32*>(address); }

py::bytes bind_digest(uintptr_t in, size_t nbytes, int threads) {
    u8 found[DIGEST];
    {
        py::gil_scoped_release release;
        digest(bytes(in), nbytes, found, threads);
    }
    return py::bytes((const char*)found, DIGEST);
}

py::tuple bind_compare(uintptr_t in, uintptr_t old, size_t numel, uintptr_t mask, int threads) {
    u8 found[DIGEST];
    size_t differ;
    {
        py::gil_scoped_release release;
        differ = compare(halves(in), halves(old), numel, words(mask), found, threads);
    }
    return py::make_tuple(differ, py::bytes((const char*)found, DIGEST));
}

}  // namespace

const Binding binding("changes", [](py::module_& module) {
    py::call_guard<py::gil_scoped_release> released;
    module.def("digest", &bind_digest);
    module.def("compare", &bind_compare);
    module.def("pick", [](uintptr_t in, uintptr_t mask, size_t numel, uintptr_t out) {
        return pick(halves(in), words(mask), numel, (u16*)values(out));
    }, released);
    module.def("put", [](uintptr_t picked, uintptr_t mask, size_t numel, uintptr_t out) {
        put(halves(picked), words(mask), numel, (u16*)values(out));
    }, released);
    module.def("places", [](uintptr_t mask, size_t numel, uintptr_t out) {
        places(words(mask), numel, (int64_t*)values(out));
    }, released);
});

}  // namespace changes
}  // namespace hybridcomp
