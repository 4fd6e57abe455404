// Decoder of expcode: a warp decodes a tile, which it loads into shared memory 16 bytes at a time; no barrier.
#pragma once

#include "expcode_levels.h"

namespace hybridcomp {
namespace expcode {

struct Body {
    Coding coding;
    u32 present[TILE_BLOCKS / WARP];  // the blocks that are there
    u32 blocks, escapes, count;       // bytes of the tile at which they begin; escapes
    bool all;
};

template <class F>
HC_INLINE bool read_head(const u8* in, u32 nbytes, u32 blocks, Body& body) {
    if (nbytes < TILE_HEADER_BYTES || nbytes > 4 * Lanes<F>::TILE_WORDS) return false;
    u32 flags = in[1], width = flags & 15, mask_bytes = (blocks + 7) / 8;
    bool masked = flags & ZERO_BLOCKS;
    if (!((width >= 2 && width <= 4) || width == F::WIDEST)) return false;
    if (masked && nbytes < TILE_HEADER_BYTES + mask_bytes) return false;
#pragma unroll
    for (u32 w = 0; w < TILE_BLOCKS / WARP; ++w) {
        u32 left = blocks > w * WARP ? blocks - w * WARP : 0, bits = FULL_WARP;
        if (masked) {
            bits = 0;
            for (u32 i = 0; i < 4; ++i) {
                if (4 * w + i < mask_bytes) bits |= (u32)in[TILE_HEADER_BYTES + 4 * w + i] << (8 * i);
            }
        }
        body.present[w] = bits & (left >= WARP ? FULL_WARP : (1u << left) - 1);
    }
    u32 present = ones_in(body.present[0]) + ones_in(body.present[1]);
    body.all = present == TILE_BLOCKS;
    bool halves = F::ITEM_BYTES == 4 && !(flags & ZERO_HALVES);
    body.coding = Coding{in[0], width, (flags & ZERO_CODE) != 0, halves};
    body.count = in[2] | (u32)in[3] << 8;
    body.blocks = TILE_HEADER_BYTES + (masked ? mask_bytes : 0);
    body.escapes = body.blocks + present * F::block_bytes(width, body.coding.halves);
    return body.escapes + body.count <= nbytes;
}

template <class T>
HC_INLINE float value_of(u32 bits) {
    if constexpr (sizeof(typename T::Stored) == 4) return bits_float(bits);
    else return T::load((u16)bits);
}

// Vectors of sums.
template <class F>
struct SumVector {
    typedef float4 Type;
};
template <>
struct SumVector<Single> {
    typedef uint2 Type;
};

// Destination of a tile's values, which are stored, or added to floats. `whole`: all values of the tile exist,
// and move as vectors.
template <class F, class T, bool ADD>
struct Sink {
    typedef typename Quad<F>::Item Item;
    typedef typename SumVector<F>::Type Vector;
    void* out;
    u32 count;
    bool whole;
    struct Held {
        Vector v[4];
    };
    // Sums are loaded while values are decoded: 0.98 instead of 0.97 of a copy's speed, at 1 MB 0.82 instead of
    // 0.68. For 16-bit values this takes too many registers (0.91 instead of 0.97).
    static constexpr bool EARLY = F::ITEM_BYTES == 4;

    HC_INLINE_MEMBER Sink(void* target, u64 first, u32 values)
        : out((u8*)target + first * (ADD ? 4 : F::ITEM_BYTES)), count(values),
          whole(values == TILE && whole_vectors(out)) {}

