// CUDA kernels of radix. A tile is put together, and taken apart, in shared memory, where its place in
// bits needs no alignment; it moves as whole words. With HC_PIECES for all pieces of a message.
#include "radix_decode.h"
#include "radix_encode.h"
#include "table.h"

// Blocks of threads at once on a multiprocessor; Turing's compiler needs more registers.
#if HC_UP_TO_TURING
#define HC_AT_ONCE(B) 3
#else
#define HC_AT_ONCE(B) hybridcomp::radix::B::AT_ONCE
#endif

// decoding, of which a V100's compiler spills where more than five fit
#define HC_DECODE_AT_ONCE(O, ADD) \
    (HC_VOLTA ? 5 : ADD ? 6 : hybridcomp::radix::O::AT_ONCE)

#ifndef HC_PIECES
#define HC_ENCODE(NAME, B)                                                                    \
    extern "C" __global__ void                                                                \
    HC_BOUNDS(hybridcomp::radix::ENCODE_THREADS, HC_AT_ONCE(B))                               \
    radix_encode_##NAME(const void* values, unsigned long long numel,                         \
                        unsigned long long segment, unsigned long long bound,                 \
                        unsigned long long relative, unsigned long long dtype,                \
                        unsigned char* out, hybridcomp::Workspace* work,                      \
                        unsigned long long* size) {                                           \
        hybridcomp::radix::encode<hybridcomp::radix::B>(                                      \
            values, numel, segment, bound, relative, dtype, out, work->states,                \
            hybridcomp::take_ticket(work), size);                                             \
    }
#define HC_DECODE(NAME, O, ADD)                                                               \
    extern "C" __global__ void                                                                \
    HC_BOUNDS(hybridcomp::radix::O::THREADS, HC_DECODE_AT_ONCE(O, ADD))                      \
    NAME(const unsigned char* in, unsigned long long nbytes, unsigned long long numel,        \
         unsigned long long segment, unsigned long long bound, unsigned long long relative,   \
         void* out, unsigned int* damage) {                                                   \
        hybridcomp::radix::decode<hybridcomp::radix::O, ADD>(                                 \
            in, nbytes, numel, segment, bound, relative, out, damage, blockIdx.x);            \
    }
#else
#define HC_ENCODE(NAME, B)                                                                    \
    extern "C" __global__ void                                                                \
    HC_BOUNDS(hybridcomp::radix::ENCODE_THREADS, HC_AT_ONCE(B) - 1)                               \
    radix_encode_##NAME(HC_BY_VALUE(Pieces) given, unsigned long long segment,                \
                        unsigned long long bound, unsigned long long relative,                \
                        unsigned long long dtype, hybridcomp::Workspace* work) {              \
        unsigned block = hybridcomp::take_ticket(work);                                       \
        hybridcomp::Piece piece = hybridcomp::as_table(given).at_block(block);                \
        hybridcomp::radix::encode<hybridcomp::radix::B>(                                      \
            (const void*)piece.values, piece.numel, segment, bound, relative, dtype,          \
            (unsigned char*)piece.payload, work->states + piece.first,                        \
            (unsigned)(block - piece.first), (unsigned long long*)piece.size);                \
    }
#define HC_DECODE(NAME, O, ADD)                                                               \
    extern "C" __global__ void                                                                \
    HC_BOUNDS(hybridcomp::radix::O::THREADS, HC_DECODE_AT_ONCE(O, ADD) - 3)                      \
    NAME(HC_BY_VALUE(Pieces) given, unsigned long long segment, unsigned long long bound,     \
         unsigned long long relative, unsigned long long ranks, unsigned int* damage) {       \
        const hybridcomp::Piece* piece =                                                      \
            hybridcomp::ranks_of_block(hybridcomp::as_table(given), ranks, blockIdx.x);       \
        unsigned number = (unsigned)(blockIdx.x - piece->first);                              \
        _Pragma("unroll 1") for (unsigned rank = 0; rank < (unsigned)ranks; ++rank, ++piece) { \
            hybridcomp::radix::decode<hybridcomp::radix::O, ADD>(                             \
                (const unsigned char*)piece->payload, piece->size, piece->numel, segment,     \
                bound, relative, (void*)piece->values, damage, number);                       \
            __syncthreads();                                                                  \
        }                                                                                     \
    }
#endif
HC_ENCODE(fp32, Fp32Block)
HC_ENCODE(bf16, Bf16Block)
HC_ENCODE(fp16, Fp16Block)
HC_DECODE(radix_decode_fp32, OutFp32, false)
HC_DECODE(radix_decode_bf16, OutBf16, false)
HC_DECODE(radix_decode_fp16, OutFp16, false)
HC_DECODE(radix_add, OutFp32, true)
