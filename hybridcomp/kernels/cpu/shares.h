// Tiles of variable size on several threads. Each thread encodes a contiguous share of the tiles, to the place
// of the first if all tiles had their largest size; then the shares move together and offsets become absolute.
// The bytes do not depend on the number of threads.
#pragma once

#include <atomic>
#include <vector>

#include "cpu.h"

namespace hybridcomp {

// Header of a message of tiles; fields that a codec does not use are zero.
struct TileHeader {
    u32 magic;
    u8 version, dtype, mode, zero;
    u64 numel;
    u32 tile;
    float bound;
    u32 length;  // of all tiles, in units of 4 bytes
    u32 reserved;
};
static_assert(sizeof(TileHeader) == 32, "the header is 32 bytes");

// Reads the header, and checks the fields that do not depend on the codec's settings.
inline TileHeader read_header(const u8* in, size_t nbytes, u32 magic, u32 version, size_t numel) {
    TileHeader header;
    require(nbytes >= sizeof header, "payload is too short");
    memcpy(&header, in, sizeof header);
    require(header.magic == magic, "payload is not one of this codec");
    require(header.version == version, "payload has another version of the format");
    require(header.numel == numel, "payload holds another number of values");
    require(header.dtype <= (u8)Dtype::fp16, "payload has an unknown dtype");
    return header;
}

// Encodes all tiles and returns their bytes. `encode_share(begin, end, out, offsets)` writes tiles begin..end to
// `out` and each tile's distance from `out` in units of 4 bytes to offsets[t]; it returns the bytes used, a
// multiple of 4.
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

// Decodes all tiles. `decode_share(begin, end)` decodes tiles begin..end, and returns false if one is damaged.
template <class DecodeShare>
void decode_tiles_in_shares(size_t tiles, size_t tile, int threads, const DecodeShare& decode_share) {
    std::atomic<bool> good{true};
    parallel_ranges(tiles, tile, threads, [&](size_t begin, size_t end) {
        if (!decode_share(begin, end)) good = false;
    });
    require(good, "a tile is damaged");
}

}  // namespace hybridcomp
