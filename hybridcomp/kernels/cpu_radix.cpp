// CPU loops of radix: a segment at a time, from the L1 cache. Blocks of four digits a word, nearly all
// of them, run on vectors; the others through the functions of radix.h.
#include <atomic>

#include "bitplanes.h"
#include "cpu.h"
#include "cpu_loops.h"
#include "lanes.h"
#include "radix.h"
#include "shares.h"

namespace hybridcomp {
namespace radix {
namespace {

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

// The most that a tile of `numel` values takes: all blocks raw, mask, six planes, and eight bytes for
// alignment and what the bit writer may touch.
size_t largest_tile(size_t numel, size_t item) {
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

// What a dtype adds to encoding: `round` is T::load(T::store(x)) of finite lanes, and of an Inf
// anything that is far from every value.
template <class T>
struct Narrow : T {
    static constexpr bool NARROW = false;
    static constexpr u32 RAW_BITS = 32;
    HC_INLINE F8 round(F8 lanes) { return lanes; }
    HC_INLINE float half(float limit, u32) { return limit; }
};

template <>
struct Narrow<BFloat16> : BFloat16 {
    static constexpr bool NARROW = true;
    static constexpr u32 RAW_BITS = 16;
    HC_INLINE F8 round(F8 lanes) {
        U8 magnitude = (U8)lanes & MAGNITUDE, sign = (U8)lanes & ~MAGNITUDE;
        U8 rounded = (magnitude + 0x7fff + ((magnitude >> 16) & 1)) & 0xffff0000u;
        return (F8)(sign | smaller(rounded, 0x7f7f0000u));
    }
    HC_INLINE float half(float limit, u32 absmax) { return rounded_limit(limit, absmax, 7, 1); }
};

template <>
struct Narrow<Float16> : Float16 {
    static constexpr bool NARROW = true;
    static constexpr u32 RAW_BITS = 16;
    HC_INLINE F8 round(F8 lanes) {
        U8 magnitude = (U8)lanes & MAGNITUDE, sign = (U8)lanes & ~MAGNITUDE;
        U8 normal = (magnitude + 0xfff + ((magnitude >> 13) & 1)) & ~0x1fffu;
        U8 tiny = (U8)(((F8)magnitude + 0.5f) - 0.5f);
        I8 small = (I8)magnitude < 0x38800000;
        return (F8)(sign | (small ? tiny : smaller(normal, 0x477fe000u)));
    }
    HC_INLINE float half(float limit, u32 absmax) { return rounded_limit(limit, absmax, 10, 113); }
};

u32 class_of(u32 level, u32 last) {
    if (level < 128) return TABLES.of_level[level];
    u32 c = FIRST_PAIR;
    while (c <= last && TABLES.classes[c].levels < 2 * level + 1) ++c;
    return c <= last ? c : RAW;
}

u32 finite_absmax(const float* values, u32 count) {
    u32 largest = 0;
    for (u32 i = 0; i < count; ++i) {
        u32 magnitude = magnitude_bits(values[i]);
        if (magnitude < INF_BITS && magnitude > largest) largest = magnitude;
    }
    return largest;
}

// What an encoder knows of a tile before it writes it. Classes of zero blocks are not set.
struct Tile {
    u32 absmax[MAX_BLOCKS];
    u8 present[MAX_BLOCKS];  // 1: not zero
    u8 classes[MAX_BLOCKS];
    u32 words[MAX_TILE];     // of block b from 16 b on
};

// quantize and pack_digits for a class of four words.
template <class T>
HC_INLINE bool encode_quad(const float* values, Step step, u32 levels, u32* words) {
    U8 digits[2];
    I8 limit = (I8){} + (i32)float_bits(step.limit), failed = {};
    for (int h = 0; h < 2; ++h) {
        F8 in = load_lanes<F8>(values + 8 * h);
        F8 rounded = in * step.inverse + ROUND;
        digits[h] = (U8)rounded + (levels / 2 - ROUND_BITS);
        F8 decoded = (rounded - ROUND) * step.step;
        failed |= ((I8)(decoded - in) & (i32)MAGNITUDE) >= limit;
        if (Narrow<T>::NARROW) {
            failed |= ((I8)(Narrow<T>::round(decoded) - in) & (i32)MAGNITUDE) >= limit;
        }
    }
    U8 low = __builtin_shufflevector(digits[0], digits[1], 0, 1, 2, 3, 8, 9, 10, 11);
    U8 high = __builtin_shufflevector(digits[0], digits[1], 4, 5, 6, 7, 12, 13, 14, 15);
    U8 pairs = low + high * levels;
    store_lanes(__builtin_shufflevector(pairs, pairs, 0, 1, 2, 3) +
                    __builtin_shufflevector(pairs, pairs, 4, 5, 6, 7) * (levels * levels),
                words);
    return none(failed);
}

template <class T>
HC_INLINE bool encode_block(const float* values, Step step, const Class& cls, u32* words) {
    if (cls.words == 4) return encode_quad<T>(values, step, cls.levels, words);
    u32 digits[BLOCK];
    u32 worst = quantize<Narrow<T>>(values, step, cls.levels / 2, digits);
    pack_digits(digits, cls, words);
    return worst < float_bits(step.limit);
}

HC_INLINE u32 block_absmax(const float* values) {
    I8 a = load_lanes<I8>(values) & (i32)MAGNITUDE, b = load_lanes<I8>(values + 8) & (i32)MAGNITUDE;
    I8 largest = a > b ? a : b;
    I4 x = __builtin_shufflevector(largest, largest, 0, 1, 2, 3);
    I4 y = __builtin_shufflevector(largest, largest, 4, 5, 6, 7);
    x = x > y ? x : y;
    y = __builtin_shufflevector(x, x, 2, 3, 0, 1);
    x = x > y ? x : y;
    return (u32)(x[0] > x[1] ? x[0] : x[1]);
}

template <class T>
HC_INLINE Step prepare(const float* values, u32 blocks, float bound, bool relative, Tile& tile) {
    u32 largest = 0;
    for (u32 b = 0; b < blocks; ++b) {
        u32 absmax = block_absmax(values + b * BLOCK);
        tile.absmax[b] = absmax;
        largest = absmax > largest ? absmax : largest;
    }
    if (largest >= INF_BITS) largest = finite_absmax(values, blocks * BLOCK);
    float limit = error_limit(bound, relative, largest);
    return make_step(limit, Narrow<T>::half(limit, largest), largest);
}

template <class T>
HC_INLINE void encode_blocks(const float* values, const typename T::Stored* source, u32 blocks,
                             Step step, Tile& tile) {
    constexpr u32 last = last_class(Narrow<T>::RAW_BITS);
    u32 limit = float_bits(step.limit);
    for (u32 b = 0; b < blocks; ++b) {
        tile.present[b] = tile.absmax[b] > limit;
        if (!tile.present[b]) continue;
        u32 c = class_of(top_level(tile.absmax[b], step.inverse), last);
        u32* words = tile.words + b * BLOCK;
        if (c == RAW || !encode_block<T>(values + b * BLOCK, step, TABLES.classes[c], words)) {
            for (int i = 0; i < BLOCK; ++i) {
                typename T::Stored stored = source[b * BLOCK + i];
                words[i] = 0;
                memcpy(words + i, &stored, sizeof stored);
            }
            c = RAW;
        }
        tile.classes[b] = (u8)c;
    }
}

// Header, mask and planes; returns where the words begin.
u8* write_head(const Tile& tile, u32 blocks, float step, u8* out) {
    u8 fields[MAX_BLOCKS + 8] = {};
    u32 count = 0, base = RAW, top = 0, raws = 0;
    for (u32 b = 0; b < blocks; ++b) {
        u32 c = tile.classes[b];
        fields[count] = (u8)c;
        if (!tile.present[b]) continue;
        ++count;
        if (c == RAW) {
            ++raws;
            continue;
        }
        base = c < base ? c : base;
        top = c > top ? c : top;
    }
    if (count == 0) return out;
    u32 span = base == RAW ? 0 : top - base;
    bool mixed = raws != 0 && base != RAW;
    for (u32 i = 0; i < count; ++i) {
        fields[i] = (u8)(fields[i] == RAW ? (mixed ? span + 1 : 0) : fields[i] - base);
    }
    for (u32 i = count; i % 8; ++i) fields[i] = 0;
    memcpy(out, &step, 4);
    out[4] = (u8)base;
    out[5] = (u8)span;
    out[6] = (u8)((count < blocks ? ZEROS : 0) | (mixed ? RAWS : 0));
    out[7] = 0;
    out += TILE_HEADER_BYTES;
    if (count < blocks) {
        u8 present[MAX_BLOCKS + 8] = {};
        memcpy(present, tile.present, blocks);
        out = write_planes(present, blocks, 1, out);
    }
    return write_planes(fields, count, bits_of(span + mixed), out);
}

// Bits to bytes, lowest first. Touches up to eight bytes beyond what was put.
struct BitWriter {
    u8* out;
    u64 pending;
    u32 fill;  // below 8
    // `count` bits, at most 56.
    HC_INLINE void put(BitWriter& to, u64 bits, u32 count) {
        to.pending |= bits << to.fill;
        to.fill += count;
        store_u64(to.pending, to.out);
        to.out += to.fill >> 3;
        to.pending >>= to.fill & ~7u;
        to.fill &= 7;
    }
};

HC_INLINE u8* write_words(const Tile& tile, u32 blocks, u32 raw_bits, u8* out) {
    BitWriter to = {out, 0, 0};
    for (u32 b = 0; b < blocks; ++b) {
        if (!tile.present[b]) continue;
        u32 c = tile.classes[b], bits = class_bits(c, raw_bits), count = class_words(c);
        const u32* words = tile.words + b * BLOCK;
        if (bits <= 28) {
            for (u32 j = 0; j < count; j += 2) {
                BitWriter::put(to, words[j] | (u64)words[j + 1] << bits, 2 * bits);
            }
        } else {
            for (u32 j = 0; j < count; ++j) BitWriter::put(to, words[j], bits);
        }
    }
    store_u64(to.pending, to.out);
    return to.out + (to.fill != 0);
}

template <class T>
HC_INLINE u8* encode_tile(const float* values, const typename T::Stored* source, u32 blocks,
                          float bound, bool relative, u8* out) {
    Tile tile;
    Step step = prepare<T>(values, blocks, bound, relative, tile);
    encode_blocks<T>(values, source, blocks, step, tile);
    u8* begin = out;
    out = write_head(tile, blocks, step.step, out);
    if (out == begin) return out;
    out = write_words(tile, blocks, Narrow<T>::RAW_BITS, out);
    while ((out - begin) % 4) *out++ = 0;
    return out;
}

struct Source {
    const void* values;
    size_t numel, segment;
    float bound;
    bool relative;
};

template <class T>
HC_INLINE size_t encode_share(const Source& from, size_t begin, size_t end, u8* out, u8* offsets) {
    typedef typename T::Stored Stored;
    const u8* start = out;
    for (size_t t = begin; t < end; ++t) {
        size_t first = t * from.segment, left = from.numel - first;
        u32 count = (u32)(left < from.segment ? left : from.segment);
        u32 blocks = (u32)ceil_div(count, BLOCK);
        const Stored* source = (const Stored*)from.values + first;
        Stored padded[MAX_TILE];
        float widened[MAX_TILE];
        if (count % BLOCK) {
            for (u32 i = count; i < blocks * BLOCK; ++i) padded[i] = 0;
            memcpy(padded, source, count * sizeof(Stored));
            source = padded;
        }
        const float* values = (const float*)source;
        if (sizeof(Stored) == 2) {
            for (u32 b = 0; b < blocks; ++b) {
                for (u32 i = b * BLOCK; i < (b + 1) * BLOCK; ++i) widened[i] = T::load(source[i]);
            }
            values = widened;
        }
        u32 offset = (u32)((out - start) / 4);
        memcpy(offsets + 4 * t, &offset, 4);
        out = encode_tile<T>(values, source, blocks, from.bound, from.relative, out);
    }
    return (size_t)(out - start);
}

// Decoding.

struct Head {
    float step;
    u32 base, span, flags;
};

// Classes of all blocks of a tile (RAW + 1: zero) and the bit where each block's words begin, from
// `data` on. False for a tile that no encoder made.
HC_INLINE bool read_head(Span span, u32 blocks, u32 raw_bits, Head& head, u8* classes,
                         u32* positions, const u8*& data) {
    if (span.end - span.begin < TILE_HEADER_BYTES) return false;
    memcpy(&head.step, span.begin, 4);
    head.base = span.begin[4], head.span = span.begin[5], head.flags = span.begin[6];
    if (head.base + head.span > RAW) return false;
    u8 present[MAX_BLOCKS + 8], fields[MAX_BLOCKS + 8];
    u32 count = blocks, planes = bits_of(head.span + (head.flags & RAWS ? 1 : 0));
    const u8* in = span.begin + TILE_HEADER_BYTES;
    size_t mask = head.flags & ZEROS ? ceil_div(blocks, 8) : 0;
    if ((size_t)(span.end - in) < mask) return false;
    if (mask) {
        in = read_planes(in, blocks, 1, present);
        count = 0;
        for (u32 b = 0; b < blocks; ++b) count += present[b];
    }
    if ((size_t)(span.end - in) < planes * ceil_div(count, 8)) return false;
    data = read_planes(in, count, planes, fields);
    u32 position = 0, next = 0;
    for (u32 b = 0; b < blocks; ++b) {
        positions[b] = position;
        classes[b] = RAW + 1;
        if (mask && !present[b]) continue;
        u32 field = fields[next++];
        u32 c = field > head.span ? RAW : head.base + field;
        classes[b] = (u8)c;
        position += class_bits(c, raw_bits) * class_words(c);
    }
    return (size_t)(span.end - data) >= ceil_div(position, 8);
}

// Words of one block. Reads up to 8 bytes beyond their end.
HC_INLINE void read_words(const u8* data, u32 position, u32 bits, u32 count, u32* words) {
    u32 mask = (u32)(((u64)1 << bits) - 1);
    for (u32 j = 0; j < count; ++j, position += bits) {
        words[j] = (u32)(load_u64(data + (position >> 3)) >> (position & 7)) & mask;
    }
}

HC_INLINE float widen(u32 word, int dtype) {
    if (dtype == (int)Dtype::bf16) return bf16_to_float((u16)word);
    return dtype == (int)Dtype::fp16 ? fp16_to_float((u16)word) : bits_float(word);
}

// read_words, unpack_digits and dequantize for a class of four words.
HC_INLINE void decode_quad(const u8* data, u32 position, u32 bits, const Class& cls, float step,
                           float* values) {
    u32 words[4], halves[8];
    if (bits <= 28) {
        u32 mask = (1u << bits) - 1, next = position + 2 * bits;
        u64 first = load_u64(data + (position >> 3)) >> (position & 7);
        u64 second = load_u64(data + (next >> 3)) >> (next & 7);
        words[0] = (u32)first & mask;
        words[1] = (u32)(first >> bits) & mask;
        words[2] = (u32)second & mask;
        words[3] = (u32)(second >> bits) & mask;
    } else {
        read_words(data, position, bits, 4, words);
    }
    for (int j = 0; j < 4; ++j) {
        halves[4 + j] = divide(words[j], cls);
        halves[j] = words[j] - halves[4 + j] * cls.divisor;
    }
    U8 both = load_lanes<U8>(halves);
    U8 odd = (both * small_inverse(cls.levels)) >> 24;
    U8 even = both - odd * cls.levels;
    F8 low = __builtin_convertvector((I8)(even - cls.levels / 2), F8) * step;
    F8 high = __builtin_convertvector((I8)(odd - cls.levels / 2), F8) * step;
    store_lanes(__builtin_shufflevector(low, high, 0, 1, 2, 3, 8, 9, 10, 11), values);
    store_lanes(__builtin_shufflevector(low, high, 4, 5, 6, 7, 12, 13, 14, 15), values + 8);
}

HC_INLINE void decode_block(const u8* data, u32 position, u32 c, int dtype, float step,
                            float* values) {
    u32 words[BLOCK], digits[BLOCK];
    u32 bits = class_bits(c, dtype == 0 ? 32 : 16);
    const Class& cls = TABLES.classes[c];
    if (c < FIRST_PAIR) {
        decode_quad(data, position, bits, cls, step, values);
        return;
    }
    read_words(data, position, bits, class_words(c), words);
    if (c == RAW) {
        for (int i = 0; i < BLOCK; ++i) values[i] = widen(words[i], dtype);
        return;
    }
    unpack_digits(words, cls, digits);
    for (int i = 0; i < BLOCK; ++i) values[i] = dequantize(digits[i], cls.levels / 2, step);
}

HC_INLINE bool decode_tile(Span span, u32 blocks, int dtype, float* values) {
    if (span.begin == span.end) {
        for (u32 i = 0; i < blocks * BLOCK; ++i) values[i] = 0.0f;
        return true;
    }
    Head head;
    u8 classes[MAX_BLOCKS];
    u32 positions[MAX_BLOCKS];
    const u8* data;
    if (!read_head(span, blocks, dtype == 0 ? 32 : 16, head, classes, positions, data)) return false;
    for (u32 b = 0; b < blocks; ++b) {
        float* block = values + b * BLOCK;
        if (classes[b] > RAW) {
            for (int i = 0; i < BLOCK; ++i) block[i] = 0.0f;
        } else {
            decode_block(data, positions[b], classes[b], dtype, head.step, block);
        }
    }
    return true;
}

struct Target {
    const u8* offsets;
    const u8* data;
    size_t total, tiles, numel, segment;
    int dtype;
    void* out;
};

template <class T, bool ADD>
HC_INLINE bool decode_share(const Target& to, size_t begin, size_t end) {
    typedef typename T::Stored Stored;
    for (size_t t = begin; t < end; ++t) {
        size_t first = t * to.segment, left = to.numel - first;
        u32 count = (u32)(left < to.segment ? left : to.segment);
        Stored* out = (Stored*)to.out + first;
        float buffer[MAX_TILE];
        bool in_place = sizeof(Stored) == 4 && !ADD && count % BLOCK == 0;
        float* values = in_place ? (float*)out : buffer;
        Span span;
        if (!tile_span(to.offsets, to.data, to.total, to.tiles, t, span)) return false;
        if (!decode_tile(span, (u32)ceil_div(count, BLOCK), to.dtype, values)) return false;
        if (in_place) continue;
        for (u32 i = 0; i < count; ++i) {
            out[i] = T::store(ADD ? T::load(out[i]) + values[i] : values[i]);
        }
    }
    return true;
}

typedef size_t Encode(const Source&, size_t, size_t, u8*, u8*);
typedef bool Decode(const Target&, size_t, size_t);

#define HC_RADIX(T)                                                                               \
    HC_CLONES size_t encode_##T(const Source& from, size_t begin, size_t end, u8* out,            \
                                u8* offsets) {                                                    \
        return encode_share<T>(from, begin, end, out, offsets);                                   \
    }                                                                                             \
    HC_CLONES bool decode_##T(const Target& to, size_t begin, size_t end) {                       \
        return decode_share<T, false>(to, begin, end);                                            \
    }
HC_RADIX(Fp32)
HC_RADIX(BFloat16)
HC_RADIX(Float16)
HC_CLONES bool add_Fp32(const Target& to, size_t begin, size_t end) {
    return decode_share<Fp32, true>(to, begin, end);
}

Encode* const ENCODE[3] = {encode_Fp32, encode_BFloat16, encode_Float16};
Decode* const DECODE[3] = {decode_Fp32, decode_BFloat16, decode_Float16};

size_t item_size(int dtype) { return dtype == (int)Dtype::fp32 ? 4 : 2; }

}  // namespace

size_t wire_nbytes(size_t numel, int segment, int dtype) {
    return Layout(numel, (size_t)segment, item_size(dtype)).capacity;
}

size_t encode(const Settings& settings, int dtype, const void* in, size_t numel, u8* out,
              int threads) {
    if (numel == 0) return 0;
    size_t segment = (size_t)settings.segment;
    Layout layout(numel, segment, item_size(dtype));
    Source from = {in, numel, segment, settings.bound, settings.relative};
    Encode* loop = ENCODE[dtype];
    size_t total = encode_tiles_in_shares(
        layout.tiles, segment, layout.largest, threads, out + layout.offsets, out + layout.data,
        [&](size_t begin, size_t end, u8* to, u8* offsets) {
            return loop(from, begin, end, to, offsets);
        });
    TileHeader header = {MAGIC, (u8)VERSION, (u8)dtype, (u8)!settings.relative, 0, numel,
                         (u32)segment, settings.bound, (u32)(total / 4), 0};
    memcpy(out, &header, sizeof header);
    size_t used = layout.data + total, nbytes = align16(used + TAIL_BYTES);
    pad(out, used, nbytes);
    return nbytes;
}

void decode(const Settings& settings, int dtype, const u8* in, size_t nbytes, void* out,
            size_t numel, bool add, int threads) {
    if (numel == 0) return;
    TileHeader header = read_header(in, nbytes, MAGIC, VERSION, numel);
    require(header.tile == (u32)settings.segment && header.bound == settings.bound &&
                header.mode == (u8)!settings.relative,
            "payload was encoded with other settings");
    Layout layout(numel, header.tile, 4);
    size_t total = (size_t)header.length * 4;
    require(nbytes >= layout.data + TAIL_BYTES && nbytes - layout.data - TAIL_BYTES >= total,
            "payload is too short for its tiles");
    Target to = {in + layout.offsets, in + layout.data, total,        layout.tiles,
                 numel,               header.tile,   header.dtype, out};
    Decode* loop = add ? add_Fp32 : DECODE[dtype];
    std::atomic<bool> good{true};
    parallel_ranges(layout.tiles, header.tile, threads, [&](size_t begin, size_t end) {
        if (!loop(to, begin, end)) good = false;
    });
    require(good, "a tile is damaged");
}

}  // namespace radix
}  // namespace hybridcomp
