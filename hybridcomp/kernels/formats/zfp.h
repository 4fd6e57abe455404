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

// ORs up to 16 bits into `bits`.
HC_INLINE void put_bits(Bits& bits, u32 position, u32 value) {
    if (position < 64) {
        bits.low |= (u64)value << position;
        bits.high |= ((u64)value >> 1) >> (63 - position);
    } else {
        bits.high |= (u64)value << (position & 63);
    }
}

// Drops up to 63 bits.
HC_INLINE Bits drop_bits(Bits bits, u32 count) {
    return Bits{bits.low >> count | (bits.high << 1) << (63 - count), bits.high >> count};
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
    return reverse_bytes(x);
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

// Step 3 by tables, one row for each n. Once n is 4 planes are coded as they are, by table or not.

// One plane: its code (7 bits at most), code length << 16, the new n << 24.
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

// An entry of the encoder codes two planes. Index: n * 256 + planes, the first in the low nibble.
constexpr int ENCODE_ENTRIES = 5 * 256;

HC_INLINE constexpr u32 encode_entry(u32 index) {
    u32 first = plane_code(index >> 8, index & 15);
    u32 second = plane_code(first >> 24, (index >> 4) & 15);
    u32 length = (first >> 16) & 255;
    u32 code = (first & 0xffff) | (second & 0xffff) << length;
    return code + (length << 16) + (second & 0xffff0000u);
}

// An entry of the decoder reads up to four planes: planes (16 bits), bits used << 16, 4 * planes
// read << 20, the new n << 28. Index: n * 512 + (1 << available | bits), at most 8 bits; a plane
// needs no more than 7. Planes that would need more bits are left to the next entry, unless these
// are the last bits of the block: past its end a search for the next significant coefficient finds
// it at once, and every other bit is zero. The row of n = 4 reads nothing.
constexpr int DECODE_ENTRIES = 5 * 512;
constexpr u32 DECODE_WINDOW = 8;

struct DecodedPlane {
    u32 plane, used, n;
    bool complete;
};

HC_INLINE constexpr DecodedPlane decode_plane(u32 n, u32 bits, u32 available) {
    DecodedPlane out = {bits & ((1u << n) - 1), n, n, n <= available};
    if (!out.complete) out.plane = bits, out.used = available;
    while (out.complete && out.n < 4) {
        out.complete = out.used < available;
        if (!out.complete || !((bits >> out.used++) & 1)) break;
        while (out.n < 3) {
            out.complete = out.used < available;
            if (!out.complete || ((bits >> out.used++) & 1)) break;
            ++out.n;
        }
        out.plane |= 1u << out.n++;
    }
    return out;
}

HC_INLINE constexpr u32 decode_entry(u32 index) {
    u32 n = index >> 9, bits = index & 511, available = 0, position = 0, planes = 0, shift = 0;
    while (bits >> (available + 1)) ++available;
    bits -= 1u << available;
    while (n < 4 && position < available && shift < 16) {
        DecodedPlane next = decode_plane(n, bits >> position, available - position);
        if (!next.complete && available == DECODE_WINDOW) break;
        planes |= next.plane << shift, shift += 4, position += next.used, n = next.n;
    }
    return planes | position << 16 | shift << 20 | n << 28;
}

struct Tables {
    u32 encode[ENCODE_ENTRIES];
    u32 decode[DECODE_ENTRIES];
};

HC_INLINE constexpr Tables make_tables() {
    Tables tables = {};
    for (u32 i = 0; i < ENCODE_ENTRIES; ++i) tables.encode[i] = encode_entry(i);
    for (u32 i = 0; i < DECODE_ENTRIES; ++i) tables.decode[i] = i & 511 ? decode_entry(i) : 0;
    return tables;
}

// With up to SHORT_BITS bits the 16 highest planes are all that fits: at most four planes before the
// first digit (some coefficient is at least 2^27), and two bits or more for every later one.
constexpr u32 SHORT_BITS = 36;

// Code of a block from its planes in stream order. After three entries (six planes) most blocks
// have n = 4; running them without a test costs less than guessing the branch wrong.
template <bool SHORT>
HC_INLINE Bits encode_planes(Bits planes, u32 header, u32 maxbits, const u32* table) {
    Bits out = {header, 0};
    u32 position = HEADER_BITS, n = 0, used = 0;
    u64 next = planes.low;
    for (int step = 0; step < 3; ++step) {
        u32 entry = table[n << 8 | (u32)(next & 255)];
        out.low |= (u64)(entry & 0xffff) << position;
        position += (entry >> 16) & 255, n = entry >> 24, next >>= 8, used += 8;
    }
    while (n < 4 && position < maxbits && used < (SHORT ? 64 : 128)) {
        next = (SHORT || used < 64 ? planes.low : planes.high) >> (used & 63);
        u32 entry = table[n << 8 | (u32)(next & 255)];
        put_bits(out, position, entry & 0xffff);
        position += (entry >> 16) & 255, n = entry >> 24, used += 8;
    }
    if (position < maxbits && used < (SHORT ? 64 : 128)) {
        Bits rest = shift_left(shift_right(planes, used), position);
        out.low |= rest.low, out.high |= rest.high;
    }
    return first_bits(out, maxbits);
}

// The planes that `bits` (zero from maxbits on) hold after the header.
template <bool SHORT>
HC_INLINE Bits decode_planes(Bits bits, u32 maxbits, const u32* table) {
    Bits planes = {0, 0};
    u32 left = maxbits - HEADER_BITS, n = 0, shift = 0;
    bits = shift_right(bits, HEADER_BITS);
    for (int step = 0; step < 3; ++step) {
        u32 full = left < DECODE_WINDOW ? left : DECODE_WINDOW;
        u32 entry = table[n << 9 | 1u << full | (u32)(bits.low & 255)];
        u32 used = (entry >> 16) & 15;
        planes.low |= (u64)(entry & 0xffff) << shift;
        shift += (entry >> 20) & 255, n = entry >> 28, left -= used;
        bits = drop_bits(bits, used);
    }
    while (n < 4 && left && shift < 128) {
        u32 full = left < DECODE_WINDOW ? left : DECODE_WINDOW;
        u32 entry = table[n << 9 | 1u << full | (u32)(bits.low & 255)];
        u32 used = (entry >> 16) & 15;
        put_bits(planes, shift, entry & 0xffff);
        shift += (entry >> 20) & 255, n = entry >> 28, left -= used;
        bits = drop_bits(bits, used);
    }
    if (n == 4 && shift < 128) {
        Bits rest = shift_left(bits, shift);
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

// The planes of 4 values, given their header. A block without a scale has no planes.
struct Coefficients {
    u32 a, b, c, d;
};

HC_INLINE Coefficients transform(float a, float b, float c, float d, u32 header) {
    float scale = encode_scale(header);
    bool scaled = header > 1;
    i32 x = scaled ? (i32)(a * scale) : 0, y = scaled ? (i32)(b * scale) : 0;
    i32 z = scaled ? (i32)(c * scale) : 0, w = scaled ? (i32)(d * scale) : 0;
    lift(x, y, z, w);
    return Coefficients{to_negabinary(x), to_negabinary(y), to_negabinary(z), to_negabinary(w)};
}

HC_INLINE u32 largest(u32 a, u32 b) { return a > b ? a : b; }

// 4 values -> maxbits bits.
HC_INLINE Bits encode_block(const float* values, u32 maxbits, const u32* table) {
    u32 header = block_header(largest(largest(magnitude_bits(values[0]), magnitude_bits(values[1])),
                                      largest(magnitude_bits(values[2]), magnitude_bits(values[3]))));
    Coefficients k = transform(values[0], values[1], values[2], values[3], header);
    Bits planes = {planes_of(k.a >> 16, k.b >> 16, k.c >> 16, k.d >> 16),
                   planes_of(k.a & 0xffff, k.b & 0xffff, k.c & 0xffff, k.d & 0xffff)};
    return encode_planes<false>(planes, header, maxbits, table);
}

HC_INLINE float decode_value(i32 value, float scale) { return finite((float)value * 0.25f * scale); }

HC_INLINE u32 coefficient(u64 high, u64 low, int i) {
    return ((u32)(high >> (16 * i)) << 16) | ((u32)(low >> (16 * i)) & 0xffff);
}

struct Values {
    float x, y, z, w;
};

HC_INLINE Values untransform(Coefficients k, u32 header) {
    float scale = decode_scale(header);
    i32 x = from_negabinary(k.a), y = from_negabinary(k.b);
    i32 z = from_negabinary(k.c), w = from_negabinary(k.d);
    unlift(x, y, z, w);
    return Values{decode_value(x, scale), decode_value(y, scale), decode_value(z, scale),
                  decode_value(w, scale)};
}

// `bits` may hold anything after maxbits.
HC_INLINE void decode_block(Bits bits, u32 maxbits, const u32* table, float* values) {
    bits = first_bits(bits, maxbits);
    u32 header = (u32)bits.low & 511;
    Bits planes = decode_planes<false>(bits, maxbits, table);
    u64 high = coefficients_of(planes.low), low = coefficients_of(planes.high);
    Coefficients k = {coefficient(high, low, 0), coefficient(high, low, 1),
                      coefficient(high, low, 2), coefficient(high, low, 3)};
    Values v = untransform(k, header);
    values[0] = v.x, values[1] = v.y, values[2] = v.z, values[3] = v.w;
}

}  // namespace zfp
}  // namespace hybridcomp
