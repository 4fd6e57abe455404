// Encoder of stepcode. 1. Count symbols for each exponent in samples of the message. 2. Make a model of the
// counts and choose the tile (cpu_stepcode_model.cpp). 3. For each tile: symbols and extra bits, forwards; then
// words, backwards.
#include "cpu_stepcode.h"
#include "cpu_stepcode_model.h"

namespace hybridcomp {
namespace stepcode {
namespace {

struct Source {
    const u16* values;
    const u16* reference;
    u32 dtype, lowest;
    const Ranges* ranges;
    bool zeros_known;  // every context has symbol 0
};

struct BitWriter {
    u32* words;
    size_t used;
    u64 held;
    u32 count;
    explicit BitWriter(u32* out) : words(out), used(0), held(0), count(0) {}
    void put(u32 bits, u32 number) {
        held |= (u64)bits << count;
        count += number;
        words[used] = (u32)held;
        u32 full = count >> 5;  // without a branch that is hard to predict
        used += full, held >>= full * 32, count &= 31;
    }
    size_t finish() {
        if (count) words[used++] = (u32)held;
        return used;
    }
};

HC_INLINE void code_value(const Source& from, size_t i, u8* symbol, BitWriter& extra) {
    u32 old = from.reference[i], step = step_between(old, from.values[i]);
    Coded coded = coded_of(folded(step), step >> 15);
    if (!from.ranges->of[context_of(old, from.dtype, from.lowest)][coded.symbol]) {
        coded = Coded{ESCAPE, 16, step};
    }
    *symbol = (u8)coded.symbol;
    extra.put(coded.bits, coded.count);
}

HC_INLINE void push_value(const Source& from, size_t i, u32 symbol, u32& state, u16*& to) {
    u32 range = from.ranges->of[context_of(from.reference[i], from.dtype, from.lowest)][symbol];
    if (overflows(state, range)) *--to = (u16)state, state >>= 16;
    state = push_symbol(state, range);
}

#ifdef HC_WIDE
// Symbols of whole groups of 32; true where something has changed.
HC_WIDE bool code_wide(const Source& from, size_t first, size_t groups, u8* symbols, BitWriter& extra) {
    const Contexts contexts(from.dtype, from.lowest);
    const __m512i known = _mm512_loadu_si512(from.ranges->known), one = _mm512_set1_epi32(1);
    const __m512i low = _mm512_set1_epi16(0x7fff);
    bool changed = false;
    for (size_t g = 0; g < groups; ++g) {
        size_t at = first + g * LANES;
        u8* to = symbols + g * LANES;
        __m512i old = _mm512_loadu_si512(from.reference + at), value = _mm512_loadu_si512(from.values + at);
        __mmask32 moved = _mm512_cmpneq_epi16_mask(old, value);
        if (moved == 0 && from.zeros_known) {
            _mm256_storeu_si256((__m256i*)to, _mm256_setzero_si256());
            continue;
        }
        changed |= moved != 0;
        __m512i d = _mm512_and_si512(_mm512_sub_epi16(value, old), low);
        __m512i sign = _mm512_srai_epi16(_mm512_slli_epi16(d, 1), 15);
        __m512i z = _mm512_and_si512(_mm512_xor_si512(_mm512_slli_epi16(d, 1), sign), low);
        __mmask32 rare = _mm512_cmpgt_epu16_mask(z, _mm512_set1_epi16(DIRECT - 1)) |
                         _mm512_movepi16_mask(_mm512_xor_si512(old, value));
        __m512i context = contexts.of(old);
        __m512i has0 = _mm512_srlv_epi32(_mm512_permutexvar_epi32(lower_half(context), known), lower_half(z));
        __m512i has1 = _mm512_srlv_epi32(_mm512_permutexvar_epi32(upper_half(context), known), upper_half(z));
        rare |= (u32)_mm512_testn_epi32_mask(has0, one) | (u32)_mm512_testn_epi32_mask(has1, one) << 16;
        _mm256_storeu_si256((__m256i*)to, _mm512_cvtepi16_epi8(z));
        if (!rare) continue;
        alignas(64) u16 steps[LANES], rows[LANES];
        _mm512_store_si512(steps, _mm512_or_si512(z, _mm512_andnot_si512(low, _mm512_xor_si512(old, value))));
        _mm512_store_si512(rows, context);
        for (u32 left = rare; left; left &= left - 1) {
            u32 lane = (u32)__builtin_ctz(left);
            Coded coded = coded_of(steps[lane] & 0x7fffu, steps[lane] >> 15);
            if (!from.ranges->of[rows[lane]][coded.symbol]) {
                coded = Coded{ESCAPE, 16, step_between(from.reference[at + lane], from.values[at + lane])};
            }
            to[lane] = (u8)coded.symbol;
            extra.put(coded.bits, coded.count);
        }
    }
    return changed;
}

// A share below 1 / frequency by 2^-22, so that a quotient is right or one too small.
constexpr float BELOW = 1.0f - 1.0f / (1 << 22);

// The states after symbols: the quotient of states below 2^20 frequency, from a float, then mended.
HC_WIDE inline __m512i push_lanes(__m512i state, __m512i range, __m512 share) {
    __m512i frequency = _mm512_and_si512(range, _mm512_set1_epi32(0xffff));
    __m512i quotient = _mm512_cvttps_epu32(_mm512_mul_ps(_mm512_cvtepu32_ps(state), share));
    __m512i rest = _mm512_sub_epi32(state, _mm512_mullo_epi32(quotient, frequency));
    __m512i within = _mm512_srai_epi32(_mm512_sub_epi32(rest, frequency), 31);
    __m512i mend = _mm512_andnot_si512(within, _mm512_sub_epi32(_mm512_set1_epi32(TOTAL), frequency));
    __m512i low = _mm512_add_epi32(rest, _mm512_srli_epi32(range, 16));
    return _mm512_add_epi32(_mm512_add_epi32(_mm512_slli_epi32(quotient, PRECISION), low), mend);
}

HC_WIDE inline __m512 shares_of(__m512i range) {
    __m512i frequency = _mm512_and_si512(range, _mm512_set1_epi32(0xffff));
    return _mm512_div_ps(_mm512_set1_ps(BELOW), _mm512_cvtepu32_ps(frequency));
}

HC_WIDE inline __m512i give_words(__m512i state, __m512i range, u16*& to) {
    __m512i limit = _mm512_slli_epi32(range, 20);  // the start leaves at the top
    __mmask16 over = _mm512_cmpge_epu32_mask(state, limit);
    to -= __builtin_popcount(over);
    // at most 15 words behind those that count: they are written again, or were before
    __m256i words = _mm512_cvtepi32_epi16(_mm512_maskz_compress_epi32(over, state));
    _mm256_mask_storeu_epi16(to, (__mmask16)((1u << __builtin_popcount(over)) - 1), words);
    return _mm512_mask_srli_epi32(state, over, state, 16);
}

// A tile whose words are being written, backwards.
struct Pushing {
    size_t first, count;
    const u8* symbols;
    u32* states;
    u16* to;
};

// The last groups of as many tiles at once: the states of one wait for each other, those of several do not.
template <int TILES>
HC_WIDE void push_wide(const Source& from, Pushing* const* tiles, size_t groups) {
    const Contexts contexts(from.dtype, from.lowest);
    u32 zero_ranges[CONTEXTS];
    for (u32 c = 0; c < CONTEXTS; ++c) zero_ranges[c] = from.ranges->of[c][0];
    const __m512i zeros = _mm512_loadu_si512(zero_ranges);
    const __m512 zero_shares = shares_of(zeros);  // of what a context lacks: never used
    const int* rows = (const int*)from.ranges->of;
    __m512i s0[TILES], s1[TILES];
    u16* to[TILES];
    for (int n = 0; n < TILES; ++n) {
        s0[n] = _mm512_loadu_si512(tiles[n]->states), s1[n] = _mm512_loadu_si512(tiles[n]->states + 16);
        to[n] = tiles[n]->to;
    }
    for (size_t g = groups; g-- > 0;) {
#pragma GCC unroll 4
        for (int n = 0; n < TILES; ++n) {
            __m512i context = contexts.of(_mm512_loadu_si512(from.reference + tiles[n]->first + g * LANES));
            __m256i symbol = _mm256_loadu_si256((const __m256i*)(tiles[n]->symbols + g * LANES));
            __m512i c0 = lower_half(context), c1 = upper_half(context), r0, r1;
            __m512 h0, h1;
            if (_mm256_testz_si256(symbol, symbol)) {
                r0 = _mm512_permutexvar_epi32(c0, zeros), r1 = _mm512_permutexvar_epi32(c1, zeros);
                h0 = _mm512_permutexvar_ps(c0, zero_shares), h1 = _mm512_permutexvar_ps(c1, zero_shares);
            } else {
                __m512i y0 = _mm512_cvtepu8_epi32(_mm256_castsi256_si128(symbol));
                __m512i y1 = _mm512_cvtepu8_epi32(_mm256_extracti128_si256(symbol, 1));
                r0 = _mm512_i32gather_epi32(_mm512_add_epi32(_mm512_slli_epi32(c0, 7), y0), rows, 4);
                r1 = _mm512_i32gather_epi32(_mm512_add_epi32(_mm512_slli_epi32(c1, 7), y1), rows, 4);
                h0 = shares_of(r0), h1 = shares_of(r1);
            }
            s1[n] = push_lanes(give_words(s1[n], r1, to[n]), r1, h1);
            s0[n] = push_lanes(give_words(s0[n], r0, to[n]), r0, h0);
        }
    }
    for (int n = 0; n < TILES; ++n) {
        _mm512_storeu_si512(tiles[n]->states, s0[n]);
        _mm512_storeu_si512(tiles[n]->states + 16, s1[n]);
        tiles[n]->to = to[n];
    }
}
#endif

bool code_tile(const Source& from, size_t first, size_t count, u8* symbols, BitWriter& extra) {
    size_t done = 0;
    bool changed = false;
#ifdef HC_WIDE
    if (wide_lanes()) {
        done = count / LANES * LANES;
        changed = code_wide(from, first, count / LANES, symbols, extra);
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
#ifdef HC_WIDE
    if (wide_lanes()) {
        Pushing* tiles[2] = {first, second};
        for (int n = 0; n < 2 && tiles[n]; ++n) push_rest(from, *tiles[n], tiles[n]->count / LANES * LANES);
        if (second && first->count == second->count) {
            push_wide<2>(from, tiles, first->count / LANES);
            return;
        }
        for (int n = 0; n < 2 && tiles[n]; ++n) push_wide<1>(from, tiles + n, tiles[n]->count / LANES);
        return;
    }
#endif
    push_rest(from, *first, 0);
    if (second) push_rest(from, *second, 0);
}

// A tile on its way: its symbols, then its words. Words are written from the end of their room.
struct Coding {
    std::vector<u8> symbols;
    std::vector<u16> words;
    std::vector<u32> extra;
    u32 states[LANES];
    size_t extra_words;
    Pushing pushing;
    explicit Coding(size_t tile) : symbols(tile), words(tile + LANES), extra(tile / 2 + 3) {}

    // False where nothing has changed: then there are no words.
    bool begin(const Source& from, size_t first, size_t count) {
        BitWriter bits(extra.data());
        pushing = Pushing{first, count, symbols.data(), states, words.data() + count};
        if (!code_tile(from, first, count, symbols.data(), bits)) return false;
        extra_words = bits.finish();
        for (u32& state : states) state = LEAST_STATE;
        return true;
    }
    // Returns the bytes written.
    size_t end(const Source& from, u8* out) const {
        size_t count = pushing.count, number = (size_t)(words.data() + count - pushing.to);
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

// Step 3, of tiles begin..end, two at a time. Returns the bytes written.
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
