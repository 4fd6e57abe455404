// CUDA kernels for pieces of fp32 tensors beside the codecs of variable size: what a sum begins with, what is added
// exactly, what error feedback keeps. A block of threads takes STEP values of a piece (pieces.py).
#include "cuda_device.h"
#include "table.h"

namespace hybridcomp {
namespace pieces {

constexpr u64 STEP = 4096;

// Calls `each` for every group of four values of this block: its index, the values' number, whether they move as one.
template <class T, class F>
HC_INLINE void for_groups(const Piece& piece, F each) {
    u64 begin = (blockIdx.x - piece.first) * STEP, end = begin + STEP;
    end = end < piece.numel ? end : piece.numel;
    bool vectors = vectorizable<Fp32>((const void*)piece.values) && vectorizable<T>((const void*)piece.payload);
    for (u64 i = begin + 4 * threadIdx.x; i < end; i += 4 * blockDim.x) each(i, end, vectors);
}

// Adds values of T at `payload` to `values`.
template <class T>
HC_INLINE void add(const Piece& piece) {
    float* out = (float*)piece.values;
    const typename T::Stored* in = (const typename T::Stored*)piece.payload;
    for_groups<T>(piece, [&](u64 i, u64 end, bool vectors) {
        write4<Fp32>(sum(read4<Fp32>(out, i, end, vectors), read4<T>(in, i, end, vectors)), out, i, end, vectors);
    });
}

// What is left of a value, 0 where that is not finite.
HC_INLINE float left_of(float value, float sent) {
    float left = value - sent;
    return (float_bits(left) & 0x7f800000u) == 0x7f800000u ? 0.0f : left;
}

// Subtracts the fp32 values at `payload` that were sent from what was to be sent.
HC_INLINE void settle(const Piece& piece) {
    float* out = (float*)piece.values;
    for_groups<Fp32>(piece, [&](u64 i, u64 end, bool vectors) {
        Four a = read4<Fp32>(out, i, end, vectors);
        Four b = read4<Fp32>((const float*)piece.payload, i, end, vectors);
        Four left = {left_of(a.x, b.x), left_of(a.y, b.y), left_of(a.z, b.z), left_of(a.w, b.w)};
        write4<Fp32>(left, out, i, end, vectors);
    });
}

// Fills `values` with the float whose bits are `size`.
HC_INLINE void fill(const Piece& piece) {
    float* out = (float*)piece.values;
    float v = bits_float((u32)piece.size);
    for_groups<Fp32>(piece, [&](u64 i, u64 end, bool vectors) {
        write4<Fp32>(Four{v, v, v, v}, out, i, end, vectors);
    });
}

#define HC_KERNEL(NAME, CODE)                                                                      \
    extern "C" __global__ void HC_BOUNDS(256, 4)                                                   \
    pieces_##NAME(HC_BY_VALUE(Pieces) given) { CODE(as_table(given).at_block(blockIdx.x)); }
HC_KERNEL(add_fp32, add<Fp32>)
HC_KERNEL(add_bf16, add<BFloat16>)
HC_KERNEL(add_fp16, add<Float16>)
HC_KERNEL(settle, settle)
HC_KERNEL(fill, fill)

}  // namespace pieces
}  // namespace hybridcomp
