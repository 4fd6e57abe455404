// stepcode on a GPU: the models of all pieces, from samples.
#pragma once

#include "stepcode_plan.h"

namespace hybridcomp {
namespace stepcode {

// Calls `each` for the first and last index of every sampled run that is this block's.
template <class F>
HC_INLINE void for_samples(u64 numel, F each) {
    u64 stride = stride_of(numel) * RUN, runs = ceil_div(numel, stride);
    for (u64 run = blockIdx.x; run < runs; run += gridDim.x) {
        u64 first = run * stride;
        each(first, numel - first < RUN ? numel : first + RUN);
    }
}

// Counts each exponent in the samples of the reference.
HC_INLINE void count_exponents(const Piece& piece, u32 dtype, Plan* plan) {
    __shared__ u32 counts[256];
    const u16* reference = (const u16*)piece.reference;
    for (u32 e = threadIdx.x; e < 256; e += blockDim.x) counts[e] = 0;
    __syncthreads();
    for_samples(piece.numel, [&](u64 first, u64 end) {
        for (u64 i = first + threadIdx.x; i < end; i += blockDim.x) {
            atomicAdd(counts + exponent_of(reference[i], dtype), 1u);
        }
    });
    __syncthreads();
    for (u32 e = threadIdx.x; e < 256; e += blockDim.x) {
        if (counts[e]) atomicAdd(plan->exponents + e, counts[e]);
    }
}

// `lowest_exponent` of what was counted, by 256 threads; several barriers. Fewer than 2^21 values are sampled.
HC_INLINE u32 lowest_of(const Plan* plan, u32 dtype) {
    __shared__ u32 counts[256], tops[WARPS];
    u32 e = threadIdx.x, sum = 0;
    counts[e] = plan->exponents[e];
    __syncthreads();
    for (u32 i = 0; e + 1 >= CONTEXTS && i < CONTEXTS; ++i) sum += counts[e - i];
    bool ends = e + 1 >= CONTEXTS && e < exponents(dtype);
    u32 top = largest_in_warp(ends ? sum << 8 | e : 0);  // of several the last
    if (lane_id() == 0) tops[e / WARP] = top;
    __syncthreads();
    for (u32 w = 0; w < WARPS; ++w) top = tops[w] > top ? tops[w] : top;
    return (top & 255) + 1 - CONTEXTS;
}

// Counts the symbols of each context in the samples.
HC_INLINE void count_steps(const Piece& piece, u32 dtype, Plan* plan) {
    __shared__ u32 counts[CONTEXTS * ROW];
    for (u32 i = threadIdx.x; i < CONTEXTS * ROW; i += blockDim.x) counts[i] = 0;
    u32 lowest = lowest_of(plan, dtype);
    const u16 *reference = (const u16*)piece.reference, *values = (const u16*)piece.values;
    for_samples(piece.numel, [&](u64 first, u64 end) {
        for (u64 i = first + threadIdx.x; i < end; i += blockDim.x) {
            u32 old = reference[i], symbol = code_of(step_between(old, values[i])).symbol;
            atomicAdd(counts + context_of(old, dtype, lowest) * ROW + symbol, 1u);
        }
    });
    __syncthreads();
    for (u32 i = threadIdx.x; i < CONTEXTS * ROW; i += blockDim.x) {
        if (counts[i]) atomicAdd(plan->ranges[0] + i, counts[i]);
    }
}

// Makes the model from the counts, by one block: writes ranges and sizes to the plan, its bytes to the payload.
HC_INLINE void make_model(const Piece& piece, u32 dtype, Plan* plan) {
    __shared__ u32 sums[CONTEXTS][ROW], ranges[CONTEXTS][ROW], begins[CONTEXTS];
    __shared__ u64 costs[CONTEXTS], sampled[CONTEXTS];
    u8* out = (u8*)piece.payload + HEADER_BYTES;
    copy_words(plan->ranges[0], sums[0], CONTEXTS * ROW);
    u32 lowest = lowest_of(plan, dtype), c = threadIdx.x;
    if (c < CONTEXTS) {
        frequencies_from(sums[c], least_count(piece.numel), ranges[c]);
        costs[c] = cost_of(sums[c], ranges[c]), sampled[c] = 0;
        for (u32 s = 0; s < ESCAPE; ++s) sampled[c] += sums[c][s];
        begins[c] = 1 + 3 * listed_symbols(ranges[c]);
        ranges_from(ranges[c]);
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        u64 cost = 0, all = 0;
        u32 at = 0;
        for (u32 i = 0; i < CONTEXTS; ++i) {
            u32 length = begins[i];
            cost += costs[i], all += sampled[i];
            begins[i] = at, at += length;
        }
        plan->model = (at + 3) / 4 * 4, plan->lowest = lowest, plan->tile = 1u << tile_log(cost, all);
        for (; at % 4; ++at) out[at] = 0;
    }
    __syncthreads();
    if (c < CONTEXTS) write_context(ranges[c], out + begins[c]);
    for (u32 i = threadIdx.x; i < CONTEXTS * SYMBOLS; i += blockDim.x) {
        plan->ranges[i / SYMBOLS][i % SYMBOLS] = ranges[i / SYMBOLS][i % SYMBOLS];
    }
}

}  // namespace stepcode
}  // namespace hybridcomp
