// CUDA kernels of topk: the first three, in this order, encode a tensor, the last two decode one. They take one
// tensor, since a message of sparse values is one fragment of a meeting.
#include "topk_decode.h"
#include "topk_encode.h"

namespace hybridcomp {
namespace topk {

#define HC_SETTINGS u64 bits, u64 rice, u64 most, u64 last
#define HC_GIVEN Settings{(u32)bits, (u32)rice, (u32)most, (u32)last}

#define HC_CHOOSE(NAME, T)                                                                         \
    extern "C" __global__ void HC_BOUNDS(256, 2)                                                   \
    topk_choose_##NAME(HC_SETTINGS, const void* values, u64 numel, void* scratch, u8* out, u64 nbytes) { \
        choose<T>(HC_GIVEN, values, numel, Scratch(scratch, gridDim.x, most), out, nbytes);        \
    }
HC_CHOOSE(fp32, Fp32)
HC_CHOOSE(bf16, BFloat16)
HC_CHOOSE(fp16, Float16)

extern "C" __global__ void HC_BOUNDS(256, 4)
topk_add_up(HC_SETTINGS, u64 numel, void* scratch, u8* out, u64* size) {
    add_up(HC_GIVEN, numel, Scratch(scratch, ceil_div(numel, CHUNK), most), out, size);
}

extern "C" __global__ void HC_BOUNDS(256, 4)
topk_write(HC_SETTINGS, u64 numel, void* scratch, u8* out) {
    write(HC_GIVEN, numel, Scratch(scratch, ceil_div(numel, CHUNK), most), out);
}

#define HC_DECODE(NAME, T, ADD)                                                                    \
    extern "C" __global__ void HC_BOUNDS(256, 4)                                                   \
    topk_clear_##NAME(HC_SETTINGS, const u8* in, u64 nbytes, u64 numel, void* out, u32* damage) {  \
        clear<T, ADD>(HC_GIVEN, in, nbytes, numel, out, damage);                                   \
    }                                                                                              \
    extern "C" __global__ void HC_BOUNDS(256, 4)                                                   \
    topk_values_##NAME(HC_SETTINGS, const u8* in, u64 nbytes, u64 numel, void* out, void* work,    \
                       u32* damage) {                                                              \
        decode<T, ADD>(HC_GIVEN, in, nbytes, numel, out, (Workspace*)work, damage);                \
    }
HC_DECODE(fp32, Fp32, false)
HC_DECODE(bf16, BFloat16, false)
HC_DECODE(fp16, Float16, false)
HC_DECODE(add, Fp32, true)

}  // namespace topk
}  // namespace hybridcomp
