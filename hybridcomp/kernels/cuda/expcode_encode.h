// Encoder of expcode: a warp encodes a tile into shared memory without a barrier; the block of threads looks
// back once for all its tiles, which are stored as whole words. Values are loaded while the coding is chosen.
#pragma once

#include "expcode_levels.h"
#include "expcode_source.h"

namespace hybridcomp {
namespace expcode {

// Encodes one round into the tile. `at`: this lane's block; `base`: in all bytes. Returns this lane's escapes,
// a bit for each slot, and the exponents.
template <class F, int WIDTH, bool ZERO, bool WHOLE>
HC_INLINE u32 put_round(const Quad<F>* quads, bool there, u8* at, u32 base, bool halves,
                        u32 (&e)[Quad<F>::WORDS]) {
    constexpr int BITS = WIDTH + F::SHARED;
    constexpr u32 WORDS = Quad<F>::WORDS;
    u32 part = Lanes<F>::part(), levels[WORDS], flags = 0;
    u8* words = at + 4 * WORDS * part;
#pragma unroll
    for (u32 q = 0; q < WORDS; ++q) {
        Bytes bytes = quads[q].bytes();
        u32 found = 0;
        e[q] = exponents<F>(bytes.high);
        if constexpr (WIDTH == F::WIDEST) levels[q] = e[q];
        else levels[q] = codes_of<WIDTH, ZERO>(e[q], base, found);
        if (F::SHARED) levels[q] |= (bytes.high & 7 * EACH_BYTE) << WIDTH;
        if (WIDTH != F::WIDEST) flags |= found * 0x204081u >> (28 - 4 * q) & 15u << (4 * q);
        if (there) put_word_at<WHOLE>(words + 4 * q, bytes.low);
        if constexpr (F::ITEM_BYTES == 4) {
            u8* half = words + BLOCK + 4 * WIDTH + 4 * q;
            if (there && halves) {
                const u32* v = quads[q].values;
                put_word_at<WHOLE>(half, pick_bytes(v[0], v[1], 0x5410));
                put_word_at<WHOLE>(half + 32, pick_bytes(v[2], v[3], 0x5410));
            }
        }
    }
    put_levels<BITS, WHOLE>(levels, part, there, at + BLOCK);
    return there ? flags : 0;
}

// Appends the escapes of a round; `limit` escapes make the tile too long. Returns the new number of escapes.
template <class F>
HC_INLINE u32 put_escapes(u32 flags, const u32 (&e)[Quad<F>::WORDS], u32 before, u32 limit, u8* out) {
    if (!ballot(flags != 0)) return 0;
    Few few = sum_few(ones_in(flags));
    for (u32 at = before + few.before; flags; flags &= flags - 1, ++at) {
        u32 slot = lowest_bit(flags);
        if (at < limit) out[at] = (u8)(pick(e, slot / 4) >> (8 * (slot % 4)));
    }
    return few.total;
}

constexpr u32 NOT_PLAIN = ~0u;

// A tile of whole, nonzero blocks while it is loaded: the first HELD rounds at once, each later one a round
// ahead.
template <class F, int HELD>
struct Plain {
    Quad<F> sampled[2], rounds[HELD][Quad<F>::WORDS];

    HC_INLINE_MEMBER void load(const Source<F>& source) {
        source.load_two(lane_id() / 4 * (TILE_BLOCKS / SAMPLED_BLOCKS), sampled);
        const typename Quad<F>::Item* block = source.values + lane_id() / Lanes<F>::LANES * BLOCK;
#pragma unroll
        for (u32 r = 0; r < HELD; ++r) {
            Quad<F>::load(block + r * Lanes<F>::ROUND_BLOCKS * BLOCK, Lanes<F>::part(), rounds[r]);
        }
    }

