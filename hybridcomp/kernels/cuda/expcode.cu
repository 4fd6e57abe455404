// CUDA kernels of expcode: a warp a tile of 2048 values, as many tiles a block of threads as it has
// warps. With HC_PIECES for all pieces of a message.
#include "expcode_decode.h"
#include "expcode_encode.h"
#include "table.h"

// Levels of fp16 have more bits: with 64 registers they spill before sm_90.
constexpr int HALF_BLOCKS = HC_UP_TO_ADA ? 3 : 4;

// THREADS and BLOCKS: of a block, and how many of these are to fit a multiprocessor.
#ifndef HC_PIECES
#define HC_EXPCODE_ENCODE(NAME, F, THREADS, BLOCKS, HELD)                                        \
    extern "C" __global__ void HC_BOUNDS(THREADS, BLOCKS)                                        \
    expcode_encode_##NAME(const void* values, unsigned long long numel, unsigned long long dtype, \
                          unsigned char* out, hybridcomp::Workspace* work, unsigned long long* size) { \
        hybridcomp::expcode::encode<hybridcomp::expcode::F, THREADS / 32, HELD>(                 \
            values, numel, dtype, out, work->states, hybridcomp::take_ticket(work), size);       \
    }
#define HC_EXPCODE_DECODE(KERNEL, F, T, ADD, THREADS, BLOCKS)                                    \
    extern "C" __global__ void HC_BOUNDS(THREADS, BLOCKS)                                        \
    expcode_##KERNEL(const unsigned char* in, unsigned long long nbytes, unsigned long long numel, \
                     unsigned long long dtype, void* out, unsigned int* damage) {                \
        hybridcomp::expcode::decode<hybridcomp::expcode::F, hybridcomp::T, ADD, THREADS / 32>(   \
            in, nbytes, numel, dtype, out, damage, (unsigned)hybridcomp::warp_id());             \
    }
#else
#define HC_EXPCODE_ENCODE(NAME, F, THREADS, BLOCKS, HELD)                                        \
    extern "C" __global__ void HC_BOUNDS(THREADS, BLOCKS)                                        \
    expcode_encode_##NAME(HC_BY_VALUE(Pieces) given, unsigned long long dtype,                   \
                          hybridcomp::Workspace* work) {                                         \
        unsigned block = hybridcomp::take_ticket(work);                                          \
        hybridcomp::Piece piece = hybridcomp::as_table(given).at_block(block);                   \
        hybridcomp::expcode::encode<hybridcomp::expcode::F, THREADS / 32, HELD>(                 \
            (const void*)piece.values, piece.numel, dtype, (unsigned char*)piece.payload,        \
            work->states + piece.first, (unsigned)(block - piece.first),                         \
            (unsigned long long*)piece.size);                                                    \
    }
#define HC_EXPCODE_DECODE(KERNEL, F, T, ADD, THREADS, BLOCKS)                                    \
    extern "C" __global__ void HC_BOUNDS(THREADS, BLOCKS)                                        \
    expcode_##KERNEL(HC_BY_VALUE(Pieces) given, unsigned long long dtype, unsigned long long ranks, \
                     unsigned int* damage) {                                                     \
        const hybridcomp::Piece* piece =                                                         \
            hybridcomp::ranks_of_block(hybridcomp::as_table(given), ranks, blockIdx.x);          \
        unsigned tile = (unsigned)(blockIdx.x - piece->first) * (THREADS / 32) + threadIdx.x / 32; \
        _Pragma("unroll 1") for (unsigned rank = 0; rank < (unsigned)ranks; ++rank, ++piece) {   \
            hybridcomp::expcode::decode<hybridcomp::expcode::F, hybridcomp::T, ADD, THREADS / 32>( \
                (const unsigned char*)piece->payload, piece->size, piece->numel, dtype,          \
                (void*)piece->values, damage, tile);                                             \
            hybridcomp::sync_warp();                                                             \
        }                                                                                        \
    }
#endif
// Blocks of threads at once on a multiprocessor: those that were fastest (H100), and with a table, which takes
// registers, so many that none spills.
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
