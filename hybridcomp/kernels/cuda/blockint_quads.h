// How a warp holds a tile of blockint, for HC_BITS bits, HC_LEVELS (a Spacing), HC_ROTATE or not,
// HC_RANDOM rounding or to the nearest:
// eight values per lane and round, four lanes per block, four rounds; each lane computes code and step of one of
// the 32 blocks.
//
// Lane 4 g + m of round i has values 8 m ... + 7 of block 8 i + g, which are byte m of each word of its levels.
// It packs these bytes of the HC_BITS words; a 4 x 4 transpose of bytes, two shuffles for four words, then gives
// whole words. After `scatter_largest` lane 4 g + m has the block 8 m + g.
#pragma once

#include "packed.h"

#include "blockint.h"
#include "rotation.h"

#ifndef HC_BITS
#define HC_BITS 8
#endif
#ifndef HC_LEVELS
#define HC_LEVELS 0
#endif
#ifndef HC_ROTATE
#define HC_ROTATE 0
#endif
#ifndef HC_RANDOM
#define HC_RANDOM 0
#endif

namespace hybridcomp {
namespace blockint {

constexpr int ROUNDS = 4;  // of a tile
constexpr int EACH = 8;    // values of a lane and round
constexpr int ROUND = WARP * EACH;
constexpr Spacing SPACING = (Spacing)HC_LEVELS;
constexpr bool GAUSSIAN = SPACING == Spacing::gaussian;
constexpr bool LLOYD = SPACING == Spacing::lloyd;
constexpr bool ROTATE = HC_ROTATE;
constexpr bool RANDOM = HC_RANDOM;

struct Layout {
    u64 blocks, tiles, scales, bases, used, total;
    HC_INLINE_MEMBER explicit Layout(u64 numel)
        : blocks(ceil_div(numel, BLOCK)), tiles(ceil_div(numel, TILE)),
          scales(blocks * 4 * HC_BITS), bases(scales + blocks), used(bases + tiles),
          total(align16(used)) {}
    // of the tile
    HC_INLINE_MEMBER u32 blocks_of(u64 tile) const {
        u64 left = blocks - tile * TILE_BLOCKS;
        return left < TILE_BLOCKS ? (u32)left : TILE_BLOCKS;
    }
};

struct Place {
    u32 group, part;
    HC_INLINE_MEMBER Place() : group(lane_id() / 4), part(lane_id() % 4) {}
    HC_INLINE_MEMBER u32 block(int round) const { return 8 * round + group; }
    // whose code and step this lane computes
    HC_INLINE_MEMBER u32 own_block() const { return 8 * part + group; }
};

// Returns for all lanes 4 g .. the value of lane 4 g + i, that of block 8 i + g.
HC_INLINE u32 of_round(u32 value, int round, const Place& place) {
    return lane_value(value, 4 * place.group + (u32)round);
}

// Byte i of part m <-> byte m of part i; its own inverse.
HC_INLINE u32 transpose_bytes(u32 word, u32 part) {
    u32 other = other_lane<1>(word);
    word = pick_bytes(word, other, part & 1 ? 0x3715 : 0x6240);
    other = other_lane<2>(word);
    return pick_bytes(word, other, part & 2 ? 0x3276 : 0x5410);
}

// Returns for this lane's block the largest of the numbers of its four lanes, given one number per round and
// lane. HALVES: the numbers have 16 bits.
template <bool HALVES>
HC_INLINE u32 scatter_largest(const u32* tops, u32 part) {
    bool upper = part & 2, odd = part & 1;
    if constexpr (HALVES) {
        u32 low = tops[0] | tops[1] << 16, high = tops[2] | tops[3] << 16;
        u32 kept = largest_pair(upper ? high : low, other_lane<2>(upper ? low : high));
        kept = largest_pair(kept, other_lane<1>(kept));
        return odd ? kept >> 16 : kept & 0xffffu;
    } else {
        u32 first = larger(upper ? tops[2] : tops[0], other_lane<2>(upper ? tops[0] : tops[2]));
        u32 second = larger(upper ? tops[3] : tops[1], other_lane<2>(upper ? tops[1] : tops[3]));
        return larger(odd ? second : first, other_lane<1>(odd ? first : second));
    }
}

// Factors from values of a block to levels: the inverse step and, for Lloyd levels, the share.
struct Factor {
    float inverse, share;
};

// The factor of a block whose T has `code`, without the share.
HC_INLINE Factor factor_of(u32 code, u32 base) {
    return {code == NONFINITE_CODE ? 0.0f : inverse_step<HC_BITS, SPACING>(code, base), 0.0f};
}

// Choose one of the two scales of a block with Lloyd levels, given the sum of its gains.
HC_INLINE void choose_scale(u32 gain, u32 base, u32& code, Factor& factor) {
    u32 sent = code == NONFINITE_CODE ? code : lloyd_code(code, (i32)gain);
    factor.share = lloyd_share(code, base, sent != code);
    code = sent;
}

// The low byte is the level; the whole is a float, see `sent_value`. `at`: the value's index in the message.
constexpr float OFFSET = (float)(1 << (HC_BITS - 1));
constexpr u32 MAGIC_BITS = 0x4b400000u;  // of 1.5 * 2^23
constexpr float MAGIC = 12582912.0f + OFFSET;

HC_INLINE u32 quantized(float value, Factor factor, u32 at) {
    if (RANDOM) return MAGIC_BITS | quantize<HC_BITS, SPACING, true>(value, factor.inverse, 0.0f, at);
    float scaled = value * factor.inverse;
    if (GAUSSIAN) scaled = gaussian_cell(scaled) - 0.5f;
    if (LLOYD) scaled = lloyd_cell(lloyd_clipped(lloyd_fine(value, factor.inverse) * factor.share));
    return float_bits(scaled + MAGIC);
}

// The gains of a lane's eight values of a block. All lanes of the warp: lane i has the gain of bin i.
HC_INLINE u32 gains_of(const float* values, float inverse) {
    u32 gain = (u32)lloyd_gain(lane_id()), sum = 0;
#pragma unroll
    for (int k = 0; k < EACH; ++k) sum += lane_value(gain, lloyd_bin(lloyd_fine(values[k], inverse)));
    return sum;
}

// Returns for this lane's block the sum of the numbers of its four lanes, given one number per round and lane.
HC_INLINE u32 scatter_sum(const u32* numbers, u32 part) {
    bool upper = part & 2, odd = part & 1;
    u32 first = (upper ? numbers[2] : numbers[0]) + other_lane<2>(upper ? numbers[0] : numbers[2]);
    u32 second = (upper ? numbers[3] : numbers[1]) + other_lane<2>(upper ? numbers[1] : numbers[3]);
    return (odd ? second : first) + other_lane<1>(odd ? first : second);
}

// Returns the decoded value of a level of `quantized`.
HC_INLINE float sent_value(u32 quantized, float step) {
    if (GAUSSIAN) return gaussian_value((bits_float(quantized) - MAGIC) * 2.0f + 1.0f) * step;
    if (LLOYD) return lloyd_value(bits_float(quantized) - MAGIC) * step;
    return (bits_float(quantized) - MAGIC) * step;
}

// This lane's byte of word INDEX of a block's HC_BITS words, from its eight levels; only the low byte
// counts.
template <int INDEX>
HC_INLINE u32 byte_of_word(const u32* q) {
    if constexpr (HC_BITS == 8) return q[INDEX];
    else if constexpr (HC_BITS == 4) return q[INDEX] + (q[INDEX + 4] << 4);
    else if constexpr ((HC_BITS & 4) != 0 && INDEX < 4) {
        constexpr int shift = HC_BITS & 3;
        return (q[INDEX] >> shift & 15) | (q[INDEX + 4] >> shift & 15) << 4;
    } else if constexpr ((HC_BITS & 2) != 0 && INDEX < (HC_BITS & 6)) {
        constexpr int shift = HC_BITS & 1, j = INDEX - (HC_BITS & 4);
        return (q[j] >> shift & 3) | (q[j + 2] >> shift & 3) << 2 | (q[j + 4] >> shift & 3) << 4 |
               (q[j + 6] >> shift & 3) << 6;
    } else if constexpr ((HC_BITS & 1) != 0 && INDEX < HC_BITS) {
        u32 byte = 0;
#pragma unroll
        for (int k = 0; k < 8; ++k) byte |= (q[k] & 1) << k;
        return byte;
    } else {
        return 0;
    }
}

// Packs the levels of a lane's eight values, and stores the words of the block; each of its lanes stores some.
HC_INLINE void store_levels(const u32* q, bool zero, bool write, u32* out, u32 part) {
    if constexpr (HC_BITS == 8) {
        u32 even = low_bytes(q[0], q[2], q[4], q[6]), odd = low_bytes(q[1], q[3], q[5], q[7]);
        even = transpose_bytes(zero ? 0 : even, part), odd = transpose_bytes(zero ? 0 : odd, part);
        if (write) *(uint2*)(out + 2 * part) = make_uint2(even, odd);
    } else {
        u32 word = low_bytes(byte_of_word<0>(q), byte_of_word<1>(q), byte_of_word<2>(q),
                             byte_of_word<3>(q));
        word = transpose_bytes(zero ? 0 : word, part);
        if (write && (HC_BITS >= 4 || part < HC_BITS % 4)) out[part] = word;
        if constexpr (HC_BITS > 4) {
            word = low_bytes(byte_of_word<4>(q), byte_of_word<5>(q), byte_of_word<6>(q), 0);
            word = transpose_bytes(zero ? 0 : word, part);
            if (write && part < HC_BITS % 4) out[4 + part] = word;
        }
    }
}

// The words of a block as a lane loads them.
struct Words {
    u32 x, y;
};

HC_INLINE Words load_words(const u32* in, bool there, u32 part) {
    Words words = {0, 0};
    if (!there) return words;
    if constexpr (HC_BITS == 8) {
        uint2 both = *(const uint2*)(in + 2 * part);
        words.x = both.x, words.y = both.y;
    } else {
        if (HC_BITS >= 4 || part < HC_BITS % 4) words.x = in[part];
        if (HC_BITS > 4 && part < HC_BITS % 4) words.y = in[4 + part];
    }
    return words;
}

// Inverse of `store_levels`: byte k of `levels` becomes the level of value k.
HC_INLINE void unpack_words(Words words, u32 part, u32* levels) {
    u32 word = transpose_bytes(words.x, part);
    u32 more = HC_BITS > 4 ? transpose_bytes(words.y, part) : word;
    if constexpr (HC_BITS == 8) {
        levels[0] = pick_bytes(word, more, 0x5140), levels[1] = pick_bytes(word, more, 0x7362);
        return;
    }
    levels[0] = levels[1] = 0;
    if constexpr ((HC_BITS & 4) != 0) {
        levels[0] = (word & 0x0f0f0f0fu) << (HC_BITS & 3);
        levels[1] = (word >> 4 & 0x0f0f0f0fu) << (HC_BITS & 3);
    }
    if constexpr ((HC_BITS & 2) != 0) {
        u32 twice = pick_bytes(more, 0, 0x1010);
        levels[0] |= ((twice & 0x0303u) | (twice >> 2 & 0x03030000u)) << (HC_BITS & 1);
        levels[1] |= ((twice >> 4 & 0x0303u) | (twice >> 6 & 0x03030000u)) << (HC_BITS & 1);
    }
    if constexpr ((HC_BITS & 1) != 0) {
        u32 byte = more >> (8 * (HC_BITS & 2)) & 255u;
        levels[0] |= ((byte & 15) * 0x00204081u) & 0x01010101u;
        levels[1] |= ((byte >> 4) * 0x00204081u) & 0x01010101u;
    }
}

// Byte K of `levels` as the number that it stands for, exactly: the byte becomes the end of a mantissa.
constexpr u32 LEVEL_MAGIC = 0x4b000000u;
template <int K>
HC_INLINE float level_value(u32 levels, u32 magic = LEVEL_MAGIC) {
    float shifted = bits_float(pick_bytes(levels, magic, 0x7440 | K));
    if (GAUSSIAN) return gaussian_value((shifted - 8388608.0f) * 2.0f - 15.0f);
    float level = shifted - (8388608.0f + (float)(1 << (HC_BITS - 1)));
    return LLOYD ? lloyd_value(level) : level;
}

HC_INLINE void dequantized(const u32* levels, float step, float* values) {
    values[0] = level_value<0>(levels[0]) * step, values[1] = level_value<1>(levels[0]) * step;
    values[2] = level_value<2>(levels[0]) * step, values[3] = level_value<3>(levels[0]) * step;
    values[4] = level_value<0>(levels[1]) * step, values[5] = level_value<1>(levels[1]) * step;
    values[6] = level_value<2>(levels[1]) * step, values[7] = level_value<3>(levels[1]) * step;
}

// From this base on, sums of 64 values of a tile may overflow. Below it they need no scaling: powers of two
// change nothing else, since even the smallest step leaves room for them.
constexpr u32 LARGE_BASE = 240;

// Blocks that are NaN or may overflow are rare, so the loop over other blocks has no instruction for them.
HC_INLINE bool needs_care(u32 code, u32 base) {
    if (ROTATE && base >= LARGE_BASE) return true;
    return code == NONFINITE_CODE || (16 * base + 15 - code >= OVERFLOW_TOP && code <= LAST_CODE);
}

// The step of a block that may need care: `twice` says that values come out at half their size.
HC_INLINE float careful_step(u32 code, u32 base, bool& twice) {
    twice = 16 * base + 15 - code >= OVERFLOW_TOP && code <= LAST_CODE;
    return twice ? half_top(code, base) * (SPACING != Spacing::uniform ? 1.0f : 1.0f / (float)top_level(HC_BITS))
                 : step_of<HC_BITS, SPACING>(code, base);
}

}  // namespace blockint
}  // namespace hybridcomp
