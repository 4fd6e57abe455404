// Residuals of error feedback with HC_KEPT bits per value and a step for every 32 (residual.h), for blockint's
// kernels. An image has the kernels of one HC_KEPT; at 32 residuals are plain fp32. Either four lanes share a
// block, eight values each, as in blockint_quads.h, or one lane has all of it, as in blockint_ring.h.
#pragma once

#include "blockint_quads.h"
#include "residual.h"

#ifndef HC_KEPT
#define HC_KEPT 32
#endif

namespace hybridcomp {
namespace blockint {

constexpr bool FEW = HC_KEPT < 32;

// Where the residual of a message begins, at a multiple of 32 values of the whole.
struct FewBits {
    u8* levels;
    u16* steps;
    HC_INLINE_MEMBER FewBits operator+(u64 first) const {
        return {levels + first / 8 * HC_KEPT, steps + first / BLOCK};
    }
    HC_INLINE_MEMBER explicit operator bool() const { return levels; }
    HC_INLINE_MEMBER u32* words(u64 block) const { return (u32*)levels + block * HC_KEPT; }
};

template <bool THERE>
struct KeptAt {
    typedef float* Type;
};
template <>
struct KeptAt<true> {
    typedef FewBits Type;
};
typedef KeptAt<FEW>::Type Kept;

// From the words of a table's row.
HC_INLINE void point(float*& residual, u64 values, u64) { residual = (float*)values; }
HC_INLINE void point(FewBits& residual, u64 levels, u64 steps) {
    residual = FewBits{(u8*)levels, (u16*)steps};
}

// The level in the lowest BITS bits of a byte whose sign bits were flipped: so it counts from 0.
template <int BITS>
HC_INLINE float kept_level(u32 byte) {
    return bits_float(LEVEL_MAGIC | byte) - (8388608.0f + (float)(1 << (BITS - 1)));
}

HC_INLINE float half_of(u32 both, bool upper) { return bits_float(upper ? both & 0xffff0000u : both << 16); }

// The words that a lane loads for its eight values of a block, part `part`.
template <int BITS>
struct KeptWords {
    static constexpr int COUNT = BITS / 4;
    u32 words[COUNT];
    HC_INLINE_MEMBER void load(const FewBits& from, u64 block, bool there, u32 part) {
        const u32* at = from.words(block) + part * COUNT;
#pragma unroll
        for (int i = 0; i < COUNT; ++i) words[i] = 0;
        if (!there) return;
        if constexpr (BITS == 16) {
            uint4 v = load16(at);
            words[0] = v.x, words[1] = v.y, words[2] = v.z, words[3] = v.w;
        } else if constexpr (BITS == 8) {
            uint2 v = *(const uint2*)at;
            words[0] = v.x, words[1] = v.y;
        } else {
            words[0] = *at;
        }
    }
    // All lanes of the warp.
    HC_INLINE_MEMBER void values(float step, u32 part, float* out) const {
        if constexpr (BITS == 16) {
#pragma unroll
            for (int k = 0; k < EACH; ++k) out[k] = half_of(words[k / 2], k & 1);
        } else {
            u32 halves[2], word = transpose_bytes(words[0], part);
            if constexpr (BITS == 8) {
                u32 odd = transpose_bytes(words[1], part);
                halves[0] = pick_bytes(word, odd, 0x5140) ^ 0x80808080u;
                halves[1] = pick_bytes(word, odd, 0x7362) ^ 0x80808080u;
            } else {
                word ^= 0x88888888u;
                halves[0] = word & 0x0f0f0f0fu, halves[1] = word >> 4 & 0x0f0f0f0fu;
            }
#pragma unroll
            for (int k = 0; k < EACH; ++k) {
                out[k] = kept_level<BITS>(halves[k / 4] >> 8 * (k % 4) & 255u) * step;
            }
        }
    }
};

// Stores eight values of each lane; `inverse` is that of the block's step. All lanes of the warp call it.
template <int BITS>
HC_INLINE void store_kept(const float* values, float inverse, u32* at, bool there, u32 part) {
    at += part * (BITS / 4);
    if constexpr (BITS == 16) {
        EightBf16 eight;
        eight.set(values);
        if (there) eight.store((u16*)at);
    } else {
        u32 q[EACH];
#pragma unroll
        for (int k = 0; k < EACH; ++k) q[k] = residual::level_of(values[k], inverse);
        if constexpr (BITS == 8) {
            u32 even = transpose_bytes(low_bytes(q[0], q[2], q[4], q[6]), part);
            u32 odd = transpose_bytes(low_bytes(q[1], q[3], q[5], q[7]), part);
            if (there) *(uint2*)at = make_uint2(even, odd);
        } else {
#pragma unroll
            for (int k = 0; k < 4; ++k) q[k] = (q[k] & 15u) | q[k + 4] << 4;
            u32 word = transpose_bytes(low_bytes(q[0], q[1], q[2], q[3]), part);
            if (there) *at = word;
        }
    }
}

// A tile of a residual, of which there are `blocks` blocks, in the registers of a warp.
template <int BITS>
struct KeptTile {
    KeptWords<BITS> words[ROUNDS];
    u32 code;  // of the step of this lane's own block
    HC_INLINE_MEMBER void load(const FewBits& from, u64 tile, u32 blocks, const Place& place) {
        u64 first = tile * TILE_BLOCKS;
#pragma unroll
        for (int i = 0; i < ROUNDS; ++i) {
            words[i].load(from, first + place.block(i), place.block(i) < blocks, place.part);
        }
        code = BITS <= 8 && place.own_block() < blocks ? from.steps[first + place.own_block()] : 0;
    }
    HC_INLINE_MEMBER void values(int round, const Place& place, float* out) const {
        float step = BITS <= 8 ? residual::step_of(of_round(code, round, place)) : 0.0f;
        words[round].values(step, place.part, out);
    }
};

// Stores the residual of a tile, which is finite, and 0 past the end of the message.
template <int BITS>
HC_INLINE void store_kept_tile(const EightFp32* left, const FewBits& to, u64 tile, u32 blocks,
                               const Place& place) {
    u64 first = tile * TILE_BLOCKS;
    float inverse = 0.0f;
    if constexpr (BITS <= 8) {
        u32 tops[ROUNDS];
#pragma unroll
        for (int i = 0; i < ROUNDS; ++i) tops[i] = left[i].magnitude();
        u32 code = residual::step_code<BITS>(scatter_largest<false>(tops, place.part));
        inverse = 1.0f / residual::step_of(code);
        if (place.own_block() < blocks) to.steps[first + place.own_block()] = (u16)code;
    }
#pragma unroll
    for (int i = 0; i < ROUNDS; ++i) {
        float scale = BITS <= 8 ? bits_float(of_round(float_bits(inverse), i, place)) : 0.0f;
        u32 block = place.block(i);
        store_kept<BITS>(left[i].values, scale, to.words(first + block), block < blocks, place.part);
    }
}

// What is left of one block for every four lanes, as above, which leaves more registers and takes longer.
template <int BITS>
HC_INLINE void store_kept_blocks(const EightFp32& left, const FewBits& to, u64 block, bool there, u32 part) {
    float inverse = 0.0f;
    if constexpr (BITS <= 8) {
        u32 code = residual::step_code<BITS>(largest_of<1, 2>(left.magnitude()));
        inverse = 1.0f / residual::step_of(code);
        if (there && part == 0) to.steps[block] = (u16)code;
    }
    store_kept<BITS>(left.values, inverse, to.words(block), there, part);
}

// The residual of a block in one lane.
template <int BITS>
struct KeptBlock {
    u32 words[BITS];
    float step;
    HC_INLINE_MEMBER void load(const FewBits& from, u64 block, bool there) {
#pragma unroll
        for (int i = 0; i < BITS; i += 4) {
            uint4 v = there ? load16(from.words(block) + i) : make_uint4(0, 0, 0, 0);
            words[i] = v.x, words[i + 1] = v.y, words[i + 2] = v.z, words[i + 3] = v.w;
        }
        step = BITS <= 8 && there ? residual::step_of(from.steps[block]) : 0.0f;
    }
    // `k` is known when this is compiled.
    HC_INLINE_MEMBER float value(int k) const {
        if constexpr (BITS == 16) {
            return half_of(words[k / 2], k & 1);
        } else if constexpr (BITS == 8) {
            return kept_level<8>((words[k % 8] ^ 0x80808080u) >> 8 * (k / 8) & 255u) * step;
        } else {
            return kept_level<4>((words[k % 4] ^ 0x88888888u) >> (8 * (k / 8) + k % 8 / 4 * 4) & 15u) * step;
        }
    }
};

// Zeros in place of a block. Its step stays, as on a CPU.
template <int BITS>
HC_INLINE void clear_kept(const FewBits& at, u64 block) {
#pragma unroll
    for (int i = 0; i < BITS; i += 4) store16(make_uint4(0, 0, 0, 0), at.words(block) + i);
}

// Stores the values of a block, which are finite, and 0 past the end of the message.
template <int BITS>
HC_INLINE void store_kept_block(const float* values, const FewBits& to, u64 block) {
    u32 words[BITS];
    if constexpr (BITS == 16) {
#pragma unroll
        for (int i = 0; i < BITS; ++i) words[i] = narrow_bf16(values[2 * i], values[2 * i + 1]);
    } else {
        u32 top = 0;
#pragma unroll
        for (int k = 0; k < BLOCK; ++k) top = larger(top, magnitude_bits(values[k]));
        u32 code = residual::step_code<BITS>(top);
        float inverse = 1.0f / residual::step_of(code);
        to.steps[block] = (u16)code;
#pragma unroll
        for (int j = 0; j < BITS; ++j) {
            u32 bytes[4];
#pragma unroll
            for (int b = 0; b < 4; ++b) {
                bytes[b] = residual::level_of(values[8 * b + j], inverse);
                if constexpr (BITS == 4) {
                    bytes[b] = (bytes[b] & 15u) | residual::level_of(values[8 * b + j + 4], inverse) << 4;
                }
            }
            words[j] = low_bytes(bytes[0], bytes[1], bytes[2], bytes[3]);
        }
    }
#pragma unroll
    for (int i = 0; i < BITS; i += 4) {
        store16(make_uint4(words[i], words[i + 1], words[i + 2], words[i + 3]), to.words(block) + i);
    }
}

}  // namespace blockint
}  // namespace hybridcomp

// A residual among the arguments of a kernel, and inside the kernel.
#if HC_KEPT < 32
#define HC_LEFT(NAME) u8 *NAME, u16 *NAME##_steps
#define HC_LEFT_OF(NAME) FewBits{NAME, NAME##_steps}
#else
#define HC_LEFT(NAME) float* NAME
#define HC_LEFT_OF(NAME) NAME
#endif
