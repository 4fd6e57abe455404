// CUDA kernels of blockint that add up ranks: decode, sum and, for an all_reduce, encode again; a warp
// takes a tile, or every so many (blockint_ranks.h). HC_DTYPE: as in blockint.cu.
#include "blockint_ranks.h"

namespace hybridcomp {
namespace blockint {

// The sum, in fp32. A warp takes every so many tiles as there are warps; with FEEDBACK one.
template <class E, bool FEEDBACK>
HC_INLINE void add_up(const u8* payloads, const void* own, u64 numel, u64 ranks, u64 me, u64 slot,
                      float* out, float* residual) {
    __shared__ Room<E, true> rooms[SUM_WARPS];
    auto& room = rooms[threadIdx.x / WARP];
    Layout layout(numel);
    Sources<E> from(payloads, own, ranks, me, slot);
    u64 tile = warp_id(), stride = (u64)gridDim.x * SUM_WARPS;
    if (tile >= layout.tiles) return;  // the whole warp
    bool aligned = whole_vectors(own) && whole_vectors(out) && whole_vectors(residual);
    start_ranks<E, false>(room, from, layout, nullptr, tile, Span(tile, tile, numel, aligned));
    u32 next = 0, bases = bases_of(from, layout, tile, 0);
#pragma unroll 1
    for (u64 following; tile < layout.tiles; tile = following) {
        following = FEEDBACK ? layout.tiles : tile + stride;
        u32 ahead = bases_of(from, layout, following, 0);
        Span span(tile, following, numel, aligned);
        float held[BLOCK];
#pragma unroll
        for (int k = 0; k < BLOCK; ++k) held[k] = -0.0f;  // changes nothing
        if constexpr (FEEDBACK) start_with(held, room, nullptr, residual, tile, span, false);
        add_ranks<E, FEEDBACK>(held, room, from, layout, residual, tile, following, span, bases, next);
        __syncwarp();  // all of the room was read
#pragma unroll
        for (u32 i = 0; i < BLOCK / 4; ++i) write_chunk(held + 4 * i, i, room.wide, out, span);
        flush_chunks(room.wide, out, tile, span);
        if constexpr (!FEEDBACK) __syncwarp();
        bases = ahead;
    }
}

// The sum, encoded into `out`. With FEEDBACK there may be the residual `owner`, which becomes what the
// encoding leaves out.
template <class E, bool HALF, bool FEEDBACK>
HC_INLINE void reduce(const u8* payloads, const void* own, u64 numel, u64 ranks, u64 me, u64 slot,
                      u8* out, float* residual, float* owner) {
    __shared__ Room<E, FEEDBACK> rooms[SUM_WARPS];
    auto& room = rooms[threadIdx.x / WARP];
    Layout layout(numel);
    Sources<E> from(payloads, own, ranks, me, slot);
    u64 tile = warp_id(), stride = (u64)gridDim.x * SUM_WARPS;
    if (tile >= layout.tiles) return;
    bool aligned = whole_vectors(own) && (!FEEDBACK || (whole_vectors(residual) && whole_vectors(owner)));
    start_ranks<E, FEEDBACK>(room, from, layout, owner, tile, Span(tile, tile, numel, aligned));
    u32 next = 0, bases = bases_of(from, layout, tile, 0);
#pragma unroll 1
    for (u64 following; tile < layout.tiles; tile = following) {
        following = FEEDBACK ? layout.tiles : tile + stride;
        u32 ahead = bases_of(from, layout, following, 0);
        Span span(tile, following, numel, aligned);
        float held[BLOCK];
#pragma unroll
        for (int k = 0; k < BLOCK; ++k) held[k] = 0.0f;
        if constexpr (FEEDBACK) start_with(held, room, owner, residual, tile, span, from.depth == HC_STAGES);
        add_ranks<E, FEEDBACK>(held, room, from, layout, residual, tile, following, span, bases, next);
#pragma unroll
        for (int k = 0; k < BLOCK; ++k) {
            if (HALF) held[k] = show_half(held[k]);
        }
        encode_sum<E, FEEDBACK>(held, room, layout, out, owner, tile, span);
        bases = ahead;
    }
}

}  // namespace blockint
}  // namespace hybridcomp

#ifndef HC_SUM_BLOCKS
#define HC_SUM_BLOCKS 10
#endif
#ifndef HC_SUM_FEEDBACK_BLOCKS
#define HC_SUM_FEEDBACK_BLOCKS 8
#endif

#define HC_SUM_ARGUMENTS                                                              \
    const unsigned char *payloads, const void *own, unsigned long long numel,        \
        unsigned long long ranks, unsigned long long me, unsigned long long slot

#define HC_KERNELS(NAME, E, HALF)                                                                 \
    extern "C" __global__ void __launch_bounds__(HC_SUM_THREADS, HC_SUM_BLOCKS)                   \
    blockint_reduce_##NAME(HC_SUM_ARGUMENTS, unsigned char* out) {                                \
        hybridcomp::blockint::reduce<hybridcomp::E, HALF, false>(payloads, own, numel, ranks, me, \
                                                                 slot, out, nullptr, nullptr);    \
    }                                                                                             \
    extern "C" __global__ void __launch_bounds__(HC_SUM_THREADS, HC_SUM_FEEDBACK_BLOCKS)          \
    blockint_reduce_feedback_##NAME(HC_SUM_ARGUMENTS, unsigned char* out, float* residual,        \
                                    float* owner) {                                               \
        hybridcomp::blockint::reduce<hybridcomp::E, HALF, true>(payloads, own, numel, ranks, me,  \
                                                                slot, out, residual, owner);      \
    }                                                                                             \
    extern "C" __global__ void __launch_bounds__(HC_SUM_THREADS, HC_SUM_FEEDBACK_BLOCKS)          \
    blockint_sum_##NAME(HC_SUM_ARGUMENTS, float* out) {                                           \
        hybridcomp::blockint::add_up<hybridcomp::E, false>(payloads, own, numel, ranks, me, slot, \
                                                           out, nullptr);                         \
    }                                                                                             \
    extern "C" __global__ void __launch_bounds__(HC_SUM_THREADS, HC_SUM_FEEDBACK_BLOCKS)          \
    blockint_sum_feedback_##NAME(HC_SUM_ARGUMENTS, float* out, float* residual) {                 \
        hybridcomp::blockint::add_up<hybridcomp::E, true>(payloads, own, numel, ranks, me, slot,  \
                                                          out, residual);                         \
    }

#if !defined(HC_DTYPE) || HC_DTYPE == 0
HC_KERNELS(fp32, EightFp32, false)
#endif
#if !defined(HC_DTYPE) || HC_DTYPE == 1
HC_KERNELS(bf16, EightBf16, false)
#endif
#if !defined(HC_DTYPE) || HC_DTYPE == 2
HC_KERNELS(fp16, EightFp16, true)
#endif
