// stepcode: lossless; bf16 or fp16 values as steps from a reference that both sides hold, entropy-coded
// (rANS) with a model of the step for each exponent of the reference. Little-endian.
//
//     u32  magic "hcst"                  u8   version 1
//     u8   dtype, 1 bf16, 2 fp16         u8   mode: 0 steps, 1 unencoded, 2 without a reference
//     u8   lowest: exponent of context 0
//     u64  number of values              u32  values of a tile, 2^13 to 2^19
//     u32  length of what follows model and offsets, in units of 4 bytes
//     u32  bytes of the model, a multiple of 4
//     u32  zero
//     the model, a u32 for each tile (where it begins, in units of 4 bytes), the tiles, zeros up to a
//     multiple of 16 bytes
//
// Mode 1 has the values as they are behind these 32 bytes, mode 2 a payload of expcode.
//
// Step: with o the reference's bits and n the value's, the sign bit is that of o ^ n, the lower 15 bits are
// n - o modulo 2^15: 0 where nothing changed, and exact for every pair, -0.0 and NaNs included.
// Symbol: z = the lower 15 bits as a signed number d, folded: 2 d, or -2 d - 1 where d < 0.
//     same sign:    z < 32: z. Else k = floor(log2 z): 32 + 4 (k - 5) + the two bits below the first one
//                   of z, and the other k - 2 bits as extra bits.
//     another sign: z < 2: 72 + z. Else 74 + 2 (k - 1) + the bit below the first one, k - 1 extra bits.
//     102 is the escape, for what the model does not have: all 16 bits of the step are extra bits.
// Context: the exponent of the reference minus `lowest`, within 0 to 15.
// Model: for each of the 16 contexts a u8 with the number of its symbols, then each symbol (u8, ascending)
// with its frequency (u16); what is missing to 4096, at least 1, is the escape's. None: 4095 for symbol 0.
// Which frequencies, which `lowest` and which tile an encoder takes is told in stepcode_model.h.
//
// Tile: 0 bytes where nothing changed. Else a u32: the number of u16 words, or 0xffffffff before values
// that are stored unencoded. 32 states (u32), the words, padded to 4 bytes, then the extra bits, from the
// lowest bit of u32 words up. Value i belongs to state i % 32. To decode one, with s = state % 4096 the
// symbol whose range [start, start + frequency) of the context holds s: state = frequency * (state / 4096)
// + s - start, and, if that is below 2^16, state = 65536 state + the next word. Of 32 values all states take
// their words, in order, before the next 32. In the end each state is 2^16.
#pragma once

#include "portable.h"

