#include "bind.h"
#include "cpu_stepcode.h"

namespace hybridcomp {
namespace stepcode {
namespace {

void check(int dtype, size_t numel) {
    require(dtype == (int)Dtype::bf16 || dtype == (int)Dtype::fp16, "values must be bf16 or fp16");
    require(numel <= 0xffffffffu, "the format counts 4-byte units in 32 bits");
}

size_t bind_encode(int dtype, const u16* in, const u16* reference, size_t numel, u8* out, size_t nbytes,
                   int threads) {
    check(dtype, numel);
    require(nbytes >= wire_nbytes(numel), "out is too short");
    return encode(dtype, in, reference, numel, out, threads);
}

void bind_decode(int dtype, const u8* in, size_t nbytes, const u16* reference, u16* out, size_t numel, int threads) {
    check(dtype, numel);
    decode(dtype, in, nbytes, reference, out, numel, threads);
}

const Binding binding("stepcode", {function<wire_nbytes>("wire_nbytes"), function<bind_encode>("encode"),
                                   function<bind_decode>("decode")});

}  // namespace
}  // namespace stepcode
}  // namespace hybridcomp
