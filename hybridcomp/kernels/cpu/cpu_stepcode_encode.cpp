// Encoder of stepcode. 1. Count symbols for each exponent in samples of the message. 2. Make a model of the
// counts and choose the tile (cpu_stepcode_model.cpp). 3. For each tile: symbols and extra bits, forwards; then
// words, backwards.
#include "cpu_stepcode.h"
#include "cpu_stepcode_encode.h"

namespace hybridcomp {
namespace stepcode {
namespace {

HC_INLINE void push_value(const Source& from, size_t i, u32 symbol, u32& state, u16*& to) {
    u32 range = from.ranges->of[context_of(from.reference[i], from.dtype, from.lowest)][symbol];
    if (overflows(state, range)) *--to = (u16)state, state >>= 16;
    state = push_symbol(state, range);
}

bool code_tile(const Source& from, size_t first, size_t count, u8* symbols, BitWriter& extra) {
    size_t done = 0;
    bool changed = false;
#ifdef HC_X86
    Instructions with = instructions();
    if (with != Instructions::plain) {
        done = count / LANES * LANES;
        changed = (with == Instructions::avx512 ? code_512 : code_256)(from, first, count / LANES, symbols, extra);
    }
#endif
    for (size_t i = done; i < count; ++i) {
        changed |= from.values[first + i] != from.reference[first + i];
        code_value(from, first + i, symbols + i, extra);
    }
    return changed;
}

void push_rest(const Source& from, Pushing& tile, size_t whole) {
    for (size_t i = tile.count; i-- > whole;) {
        push_value(from, tile.first + i, tile.symbols[i], tile.states[i % LANES], tile.to);
    }
}

// Words of one or two tiles; `second` may be null.
void push_tiles(const Source& from, Pushing* first, Pushing* second) {
#ifdef HC_X86
    Instructions with = instructions();
    if (with != Instructions::plain) {
        Pushing* tiles[2] = {first, second};
        for (int n = 0; n < 2 && tiles[n]; ++n) push_rest(from, *tiles[n], tiles[n]->count / LANES * LANES);
        if (with == Instructions::avx512 && second && first->count == second->count) {
            push_pair_512(from, tiles, first->count / LANES);
            return;
        }
        auto push = with == Instructions::avx512 ? push_512 : push_256;
        for (int n = 0; n < 2 && tiles[n]; ++n) push(from, tiles[n], tiles[n]->count / LANES);
        return;
    }
#endif
    push_rest(from, *first, 0);
    if (second) push_rest(from, *second, 0);
}

// A tile being encoded: its symbols, then its words. Words are written backwards from the end of their room;
// lanes may write before the first word.
struct Coding {
    std::vector<u8> symbols;
    std::vector<u16> words;
    std::vector<u32> extra;
    u32 states[LANES];
    size_t extra_words;
    Pushing pushing;
    explicit Coding(size_t tile) : symbols(tile), words(tile + LANES), extra(tile / 2 + 3) {}

    // Returns false, and makes no words, if no value has changed.
    bool begin(const Source& from, size_t first, size_t count) {
        BitWriter bits(extra.data());
        pushing = Pushing{first, count, symbols.data(), states, words.data() + LANES + count};
        if (!code_tile(from, first, count, symbols.data(), bits)) return false;
        extra_words = bits.finish();
        for (u32& state : states) state = LEAST_STATE;
        return true;
    }
    // Returns the bytes written.
    size_t end(const Source& from, u8* out) const {
        size_t count = pushing.count, number = (size_t)(words.data() + LANES + count - pushing.to);
        size_t stored = 4 + ceil_div(count, 2) * 4, after = STATE_BYTES + ceil_div(number, 2) * 4;
        if (after + 4 * extra_words >= stored) {
            memcpy(out, &STORED, 4);
            memcpy(out + 4, from.values + pushing.first, 2 * count);
            pad(out, 4 + 2 * count, stored);
            return stored;
        }
        u32 told = (u32)number;
        memcpy(out, &told, 4);
        memcpy(out + 4, states, sizeof states);
        memcpy(out + STATE_BYTES, pushing.to, 2 * number);
        pad(out, STATE_BYTES + 2 * number, after);
        memcpy(out + after, extra.data(), 4 * extra_words);
        return after + 4 * extra_words;
    }
};

// Does step 3 for tiles begin..end, two at a time; returns the bytes written.
size_t encode_tiles(const Source& from, size_t numel, size_t tile, size_t begin, size_t end, u8* to, u8* places) {
    size_t room = tile < numel ? tile : numel, used = 0;
    Coding first(room), second(room);
    for (size_t t = begin; t < end; t += 2) {
        Coding* pair[2] = {&first, t + 1 < end ? &second : nullptr};
        Pushing* pushed[3] = {};
        int changed = 0;
        bool has[2] = {};
        for (int n = 0; n < 2 && pair[n]; ++n) {
            size_t at = (t + n) * tile, left = numel - at;
            has[n] = pair[n]->begin(from, at, left < tile ? left : tile);
            if (has[n]) pushed[changed++] = &pair[n]->pushing;
        }
        if (changed) push_tiles(from, pushed[0], pushed[1]);
        for (int n = 0; n < 2 && pair[n]; ++n) {
            u32 place = (u32)(used / 4);
            memcpy(places + 4 * (t + n), &place, 4);
            if (has[n]) used += pair[n]->end(from, to + used);
        }
    }
    return used;
}

size_t store_values(Head head, const u16* values, u8* out) {
    head.mode = UNENCODED, head.lowest = 0, head.tile = head.length = head.model = 0;
    size_t used = HEADER_BYTES + 2 * head.numel, total = align16(used);
    memcpy(out, &head, sizeof head);
    memcpy(out + HEADER_BYTES, values, 2 * head.numel);
    pad(out, used, total);
    return total;
}

}  // namespace

size_t wire_nbytes(size_t numel) {
    if (numel == 0) return 0;
    size_t tiles = ceil_div(numel, size_t(1) << MIN_TILE_LOG);
    return align16(HEADER_BYTES + MODEL_BYTES + 12 * tiles + 2 * numel);
}

size_t encode(int dtype, const u16* values, const u16* reference, size_t numel, u8* out, int threads) {
    if (numel == 0) return 0;
    Head head = {MAGIC, (u8)VERSION, (u8)dtype, (u8)STEPS, 0, numel, 0, 0, 0, 0};
    Ranges ranges = make_model(values, reference, head, out + HEADER_BYTES);
    Source from = {values, reference, (u32)dtype, head.lowest, &ranges, true};
    for (u32 known : ranges.known) from.zeros_known = from.zeros_known && (known & 1);
    size_t tile = head.tile, tiles = ceil_div(numel, tile), largest = 4 + 2 * tile;
    u8* offsets = out + HEADER_BYTES + head.model;
    u8* data = offsets + 4 * tiles;
    size_t total = encode_tiles_in_shares(
        tiles, tile, largest, threads, offsets, data,
        [&](size_t begin, size_t end, u8* to, u8* places) {
            return encode_tiles(from, numel, tile, begin, end, to, places);
        });
    size_t used = HEADER_BYTES + head.model + 4 * tiles + total;
    if (used >= HEADER_BYTES + 2 * numel) return store_values(head, values, out);
    head.length = (u32)(total / 4);
    memcpy(out, &head, sizeof head);
    pad(out, used, align16(used));
    return align16(used);
}

}  // namespace stepcode
}  // namespace hybridcomp
