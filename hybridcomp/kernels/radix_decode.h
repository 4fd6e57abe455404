// radix, decode: 256 threads a segment, whose words come into shared memory 16 bytes at a time; two
// barriers, three where blocks are zero. Memory is written in whole sectors.
#pragma once

#include "radix_device.h"

namespace hybridcomp {
namespace radix {

constexpr u32 DECODE_THREADS = 256;
constexpr u32 DECODE_WARPS = DECODE_THREADS / WARP;
static_assert(DECODE_THREADS == MAX_BLOCKS, "a thread for each block of the largest tile");
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
HC_INLINE void get_digits(const u32* words, u32 position, u32 bits, const Class& cls, float step,
                          float* values) {
    u32 mask = ~0u >> (32 - bits), inverse = small_inverse(cls.levels);
    float bias = 8388608.0f + (float)(cls.levels / 2);
#pragma unroll
    for (int j = 0; j < WORDS; ++j) {
        u32 word = bits_at(words, position + j * bits) & mask;
        if constexpr (WORDS == 4) {
            u32 high = divide(word, cls), low = word - high * cls.divisor;
            u32 third = (high * inverse) >> 24, first = (low * inverse) >> 24;
            values[12 + j] = value_of(third, bias, step);
            values[8 + j] = value_of(high - third * cls.levels, bias, step);
            values[4 + j] = value_of(first, bias, step);
            values[j] = value_of(low - first * cls.levels, bias, step);
        } else if constexpr (WORDS == 8) {
            u32 high = divide(word, cls);
            values[8 + j] = value_of(high, bias, step);
            values[j] = value_of(word - high * cls.divisor, bias, step);
        } else {
            values[j] = value_of(word, bias, step);
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

// Two threads write their two blocks side by side, 16 bytes each: together a sector of 32.
template <class O>
HC_INLINE void write_pair(const uint4* quads, typename O::Stored* out) {
    bool odd = threadIdx.x & 1;
    auto* at = (uint4*)(out + (threadIdx.x & ~1u) * BLOCK) + odd;
#pragma unroll
    for (int q = 0; q < O::QUADS; q += 2) {
        uint4 other = other_quad(choose_quad(odd, quads[q], quads[q + 1]));
        at[q] = choose_quad(odd, other, quads[q]);
        at[q + O::QUADS] = choose_quad(odd, quads[q + 1], other);
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
    const u32 *header = (const u32*)in, *offsets = header + HEADER_BYTES / 4;
    u32 tile = blockIdx.x, length = header[6];
    Place place;
    place.data = HEADER_BYTES + 4ull * tiles;
    place.dtype = header[1] >> 8 & 255;
    place.begin = offsets[tile], place.end = tile + 1 < tiles ? offsets[tile + 1] : length;
    u32 words = place.end - place.begin;
    place.good = header[0] == MAGIC && (header[1] & 255) == VERSION && place.dtype <= 2 &&
                 header[1] >> 16 == (relative ? 0u : 1u) && header[2] == (u32)numel &&
                 header[3] == (u32)(numel >> 32) && header[4] == segment && header[5] == (u32)bound &&
                 place.data + 4ull * length + TAIL_BYTES <= nbytes && place.begin <= place.end &&
                 place.end <= length && (words == 0 || (words >= 2 && words <= MOST_TILE_WORDS));
    return place;
}

// The class of this thread's block, RAW + 1 for zero, and the bit where its words begin. All threads of
// the block call it. False for a tile that no encoder made.
HC_INLINE bool read_head(const u32* words, u32 limit, u32 blocks, u32 raw_bits, u32& cls, u32& position) {
    __shared__ u32 sums[DECODE_WARPS], counts[DECODE_WARPS];
    u32 b = threadIdx.x, warp = b / WARP, info = words[1];
    u32 base = info & 255, span = info >> 8 & 255, flags = info >> 16 & 255;
    u32 at = 8 * TILE_HEADER_BYTES, index = b, all = blocks;
    bool good = base + span <= RAW, present = b < blocks;
    if (flags & ZEROS) {
        good = good && at + 8 * ((blocks + 7) / 8) <= limit;
        present = present && good && words[(at + b) / 32] >> (at + b) % 32 & 1;
        at += 8 * ((blocks + 7) / 8);
        u32 mask = __ballot_sync(FULL_WARP, present);
        if (lane_id() == 0) counts[warp] = (u32)__popc(mask);
        __syncthreads();
        index = (u32)__popc(mask & ((1u << lane_id()) - 1)), all = 0;
        for (u32 w = 0; w < DECODE_WARPS; ++w) index += w < warp ? counts[w] : 0, all += counts[w];
    }
    u32 planes = bits_of(span + (flags & RAWS ? 1 : 0)), field = 0, stride = 8 * ((all + 7) / 8);
    good = good && at + planes * stride <= limit;
    if (present && good) {
        for (u32 plane = 0; plane < planes; ++plane) {
            u32 bit = at + plane * stride + index;
            field |= (words[bit / 32] >> bit % 32 & 1) << plane;
        }
    }
    cls = !present ? RAW + 1 : (field > span || base + field > RAW ? RAW : base + field);
    u32 bits = present ? class_size(cls, raw_bits) : 0, included = scan_lanes(bits), total = 0;
    if (lane_id() == WARP - 1) sums[warp] = included;
    __syncthreads();
    position = at + planes * stride + included - bits;
#pragma unroll
    for (u32 w = 0; w < DECODE_WARPS; ++w) position += w < warp ? sums[w] : 0, total += sums[w];
    return good && at + planes * stride + total <= limit;
}

HC_INLINE void get_block(const u32* words, u32 position, u32 cls, u32 dtype, float* values) {
    float step = bits_float(words[0]);
    u32 bits = class_bits(cls, dtype == 0 ? 32 : 16);
    if (cls < FIRST_PAIR) {
        get_digits<4>(words, position, bits, TABLES.classes[cls], step, values);
    } else if (cls < FIRST_SINGLE) {
        get_digits<8>(words, position, bits, TABLES.classes[cls], step, values);
    } else if (cls < RAW) {
        get_digits<16>(words, position, bits, TABLES.classes[cls], step, values);
    } else {
#pragma unroll
        for (int i = 0; i < BLOCK; ++i) {
            values[i] = widen(bits_at(words, position + i * bits) & ~0u >> (32 - bits), dtype);
        }
    }
}

template <class O, bool ADD>
HC_INLINE void decode(const u8* in, u64 nbytes, u64 numel, u64 segment, u64 bound, u64 relative,
                      void* target, u32* damage) {
    __shared__ uint4 buffer[(MOST_TILE_WORDS + 3) / 4 + 2];  // it begins in the first of these
    u32 tiles = (u32)ceil_div(numel, segment), b = threadIdx.x, cls = RAW + 1, position = 0;
    u64 first = blockIdx.x * segment;
    u32 count = (u32)(numel - first < segment ? numel - first : segment);
    Place tile = find_tile(in, nbytes, numel, segment, bound, relative, tiles);
    const u32* words = (const u32*)buffer;
    if (tile.good && tile.begin < tile.end) {
        // from the 16 bytes that the tile begins in to those that it ends in; payloads are whole ones
        u64 begin = tile.data + 4ull * tile.begin, end = tile.data + 4ull * tile.end, from = begin & ~15ull;
        u32 vectors = (u32)(((end + 15) & ~15ull) - from) / 16;
        for (u32 i = b; i < vectors; i += DECODE_THREADS) fetch(buffer + i, in + from + 16ull * i);
        if (b == 0) buffer[vectors] = make_uint4(0, 0, 0, 0);
        await_fetched();
        words += (begin & 15) / 4;
        tile.good = read_head(words, 32 * (tile.end - tile.begin), (count + BLOCK - 1) / BLOCK,
                              tile.dtype == 0 ? 32 : 16, cls, position);
    }
    if (!tile.good) report_damage(damage);
    float values[BLOCK];
#pragma unroll
    for (int i = 0; i < BLOCK; ++i) values[i] = 0.0f;
    if (tile.good && cls <= RAW) get_block(words, position, cls, tile.dtype, values);
    auto* out = (typename O::Stored*)target + first;
    bool vectors = ((u64)out & 15) == 0 && (b | 1) * BLOCK + BLOCK <= count && cls != RAW;
    if (__ballot_sync(FULL_WARP, vectors) == FULL_WARP) {
        uint4 quads[O::QUADS];
        if constexpr (ADD) {
            add_quads(out + b * BLOCK, values);
            __syncwarp();  // a partner writes what this one has read
        }
        O::pack(values, quads);
        write_pair<O>(quads, out);
        return;
    }
#pragma unroll
    for (u32 i = 0; i < BLOCK; ++i) {
        u32 at = b * BLOCK + i;
        if (at >= count) continue;
        if constexpr (ADD) out[at] = out[at] + values[i];
        else out[at] = O::store(values[i]);
    }
}

}  // namespace radix
}  // namespace hybridcomp
