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

size_t bind_encode(int bits, int rice, uint32_t most, uint32_t last, int dtype, const void* in, size_t numel,
                   u8* out, size_t nbytes, int threads) {
    Settings settings = checked(bits, rice, most, last, dtype, numel, false);
    return encode(settings, dtype, in, numel, out, nbytes, threads);
}

void bind_decode(int bits, int rice, uint32_t most, uint32_t last, int dtype, const u8* in, size_t nbytes, void* out,
                 size_t numel, bool add, int threads) {
    Settings settings = checked(bits, rice, most, last, dtype, numel, add);
    decode(settings, dtype, in, nbytes, out, numel, add, threads);
}

const Binding binding("topk", {function<bind_encode>("encode"), function<bind_decode>("decode")});

}  // namespace
}  // namespace topk
}  // namespace hybridcomp
