// expcode, a tile per warp, for all dtypes. The lanes of a block share its eight words of slots: two lanes
// with four words each (16 bits), four lanes with two (fp32). A word is four values, `Quad`, processed as four
// bytes at a time.
//
// Lane LANES b + m of round r has words WORDS m ... of block r * ROUND_BLOCKS + b, so slots follow the order
// of lanes, and of the words in a lane.
#pragma once

#include "warp_tiles.h"

#include "expcode.h"

namespace hybridcomp {
namespace expcode {

// Four values of 16 bits in the order of their slots, as low and high bytes of the numbers r.
struct Bytes {
    u32 low, high;
};

template <class F>
struct Quad {
    typedef u16 Item;
    static constexpr u32 LANES = 2, WORDS = 4, ROUNDS = 4;
    u32 first, second;  // values 2 j and 2 j + 1, and those 16 behind

    HC_INLINE_MEMBER u32 any() const { return first | second; }
    HC_INLINE_MEMBER u32 any_low() const { return 0; }
    HC_INLINE_MEMBER Bytes bytes() const {
        u32 low = pick_bytes(first, second, 0x6240), high = pick_bytes(first, second, 0x7351);
        return Bytes{choose_bits(~EACH_BYTE, low << 1, high >> 7),
                     choose_bits(~EACH_BYTE, high << 1, low >> 7)};
    }
    // The words of lane `part`; `block` is 16-byte aligned.
    HC_INLINE void load(const u16* block, u32 part, Quad* quads) {
        uint4 a = *(const uint4*)(block + 8 * part), b = *(const uint4*)(block + 16 + 8 * part);
        quads[0] = Quad{a.x, b.x}, quads[1] = Quad{a.y, b.y};
        quads[2] = Quad{a.z, b.z}, quads[3] = Quad{a.w, b.w};
    }
    HC_INLINE void load_two(const u16* block, u32 word, Quad* quads) {
        uint2 a = *(const uint2*)(block + 2 * word), b = *(const uint2*)(block + 16 + 2 * word);
        quads[0] = Quad{a.x, b.x}, quads[1] = Quad{a.y, b.y};
    }
    // Loads any block; values after `last` repeat it.
    HC_INLINE Quad at(const u16* source, u32 begin, u32 word, u32 last) {
        u32 i = begin + 2 * word, k = i + 16;
        return Quad{pair(source[i < last ? i : last], source[i + 1 < last ? i + 1 : last]),
                    pair(source[k < last ? k : last], source[k + 1 < last ? k + 1 : last])};
    }
    HC_INLINE Quad zero() { return Quad{0, 0}; }
};

template <>
struct Quad<Single> {
    typedef u32 Item;
    static constexpr u32 LANES = 4, WORDS = 2, ROUNDS = 8;
    u32 values[4];  // k, k + 8, ...

    HC_INLINE_MEMBER u32 any() const { return values[0] | values[1] | values[2] | values[3]; }
    HC_INLINE_MEMBER u32 any_low() const { return any() & 0xffffu; }
    HC_INLINE_MEMBER Bytes bytes() const {
        u32 first = pick_bytes(values[0], values[1], 0x7632);
        u32 second = pick_bytes(values[2], values[3], 0x7632);
        u32 low = pick_bytes(first, second, 0x6420), high = pick_bytes(first, second, 0x7531);
        return Bytes{choose_bits(TOP_BITS, high, low), choose_bits(~EACH_BYTE, high << 1, low >> 7)};
    }
    HC_INLINE void load(const u32* block, u32 part, Quad* quads) { load_two(block, 2 * part, quads); }
    HC_INLINE void load_two(const u32* block, u32 word, Quad* quads) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            uint2 both = *(const uint2*)(block + word + 8 * i);
            quads[0].values[i] = both.x, quads[1].values[i] = both.y;
        }
    }
    HC_INLINE Quad at(const u32* source, u32 begin, u32 word, u32 last) {
        Quad quad;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            u32 index = begin + word + 8 * i;
            quad.values[i] = source[index < last ? index : last];
        }
        return quad;
    }
    HC_INLINE Quad zero() { return Quad{{0, 0, 0, 0}}; }
};

// How lanes share blocks.
template <class F>
struct Lanes {
    static constexpr u32 LANES = Quad<F>::LANES, WORDS = Quad<F>::WORDS, ROUNDS = Quad<F>::ROUNDS;
    static constexpr u32 ROUND_BLOCKS = TILE_BLOCKS / ROUNDS;
    // the largest tile: header, mask, blocks at width E; in words
    static constexpr u32 TILE_WORDS =
        (TILE_HEADER_BYTES + TILE_BLOCKS / 8 + TILE_BLOCKS * BLOCK * F::ITEM_BYTES) / 4 + 1;
    HC_INLINE u32 part() { return lane_id() % LANES; }
    HC_INLINE u32 first_lane() { return lane_id() / LANES * LANES; }  // of this lane's block
};

// The exponents in the high bytes of r.
template <class F>
HC_INLINE u32 exponents(u32 high) {
    return F::SHARED ? high >> F::SHARED & (EACH_BYTE * ((1u << F::WIDEST) - 1)) : high;
}

// Returns the WIDTH-bit codes of four exponents, for `base` in all bytes. `flags` gets the top bit of each byte
// that is an escape. With ZERO the exponent zero has a code.
template <int WIDTH, bool ZERO>
HC_INLINE u32 codes_of(u32 e, u32 base, u32& flags) {
    constexpr u32 escape = (1u << WIDTH) - 1;
    u32 offset = ((e | TOP_BITS) - (base & ~TOP_BITS)) ^ ((e ^ ~base) & TOP_BITS);
    flags = (((offset & ~TOP_BITS) + (0x80 - escape + ZERO) * EACH_BYTE) | offset) & TOP_BITS;
    if (!ZERO) return (offset | spread_flags(flags)) & escape * EACH_BYTE;
    u32 other = nonzero_bytes(e);
    flags &= other;
    u32 found = (offset | spread_flags(flags)) & escape * EACH_BYTE;
    return choose_bits(spread_flags(other), found, (escape - 1) * EACH_BYTE);
}

HC_INLINE u32 pick(const u32 (&words)[4], u32 q) {
    u32 low = q & 1 ? words[1] : words[0], high = q & 1 ? words[3] : words[2];
    return q & 2 ? high : low;
}
HC_INLINE u32 pick(const u32 (&words)[2], u32 q) { return q & 1 ? words[1] : words[0]; }

}  // namespace expcode
}  // namespace hybridcomp
