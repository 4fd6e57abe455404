// How a codec hands its loops to Python, without a list of codecs: its bind_<codec>.cpp has one object
// of type Binding, which cpu.cpp meets when Python loads the extension. What is bound stands in a module
// of the codec's name, hybridcomp.kernels._cpu.<codec>.
//
// Pointers are integers, so that the extension builds without torch; the codecs check tensors before they
// come here, and the sizes are checked once more.
#pragma once

#include <pybind11/pybind11.h>

#include "cpu.h"

namespace hybridcomp {

namespace py = pybind11;

// Kept in a chain: objects of several files are made in no known order.
class Binding {
  public:
    typedef void (*Bind)(py::module_& module);

    Binding(const char* codec, Bind bind) : codec_(codec), bind_(bind), next_(first()) {
        first() = this;
    }

    static void bind_all(py::module_& extension) {
        for (const Binding* one = first(); one; one = one->next_) {
            if (py::hasattr(extension, one->codec_)) {
                throw py::import_error(std::string("two files bind kernels of ") + one->codec_);
            }
            py::module_ module = extension.def_submodule(one->codec_);
            one->bind_(module);
        }
    }

  private:
    static const Binding*& first() {
        static const Binding* first = nullptr;
        return first;
    }

    const char* codec_;
    Bind bind_;
    const Binding* next_;
};

inline u8* bytes(uintptr_t address) { return reinterpret_cast<u8*>(address); }
inline void* values(uintptr_t address) { return reinterpret_cast<void*>(address); }

inline void check_dtype(int dtype, bool add = false) {
    require(dtype >= (int)Dtype::fp32 && dtype <= (int)Dtype::fp16, "unknown dtype code");
    require(!add || dtype == (int)Dtype::fp32, "sums are accumulated in fp32");
}

template <int FIRST, int LAST>
bool in_range(int setting) { return setting >= FIRST && setting <= LAST; }

// `encode` and `decode` of a codec of fixed size with one setting (FixedKernels in kernels/__init__.py).
// SIZE is what its payload takes, POSSIBLE whether a setting is one of its own.
template <size_t (*SIZE)(size_t, int), void (*ENCODE)(int, int, const void*, size_t, u8*, int),
          void (*DECODE)(int, int, const u8*, void*, size_t, bool, int), bool (*POSSIBLE)(int)>
void bind_fixed(py::module_& module) {
    module.def("encode", [](int setting, int dtype, uintptr_t in, size_t numel, uintptr_t out,
                            size_t nbytes, int threads) {
        require(POSSIBLE(setting), "setting is out of range");
        require(nbytes >= SIZE(numel, setting), "out is too short");
        check_dtype(dtype);
        py::gil_scoped_release release;
        ENCODE(setting, dtype, values(in), numel, bytes(out), threads);
    });
    module.def("decode", [](int setting, int dtype, uintptr_t payload, size_t nbytes, uintptr_t out,
                            size_t numel, bool add, int threads) {
        require(POSSIBLE(setting), "setting is out of range");
        require(nbytes >= SIZE(numel, setting), "payload is too short");
        check_dtype(dtype, add);
        py::gil_scoped_release release;
        DECODE(setting, dtype, bytes(payload), values(out), numel, add, threads);
    });
}

}  // namespace hybridcomp
