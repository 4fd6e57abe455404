// CUDA kernels of topk: an encoder is the first three, one after the other, a decoder the last two. For one tensor:
// a message of sparse values is one fragment of a meeting.
#include "topk_decode.h"
#include "topk_encode.h"

typedef unsigned long long u64;

#define HC_SETTINGS u64 bits, u64 rice, u64 most, u64 last
#define HC_GIVEN hybridcomp::topk::Settings{(unsigned)bits, (unsigned)rice, (unsigned)most, (unsigned)last}

#define HC_CHOOSE(NAME, T)                                                                            \
    extern "C" __global__ void HC_BOUNDS(256, 2)                                                      \
    topk_choose_##NAME(HC_SETTINGS, const void* values, u64 numel, void* scratch, unsigned char* out, \
                       u64 nbytes) {                                                                  \
        hybridcomp::topk::Scratch room(scratch, gridDim.x, most);                                     \
        hybridcomp::topk::choose<hybridcomp::T>(HC_GIVEN, values, numel, room, out, nbytes);          \
    }
HC_CHOOSE(fp32, Fp32)
HC_CHOOSE(bf16, BFloat16)
HC_CHOOSE(fp16, Float16)

extern "C" __global__ void HC_BOUNDS(256, 4)
topk_add_up(HC_SETTINGS, u64 numel, void* scratch, unsigned char* out, u64* size) {
    u64 chunks = hybridcomp::ceil_div(numel, hybridcomp::topk::CHUNK);
    hybridcomp::topk::add_up(HC_GIVEN, numel, hybridcomp::topk::Scratch(scratch, chunks, most), out, size);
}

extern "C" __global__ void HC_BOUNDS(256, 4)
topk_write(HC_SETTINGS, u64 numel, void* scratch, unsigned char* out) {
    u64 chunks = hybridcomp::ceil_div(numel, hybridcomp::topk::CHUNK);
    hybridcomp::topk::write(HC_GIVEN, numel, hybridcomp::topk::Scratch(scratch, chunks, most), out);
}

#define HC_DECODE(NAME, T, ADD)                                                                       \
    extern "C" __global__ void HC_BOUNDS(256, 4)                                                      \
    topk_clear_##NAME(HC_SETTINGS, const unsigned char* in, u64 nbytes, u64 numel, void* out,         \
                      unsigned* damage) {                                                             \
        hybridcomp::topk::clear<hybridcomp::T, ADD>(HC_GIVEN, in, nbytes, numel, out, damage);        \
    }                                                                                                 \
    extern "C" __global__ void HC_BOUNDS(256, 4)                                                      \
    topk_values_##NAME(HC_SETTINGS, const unsigned char* in, u64 nbytes, u64 numel, void* out,        \
                       void* work, unsigned* damage) {                                                \
        hybridcomp::topk::decode<hybridcomp::T, ADD>(HC_GIVEN, in, nbytes, numel, out,                \
                                                     (hybridcomp::Workspace*)work, damage);           \
    }
HC_DECODE(fp32, Fp32, false)
HC_DECODE(bf16, BFloat16, false)
HC_DECODE(fp16, Float16, false)
HC_DECODE(add, Fp32, true)