    HC_INLINE_MEMBER void one(u32 i, u32 bits) const {
        if (i >= count) return;
        if constexpr (ADD) ((float*)out)[i] += value_of<T>(bits);
        else ((Item*)out)[i] = (Item)bits;
    }
    // What this lane adds to in the block that begins at `first`, if vectors can.
    HC_INLINE_MEMBER void load(u32 first, u32 part, Held& held) const {
        if constexpr (ADD) {
            if (!whole) {  // said, or what other tiles had is kept in registers
                held = Held();
                return;
            }
            const float* at = (const float*)out + first;
#pragma unroll
            for (u32 k = 0; k < 4; ++k) {
                u32 i = F::ITEM_BYTES == 2 ? 8 * part + 16 * (k / 2) + 4 * (k % 2) : 2 * part + 8 * k;
                held.v[k] = *(const Vector*)(at + i);
            }
        }
    }
    // Values i ... of 16 bits, eight in pairs, half `k` of what the lane has.
    HC_INLINE_MEMBER void eight(u32 i, const u32* pairs, const Held& held, u32 k) const {
        if (!whole) {
#pragma unroll
            for (u32 j = 0; j < 8; ++j) one(i + j, pairs[j / 2] >> (16 * (j % 2)) & 0xffffu);
        } else if constexpr (ADD) {
#pragma unroll
            for (u32 j = 0; j < 2; ++j) {
                float4 v = held.v[2 * k + j];
                u32 low = pairs[2 * j], high = pairs[2 * j + 1];
                v.x += value_of<T>(low & 0xffffu), v.y += value_of<T>(low >> 16);
                v.z += value_of<T>(high & 0xffffu), v.w += value_of<T>(high >> 16);
                *(float4*)((float*)out + i + 4 * j) = v;
            }
        } else {
            *(uint4*)((Item*)out + i) = make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
        }
    }
    // Two values of 32 bits, quarter `k` of what the lane has.
    HC_INLINE_MEMBER void two(u32 i, u32 first, u32 second, const Held& held, u32 k) const {
        if (!whole) {
            one(i, first), one(i + 1, second);
            return;
        }
        if constexpr (ADD) {
            first = float_bits(bits_float(held.v[k].x) + bits_float(first));
            second = float_bits(bits_float(held.v[k].y) + bits_float(second));
        }
        *(uint2*)((u32*)out + i) = make_uint2(first, second);
    }
    HC_INLINE_MEMBER void clear() const {
        if constexpr (!ADD) {
            for (u32 i = lane_id(); i < count; i += WARP) ((Item*)out)[i] = 0;
        }
    }
};

// The values of a lane's words of block `first`, from the bytes of r.
template <bool WHOLE, class S>
HC_INLINE void write_values(const u32 (&high)[4], const u32 (&low)[4], const u8*, u32 half, u32 first,
                            const S& sink, const typename S::Held& held) {
    u32 pairs[8];
#pragma unroll
    for (int q = 0; q < 4; ++q) {
        u32 lows = choose_bits(TOP_BITS, high[q] << 7, low[q] >> 1);
        u32 highs = choose_bits(TOP_BITS, low[q] << 7, high[q] >> 1);
        pairs[q] = pick_bytes(lows, highs, 0x6240), pairs[4 + q] = pick_bytes(lows, highs, 0x7351);
    }
    sink.eight(first + 8 * half, pairs, held, 0), sink.eight(first + 16 + 8 * half, pairs + 4, held, 1);
}

// `halves`: those of this lane's first word, null if they are zero.
template <bool WHOLE, class S>
HC_INLINE void write_values(const u32 (&high)[2], const u32 (&low)[2], const u8* halves, u32 part,
                            u32 first, const S& sink, const typename S::Held& held) {
    u32 values[2][4];
#pragma unroll
    for (int q = 0; q < 2; ++q) {
        u32 third = choose_bits(TOP_BITS, high[q] << 7, low[q]);
        u32 top = choose_bits(TOP_BITS, low[q], high[q] >> 1);
        u32 lower = pick_bytes(third, top, 0x5140), upper = pick_bytes(third, top, 0x7362);
        u32 a = halves ? get_word_at<WHOLE>(halves + 4 * q) : 0;
        u32 b = halves ? get_word_at<WHOLE>(halves + 32 + 4 * q) : 0;
        values[q][0] = pick_bytes(a, lower, 0x5410), values[q][1] = pick_bytes(a, lower, 0x7632);
        values[q][2] = pick_bytes(b, upper, 0x5410), values[q][3] = pick_bytes(b, upper, 0x7632);
    }
#pragma unroll
    for (u32 i = 0; i < 4; ++i) sink.two(first + 2 * part + 8 * i, values[0][i], values[1][i], held, i);
}

// Returns false if the header has another number of escapes. `WHOLE`: blocks begin at whole words.
template <class F, int WIDTH, bool WHOLE, class S>
HC_INLINE bool get_blocks(const u8* in, const Body& body, const S& sink) {
    constexpr int BITS = WIDTH + F::SHARED;
    constexpr u32 WORDS = Quad<F>::WORDS, codes = ((1u << WIDTH) - 1) * EACH_BYTE;
    u32 part = Lanes<F>::part(), escapes = 0, stride = F::block_bytes(WIDTH, body.coding.halves);
    u32 base = body.coding.base * EACH_BYTE, base_low = base & ~TOP_BITS, base_high = base & TOP_BITS;
#pragma unroll 1
    for (u32 r = 0; r < Lanes<F>::ROUNDS; ++r) {
        u32 block = r * Lanes<F>::ROUND_BLOCKS + lane_id() / Lanes<F>::LANES, number = block;
        bool there = true;
        typename S::Held held;
        if (S::EARLY) sink.load(block * BLOCK, part, held);
        if (!body.all) {
            u32 lower = (1u << block % WARP) - 1, mask = block < WARP ? body.present[0] : body.present[1];
            there = mask >> block % WARP & 1;
            number = ones_in(mask & lower) + (block < WARP ? 0 : ones_in(body.present[0]));
        }
        const u8* at = in + body.blocks + (there ? number * stride : 0);
        u32 levels[WORDS], high[WORDS], low[WORDS], found = 0;
        if (there) get_levels<BITS, WHOLE>(levels, part, at + BLOCK);
#pragma unroll
        for (u32 q = 0; q < WORDS; ++q) {
            if (!there) levels[q] = 0;
            low[q] = there ? get_word_at<WHOLE>(at + 4 * (WORDS * part + q)) : 0;
            u32 code = levels[q] & codes;
            high[q] = code;
            if (WIDTH == F::WIDEST) continue;
            high[q] = (code + base_low) ^ base_high;
            if (body.coding.zero) {
                u32 zero = nonzero_bytes(code ^ (codes - EACH_BYTE)) ^ TOP_BITS;
                high[q] &= ~(spread_flags(zero) | zero);
            }
            found |= ((code + EACH_BYTE) << (7 - WIDTH) & TOP_BITS) * 0x204081u >> 28 << (4 * q);
        }
        if (!there) found = 0;
        if (WIDTH != F::WIDEST && ballot(found != 0)) {
            Few few = sum_few(ones_in(found));
            u32 next = escapes + few.before;
            escapes += few.total;
            for (; found; found &= found - 1, ++next) {
                u32 slot = lowest_bit(found), shift = 8 * (slot % 4);
                u32 e = next < body.count ? in[body.escapes + next] : 0;
#pragma unroll
                for (u32 q = 0; q < WORDS; ++q) {
                    high[q] = choose_bits(q == slot / 4 ? 255u << shift : 0, e << shift, high[q]);
                }
            }
        }
#pragma unroll
        for (u32 q = 0; q < WORDS; ++q) {
            if (F::SHARED) {
                u32 e = exponents<F>(high[q] << F::SHARED);
                high[q] = e << F::SHARED | (levels[q] >> WIDTH & 7 * EACH_BYTE);
            }
            if (!there) high[q] = 0;
        }
        bool halved = there && body.coding.halves;
        const u8* halves = halved ? at + BLOCK + 4 * WIDTH + 4 * WORDS * part : nullptr;
        if (!S::EARLY) sink.load(block * BLOCK, part, held);
        write_values<WHOLE>(high, low, halves, part, block * BLOCK, sink, held);
    }
    return escapes == body.count;
}

template <class F, bool WHOLE, class S>
HC_INLINE bool get_any(const u8* in, const Body& body, const S& sink) {
    if (body.coding.width == 2) return get_blocks<F, 2, WHOLE>(in, body, sink);
    if (body.coding.width == 3) return get_blocks<F, 3, WHOLE>(in, body, sink);
    if (body.coding.width == 4) return get_blocks<F, 4, WHOLE>(in, body, sink);
    return get_blocks<F, F::WIDEST, WHOLE>(in, body, sink);
}

// Tile `tile`, by one warp.
template <class F, class T, bool ADD, int WARPS>
HC_INLINE void decode(const u8* in, u64 nbytes, u64 numel, u64 dtype, void* target, u32* damage, u32 tile) {
    // a tile begins anywhere in the first of these
    __shared__ uint4 buffers[WARPS][(Lanes<F>::TILE_WORDS + 3) / 4 + 1];
    const u32* header = (const u32*)in;
    u32 tiles = (u32)ceil_div(numel, TILE);
    if (tile >= tiles) return;
    u64 first = (u64)tile * TILE, data = HEADER_BYTES + 4ull * tiles;
    u32 count = (u32)(numel - first < TILE ? numel - first : TILE), blocks = (count + BLOCK - 1) / BLOCK;
    bool fits = nbytes >= data && nbytes % 16 == 0;
    u32 length = fits ? header[6] : 0;
    bool good = fits && header[0] == MAGIC && header[1] == (VERSION | (u32)dtype << 8) &&
                header[2] == (u32)numel && header[3] == (u32)(numel >> 32) && header[4] == TILE &&
                data + 4ull * length <= nbytes;
    const u32* offsets = header + HEADER_BYTES / 4;
    u32 begin = fits ? offsets[tile] : 0, end = fits && tile + 1 < tiles ? offsets[tile + 1] : length;
    good = good && begin <= end && end <= length && end - begin <= Lanes<F>::TILE_WORDS;
    Sink<F, T, ADD> sink(target, first, count);
    if (!good || begin == end) {
        if (!good && lane_id() == 0) atomicOr(damage, 1u);
        sink.clear();
        return;
    }
    uint4* buffer = buffers[threadIdx.x / WARP];
    // from the aligned 16 bytes of the tile's first byte to those of its last; payloads end at 16 bytes
    u64 from = (data + 4ull * begin) & ~15ull, to = (data + 4ull * end + 15) & ~15ull;
    u32 vectors = (u32)(to - from) / 16;
    for (u32 i = lane_id(); i < vectors; i += WARP) fetch(buffer + i, in + from + 16ull * i);
    await_fetched();
    const u8* bytes = (const u8*)buffer + ((data + 4ull * begin) & 15);
    Body body;
    bool read = read_head<F>(bytes, 4 * (end - begin), blocks, body);
    if (!read) sink.clear();
    else if (body.blocks % 4) read = get_any<F, false>(bytes, body, sink);
    else read = get_any<F, true>(bytes, body, sink);
    if (!read && lane_id() == 0) atomicOr(damage, 1u);
}

}  // namespace expcode
}  // namespace hybridcomp
