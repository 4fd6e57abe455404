// Sum of a tile of blockint over ranks, by a warp (blockint_ring.h): adds the contributions in rank order, with
// or without error feedback, then stores or encodes the sum.
#pragma once

#include "blockint_ring.h"

namespace hybridcomp {
namespace blockint {

constexpr int SUM_WARPS = HC_SUM_THREADS / WARP;

// Shared memory of a warp. Feedback takes a second tile of fp32: the owner's residual, then that of the values,
// then the result.
template <class E, bool WIDE>
struct alignas(TABLE_ALIGN) Room : Table {
    Stage ring[HC_STAGES];
    Shared<typename E::Stored> own;
    Shared<float> wide;
};
template <class E>
struct alignas(TABLE_ALIGN) Room<E, false> : Table {
    Stage ring[HC_STAGES];
    Shared<typename E::Stored> own;
};

// This lane's block and tile in own values, residuals and sums. A message has less than 2^36 values, so a
// register holds the number of a block.
struct Span {
    u32 block;
    u64 count;  // of the message
    bool whole;  // all of the tile is there, and aligned
    // Recomputed from here on, instead of kept over a loop (`anew`).
    HC_INLINE_MEMBER Span again() const { return Span{anew(block), count, whole}; }
    HC_INLINE_MEMBER u64 tile() const { return block / TILE_BLOCKS; }
    HC_INLINE_MEMBER u64 tile_first() const { return tile() * TILE; }
    HC_INLINE_MEMBER u64 first() const { return (u64)block * BLOCK; }
    HC_INLINE_MEMBER u32 there() const {
        return first() >= count ? 0 : count - first() < BLOCK ? (u32)(count - first()) : BLOCK;
    }
};

// What this lane fetches of a tile, one rank after the other. What is the same for a block of threads
// stays apart from what is this lane's own, which has 32 bits: so no address of 64 is worked out a rank.
struct Fetches {
    static constexpr u32 LEVELS = TILE * HC_BITS / 8;  // bytes of a tile
    const u8 *levels, *scales;  // of the next rank: of this block of threads, of the message
    u64 slot;
    u32 level, other;              // from there on: levels, and the base or scales
    SharedAt levels_to, other_to;  // in the first stage
    u32 chunks, others;            // lanes that have some of them
    u32 base_at;                   // byte of `Stage::base`

