// Decoder of stepcode: for each context a table of 4096 entries maps a state to a symbol.
#include "cpu_stepcode.h"
#include "cpu_stepcode_decode.h"

namespace hybridcomp {
namespace stepcode {
namespace {

// Decodes up to 32 values from `first` on, one by one.
bool decode_group(Tile& tile, size_t first, u32 count) {
    for (u32 lane = 0; lane < count; ++lane) {
        u32 old = tile.reference[first + lane], context = context_of(old, tile.dtype, tile.lowest);
        u32& state = tile.states[lane];
        u32 entry = tile.tables->entries[context << PRECISION | (state & (TOTAL - 1))];
        u32 symbol = entry >> 24;
        state = (entry & 0xfff) * (state >> PRECISION) + (entry >> 12 & 0xfff);
        if (state < LEAST_STATE) {
            if (tile.words == tile.end) return false;
            u16 word;
            memcpy(&word, tile.words, 2);
            tile.words += 2, state = state << 16 | word;
        }
        u32 bits = symbol < DIRECT ? 0 : tile.extra.take(extra_count(symbol));
        tile.out[first + lane] = (u16)after_step(old, step_of(symbol, bits));
    }
    return true;
}

bool decode_values(Tile& tile) {
    size_t i = 0;
#ifdef HC_X86
    Instructions with = instructions();
    if (with == Instructions::avx512) i = decode_512(tile);
    else if (with == Instructions::avx2) i = decode_256(tile);
#endif
    for (; i < tile.count; i += LANES) {
        size_t left = tile.count - i;
        if (!decode_group(tile, i, (u32)(left < LANES ? left : LANES))) return false;
    }
    bool ended = tile.words == tile.end && tile.extra.good && tile.extra.count - tile.extra.position < 32;
    for (u32 state : tile.states) ended = ended && state == LEAST_STATE;
    return ended;
}

// The tile in the bytes of `span`.
bool decode_tile(const Span& span, Tile& tile) {
    size_t nbytes = span.end - span.begin;
    if (nbytes == 0) {
        if (tile.out != tile.reference) memcpy(tile.out, tile.reference, 2 * tile.count);
        return true;
    }
    u32 number;
    memcpy(&number, span.begin, 4);
    if (number == STORED) {
        if (nbytes != 4 + ceil_div(tile.count, 2) * 4) return false;
        memcpy(tile.out, span.begin + 4, 2 * tile.count);
        return true;
    }
    size_t after = STATE_BYTES + ceil_div(number, 2) * 4;
    if (number > tile.count || nbytes < after) return false;
    memcpy(tile.states, span.begin + 4, sizeof tile.states);
    tile.words = span.begin + STATE_BYTES, tile.end = tile.words + 2 * (size_t)number;
    tile.extra = BitReader{span.begin + after, 0, 8 * (nbytes - after), true};
    return decode_values(tile);
}

}  // namespace

void decode(int dtype, const u8* in, size_t nbytes, const u16* reference, u16* out, size_t numel,
            int threads) {
    if (numel == 0) return;
    read_header(in, nbytes, MAGIC, VERSION, numel);
    Head head;
    memcpy(&head, in, sizeof head);
    require(head.dtype == (u8)dtype, "payload holds another dtype");
    if (head.mode == UNENCODED) {
        require(nbytes - HEADER_BYTES >= 2 * numel, "payload is too short for its values");
        memcpy(out, in + HEADER_BYTES, 2 * numel);
        return;
    }
    require(head.mode != NO_REFERENCE, "payload was encoded without a reference; pass reference=None");
    require(head.mode == STEPS, "payload has an unknown mode");
    bool known = head.tile >= 1u << MIN_TILE_LOG && head.tile <= 1u << MAX_TILE_LOG;
    require(known && (head.tile & (head.tile - 1)) == 0, "the header is damaged");
    size_t tiles = ceil_div(numel, head.tile), total = (size_t)head.length * 4;
    size_t data = HEADER_BYTES + (size_t)head.model + 4 * tiles;
    require(nbytes >= data && nbytes - data >= total, "payload is too short for its tiles");
    Tables tables;
    require(tables.read(in + HEADER_BYTES, head.model), "the model is damaged");
    const u8* offsets = in + HEADER_BYTES + head.model;
    decode_tiles_in_shares(tiles, head.tile, threads, [&](size_t begin, size_t end) {
        for (size_t t = begin; t < end; ++t) {
            size_t first = t * head.tile, left = numel - first;
            Span span;
            Tile tile = {};
            tile.tables = &tables, tile.dtype = head.dtype, tile.lowest = head.lowest;
            tile.reference = reference + first, tile.out = out + first;
            tile.count = left < head.tile ? left : head.tile;
            if (!tile_span(offsets, in + data, total, tiles, t, span) || !decode_tile(span, tile)) return false;
        }
        return true;
    });
}

}  // namespace stepcode
}  // namespace hybridcomp
