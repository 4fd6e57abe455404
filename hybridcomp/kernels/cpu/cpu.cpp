// Python bindings of the CPU loops. Pointers are integers, so that the extension builds without
// torch; the codecs check tensors before they come here, and the sizes are checked once more.
#include <pybind11/pybind11.h>

#include "cpu_loops.h"

namespace py = pybind11;
using namespace hybridcomp;

namespace {

constexpr int FP32 = (int)Dtype::fp32, LAST_DTYPE = (int)Dtype::fp16;

u8* bytes(uintptr_t address) { return reinterpret_cast<u8*>(address); }
void* values(uintptr_t address) { return reinterpret_cast<void*>(address); }

void check(int dtype, bool add = false) {
    require(dtype >= FP32 && dtype <= LAST_DTYPE, "unknown dtype code");
    require(!add || dtype == FP32, "sums are accumulated in fp32");
}

template <int FIRST, int LAST>
bool in_range(int setting) { return setting >= FIRST && setting <= LAST; }

// The fixed-size codecs have one setting each: which ones are possible is all that differs.
template <size_t (*SIZE)(size_t, int), void (*ENCODE)(int, int, const void*, size_t, u8*, int),
          void (*DECODE)(int, int, const u8*, void*, size_t, bool, int), bool (*POSSIBLE)(int)>
void bind_fixed(py::module_& m, const char* encode_name, const char* decode_name) {
    m.def(encode_name, [](int setting, int dtype, uintptr_t in, size_t numel, uintptr_t out,
                          size_t nbytes, int threads) {
        require(POSSIBLE(setting), "setting is out of range");
        require(nbytes >= SIZE(numel, setting), "out is too short");
        check(dtype);
        py::gil_scoped_release release;
        ENCODE(setting, dtype, values(in), numel, bytes(out), threads);
    });
    m.def(decode_name, [](int setting, int dtype, uintptr_t payload, size_t nbytes, uintptr_t out,
                          size_t numel, bool add, int threads) {
        require(POSSIBLE(setting), "setting is out of range");
        require(nbytes >= SIZE(numel, setting), "payload is too short");
        check(dtype, add);
        py::gil_scoped_release release;
        DECODE(setting, dtype, bytes(payload), values(out), numel, add, threads);
    });
}

size_t fp8_nbytes(size_t numel, int) { return fp8::wire_nbytes(numel); }

void bind_cast(int from, int to, uintptr_t in, uintptr_t out, size_t numel, bool add, int threads) {
    check(from);
    check(to, add);
    py::gil_scoped_release release;
    cast(from, to, values(in), values(out), numel, add, threads);
}

void check_mpc(int dim, int dtype, size_t numel) {
    require(dim >= 1 && dim <= 32, "mpc: dim is out of range");
    require(numel <= 0xffffffffu, "mpc: the format counts values in 32 bits");
    check(dtype);
}

size_t mpc_encode(int dim, int dtype, uintptr_t in, size_t numel, uintptr_t out, size_t nbytes,
                  int threads) {
    check_mpc(dim, dtype, numel);
    require(nbytes >= mpc::wire_nbytes(numel, dtype), "mpc: out is too short");
    py::gil_scoped_release release;
    return mpc::encode(dim, dtype, values(in), numel, bytes(out), threads);
}

void mpc_decode(int dim, int dtype, uintptr_t payload, size_t nbytes, uintptr_t out, size_t numel,
                bool add, int threads) {
    check_mpc(dim, dtype, numel);
    py::gil_scoped_release release;
    mpc::decode(dim, dtype, bytes(payload), nbytes, values(out), numel, add, threads);
}

radix::Settings check_radix(int segment, bool relative, float bound, int dtype, size_t numel) {
    require(segment >= 64 && segment <= 4096 && segment % 16 == 0, "segment is out of range");
    require(bound > 0 && bound <= 3.4028234663852886e38f, "error bound is out of range");
    require(numel <= 0xffffffffu, "the format counts 4-byte units in 32 bits");
    check(dtype);
    return {segment, relative, bound};
}

size_t radix_encode(int segment, bool relative, float bound, int dtype, uintptr_t in, size_t numel,
                    uintptr_t out, size_t nbytes, int threads) {
    radix::Settings settings = check_radix(segment, relative, bound, dtype, numel);
    require(nbytes >= radix::wire_nbytes(numel, segment, dtype), "out is too short");
    py::gil_scoped_release release;
    return radix::encode(settings, dtype, values(in), numel, bytes(out), threads);
}

void radix_decode(int segment, bool relative, float bound, int dtype, uintptr_t payload,
                  size_t nbytes, uintptr_t out, size_t numel, bool add, int threads) {
    radix::Settings settings = check_radix(segment, relative, bound, dtype, numel);
    check(dtype, add);
    py::gil_scoped_release release;
    radix::decode(settings, dtype, bytes(payload), nbytes, values(out), numel, add, threads);
}

void check_expcode(int dtype, size_t numel) {
    require(numel <= 0xffffffffu, "the format counts 4-byte units in 32 bits");
    check(dtype);
}

size_t expcode_encode(int dtype, uintptr_t in, size_t numel, uintptr_t out, size_t nbytes,
                      int threads) {
    check_expcode(dtype, numel);
    require(nbytes >= expcode::wire_nbytes(numel, dtype), "out is too short");
    py::gil_scoped_release release;
    return expcode::encode(dtype, values(in), numel, bytes(out), threads);
}

void expcode_decode(int dtype, uintptr_t payload, size_t nbytes, uintptr_t out, size_t numel,
                    bool add, int threads) {
    check_expcode(dtype, numel);
    py::gil_scoped_release release;
    expcode::decode(dtype, bytes(payload), nbytes, values(out), numel, add, threads);
}

}  // namespace

PYBIND11_MODULE(_cpu, m) {
    m.attr("VERSION") = 2;  // kernels/__init__.py
    m.def("cast", &bind_cast);
    m.def("mpc_encode", &mpc_encode);
    m.def("mpc_decode", &mpc_decode);
    m.def("radix_encode", &radix_encode);
    m.def("radix_decode", &radix_decode);
    m.def("expcode_encode", &expcode_encode);
    m.def("expcode_decode", &expcode_decode);
    bind_fixed<fp8_nbytes, fp8::encode, fp8::decode, in_range<0, 1>>(m, "fp8_encode",
                                                                     "fp8_decode");
    bind_fixed<blockint::wire_nbytes, blockint::encode, blockint::decode, blockint::possible>(
        m, "blockint_encode", "blockint_decode");
    bind_fixed<zfp::wire_nbytes, zfp::encode, zfp::decode, in_range<10, 128>>(m, "zfp_encode",
                                                                              "zfp_decode");
}
