// Eight values of a lane in registers, 16-bit values two to a register: absmax, widening and narrowing with
// as little unpacking as possible; loads and stores of 16 bytes.
#pragma once

#include "cuda_device.h"

namespace hybridcomp {

HC_INLINE u32 larger(u32 a, u32 b) { return a > b ? a : b; }

// Packs the low bytes of four words into a word.
HC_INLINE u32 low_bytes(u32 a, u32 b, u32 c, u32 d) {
    return pick_bytes(pick_bytes(a, b, 0x0040), pick_bytes(c, d, 0x0040), 0x5410);
}

// 16 bytes at an aligned address.
HC_INLINE uint4 load16(const void* at) { return *(const uint4*)at; }
HC_INLINE void store16(uint4 value, void* at) { *(uint4*)at = value; }
HC_INLINE void store16(float a, float b, float c, float d, void* at) {
    store16(make_uint4(float_bits(a), float_bits(b), float_bits(c), float_bits(d)), at);
}
// Whether values at this address can move as 16 bytes.
HC_INLINE bool whole_vectors(const void* at) { return ((u64)at & 15) == 0; }

struct NarrowBf16 {
    HC_INLINE float widen(u32 half) { return bits_float(half << 16); }
    HC_INLINE u32 magnitude(u32 half) { return half << 16; }
    HC_INLINE u32 narrow(float low, float high) { return narrow_bf16(low, high); }
    HC_INLINE float widen_any(u16 half) { return bf16_to_float(half); }
    HC_INLINE u16 narrow_any(float value) { return float_to_bf16(value); }
};

struct NarrowFp16 {
    HC_INLINE float widen(u32 half) { return widen_fp16(half); }
    HC_INLINE u32 magnitude(u32 half) {
        return half > 0x7c00 ? QUIET_NAN_BITS : float_bits(widen_fp16(half));
    }
    HC_INLINE u32 narrow(float low, float high) { return narrow_fp16(low, high); }
    HC_INLINE float widen_any(u16 half) { return fp16_to_float(half); }
    HC_INLINE u16 narrow_any(float value) { return float_to_fp16(value); }
};

// Values 0..7 of a lane. `value` and `set` are for numbers; the bits of a NaN are the CPU's only from
// `value_of_any` and `set_any`.
template <class Narrow>
struct PackedEight {
    typedef u16 Stored;
    u32 pairs[4];

    HC_INLINE_MEMBER void load(const u16* at) {
        uint4 v = load16(at);
        pairs[0] = v.x, pairs[1] = v.y, pairs[2] = v.z, pairs[3] = v.w;
    }
    // The first `count`, then zeros.
    HC_INLINE_MEMBER void load_some(const u16* at, u32 count) {
#pragma unroll
        for (int k = 0; k < 4; ++k) {
            pairs[k] = pair((u32)(2 * k) < count ? at[2 * k] : 0,
                            (u32)(2 * k + 1) < count ? at[2 * k + 1] : 0);
        }
    }
    HC_INLINE_MEMBER float value(int k) const {
        return Narrow::widen(k & 1 ? pairs[k / 2] >> 16 : pairs[k / 2] & 0xffffu);
    }
    HC_INLINE_MEMBER float value_of_any(int k) const { return Narrow::widen_any(stored(k)); }
    // Returns the largest magnitude as it is stored; `magnitude_bits_of` converts it to bits of a float.
    HC_INLINE_MEMBER u32 magnitude() const {
        u32 top = pairs[0] & 0x7fff7fffu;
#pragma unroll
        for (int k = 1; k < 4; ++k) top = largest_pair(top, pairs[k] & 0x7fff7fffu);
        return larger(top & 0xffffu, top >> 16);
    }
    HC_INLINE u32 magnitude_bits_of(u32 stored) { return Narrow::magnitude(stored); }
    HC_INLINE_MEMBER void set(const float* values) {
#pragma unroll
        for (int k = 0; k < 4; ++k) pairs[k] = Narrow::narrow(values[2 * k], values[2 * k + 1]);
    }
    HC_INLINE_MEMBER void set_any(const float* values) {
#pragma unroll
        for (int k = 0; k < 4; ++k) {
            pairs[k] = pair(Narrow::narrow_any(values[2 * k]), Narrow::narrow_any(values[2 * k + 1]));
        }
    }
    HC_INLINE_MEMBER u16 stored(int k) const { return (u16)(pairs[k / 2] >> (16 * (k & 1))); }
    HC_INLINE_MEMBER void store(u16* at) const {
        store16(make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]), at);
    }
    // Two numbers, rounded to this dtype.
    HC_INLINE void through(float& a, float& b) {
        u32 both = Narrow::narrow(a, b);
        a = Narrow::widen(both & 0xffffu), b = Narrow::widen(both >> 16);
    }
};

