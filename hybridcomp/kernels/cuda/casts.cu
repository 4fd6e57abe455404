// CUDA kernels of the casts, with loads and stores of 16 bytes, and of fp8 (fp8_block.h).
#include "fp8_block.h"

namespace hybridcomp {

// Casts to 16 bits, eight values per thread. Hardware rounds, except values with a NaN or Inf among them.
template <class From, class To>
HC_INLINE void narrow(const void* source, u64 numel, void* target) {
    const auto* in = (const typename From::Stored*)source;
    auto* out = (typename To::Stored*)target;
    u64 at = EACH * ((u64)blockIdx.x * THREADS + threadIdx.x);
    if (at >= numel) return;
    u32 there = eight_of(at, numel);
    bool whole = there == EACH && whole_vectors(in) && whole_vectors(out);
    From read;
    To write;
    float values[EACH];
    if (whole) read.load(in + at);
    else read.load_some(in + at, there);
    if (From::magnitude_bits_of(read.magnitude()) < INF_BITS) {
#pragma unroll
        for (int k = 0; k < EACH; ++k) values[k] = read.value(k);
        write.set(values);
    } else {
#pragma unroll
        for (int k = 0; k < EACH; ++k) values[k] = read.value_of_any(k);
        write.set_any(values);
    }
    if (whole) {
        write.store(out + at);
        return;
    }
#pragma unroll
    for (int k = 0; k < EACH; ++k) {
        if ((u32)k < there) out[at + k] = write.stored(k);
    }
}

// Casts to fp32, twice four values per thread, so that a warp writes whole sectors of 32 bytes.
template <class From, bool ADD>
HC_INLINE void widen(const void* source, u64 numel, float* out) {
    const auto* in = (const typename From::Stored*)source;
    bool vectors = vectorizable<From>(in), whole = vectorizable<Fp32>(out);
    u64 first = EACH * ((u64)blockIdx.x * THREADS) + 4 * threadIdx.x;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        u64 at = first + i * 4 * THREADS;
        Four v = read4<From>(in, at, numel, vectors);
        if constexpr (ADD) v = sum(read4<Fp32>(out, at, numel, whole), v);
        write4<Fp32>(v, out, at, numel, whole);
    }
}

// Copies between equal dtypes, NaN payloads included, 32 bytes per thread.
HC_INLINE void copy(const u8* in, u64 nbytes, u8* out) {
    u64 first = (u64)blockIdx.x * 2 * THREADS + threadIdx.x;
    if (((u64)in | (u64)out) % 16 == 0) {
        u64 vectors = nbytes / 16, second = first + THREADS;
        uint4 a, b;
        if (first < vectors) a = load16(in + 16 * first);
        if (second < vectors) b = load16(in + 16 * second);
        if (first < vectors) store16(a, out + 16 * first);
        if (second < vectors) store16(b, out + 16 * second);
        if (first < nbytes % 16) out[16 * vectors + first] = in[16 * vectors + first];
        return;
    }
    u64 end = (u64)(blockIdx.x + 1) * 32 * THREADS;
    for (u64 i = (u64)blockIdx.x * 32 * THREADS + threadIdx.x; i < end && i < nbytes; i += THREADS) {
        out[i] = in[i];
    }
}

#define HC_CAST(NAME, CALL)                                                                        \
    extern "C" __global__ void __launch_bounds__(256)                                              \
    NAME(const void* in, u64 numel, void* out) { CALL; }
HC_CAST(cast_fp32_bf16, (narrow<EightFp32, EightBf16>(in, numel, out)))
HC_CAST(cast_fp32_fp16, (narrow<EightFp32, EightFp16>(in, numel, out)))
HC_CAST(cast_bf16_fp16, (narrow<EightBf16, EightFp16>(in, numel, out)))
HC_CAST(cast_fp16_bf16, (narrow<EightFp16, EightBf16>(in, numel, out)))
HC_CAST(cast_bf16_fp32, (widen<BFloat16, false>(in, numel, (float*)out)))
HC_CAST(cast_fp16_fp32, (widen<Float16, false>(in, numel, (float*)out)))
HC_CAST(add_bf16, (widen<BFloat16, true>(in, numel, (float*)out)))
HC_CAST(add_fp16, (widen<Float16, true>(in, numel, (float*)out)))
HC_CAST(cast_copy, (copy((const u8*)in, numel, (u8*)out)))

#define HC_FP8_ENCODE(NAME, F, E)                                                                  \
    extern "C" __global__ void __launch_bounds__(256)                                              \
    fp8_##NAME(const void* values, u64 numel, u8* out) { fp8::encode<fp8::F, E>(values, numel, out); }
#define HC_FP8_DECODE(NAME, F, E, ADD)                                                             \
    extern "C" __global__ void __launch_bounds__(256)                                              \
    fp8_##NAME(const u8* in, u64 numel, void* out) { fp8::decode<fp8::F, E, ADD>(in, numel, out); }
#define HC_FP8(FORMAT, F)                                                                          \
    HC_FP8_ENCODE(FORMAT##_encode_fp32, F, EightFp32)                                              \
    HC_FP8_ENCODE(FORMAT##_encode_bf16, F, EightBf16)                                              \
    HC_FP8_ENCODE(FORMAT##_encode_fp16, F, EightFp16)                                              \
    HC_FP8_DECODE(FORMAT##_decode_fp32, F, EightFp32, false)                                       \
    HC_FP8_DECODE(FORMAT##_decode_bf16, F, EightBf16, false)                                       \
    HC_FP8_DECODE(FORMAT##_decode_fp16, F, EightFp16, false)                                       \
    HC_FP8_DECODE(FORMAT##_add, F, EightFp32, true)
HC_FP8(e4m3, E4M3)
HC_FP8(e5m2, E5M2)

}  // namespace hybridcomp
