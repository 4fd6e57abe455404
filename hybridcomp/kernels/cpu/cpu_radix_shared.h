// What the encoding and the decoding loops of radix share.
#pragma once

#include "cpu_radix.h"
#include "lanes.h"
#include "radix.h"
#include "shares.h"

namespace hybridcomp {
namespace radix {

constexpr Tables TABLES = make_tables();

constexpr bool divisors_are_exact() {
    for (u32 c = 0; c < FIRST_SINGLE; ++c) {
        if (TABLES.classes[c].multiplier == 0) return false;
    }
    return TABLES.classes[FIRST_PAIR - 1].levels == 255;
}
static_assert(divisors_are_exact(), "a class has no reciprocal of 32 bits");

// Encoding that depends on the dtype: `round` is T::load(T::store(x)) for finite lanes, and for an Inf
// any number far from every value.
template <class T>
struct Narrow : T {
    static constexpr bool NARROW = false;
    static constexpr u32 RAW_BITS = 32;
    HC_INLINE F8 round(F8 lanes) { return lanes; }
    HC_INLINE float half(float limit, u32) { return limit; }
};

template <>
struct Narrow<BFloat16> : BFloat16 {
    static constexpr bool NARROW = true;
    static constexpr u32 RAW_BITS = 16;
    HC_INLINE F8 round(F8 lanes) {
        U8 magnitude = (U8)lanes & MAGNITUDE, sign = (U8)lanes & ~MAGNITUDE;
        U8 rounded = (magnitude + 0x7fff + ((magnitude >> 16) & 1)) & 0xffff0000u;
        return (F8)(sign | smaller(rounded, 0x7f7f0000u));
    }
    HC_INLINE float half(float limit, u32 absmax) { return rounded_limit(limit, absmax, 7, 1); }
};

template <>
struct Narrow<Float16> : Float16 {
    static constexpr bool NARROW = true;
    static constexpr u32 RAW_BITS = 16;
    HC_INLINE F8 round(F8 lanes) {
        U8 magnitude = (U8)lanes & MAGNITUDE, sign = (U8)lanes & ~MAGNITUDE;
        U8 normal = (magnitude + 0xfff + ((magnitude >> 13) & 1)) & ~0x1fffu;
        U8 tiny = (U8)(((F8)magnitude + 0.5f) - 0.5f);
        I8 small = (I8)magnitude < 0x38800000;
        return (F8)(sign | (small ? tiny : smaller(normal, 0x477fe000u)));
    }
    HC_INLINE float half(float limit, u32 absmax) { return rounded_limit(limit, absmax, 10, 113); }
};

// Returns the most bytes of a tile of `numel` values: all blocks raw, mask, six planes, and eight bytes for
// alignment and for the bit writer, which writes beyond the end.
inline size_t largest_tile(size_t numel, size_t item) {
    size_t blocks = ceil_div(numel, BLOCK);
    size_t head = TILE_HEADER_BYTES + 7 * ceil_div(blocks, 8);
    return (head + blocks * BLOCK * item + 8 + 3) & ~size_t(3);
}

struct Layout {
    size_t tiles, largest, offsets, data, capacity;
    Layout(size_t numel, size_t segment, size_t item)
        : tiles(ceil_div(numel, segment)), largest(largest_tile(segment, item)),
          offsets(HEADER_BYTES), data(offsets + 4 * tiles), capacity(0) {
        if (!tiles) return;
        size_t last = largest_tile(numel - (tiles - 1) * segment, item);
        capacity = align16(data + (tiles - 1) * largest + last + TAIL_BYTES);
    }
};

}  // namespace radix
}  // namespace hybridcomp
