// Decoder of radix: Team::WARPS warps per segment, whose words are loaded into shared memory 16 bytes at a
// time; two barriers, three with zero blocks. Memory is written in whole sectors.
#pragma once

#include "radix_digits.h"

namespace hybridcomp {
namespace radix {

// header, mask, six planes, all blocks raw
constexpr u32 MOST_TILE_WORDS = (TILE_HEADER_BYTES + 7 * MAX_BLOCKS / 8) / 4 + MAX_TILE;

HC_INLINE void fetch(void* shared, const void* from) { fetch16(shared_at(shared), from); }

HC_INLINE void await_fetched() {
    await_all_fetches();
    __syncthreads();
}

// Where a tile lies in a message, and whether the message can be what an encoder made.
struct Place {
    u64 data;
    u32 begin, end, dtype;
    bool good;
};

HC_INLINE Place find_tile(const u8* in, u64 nbytes, u64 numel, u64 segment, u64 bound, u64 relative,
                          u32 number, u32 tiles) {
    u64 data = HEADER_BYTES + 4ull * tiles;
    if (nbytes < data + TAIL_BYTES) return Place{data, 0, 0, 0, false};  // nothing to read there
    uint4 first = load16(in), second = load16(in + 16);
    const u32* offsets = (const u32*)in + HEADER_BYTES / 4 + number;
    u32 length = second.z;
    Place place;
    place.data = data;
    place.dtype = first.y >> 8 & 255;
    place.begin = offsets[0], place.end = number + 1 < tiles ? offsets[1] : length;
    // what there must be, and what differs from it
    u32 word = VERSION | (relative ? 0u : 1u) << 16;
    u32 differs = (first.x ^ MAGIC) | ((first.y ^ word) & ~0xff00u) | (first.z ^ (u32)numel) |
                  (first.w ^ (u32)(numel >> 32)) | (second.x ^ (u32)segment) |
                  (second.y ^ (u32)bound);
    u32 words = place.end - place.begin;
    place.good = differs == 0 && place.dtype <= 2 && place.begin <= place.end &&
                 place.end <= length && words != 1 && words <= MOST_TILE_WORDS &&
                 place.data + 4ull * length + TAIL_BYTES <= nbytes;
    return place;
}

// A number that all threads of the block call for, over those before this one and over all.
template <class O>
HC_INLINE u32 sum_before(u32 value, u32* sums, u32& total) {
    u32 warp = threadIdx.x / WARP, included = scan_lanes(value), before = included - value;
    if (lane_id() == WARP - 1) sums[warp] = included;
    __syncthreads();
    total = 0;
#pragma unroll
    for (u32 w = 0; w < O::WARPS; ++w) before += w < warp ? sums[w] : 0, total += sums[w];
    return before;
}

// PARTS bits from bit `at` on, which may lie in two words.
template <class O>
HC_INLINE u32 some_bits(const u32* words, u32 at) {
    return O::PARTS == 1 ? words[at / 32] >> at % 32 : bits_at(words, at);
}

// Reads the classes of this thread's blocks, RAW + 1 for zero, and the bit where their words begin. All threads
// call it. Returns false for a tile that no encoder writes.
template <class O>
HC_INLINE bool read_head(const u32* words, u32 limit, u32 blocks, u32 raw_bits, u32* cls,
                         u32& position) {
    constexpr u32 PARTS = O::PARTS;
    __shared__ u32 sums[O::WARPS], counts[O::WARPS];
    u32 info = words[1], base = info & 255, span = info >> 8 & 255, flags = info >> 16 & 255;
    u32 b = threadIdx.x * PARTS, at = 8 * TILE_HEADER_BYTES, index = b, all = blocks;
    u32 there = b >= blocks ? 0 : blocks - b < PARTS ? (1u << (blocks - b)) - 1 : (1u << PARTS) - 1;
    bool good = base + span <= RAW;
    if (flags & ZEROS) {
        good = good && at + 8 * ((blocks + 7) / 8) <= limit;
        there = good && there ? there & some_bits<O>(words, at + b) : 0;
        at += 8 * ((blocks + 7) / 8);
        index = sum_before<O>(ones_in(there), counts, all);
    }
    u32 planes = bits_of(span + (flags & RAWS ? 1 : 0)), stride = 8 * ((all + 7) / 8);
    u32 fields[PARTS], size = 0, total;
    good = good && at + planes * stride <= limit;
#pragma unroll
    for (u32 k = 0; k < PARTS; ++k) fields[k] = 0;
    if (there && good) {
        for (u32 plane = 0; plane < planes; ++plane) {
            u32 bits = some_bits<O>(words, at + plane * stride + index);
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
    position = at + planes * stride + sum_before<O>(size, sums, total);
    return good && at + planes * stride + total <= limit;
}

// Segment `number`.
template <class O, bool ADD>
HC_INLINE void decode(const u8* in, u64 nbytes, u64 numel, u64 segment, u64 bound, u64 relative,
                      void* target, u32* damage, u32 number) {
    __shared__ uint4 buffer[(MOST_TILE_WORDS + 3) / 4 + 2];  // it begins in the first of these
    constexpr u32 PARTS = O::PARTS;
    u32 tiles = (u32)ceil_div(numel, segment), b = threadIdx.x * PARTS, cls[PARTS], position = 0;
    u64 first = number * segment;
    u32 count = (u32)(numel - first < segment ? numel - first : segment);
    Place tile = find_tile(in, nbytes, numel, segment, bound, relative, number, tiles);
    const u32* words = (const u32*)buffer;
#pragma unroll
    for (u32 k = 0; k < PARTS; ++k) cls[k] = RAW + 1;
    if (tile.good && tile.begin < tile.end) {
        // from the 16 bytes that the tile begins in to those that it ends in: payloads are whole ones
        u64 begin = tile.data + 4ull * tile.begin, end = tile.data + 4ull * tile.end;
        const uint4* from = (const uint4*)(in + (begin & ~15ull));
        u32 vectors = (u32)(align16(end) - (begin & ~15ull)) / 16;
#pragma unroll 2
        for (u32 i = threadIdx.x; i < vectors; i += O::THREADS) fetch(buffer + i, from + i);
        if (threadIdx.x == 0) buffer[vectors] = make_uint4(0, 0, 0, 0);
        await_fetched();
        words += (begin & 15) / 4;
        tile.good = read_head<O>(words, 32 * (tile.end - tile.begin), (count + BLOCK - 1) / BLOCK,
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
