// Encoding loops of expcode: whole tiles on eight lanes of 32 bits or sixteen of 16, a partial last tile through
// the functions of expcode.h.
#include "bitplanes.h"
#include "cpu_expcode_shared.h"
#include "level_lanes.h"

namespace hybridcomp {
namespace expcode {
namespace {

// What is common to one tile's blocks.
struct Tile {
    Coding coding;
    u32 present;  // blocks that are not zero
    u8 mask[TILE_BLOCKS];
};

template <class F>
HC_INLINE u32 read_value(const u8* values, u32 i) {
    u32 bits = 0;
    memcpy(&bits, values + i * F::ITEM_BYTES, F::ITEM_BYTES);
    return bits;
}

// Finds the zero blocks and chooses the coding. Blocks are whole.
template <class F>
HC_INLINE Tile prepare(const u8* values, u32 blocks) {
    Tile tile;
    tile.present = 0;
    I8 all = {};
    u8 numbers[TILE_BLOCKS];
    for (u32 b = 0; b < TILE_BLOCKS; ++b) tile.mask[b] = 0;
    for (u32 b = 0; b < blocks; ++b) {
        const u8* block = values + b * BLOCK * F::ITEM_BYTES;
        I8 any = {};
        for (int i = 0; i < F::ITEM_BYTES; ++i) any |= load_lanes<I8>(block + 32 * i);
        all |= any;
        tile.mask[b] = !none(any);
        numbers[tile.present] = (u8)b;
        tile.present += tile.mask[b];
    }
    u16 counts[256 + 16] = {};
    u32 stride = tile.present / SAMPLED_BLOCKS, first = 255, last = 0, total = 0;
    stride = stride ? stride : 1;
    for (u32 n = 0; n < tile.present && total < SAMPLED_BLOCKS * BLOCK; n += stride) {
        u32 exponents[BLOCK];
        for (u32 i = 0; i < BLOCK; ++i) {
            u32 e = F::turn(read_value<F>(values, numbers[n] * BLOCK + i)) >> F::REST;
            exponents[i] = e;
            first = e < first ? e : first;
            last = e > last ? e : last;
        }
        for (u32 i = 0; i < BLOCK; ++i) ++counts[exponents[i]];
        total += BLOCK;
    }
    tile.coding = choose(counts, total, first, last, F::WIDEST);
    tile.coding.halves = F::ITEM_BYTES == 4 && !none(all & 0xffff);
    return tile;
}

// Returns the codes of exponents in byte lanes; `escaped` is 255 where a code is an escape.
template <class F, int WIDTH, bool ZERO>
HC_INLINE B32 code_lanes(B32 exponents, u32 base, B32& escaped) {
    escaped = (B32){};
    if constexpr (WIDTH == F::WIDEST) {
        return exponents;
    } else {
        constexpr u8 escape = (1 << WIDTH) - 1;
        B32 codes = exponents - (u8)base;
        escaped = (B32)(codes >= (B32){} + (u8)(escape - ZERO));
        if (ZERO) {
            B32 zero = (B32)(exponents == 0);
            escaped &= ~zero;
            codes = (codes & ~zero) | (zero & (u8)(escape - 1));
        }
        return (codes & ~escaped) | (escaped & escape);
    }
}

// Writes all bits but codes and low halves to `out`; returns the levels to which the codes are added.
HC_INLINE U8 split(Single, const u8* values, u8* out, B32& exponents, U8* halves) {
    U8 bits[4], middle = {}, top = {};
    for (int b = 0; b < 4; ++b) {
        bits[b] = load_lanes<U8>(values + 32 * b);
        middle |= (((bits[b] >> 16) & 127u) | ((bits[b] >> 24) & 128u)) << (8 * b);
        top |= (bits[b] << 1 >> 24) << (8 * b);
    }
    halves[0] = (bits[0] & 0xffffu) | bits[1] << 16;
    halves[1] = (bits[2] & 0xffffu) | bits[3] << 16;
    store_lanes(middle, out);
    exponents = (B32)top;
    return (U8){};
}

template <class F>
HC_INLINE U8 split(F, const u8* values, u8* out, B32& exponents, U8*) {
    H16 r[2];
    for (int h = 0; h < 2; ++h) {
        H16 bits = load_lanes<H16>(values + 32 * h);
        r[h] = bits << 1 | bits >> 15;
    }
    store_lanes((r[0] & 255) | r[1] << 8, out);
    exponents = (B32)((r[0] >> F::REST) | (r[1] >> F::REST) << 8);
    if (!F::SHARED) return (U8){};
    return (U8)(((r[0] >> 8) & 7) | ((r[1] >> 8) & 7) << 8);
}

// Encodes the blocks of a whole tile; writes its escapes to `escapes` and returns their number.
template <class F, int WIDTH, bool ZERO>
HC_INLINE u32 encode_lanes(const u8* values, const Tile& tile, u8* out, u8* escapes) {
    u32 count = 0;
    for (u32 b = 0; b < TILE_BLOCKS; ++b) {
        if (!tile.mask[b]) continue;
        B32 exponents, escaped;
        U8 halves[2];
        U8 levels = split(F(), values + b * BLOCK * F::ITEM_BYTES, out, exponents, halves);
        B32 codes = code_lanes<F, WIDTH, ZERO>(exponents, tile.coding.base, escaped);
        blockint::pack_level_lanes<WIDTH + F::SHARED>(levels << WIDTH | (U8)codes, out + BLOCK);
        out += BLOCK + 4 * (WIDTH + F::SHARED);
        if (F::ITEM_BYTES == 4 && tile.coding.halves) {
            store_lanes(halves[0], out);
            store_lanes(halves[1], out + 32);
            out += 64;
        }
        if (none((I8)escaped)) continue;
        u8 bytes[BLOCK];
        store_lanes(exponents, bytes);
        for (int w = 0; w < 4; ++w) {
            for (u64 left = ((Q4)escaped)[w] & EACH_BYTE; left; left &= left - 1) {
                escapes[count++] = bytes[8 * w + __builtin_ctzll(left) / 8];
            }
        }
    }
    return count;
}

template <class F, int WIDTH>
HC_INLINE u32 encode_portable(const u8* values, u32 blocks, const Tile& tile, u8* out,
                              u8* escapes) {
    u32 count = 0;
    for (u32 b = 0; b < blocks; ++b) {
        if (!tile.mask[b]) continue;
        u32 bits[BLOCK];
        for (u32 i = 0; i < BLOCK; ++i) bits[i] = read_value<F>(values, b * BLOCK + i);
        count += encode_block<F, WIDTH>(bits, tile.coding, out, escapes + count);
        out += F::block_bytes(WIDTH, tile.coding.halves);
    }
    return count;
}

template <class F, int WIDTH>
HC_INLINE u32 encode_width(const u8* values, u32 blocks, const Tile& tile, u8* out, u8* escapes) {
    if (blocks < TILE_BLOCKS) return encode_portable<F, WIDTH>(values, blocks, tile, out, escapes);
    if (tile.coding.zero) return encode_lanes<F, WIDTH, true>(values, tile, out, escapes);
    return encode_lanes<F, WIDTH, false>(values, tile, out, escapes);
}

template <class F>
HC_INLINE u32 encode_blocks(const u8* values, u32 blocks, const Tile& tile, u8* out, u8* escapes) {
    switch (tile.coding.width) {
        case 2: return encode_width<F, 2>(values, blocks, tile, out, escapes);
        case 3: return encode_width<F, 3>(values, blocks, tile, out, escapes);
        case 4: return encode_width<F, 4>(values, blocks, tile, out, escapes);
        default: return encode_width<F, F::WIDEST>(values, blocks, tile, out, escapes);
    }
}

template <class F>
HC_INLINE u8* encode_tile(const u8* values, u32 blocks, u8* out) {
    Tile tile = prepare<F>(values, blocks);
    if (tile.present == 0) return out;
    bool masked = tile.present < blocks;
    u8* data = out + TILE_HEADER_BYTES + (masked ? (blocks + 7) / 8 : 0);
    u8 escapes[TILE];
    u32 count = encode_blocks<F>(values, blocks, tile, data, escapes);
    u32 saved = 4 * (F::WIDEST - tile.coding.width) * tile.present;
    if (count && count >= saved) {
        tile.coding = {0, F::WIDEST, false, tile.coding.halves};
        count = encode_blocks<F>(values, blocks, tile, data, escapes);
    }
    u32 width = tile.coding.width;
    out[0] = (u8)tile.coding.base;
    bool no_halves = F::ITEM_BYTES == 4 && !tile.coding.halves;
    out[1] = (u8)(width | (masked ? ZERO_BLOCKS : 0) | (tile.coding.zero ? ZERO_CODE : 0) |
                  (no_halves ? ZERO_HALVES : 0));
    out[2] = (u8)count;
    out[3] = (u8)(count >> 8);
    if (masked) write_planes(tile.mask, blocks, 1, out + TILE_HEADER_BYTES);
    data += tile.present * F::block_bytes(width, tile.coding.halves);
    memcpy(data, escapes, count);
    data += count;
    while ((data - out) % 4) *data++ = 0;
    return data;
}

struct Source {
    const u8* values;
    size_t numel;
};

template <class F>
HC_INLINE size_t encode_share(const Source& from, size_t begin, size_t end, u8* out, u8* offsets) {
    constexpr size_t item = F::ITEM_BYTES;
    const u8* start = out;
    for (size_t t = begin; t < end; ++t) {
        size_t left = from.numel - t * TILE;
        u32 count = (u32)(left < TILE ? left : TILE), blocks = (u32)ceil_div(count, BLOCK);
        const u8* values = from.values + t * TILE * item;
        u8 padded[TILE * item];
        if (count % BLOCK) {
            memcpy(padded, values, count * item);
            for (u32 i = count; i < blocks * BLOCK; ++i) {
                memcpy(padded + i * item, padded + (count - 1) * item, item);
            }
            values = padded;
        }
        u32 offset = (u32)((out - start) / 4);
        memcpy(offsets + 4 * t, &offset, 4);
        out = encode_tile<F>(values, blocks, out);
    }
    return (size_t)(out - start);
}

#define HC_EXPCODE(F)                                                                  \
    HC_CLONES size_t encode_##F(const Source& from, size_t begin, size_t end, u8* out, \
                                u8* offsets) {                                         \
        return encode_share<F>(from, begin, end, out, offsets);                        \
    }
HC_EXPCODE(Single)
HC_EXPCODE(Brain)
HC_EXPCODE(Half)

typedef size_t Encode(const Source&, size_t, size_t, u8*, u8*);
Encode* const ENCODE[3] = {encode_Single, encode_Brain, encode_Half};

}  // namespace

size_t wire_nbytes(size_t numel, int dtype) { return Layout(numel, item_nbytes(dtype)).capacity; }

size_t encode(int dtype, const void* in, size_t numel, u8* out, int threads) {
    if (numel == 0) return 0;
    Layout layout(numel, item_nbytes(dtype));
    Source from = {(const u8*)in, numel};
    Encode* loop = ENCODE[dtype];
    size_t total = encode_tiles_in_shares(
        layout.tiles, TILE, layout.largest, threads, out + HEADER_BYTES, out + layout.data,
        [&](size_t begin, size_t end, u8* to, u8* offsets) {
            return loop(from, begin, end, to, offsets);
        });
    TileHeader header = {MAGIC, (u8)VERSION, (u8)dtype, 0, 0, numel, TILE, 0, (u32)(total / 4), 0};
    memcpy(out, &header, sizeof header);
    size_t used = layout.data + total;
    pad(out, used, align16(used));
    return align16(used);
}

}  // namespace expcode
}  // namespace hybridcomp