    HC_INLINE_MEMBER Fetches(Stage* ring, const u8* payloads, u64 distance, const Layout& layout,
                             const Span& span, u32 blocks, u32 turn)
        : slot(distance) {
        u32 lane = lane_id(), tile = (u32)span.tile(), base = (u32)layout.blocks + tile;
        levels = payloads + (u64)turn * (SUM_WARPS * LEVELS);
        scales = payloads + layout.scales;
        level = threadIdx.x / WARP * LEVELS + CHUNK * lane;
        other = anew(lane ? tile * TILE_BLOCKS + 4 * lane - 4 : base & ~3u);
        levels_to = shared_at(ring->levels) +
                    CHUNK * swizzled<LEVELS_EACH>(lane / LEVELS_EACH, lane % LEVELS_EACH);
        other_to = shared_at(&ring->base) + 4 * lane;
        chunks = (blocks * 4 * HC_BITS + CHUNK - 1) / CHUNK;
        others = anew(1 + (blocks + 3) / 4);
        base_at = anew(base & 3);
    }
    HC_INLINE_MEMBER void next(u32 stage) {
        u32 at = stage * (u32)sizeof(Stage);
#pragma unroll
        for (u32 i = 0; i < LEVEL_CHUNKS; i += WARP) {
            if (lane_id() + i < chunks) fetch16(levels_to + at + CHUNK * i, levels + level + CHUNK * i);
        }
        if (lane_id() < others) fetch4(other_to + at, scales + other);
        levels += slot, scales += slot;
    }
};

// held += the own values, and `residual` unless it is null, which becomes zero.
template <class E, bool FEEDBACK, class R, class K>
HC_INLINE void add_own(float* held, R& room, const typename E::Stored* own, K residual,
                       const Span& span) {
    KeptBlock<HC_KEPT> few;
    bool there = span.first() < span.count;
    if (FEEDBACK && residual) {
        if constexpr (FEW) few.load(residual, span.block, there);
        else await_fetch<0>();
    }
#pragma unroll
    for (int i = 0; i < BLOCK / EACH; ++i) {
        E mine;
        EightFp32 kept;
        u64 at = span.first() + i * EACH;
        if (span.whole) read_eight(room.own, i, mine);
        else mine.load_some(own + at, eight_of(at, span.count));
        if constexpr (FEEDBACK && FEW) {
#pragma unroll
            for (int k = 0; k < EACH; ++k) kept.values[k] = few.value(i * EACH + k);
        } else if constexpr (FEEDBACK) {
            if (residual && span.whole) read_eight(room.wide, i, kept);
            else if (residual) kept.load_some(residual + at, eight_of(at, span.count));
        }
#pragma unroll
        for (int k = 0; k < EACH; ++k) {
            float value = mine.value(k);
            if (FEEDBACK && residual) value = kept.values[k] + value;
            held[i * EACH + k] = held[i * EACH + k] + value;
        }
        finish_iteration();
    }
    if constexpr (FEEDBACK && FEW) {
        if (residual && there) clear_kept<HC_KEPT>(residual, span.block);
    } else if constexpr (FEEDBACK) {
        if (!residual) return;
        if (span.whole) {
#pragma unroll
            for (u32 i = 0; i < TILE / 4; i += WARP) {
                store16(0.0f, 0.0f, 0.0f, 0.0f, residual + span.tile_first() + 4 * (i + lane_id()));
            }
        } else {
            for (u32 k = 0; k < span.there(); ++k) residual[span.first() + k] = 0.0f;
        }
    }
}

// Four values of this lane's block, from 4 * `at` on -> where `flush_chunks` writes them from.
HC_INLINE void write_chunk(const float* values, u32 at, Shared<float>& shared, float* out, const Span& span) {
    if (span.whole) {
        shared.mine(at) = make_uint4(float_bits(values[0]), float_bits(values[1]), float_bits(values[2]),
                                     float_bits(values[3]));
        return;
    }
#pragma unroll
    for (u32 k = 0; k < 4; ++k) {
        if (4 * at + k < span.there()) out[span.first() + 4 * at + k] = values[k];
    }
}

HC_INLINE void flush_chunks(const Shared<float>& shared, float* out, const Span& span) {
    if (!span.whole) return;
    sync_warp();
    shared.flush(out + span.tile_first());
}

// Initial values of a sum, fetched, then in registers.
HC_INLINE void fetch_start(Shared<float>& shared, const float* owner, const Span& span) {
    shared.fetch(owner + span.tile_first());
}
HC_INLINE void fetch_start(Shared<float>&, const FewBits&, const Span&) {}

HC_INLINE void start_from(float* held, Shared<float>& shared, const float* owner, const Span& span) {
#pragma unroll
    for (int i = 0; i < BLOCK / EACH; ++i) {
        EightFp32 start;
        u64 at = span.first() + i * EACH;
        if (span.whole) read_eight(shared, i, start);
        else start.load_some(owner + at, eight_of(at, span.count));
#pragma unroll
        for (int k = 0; k < EACH; ++k) held[i * EACH + k] = start.values[k];
        finish_iteration();
    }
    sync_warp();
}
HC_INLINE void start_from(float* held, Shared<float>&, const FewBits& owner, const Span& span) {
    KeptBlock<FEW ? HC_KEPT : 8> start;
    start.load(owner, span.block, span.first() < span.count);
#pragma unroll
    for (int k = 0; k < BLOCK; ++k) held[k] = start.value(k);
}

// held += `ranks` contributions to a tile of `numel` values, in rank order: this rank's own exact values,
// and the payloads of the others, `slot` bytes apart. With FEEDBACK there may be `owner`, fp32 or a residual,
// which the sum begins with, and one of the own values, which they take with them and which becomes 0.
// `turn`: the number of this block of threads among those of the message.
template <class E, bool FEEDBACK, class R, class K, class O>
HC_INLINE void add_ranks(float* held, R& room, const u8* payloads, const typename E::Stored* own, u64 ranks,
                         u64 me, u64 slot, K residual, O owner, const Span& span, u32 turn) {
    Layout layout(span.count);
    u32 blocks = layout.blocks_of(span.tile()), others = (u32)ranks - 1;
    bool group = !ROTATE || in_group(span.first(), span.count);
    if (span.whole) {
        room.own.fetch(own + span.tile_first());
        if constexpr (FEEDBACK) {
            if (owner) fetch_start(room.wide, owner, span);
        }
    }
    close_fetch();
    room.fill();  // the table
    Fetches fetches(room.ring, payloads, slot, layout, span, blocks, turn);
#pragma unroll
    for (u32 s = 0; s < HC_STAGES; ++s) {
        if (s < others) fetches.next(s);
        close_fetch();
    }
    await_fetch<HC_STAGES>();
    if constexpr (FEEDBACK) {
        if (owner) start_from(held, room.wide, owner, span);
        if constexpr (!FEW) {
            if (residual && span.whole) room.wide.fetch(residual + span.tile_first());
        }
        close_fetch();
    }
    Magic magic(room, span.block >> 31);
#pragma unroll 1
    for (u32 p = 0;; ++p) {  // of the others; this rank's turn is before that of the next
        if (p == (u32)me) add_own<E, FEEDBACK>(held, room, own, residual, span.again());
        if (p == others) break;
        await_fetch<HC_STAGES - 1>();
        const Stage& come = room.ring[p % HC_STAGES];
        add_stage(held, come, room, ((const u8*)&come.base)[fetches.base_at], blocks, group, magic);
        sync_warp();  // the stage was read
        if (p + HC_STAGES < others) fetches.next(p % HC_STAGES);
        close_fetch();
    }
}

constexpr u32 HALF_OVERFLOW = 0x477ff000u;  // 65520 is the smallest number that rounds to Inf
// Turns a sum that overflows fp16 into Inf, as natively, so that loss scaling detects it.
HC_INLINE float show_half(float value) {
    u32 bits = float_bits(value), magnitude = bits & MAGNITUDE;
    return magnitude >= HALF_OVERFLOW && magnitude < INF_BITS ? bits_float((bits & ~MAGNITUDE) | INF_BITS)
                                                            : value;
}

// The largest magnitude of a block as a float, NaN if one is NaN.
HC_INLINE float largest_magnitude(const float* values) {
    float top = larger_magnitude(values[0], values[1]);
#pragma unroll
    for (int k = 2; k < BLOCK; ++k) top = larger_magnitude(top, values[k]);
    return top;
}

// Quantizes and packs the values of a block from index `first` on.
HC_INLINE void store_block(const float* held, Factor factor, u32 first, u32* out) {
    u32 levels[WORDS], words[BLOCK_WORDS];
#pragma unroll
    for (int k = 0; k < WORDS; ++k) {
        u32 bytes[4];
#pragma unroll
        for (int b = 0; b < 4; ++b) {
            bytes[b] = quantized(held[k + 8 * b], factor, first + k + 8 * b);
        }
        u32 word = low_bytes(bytes[0], bytes[1], bytes[2], bytes[3]);
        levels[k] = factor.inverse == 0.0f ? 0 : word;
    }
    pack_levels<HC_BITS>(levels, words);
    if constexpr (HC_BITS % 4 == 0) {
#pragma unroll
        for (int i = 0; i < BLOCK_WORDS; i += 4) {
            store16(make_uint4(words[i], words[i + 1], words[i + 2], words[i + 3]), out + i);
        }
    } else {
#pragma unroll
        for (int i = 0; i < BLOCK_WORDS; ++i) out[i] = words[i];
    }
}

// What the levels of `held` leave out of it (rotated: of what waits in `shared`), into `owner`.
template <class E, class K>
HC_INLINE void settle_block(float* held, Factor factor, u32 code, u32 base, Shared<float>& shared,
                            K owner, const Span& span) {
    bool twice;
    float step = careful_step(code, base, twice);
    u32 first = (u32)span.first();
    if constexpr (ROTATE) {
#pragma unroll
        for (int k = 0; k < BLOCK; ++k) {
            held[k] = sent_value(quantized(held[k], factor, first + k), step);
            if (twice) held[k] = finite(held[k] * 2.0f);
        }
        rotate_block_back(held, in_group(span.first(), span.count));
    } else {
        sync_warp();  // all of the room was read
    }
    u32 there = span.there();
#pragma unroll
    for (u32 i = 0; i < BLOCK / 4; ++i) {
        float kept[4], sent[4];
        if constexpr (ROTATE) floats_of(shared.mine(i), kept);
#pragma unroll
        for (int k = 0; k < 4; ++k) {
            float value = held[4 * i + k];
            sent[k] = value;
            if constexpr (!ROTATE) {
                kept[k] = value;
                sent[k] = sent_value(quantized(value, factor, first + 4 * i + k), step);
                if (twice) sent[k] = finite(sent[k] * 2.0f);
            }
        }
        E::through(sent[0], sent[1]), E::through(sent[2], sent[3]);
#pragma unroll
        for (int k = 0; k < 4; ++k) {
            kept[k] = residual::left_out(kept[k], sent[k]);
            if (FEW) held[4 * i + k] = 4 * i + k < there ? kept[k] : 0.0f;
        }
        if constexpr (!FEW) write_chunk(kept, i, shared, owner, span);
        finish_iteration();
    }
    if constexpr (!FEW) flush_chunks(shared, owner, span);
    else if (there) store_kept_block<HC_KEPT>(held, owner, span.block);
}

}  // namespace blockint
}  // namespace hybridcomp
