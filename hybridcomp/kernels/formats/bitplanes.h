// Small fields of many blocks as bit planes: bit i % 8 of byte i / 8 of a plane is a bit of field i.
// A warp writes 32 of them with one ballot; here eight go at a time through a 64-bit word.
#pragma once

#include "portable.h"

namespace hybridcomp {

HC_INLINE u64 load_u64(const void* bytes) {
    u64 word;
    __builtin_memcpy(&word, bytes, 8);
    return word;
}

HC_INLINE void store_u64(u64 word, void* bytes) { __builtin_memcpy(bytes, &word, 8); }

constexpr u64 EACH_BYTE = 0x0101010101010101ull;

// Bit 0 of each of eight bytes -> eight bits.
HC_INLINE u32 gather_bits(u64 bytes) {
    return (u32)(((bytes & EACH_BYTE) * 0x0102040810204080ull) >> 56);
}

// Eight bits -> bit 0 of each of eight bytes.
HC_INLINE u64 scatter_bits(u32 bits) {
    u64 spread = (EACH_BYTE * bits) & 0x8040201008040201ull;
    return ((spread + 0x7f7f7f7f7f7f7f7full) >> 7) & EACH_BYTE;
}

// `fields` is readable and zero up to a multiple of 8.
inline u8* write_planes(const u8* fields, u32 count, u32 planes, u8* out) {
    for (u32 plane = 0; plane < planes; ++plane) {
        for (u32 i = 0; i < count; i += 8) *out++ = (u8)gather_bits(load_u64(fields + i) >> plane);
    }
    return out;
}

// Writes `fields` up to a multiple of 8.
inline const u8* read_planes(const u8* in, u32 count, u32 planes, u8* fields) {
    for (u32 i = 0; i < count; i += 8) store_u64(0, fields + i);
    for (u32 plane = 0; plane < planes; ++plane) {
        for (u32 i = 0; i < count; i += 8) {
            store_u64(load_u64(fields + i) | scatter_bits(*in++) << plane, fields + i);
        }
    }
    return in;
}

}  // namespace hybridcomp
