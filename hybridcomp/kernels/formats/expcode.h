// expcode: lossless. Exponents become short codes of one length per tile; the rare others, escapes,
// follow as bytes. Signs and mantissas, which do not compress, are kept as they are.
//
// Format, little-endian, of a message of n values, tiles of 2048:
//   0    u32   magic 0x58454348, the bytes "HCEX"
//   4    u8    version, 1
//   5    u8    dtype: 0 fp32, 1 bf16, 2 fp16
//   6    u16   0
//   8    u64   n
//   16   u32   2048
//   20   u32   0
//   24   u32   length of all tiles in units of 4 bytes
//   28   u32   0
//   32   u32   for each tile: where it begins, in units of 4 bytes from the first tile
//   then the tiles, then zeros up to a multiple of 16.
// n == 0 is no bytes at all. A tile is cut into blocks of 32 values, the last one filled up with copies
// of the last value. A block of zero bits only is a zero block; a tile of such blocks is empty. Else:
//   0    u8    base exponent
//   1    u8    width of a code + 16 if some blocks are zero + 32 if the code for zero is in use + 64, for
//              fp32, if the 16 low bits of every value are 0: bf16 values, widened
//   2    u16   number of escapes
//   4    only if some blocks are zero: bit b % 8 of byte b / 8 says that block b is not
//   then the other blocks, each of 96 + 4 width (fp32; with flag 64: 32 + 4 width), 32 + 4 width (bf16)
//   or 44 + 4 width (fp16) bytes;
//   then the escapes, exponents in order of blocks and, in a block, of slots; zeros to 4 bytes.
//
// Codes. Width is 2, 3 or 4, or E, the bits of an exponent (8; fp16: 5). At width E the code is the
// exponent itself. Else, with K = 2^width - 1: code K is an escape; with the code for zero K - 1 means
// exponent 0, and codes 0 .. K - 2, without it 0 .. K - 1, mean base + code (modulo 256).
//
// Block. r is a value's exponent, then its sign, then its mantissa (fp32), or exponent, mantissa, sign:
// its bits rotated left by one (bf16, fp16). Value i has slot 4 (i % 8) + i / 8 (fp32) or
// 2 (i % 16) + i / 16.
//   fp32: 32 bytes, (r >> 16) & 255, by slot; then levels of `width` bits: the code; then, without flag
//         64, 32 halves, r & 0xffff, value i at half 16 (i / 16) + 2 (i % 8) + i / 8 % 2
//   bf16: 32 bytes, r & 255, by slot; then levels of `width` bits: the code
//   fp16: 32 bytes, r & 255, by slot; then levels of width + 3 bits: code + ((r >> 8 & 7) << width)
// Levels are packed as those of blockint are, the byte of a word being the slot: shifts of whole lanes.
//
// Choice of the coding. Of the k blocks that are not zero every max(1, k / 8)-th, from the first,
// is looked at, 8 at most. The cheapest of width 2, 3, 4 without the code for zero, then with it, then
// E, at width N + 8 escapes bits for N values, at the lowest base, wins; what comes first wins ties.
// Should the escapes of the whole tile make it as long as width E, it is encoded with that.
#pragma once

#include "blockint.h"
#include "portable.h"

namespace hybridcomp {
namespace expcode {

constexpr int BLOCK = 32;
constexpr int TILE = 2048;
constexpr int TILE_BLOCKS = TILE / BLOCK;
constexpr u32 MAGIC = 0x58454348u;
constexpr u32 VERSION = 1;
constexpr int HEADER_BYTES = 32;
constexpr int TILE_HEADER_BYTES = 4;
constexpr u32 ZERO_BLOCKS = 16, ZERO_CODE = 32, ZERO_HALVES = 64;
constexpr u32 SAMPLED_BLOCKS = 8;

// A float of ITEM bits with EXPONENT bits of exponent.
template <int ITEM, int EXPONENT>
struct Format {
    static constexpr int REST = ITEM - EXPONENT;
    static constexpr int SHARED = REST % 8;  // bits that share a level with the code
    static constexpr int WIDEST = EXPONENT;
    static constexpr int ITEM_BYTES = ITEM / 8;

