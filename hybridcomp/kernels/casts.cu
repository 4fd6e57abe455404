// CUDA kernels of the casts: four values a thread; fp8: a block of 4096 values for 256 threads, kept
// in registers between the search for its absmax and the rounding.
#include "cuda_device.h"

#include "casts.h"

namespace hybridcomp {

template <class From, class To, bool ADD>
HC_INLINE void cast(const void* source, u64 numel, void* target) {
    const auto* in = (const typename From::Stored*)source;
    auto* out = (typename To::Stored*)target;
    bool vectors = vectorizable<From>(in), whole = vectorizable<To>(out);
    u64 at = 4 * ((u64)blockIdx.x * blockDim.x + threadIdx.x);
    if (at >= numel) return;
    Four v = read4<From>(in, at, numel, vectors);
    if constexpr (ADD) v = sum(read4<To>(out, at, numel, whole), v);
    write4<To>(v, out, at, numel, whole);
}

// Same dtype: the bits move, NaN payloads included.
template <class Stored>
HC_INLINE void copy(const void* source, u64 numel, void* target) {
    u64 at = 4 * ((u64)blockIdx.x * blockDim.x + threadIdx.x);
    for (u64 i = at; i < at + 4 && i < numel; ++i) {
        ((Stored*)target)[i] = ((const Stored*)source)[i];
    }
}

namespace fp8 {

constexpr int THREADS = 256;
constexpr int ROUNDS = BLOCK / (4 * THREADS);

struct Layout {
    u64 blocks, scales, used, total;
    HC_INLINE_MEMBER explicit Layout(u64 numel)
        : blocks(ceil_div(numel, BLOCK)), scales(ceil_div(numel, 4) * 4), used(scales + 4 * blocks),
          total(align16(used)) {}
};

HC_INLINE u32 finite_magnitude(float value) {
    u32 magnitude = magnitude_bits(value);
    return magnitude < INF_BITS ? magnitude : 0;
}

HC_INLINE u32 at_least(u32 a, u32 b) { return a > b ? a : b; }

template <class F>
HC_INLINE u32 narrow4(Four v, float inverse) {
    return (u32)narrow<F>(v.x, inverse) | (u32)narrow<F>(v.y, inverse) << 8 |
           (u32)narrow<F>(v.z, inverse) << 16 | (u32)narrow<F>(v.w, inverse) << 24;
}

template <class F, class T>
HC_INLINE void encode(const void* source, u64 numel, u64 chunk, u64 slot, u64 skip, u8* out) {
    __shared__ u32 tops[THREADS / WARP];
    Chunk mine(numel, chunk, slot, skip);
    Layout layout(mine.count);
    u64 block = blockIdx.x;
    if (block >= layout.blocks) return;
    out += mine.payload;
    const auto* in = (const typename T::Stored*)source + mine.first;
    bool vectors = vectorizable<T>(in);
    Four held[ROUNDS];
    u32 largest = float_bits(MIN_ABSMAX);
#pragma unroll
    for (int i = 0; i < ROUNDS; ++i) {
        held[i] = read4<T>(in, block * BLOCK + (i * THREADS + threadIdx.x) * 4, mine.count, vectors);
        u32 low = at_least(finite_magnitude(held[i].x), finite_magnitude(held[i].y));
        u32 high = at_least(finite_magnitude(held[i].z), finite_magnitude(held[i].w));
        largest = at_least(largest, at_least(low, high));
    }
    largest = largest_of<1, 2, 4, 8, 16>(largest);
    if (lane_id() == 0) tops[threadIdx.x / WARP] = largest;
    __syncthreads();
    for (int w = 0; w < THREADS / WARP; ++w) largest = at_least(largest, tops[w]);
    float inverse = F::largest / bits_float(largest);
    u64 words = ceil_div(mine.count, 4);
#pragma unroll
    for (int i = 0; i < ROUNDS; ++i) {
        u64 word = block * (BLOCK / 4) + i * THREADS + threadIdx.x;
        if (word < words) ((u32*)out)[word] = narrow4<F>(held[i], inverse);
    }
    if (threadIdx.x == 0) ((u32*)(out + layout.scales))[block] = largest;
    if (block + 1 == layout.blocks && threadIdx.x < WARP) pad_payload(out, layout.used, layout.total);
}

template <class F, class T, bool ADD>
HC_INLINE void decode(const u8* in, u64 numel, u64 chunk, u64 slot, u64 skip, void* target) {
    Chunk mine(numel, chunk, slot, skip);
    Layout layout(mine.count);
    u64 block = blockIdx.x;
    if (block >= layout.blocks) return;
    in += mine.payload;
    auto* out = (typename T::Stored*)target + mine.first;
    bool vectors = vectorizable<T>(out);
    float scale = ((const float*)(in + layout.scales))[block] * (1.0f / F::largest);
#pragma unroll
    for (int i = 0; i < ROUNDS; ++i) {
        u64 word = block * (BLOCK / 4) + i * THREADS + threadIdx.x;
        if (4 * word >= mine.count) continue;
        u32 codes = ((const u32*)in)[word];
        Four v = {widen<F>((u8)codes, scale), widen<F>((u8)(codes >> 8), scale),
                  widen<F>((u8)(codes >> 16), scale), widen<F>((u8)(codes >> 24), scale)};
        if constexpr (ADD) v = sum(read4<T>(out, 4 * word, mine.count, vectors), v);
        write4<T>(v, out, 4 * word, mine.count, vectors);
    }
}

}  // namespace fp8
}  // namespace hybridcomp

