// CUDA kernels of expcode: a tile of 2048 values per warp, and one look-back per thread block. With HC_PIECES for
// all pieces of a message.
#include "expcode_decode.h"
#include "expcode_encode.h"
#include "table.h"

namespace hybridcomp {
namespace expcode {

// Levels of fp16 have more bits: with 64 registers they spill before sm_90.
constexpr int HALF_BLOCKS = HC_UP_TO_ADA ? 3 : 4;

// THREADS per block, and BLOCKS that must fit a multiprocessor.
#ifndef HC_PIECES
#define HC_EXPCODE_ENCODE(NAME, F, THREADS, BLOCKS, HELD)                                          \
    extern "C" __global__ void HC_BOUNDS(THREADS, BLOCKS)                                          \
    expcode_encode_##NAME(const void* values, u64 numel, u64 dtype, u8* out, Workspace* work, u64* size) { \
        encode<F, THREADS / 32, HELD>(values, numel, dtype, out, work->states, take_ticket(work), size); \
    }
#define HC_EXPCODE_DECODE(KERNEL, F, T, ADD, THREADS, BLOCKS)                                      \
    extern "C" __global__ void HC_BOUNDS(THREADS, BLOCKS)                                          \
    expcode_##KERNEL(const u8* in, u64 nbytes, u64 numel, u64 dtype, void* out, u32* damage) {     \
        decode<F, T, ADD, THREADS / 32>(in, nbytes, numel, dtype, out, damage, (u32)warp_id());    \
    }
#else
#define HC_EXPCODE_ENCODE(NAME, F, THREADS, BLOCKS, HELD)                                          \
    extern "C" __global__ void HC_BOUNDS(THREADS, BLOCKS)                                          \
    expcode_encode_##NAME(HC_BY_VALUE(Pieces) given, u64 dtype, Workspace* work) {                 \
        u32 block = take_ticket(work);                                                             \
        Piece piece = as_table(given).at_block(block);                                             \
        encode<F, THREADS / 32, HELD>((const void*)piece.values, piece.numel, dtype,               \
                                      (u8*)piece.payload, work->states + piece.first,              \
                                      (u32)(block - piece.first), (u64*)piece.size);               \
    }
#define HC_EXPCODE_DECODE(KERNEL, F, T, ADD, THREADS, BLOCKS)                                      \
    extern "C" __global__ void HC_BOUNDS(THREADS, BLOCKS)                                          \
    expcode_##KERNEL(HC_BY_VALUE(Pieces) given, u64 dtype, u64 ranks, u32* damage) {               \
        const Piece* piece = ranks_of_block(as_table(given), ranks, blockIdx.x);                   \
        u32 tile = (u32)(blockIdx.x - piece->first) * (THREADS / 32) + threadIdx.x / 32;           \
        _Pragma("unroll 1") for (u32 rank = 0; rank < (u32)ranks; ++rank, ++piece) {               \
            decode<F, T, ADD, THREADS / 32>((const u8*)piece->payload, piece->size, piece->numel,  \
                                            dtype, (void*)piece->values, damage, tile);            \
            sync_warp();                                                                           \
        }                                                                                          \
    }
#endif
// Thread blocks per multiprocessor: the fastest number (H100); with a table, which takes registers, the most
// without spills.
#ifndef HC_PIECES
#define HC_AT_ONCE(BLOCKS, WITH_TABLE) BLOCKS
#else
#define HC_AT_ONCE(BLOCKS, WITH_TABLE) WITH_TABLE
#endif
HC_EXPCODE_ENCODE(fp32, Single, 128, HC_AT_ONCE(6, 5), 4)
HC_EXPCODE_ENCODE(bf16, Brain, 256, HC_AT_ONCE(4, 3), 4)
HC_EXPCODE_ENCODE(fp16, Half, 256, HC_AT_ONCE(HALF_BLOCKS, 2), 4)
HC_EXPCODE_DECODE(decode_fp32, Single, Fp32, false, 128, 6)
HC_EXPCODE_DECODE(decode_bf16, Brain, BFloat16, false, 64, 12)
HC_EXPCODE_DECODE(decode_fp16, Half, Float16, false, 64, 12)
HC_EXPCODE_DECODE(add_fp32, Single, Fp32, true, 128, 6)
HC_EXPCODE_DECODE(add_bf16, Brain, BFloat16, true, 64, 12)
HC_EXPCODE_DECODE(add_fp16, Half, Float16, true, 64, 12)

}  // namespace expcode
}  // namespace hybridcomp
