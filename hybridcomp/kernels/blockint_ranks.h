// What a warp does with a tile of blockint that ranks add up (blockint_ring.h): the contributions in rank
// order, with error feedback or not, then what becomes of the sum.
#pragma once

#include "blockint_ring.h"

namespace hybridcomp {
namespace blockint {

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
    bool whole, next;  // all of the tile, of the next one, is there, and aligned
    HC_INLINE_MEMBER Span(u64 tile, u64 following, u64 count, bool aligned)
        : first(tile * TILE + lane_id() * BLOCK), count(count),
          whole((tile + 1) * TILE <= count && aligned),
          next(following < count / TILE && aligned) {}
    HC_INLINE_MEMBER u32 there() const {
        return first >= count ? 0 : count - first < BLOCK ? (u32)(count - first) : BLOCK;
    }
};

// What is added up: the payloads of the other ranks, `slot` bytes apart, and this rank's values.
template <class E>
struct Sources {
    const u8* payloads;
    const typename E::Stored* own;
    u64 slot;
    u32 ranks, me, others, depth;  // `depth`: how many payloads are under way
    HC_INLINE_MEMBER Sources(const u8* payloads, const void* own, u64 ranks, u64 me, u64 slot)
        : payloads(payloads), own((const typename E::Stored*)own), slot(slot), ranks((u32)ranks),
          me((u32)me), others((u32)ranks - 1), depth(others < HC_STAGES ? others : HC_STAGES) {}
};

// held += the own values, with `residual` (else null), which becomes zero.
template <class E, bool FEEDBACK, class R>
HC_INLINE void add_own(float* held, R& room, const typename E::Stored* own, float* residual, u64 tile,
                       const Span& span) {
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

// The base exponents of a tile of 32 ranks, one a lane.
template <class E>
HC_INLINE u32 bases_of(const Sources<E>& from, const Layout& layout, u64 tile, u32 first) {
    u32 rank = first + lane_id();
    return rank < from.others && tile < layout.tiles ? from.payloads[rank * from.slot + layout.bases + tile]
                                                     : 0;
}

// Sends for what the first tile of a warp needs.
template <class E, bool FEEDBACK, class R>
HC_INLINE void start_ranks(R& room, const Sources<E>& from, const Layout& layout, const float* owner,
                           u64 tile, const Span& span) {
    if (span.whole) {
        room.own.fetch(from.own + tile * TILE);
        if constexpr (FEEDBACK) {
            if (owner) room.wide.fetch(owner + tile * TILE);
        }
    }
    close_fetch();
    room.table.fill();
    for (u32 s = 0; s < from.depth; ++s) {
        fetch_stage(room.ring[s], from.payloads + s * from.slot, layout, tile, layout.blocks_of(tile));
        close_fetch();
    }
}

// held += all contributions to a tile, in rank order: this rank's own exact values, and the payloads of
// the others. With FEEDBACK there may be a `residual` of the own values, which they take with them and
// which becomes 0. While the last ranks of a tile are added, the first ones of `following` are sent for.
template <class E, bool FEEDBACK, class R>
HC_INLINE void add_ranks(float* held, R& room, const Sources<E>& from, const Layout& layout,
                         float* residual, u64 tile, u64 following, const Span& span, u32 bases,
                         u32& next) {
    u32 blocks = layout.blocks_of(tile), p = 0;  // which of the others
    u32 later = following < layout.tiles ? layout.blocks_of(following) : 0;
    bool group = !ROTATE || in_group(span.first, span.count);
#pragma unroll 1
    for (u32 rank = 0; rank < from.ranks; ++rank) {
        if (rank == from.me) {
            if ((FEEDBACK && residual) || from.others <= HC_STAGES) await_fetch<0>();
            else if (rank == 0) await_fetch<HC_STAGES>();  // later, this was waited for
            add_own<E, FEEDBACK>(held, room, from.own, residual, tile, span);
            if constexpr (!FEEDBACK) {
                __syncwarp();  // they were read
                if (span.next) room.own.fetch(from.own + following * TILE);
            }
            continue;
        }
        if (p % WARP == 0 && p) bases = bases_of(from, layout, tile, p);
        await_stage(from.depth);
        add_stage(held, room.ring[next], room.table, lane_value(bases, p % WARP), blocks, group);
        __syncwarp();  // the stage was read
        u32 then = p + from.depth;
        if (then < from.others) {
            fetch_stage(room.ring[next], from.payloads + then * from.slot, layout, tile, blocks);
        } else if (!FEEDBACK && later) {
            fetch_stage(room.ring[next], from.payloads + (then - from.others) * from.slot, layout,
                        following, later);
        }
        close_fetch();
        next = next + 1 == from.depth ? 0 : next + 1;
        ++p;
    }
}

// held = the residual `owner`, which the sum begins with; then that of the own values is sent for. `deep`:
// HC_STAGES payloads were sent for after it.
template <class R>
HC_INLINE void start_with(float* held, R& room, const float* owner, const float* residual, u64 tile,
                          const Span& span, bool deep) {
    if (owner) {
        if (deep) await_fetch<HC_STAGES>();
        else await_fetch<0>();
#pragma unroll
        for (int i = 0; i < BLOCK / EACH; ++i) {
            EightFp32 start;
            u64 at = span.first + i * EACH;
            if (span.whole) read_eight(room.wide, i, start);
            else start.load_some(owner + at, eight_of(at, span.count));
#pragma unroll
            for (int k = 0; k < EACH; ++k) held[i * EACH + k] = start.values[k];
        }
        __syncwarp();
    }
    if (residual && span.whole) room.wide.fetch(residual + tile * TILE);
    close_fetch();
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
    }
    flush_chunks(shared, owner, tile, span);
}

// A sum in registers -> its place in `out`. With FEEDBACK, what is left out goes to `owner` (or null).
template <class E, bool FEEDBACK, class R>
HC_INLINE void encode_sum(float* held, R& room, const Layout& layout, u8* out, float* owner, u64 tile,
                          const Span& span) {
    if constexpr (ROTATE && FEEDBACK) {  // they wait there, also where the tile is not whole
        __syncwarp();
#pragma unroll
        for (u32 i = 0; i < BLOCK / 4; ++i) {
            room.wide.mine(i) = make_uint4(float_bits(held[4 * i]), float_bits(held[4 * i + 1]),
                                           float_bits(held[4 * i + 2]), float_bits(held[4 * i + 3]));
        }
    }
    if constexpr (ROTATE) rotate_block(held, in_group(span.first, span.count));
    float top = larger_magnitude(held[0], held[1]);
#pragma unroll
    for (int k = 2; k < BLOCK; ++k) top = larger_magnitude(top, held[k]);
    u32 absmax = magnitude_bits(top), base = base_of(largest_in_warp(absmax < INF_BITS ? absmax : 0));
    u32 code = scale_code<GAUSSIAN>(absmax, base);
    float inverse = code == NONFINITE_CODE ? 0.0f : inverse_step<HC_BITS, GAUSSIAN>(code, base);
    u64 block = tile * TILE_BLOCKS + lane_id();
    if (block < layout.blocks) {
        store_block(held, inverse, (u32*)out + block * HC_BITS);
        out[layout.scales + block] = (u8)code;
    }
    if constexpr (FEEDBACK) {
        if (owner) settle_block<E>(held, inverse, code, base, room.wide, owner, tile, span);
    }
    if (lane_id() == 0) out[layout.bases + tile] = (u8)base;
    if (tile + 1 == layout.tiles) pad_payload(out, layout.used, layout.total);
}

}  // namespace blockint
}  // namespace hybridcomp