#define HC_CAST(NAME, FROM, TO, ADD)                                                          \
    extern "C" __global__ void __launch_bounds__(256)                                         \
    NAME(const void* in, unsigned long long numel, void* out) {                               \
        hybridcomp::cast<hybridcomp::FROM, hybridcomp::TO, ADD>(in, numel, out);              \
    }
HC_CAST(cast_fp32_bf16, Fp32, BFloat16, false)
HC_CAST(cast_fp32_fp16, Fp32, Float16, false)
HC_CAST(cast_bf16_fp32, BFloat16, Fp32, false)
HC_CAST(cast_bf16_fp16, BFloat16, Float16, false)
HC_CAST(cast_fp16_fp32, Float16, Fp32, false)
HC_CAST(cast_fp16_bf16, Float16, BFloat16, false)
HC_CAST(add_fp32, Fp32, Fp32, true)
HC_CAST(add_bf16, BFloat16, Fp32, true)
HC_CAST(add_fp16, Float16, Fp32, true)

#define HC_COPY(NAME, STORED)                                                                 \
    extern "C" __global__ void __launch_bounds__(256)                                         \
    NAME(const void* in, unsigned long long numel, void* out) {                               \
        hybridcomp::copy<hybridcomp::STORED>(in, numel, out);                                 \
    }
HC_COPY(cast_fp32_fp32, u32)
HC_COPY(cast_bf16_bf16, u16)
HC_COPY(cast_fp16_fp16, u16)

#define HC_FP8_ENCODE(NAME, F, T)                                                             \
    extern "C" __global__ void __launch_bounds__(256)                                         \
    NAME(const void* values, unsigned long long numel, unsigned long long chunk,              \
         unsigned long long slot, unsigned long long skip, unsigned char* out) {              \
        hybridcomp::fp8::encode<hybridcomp::fp8::F, hybridcomp::T>(values, numel, chunk,      \
                                                                   slot, skip, out);          \
    }
#define HC_FP8_DECODE(NAME, F, T, ADD)                                                        \
    extern "C" __global__ void __launch_bounds__(256)                                         \
    NAME(const unsigned char* in, unsigned long long numel, unsigned long long chunk,         \
         unsigned long long slot, unsigned long long skip, void* out) {                       \
        hybridcomp::fp8::decode<hybridcomp::fp8::F, hybridcomp::T, ADD>(in, numel, chunk,     \
                                                                        slot, skip, out);     \
    }
#define HC_FP8(FORMAT, F)                                  \
    HC_FP8_ENCODE(fp8_##FORMAT##_encode_fp32, F, Fp32)     \
    HC_FP8_ENCODE(fp8_##FORMAT##_encode_bf16, F, BFloat16) \
    HC_FP8_ENCODE(fp8_##FORMAT##_encode_fp16, F, Float16)  \
    HC_FP8_DECODE(fp8_##FORMAT##_decode_fp32, F, Fp32, false)     \
    HC_FP8_DECODE(fp8_##FORMAT##_decode_bf16, F, BFloat16, false) \
    HC_FP8_DECODE(fp8_##FORMAT##_decode_fp16, F, Float16, false)  \
    HC_FP8_DECODE(fp8_##FORMAT##_add, F, Fp32, true)
HC_FP8(e4m3, E4M3)
HC_FP8(e5m2, E5M2)
