// Encoding loops of radix: a segment at a time, in the L1 cache. Blocks of four words, nearly all blocks,
// run on vectors; others through radix.h.
#include "bitplanes.h"
#include "cpu_radix_shared.h"

namespace hybridcomp {
namespace radix {
namespace {

u32 finite_absmax(const float* values, u32 count) {
    u32 largest = 0;
    for (u32 i = 0; i < count; ++i) {
        u32 magnitude = magnitude_bits(values[i]);
        if (magnitude < INF_BITS && magnitude > largest) largest = magnitude;
    }
    return largest;
}

// A tile before it is written. Classes of zero blocks are not set.
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
    return largest_lane(a > b ? a : b);
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
        u32 c = class_of(top_level(tile.absmax[b], step.inverse), last, TABLES);
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

// Writes header, mask and planes; returns the address after them.
u8* write_head(const Tile& tile, u32 blocks, float step, u8* out) {
    u8 fields[MAX_BLOCKS + 8] = {};
    u32 count = 0, base = RAW, top = 0, raws = 0;
    for (u32 b = 0; b < blocks; ++b) {
        if (!tile.present[b]) continue;
        u32 c = tile.classes[b];
        fields[count++] = (u8)c;
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

// Writes bits to bytes, lowest first; may write eight bytes beyond the last bit.
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

#define HC_RADIX(T)                                                                    \
    HC_CLONES size_t encode_##T(const Source& from, size_t begin, size_t end, u8* out, \
                                u8* offsets) {                                         \
        return encode_share<T>(from, begin, end, out, offsets);                        \
    }
HC_RADIX(Fp32)
HC_RADIX(BFloat16)
HC_RADIX(Float16)

typedef size_t Encode(const Source&, size_t, size_t, u8*, u8*);
Encode* const ENCODE[3] = {encode_Fp32, encode_BFloat16, encode_Float16};

}  // namespace

size_t wire_nbytes(size_t numel, int segment, int dtype) {
    return Layout(numel, (size_t)segment, item_nbytes(dtype)).capacity;
}

size_t encode(const Settings& settings, int dtype, const void* in, size_t numel, u8* out,
              int threads) {
    if (numel == 0) return 0;
    size_t segment = (size_t)settings.segment;
    Layout layout(numel, segment, item_nbytes(dtype));
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

}  // namespace radix
}  // namespace hybridcomp
