// Decoding loops of radix: a tile at a time. Blocks of four words run on vectors, others through radix.h.
// All fields of a tile are checked against its length before they are used.
#include "bitplanes.h"
#include "cpu_radix_shared.h"
#include "lanes.h"

namespace hybridcomp {
namespace radix {
namespace {

struct Head {
    float step;
    u32 base, span, flags;
};

// Reads the classes of a tile's blocks (RAW + 1: zero) and the bit of `data` at which each block's words begin.
// Returns false for a tile that no encoder writes.
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
HC_INLINE void put_values(const float* values, u32 count, typename T::Stored* out) {
    u32 i = 0;
    for (; i + 8 <= count; i += 8) {
        F8 lanes = load_lanes<F8>(values + i);
        if (ADD) lanes = load_lanes<F8>(out + i) + lanes;  // sums are fp32
        T::store8(lanes, out + i);
    }
    for (; i < count; ++i) out[i] = T::store(ADD ? T::load(out[i]) + values[i] : values[i]);
}

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
        put_values<T, ADD>(values, count, out);
    }
    return true;
}

#define HC_RADIX(NAME, T, ADD)                                              \
    HC_CLONES bool NAME##_##T(const Target& to, size_t begin, size_t end) { \
        return decode_share<T, ADD>(to, begin, end);                        \
    }
HC_RADIX(decode, Fp32, false)
HC_RADIX(decode, BFloat16, false)
HC_RADIX(decode, Float16, false)
HC_RADIX(add, Fp32, true)

typedef bool Decode(const Target&, size_t, size_t);
Decode* const DECODE[3] = {decode_Fp32, decode_BFloat16, decode_Float16};

}  // namespace

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
    decode_tiles_in_shares(layout.tiles, header.tile, threads,
                           [&](size_t begin, size_t end) { return loop(to, begin, end); });
}

}  // namespace radix
}  // namespace hybridcomp
