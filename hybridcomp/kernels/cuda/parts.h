// A table of parts of one tensor, the first argument of kernels that take all parts at once. Offsets count
// from the start of the tensor and of the buffer with the payloads, so that it serves every message of one
// shape. A short table comes by value, as in table.h; a long one lies on the device.
#pragma once

#include "cuda_device.h"

namespace hybridcomp {

// By whole tiles one after the other: `first` is the number of the part's first tile.
struct Part {
    u64 first, start, numel, payload;
};
constexpr u32 NEAR_PARTS = 96;

struct Parts {
    u64 count;
    const Part* far;  // null: the parts are `near`
    Part near[NEAR_PARTS];
};

// The part that tile `tile` is in; behind the last one's end it is the last.
HC_INLINE Part part_of(const Parts& parts, u64 tile) {
    const Part* rows = parts.far ? parts.far : parts.near;
    u32 low = 0, high = (u32)parts.count;
    while (high - low > 1) {
        u32 middle = (low + high) / 2;
        if (rows[middle].first <= tile) low = middle;
        else high = middle;
    }
    return rows[low];
}

HC_INLINE const Parts& as_parts(const Parts& parts) { return parts; }
HC_INLINE const Parts& as_parts(const Parts* parts) { return *parts; }

}  // namespace hybridcomp

// How a kernel declares it (table.h).
#if !defined(__CUDACC__)
#define HC_PARTS const hybridcomp::Parts*
#elif defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 700
#define HC_PARTS const hybridcomp::Parts
#else
#define HC_PARTS const __grid_constant__ hybridcomp::Parts
#endif
