#include "bind.h"
#include "cpu_blockint.h"

namespace hybridcomp {
namespace blockint {
namespace {

void bind_encode_kept(int setting, int dtype, const void* in, size_t numel, u8* out, size_t nbytes, int bits,
                      u8* levels, u16* steps, int threads) {
    require(possible(setting), "setting is out of range");
    require(residual::possible(bits), "bits are out of range");
    require(nbytes >= wire_nbytes(numel, setting), "out is too short");
    check_dtype(dtype);
    encode_kept(setting, dtype, in, numel, out, bits, {levels, steps}, threads);
}

using Functions = Fixed<wire_nbytes, encode, decode, possible>;
const Binding binding("blockint", {function<Functions::encode>("encode"), function<Functions::decode>("decode"),
                                   function<bind_encode_kept>("encode_kept")});

}  // namespace
}  // namespace blockint
}  // namespace hybridcomp