    // Encodes blocks and escapes; returns the number of escapes, or NOT_PLAIN for a zero block or unexpected low
    // halves.
    template <int WIDTH, bool ZERO>
    HC_INLINE_MEMBER u32 put(const Source<F>& source, Coding coding, u8* tile) const {
        constexpr u32 ROUNDS = Lanes<F>::ROUNDS, STEP = Lanes<F>::ROUND_BLOCKS;
        u32 stride = F::block_bytes(WIDTH, coding.halves), escapes = 0;
        u32 limit = 4 * (F::WIDEST - WIDTH) * TILE_BLOCKS;
        u32 base = coding.base * EACH_BYTE, e[Quad<F>::WORDS];
        u8* at = tile + TILE_HEADER_BYTES + lane_id() / Lanes<F>::LANES * stride;
        u8* out = tile + TILE_HEADER_BYTES + TILE_BLOCKS * stride;
        const typename Quad<F>::Item* block = source.values + lane_id() / Lanes<F>::LANES * BLOCK;
        bool all = true;
#pragma unroll
        for (u32 r = 0; r < HELD; ++r) {
            all = all && plain(rounds[r], coding.halves);
            u32 flags = put_round<F, WIDTH, ZERO, true>(rounds[r], true, at, base, coding.halves, e);
            if (WIDTH != F::WIDEST) escapes += put_escapes<F>(flags, e, escapes, limit, out);
            at += STEP * stride;
        }
        if constexpr (HELD < ROUNDS) {
            Quad<F> next[Quad<F>::WORDS];
            Quad<F>::load(block + HELD * STEP * BLOCK, Lanes<F>::part(), next);
#pragma unroll 1
            for (u32 r = HELD; r < ROUNDS; ++r) {
                Quad<F> quads[Quad<F>::WORDS];
#pragma unroll
                for (u32 q = 0; q < Quad<F>::WORDS; ++q) quads[q] = next[q];
                u32 ahead = r + 1 < ROUNDS ? r + 1 : r;
                Quad<F>::load(block + ahead * STEP * BLOCK, Lanes<F>::part(), next);
                all = all && plain(quads, coding.halves);
                u32 flags = put_round<F, WIDTH, ZERO, true>(quads, true, at, base, coding.halves, e);
                if (WIDTH != F::WIDEST) escapes += put_escapes<F>(flags, e, escapes, limit, out);
                at += STEP * stride;
            }
        }
        return all ? escapes : NOT_PLAIN;
    }

    template <bool ZERO>
    HC_INLINE_MEMBER u32 put_any(const Source<F>& source, Coding coding, u8* tile) const {
        if (coding.width == 2) return put<2, ZERO>(source, coding, tile);
        if (coding.width == 3) return put<3, ZERO>(source, coding, tile);
        if (coding.width == 4) return put<4, ZERO>(source, coding, tile);
        return put<F::WIDEST, false>(source, coding, tile);
    }

