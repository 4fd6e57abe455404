// What the encoding and the decoding loops of expcode share.
#pragma once

#include "cpu_expcode.h"
#include "expcode.h"
#include "lanes.h"
#include "shares.h"

namespace hybridcomp {
namespace expcode {

typedef u16 H16 __attribute__((vector_size(32)));
typedef u8 B32 __attribute__((vector_size(32)));

// Returns the most bytes of a tile of `numel` values: codes as wide as exponents, and a mask.
inline size_t largest_tile(size_t numel, size_t item) {
    size_t blocks = ceil_div(numel, BLOCK);
    return (TILE_HEADER_BYTES + ceil_div(blocks, 8) + blocks * BLOCK * item + 3) & ~size_t(3);
}

struct Layout {
    size_t tiles, largest, data, capacity;
    Layout(size_t numel, size_t item)
        : tiles(ceil_div(numel, TILE)), largest(largest_tile(TILE, item)),
          data(HEADER_BYTES + 4 * tiles), capacity(0) {
        if (!tiles) return;
        size_t last = largest_tile(numel - (tiles - 1) * TILE, item);
        capacity = align16(data + (tiles - 1) * largest + last);
    }
};

}  // namespace expcode
}  // namespace hybridcomp
