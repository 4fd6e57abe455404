// CUDA kernels of radix. A tile is assembled and taken apart in shared memory, where it may begin at any bit; it
// moves as whole words. With HC_PIECES for all pieces of a message.
#include "radix_decode.h"
#include "radix_encode.h"
#include "table.h"

namespace hybridcomp {
namespace radix {

// Thread blocks per multiprocessor; Turing's compiler needs more registers.
#if HC_UP_TO_TURING
#define HC_AT_ONCE(B) 3
#else
#define HC_AT_ONCE(B) B::AT_ONCE
#endif
// For decoding; a V100's compiler spills with more than five.
#define HC_DECODE_AT_ONCE(O, ADD) (HC_VOLTA ? 5 : ADD ? 6 : O::AT_ONCE)

#ifndef HC_PIECES
#define HC_ENCODE(NAME, B)                                                                         \
    extern "C" __global__ void HC_BOUNDS(ENCODE_THREADS, HC_AT_ONCE(B))                            \
    radix_encode_##NAME(const void* values, u64 numel, u64 segment, u64 bound, u64 relative,       \
                        u64 dtype, u8* out, Workspace* work, u64* size) {                          \
        encode<B>(values, numel, segment, bound, relative, dtype, out, work->states,               \
                  take_ticket(work), size);                                                        \
    }
#define HC_DECODE(NAME, O, ADD)                                                                    \
    extern "C" __global__ void HC_BOUNDS(O::THREADS, HC_DECODE_AT_ONCE(O, ADD))                    \
    NAME(const u8* in, u64 nbytes, u64 numel, u64 segment, u64 bound, u64 relative, void* out,     \
         u32* damage) {                                                                            \
        decode<O, ADD>(in, nbytes, numel, segment, bound, relative, out, damage, blockIdx.x);      \
    }
#else
#define HC_ENCODE(NAME, B)                                                                         \
    extern "C" __global__ void HC_BOUNDS(ENCODE_THREADS, HC_AT_ONCE(B) - 1)                        \
    radix_encode_##NAME(HC_BY_VALUE(Pieces) given, u64 segment, u64 bound, u64 relative,           \
                        u64 dtype, Workspace* work) {                                              \
        u32 block = take_ticket(work);                                                             \
        Piece piece = as_table(given).at_block(block);                                             \
        encode<B>((const void*)piece.values, piece.numel, segment, bound, relative, dtype,         \
                  (u8*)piece.payload, work->states + piece.first, (u32)(block - piece.first),      \
                  (u64*)piece.size);                                                               \
    }
#define HC_DECODE(NAME, O, ADD)                                                                    \
    extern "C" __global__ void HC_BOUNDS(O::THREADS, HC_DECODE_AT_ONCE(O, ADD) - 3)                \
    NAME(HC_BY_VALUE(Pieces) given, u64 segment, u64 bound, u64 relative, u64 ranks, u32* damage) { \
        const Piece* piece = ranks_of_block(as_table(given), ranks, blockIdx.x);                   \
        u32 number = (u32)(blockIdx.x - piece->first);                                             \
        _Pragma("unroll 1") for (u32 rank = 0; rank < (u32)ranks; ++rank, ++piece) {               \
            decode<O, ADD>((const u8*)piece->payload, piece->size, piece->numel, segment, bound,   \
                           relative, (void*)piece->values, damage, number);                        \
            __syncthreads();                                                                       \
        }                                                                                          \
    }
#endif
HC_ENCODE(fp32, Fp32Block)
HC_ENCODE(bf16, Bf16Block)
HC_ENCODE(fp16, Fp16Block)
HC_DECODE(radix_decode_fp32, OutFp32, false)
HC_DECODE(radix_decode_bf16, OutBf16, false)
HC_DECODE(radix_decode_fp16, OutFp16, false)
HC_DECODE(radix_add, OutFp32, true)

}  // namespace radix
}  // namespace hybridcomp
