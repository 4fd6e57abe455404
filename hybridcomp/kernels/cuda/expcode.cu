// CUDA kernels of expcode: a warp a tile of 2048 values, as many tiles a block of threads as it has
// warps.
#include "expcode_decode.h"
#include "expcode_encode.h"

// Levels of fp16 have more bits: with 64 registers they spill before sm_90.
constexpr int HALF_BLOCKS = HC_UP_TO_ADA ? 3 : 4;

// THREADS and BLOCKS: of a block, and how many of these are to fit a multiprocessor.
#define HC_EXPCODE_ENCODE(NAME, F, THREADS, BLOCKS, HELD)                                        \
    extern "C" __global__ void HC_BOUNDS(THREADS, BLOCKS)                                        \
    expcode_encode_##NAME(const void* values, unsigned long long numel, unsigned long long dtype, \
                          unsigned char* out, void* work, unsigned long long* size) {            \
        hybridcomp::expcode::encode<hybridcomp::expcode::F, THREADS / 32, HELD>(                 \
            values, numel, dtype, out, (hybridcomp::Workspace*)work, size);                      \
    }
#define HC_EXPCODE_DECODE(KERNEL, F, T, ADD, THREADS, BLOCKS)                                    \
    extern "C" __global__ void HC_BOUNDS(THREADS, BLOCKS)                                        \
    KERNEL(const unsigned char* in, unsigned long long nbytes, unsigned long long numel,         \
           unsigned long long dtype, void* out, unsigned int* damage) {                          \
        hybridcomp::expcode::decode<hybridcomp::expcode::F, hybridcomp::T, ADD, THREADS / 32>(   \
            in, nbytes, numel, dtype, out, damage);                                              \
    }
HC_EXPCODE_ENCODE(fp32, Single, 128, 6, 4)
HC_EXPCODE_ENCODE(bf16, Brain, 256, 4, 4)
HC_EXPCODE_ENCODE(fp16, Half, 256, HALF_BLOCKS, 4)
HC_EXPCODE_DECODE(expcode_decode_fp32, Single, Fp32, false, 128, 6)
HC_EXPCODE_DECODE(expcode_decode_bf16, Brain, BFloat16, false, 64, 12)
HC_EXPCODE_DECODE(expcode_decode_fp16, Half, Float16, false, 64, 12)
HC_EXPCODE_DECODE(expcode_add_fp32, Single, Fp32, true, 128, 6)
HC_EXPCODE_DECODE(expcode_add_bf16, Brain, BFloat16, true, 64, 12)
HC_EXPCODE_DECODE(expcode_add_fp16, Half, Float16, true, 64, 12)