    HC_INLINE u32 slot(int i) { return ITEM == 32 ? 4 * (i % 8) + i / 8 : 2 * (i % 16) + i / 16; }
    HC_INLINE u32 half(int i) { return 16 * (i / 16) + 2 * (i % 8) + i / 8 % 2; }
    HC_INLINE u32 turn(u32 bits) {
        if (ITEM == 32) {
            return (bits << 1 & 0xff000000u) | (bits >> 8 & 0x800000u) | (bits & 0x7fffffu);
        }
        return ((bits << 1) & 0xffffu) | bits >> 15;
    }
    HC_INLINE u32 turn_back(u32 r) {
        if (ITEM == 32) return (r >> 1 & 0x7f800000u) | (r << 8 & 0x80000000u) | (r & 0x7fffffu);
        return r >> 1 | ((r << 15) & 0xffffu);
    }
    HC_INLINE u32 block_bytes(u32 width, bool halves) {
        return BLOCK + 4 * (width + SHARED) + (halves ? 64 : 0);
    }
};
typedef Format<32, 8> Single;
typedef Format<16, 8> Brain;
typedef Format<16, 5> Half;

struct Coding {
    u32 base, width;
    bool zero;    // the code for zero is in use
    bool halves;  // fp32: low halves are kept
};

HC_INLINE u32 code_of(u32 exponent, u32 widest, Coding coding) {
    if (coding.width == widest) return exponent;
    u32 escape = (1u << coding.width) - 1;
    u32 code = (exponent - coding.base) & 255u;
    if (coding.zero) {
        if (exponent == 0) return escape - 1;
        return code < escape - 1 ? code : escape;
    }
    return code < escape ? code : escape;
}

HC_INLINE bool is_escape(u32 code, u32 widest, Coding coding) {
    return coding.width != widest && code == (1u << coding.width) - 1;
}

HC_INLINE u32 exponent_of(u32 code, u32 widest, Coding coding) {
    if (coding.width == widest) return code;
    if (coding.zero && code == (1u << coding.width) - 2) return 0;
    return (coding.base + code) & 255u;
}

// The cheapest coding for `counts` of each exponent, `total` in all, between `first` and `last`.
HC_INLINE Coding choose(const u16* counts, u32 total, u32 first, u32 last, u32 widest) {
    Coding best = {0, widest, false, false};
    u32 least = widest * total;
    for (u32 zero = 0; zero < 2; ++zero) {
        if (zero && counts[0] == 0) break;
        u32 lowest = zero && first == 0 ? 1 : first;
        for (u32 width = 2; width <= 4; ++width) {
            u32 window = (1u << width) - 1 - zero, inside = 0;
            for (u32 e = lowest; e < lowest + window && e <= last; ++e) inside += counts[e];
            for (u32 base = lowest; base <= last; ++base) {
                u32 covered = inside + (zero ? counts[0] : 0);
                u32 cost = width * total + 8 * (total - covered);
                // width E stands in at the beginning but comes last: it loses ties
                if (cost < least || (cost == least && best.width == widest)) {
                    best.base = base, best.width = width, best.zero = zero;
                    least = cost;
                }
                inside -= counts[base];
                if (base + window <= last) inside += counts[base + window];
            }
        }
    }
    return best;
}

template <int BITS>
HC_INLINE void pack(const u32* levels, u8* out) {
    u32 words[BITS];
    blockint::pack_levels<BITS>(levels, words);
    for (int i = 0; i < 4 * BITS; ++i) out[i] = (u8)(words[i / 4] >> (8 * (i % 4)));
}

template <int BITS>
HC_INLINE void unpack(const u8* in, u32* levels) {
    u32 words[BITS] = {};
    for (int i = 0; i < 4 * BITS; ++i) words[i / 4] |= (u32)in[i] << (8 * (i % 4));
    blockint::unpack_levels<BITS>(words, levels);
}

// Bits of 32 values -> block_bytes at `out`; escapes are appended. Returns how many.
template <class F, int WIDTH>
HC_INLINE u32 encode_block(const u32* values, Coding coding, u8* out, u8* escapes) {
    u32 levels[BLOCK / 4] = {};
    u8 exponents[BLOCK], codes[BLOCK];
    for (int i = 0; i < BLOCK; ++i) {
        u32 r = F::turn(values[i]), slot = F::slot(i);
        u32 code = code_of(r >> F::REST, F::WIDEST, coding);
        exponents[slot] = (u8)(r >> F::REST);
        codes[slot] = (u8)code;
        u32 level = code;
        out[slot] = (u8)(F::ITEM_BYTES == 4 ? r >> 16 : r);
        if (F::SHARED) level |= ((r >> 8) & 7u) << WIDTH;
        if (coding.halves) {
            u8* half = out + BLOCK + 4 * WIDTH + 2 * F::half(i);
            half[0] = (u8)r;
            half[1] = (u8)(r >> 8);
        }
        levels[slot / 4] |= level << (8 * (slot % 4));
    }
    pack<WIDTH + F::SHARED>(levels, out + BLOCK);
    u32 count = 0;
    for (int slot = 0; slot < BLOCK; ++slot) {
        if (is_escape(codes[slot], F::WIDEST, coding)) escapes[count++] = exponents[slot];
    }
    return count;
}

// The way back; `left` escapes may be read. Returns how many were, more than `left` if they run out.
template <class F, int WIDTH>
HC_INLINE u32 decode_block(const u8* in, Coding coding, const u8* escapes, u32 left,
                           u32* values) {
    u32 levels[BLOCK / 4];
    u8 exponents[BLOCK];
    unpack<WIDTH + F::SHARED>(in + BLOCK, levels);
    u32 count = 0;
    for (int slot = 0; slot < BLOCK; ++slot) {
        u32 code = (levels[slot / 4] >> (8 * (slot % 4))) & ((1u << WIDTH) - 1);
        exponents[slot] = (u8)exponent_of(code, F::WIDEST, coding);
        if (!is_escape(code, F::WIDEST, coding)) continue;
        exponents[slot] = count < left ? escapes[count] : 0;
        ++count;
    }
    for (int i = 0; i < BLOCK; ++i) {
        u32 slot = F::slot(i), r = (u32)exponents[slot] << F::REST;
        r |= (u32)in[slot] << (F::ITEM_BYTES == 4 ? 16 : 0);
        if (F::SHARED) r |= ((levels[slot / 4] >> (8 * (slot % 4) + WIDTH)) & 7u) << 8;
        if (coding.halves) {
            const u8* half = in + BLOCK + 4 * WIDTH + 2 * F::half(i);
            r |= half[0] | (u32)half[1] << 8;
        }
        values[i] = F::turn_back(r);
    }
    return count;
}

}  // namespace expcode
}  // namespace hybridcomp
