// zfp: the 1-D fixed-rate stream of zfp for fp32, byte for byte, except where zfp loses its data.
//
// The stream (zfp 1.0, lossy, no header): blocks of 4 values, maxbits = floor(4 rate + 0.5) bits
// each, concatenated without alignment, lowest bit first, zeros up to 8 bytes; then zeros up to a
// multiple of 16 bytes, which is ours. A last block of 1, 2 or 3 values is filled up as
// x0 x0 x0 x0, x0 x1 x1 x0, x0 x1 x2 x0. A block:
//   1. m = max |x|. If m is 0: zero bits. Else e = frexp exponent of m, and 9 bits 2 (e + 127) + 1.
//   2. i = trunc(x * 2^(30-e)), the lifting transform, negabinary.
//   3. Bit planes from the highest: with n coefficients known to be significant, n bits as they
//      are; then, while n < 4, one bit "any more?" and, if so, bits up to the next significant one
//      (the fourth is implied). Everything after maxbits is cut off. Once n is 4 all that follows
//      is the planes themselves, which both directions use.
//
// Where we differ, because zfp would lose the data without a word (measured with zfpy 1.0.1):
//   * NaN or Inf in a block (zfp: finite garbage): the 9 bits are 000000001, flag set and exponent
//     field 0, which zfp never writes; the rest is zero. The block decodes to NaN.
//   * 0 < m < 2^-98 (zfp: its scale overflows): a zero block. The error is below 2^-98.
//   * decoded values that overflow are clamped to the largest float (zfp: Inf).
//
// 16-bit values go through fp32.
#pragma once

#include "portable.h"

