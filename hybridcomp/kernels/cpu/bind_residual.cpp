#include "bind.h"
#include "cpu_residual.h"

namespace hybridcomp {
namespace residual {
namespace {

void bind_load(int bits, u8* levels, u16* steps, size_t numel, float* out, int threads) {
    require(possible(bits), "bits are out of range");
    load(bits, {levels, steps}, numel, out, threads);
}

void bind_store(int bits, const float* in, size_t numel, u8* levels, u16* steps, int threads) {
    require(possible(bits), "bits are out of range");
    store(bits, in, numel, {levels, steps}, threads);
}

const Binding binding("residual", {function<bind_load>("load"), function<bind_store>("store")});

}  // namespace
}  // namespace residual
}  // namespace hybridcomp
