// pack_levels and unpack_levels of blockint.h on eight lanes.
#pragma once

#include "blockint.h"
#include "lanes.h"

namespace hybridcomp {
namespace blockint {

template <int WIDTH, int SHIFT>
HC_INLINE void pack_lanes(U8 levels, u8* out) {
    fold<WIDTH>(((levels >> SHIFT) & field_mask<WIDTH>()) << field_shifts<WIDTH>(), out);
}

template <int WIDTH, int SHIFT>
HC_INLINE U8 unpack_lanes(const u8* in) {
    return ((repeat<WIDTH>(in) >> field_shifts<WIDTH>()) & field_mask<WIDTH>()) << SHIFT;
}

template <int BITS>
HC_INLINE void pack_level_lanes(U8 levels, u8* out) {
    if constexpr (BITS == 8) store_lanes(levels, out);
    if constexpr ((BITS & 4) != 0) pack_lanes<4, BITS & 3>(levels, out);
    if constexpr ((BITS & 2) != 0) pack_lanes<2, BITS & 1>(levels, out + 4 * (BITS & 4));
    if constexpr ((BITS & 1) != 0) pack_lanes<1, 0>(levels, out + 4 * (BITS & 6));
}

template <int BITS>
HC_INLINE U8 unpack_level_lanes(const u8* in) {
    U8 levels = {};
    if constexpr (BITS == 8) levels = load_lanes<U8>(in);
    if constexpr ((BITS & 4) != 0) levels |= unpack_lanes<4, BITS & 3>(in);
    if constexpr ((BITS & 2) != 0) levels |= unpack_lanes<2, BITS & 1>(in + 4 * (BITS & 4));
    if constexpr ((BITS & 1) != 0) levels |= unpack_lanes<1, 0>(in + 4 * (BITS & 6));
    return levels;
}

}  // namespace blockint
}  // namespace hybridcomp
