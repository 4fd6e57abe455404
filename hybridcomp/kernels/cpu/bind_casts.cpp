#include "bind.h"
#include "cpu_casts.h"

namespace hybridcomp {
namespace {

void bind_cast(int from, int to, const void* in, void* out, size_t numel, bool add, int threads) {
    check_dtype(from);
    check_dtype(to, add);
    cast(from, to, in, out, numel, add, threads);
}

const Binding casts("casts", {function<bind_cast>("cast")});
const Binding scaled("fp8", bind_fixed<fp8::wire_nbytes, fp8::encode, fp8::decode, in_range<0, 1>>());

}  // namespace
}  // namespace hybridcomp