namespace hybridcomp {
namespace stepcode {

constexpr u32 MAGIC = 0x74736368u, VERSION = 1;
constexpr u32 STEPS = 0, UNENCODED = 1, NO_REFERENCE = 2;
constexpr u32 HEADER_BYTES = 32;
constexpr u32 LANES = 32, CONTEXTS = 16;
constexpr u32 PRECISION = 12, TOTAL = 1u << PRECISION, LEAST_STATE = 1u << 16;
constexpr u32 DIRECT = 32, FLIPPED = 72, ESCAPE = 102, SYMBOLS = 103, ROW = 128;
constexpr u32 MIN_TILE_LOG = 13, MAX_TILE_LOG = 19;
constexpr u32 STATE_BYTES = 4 + 4 * LANES;  // how a tile begins
constexpr u32 STORED = 0xffffffffu;

HC_INLINE u32 step_between(u32 old, u32 value) {
    return ((old ^ value) & 0x8000u) | ((value - old) & 0x7fffu);
}

HC_INLINE u32 after_step(u32 old, u32 step) {
    return ((old ^ step) & 0x8000u) | ((old + step) & 0x7fffu);
}

// Bits below the exponent; dtype as in the header.
HC_INLINE u32 mantissa_bits(u32 dtype) { return dtype == 1 ? 7 : 10; }
HC_INLINE u32 exponents(u32 dtype) { return dtype == 1 ? 256 : 32; }
HC_INLINE u32 exponent_of(u32 old, u32 dtype) { return (old & 0x7fffu) >> mantissa_bits(dtype); }

HC_INLINE u32 context_of(u32 old, u32 dtype, u32 lowest) {
    u32 exponent = exponent_of(old, dtype);
    u32 context = exponent < lowest ? 0 : exponent - lowest;
    return context < CONTEXTS ? context : CONTEXTS - 1;
}

// A symbol and its extra bits.
struct Coded {
    u32 symbol, count, bits;
};

// The lower 15 bits of a step as a signed number, folded. With another sign: no less than 2^15.
HC_INLINE u32 folded_of(u32 step) {
    return (((step << 1) ^ (0u - (step >> 14 & 1))) & 0x7fffu) | (step & 0x8000u);
}

HC_INLINE Coded code_of(u32 step) {
    u32 z = folded_of(step) & 0x7fffu;
    if (step & 0x8000u) {
        if (z < 2) return Coded{FLIPPED + z, 0, 0};
        u32 k = log2_floor(z);
        return Coded{FLIPPED + 2 * k + (z >> (k - 1) & 1), k - 1, z & ((1u << (k - 1)) - 1)};
    }
    if (z < DIRECT) return Coded{z, 0, 0};
    u32 k = log2_floor(z);
    return Coded{DIRECT + 4 * (k - 5) + (z >> (k - 2) & 3), k - 2, z & ((1u << (k - 2)) - 1)};
}

// Extra bits of a symbol.
HC_INLINE u32 extra_count(u32 symbol) {
    if (symbol < DIRECT) return 0;
    if (symbol < FLIPPED) return (symbol - DIRECT) / 4 + 3;
    if (symbol < FLIPPED + 2) return 0;
    return symbol == ESCAPE ? 16 : (symbol - FLIPPED) / 2 - 1;
}

// Returns the lower 15 bits of the step whose folded form is `z`.
HC_INLINE u32 unfolded(u32 z) { return ((z >> 1) ^ (0u - (z & 1))) & 0x7fffu; }

HC_INLINE u32 step_of(u32 symbol, u32 bits) {
    if (symbol == ESCAPE) return bits & 0xffffu;
    u32 z = symbol, flip = 0;
    if (symbol >= FLIPPED) {
        u32 rank = symbol - FLIPPED, k = rank / 2;
        z = rank < 2 ? rank : (2 + rank % 2) << (k - 1) | bits;
        flip = 0x8000u;
    } else if (symbol >= DIRECT) {
        u32 rank = symbol - DIRECT, k = rank / 4 + 5;
        z = (4 + rank % 4) << (k - 2) | bits;
    }
    return flip | unfolded(z);
}

// The range of a symbol within a context is packed as start << 16 | frequency; 0 if the context lacks it.
HC_INLINE u32 frequency_of(u32 range) { return range & 0xffffu; }
HC_INLINE u32 start_of(u32 range) { return range >> 16; }

// Whether the state must emit a word before this symbol.
HC_INLINE bool overflows(u32 state, u32 range) { return state >= frequency_of(range) << 20; }

HC_INLINE u32 push_symbol(u32 state, u32 range) {
    u32 frequency = frequency_of(range), quotient = state / frequency;
    return (quotient << PRECISION) + (state - quotient * frequency) + start_of(range);
}

// Does the same with `inverse` = 0xffffffff / frequency: its product with a state is the quotient, or one less.
HC_INLINE u32 push_by_inverse(u32 state, u32 range, u32 inverse) {
    u32 frequency = frequency_of(range), quotient = (u32)((u64)state * inverse >> 32);
    u32 rest = state - quotient * frequency;
    bool more = rest >= frequency;
    return ((quotient + more) << PRECISION) + rest - (more ? frequency : 0) + start_of(range);
}

HC_INLINE u32 pop_symbol(u32 state, u32 range) {
    return frequency_of(range) * (state >> PRECISION) + (state & (TOTAL - 1)) - start_of(range);
}

}  // namespace stepcode
}  // namespace hybridcomp
