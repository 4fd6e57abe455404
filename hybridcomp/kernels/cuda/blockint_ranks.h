// What a warp does with a tile of blockint that ranks add up (blockint_ring.h): the contributions in rank
// order, with error feedback or not, then what becomes of the sum.
#pragma once

#include "blockint_ring.h"

namespace hybridcomp {
namespace blockint {

// One iteration after the other, where all at once need more registers than there are.
HC_INLINE void finish_iteration() { asm volatile("" ::: "memory"); }

constexpr int SUM_WARPS = HC_SUM_THREADS / WARP;

// What a warp has in shared memory. Feedback has a second tile of fp32: the owner's residual, then that
// of the values, then what is written.
template <class E, bool WIDE>
struct Room {
    Stage ring[HC_STAGES];
    Table table;
    Shared<typename E::Stored> own;
    Shared<float> wide;
};
template <class E>
struct Room<E, false> {
    Stage ring[HC_STAGES];
    Table table;
    Shared<typename E::Stored> own;
};

// A tile of the own values, of residuals and of sums: where it is, and how it may be moved.
struct Span {
    u64 first, count;  // of the message: this lane's block, and all
    bool whole;        // all of the tile is there, and aligned
    HC_INLINE_MEMBER u32 there() const {
        return first >= count ? 0 : count - first < BLOCK ? (u32)(count - first) : BLOCK;
    }
};

// held += the own values, with `residual` (else null), which becomes zero.
template <class E, bool FEEDBACK, class R>
HC_INLINE void add_own(float* held, R& room, const typename E::Stored* own, float* residual, u64 tile,
                       const Span& span) {
    if (FEEDBACK && residual) await_fetch<0>();
#pragma unroll
    for (int i = 0; i < BLOCK / EACH; ++i) {
        E mine;
        EightFp32 kept;
        u64 at = span.first + i * EACH;
        if (span.whole) read_eight(room.own, i, mine);
        else mine.load_some(own + at, eight_of(at, span.count));
        if constexpr (FEEDBACK) {
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
    if constexpr (FEEDBACK) {
        if (!residual) return;
        if (span.whole) {
#pragma unroll
            for (u32 i = 0; i < TILE / 4; i += WARP) {
                store16(0.0f, 0.0f, 0.0f, 0.0f, residual + tile * TILE + 4 * (i + lane_id()));
            }
        } else {
            for (u32 k = 0; k < span.there(); ++k) residual[span.first + k] = 0.0f;
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
        if (4 * at + k < span.there()) out[span.first + 4 * at + k] = values[k];
    }
}

HC_INLINE void flush_chunks(const Shared<float>& shared, float* out, u64 tile, const Span& span) {
    if (!span.whole) return;
    __syncwarp();
    shared.flush(out + tile * TILE);
}

// held += `ranks` contributions to a tile of `numel` values, in rank order: this rank's own exact values,
// and the payloads of the others, `slot` bytes apart. With FEEDBACK there may be the residual `owner`,
// which the sum begins with, and one of the own values, which they take with them and which becomes 0.
template <class E, bool FEEDBACK, class R>
HC_INLINE void add_ranks(float* held, R& room, const u8* payloads, const typename E::Stored* own, u64 ranks,
                         u64 me, u64 slot, float* residual, const float* owner, u64 tile,
                         const Span& span) {
    Layout layout(span.count);
    u32 blocks = layout.blocks_of(tile), others = (u32)ranks - 1, lane = lane_id();
    bool group = !ROTATE || in_group(span.first, span.count);
    if (span.whole) {
        room.own.fetch(own + tile * TILE);
        if constexpr (FEEDBACK) {
            if (owner) room.wide.fetch(owner + tile * TILE);
        }
    }
    close_fetch();
    room.table.fill();
#pragma unroll
    for (u32 s = 0; s < HC_STAGES; ++s) {
        if (s < others) fetch_stage(room.ring[s], payloads + s * slot, layout, tile, blocks);
        close_fetch();
    }
    // the base exponents of 32 ranks, one a lane
    u32 bases = lane < others ? payloads[lane * slot + layout.bases + tile] : 0;
    await_fetch<HC_STAGES>();
    if constexpr (FEEDBACK) {
        if (owner) {
#pragma unroll
            for (int i = 0; i < BLOCK / EACH; ++i) {
                EightFp32 start;
                u64 at = span.first + i * EACH;
                if (span.whole) read_eight(room.wide, i, start);
                else start.load_some(owner + at, eight_of(at, span.count));
#pragma unroll
                for (int k = 0; k < EACH; ++k) held[i * EACH + k] = start.values[k];
                finish_iteration();
            }
            __syncwarp();
        }
        if (residual && span.whole) room.wide.fetch(residual + tile * TILE);
        close_fetch();
    }
    u32 next = 0, p = 0;  // where in the ring, and which of the others
#pragma unroll 1
    for (u32 rank = 0; rank < (u32)ranks; ++rank) {
        if (rank == (u32)me) {
            add_own<E, FEEDBACK>(held, room, own, residual, tile, span);
            continue;
        }
        if (p % WARP == 0 && p) bases = p + lane < others ? payloads[(p + lane) * slot + layout.bases + tile] : 0;
        await_fetch<HC_STAGES - 1>();
        add_stage(held, room.ring[next], room.table, lane_value(bases, p % WARP), blocks, group);
        __syncwarp();  // the stage was read
        if (p + HC_STAGES < others) {
            fetch_stage(room.ring[next], payloads + (p + HC_STAGES) * slot, layout, tile, blocks);
        }
        close_fetch();
        next = next + 1 == HC_STAGES ? 0 : next + 1;
        ++p;
    }
}

// What is left of a sum that overflows fp16: Inf, as it comes out natively, where loss scaling sees it.
HC_INLINE float show_half(float value) {
    u32 bits = float_bits(value), magnitude = bits & MAGNITUDE;
    // 65520 is the smallest number that rounds to Inf
    return magnitude >= 0x477ff000u && magnitude < INF_BITS ? bits_float((bits & ~MAGNITUDE) | INF_BITS)
                                                            : value;
}

// The levels of a block -> its words.
HC_INLINE void store_block(const float* held, float inverse, u32* out) {
    u32 levels[WORDS], words[BLOCK_WORDS];
#pragma unroll
    for (int k = 0; k < WORDS; ++k) {
        u32 word = low_bytes(quantized(held[k], inverse), quantized(held[k + 8], inverse),
                             quantized(held[k + 16], inverse), quantized(held[k + 24], inverse));
        levels[k] = inverse == 0.0f ? 0 : word;
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
template <class E>
HC_INLINE void settle_block(float* held, float inverse, u32 code, u32 base, Shared<float>& shared,
                            float* owner, u64 tile, const Span& span) {
    bool twice;
    float step = careful_step(code, base, twice);
    if constexpr (ROTATE) {
#pragma unroll
        for (int k = 0; k < BLOCK; ++k) {
            held[k] = sent_value(quantized(held[k], inverse), step);
            if (twice) held[k] = finite(held[k] * 2.0f);
        }
        rotate_block_back(held, in_group(span.first, span.count));
    } else {
        __syncwarp();  // all of the room was read
    }
#pragma unroll
    for (u32 i = 0; i < BLOCK / 4; ++i) {
        float kept[4], sent[4];
        if constexpr (ROTATE) floats_of(shared.mine(i), kept);
#pragma unroll
        for (int k = 0; k < 4; ++k) {
            float value = held[4 * i + k];
            sent[k] = value;
            if constexpr (!ROTATE) {
                kept[k] = value, sent[k] = sent_value(quantized(value, inverse), step);
                if (twice) sent[k] = finite(sent[k] * 2.0f);
            }
        }
        E::through(sent[0], sent[1]), E::through(sent[2], sent[3]);
#pragma unroll
        for (int k = 0; k < 4; ++k) kept[k] = left_out(kept[k], sent[k]);
        write_chunk(kept, i, shared, owner, span);
        finish_iteration();
    }
    flush_chunks(shared, owner, tile, span);
}

}  // namespace blockint
}  // namespace hybridcomp
