// CUDA kernels that encode and decode blockint, a tile per warp (blockint_tile.h); blockint_sum.cu sums over
// ranks. HC_DTYPE (0 fp32, 1 bf16, 2 fp16; kernels/cpu/cpu.h) limits an image to the kernels of one dtype, so that
// a run compiles only the kernels it uses; without it an image has all. With HC_KEPT below 32 an image has only
// the kernels with residuals of that many bits.
#include "blockint_tile.h"

namespace hybridcomp {
namespace blockint {

// Encodes a chunk per row of the grid. A residual of few bits begins at a new block for each chunk.
template <class E, bool FEEDBACK>
HC_INLINE void encode(const void* source, u64 numel, u64 chunk, u64 slot, u64 skip, u8* out,
                      Kept residual) {
    Chunk mine(numel, chunk, slot, skip);
    u64 tile = warp_id();
    if (tile >= ceil_div(mine.count, TILE)) return;  // the whole warp
    u64 kept = FEW ? mine.index * ceil_div(chunk, BLOCK) * BLOCK : mine.first;
    encode_tile<E, FEEDBACK>((const typename E::Stored*)source + mine.first, mine.count, tile,
                             out + mine.payload, FEEDBACK ? residual + kept : residual);
}

template <class E, bool ADD>
HC_INLINE void decode(const u8* in, u64 numel, u64 chunk, u64 slot, u64 skip, void* target) {
    Chunk mine(numel, chunk, slot, skip);
    u64 tile = warp_id();
    if (tile >= ceil_div(mine.count, TILE)) return;
    decode_tile<E, ADD>(in + mine.payload, mine.count, tile,
                        (typename E::Stored*)target + mine.first);
}

// The most blocks at once for which no thread spills registers.
#ifndef HC_ENCODE_BLOCKS
#define HC_ENCODE_BLOCKS (HC_ROTATE ? (HC_BITS < 4 ? 3 : 4) : 5)
#endif
// for fp32: fields of several widths take more registers, and so does the compiler for a V100
#ifndef HC_ENCODE_WIDE_BLOCKS
#define HC_MORE_WIDE                                                                \
    ((HC_BITS > 4 && HC_BITS < 8) || (HC_LEVELS && HC_BLACKWELL) ||              \
     HC_VOLTA)
#define HC_ENCODE_WIDE_BLOCKS (HC_MORE_WIDE ? (HC_ROTATE ? 3 : 4) : HC_ENCODE_BLOCKS)
#endif
#ifndef HC_FEEDBACK_BLOCKS
#define HC_MORE_KEPT (HC_KEPT < 32 && (HC_ROTATE || HC_LEVELS || HC_BITS % 4 || HC_BLACKWELL))
#define HC_FEEDBACK_BLOCKS (HC_UP_TO_ADA || HC_MORE_KEPT ? 2 : 3)
#endif
#ifndef HC_DECODE_BLOCKS
#define HC_DECODE_BLOCKS (HC_ROTATE ? 4 : 5)
#endif

#define HC_DECODE(NAME, E, ADD)                                                                    \
    extern "C" __global__ void HC_BOUNDS(256, HC_DECODE_BLOCKS)                                    \
    blockint_##NAME(const u8* in, u64 numel, u64 chunk, u64 slot, u64 skip, void* out) {           \
        decode<E, ADD>(in, numel, chunk, slot, skip, out);                                         \
    }

#define HC_FEEDBACK(NAME, E)                                                                       \
    extern "C" __global__ void HC_BOUNDS(256, HC_FEEDBACK_BLOCKS)                                  \
    blockint_encode_feedback_##NAME(const void* values, u64 numel, u64 chunk, u64 slot, u64 skip,  \
                                    u8* out, HC_LEFT(residual)) {                                  \
        encode<E, true>(values, numel, chunk, slot, skip, out, HC_LEFT_OF(residual));              \
    }

#if HC_KEPT < 32
#define HC_KERNELS(NAME, E, BLOCKS) HC_FEEDBACK(NAME, E)
#else
#define HC_KERNELS(NAME, E, BLOCKS)                                                                \
    extern "C" __global__ void HC_BOUNDS(256, BLOCKS)                                              \
    blockint_encode_##NAME(const void* values, u64 numel, u64 chunk, u64 slot, u64 skip, u8* out) { \
        encode<E, false>(values, numel, chunk, slot, skip, out, nullptr);                          \
    }                                                                                              \
    HC_FEEDBACK(NAME, E)                                                                           \
    HC_DECODE(decode_##NAME, E, false)
#endif

#if !defined(HC_DTYPE) || HC_DTYPE == 0
HC_KERNELS(fp32, EightFp32, HC_ENCODE_WIDE_BLOCKS)
#if HC_KEPT == 32
HC_DECODE(add, EightFp32, true)
#endif
#endif
#if !defined(HC_DTYPE) || HC_DTYPE == 1
HC_KERNELS(bf16, EightBf16, HC_ENCODE_BLOCKS)
#endif
#if !defined(HC_DTYPE) || HC_DTYPE == 2
HC_KERNELS(fp16, EightFp16, HC_ENCODE_BLOCKS)
#endif

}  // namespace blockint
}  // namespace hybridcomp
