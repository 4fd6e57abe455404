// CUDA kernels of blockint that sum over ranks: decode, sum and, for an all_reduce, encode again, a tile per warp
// (blockint_ranks.h). HC_DTYPE and HC_KEPT as in blockint.cu. A plan (table.h) sums several stretches, each by whole
// thread blocks.
#include "blockint_ranks.h"
#include "table.h"

namespace hybridcomp {
namespace blockint {

// Writes the sum in fp32. With FEEDBACK it may begin with `owner`, which may be `out`.
template <class E, bool FEEDBACK, class K>
HC_INLINE void add_up(const u8* payloads, const void* own, u64 numel, u64 ranks, u64 me, u64 slot,
                      float* out, K residual, const float* owner, u32 turn) {
    __shared__ Room<E, true> rooms[SUM_WARPS];
    auto& room = rooms[threadIdx.x / WARP];
    Span span = {turn * HC_SUM_THREADS + threadIdx.x, numel, false};
    if (span.tile() >= ceil_div(numel, TILE)) return;  // the whole warp
    const auto* values = (const typename E::Stored*)own;
    span.whole = span.tile_first() + TILE <= numel && whole_vectors(values) && whole_vectors(out) &&
                 whole_vectors(owner);
    if constexpr (!FEW) span.whole = span.whole && whole_vectors(residual);
    float held[BLOCK];
#pragma unroll
    for (int k = 0; k < BLOCK; ++k) held[k] = -0.0f;  // changes nothing
    add_ranks<E, FEEDBACK>(held, room, payloads, values, ranks, me, slot, residual, owner, span, turn);
    span = span.again();
    sync_warp();  // all of the room was read
#pragma unroll
    for (u32 i = 0; i < BLOCK / 4; ++i) write_chunk(held + 4 * i, i, room.wide, out, span);
    flush_chunks(room.wide, out, span);
}

// Writes the sums of the stretches that this rank owns; a row has their positions in `own` and `out`. Payloads of
// consecutive ranks are `slot` bytes apart. With FEEDBACK there may be a residual, and sums may begin with
// `owner`, null or `out`.
template <class E, bool FEEDBACK>
HC_INLINE void add_up_planned(const PlannedRow* rows, u64 count, const u8* payloads, const void* own,
                              u64 ranks, u64 me, u64 slot, float* out, Kept residual, const float* owner) {
    const PlannedRow& row = row_of(rows, count, (u64)blockIdx.x * SUM_WARPS);
    if constexpr (FEEDBACK) {
        if (residual) residual = residual + row.values;
        if (owner) owner += row.out;
    }
    add_up<E, FEEDBACK>(payloads + row.payload, (const typename E::Stored*)own + row.values, row.numel, ranks,
                        me, slot, out + row.out, residual, owner, blockIdx.x - (u32)(row.first / SUM_WARPS));
}

// Encodes the sum into `out`. With FEEDBACK there may be the residual `owner`, which becomes the quantization
// error.
template <class E, bool HALF, bool FEEDBACK, class K>
HC_INLINE void reduce(const u8* payloads, const void* own, u64 numel, u64 ranks, u64 me, u64 slot,
                      u8* out, K residual, K owner) {
    __shared__ Room<E, FEEDBACK> rooms[SUM_WARPS];
    auto& room = rooms[threadIdx.x / WARP];
    Layout layout(numel);
    Span span = {blockIdx.x * HC_SUM_THREADS + threadIdx.x, numel, false};
    if (span.tile() >= layout.tiles) return;
    const auto* values = (const typename E::Stored*)own;
    span.whole = span.tile_first() + TILE <= numel && whole_vectors(values);
    if constexpr (FEEDBACK && !FEW) {
        span.whole = span.whole && whole_vectors(residual) && whole_vectors(owner);
    }
    float held[BLOCK];
#pragma unroll
    for (int k = 0; k < BLOCK; ++k) held[k] = 0.0f;
    add_ranks<E, FEEDBACK>(held, room, payloads, values, ranks, me, slot, residual, owner, span,
                           blockIdx.x);
    span = span.again();
    float top = largest_magnitude(held);
    if (HALF && any_in_warp(magnitude_bits(top) >= HALF_OVERFLOW)) {
#pragma unroll
        for (int k = 0; k < BLOCK; ++k) held[k] = show_half(held[k]);
        top = largest_magnitude(held);
    }
    if constexpr (ROTATE && FEEDBACK) {  // they wait there, also where the tile is not whole
        sync_warp();
#pragma unroll
        for (u32 i = 0; i < BLOCK / 4; ++i) {
            room.wide.mine(i) = make_uint4(float_bits(held[4 * i]), float_bits(held[4 * i + 1]),
                                           float_bits(held[4 * i + 2]), float_bits(held[4 * i + 3]));
        }
    }
    if constexpr (ROTATE) {
        rotate_block(held, in_group(span.first(), numel));
        top = largest_magnitude(held);
    }
    u32 absmax = magnitude_bits(top), base = base_of(largest_in_warp(absmax < INF_BITS ? absmax : 0));
    u32 code = scale_code<SPACING>(absmax, base);
    Factor factor = factor_of(code, base);
    if constexpr (LLOYD) {
        u32 gain = 0;
#pragma unroll
        for (int k = 0; k < BLOCK; k += EACH) gain += gains_of(held + k, factor.inverse);
        choose_scale(gain, base, code, factor);
    }
    if (span.block < layout.blocks) {
        store_block(held, factor, (u32)span.first(), (u32*)out + (u64)span.block * HC_BITS);
        out[layout.scales + span.block] = (u8)code;
    }
    if constexpr (FEEDBACK) {
        if (owner) settle_block<E>(held, factor, code, base, room.wide, owner, span);
    }
    if (lane_id() == 0) out[layout.bases + span.tile()] = (u8)base;
    if (span.tile() + 1 == layout.tiles) pad_payload(out, layout.used, layout.total);
}

// Blocks per multiprocessor: on an H100 ten were at least as fast as eight or twelve. Rotations need more
// registers before sm_80, where shared memory has no room for ten, and everywhere with a residual of few bits,
// which each lane unpacks itself.
#ifndef HC_SUM_BLOCKS
#define HC_SUM_BLOCKS (HC_ROTATE && (HC_KEPT < 32 || HC_UP_TO_TURING) ? 8 : 10)
#endif
#ifndef HC_PLANNED_SUM_BLOCKS
#define HC_PLANNED_SUM_BLOCKS (HC_KEPT < 32 || HC_ROTATE ? 8 : HC_SUM_BLOCKS)
#endif

#define HC_SUM_ARGUMENTS const u8 *payloads, const void *own, u64 numel, u64 ranks, u64 me, u64 slot
#define HC_COMMA ,
#define HC_PLANNED_SUM(NAME, E, FEEDBACK, OWNER, ...)                                              \
    extern "C" __global__ void HC_BOUNDS(HC_SUM_THREADS, HC_PLANNED_SUM_BLOCKS)                    \
    blockint_planned_sum_##NAME(const PlannedRow* rows, u64 count, const u8* payloads,             \
                                const void* own, u64 ranks, u64 me, u64 slot, float* out,          \
                                HC_LEFT(residual) __VA_ARGS__) {                                   \
        add_up_planned<E, FEEDBACK>(rows, count, payloads, own, ranks, me, slot, out,              \
                                    HC_LEFT_OF(residual), OWNER);                                  \
    }

#define HC_FEEDBACK(NAME, E, HALF)                                                                 \
    extern "C" __global__ void HC_BOUNDS(HC_SUM_THREADS, HC_SUM_BLOCKS)                            \
    blockint_reduce_feedback_##NAME(HC_SUM_ARGUMENTS, u8* out, HC_LEFT(residual), HC_LEFT(owner)) { \
        reduce<E, HALF, true>(payloads, own, numel, ranks, me, slot, out, HC_LEFT_OF(residual),    \
                              HC_LEFT_OF(owner));                                                  \
    }                                                                                              \
    extern "C" __global__ void HC_BOUNDS(HC_SUM_THREADS, HC_SUM_BLOCKS)                            \
    blockint_sum_feedback_##NAME(HC_SUM_ARGUMENTS, float* out, HC_LEFT(residual), float* owner) {  \
        add_up<E, true>(payloads, own, numel, ranks, me, slot, out, HC_LEFT_OF(residual), owner,   \
                        blockIdx.x);                                                               \
    }                                                                                              \
    HC_PLANNED_SUM(feedback_##NAME, E, true, owner, HC_COMMA const float* owner)

#if HC_KEPT < 32
#define HC_KERNELS HC_FEEDBACK
#else
#define HC_KERNELS(NAME, E, HALF)                                                                  \
    extern "C" __global__ void HC_BOUNDS(HC_SUM_THREADS, HC_SUM_BLOCKS)                            \
    blockint_reduce_##NAME(HC_SUM_ARGUMENTS, u8* out) {                                            \
        reduce<E, HALF, false>(payloads, own, numel, ranks, me, slot, out, Kept(), Kept());        \
    }                                                                                              \
    extern "C" __global__ void HC_BOUNDS(HC_SUM_THREADS, HC_SUM_BLOCKS)                            \
    blockint_sum_##NAME(HC_SUM_ARGUMENTS, float* out) {                                            \
        add_up<E, false>(payloads, own, numel, ranks, me, slot, out, Kept(), nullptr, blockIdx.x); \
    }                                                                                              \
    HC_PLANNED_SUM(NAME, E, false, nullptr, )                                                      \
    HC_FEEDBACK(NAME, E, HALF)
#endif

#if !defined(HC_DTYPE) || HC_DTYPE == 0
HC_KERNELS(fp32, EightFp32, false)
#endif
#if !defined(HC_DTYPE) || HC_DTYPE == 1
HC_KERNELS(bf16, EightBf16, false)
#endif
#if !defined(HC_DTYPE) || HC_DTYPE == 2
HC_KERNELS(fp16, EightFp16, true)
#endif

}  // namespace blockint
}  // namespace hybridcomp
