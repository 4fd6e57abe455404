// CPU loops of radix: a segment at a time, from the L1 cache. Blocks of four digits a word, nearly all
// of them, run on vectors; the others through the functions of radix.h.
#include <atomic>

#include "bitplanes.h"
#include "cpu.h"
#include "cpu_loops.h"
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

struct Layout {
    size_t tiles, largest, offsets, data, capacity;
    Layout(size_t numel, size_t segment, size_t item) {
        size_t blocks = segment / BLOCK;
        tiles = ceil_div(numel, segment);
        // mask, six planes, four bytes of alignment and four that the bit writer may touch
        largest = (TILE_HEADER_BYTES + 7 * ceil_div(blocks, 8) + segment * item + 8 + 3) & ~size_t(3);
        offsets = HEADER_BYTES;
        data = offsets + 4 * tiles;
        capacity = tiles ? align16(data + tiles * largest + TAIL_BYTES) : 0;
    }
};

template <class T>
struct Narrow : T {
    static constexpr bool NARROW = sizeof(typename T::Stored) == 2;
    static constexpr u32 RAW_BITS = 8 * sizeof(typename T::Stored);
};

template <class T>
float rounded_half(float limit, u32 absmax) { return limit; }
template <>
float rounded_half<BFloat16>(float limit, u32 absmax) { return rounded_limit(limit, absmax, 7, 1); }
template <>
float rounded_half<Float16>(float limit, u32 absmax) {
    return rounded_limit(limit, absmax, 10, 113);
}

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

template <class T>
HC_INLINE bool encode_block(const float* values, Step step, const Class& cls, u32* words) {
    u32 digits[BLOCK];
    u32 worst = quantize<Narrow<T>>(values, step, cls.levels / 2, digits);
    pack_digits(digits, cls, words);
    return worst < float_bits(step.limit);
}

template <class T>
HC_INLINE Step prepare(const float* values, u32 blocks, float bound, bool relative, Tile& tile) {
    u32 largest = 0;
    for (u32 b = 0; b < blocks; ++b) {
        u32 absmax = 0;
        for (int i = 0; i < BLOCK; ++i) {
            u32 magnitude = magnitude_bits(values[b * BLOCK + i]);
            absmax = magnitude > absmax ? magnitude : absmax;
        }
        tile.absmax[b] = absmax;
        largest = absmax > largest ? absmax : largest;
    }
    if (largest >= INF_BITS) largest = finite_absmax(values, blocks * BLOCK);
    float limit = error_limit(bound, relative, largest);
    return make_step(limit, rounded_half<T>(limit, largest), largest);
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

// Touches up to four bytes beyond what it returns.
u8* write_words(const Tile& tile, u32 blocks, u32 raw_bits, u8* out) {
    u64 pending = 0;
    u32 fill = 0;  // below 32
    for (u32 b = 0; b < blocks; ++b) {
        if (!tile.present[b]) continue;
        u32 c = tile.classes[b], bits = class_bits(c, raw_bits), count = class_words(c);
        const u32* words = tile.words + b * BLOCK;
        for (u32 j = 0; j < count; ++j) {
            pending |= (u64)words[j] << fill;
            fill += bits;
            u32 low = (u32)pending;
            memcpy(out, &low, 4);
            u32 full = fill >> 5;
            out += 4 * full;
            pending >>= 32 * full;
            fill &= 31;
        }
    }
    memset(out, 0, 4);
    memcpy(out, &pending, (fill + 7) / 8);
    return out + (fill + 7) / 8;
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
            memset(padded, 0, blocks * BLOCK * sizeof(Stored));
            memcpy(padded, source, count * sizeof(Stored));
            source = padded;
        }
        const float* values = (const float*)source;
        if (sizeof(Stored) == 2) {
            for (u32 i = 0; i < blocks * BLOCK; ++i) widened[i] = T::load(source[i]);
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

HC_INLINE void decode_block(const u8* data, u32 position, u32 c, int dtype, float step,
                            float* values) {
    u32 words[BLOCK], digits[BLOCK];
    u32 bits = class_bits(c, dtype == 0 ? 32 : 16);
    read_words(data, position, bits, class_words(c), words);
    if (c == RAW) {
        for (int i = 0; i < BLOCK; ++i) values[i] = widen(words[i], dtype);
        return;
    }
    const Class& cls = TABLES.classes[c];
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

struct Header {
    u32 magic;
    u8 version, dtype, mode, zero;
    u64 numel;
    u32 segment;
    float bound;
    u32 length, reserved;
};
static_assert(sizeof(Header) == HEADER_BYTES, "the header is 32 bytes");

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
    Header header = {MAGIC, (u8)VERSION, (u8)dtype, (u8)!settings.relative, 0, numel, (u32)segment,
                     settings.bound, (u32)(total / 4), 0};
    memcpy(out, &header, sizeof header);
    size_t used = layout.data + total, nbytes = align16(used + TAIL_BYTES);
    pad(out, used, nbytes);
    return nbytes;
}

void decode(const Settings& settings, int dtype, const u8* in, size_t nbytes, void* out,
            size_t numel, bool add, int threads) {
    if (numel == 0) return;
    Header header;
    require(nbytes >= sizeof header, "payload is too short");
    memcpy(&header, in, sizeof header);
    require(header.magic == MAGIC, "payload is not one of radix");
    require(header.version == VERSION, "payload has another version of the format");
    require(header.numel == numel, "payload holds another number of values");
    require(header.dtype <= (u8)Dtype::fp16, "payload has an unknown dtype");
    require(header.segment == (u32)settings.segment && header.bound == settings.bound &&
                header.mode == (u8)!settings.relative,
            "payload was encoded with other settings");
    Layout layout(numel, header.segment, 4);
    size_t total = (size_t)header.length * 4;
    require(nbytes >= layout.data + TAIL_BYTES && nbytes - layout.data - TAIL_BYTES >= total,
            "payload is too short for its tiles");
    Target to = {in + layout.offsets, in + layout.data, total,        layout.tiles,
                 numel,               header.segment,   header.dtype, out};
    Decode* loop = add ? add_Fp32 : DECODE[dtype];
    std::atomic<bool> good{true};
    parallel_ranges(layout.tiles, header.segment, threads, [&](size_t begin, size_t end) {
        if (!loop(to, begin, end)) good = false;
    });
    require(good, "a tile is damaged");
}

}  // namespace radix
}  // namespace hybridcomp
