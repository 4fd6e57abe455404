// CUDA kernels of blockint that encode and decode; a warp takes a tile (blockint_tile.h). Sums over
// ranks: blockint_sum.cu. HC_DTYPE (0 fp32, 1 bf16, 2 fp16; kernels/cpu/cpu.h) chooses whose kernels an image
// has, else it has all: what is compiled at first use is what a run needs. With HC_KEPT below 32 an image has
// the kernels with residuals of so many bits alone.
#include "blockint_tile.h"

namespace hybridcomp {
namespace blockint {

// A row of the grid for each chunk. Of few bits, each chunk's residual begins at a block of its own.
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

}  // namespace blockint
}  // namespace hybridcomp

// As many blocks at once as leave every thread registers enough: one more, and values would be spilled.
#ifndef HC_ENCODE_BLOCKS
#define HC_ENCODE_BLOCKS (HC_ROTATE ? (HC_BITS < 4 ? 3 : 4) : 5)
#endif
// of fp32: fields of several widths take more, and so does the compiler for a V100
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

#define HC_DECODE(NAME, E, ADD)                                                                  \
    extern "C" __global__ void HC_BOUNDS(256, HC_DECODE_BLOCKS)                                  \
    blockint_##NAME(const unsigned char* in, unsigned long long numel, unsigned long long chunk, \
                    unsigned long long slot, unsigned long long skip, void* out) {               \
        hybridcomp::blockint::decode<hybridcomp::E, ADD>(in, numel, chunk, slot, skip, out);     \
    }

#define HC_FEEDBACK(NAME, E)                                                                     \
    extern "C" __global__ void HC_BOUNDS(256, HC_FEEDBACK_BLOCKS)                                \
    blockint_encode_feedback_##NAME(const void* values, unsigned long long numel,                \
                                    unsigned long long chunk, unsigned long long slot,           \
                                    unsigned long long skip, unsigned char* out,                 \
                                    HC_LEFT(residual)) {                                         \
        hybridcomp::blockint::encode<hybridcomp::E, true>(values, numel, chunk, slot, skip, out, \
                                                          HC_LEFT_OF(residual));                 \
    }

#if HC_KEPT < 32
#define HC_KERNELS(NAME, E, BLOCKS) HC_FEEDBACK(NAME, E)
#else
#define HC_KERNELS(NAME, E, BLOCKS)                                                              \
    extern "C" __global__ void HC_BOUNDS(256, BLOCKS)                                            \
    blockint_encode_##NAME(const void* values, unsigned long long numel,                         \
                           unsigned long long chunk, unsigned long long slot,                    \
                           unsigned long long skip, unsigned char* out) {                        \
        hybridcomp::blockint::encode<hybridcomp::E, false>(values, numel, chunk, slot, skip,     \
                                                           out, nullptr);                        \
    }                                                                                            \
    HC_FEEDBACK(NAME, E)                                                                         \
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