    // Whether a round has neither a zero block nor low halves that were not expected.
    HC_INLINE bool plain(const Quad<F>* quads, bool halves) {
        u32 any = 0, lows = 0;
#pragma unroll
        for (u32 q = 0; q < Quad<F>::WORDS; ++q) any |= quads[q].any(), lows |= quads[q].any_low();
        u32 mask = blocks_of_lanes<F>(ballot(any != 0));
        bool whole = mask == blocks_of_lanes<F>(FULL_WARP);
        if (F::ITEM_BYTES == 2 || halves) return whole;
        return whole && ballot(lows != 0) == 0;
    }
};

// Encodes any kind of tile into `tile`; returns the number of escapes.
template <class F, int WIDTH, bool ZERO>
HC_INLINE u32 put_tile(const Source<F>& source, const Present<F>& present, Coding coding, u32 head,
                       u8* tile) {
    u32 stride = F::block_bytes(WIDTH, coding.halves), escapes = 0;
    u32 limit = 4 * (F::WIDEST - WIDTH) * present.total;
    u32 base = coding.base * EACH_BYTE, e[Quad<F>::WORDS];
    u8* out = tile + head + present.total * stride;
#pragma unroll 1
    for (u32 r = 0; r < Lanes<F>::ROUNDS; ++r) {
        Quad<F> quads[Quad<F>::WORDS];
        source.load_round(r, quads);
        bool there = is_there<F>(present, r);
        u8* at = tile + head + number_of<F>(present, r) * stride;
        u32 flags = head % 4 ? put_round<F, WIDTH, ZERO, false>(quads, there, at, base, coding.halves, e)
                             : put_round<F, WIDTH, ZERO, true>(quads, there, at, base, coding.halves, e);
        if (WIDTH != F::WIDEST) escapes += put_escapes<F>(flags, e, escapes, limit, out);
    }
    return escapes;
}

template <class F, bool ZERO>
HC_INLINE u32 put_narrow(const Source<F>& source, const Present<F>& present, Coding coding, u32 head,
                         u8* tile) {
    if (coding.width == 2) return put_tile<F, 2, ZERO>(source, present, coding, head, tile);
    if (coding.width == 3) return put_tile<F, 3, ZERO>(source, present, coding, head, tile);
    return put_tile<F, 4, ZERO>(source, present, coding, head, tile);
}

// Bits LANES b of a round's mask, eight of them from b = 8 i on, as a byte.
template <class F>
HC_INLINE u32 mask_byte(const Present<F>& present, u32 i) {
    constexpr u32 each = WARP / 8 / Lanes<F>::LANES;  // bytes of a round
    u32 mask = 0, byte = 0;
#pragma unroll
    for (u32 r = 0; r < Lanes<F>::ROUNDS; ++r) mask = r == i / each ? present.masks[r] : mask;
    mask >>= i % each * 8 * Lanes<F>::LANES;
    for (u32 b = 0; b < 8; ++b) byte |= (mask >> (b * Lanes<F>::LANES) & 1) << b;
    return byte;
}

// Writes the header and the padding; returns the words of the tile.
template <class F>
HC_INLINE u32 end_tile(Coding coding, u32 head, u32 present, bool masked, u32 escapes, u32* buffer) {
    u8* bytes = (u8*)buffer;
    u32 used = head + present * F::block_bytes(coding.width, coding.halves) + escapes;
    u32 words = (used + 3) / 4;
    if (lane_id() < 4 * words - used) bytes[used + lane_id()] = 0;
    if (lane_id() == 0) {
        bool none = F::ITEM_BYTES == 4 && !coding.halves;
        u32 flags = (masked ? ZERO_BLOCKS : 0) | (coding.zero ? ZERO_CODE : 0) | (none ? ZERO_HALVES : 0);
        buffer[0] = coding.base | (coding.width | flags) << 8 | escapes << 16;
    }
    return words;
}

// Encodes a tile into `buffer`; returns its words.
template <class F>
HC_INLINE u32 make_any_tile(const Source<F>& source, u32* buffer) {
    bool low;
    Present<F> present = find_present<F>(source, low);
    if (!present.total) return 0;
    Coding coding = sample<F>(source, present, buffer, buffer + COUNTS);
    coding.halves = low;
    bool masked = present.total < source.blocks;
    u32 head = TILE_HEADER_BYTES + (masked ? (source.blocks + 7) / 8 : 0);
    u8* bytes = (u8*)buffer;
    sync_warp();  // the counts were read
    u32 escapes = 0;
    if (coding.width != F::WIDEST) {
        escapes = coding.zero ? put_narrow<F, true>(source, present, coding, head, bytes)
                              : put_narrow<F, false>(source, present, coding, head, bytes);
        if (escapes && escapes >= 4 * (F::WIDEST - coding.width) * present.total) {
            coding = Coding{0, F::WIDEST, false, coding.halves};
            escapes = 0;
            sync_warp();
        }
    }
    if (coding.width == F::WIDEST) put_tile<F, F::WIDEST, false>(source, present, coding, head, bytes);
    if (masked && lane_id() < head - TILE_HEADER_BYTES) {
        bytes[TILE_HEADER_BYTES + lane_id()] = (u8)mask_byte<F>(present, lane_id());
    }
    return end_tile<F>(coding, head, present.total, masked, escapes, buffer);
}

// Does the same by a guess, which is nearly always right, and repeats it otherwise.
template <class F, int HELD>
HC_INLINE u32 make_tile(const Source<F>& source, u32* buffer) {
    if (source.vectors) {
        Plain<F, HELD> plain;
        plain.load(source);
        clear_counts(buffer);
        Coding coding = choose_for<F>(plain.sampled, true, SAMPLED_BLOCKS, buffer);
        u32 lows = plain.sampled[0].any_low() | plain.sampled[1].any_low();
        coding.halves = F::ITEM_BYTES == 4 && ballot(lows != 0) != 0;
        sync_warp();  // the counts were read
        u32 escapes = coding.zero ? plain.template put_any<true>(source, coding, (u8*)buffer)
                                  : plain.template put_any<false>(source, coding, (u8*)buffer);
        if (escapes == 0 || escapes < 4 * (F::WIDEST - coding.width) * TILE_BLOCKS) {
            return end_tile<F>(coding, TILE_HEADER_BYTES, TILE_BLOCKS, false, escapes, buffer);
        }
        sync_warp();
    }
    return source.count ? make_any_tile<F>(source, buffer) : 0;
}

// `WARPS` tiles a block of threads, whose values are HELD rounds at a time in registers. `group`: number of the
// block in the message, in the order of tickets; `states`: of all of them.
template <class F, int WARPS, int HELD>
HC_INLINE void encode(const void* in, u64 numel, u64 dtype, u8* out, u64* states, u32 group, u64* size) {
    __shared__ uint4 buffers[WARPS][(Lanes<F>::TILE_WORDS + 3) / 4];
    __shared__ Lengths<WARPS> shared;
    u32 tile = group * WARPS + threadIdx.x / WARP;
    u32 tiles = (u32)ceil_div(numel, TILE);
    u32* buffer = (u32*)buffers[threadIdx.x / WARP];
    Source<F> source(in, numel, tile);
    u32 words = make_tile<F, HELD>(source, buffer), total, place = shared.look(states, group, words, total);
    u64 data = HEADER_BYTES + 4ull * tiles;
    if (tile < tiles && lane_id() == 0) ((u32*)(out + HEADER_BYTES))[tile] = place;
    u32* to = (u32*)(out + data) + place;
#pragma unroll 4
    for (u32 i = lane_id(); i < words; i += WARP) to[i] = buffer[i];
    if ((group + 1) * WARPS >= tiles) {
        finish_message(out, data, MAGIC, VERSION, (u32)dtype, 0, numel, TILE, 0, shared.place + total, 0,
                       size);
    }
}

}  // namespace expcode
}  // namespace hybridcomp