namespace hybridcomp {
namespace zfp {

constexpr int BLOCK = 4;
constexpr u32 HEADER_BITS = 9;
constexpr u32 NONFINITE_HEADER = 1;
constexpr u32 MIN_EXPONENT = 127 - 98;  // of m as a float: below 2^-98 the scale overflows
constexpr u32 NEGABINARY = 0xaaaaaaaau;

// The bits of one block, first bit lowest.
struct Bits {
    u64 low, high;
};

HC_INLINE Bits shift_left(Bits bits, u32 count) {
    Bits shifted;
    bool far = count >= 64;
    u32 part = count & 63;
    u64 carry = part ? bits.low >> (64 - part) : 0;
    shifted.low = far ? 0 : bits.low << part;
    shifted.high = far ? bits.low << part : (bits.high << part) | carry;
    return shifted;
}

HC_INLINE Bits shift_right(Bits bits, u32 count) {
    Bits shifted;
    bool far = count >= 64;
    u32 part = count & 63;
    u64 carry = part ? bits.high << (64 - part) : 0;
    shifted.low = far ? bits.high >> part : (bits.low >> part) | carry;
    shifted.high = far ? 0 : bits.high >> part;
    return shifted;
}

HC_INLINE Bits first_bits(Bits bits, u32 count) {
    bits.high &= count >= 128 ? ~0ull : count > 64 ? (1ull << (count - 64)) - 1 : 0;
    bits.low &= count >= 64 ? ~0ull : (1ull << count) - 1;
    return bits;
}

// Steps 2: transform and back. Wrapping arithmetic, as in zfp.

HC_INLINE i32 half(i32 value) { return value >> 1; }
HC_INLINE i32 add(i32 a, i32 b) { return (i32)((u32)a + (u32)b); }
HC_INLINE i32 sub(i32 a, i32 b) { return (i32)((u32)a - (u32)b); }
HC_INLINE i32 twice(i32 value) { return (i32)((u32)value << 1); }

HC_INLINE void lift(i32& x, i32& y, i32& z, i32& w) {
    x = half(add(x, w)), w = sub(w, x);
    z = half(add(z, y)), y = sub(y, z);
    x = half(add(x, z)), z = sub(z, x);
    w = half(add(w, y)), y = sub(y, w);
    w = add(w, half(y)), y = sub(y, half(w));
}

HC_INLINE void unlift(i32& x, i32& y, i32& z, i32& w) {
    y = add(y, half(w)), w = sub(w, half(y));
    y = add(y, w), w = sub(twice(w), y);
    z = add(z, x), x = sub(twice(x), z);
    y = add(y, z), z = sub(twice(z), y);
    w = add(w, x), x = sub(twice(x), w);
}

HC_INLINE u32 to_negabinary(i32 value) { return ((u32)value + NEGABINARY) ^ NEGABINARY; }
HC_INLINE i32 from_negabinary(u32 value) { return (i32)((value ^ NEGABINARY) - NEGABINARY); }

// Swaps two bits of the bit index of `x`: SHIFT = 2^b - 2^a, MASK = positions with bit a and not b.
template <int SHIFT, u64 MASK>
HC_INLINE u64 swap_index_bits(u64 x) {
    u64 t = (x ^ (x >> SHIFT)) & MASK;
    return x ^ t ^ (t << SHIFT);
}

HC_INLINE u64 reverse_nibbles(u64 x) {
    x = ((x >> 4) & 0x0f0f0f0f0f0f0f0full) | ((x & 0x0f0f0f0f0f0f0f0full) << 4);
#ifdef __CUDA_ARCH__
    u32 low = (u32)x, high = (u32)(x >> 32);
    return (u64)__byte_perm(low, 0, 0x0123) << 32 | __byte_perm(high, 0, 0x0123);
#else
    return __builtin_bswap64(x);
#endif
}

// 16 bits of each of four coefficients -> 16 planes of 4 bits, the highest plane first (lowest).
// The bit index (k0 k1 k2 k3 i0 i1), k bit and i coefficient, becomes (i0 i1 k0 k1 k2 k3).
HC_INLINE u64 planes_of(u32 a, u32 b, u32 c, u32 d) {
    u64 x = (u64)a | (u64)b << 16 | (u64)c << 32 | (u64)d << 48;
    x = swap_index_bits<15, 0x0000aaaa0000aaaaull>(x);
    x = swap_index_bits<12, 0x0000f0f00000f0f0ull>(x);
    x = swap_index_bits<30, 0x00000000ccccccccull>(x);
    x = swap_index_bits<24, 0x00000000ff00ff00ull>(x);
    return reverse_nibbles(x);
}

// The way back: coefficient i in bits 16 i .. 16 i + 15.
HC_INLINE u64 coefficients_of(u64 planes) {
    u64 x = reverse_nibbles(planes);
    x = swap_index_bits<24, 0x00000000ff00ff00ull>(x);
    x = swap_index_bits<30, 0x00000000ccccccccull>(x);
    x = swap_index_bits<12, 0x0000f0f00000f0f0ull>(x);
    return swap_index_bits<15, 0x0000aaaa0000aaaaull>(x);
}

// Step 3 by tables. An entry of the encoder codes two planes: code (14 bits), its length, the new n.
constexpr int ENCODE_ENTRIES = 4 * 256;

HC_INLINE constexpr u32 plane_code(u32 n, u32 plane) {
    u32 code = plane & ((1u << n) - 1), length = n, left = plane >> n;
    while (n < 4) {
        code |= (left ? 1u : 0u) << length++;
        if (!left) break;
        while (n < 3) {
            u32 bit = left & 1;
            code |= bit << length++;
            if (bit) break;
            left >>= 1, ++n;
        }
        left >>= 1, ++n;
    }
    return code | length << 16 | n << 24;
}

// Entry n * 256 + byte, the first plane in the low nibble.
HC_INLINE constexpr u32 encode_entry(u32 index) {
    u32 first = plane_code(index >> 8, index & 15);
    u32 second = plane_code(first >> 24, (index >> 4) & 15);
    u32 length = (first >> 16) & 255;
    return ((first & 0xffff) | (second & 0xffff) << length) + (length << 16) + (second & 0xffff0000);
}

// An entry of the decoder reads one plane: plane (4 bits), bits used, the new n. Index: n * 256 +
// (1 << available | bits), at most 7 bits: a plane never needs more. Past the end of the block a
// search for the next significant coefficient finds it at once, and every other bit is zero.
constexpr int DECODE_ENTRIES = 4 * 256;

HC_INLINE constexpr u32 decode_entry(u32 index) {
    u32 n = index >> 8, bits = index & 255, available = 0;
    while (bits >> (available + 1)) ++available;
    u32 used = n < available ? n : available;
    u32 plane = bits & ((1u << used) - 1);
    while (used < available && n < 4) {
        if (!((bits >> used++) & 1)) break;
        while (used < available && n < 3) {
            if ((bits >> used++) & 1) break;
            ++n;
        }
        plane |= 1u << n, ++n;
    }
    return plane | used << 4 | n << 8;
}

struct Tables {
    u32 encode[ENCODE_ENTRIES];
    u16 decode[DECODE_ENTRIES];
};

// Code of a block after its 9 header bits, from its planes in stream order.
HC_INLINE Bits encode_planes(Bits planes, u32 header, u32 maxbits, const u32* table) {
    Bits out = {header, 0};
    u32 position = HEADER_BITS, n = 0;
    while (n < 4 && position < maxbits) {
        u32 entry = table[n << 8 | (u32)(planes.low & 255)];
        Bits code = shift_left(Bits{entry & 0xffff, 0}, position);
        out.low |= code.low, out.high |= code.high;
        position += (entry >> 16) & 255, n = entry >> 24;
        planes = shift_right(planes, 8);
    }
    if (position < maxbits) {
        Bits rest = shift_left(planes, position);
        out.low |= rest.low, out.high |= rest.high;
    }
    return first_bits(out, maxbits);
}

// The planes that `bits` (zero from maxbits on) hold after the header.
HC_INLINE Bits decode_planes(Bits bits, u32 maxbits, const u16* table) {
    Bits planes = {0, 0};
    u32 position = HEADER_BITS, n = 0, shift = 0;
    while (n < 4 && position < maxbits && shift < 128) {
        u32 available = maxbits - position < 7 ? maxbits - position : 7;
        u32 window = (u32)shift_right(bits, position).low & ((1u << available) - 1);
        u32 entry = table[n << 8 | 1u << available | window];
        Bits plane = shift_left(Bits{entry & 15, 0}, shift);
        planes.low |= plane.low, planes.high |= plane.high;
        position += (entry >> 4) & 15, n = entry >> 8, shift += 4;
    }
    if (position < maxbits && shift < 128) {
        Bits rest = shift_left(shift_right(bits, position), shift);
        planes.low |= rest.low, planes.high |= rest.high;
    }
    return planes;
}

// Steps 1 and 2. Returns the header: 0 for a zero block, NONFINITE_HEADER, or 2 (e + 127) + 1.
HC_INLINE u32 block_header(u32 absmax_bits) {
    u32 exponent = absmax_bits >> 23;
    u32 header = 2 * (exponent + 1) + 1;
    header = exponent < MIN_EXPONENT ? 0 : header;
    return absmax_bits >= INF_BITS ? NONFINITE_HEADER : header;
}

// 2^(30-e); for blocks without a scale the result is not used.
HC_INLINE float encode_scale(u32 header) { return bits_float((284 - (header >> 1)) << 23); }

// 2^(e-28): the other factor of 2^-2 is applied before, so that the scale is never subnormal.
HC_INLINE float decode_scale(u32 header) {
    u32 field = header >> 1;
    u32 bits = field > 28 ? (field - 28) << 23 : 0;
    bits = header & 1 ? bits : 0;
    return bits_float(header == NONFINITE_HEADER ? QUIET_NAN_BITS : bits);
}

// 4 values -> maxbits bits.
HC_INLINE Bits encode_block(const float* values, u32 maxbits, const u32* table) {
    u32 absmax = 0;
    for (int i = 0; i < BLOCK; ++i) {
        u32 magnitude = magnitude_bits(values[i]);
        absmax = magnitude > absmax ? magnitude : absmax;
    }
    u32 header = block_header(absmax);
    if (header < 2) return Bits{header, 0};
    float scale = encode_scale(header);
    i32 x = (i32)(values[0] * scale), y = (i32)(values[1] * scale);
    i32 z = (i32)(values[2] * scale), w = (i32)(values[3] * scale);
    lift(x, y, z, w);
    u32 a = to_negabinary(x), b = to_negabinary(y), c = to_negabinary(z), d = to_negabinary(w);
    Bits planes = {planes_of(a >> 16, b >> 16, c >> 16, d >> 16),
                   planes_of(a & 0xffff, b & 0xffff, c & 0xffff, d & 0xffff)};
    return encode_planes(planes, header, maxbits, table);
}

HC_INLINE float decode_value(i32 value, float scale) { return finite((float)value * 0.25f * scale); }

HC_INLINE void decode_block(Bits bits, u32 maxbits, const u16* table, float* values) {
    u32 header = (u32)bits.low & 511;
    float scale = decode_scale(header);
    Bits planes = {0, 0};
    if (header & 1) planes = decode_planes(bits, maxbits, table);
    u64 high = coefficients_of(planes.low), low = coefficients_of(planes.high);
    i32 i[BLOCK];
    for (int k = 0; k < BLOCK; ++k) {
        u32 coefficient = (u32)(high >> (16 * k)) << 16 | ((u32)(low >> (16 * k)) & 0xffff);
        i[k] = from_negabinary(coefficient);
    }
    unlift(i[0], i[1], i[2], i[3]);
    for (int k = 0; k < BLOCK; ++k) values[k] = decode_value(i[k], scale);
}

}  // namespace zfp
}  // namespace hybridcomp
