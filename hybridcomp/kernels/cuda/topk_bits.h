// topk on a GPU: what encoder and decoder share.
#pragma once

#include "warp_tiles.h"

#include "topk.h"

namespace hybridcomp {
namespace topk {

constexpr u32 WARPS = 8, THREADS = WARPS * WARP;

struct Settings {
    u32 bits, rice;  // of a value kept; low bits of a gap
    u32 most, last;  // values kept of a whole chunk, and of the last one
};

// A few bits into zeroed memory that several threads write.
HC_INLINE void put_bits(u8* out, u64 position, u32 bits) {
    if (bits) put_word((u32*)out + position / 32, (u32)(position % 32), bits);
}

// At most 32 bits from a payload of whole words, zeros behind it.
HC_INLINE u32 get_bits(const u8* in, u64 nbytes, u64 position, u32 count) {
    u64 word = position / 32;
    u32 low = 4 * word < nbytes ? ((const u32*)in)[word] : 0;
    u32 high = position % 32 + count > 32 && 4 * word + 4 < nbytes ? ((const u32*)in)[word + 1] : 0;
    u32 bits = funnel_right(low, high, (u32)position);
    return count < 32 ? bits & ((1u << count) - 1) : bits;
}

}  // namespace topk
}  // namespace hybridcomp
