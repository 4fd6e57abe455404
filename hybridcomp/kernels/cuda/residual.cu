// CUDA kernels that convert residuals of HC_KEPT bits from and to fp32, without encoding anything. A warp takes
// 1024 values (blockint_kept.h).
#include "blockint_feedback.h"

namespace hybridcomp {
namespace blockint {

HC_INLINE void load_residual(const FewBits& kept, u64 numel, float* out) {
    u64 tile = warp_id();
    if (tile >= ceil_div(numel, TILE)) return;  // the whole warp
    Place place;
    KeptTile<HC_KEPT> words;
    words.load(kept, tile, Layout(numel).blocks_of(tile), place);
    bool whole = (tile + 1) * TILE <= numel && whole_vectors(out);
#pragma unroll
    for (int i = 0; i < ROUNDS; ++i) {
        float values[EACH];
        words.values(i, place, values);
        store_eight(values, out, tile * TILE + i * ROUND + lane_id() * EACH, numel, whole);
    }
}

HC_INLINE void store_residual(const float* values, u64 numel, const FewBits& kept) {
    u64 tile = warp_id();
    if (tile >= ceil_div(numel, TILE)) return;
    Place place;
    EightFp32 left[ROUNDS];
    load_tile(left, values, tile * TILE, numel, (tile + 1) * TILE <= numel && whole_vectors(values));
#pragma unroll
    for (int i = 0; i < ROUNDS; ++i) {
#pragma unroll
        for (int k = 0; k < EACH; ++k) left[i].values[k] = residual::left_out(left[i].values[k], 0.0f);
    }
    store_kept_tile<HC_KEPT>(left, kept, tile, Layout(numel).blocks_of(tile), place);
}

#if HC_KEPT < 32
extern "C" __global__ void HC_BOUNDS(256, 4)
residual_load(HC_LEFT(kept), u64 numel, float* out) { load_residual(HC_LEFT_OF(kept), numel, out); }
extern "C" __global__ void HC_BOUNDS(256, 4)
residual_store(const float* values, u64 numel, HC_LEFT(kept)) { store_residual(values, numel, HC_LEFT_OF(kept)); }
#endif

}  // namespace blockint
}  // namespace hybridcomp