typedef PackedEight<NarrowBf16> EightBf16;
typedef PackedEight<NarrowFp16> EightFp16;

struct EightFp32 {
    typedef float Stored;
    float values[8];

    HC_INLINE_MEMBER void load(const float* at) { load_apart(at, 4); }
    // Values 0..3 from `at`, 4..7 from `distance` values on.
    HC_INLINE_MEMBER void load_apart(const float* at, u32 distance) {
        uint4 a = load16(at), b = load16(at + distance);
        values[0] = bits_float(a.x), values[1] = bits_float(a.y), values[2] = bits_float(a.z);
        values[3] = bits_float(a.w), values[4] = bits_float(b.x), values[5] = bits_float(b.y);
        values[6] = bits_float(b.z), values[7] = bits_float(b.w);
    }
    HC_INLINE_MEMBER void load_some(const float* at, u32 count) {
#pragma unroll
        for (int k = 0; k < 8; ++k) values[k] = (u32)k < count ? at[k] : 0.0f;
    }
    HC_INLINE_MEMBER float value(int k) const { return values[k]; }
    HC_INLINE_MEMBER float value_of_any(int k) const { return values[k]; }
    HC_INLINE_MEMBER u32 magnitude() const {
        float top = larger_magnitude(values[0], values[1]);
#pragma unroll
        for (int k = 2; k < 8; ++k) top = larger_magnitude(top, values[k]);
        return magnitude_bits(top);
    }
    HC_INLINE u32 magnitude_bits_of(u32 stored) { return stored; }
    HC_INLINE_MEMBER void set(const float* from) {
#pragma unroll
        for (int k = 0; k < 8; ++k) values[k] = from[k];
    }
    HC_INLINE_MEMBER void set_any(const float* from) { set(from); }
    HC_INLINE_MEMBER float stored(int k) const { return values[k]; }
    HC_INLINE_MEMBER void store(float* at) const { store_apart(at, 4); }
    HC_INLINE_MEMBER void store_apart(float* at, u32 distance) const {
        store16(values[0], values[1], values[2], values[3], at);
        store16(values[4], values[5], values[6], values[7], at + distance);
    }
    HC_INLINE void through(float&, float&) {}
};

// How many of the eight values from `at` on there are among `count`.
HC_INLINE u32 eight_of(u64 at, u64 count) {
    return at >= count ? 0 : count - at < 8 ? (u32)(count - at) : 8;
}

// Stores eight floats of each lane, consecutive over all lanes of the warp. Neighbours exchange halves, so that
// every store fills whole sectors of 32 bytes.
HC_INLINE void store_sectors(const float* values, float* at) {
    bool odd = lane_id() & 1;
    float got[4];
#pragma unroll
    for (int k = 0; k < 4; ++k) got[k] = other_lane_float(odd ? values[k] : values[k + 4], 1);
    float* mine = odd ? at - 4 : at;
    store16(odd ? got[0] : values[0], odd ? got[1] : values[1], odd ? got[2] : values[2],
            odd ? got[3] : values[3], mine);
    store16(odd ? values[4] : got[0], odd ? values[5] : got[1], odd ? values[6] : got[2],
            odd ? values[7] : got[3], mine + 8);
}

}  // namespace hybridcomp
