// Variable-size tiles on several threads: each thread encodes a contiguous share of the tiles to where
// the first would lie if all had their largest size; then the shares move together and the table of
// offsets is made absolute. So the bytes do not depend on the number of threads.
#pragma once

#include <vector>

#include "cpu.h"

namespace hybridcomp {

// `encode_share(begin, end, out, offsets)` writes tiles begin..end from `out` on, offsets[t] =
// where tile t begins, in units of 4 bytes from `out`, and returns the bytes used, a multiple of 4.
// Returns the bytes of all tiles.
template <class EncodeShare>
size_t encode_tiles_in_shares(size_t tiles, size_t tile, size_t largest, int threads, u8* offsets,
                              u8* out, const EncodeShare& encode_share) {
    std::vector<size_t> used(tiles, 0), last(tiles, 0);  // at the first tile of each share
    parallel_ranges(tiles, tile, threads, [&](size_t begin, size_t end) {
        used[begin] = encode_share(begin, end, out + begin * largest, offsets);
        last[begin] = end;
    });
    size_t total = 0;
    for (size_t begin = 0; begin < tiles; begin = last[begin]) {
        if (begin) {
            memmove(out + total, out + begin * largest, used[begin]);
            u32 moved = (u32)(total / 4);
            for (size_t t = begin; t < last[begin]; ++t) {
                u32 offset;
                memcpy(&offset, offsets + 4 * t, 4);
                offset += moved;
                memcpy(offsets + 4 * t, &offset, 4);
            }
        }
        total += used[begin];
    }
    return total;
}

// The bytes of tile `index`, checked against `total`, the bytes of all tiles.
struct Span {
    const u8* begin;
    const u8* end;
};

inline bool tile_span(const u8* offsets, const u8* data, size_t total, size_t tiles, size_t index,
                      Span& span) {
    u32 first, next;
    memcpy(&first, offsets + 4 * index, 4);
    next = (u32)(total / 4);
    if (index + 1 < tiles) memcpy(&next, offsets + 4 * (index + 1), 4);
    if (first > next || (size_t)next * 4 > total) return false;
    span.begin = data + (size_t)first * 4;
    span.end = data + (size_t)next * 4;
    return true;
}

}  // namespace hybridcomp
