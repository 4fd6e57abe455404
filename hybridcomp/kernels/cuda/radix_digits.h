// radix, decode: the words of a block, which lie in shared memory, -> values, and where these go.
#pragma once

#include "radix_device.h"

namespace hybridcomp {
namespace radix {

HC_INLINE float widen(u32 word, u32 dtype) {
    if (dtype == 1) return bf16_to_float((u16)word);
    return dtype == 2 ? fp16_to_float((u16)word) : bits_float(word);
}

// 32 bits from bit `position` on; there is a word more than is read of.
HC_INLINE u32 bits_at(const u32* words, u32 position) {
    return funnel_right(words[position / 32], words[position / 32 + 1], position);
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
        u32 high = high_product(word, entry.multiplier) >> shift, low = high * divisor + word;
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

// A segment is decoded by WARPS warps, PARTS blocks a thread, one behind the other; so many segments
// at once on a multiprocessor. On an H100 bf16 comes out at 0.97 of a copy with two blocks a thread and
// 0.82 with one, which costs more instructions a value; fp32 at 0.94 and 1.02.
template <u32 WARPS_OF_SEGMENT, u32 SEGMENTS_AT_ONCE>
struct Team {
    static constexpr u32 WARPS = WARPS_OF_SEGMENT, THREADS = WARPS * WARP;
    static constexpr u32 AT_ONCE = SEGMENTS_AT_ONCE;
    static constexpr u32 PARTS = MAX_BLOCKS / THREADS;
    static_assert(PARTS == 1 || PARTS == 2, "bits of neighbours share a word");
};

// How sixteen values of a thread are stored: as `QUADS` times 16 bytes.
template <class P>
struct OutNarrow : Team<4, 12> {
    typedef u16 Stored;
    static constexpr int QUADS = 2;
    HC_INLINE u16 store(float value) { return P::T::store(value); }
    HC_INLINE void pack(const float* v, uint4* quads) {
#pragma unroll
        for (int h = 0; h < 2; ++h, v += 8) {
            quads[h] = make_uint4(P::narrow(v[0], v[1]), P::narrow(v[2], v[3]),
                                  P::narrow(v[4], v[5]), P::narrow(v[6], v[7]));
        }
    }
};
typedef OutNarrow<PairsBf16> OutBf16;
typedef OutNarrow<PairsFp16> OutFp16;

struct OutFp32 : Team<8, 8> {
    typedef float Stored;
    static constexpr int QUADS = 4;
    HC_INLINE float store(float value) { return value; }
    HC_INLINE void pack(const float* v, uint4* quads) {
#pragma unroll
        for (int h = 0; h < 4; ++h, v += 4) {
            quads[h] = make_uint4(float_bits(v[0]), float_bits(v[1]), float_bits(v[2]),
                                  float_bits(v[3]));
        }
    }
};

HC_INLINE uint4 other_quad(uint4 v) {
    return make_uint4(other_lane<1>(v.x), other_lane<1>(v.y), other_lane<1>(v.z),
                      other_lane<1>(v.w));
}

HC_INLINE uint4 choose_quad(bool first, uint4 a, uint4 b) {
    return make_uint4(first ? a.x : b.x, first ? a.y : b.y, first ? a.z : b.z, first ? a.w : b.w);
}

// Two threads write two blocks of theirs side by side, 16 bytes each: together a sector of 32. `out`:
// the block of this one.
template <class O>
HC_INLINE void write_pair(const uint4* quads, typename O::Stored* out) {
    bool odd = threadIdx.x & 1;
    auto* at = (uint4*)(odd ? out - O::PARTS * BLOCK : out) + odd;
#pragma unroll
    for (int q = 0; q < O::QUADS; q += 2) {
        uint4 other = other_quad(choose_quad(odd, quads[q], quads[q + 1]));
        at[q] = choose_quad(odd, other, quads[q]);
        at[q + O::PARTS * O::QUADS] = choose_quad(odd, quads[q + 1], other);
    }
}

HC_INLINE void add_quads(const float* out, float* values) {
#pragma unroll
    for (int q = 0; q < 4; ++q) {
        uint4 v = load16(out + 4 * q);
        values[4 * q] = bits_float(v.x) + values[4 * q];
        values[4 * q + 1] = bits_float(v.y) + values[4 * q + 1];
        values[4 * q + 2] = bits_float(v.z) + values[4 * q + 2];
        values[4 * q + 3] = bits_float(v.w) + values[4 * q + 3];
    }
}

HC_INLINE void get_block(const u32* words, u32 position, u32 cls, u32 bits, u32 dtype,
                         float* values) {
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

// A block as values of O. `out`: the block; `left`: how many of its values there are, or more. All
// lanes of a warp call it.
template <class O, bool ADD>
HC_INLINE void put_values(float* values, typename O::Stored* out, u32 left, bool raw) {
    bool vectors = whole_vectors(out) && left >= BLOCK && !raw;
    if (ballot(vectors) == FULL_WARP) {
        uint4 quads[O::QUADS];
        if constexpr (ADD) {
            add_quads((const float*)out, values);
            sync_warp();  // a partner writes what this one has read
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

}  // namespace radix
}  // namespace hybridcomp
