// radix, decode: HC_DECODE_WARPS warps a segment, whose words come into shared memory 16 bytes at a time;
// two barriers, three where blocks are zero. Memory is written in whole sectors.
#pragma once

#include "radix_device.h"

#ifndef HC_DECODE_WARPS
#define HC_DECODE_WARPS 4
#endif

namespace hybridcomp {
namespace radix {

constexpr u32 DECODE_WARPS = HC_DECODE_WARPS;
constexpr u32 DECODE_THREADS = DECODE_WARPS * WARP;
constexpr u32 PARTS = MAX_BLOCKS / DECODE_THREADS;  // blocks of a thread, one behind the other
static_assert(PARTS == 1 || PARTS == 2 || PARTS == 4, "bits of neighbours share a word");
// header, mask, six planes, all blocks raw
constexpr u32 MOST_TILE_WORDS = (TILE_HEADER_BYTES + 7 * MAX_BLOCKS / 8) / 4 + MAX_TILE;

HC_INLINE void fetch(void* shared, const void* from) {
#if HC_ARCH >= 800
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;"
                 :: "r"((u32)__cvta_generic_to_shared(shared)), "l"(from) : "memory");
#else
    *(uint4*)shared = *(const uint4*)from;
#endif
}

HC_INLINE void await_fetched() {
#if HC_ARCH >= 800
    asm volatile("cp.async.wait_all;" ::: "memory");
#endif
    __syncthreads();
}

HC_INLINE float widen(u32 word, u32 dtype) {
    if (dtype == 1) return bf16_to_float((u16)word);
    return dtype == 2 ? fp16_to_float((u16)word) : bits_float(word);
}

// 32 bits from bit `position` on; there is a word more than is read of.
HC_INLINE u32 bits_at(const u32* words, u32 position) {
    u32 low = words[position / 32], high = words[position / 32 + 1];
#if HC_ARCH
    return __funnelshift_r(low, high, position);
#else
    return low >> position % 32 | (high << 1) << (31 - position % 32);
#endif
}

// dequantize of radix.h: a digit of at most 22 bits as the end of a mantissa.
HC_INLINE float value_of(u32 digit, float bias, float step) {
    return (bits_float(digit + 0x4b000000u) - bias) * step;
}

template <int WORDS>
HC_INLINE void get_digits(const u32* words, u32 position, u32 bits, const Entry& entry, float step,
                          float* values) {
    u32 mask = ~0u >> (32 - bits), shift = entry.levels >> 24, levels = entry.levels & 0xffffffu;
    u32 minus = 0u - levels, divisor = 0u - entry.divisor;
    float bias = 8388608.0f + (float)(levels / 2);
#pragma unroll
    for (int j = 0; j < WORDS; ++j) {
        u32 word = bits_at(words, position + j * bits) & mask;
        if constexpr (WORDS == 16) {
            values[j] = value_of(word, bias, step);
            continue;
        }
        u32 high = __umulhi(word, entry.multiplier) >> shift, low = high * divisor + word;
        if constexpr (WORDS == 4) {
            u32 third = (high * entry.inverse) >> 24, first = (low * entry.inverse) >> 24;
            values[12 + j] = value_of(third, bias, step);
            values[8 + j] = value_of(third * minus + high, bias, step);
            values[4 + j] = value_of(first, bias, step);
            values[j] = value_of(first * minus + low, bias, step);
        } else if constexpr (WORDS == 8) {
            values[8 + j] = value_of(high, bias, step);
            values[j] = value_of(low, bias, step);
        }
    }
}

// How sixteen values of a thread are stored: as `QUADS` times 16 bytes.
template <class P>
struct OutNarrow {
    typedef u16 Stored;
    static constexpr int QUADS = 2;
    HC_INLINE u16 store(float value) { return P::T::store(value); }
    HC_INLINE void pack(const float* v, uint4* quads) {
#pragma unroll
        for (int h = 0; h < 2; ++h, v += 8) {
            quads[h] = make_uint4(P::narrow(v[0], v[1]), P::narrow(v[2], v[3]), P::narrow(v[4], v[5]),
                                  P::narrow(v[6], v[7]));
        }
    }
};
typedef OutNarrow<PairsBf16> OutBf16;
typedef OutNarrow<PairsFp16> OutFp16;

struct OutFp32 {
    typedef float Stored;
    static constexpr int QUADS = 4;
    HC_INLINE float store(float value) { return value; }
    HC_INLINE void pack(const float* v, uint4* quads) {
#pragma unroll
        for (int h = 0; h < 4; ++h, v += 4) {
            quads[h] = make_uint4(float_bits(v[0]), float_bits(v[1]), float_bits(v[2]), float_bits(v[3]));
        }
    }
};

HC_INLINE uint4 other_quad(uint4 v) {
    return make_uint4(other_lane<1>(v.x), other_lane<1>(v.y), other_lane<1>(v.z), other_lane<1>(v.w));
}

HC_INLINE uint4 choose_quad(bool first, uint4 a, uint4 b) {
    return make_uint4(first ? a.x : b.x, first ? a.y : b.y, first ? a.z : b.z, first ? a.w : b.w);
}

// Two threads write two blocks of theirs side by side, 16 bytes each: together a sector of 32. `out`: the
// block of this one.
template <class O>
HC_INLINE void write_pair(const uint4* quads, typename O::Stored* out) {
    bool odd = threadIdx.x & 1;
    auto* at = (uint4*)(odd ? out - PARTS * BLOCK : out) + odd;
#pragma unroll
    for (int q = 0; q < O::QUADS; q += 2) {
        uint4 other = other_quad(choose_quad(odd, quads[q], quads[q + 1]));
        at[q] = choose_quad(odd, other, quads[q]);
        at[q + PARTS * O::QUADS] = choose_quad(odd, quads[q + 1], other);
    }
}

HC_INLINE void add_quads(const float* out, float* values) {
#pragma unroll
    for (int q = 0; q < 4; ++q) {
        uint4 v = quad_at(out + 4 * q);
        values[4 * q] = bits_float(v.x) + values[4 * q];
        values[4 * q + 1] = bits_float(v.y) + values[4 * q + 1];
        values[4 * q + 2] = bits_float(v.z) + values[4 * q + 2];
        values[4 * q + 3] = bits_float(v.w) + values[4 * q + 3];
    }
}

// Where a tile lies in a message, and whether the message can be what an encoder made.
struct Place {
    u64 data;
    u32 begin, end, dtype;
    bool good;
};

HC_INLINE Place find_tile(const u8* in, u64 nbytes, u64 numel, u64 segment, u64 bound, u64 relative, u32 tiles) {
    uint4 first = quad_at(in), second = quad_at(in + 16);
    const u32* offsets = (const u32*)in + HEADER_BYTES / 4 + blockIdx.x;
    u32 length = second.z;
    Place place;
    place.data = HEADER_BYTES + 4ull * tiles;
    place.dtype = first.y >> 8 & 255;
    place.begin = offsets[0], place.end = blockIdx.x + 1 < tiles ? offsets[1] : length;
    // what there must be, and what differs from it
    u32 word = VERSION | (relative ? 0u : 1u) << 16;
    u32 differs = (first.x ^ MAGIC) | ((first.y ^ word) & ~0xff00u) | (first.z ^ (u32)numel) |
                  (first.w ^ (u32)(numel >> 32)) | (second.x ^ (u32)segment) | (second.y ^ (u32)bound);
    u32 words = place.end - place.begin;
    place.good = differs == 0 && place.dtype <= 2 && place.begin <= place.end && place.end <= length &&
                 words != 1 && words <= MOST_TILE_WORDS && place.data + 4ull * length + TAIL_BYTES <= nbytes;
    return place;
}

// A number that all threads of the block call for, over those before this one and over all.
HC_INLINE u32 sum_before(u32 value, u32* sums, u32& total) {
    u32 warp = threadIdx.x / WARP, included = scan_lanes(value), before = included - value;
    if (lane_id() == WARP - 1) sums[warp] = included;
    __syncthreads();
    total = 0;
#pragma unroll
    for (u32 w = 0; w < DECODE_WARPS; ++w) before += w < warp ? sums[w] : 0, total += sums[w];
    return before;
}

// PARTS bits from bit `at` on, which may lie in two words.
HC_INLINE u32 some_bits(const u32* words, u32 at) {
    return PARTS == 1 ? words[at / 32] >> at % 32 : bits_at(words, at);
}

// The classes of this thread's blocks, RAW + 1 for zero, and the bit where their words begin. All threads
// call it. False for a tile that no encoder made.
HC_INLINE bool read_head(const u32* words, u32 limit, u32 blocks, u32 raw_bits, u32* cls, u32& position) {
    __shared__ u32 sums[DECODE_WARPS], counts[DECODE_WARPS];
    u32 b = threadIdx.x * PARTS, info = words[1], base = info & 255, span = info >> 8 & 255, flags = info >> 16 & 255;
    u32 at = 8 * TILE_HEADER_BYTES, index = b, all = blocks;
    u32 there = b >= blocks ? 0 : blocks - b < PARTS ? (1u << (blocks - b)) - 1 : (1u << PARTS) - 1;
    bool good = base + span <= RAW;
    if (flags & ZEROS) {
        good = good && at + 8 * ((blocks + 7) / 8) <= limit;
        there = good && there ? there & some_bits(words, at + b) : 0;
        at += 8 * ((blocks + 7) / 8);
        index = sum_before((u32)__popc(there), counts, all);
    }
    u32 planes = bits_of(span + (flags & RAWS ? 1 : 0)), stride = 8 * ((all + 7) / 8), fields[PARTS], size = 0, total;
    good = good && at + planes * stride <= limit;
#pragma unroll
    for (u32 k = 0; k < PARTS; ++k) fields[k] = 0;
    if (there && good) {
        for (u32 plane = 0; plane < planes; ++plane) {
            u32 bits = some_bits(words, at + plane * stride + index);
#pragma unroll
            for (u32 k = 0; k < PARTS; ++k) {
                fields[k] |= (bits & 1) << plane;
                bits = there >> k & 1 ? bits >> 1 : bits;
            }
        }
    }
#pragma unroll
    for (u32 k = 0; k < PARTS; ++k) {
        cls[k] = fields[k] > span || base + fields[k] > RAW ? RAW : base + fields[k];
        size += there >> k & 1 ? size_of(cls[k], width_of(cls[k], raw_bits)) : 0;
        cls[k] = there >> k & 1 ? cls[k] : RAW + 1;
    }
    position = at + planes * stride + sum_before(size, sums, total);
    return good && at + planes * stride + total <= limit;
}

HC_INLINE void get_block(const u32* words, u32 position, u32 cls, u32 bits, u32 dtype, float* values) {
    float step = bits_float(words[0]);
    if (cls < FIRST_PAIR) {
        get_digits<4>(words, position, bits, ENTRIES.of[cls], step, values);
    } else if (cls < FIRST_SINGLE) {
        get_digits<8>(words, position, bits, ENTRIES.of[cls], step, values);
    } else if (cls < RAW) {
        get_digits<16>(words, position, bits, ENTRIES.of[cls], step, values);
    } else if (cls == RAW) {
#pragma unroll
        for (int i = 0; i < BLOCK; ++i) {
            values[i] = widen(bits_at(words, position + i * bits) & ~0u >> (32 - bits), dtype);
        }
    }
}

// A block as values of O. `out`: the block; `left`: how many of its values there are, for a multiple of
// two threads. All lanes of a warp call it.
template <class O, bool ADD>
HC_INLINE void put_values(float* values, typename O::Stored* out, u32 left, bool raw) {
    bool vectors = ((u64)out & 15) == 0 && left >= BLOCK && !raw;
    if (__ballot_sync(FULL_WARP, vectors) == FULL_WARP) {
        uint4 quads[O::QUADS];
        if constexpr (ADD) {
            add_quads((const float*)out, values);
            __syncwarp();  // a partner writes what this one has read
        }
        O::pack(values, quads);
        write_pair<O>(quads, out);
        return;
    }
#pragma unroll
    for (u32 i = 0; i < BLOCK; ++i) {
        if (i >= left) continue;
        if constexpr (ADD) out[i] = out[i] + values[i];
        else out[i] = O::store(values[i]);
    }
}

template <class O, bool ADD>
HC_INLINE void decode(const u8* in, u64 nbytes, u64 numel, u64 segment, u64 bound, u64 relative,
                      void* target, u32* damage) {
    __shared__ uint4 buffer[(MOST_TILE_WORDS + 3) / 4 + 2];  // it begins in the first of these
    u32 tiles = (u32)ceil_div(numel, segment), b = threadIdx.x * PARTS, cls[PARTS], position = 0;
    u64 first = blockIdx.x * segment;
    u32 count = (u32)(numel - first < segment ? numel - first : segment);
    Place tile = find_tile(in, nbytes, numel, segment, bound, relative, tiles);
    const u32* words = (const u32*)buffer;
#pragma unroll
    for (u32 k = 0; k < PARTS; ++k) cls[k] = RAW + 1;
    if (tile.good && tile.begin < tile.end) {
        // from the 16 bytes that the tile begins in to those that it ends in; payloads are whole ones
        u64 begin = tile.data + 4ull * tile.begin, end = tile.data + 4ull * tile.end, from = begin & ~15ull;
        u32 vectors = (u32)(((end + 15) & ~15ull) - from) / 16;
#pragma unroll 2
        for (u32 i = threadIdx.x; i < vectors; i += DECODE_THREADS) fetch(buffer + i, in + from + 16ull * i);
        if (threadIdx.x == 0) buffer[vectors] = make_uint4(0, 0, 0, 0);
        await_fetched();
        words += (begin & 15) / 4;
        tile.good = read_head(words, 32 * (tile.end - tile.begin), (count + BLOCK - 1) / BLOCK,
                              tile.dtype == 0 ? 32 : 16, cls, position);
    }
    if (!tile.good) report_damage(damage);
    auto* out = (typename O::Stored*)target + first;
#pragma unroll
    for (u32 k = 0; k < PARTS; ++k) {
        float values[BLOCK];
#pragma unroll
        for (int i = 0; i < BLOCK; ++i) values[i] = 0.0f;
        u32 width = width_of(cls[k], tile.dtype == 0 ? 32 : 16);
        if (tile.good) get_block(words, position, cls[k], width, tile.dtype, values);
        position += cls[k] <= RAW ? size_of(cls[k], width) : 0;
        u32 at = (b + k) * BLOCK;
        put_values<O, ADD>(values, out + at, at < count ? count - at : 0, cls[k] == RAW);
    }
}

}  // namespace radix
}  // namespace hybridcomp
