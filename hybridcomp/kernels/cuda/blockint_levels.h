// Decodes the levels of a block in one lane, for sums over ranks (blockint_ring.h), with as few instructions per
// value as possible, since each rank's values take them.
#pragma once

#include "blockint_tile.h"

#ifndef HC_TABLE
#define HC_TABLE 1
#endif

namespace hybridcomp {
namespace blockint {

// What the levels of a block stand for, without the step: those that are not uniform from a table in shared
// memory, where each of sixteen has a bank of its own (four instructions less a value than the polynomial). It
// begins at a multiple of TABLE_ALIGN: a level times four is the low byte of its address.
constexpr bool TABLE = SPACING != Spacing::uniform && HC_TABLE;
constexpr int TABLE_ALIGN = TABLE ? 256 : 16;
template <bool THERE>
struct TableOf {  // none: it takes no room
    HC_INLINE_MEMBER void fill() {}
    HC_INLINE_MEMBER u32 place() const { return 0; }
    template <int BYTE>
    HC_INLINE_MEMBER float value(u32, u32) const { return 0.0f; }
};
template <>
struct TableOf<true> {
    float values[16];

    HC_INLINE_MEMBER void fill() {
        if (lane_id() < 16) values[lane_id()] = dequantize<HC_BITS, SPACING>(lane_id(), 1.0f);
        sync_warp();
    }
    HC_INLINE_MEMBER u32 place() const { return table_place(values); }
    // Returns the value of byte BYTE of `levels`; `at` is the table's address.
    template <int BYTE>
    HC_INLINE_MEMBER float value(u32 levels, u32 at) const { return in_table<BYTE>(values, levels, at); }
};
typedef TableOf<TABLE> Table;

// Numbers that the loop over ranks has in registers, as an instruction has room for one constant: a
// compiler that knew them would load them for each value. `zero` is 0, which it does not know. Levels of
// 4 bits stay where they are in their word, and become the middle of a mantissa. Of a table its place.
constexpr bool NIBBLES = HC_BITS == 4 && SPACING == Spacing::uniform;
struct Magic {
    u32 bits[NIBBLES ? 4 : 1];
    HC_INLINE constexpr u32 of(int nibble) { return LEVEL_MAGIC - (nibble << 25); }  // 2^23 / 16^nibble
    HC_INLINE_MEMBER Magic(const Table& table, u32 zero) {
        for (int i = 0; i < (NIBBLES ? 4 : 1); ++i) bits[i] = TABLE ? table.place() : of(i) | zero;
    }
};

// The words of a block -> a word for the levels of values k, k + 8, k + 16 and k + 24; of 4 bits, the
// words and their upper halves.
HC_INLINE void unpack_block(const u32* words, u32* levels) {
    if constexpr (TABLE) {  // each times four: where it is in the table
#pragma unroll
        for (int k = 0; k < 4; ++k) {
            levels[k] = words[k] << 2 & 0x3c3c3c3cu, levels[k + 4] = words[k] >> 2 & 0x3c3c3c3cu;
        }
    } else if constexpr (NIBBLES) {
#pragma unroll
        for (int k = 0; k < 4; ++k) levels[k] = words[k], levels[k + 4] = words[k] >> 16;
    } else {
        unpack_levels<HC_BITS>(words, levels);
    }
}

template <int K>
HC_INLINE float value_of(const u32* levels, float step, const Table& table, const Magic& magic) {
    if constexpr (TABLE) {
        return table.value<K / 8>(levels[K % 8], magic.bits[0]) * step;
    } else if constexpr (NIBBLES) {
        constexpr int nibble = K / 8 % 2 * 2 + K % 8 / 4;
        u32 shifted = (levels[K % 4 + K / 16 * 4] & 15u << 4 * nibble) | magic.bits[nibble];
        return (bits_float(shifted) - (8388608.0f / (float)(1 << 4 * nibble) + 8.0f)) * step;
    } else {
        return level_value<K / 8>(levels[K % 8], magic.bits[0]) * step;
    }
}

template <int K = 0>
HC_INLINE void values_of(const u32* levels, float step, const Table& table, const Magic& magic,
                         float* out) {
    if constexpr (K < BLOCK) {
        out[K] = value_of<K>(levels, step, table, magic);
        values_of<K + 1>(levels, step, table, magic, out);
    }
}

}  // namespace blockint
}  // namespace hybridcomp
