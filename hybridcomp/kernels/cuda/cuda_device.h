// What the GPU kernels share: dtypes, and where a message's chunks lie. Compiled by NVRTC or hipRTC for a
// device, and by a host compiler inside an emulator of warps, which is how the tests run these kernels
// without a GPU.
//
// Every parameter of a kernel is 64 bits wide, and a float is passed as its bits, so all kernels launch alike.
// Every lane of a warp takes part in every exchange; no lane returns before the last one.
#pragma once

#include "hardware.h"

namespace hybridcomp {

// Number of this warp within the row of the grid that handles one chunk.
HC_INLINE u64 warp_id() { return ((u64)blockIdx.x * blockDim.x + threadIdx.x) / WARP; }

// Four consecutive values, as floats and as they are stored.
struct Four {
    float x, y, z, w;
};

HC_INLINE Four sum(Four a, Four b) { return Four{a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w}; }

struct Fp32 {
    typedef float Stored;
    HC_INLINE float load(float stored) { return stored; }
    HC_INLINE float store(float value) { return value; }
    HC_INLINE Four load4(const float* at) {
        float4 v = *(const float4*)at;
        return Four{v.x, v.y, v.z, v.w};
    }
    HC_INLINE void store4(Four v, float* at) { *(float4*)at = make_float4(v.x, v.y, v.z, v.w); }
};

template <float (*WIDEN)(u16), u16 (*NARROW)(float)>
struct Sixteen {
    typedef u16 Stored;
    HC_INLINE float load(u16 stored) { return WIDEN(stored); }
    HC_INLINE u16 store(float value) { return NARROW(value); }
    HC_INLINE Four load4(const u16* at) {
        uint2 v = *(const uint2*)at;
        return Four{WIDEN((u16)v.x), WIDEN((u16)(v.x >> 16)), WIDEN((u16)v.y),
                    WIDEN((u16)(v.y >> 16))};
    }
    HC_INLINE void store4(Four v, u16* at) {
        *(uint2*)at = make_uint2(pair(NARROW(v.x), NARROW(v.y)), pair(NARROW(v.z), NARROW(v.w)));
    }
};
typedef Sixteen<bf16_to_float, float_to_bf16> BFloat16;
typedef Sixteen<fp16_to_float, float_to_fp16> Float16;

// Whether four values can be loaded or stored at once.
template <class T>
HC_INLINE bool vectorizable(const void* at) { return ((u64)at & (4 * sizeof(typename T::Stored) - 1)) == 0; }

// Values [index, index + 4) of `count`; zeros after the end.
template <class T>
HC_INLINE Four read4(const typename T::Stored* values, u64 index, u64 count, bool vectors) {
    if (vectors && index + 4 <= count) return T::load4(values + index);
    Four v = {0.0f, 0.0f, 0.0f, 0.0f};
    if (index < count) v.x = T::load(values[index]);
    if (index + 1 < count) v.y = T::load(values[index + 1]);
    if (index + 2 < count) v.z = T::load(values[index + 2]);
    if (index + 3 < count) v.w = T::load(values[index + 3]);
    return v;
}

template <class T>
HC_INLINE void write4(Four v, typename T::Stored* out, u64 index, u64 count, bool vectors) {
    if (vectors && index + 4 <= count) {
        T::store4(v, out + index);
        return;
    }
    if (index < count) out[index] = T::store(v.x);
    if (index + 1 < count) out[index + 1] = T::store(v.y);
    if (index + 2 < count) out[index + 2] = T::store(v.z);
    if (index + 3 < count) out[index + 3] = T::store(v.w);
}

HC_INLINE u64 ceil_div(u64 a, u64 b) { return (a + b - 1) / b; }
HC_INLINE u64 align16(u64 nbytes) { return (nbytes + 15) & ~15ull; }

// A message of `numel` values in chunks of `chunk` values, whose payloads are `slot` bytes apart. Row y of the
// grid handles a chunk; chunk `skip` (~0: none) has no payload, so later payloads move up by a slot.
struct Chunk {
    u64 index, first, count, payload;
    HC_INLINE_MEMBER Chunk(u64 numel, u64 chunk, u64 slot, u64 skip) {
        u64 row = blockIdx.y;
        index = row + (row >= skip ? 1 : 0);
        first = index * chunk < numel ? index * chunk : numel;
        count = numel - first < chunk ? numel - first : chunk;
        payload = row * slot;
    }
};

// Writes zeros from `used` to `total`, less than 16 bytes; called by one warp.
HC_INLINE void pad_payload(u8* out, u64 used, u64 total) {
    u64 at = used + lane_id();
    if (at < total) out[at] = 0;
}

}  // namespace hybridcomp
