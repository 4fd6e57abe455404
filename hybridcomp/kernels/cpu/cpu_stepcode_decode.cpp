// Decoder of stepcode: a table of 4096 entries for each context gives the symbol of a state.
#include "cpu_stepcode.h"
#include "cpu_stepcode_shared.h"

namespace hybridcomp {
namespace stepcode {
namespace {

// An entry: frequency (12 bits), what is added to the state (12 bits), symbol (8 bits).
struct Tables {
    std::vector<u32> entries;
    u32 zeros[CONTEXTS];  // frequency of symbol 0, whose range begins at 0
    Tables() : entries(CONTEXTS << PRECISION) {}

    void fill(u32 context, const u32* ranges) {
        zeros[context] = frequency_of(ranges[0]);
        u32* row = entries.data() + ((size_t)context << PRECISION);
        for (u32 s = 0; s < SYMBOLS; ++s) {
            u32 frequency = frequency_of(ranges[s]), start = start_of(ranges[s]);
            for (u32 i = 0; i < frequency; ++i) row[start + i] = frequency | i << 12 | s << 24;
        }
    }
    // From the model's bytes.
    bool read(const u8* in, u32 nbytes) {
        u32 at = 0, ranges[SYMBOLS];
        for (u32 c = 0; c < CONTEXTS; ++c) {
            u32 used = read_context(in + at, nbytes - at, ranges);
            if (!used) return false;
            at += used;
            fill(c, ranges);
        }
        return nbytes - at < 4;
    }
};

struct BitReader {
    const u8* words;
    size_t position, count;  // in bits
    bool good;
    u32 take(u32 number) {
        if (position + number > count) {
            good = false;
            return 0;
        }
        size_t at = position / 32 * 4;
        u64 held = 0;
        if (count / 8 - at >= 8) memcpy(&held, words + at, 8);
        else memcpy(&held, words + at, 4);
        held >>= position % 32;
        position += number;
        return (u32)held & ((1u << number) - 1);
    }
};

// A tile that is being decoded.
struct Tile {
    const Tables* tables;
    u32 dtype, lowest;
    const u16* reference;
    u16* out;
    size_t count;
    const u8* words;
    const u8* end;  // of the words
    BitReader extra;
    u32 states[LANES];
};

// Up to 32 values from `first` on, one after the other.
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

#ifdef HC_WIDE
struct Popped {
    __m512i state, symbol;
};

HC_WIDE inline Popped pop_lanes(__m512i state, __m512i context, const Tables& tables) {
    __m512i slot = _mm512_and_si512(state, _mm512_set1_epi32(TOTAL - 1));
    __m512i at = _mm512_or_si512(_mm512_slli_epi32(context, PRECISION), slot);
    __m512i entry = _mm512_i32gather_epi32(at, (const int*)tables.entries.data(), 4);
    __m512i low = _mm512_set1_epi32(0xfff), frequency = _mm512_and_si512(entry, low);
    __m512i added = _mm512_and_si512(_mm512_srli_epi32(entry, 12), low);
    __m512i next = _mm512_mullo_epi32(frequency, _mm512_srli_epi32(state, PRECISION));
    return Popped{_mm512_add_epi32(next, added), _mm512_srli_epi32(entry, 24)};
}

HC_WIDE inline __m512i take_words(__m512i state, const u8*& words) {
    __mmask16 short_of = _mm512_cmplt_epu32_mask(state, _mm512_set1_epi32(LEAST_STATE));
    __m512i next = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)words));
    words += 2 * __builtin_popcount(short_of);
    __m512i full = _mm512_or_si512(_mm512_slli_epi32(state, 16), _mm512_maskz_expand_epi32(short_of, next));
    return _mm512_mask_mov_epi32(state, short_of, full);
}

// What a symbol says of a folded step, the flip of the sign at the top, and how many bits are to follow.
struct Leads {
    u16 folded[SYMBOLS];
    u8 count[SYMBOLS];
    Leads() {
        for (u32 s = 0; s < SYMBOLS; ++s) {
            u32 step = step_of(s, 0);
            folded[s] = (u16)((step & 0x8000u) | (((step << 1) ^ (0u - (step >> 14 & 1))) & 0x7fffu));
            count[s] = (u8)extra_count(s);
        }
    }
};
const Leads LEADS;

// Folded steps of the lanes whose symbols may have extra bits.
inline void put_rare(const u8* symbols, u16* folded, u32 rare, BitReader& extra) {
    for (u32 left = rare; left; left &= left - 1) {
        u32 lane = (u32)__builtin_ctz(left), symbol = symbols[lane];
        u32 bits = extra.take(LEADS.count[symbol]);
        if (symbol == ESCAPE) bits = (bits & 0x8000u) | (((bits << 1) ^ (0u - (bits >> 14 & 1))) & 0x7fffu);
        folded[lane] = (u16)(LEADS.folded[symbol] | bits);
    }
}

