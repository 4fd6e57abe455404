// Encodes and decodes a tile of blockint in the registers of a warp (blockint_quads.h), from and to plain
// pointers: all loads precede the first use, and alignment and the tail are checked once per warp. All lanes of
// the warp call these functions.
#pragma once

#include "blockint_feedback.h"

namespace hybridcomp {
namespace blockint {

// Stores in `residual` the error of the levels `q` of eight values, after receivers round to E. Rotated values
// take the registers of the values, which wait in the place of the residual.
template <class E>
HC_INLINE void settle(const float* values, const u32* q, u32 code, u32 base, float* residual, u64 at,
                      u64 count, bool whole) {
    bool twice;
    float step = careful_step(code, base, twice), sent[EACH], kept[EACH];
#pragma unroll
    for (int k = 0; k < EACH; ++k) {
        sent[k] = sent_value(q[k], step);
        if (twice) sent[k] = finite(sent[k] * 2.0f);
        kept[k] = values[k];
    }
    if constexpr (ROTATE) {
        EightFp32 before;
        if (whole) before.load(residual + at);
        else before.load_some(residual + at, eight_of(at, count));
        sync_warp();  // neighbours store each other's halves
        rotate_back_any(sent, whole || in_group(at, count));
#pragma unroll
        for (int k = 0; k < EACH; ++k) kept[k] = before.values[k];
    }
#pragma unroll
    for (int k = 0; k < EACH; k += 2) {
        float a = sent[k], b = sent[k + 1];
        E::through(a, b);
        kept[k] = residual::left_out(kept[k], a), kept[k + 1] = residual::left_out(kept[k + 1], b);
    }
    store_eight(kept, residual, at, count, whole);
}

// A tile in registers -> its place in the payload `out` of `count` values. With a `residual` (else null),
// what receivers that round to E do not get goes there; `whole`: it is all there, and aligned. One of few
// bits takes that from where the sum was, in the end.
template <class E, bool SETTLE, class H, class R>
HC_INLINE void encode_held(H* held, u64 tile, u64 count, u8* out, R residual, bool whole) {
    Layout layout(count);
    Place place;
    u32 tops[ROUNDS];
#pragma unroll
    for (int i = 0; i < ROUNDS; ++i) tops[i] = held[i].magnitude();
    u32 absmax = H::magnitude_bits_of(scatter_largest<sizeof(typename H::Stored) == 2>(tops, place.part));
    u32 base = base_of(largest_in_warp(absmax < INF_BITS ? absmax : 0));
    u32 code = scale_code<SPACING>(absmax, base);
    Factor factor = factor_of(code, base);
    if constexpr (LLOYD) {
        u32 gains[ROUNDS];
#pragma unroll
        for (int i = 0; i < ROUNDS; ++i) {
            float scale = bits_float(of_round(float_bits(factor.inverse), i, place)), values[EACH];
#pragma unroll
            for (int k = 0; k < EACH; ++k) values[k] = held[i].value(k);
            gains[i] = gains_of(values, scale);
        }
        choose_scale(scatter_sum(gains, place.part), base, code, factor);
    }
    u64 first = tile * TILE_BLOCKS;
    u32 blocks = layout.blocks_of(tile);
    u32* words = (u32*)out + first * HC_BITS;
#pragma unroll
    for (int i = 0; i < ROUNDS; ++i) {
        Factor scale = {bits_float(of_round(float_bits(factor.inverse), i, place)), 0.0f};
        if constexpr (LLOYD) scale.share = bits_float(of_round(float_bits(factor.share), i, place));
        u32 q[EACH], start = (u32)tile * TILE + i * ROUND + lane_id() * EACH;
#pragma unroll
        for (int k = 0; k < EACH; ++k) q[k] = quantized(held[i].value(k), scale, start + k);
        store_levels(q, scale.inverse == 0.0f, place.block(i) < blocks, words + place.block(i) * HC_BITS,
                     place.part);
        if constexpr (SETTLE) {
            u32 known = of_round(code, i, place);
            u64 at = tile * TILE + i * ROUND + lane_id() * EACH;
            if constexpr (FEW) residual.settle(held[i], i, q, known, base);
            else if (residual) settle<E>(held[i].values, q, known, base, residual, at, count, whole);
        }
    }
    if constexpr (SETTLE && FEW) residual.finish(held, place);
    if (place.own_block() < blocks) out[layout.scales + first + place.own_block()] = (u8)code;
    if (lane_id() == 0) out[layout.bases + tile] = (u8)base;
    if (tile + 1 == layout.tiles) pad_payload(out, layout.used, layout.total);
}

// Tile `tile` of `count` values -> its place in their payload, which begins at `out`. With FEEDBACK,
// values + residual is sent, and the residual becomes what is left; HELD: it has the sum already, and
// nothing is read at `values`.
template <class E, bool FEEDBACK, bool HELD = false, class K = float*>
HC_INLINE void encode_tile(const typename E::Stored* values, u64 count, u64 tile, u8* out, K residual) {
    u64 first = tile * TILE;
    bool full = first + TILE <= count;
    if constexpr (FEW) {
        FewFeedback<E> feedback = {values, residual, tile, count, full};
        EightFp32 sums[ROUNDS];
        feedback.load(sums);
        encode_held<EightFp32, true>(sums, tile, count, out, feedback, false);
        return;
    } else {
        E held[ROUNDS];
        if constexpr (!HELD) load_tile(held, values, first, count, full && whole_vectors(values));
        if constexpr (!FEEDBACK && !ROTATE) {
            encode_held<E, false>(held, tile, count, out, (float*)nullptr, false);
            return;
        } else {
            bool whole = FEEDBACK && full && whole_vectors(residual);
            EightFp32 sums[ROUNDS];
            if constexpr (FEEDBACK) load_tile(sums, residual, first, count, whole);
#pragma unroll
            for (int i = 0; i < ROUNDS; ++i) {
                u64 at = first + i * ROUND + lane_id() * EACH;
#pragma unroll
                for (int k = 0; k < EACH; ++k) {
                    float value = -0.0f;  // changes nothing
                    if constexpr (!HELD) value = held[i].value(k);
                    sums[i].values[k] = FEEDBACK ? sums[i].values[k] + value : value;
                }
                if constexpr (ROTATE) {
                    if (FEEDBACK) {
                        if (whole) {
                            sums[i].store(residual + at);
                        } else {
                            u32 there = eight_of(at, count);
                            HC_UNROLL_FOR_AMD
                            for (u32 k = 0; k < EACH && k < there; ++k) residual[at + k] = sums[i].values[k];
                        }
                    }
                    rotate(sums[i].values, full || in_group(at, count));
                }
            }
            // receivers add it up in fp32
            encode_held<EightFp32, FEEDBACK>(sums, tile, count, out, residual, whole);
        }
    }
}

// Places of a lane's eight decoded values: consecutive for 16 bits.
template <class E>
struct Target : E {
    HC_INLINE u32 index(u32 k) { return k; }
    HC_INLINE u32 offset(u32 part) { return EACH * part; }
    HC_INLINE void arrange(float*) {}
    HC_INLINE void arrange_levels(u32*) {}
};

// Of fp32, four and, after those of a neighbour, four more: memory is written in whole sectors.
template <>
struct Target<EightFp32> : EightFp32 {
    HC_INLINE u32 index(u32 k) { return k < 4 ? k : k + 4; }
    HC_INLINE u32 offset(u32 part) { return EACH * (part & ~1u) + 4 * (part & 1); }
    HC_INLINE void arrange_levels(u32* levels) {
        bool odd = lane_id() & 1;
        u32 other = other_lane<1>(odd ? levels[0] : levels[1]);
        levels[0] = odd ? other : levels[0], levels[1] = odd ? levels[1] : other;
    }
    HC_INLINE void arrange(float* v) {
        bool odd = lane_id() & 1;
#pragma unroll
        for (int k = 0; k < 4; ++k) {
            float other = other_lane_float(odd ? v[k] : v[k + 4], 1);
            v[k] = odd ? other : v[k], v[k + 4] = odd ? v[k + 4] : other;
        }
    }
    HC_INLINE_MEMBER void load(const float* at) { load_apart(at, 8); }
    HC_INLINE_MEMBER void store(float* at) const { store_apart(at, 8); }
};

// `any`: there may be a NaN among the values.
template <class T, bool ADD>
HC_INLINE void write_values(const float* values, bool any, typename T::Stored* out, u64 at, u64 count,
                            bool vectors) {
    T eight;
    if (vectors && at + 2 * EACH <= count) {
        float sums[EACH];
        if constexpr (ADD) eight.load(out + at);
#pragma unroll
        for (int k = 0; k < EACH; ++k) sums[k] = ADD ? eight.value(k) + values[k] : values[k];
        if (any) eight.set_any(sums);
        else eight.set(sums);
        eight.store(out + at);
        return;
    }
    eight.set_any(values);
#pragma unroll
    for (u32 k = 0; k < EACH; ++k) {
        u64 i = at + T::index(k);
        if (i >= count) continue;
        if constexpr (ADD) out[i] = out[i] + values[k];
        else out[i] = eight.stored((int)k);
    }
}

// Decodes tile `tile` of the payload `in` of `count` values, which begin at `out`. ADD: adds to the fp32 values
// there.
template <class E, bool ADD>
HC_INLINE void decode_tile(const u8* in, u64 count, u64 tile, typename E::Stored* out) {
    typedef Target<E> T;
    Layout layout(count);
    Place place;
    bool vectors = whole_vectors(out);
    u64 first = tile * TILE_BLOCKS;
    u32 blocks = layout.blocks_of(tile), base = in[layout.bases + tile];
    const u32* words = (const u32*)in + first * HC_BITS;
    u32 code = place.own_block() < blocks ? in[layout.scales + first + place.own_block()] : LAST_CODE;
    Words loaded[ROUNDS];
#pragma unroll
    for (int i = 0; i < ROUNDS; ++i) {
        loaded[i] = load_words(words + place.block(i) * HC_BITS, place.block(i) < blocks, place.part);
    }
    u64 at = tile * TILE + place.group * BLOCK, start = at + T::offset(place.part);
    if (ballot(needs_care(code, base))) {
#pragma unroll 1
        for (int i = 0; i < ROUNDS; ++i) {
            u32 block = place.block(i), levels[2], known = of_round(code, i, place);
            bool twice;
            float values[EACH], step = careful_step(known, base, twice);
            unpack_words(load_words(words + block * HC_BITS, block < blocks, place.part), place.part,
                         levels);
            dequantized(levels, step, values);
#pragma unroll
            for (int k = 0; k < EACH; ++k) {
                if (twice) values[k] = finite(values[k] * 2.0f);
                if (known == NONFINITE_CODE) values[k] = bits_float(QUIET_NAN_BITS);
            }
            if constexpr (ROTATE) rotate_back_any(values, in_group(at + i * ROUND, count));
            T::arrange(values);
            write_values<T, ADD>(values, true, out, start + i * ROUND, count, vectors);
        }
        return;
    }
    float step = step_of<HC_BITS, SPACING>(code, base);
#pragma unroll
    for (int i = 0; i < ROUNDS; ++i) {
        u32 levels[2];
        float values[EACH], scale = bits_float(of_round(float_bits(step), i, place));
        unpack_words(loaded[i], place.part, levels);
        if constexpr (!ROTATE) T::arrange_levels(levels);
        dequantized(levels, scale, values);
        if constexpr (ROTATE) {
            rotate_back(values, in_group(at + i * ROUND, count));
            T::arrange(values);
        }
        write_values<T, ADD>(values, false, out, start + i * ROUND, count, vectors);
    }
}

}  // namespace blockint
}  // namespace hybridcomp
