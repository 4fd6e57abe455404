// Decoding loops of expcode: whole tiles on lanes, a partial last tile through expcode.h. All fields of a tile
// are checked against its length before they are used.
#include "bitplanes.h"
#include "cpu_expcode_shared.h"
#include "level_lanes.h"

namespace hybridcomp {
namespace expcode {
namespace {

HC_INLINE void join(Single, const u8* in, const u8* halves, U8, B32 exponents, u8* values) {
    U8 low[2] = {}, middle = load_lanes<U8>(in);
    if (halves) {
        low[0] = load_lanes<U8>(halves);
        low[1] = load_lanes<U8>(halves + 32);
    }
    for (int b = 0; b < 4; ++b) {
        U8 bits = b % 2 ? low[b / 2] >> 16 : low[b / 2] & 0xffffu;
        U8 byte = middle >> (8 * b);
        bits |= (byte & 127u) << 16 | (byte & 128u) << 24;
        bits |= (((U8)exponents >> (8 * b)) & 255u) << 23;
        store_lanes(bits, values + 32 * b);
    }
}

template <class F>
HC_INLINE void join(F, const u8* in, const u8*, U8 shared, B32 exponents, u8* values) {
    H16 low = load_lanes<H16>(in), top = (H16)exponents, middle = (H16)shared;
    H16 r[2] = {(low & 255) | (top & 255) << F::REST, low >> 8 | (top >> 8) << F::REST};
    if (F::SHARED) {
        r[0] |= (middle & 7) << 8;
        r[1] |= ((middle >> 8) & 7) << 8;
    }
    for (int h = 0; h < 2; ++h) store_lanes(r[h] >> 1 | r[h] << 15, values + 32 * h);
}

struct Body {
    Coding coding;
    u8 mask[TILE_BLOCKS];
    const u8* blocks;
    const u8* escapes;
    u32 count;  // escapes
};

template <class F>
HC_INLINE bool read_head(Span span, u32 blocks, Body& body) {
    if (span.end - span.begin < TILE_HEADER_BYTES) return false;
    u32 flags = span.begin[1], width = flags & 15;
    bool halves = F::ITEM_BYTES == 4 && !(flags & ZERO_HALVES);
    body.coding = {span.begin[0], width, (flags & ZERO_CODE) != 0, halves};
    body.count = span.begin[2] | (u32)span.begin[3] << 8;
    if ((width < 2 || width > 4) && width != F::WIDEST) return false;
    body.blocks = span.begin + TILE_HEADER_BYTES;
    u32 present = blocks;
    for (u32 b = 0; b < TILE_BLOCKS; ++b) body.mask[b] = 1;
    if (flags & ZERO_BLOCKS) {
        if ((size_t)(span.end - body.blocks) < ceil_div(blocks, 8)) return false;
        body.blocks = read_planes(body.blocks, blocks, 1, body.mask);
        present = 0;
        for (u32 b = 0; b < blocks; ++b) present += body.mask[b];
    }
    size_t data = present * F::block_bytes(width, halves);
    if ((size_t)(span.end - body.blocks) < data + body.count) return false;
    body.escapes = body.blocks + data;
    return true;
}

template <class F, int WIDTH, bool ZERO>
HC_INLINE u32 decode_lanes(const Body& body, u8* values) {
    constexpr int bits = WIDTH + F::SHARED;
    const u8* in = body.blocks;
    u32 count = 0;
    for (u32 b = 0; b < TILE_BLOCKS; ++b, values += BLOCK * F::ITEM_BYTES) {
        if (!body.mask[b]) {
            memset(values, 0, BLOCK * F::ITEM_BYTES);
            continue;
        }
        U8 levels = blockint::unpack_level_lanes<bits>(in + BLOCK);
        B32 codes = (B32)levels & (u8)((1 << WIDTH) - 1), exponents = codes;
        if constexpr (WIDTH != F::WIDEST) {
            constexpr u8 escape = (1 << WIDTH) - 1;
            exponents = codes + (u8)body.coding.base;
            if (ZERO) exponents &= ~(B32)(codes == (u8)(escape - 1));
            B32 escaped = (B32)(codes == escape);
            if (!none((I8)escaped)) {
                u8 bytes[BLOCK];
                store_lanes(exponents, bytes);
                for (int w = 0; w < 4; ++w) {
                    for (u64 left = ((Q4)escaped)[w] & EACH_BYTE; left; left &= left - 1) {
                        u8 found = count < body.count ? body.escapes[count] : 0;
                        bytes[8 * w + __builtin_ctzll(left) / 8] = found;
                        ++count;
                    }
                }
                exponents = load_lanes<B32>(bytes);
            }
        }
        const u8* halves = body.coding.halves ? in + BLOCK + 4 * bits : nullptr;
        join(F(), in, halves, levels >> WIDTH, exponents, values);
        in += F::block_bytes(WIDTH, halves);
    }
    return count;
}

template <class F, int WIDTH>
HC_INLINE u32 decode_portable(const Body& body, u32 blocks, u8* values) {
    const u8* in = body.blocks;
    u32 count = 0;
    for (u32 b = 0; b < blocks; ++b) {
        u32 bits[BLOCK] = {};
        if (body.mask[b]) {
            u32 left = count < body.count ? body.count - count : 0;
            count += decode_block<F, WIDTH>(in, body.coding, body.escapes + (left ? count : 0),
                                            left, bits);
            in += F::block_bytes(WIDTH, body.coding.halves);
        }
        for (u32 i = 0; i < BLOCK; ++i) {
            memcpy(values + (b * BLOCK + i) * F::ITEM_BYTES, bits + i, F::ITEM_BYTES);
        }
    }
    return count;
}

template <class F, int WIDTH>
HC_INLINE u32 decode_width(const Body& body, u32 blocks, u8* values) {
    if (blocks < TILE_BLOCKS) return decode_portable<F, WIDTH>(body, blocks, values);
    if (body.coding.zero) return decode_lanes<F, WIDTH, true>(body, values);
    return decode_lanes<F, WIDTH, false>(body, values);
}

// Returns false for a tile that no encoder writes. `values` has room for whole blocks.
template <class F>
HC_INLINE bool decode_tile(Span span, u32 blocks, u8* values) {
    if (span.begin == span.end) {
        memset(values, 0, blocks * BLOCK * F::ITEM_BYTES);
        return true;
    }
    Body body;
    if (!read_head<F>(span, blocks, body)) return false;
    switch (body.coding.width) {
        case 2: return decode_width<F, 2>(body, blocks, values) == body.count;
        case 3: return decode_width<F, 3>(body, blocks, values) == body.count;
        case 4: return decode_width<F, 4>(body, blocks, values) == body.count;
        default: return decode_width<F, F::WIDEST>(body, blocks, values) == body.count;
    }
}

struct Target {
    const u8* offsets;
    const u8* data;
    size_t total, tiles, numel;
    void* out;
};

// T says how the values of F are added to fp32.
template <class F, class T, bool ADD>
HC_INLINE bool decode_share(const Target& to, size_t begin, size_t end) {
    constexpr size_t item = F::ITEM_BYTES;
    for (size_t t = begin; t < end; ++t) {
        size_t first = t * TILE, left = to.numel - first;
        u32 count = (u32)(left < TILE ? left : TILE), blocks = (u32)ceil_div(count, BLOCK);
        alignas(32) u8 buffer[TILE * item];
        bool in_place = !ADD && count % BLOCK == 0;
        u8* values = in_place ? (u8*)to.out + first * item : buffer;
        Span span;
        if (!tile_span(to.offsets, to.data, to.total, to.tiles, t, span)) return false;
        if (!decode_tile<F>(span, blocks, values)) return false;
        if (in_place) continue;
        if (!ADD) {
            memcpy((u8*)to.out + first * item, buffer, count * item);
            continue;
        }
        float* sums = (float*)to.out + first;
        for (u32 i = 0; i < count; ++i) {
            typename T::Stored stored;
            memcpy(&stored, buffer + i * item, item);
            sums[i] += T::load(stored);
        }
    }
    return true;
}

#define HC_EXPCODE(F, T)                                                    \
    HC_CLONES bool decode_##F(const Target& to, size_t begin, size_t end) { \
        return decode_share<F, T, false>(to, begin, end);                   \
    }                                                                       \
    HC_CLONES bool add_##F(const Target& to, size_t begin, size_t end) {    \
        return decode_share<F, T, true>(to, begin, end);                    \
    }
HC_EXPCODE(Single, Fp32)
HC_EXPCODE(Brain, BFloat16)
HC_EXPCODE(Half, Float16)

typedef bool Decode(const Target&, size_t, size_t);
Decode* const DECODE[3] = {decode_Single, decode_Brain, decode_Half};
Decode* const ADD[3] = {add_Single, add_Brain, add_Half};

}  // namespace

void decode(int dtype, const u8* in, size_t nbytes, void* out, size_t numel, bool add,
            int threads) {
    if (numel == 0) return;
    TileHeader header = read_header(in, nbytes, MAGIC, VERSION, numel);
    require(header.dtype == (u8)dtype, "payload was encoded from another dtype");
    require(header.tile == TILE, "payload has tiles of another length");
    Layout layout(numel, item_nbytes(dtype));
    size_t total = (size_t)header.length * 4;
    require(nbytes >= layout.data && nbytes - layout.data >= total,
            "payload is too short for its tiles");
    Target to = {in + HEADER_BYTES, in + layout.data, total, layout.tiles, numel, out};
    Decode* loop = add ? ADD[dtype] : DECODE[dtype];
    decode_tiles_in_shares(layout.tiles, TILE, threads,
                           [&](size_t begin, size_t end) { return loop(to, begin, end); });
}

}  // namespace expcode
}  // namespace hybridcomp