// Groups of 32 while no word can be missing; returns the values decoded.
HC_WIDE size_t decode_wide(Tile& tile) {
    const Contexts contexts(tile.dtype, tile.lowest);
    const Tables& tables = *tile.tables;
    const __m512i zeros = _mm512_loadu_si512(tables.zeros), slots = _mm512_set1_epi32(TOTAL - 1);
    const __m512i low = _mm512_set1_epi16(0x7fff);
    __m512i s0 = _mm512_loadu_si512(tile.states), s1 = _mm512_loadu_si512(tile.states + 16);
    const u8* words = tile.words;
    size_t i = 0;
    for (; i + LANES <= tile.count && tile.end - words >= 2 * (ptrdiff_t)LANES; i += LANES) {
        __m512i old = _mm512_loadu_si512(tile.reference + i), context = contexts.of(old);
        __m512i c0 = lower_half(context), c1 = upper_half(context);
        __m512i f0 = _mm512_permutexvar_epi32(c0, zeros), f1 = _mm512_permutexvar_epi32(c1, zeros);
        __m512i l0 = _mm512_and_si512(s0, slots), l1 = _mm512_and_si512(s1, slots);
        if ((u32)_mm512_cmplt_epu32_mask(l0, f0) + (u32)_mm512_cmplt_epu32_mask(l1, f1) == 2 * 0xffffu) {
            s0 = _mm512_add_epi32(_mm512_mullo_epi32(f0, _mm512_srli_epi32(s0, PRECISION)), l0);
            s1 = _mm512_add_epi32(_mm512_mullo_epi32(f1, _mm512_srli_epi32(s1, PRECISION)), l1);
            s0 = take_words(s0, words), s1 = take_words(s1, words);
            _mm512_storeu_si512(tile.out + i, old);
            continue;
        }
        Popped p0 = pop_lanes(s0, c0, tables), p1 = pop_lanes(s1, c1, tables);
        s0 = take_words(p0.state, words), s1 = take_words(p1.state, words);
        __m512i symbol = _mm512_inserti64x4(_mm512_castsi256_si512(_mm512_cvtepi32_epi16(p0.symbol)),
                                            _mm512_cvtepi32_epi16(p1.symbol), 1);
        __m512i z = symbol;
        u32 rare = _mm512_cmpgt_epu16_mask(symbol, _mm512_set1_epi16(DIRECT - 1));
        if (rare) {
            alignas(64) u16 folded[LANES];
            u8 symbols[LANES];
            _mm512_store_si512(folded, symbol);
            _mm256_storeu_si256((__m256i*)symbols, _mm512_cvtepi16_epi8(symbol));
            put_rare(symbols, folded, rare, tile.extra);
            z = _mm512_load_si512(folded);
        }
        __m512i odd = _mm512_sub_epi16(_mm512_setzero_si512(), _mm512_and_si512(z, _mm512_set1_epi16(1)));
        __m512i down = _mm512_srli_epi16(_mm512_and_si512(z, low), 1);
        // the flip of the sign, and the lower bits
        __m512i step = _mm512_or_si512(_mm512_andnot_si512(low, z), _mm512_and_si512(_mm512_xor_si512(down, odd), low));
        __m512i value = _mm512_and_si512(_mm512_add_epi16(old, step), low);
        __m512i sign = _mm512_andnot_si512(low, _mm512_xor_si512(old, step));
        _mm512_storeu_si512(tile.out + i, _mm512_or_si512(value, sign));
    }
    _mm512_storeu_si512(tile.states, s0);
    _mm512_storeu_si512(tile.states + 16, s1);
    tile.words = words;
    return i;
}
#endif

bool decode_values(Tile& tile) {
    size_t i = 0;
#ifdef HC_WIDE
    if (wide_lanes()) i = decode_wide(tile);
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
    std::atomic<bool> good{true};
    parallel_ranges(tiles, head.tile, threads, [&](size_t begin, size_t end) {
        for (size_t t = begin; t < end && good; ++t) {
            size_t first = t * head.tile, left = numel - first;
            Span span;
            Tile tile = {};
            tile.tables = &tables, tile.dtype = head.dtype, tile.lowest = head.lowest;
            tile.reference = reference + first, tile.out = out + first;
            tile.count = left < head.tile ? left : head.tile;
            if (!tile_span(offsets, in + data, total, tiles, t, span) || !decode_tile(span, tile)) good = false;
        }
    });
    require(good, "a tile is damaged");
}

}  // namespace stepcode
}  // namespace hybridcomp
