// Functions of zfp's CUDA kernels beyond zfp.h: bit planes in 32-bit words, mostly moved a byte at a time, and
// blocks of 32 and 64 bits, which need no wider arithmetic.
#pragma once

#include "cuda_device.h"

#include "zfp.h"

namespace hybridcomp {
namespace zfp {

struct Pair {
    u32 low, high;
};

// Swaps the bit that tells the words of a pair apart with bit SHIFT = 2^j of the bit index, which is
// set in the positions MASK.
template <int SHIFT, u32 MASK>
HC_INLINE Pair swap_words(Pair x) {
    return Pair{(x.low & ~MASK) | ((x.high << SHIFT) & MASK),
                (x.high & MASK) | ((x.low >> SHIFT) & ~MASK)};
}

HC_INLINE Pair swap_bytes(Pair x, u32 low, u32 high) {
    return Pair{pick_bytes(x.low, x.high, low), pick_bytes(x.low, x.high, high)};
}

// planes_of of zfp.h, from coefficients 0, 1 and 2, 3 as halves of words. With the bit index as
// (word; i0 k3 k2 k1 k0), k the bit and i the coefficient, it becomes (k3'; k2' k1' k0' i1 i0).
HC_INLINE Pair planes_of(Pair x) {
    x = swap_words<2, 0xccccccccu>(x);                                 // (k1; i0 k3 k2 i1 k0)
    x = swap_words<1, 0xaaaaaaaau>(swap_bytes(x, 0x5140, 0x7362));     // (k0; k3 k1 k2 i1 i0)
    x = swap_words<4, 0xf0f0f0f0u>(Pair{x.high, x.low});               // (k2; k3 k1 k0' i1 i0)
    return swap_bytes(x, 0x2367, 0x0145);
}

HC_INLINE Pair coefficients_of(Pair x) {
    x = swap_words<4, 0xf0f0f0f0u>(swap_bytes(x, 0x2367, 0x0145));
    x = swap_words<1, 0xaaaaaaaau>(Pair{x.high, x.low});
    return swap_words<2, 0xccccccccu>(swap_bytes(x, 0x6420, 0x7531));
}

HC_INLINE Pair high_halves(Coefficients k) {
    return Pair{pick_bytes(k.a, k.b, 0x7632), pick_bytes(k.c, k.d, 0x7632)};
}
HC_INLINE Pair low_halves(Coefficients k) {
    return Pair{pick_bytes(k.a, k.b, 0x5410), pick_bytes(k.c, k.d, 0x5410)};
}
HC_INLINE u64 joined(Pair x) { return (u64)x.high << 32 | x.low; }
HC_INLINE Pair parted(u64 x) { return Pair{(u32)x, (u32)(x >> 32)}; }

HC_INLINE u32 header_of(const float* v) {
    return block_header(largest(largest(magnitude_bits(v[0]), magnitude_bits(v[1])),
                                largest(magnitude_bits(v[2]), magnitude_bits(v[3]))));
}

// A block of 32 bits: encode_planes of zfp.h for SHORT_BITS.
HC_INLINE u32 encode_word(const float* v, const u32* table) {
    u32 header = header_of(v);
    Pair planes = planes_of(high_halves(transform(v[0], v[1], v[2], v[3], header)));
    u32 out = header, position = HEADER_BITS, n = 0, used = 24;
#pragma unroll
    for (int step = 0; step < 3; ++step) {
        u32 entry = table[n << 8 | (planes.low >> (8 * step) & 255)];
        out |= shifted_left(entry & 0xffff, position);
        position += (entry >> 16) & 255, n = entry >> 24;
    }
    while (n < 4 && position < 32 && used < 64) {
        u32 entry = table[n << 8 | ((used < 32 ? planes.low : planes.high) >> (used & 31) & 255)];
        out |= shifted_left(entry & 0xffff, position);
        position += (entry >> 16) & 255, n = entry >> 24, used += 8;
    }
    u32 rest = used == 24 ? planes.low >> 24 | planes.high << 8 : planes.high >> ((used - 32) & 31);
    if (used < 64) out |= shifted_left(rest, position);
    return out;
}

// A block of 64 bits, likewise.
HC_INLINE u64 encode_two_words(const float* v, const u32* table) {
    u32 header = header_of(v);
    Coefficients k = transform(v[0], v[1], v[2], v[3], header);
    Pair high = planes_of(high_halves(k));
    u64 first = joined(high), second = joined(planes_of(low_halves(k))), out = header;
    u32 position = HEADER_BITS, n = 0, used = 24;
#pragma unroll
    for (int step = 0; step < 3; ++step) {
        u32 entry = table[n << 8 | (high.low >> (8 * step) & 255)];
        out |= (u64)(entry & 0xffff) << position;
        position += (entry >> 16) & 255, n = entry >> 24;
    }
    u64 rest = first >> 24 | second << 40;
    while (n < 4 && position < 64 && used < 128) {
        u32 entry = table[n << 8 | (u32)(rest & 255)];
        out |= (u64)(entry & 0xffff) << position;
        position += (entry >> 16) & 255, n = entry >> 24, used += 8;
        rest = used < 64 ? first >> used | second << (64 - used) : second >> (used & 63);
    }
    if (position < 64 && used < 128) out |= rest << position;
    return out;
}

HC_INLINE Bits encode_wide(const float* v, u32 maxbits, const u32* table) {
    u32 header = header_of(v);
    Coefficients k = transform(v[0], v[1], v[2], v[3], header);
    Bits planes = {joined(planes_of(high_halves(k))), 0};
    if (maxbits <= SHORT_BITS) return encode_planes<true>(planes, header, maxbits, table);
    planes.high = joined(planes_of(low_halves(k)));
    return encode_planes<false>(planes, header, maxbits, table);
}

HC_INLINE Four values_of(Pair high, Pair low, u32 header) {
    Pair first = swap_bytes(Pair{low.low, high.low}, 0x5410, 0x7632);
    Pair second = swap_bytes(Pair{low.high, high.high}, 0x5410, 0x7632);
    Coefficients k = {first.low, first.high, second.low, second.high};
    i32 x = from_negabinary(k.a), y = from_negabinary(k.b);
    i32 z = from_negabinary(k.c), w = from_negabinary(k.d);
    unlift(x, y, z, w);
    u32 field = header >> 1;
    if (field > 30 && field < 254) {  // nothing overflows, and both scales are one
        float scale = bits_float((field - 30) << 23);
        return Four{(float)x * scale, (float)y * scale, (float)z * scale, (float)w * scale};
    }
    // the bits of the CPU's NaN, which arithmetic on a device would change
    if (header == NONFINITE_HEADER) {
        float nan = bits_float(QUIET_NAN_BITS);
        return Four{nan, nan, nan, nan};
    }
    float scale = decode_scale(header);
    return Four{decode_value(x, scale), decode_value(y, scale), decode_value(z, scale),
                decode_value(w, scale)};
}

// decode_planes of zfp.h for a block of 32 bits.
HC_INLINE Four decode_word(u32 word, const u32* table) {
    u32 bits = word >> HEADER_BITS, left = 32 - HEADER_BITS;
    u32 entry = table[1u << DECODE_WINDOW | (bits & 255)], used = (entry >> 16) & 15;
    u64 planes = entry & 0xffff;
    u32 shift = (entry >> 20) & 255, n = entry >> 28;
    bits >>= used, left -= used;
    entry = table[n << 9 | 1u << DECODE_WINDOW | (bits & 255)], used = (entry >> 16) & 15;
    planes |= (entry & 0xffff) << shift;
    shift += (entry >> 20) & 255, n = entry >> 28;
    bits >>= used, left -= used;
    while (n < 4 && left && shift < 64) {
        u32 full = left < DECODE_WINDOW ? left : DECODE_WINDOW;
        entry = table[n << 9 | 1u << full | (bits & 255)], used = (entry >> 16) & 15;
        planes |= (u64)(entry & 0xffff) << shift;
        shift += (entry >> 20) & 255, n = entry >> 28;
        bits >>= used, left -= used;
    }
    if (n == 4 && shift < 64) planes |= (u64)bits << shift;
    return values_of(coefficients_of(parted(planes)), Pair{0, 0}, word & 511);
}

// A block of 64 bits, likewise.
HC_INLINE Four decode_two_words(u64 word, const u32* table) {
    u64 bits = dropped(word, HEADER_BITS);
    Bits planes = {0, 0};
    u32 left = 64 - HEADER_BITS, shift = 0, n = 0;
#pragma unroll
    for (int step = 0; step < 3; ++step) {
        u32 entry = table[n << 9 | 1u << DECODE_WINDOW | ((u32)bits & 255)];
        u32 used = (entry >> 16) & 15;
        planes.low |= (u64)(entry & 0xffff) << shift;
        shift += (entry >> 20) & 255, n = entry >> 28, left -= used;
        bits = dropped(bits, used);
    }
    while (n < 4 && left && shift < 128) {
        u32 full = left < DECODE_WINDOW ? left : DECODE_WINDOW;
        u32 entry = table[n << 9 | 1u << full | ((u32)bits & 255)], used = (entry >> 16) & 15;
        put_bits(planes, shift, entry & 0xffff);
        shift += (entry >> 20) & 255, n = entry >> 28, left -= used;
        bits = dropped(bits, used);
    }
    if (n == 4 && shift < 64) {  // at least one plane was read
        planes.low |= bits << shift, planes.high |= bits >> (64 - shift);
    } else if (n == 4 && shift < 128) {
        planes.high |= bits << (shift - 64);
    }
    return values_of(coefficients_of(parted(planes.low)), coefficients_of(parted(planes.high)),
                     (u32)word & 511);
}

HC_INLINE Four decode_wide(Bits bits, u32 maxbits, const u32* table) {
    bits = first_bits(bits, maxbits);
    u32 header = (u32)bits.low & 511;
    if (maxbits <= SHORT_BITS) {
        Bits planes = decode_planes<true>(bits, maxbits, table);
        return values_of(coefficients_of(parted(planes.low)), Pair{0, 0}, header);
    }
    Bits planes = decode_planes<false>(bits, maxbits, table);
    return values_of(coefficients_of(parted(planes.low)), coefficients_of(parted(planes.high)),
                     header);
}

}  // namespace zfp
}  // namespace hybridcomp
