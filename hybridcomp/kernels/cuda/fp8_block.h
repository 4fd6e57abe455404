// fp8 on a device: 256 threads encode a block of 4096 values, which stay in registers between computing the
// absmax and rounding.
#pragma once

#include "packed.h"

#include "casts.h"

namespace hybridcomp {

constexpr int THREADS = 256;
constexpr int EACH = 8;  // values of a lane at a time

namespace fp8 {

constexpr int ROUNDS = BLOCK / (EACH * THREADS);

struct Layout {
    u64 blocks, scales, used, total;
    HC_INLINE_MEMBER explicit Layout(u64 numel)
        : blocks(ceil_div(numel, BLOCK)), scales(ceil_div(numel, 4) * 4), used(scales + 4 * blocks),
          total(align16(used)) {}
};

// Converts two scaled numbers to two bytes.
template <class F>
HC_INLINE u32 narrow_pair(float low, float high) {
    if constexpr (HC_NARROWS_FP8) return narrow_fp8<F::mantissa>(low, high);
    return (u32)narrow<F>(low, 1.0f) | (u32)narrow<F>(high, 1.0f) << 8;
}

// Returns the codes of eight values, four to a word. `any`: a value is NaN or Inf.
template <class F, class E>
HC_INLINE uint2 narrow_eight(const E& held, float inverse, bool any) {
    u32 words[2] = {0, 0};
#pragma unroll
    for (int k = 0; k < EACH; k += 2) {
        u32 both;
        if (any) {
            both = (u32)narrow<F>(held.value_of_any(k), inverse) |
                   (u32)narrow<F>(held.value_of_any(k + 1), inverse) << 8;
        } else {
            both = narrow_pair<F>(held.value(k) * inverse, held.value(k + 1) * inverse);
        }
        words[k / 4] |= both << (8 * (k % 4));
    }
    return make_uint2(words[0], words[1]);
}

// The largest finite magnitude of eight values that are not all finite, or 0.
template <class E>
HC_INLINE u32 finite_magnitude(const E& held) {
    u32 found = 0;
#pragma unroll
    for (int k = 0; k < EACH; ++k) {
        u32 magnitude = magnitude_bits(held.value_of_any(k));
        if (magnitude < INF_BITS) found = larger(found, magnitude);
    }
    return found;
}

template <class F, class E>
HC_INLINE void encode(const void* source, u64 numel, u8* out) {
    __shared__ u32 tops[THREADS / WARP];
    Layout layout(numel);
    u64 block = blockIdx.x;
    if (block >= layout.blocks) return;
    const auto* in = (const typename E::Stored*)source;
    u64 first = block * BLOCK + threadIdx.x * EACH;
    bool full = (block + 1) * BLOCK <= numel, whole = full && whole_vectors(in);
    E held[ROUNDS];
    u32 top[ROUNDS], largest = float_bits(MIN_ABSMAX);
#pragma unroll
    for (int i = 0; i < ROUNDS; ++i) {
        u64 at = first + i * EACH * THREADS;
        if (whole) held[i].load(in + at);
        else held[i].load_some(in + at, eight_of(at, numel));
    }
#pragma unroll
    for (int i = 0; i < ROUNDS; ++i) {
        top[i] = E::magnitude_bits_of(held[i].magnitude());
        largest = larger(largest, top[i] < INF_BITS ? top[i] : finite_magnitude(held[i]));
    }
    largest = largest_in_warp(largest);
    if (lane_id() == 0) tops[threadIdx.x / WARP] = largest;
    __syncthreads();
#pragma unroll
    for (int w = 0; w < THREADS / WARP; ++w) largest = larger(largest, tops[w]);
    float inverse = F::largest / bits_float(largest);
    u64 words = ceil_div(numel, 4);
#pragma unroll
    for (int i = 0; i < ROUNDS; ++i) {
        u64 word = (first + i * EACH * THREADS) / 4;
        uint2 codes = narrow_eight<F>(held[i], inverse, top[i] >= INF_BITS);
        if (full) {
            ((uint2*)out)[word / 2] = codes;
        } else {
            if (word < words) ((u32*)out)[word] = codes.x;
            if (word + 1 < words) ((u32*)out)[word + 1] = codes.y;
        }
    }
    if (threadIdx.x == 0) ((u32*)(out + layout.scales))[block] = largest;
    if (block + 1 == layout.blocks && threadIdx.x < WARP) pad_payload(out, layout.used, layout.total);
}

// A code is the upper half of an fp16 number, up to a power of two.
template <class F>
constexpr float HALF_FACTOR = F::mantissa == 3 ? 256.0f : 1.0f;

// Bytes 2 PAIR and 2 PAIR + 1 of `codes` as numbers over HALF_FACTOR.
template <class F, int PAIR>
HC_INLINE void widen_pair(u32 codes, float& low, float& high) {
    u32 both = pick_bytes(codes, 0, PAIR ? 0x3424 : 0x1404);
    if (F::mantissa == 3) both = (both & 0x80008000u) | (both & 0x7f007f00u) >> 1;
    low = widen_fp16(both & 0xffffu), high = widen_fp16(both >> 16);
}

template <class F>
HC_INLINE void widen_four(u32 codes, float scale, bool any, float* values) {
    if (any) {
#pragma unroll
        for (int k = 0; k < 4; ++k) values[k] = widen<F>((u8)(codes >> (8 * k)), scale);
        return;
    }
    widen_pair<F, 0>(codes, values[0], values[1]), widen_pair<F, 1>(codes, values[2], values[3]);
#pragma unroll
    for (int k = 0; k < 4; ++k) values[k] = values[k] * (scale * HALF_FACTOR<F>);
}

// Whether one of four codes is NaN.
template <class F>
HC_INLINE bool has_nan(u32 codes) {
    return ((codes & 0x7f7f7f7fu) + (0x80u - F::first_nan) * 0x01010101u) & 0x80808080u;
}

// A block whose products may overflow.
HC_INLINE bool may_overflow(u32 absmax) { return absmax >= 0x7f000000u; }

// Decodes to 16 bits, eight codes per thread.
template <class F, class E>
HC_INLINE void decode_block(const u8* in, u64 block, u64 count, u32 absmax, typename E::Stored* out) {
    u64 first = block * BLOCK + threadIdx.x * EACH, words = ceil_div(count, 4);
    bool full = (block + 1) * BLOCK <= count, whole = full && whole_vectors(out);
    float scale = bits_float(absmax) * (1.0f / F::largest);
    uint2 codes[ROUNDS];
#pragma unroll
    for (int i = 0; i < ROUNDS; ++i) {
        u64 word = (first + i * EACH * THREADS) / 4;
        if (full) {
            codes[i] = ((const uint2*)in)[word / 2];
        } else {
            codes[i].x = word < words ? ((const u32*)in)[word] : 0;
            codes[i].y = word + 1 < words ? ((const u32*)in)[word + 1] : 0;
        }
    }
#pragma unroll
    for (int i = 0; i < ROUNDS; ++i) {
        u64 at = first + i * EACH * THREADS;
        float values[EACH];
        bool any = may_overflow(absmax) || has_nan<F>(codes[i].x) || has_nan<F>(codes[i].y);
        widen_four<F>(codes[i].x, scale, any, values), widen_four<F>(codes[i].y, scale, any, values + 4);
        E eight;
        if (any) eight.set_any(values);
        else eight.set(values);
        if (whole) {
            eight.store(out + at);
            continue;
        }
#pragma unroll
        for (u32 k = 0; k < EACH; ++k) {
            if (at + k < count) out[at + k] = eight.stored((int)k);
        }
    }
}

// Decodes to fp32, four codes per thread, so that a warp writes whole sectors of 32 bytes.
template <class F, bool ADD>
HC_INLINE void decode_block(const u8* in, u64 block, u64 count, u32 absmax, float* out) {
    bool vectors = vectorizable<Fp32>(out);
    float scale = bits_float(absmax) * (1.0f / F::largest);
    u64 first = block * (BLOCK / 4) + threadIdx.x, words = ceil_div(count, 4);
    u32 codes[2 * ROUNDS];
#pragma unroll
    for (int i = 0; i < 2 * ROUNDS; ++i) {
        u64 word = first + i * THREADS;
        codes[i] = word < words ? ((const u32*)in)[word] : 0;
    }
#pragma unroll
    for (int i = 0; i < 2 * ROUNDS; ++i) {
        u64 at = 4 * (first + i * THREADS);
        float values[4];
        widen_four<F>(codes[i], scale, may_overflow(absmax) || has_nan<F>(codes[i]), values);
        Four v = {values[0], values[1], values[2], values[3]};
        if constexpr (ADD) v = sum(read4<Fp32>(out, at, count, vectors), v);
        write4<Fp32>(v, out, at, count, vectors);
    }
}

template <class F, class E, bool ADD>
HC_INLINE void decode(const u8* in, u64 numel, void* target) {
    Layout layout(numel);
    u64 block = blockIdx.x;
    if (block >= layout.blocks) return;
    auto* out = (typename E::Stored*)target;
    u32 absmax = ((const u32*)(in + layout.scales))[block];
    if constexpr (sizeof(typename E::Stored) == 4) decode_block<F, ADD>(in, block, numel, absmax, out);
    else decode_block<F, E>(in, block, numel, absmax, out);
}

}  // namespace fp8
}  // namespace hybridcomp
