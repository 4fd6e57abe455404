// What the encoding and the decoding loops of radix share.
#pragma once

#include "cpu.h"
#include "cpu_loops.h"
#include "radix.h"
#include "shares.h"

namespace hybridcomp {
namespace radix {

struct Tables {
    Class classes[RAW + 1];
    u8 of_level[128];  // class of a largest |q| up to 127
};

constexpr Tables make_tables() {
    Tables tables = {};
    for (u32 c = 0; c <= RAW; ++c) tables.classes[c] = make_class(c);
    for (u32 level = 0, c = 0; level < 128; ++level) {
        if (tables.classes[c].levels < 2 * level + 1) ++c;
        tables.of_level[level] = (u8)c;
    }
    return tables;
}
constexpr Tables TABLES = make_tables();

constexpr bool divisors_are_exact() {
    for (u32 c = 0; c < FIRST_SINGLE; ++c) {
        if (TABLES.classes[c].multiplier == 0) return false;
    }
    return TABLES.classes[FIRST_PAIR - 1].levels == 255;
}
static_assert(divisors_are_exact(), "a class has no reciprocal of 32 bits");

inline size_t item_size(int dtype) { return dtype == (int)Dtype::fp32 ? 4 : 2; }

// The most that a tile of `numel` values takes: all blocks raw, mask, six planes, and eight bytes for
// alignment and what the bit writer may touch.
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
