// expcode, encode: a warp makes a tile in shared memory without a barrier; the block of threads looks
// back once for all its tiles; they leave as whole words. What comes next is loaded meanwhile.
#pragma once

#include "expcode_choice.h"
#include "expcode_levels.h"

namespace hybridcomp {
namespace expcode {

// The blocks of a tile that are not zero.
template <class F>
struct Present {
    u32 masks[Lanes<F>::ROUNDS];  // the bit of a block's first lane
    u32 total;
};

// The number of this lane's block of a round, among those that are not zero.
template <class F>
HC_INLINE u32 number_of(const Present<F>& present, u32 round) {
    u32 before = 0;
#pragma unroll
    for (u32 r = 0; r < Lanes<F>::ROUNDS; ++r) {
        u32 lower = r < round ? FULL_WARP : r == round ? (1u << Lanes<F>::first_lane()) - 1 : 0;
        before += __popc(present.masks[r] & lower);
    }
    return before;
}

template <class F>
HC_INLINE bool is_there(const Present<F>& present, u32 round) {
    u32 mask = 0;
#pragma unroll
    for (u32 r = 0; r < Lanes<F>::ROUNDS; ++r) mask = r == round ? present.masks[r] : mask;
    return mask >> Lanes<F>::first_lane() & 1;
}

// A tile's values, where they are and how many.
template <class F>
struct Source {
    typedef typename Quad<F>::Item Item;
    const Item* values;
    u32 count, blocks;
    bool vectors;  // a whole tile, aligned

    HC_INLINE_MEMBER Source(const void* in, u64 numel, u32 tile) {
        u64 first = (u64)tile * TILE, left = first < numel ? numel - first : 0;
        values = (const Item*)in + first;
        count = (u32)(left < TILE ? left : TILE);
        blocks = (count + BLOCK - 1) / BLOCK;
        vectors = count == TILE && whole_vectors(values);
    }
    HC_INLINE_MEMBER void load_round(u32 round, Quad<F>* quads) const {
        u32 block = round * Lanes<F>::ROUND_BLOCKS + lane_id() / Lanes<F>::LANES;
        if (vectors) {
            Quad<F>::load(values + block * BLOCK, Lanes<F>::part(), quads);
            return;
        }
#pragma unroll
        for (u32 q = 0; q < Lanes<F>::WORDS; ++q) {
            // the last block is filled up with copies of the last value
            quads[q] = block < blocks ? Quad<F>::at(values, block * BLOCK, Lanes<F>::WORDS * Lanes<F>::part() + q, count - 1)
                                      : Quad<F>::zero();
        }
    }
    // Words 2 (lane % 4) and the next of a block.
    HC_INLINE_MEMBER void load_two(u32 block, Quad<F>* quads) const {
        u32 word = 2 * (lane_id() % 4);
        if (vectors) {
            Quad<F>::load_two(values + block * BLOCK, word, quads);
            return;
        }
        quads[0] = Quad<F>::at(values, block * BLOCK, word, count - 1);
        quads[1] = Quad<F>::at(values, block * BLOCK, word + 1, count - 1);
    }
};

// Whether some block of a round is zero: the lanes of `mask`, whose values are not all zero, are none of its.
template <class F>
HC_INLINE u32 blocks_of_lanes(u32 mask) {
    mask |= mask >> 1;
    if (Lanes<F>::LANES == 4) mask |= mask >> 2;
    return mask & (Lanes<F>::LANES == 4 ? 0x11111111u : 0x55555555u);
}

// The first look at a tile; it comes again from the caches. `low`: some low half of fp32 is not zero.
template <class F>
HC_INLINE Present<F> find_present(const Source<F>& source, bool& low) {
    Present<F> present;
    u32 lows = 0;
    present.total = 0;
#pragma unroll
    for (u32 r = 0; r < Lanes<F>::ROUNDS; ++r) {
        Quad<F> quads[Quad<F>::WORDS];
        source.load_round(r, quads);
        u32 any = 0;
#pragma unroll
        for (u32 q = 0; q < Lanes<F>::WORDS; ++q) any |= quads[q].any(), lows |= quads[q].any_low();
        present.masks[r] = blocks_of_lanes<F>(__ballot_sync(FULL_WARP, any != 0));
        present.total += __popc(present.masks[r]);
    }
    low = F::ITEM_BYTES == 4 && __ballot_sync(FULL_WARP, lows != 0) != 0;
    return present;
}

// Four lanes look at a sampled block. `counts` and `sampled` are shared memory.
template <class F>
HC_INLINE Coding sample(const Source<F>& source, const Present<F>& present, u32* counts, u32* sampled) {
    clear_counts(counts);
    u32 index = lane_id() / 4, stride = present.total / SAMPLED_BLOCKS;
    stride = stride ? stride : 1;
    u32 looked_at = (present.total + stride - 1) / stride;
    looked_at = looked_at < SAMPLED_BLOCKS ? looked_at : SAMPLED_BLOCKS;
#pragma unroll 1
    for (u32 r = 0; r < Lanes<F>::ROUNDS; ++r) {
        u32 number = number_of<F>(present, r), which = number / stride;
        if (Lanes<F>::part() == 0 && is_there<F>(present, r) && which * stride == number && which < SAMPLED_BLOCKS) {
            sampled[which] = r * Lanes<F>::ROUND_BLOCKS + lane_id() / Lanes<F>::LANES;
        }
    }
    __syncwarp();
    Quad<F> quads[2];
    if (index < looked_at) source.load_two(sampled[index], quads);
    return choose_for<F>(quads, index < looked_at, looked_at, counts);
}

// One round into the tile. `at`: this lane's block, `base` in all bytes. Returns the escapes of this
// lane, a bit for each slot, and the exponents.
template <class F, int WIDTH, bool ZERO, bool WHOLE>
HC_INLINE u32 put_round(const Quad<F>* quads, bool there, u8* at, u32 base, bool halves, u32 (&e)[Quad<F>::WORDS]) {
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
                put_word_at<WHOLE>(half, __byte_perm(quads[q].values[0], quads[q].values[1], 0x5410));
                put_word_at<WHOLE>(half + 32, __byte_perm(quads[q].values[2], quads[q].values[3], 0x5410));
            }
        }
    }
    put_levels<BITS, WHOLE>(levels, part, there, at + BLOCK);
    return there ? flags : 0;
}

// Escapes of a round behind those before; `limit`: so many make the tile too long. Returns how many.
template <class F>
HC_INLINE u32 put_escapes(u32 flags, const u32 (&e)[Quad<F>::WORDS], u32 before, u32 limit, u8* out) {
    if (!__ballot_sync(FULL_WARP, flags != 0)) return 0;
    Few few = sum_few(__popc(flags));
    for (u32 at = before + few.before; flags; flags &= flags - 1, ++at) {
        u32 slot = lowest_bit(flags);
        if (at < limit) out[at] = (u8)(pick(e, slot / 4) >> (8 * (slot % 4)));
    }
    return few.total;
}

constexpr u32 NOT_PLAIN = ~0u;

// A tile of whole blocks of which none is zero, on its way from memory: the first HELD rounds at once, the
// others one ahead.
template <class F, int HELD>
struct Plain {
    Quad<F> sampled[2], rounds[HELD][Quad<F>::WORDS];

    HC_INLINE_MEMBER void load(const Source<F>& source) {
        source.load_two(lane_id() / 4 * (TILE_BLOCKS / SAMPLED_BLOCKS), sampled);
        const typename Quad<F>::Item* block = source.values + lane_id() / Lanes<F>::LANES * BLOCK;
#pragma unroll
        for (u32 r = 0; r < HELD; ++r) Quad<F>::load(block + r * Lanes<F>::ROUND_BLOCKS * BLOCK, Lanes<F>::part(), rounds[r]);
    }

    // Its blocks and escapes; returns how many escapes, NOT_PLAIN if a block is zero, or if there are low
    // halves and none were expected.
    template <int WIDTH, bool ZERO>
    HC_INLINE_MEMBER u32 put(const Source<F>& source, Coding coding, u8* tile) const {
        constexpr u32 ROUNDS = Lanes<F>::ROUNDS, STEP = Lanes<F>::ROUND_BLOCKS;
        u32 stride = F::block_bytes(WIDTH, coding.halves), escapes = 0, limit = 4 * (F::WIDEST - WIDTH) * TILE_BLOCKS;
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

    HC_INLINE bool plain(const Quad<F>* quads, bool halves) {
        u32 any = 0, lows = 0;
#pragma unroll
        for (u32 q = 0; q < Quad<F>::WORDS; ++q) any |= quads[q].any(), lows |= quads[q].any_low();
        u32 mask = blocks_of_lanes<F>(__ballot_sync(FULL_WARP, any != 0));
        bool whole = mask == blocks_of_lanes<F>(FULL_WARP);
        if (F::ITEM_BYTES == 2 || halves) return whole;
        return whole && __ballot_sync(FULL_WARP, lows != 0) == 0;
    }
};

// A tile of any kind into `tile`; returns the number of escapes.
template <class F, int WIDTH, bool ZERO>
HC_INLINE u32 put_tile(const Source<F>& source, const Present<F>& present, Coding coding, u32 head, u8* tile) {
    u32 stride = F::block_bytes(WIDTH, coding.halves), escapes = 0, limit = 4 * (F::WIDEST - WIDTH) * present.total;
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
HC_INLINE u32 put_narrow(const Source<F>& source, const Present<F>& present, Coding coding, u32 head, u8* tile) {
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

// Header and zeros behind; returns the words of the tile.
template <class F>
HC_INLINE u32 end_tile(Coding coding, u32 head, u32 present, bool masked, u32 escapes, u32* buffer) {
    u8* bytes = (u8*)buffer;
    u32 used = head + present * F::block_bytes(coding.width, coding.halves) + escapes, words = (used + 3) / 4;
    if (lane_id() < 4 * words - used) bytes[used + lane_id()] = 0;
    if (lane_id() == 0) {
        bool none = F::ITEM_BYTES == 4 && !coding.halves;
        u32 flags = (masked ? ZERO_BLOCKS : 0) | (coding.zero ? ZERO_CODE : 0) | (none ? ZERO_HALVES : 0);
        buffer[0] = coding.base | (coding.width | flags) << 8 | escapes << 16;
    }
    return words;
}

// Returns the words of the tile, which is made in `buffer`.
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
    __syncwarp();  // the counts were read
    u32 escapes = 0;
    if (coding.width != F::WIDEST) {
        escapes = coding.zero ? put_narrow<F, true>(source, present, coding, head, bytes)
                              : put_narrow<F, false>(source, present, coding, head, bytes);
        if (escapes && escapes >= 4 * (F::WIDEST - coding.width) * present.total) {
            coding = Coding{0, F::WIDEST, false, coding.halves};
            escapes = 0;
            __syncwarp();
        }
    }
    if (coding.width == F::WIDEST) put_tile<F, F::WIDEST, false>(source, present, coding, head, bytes);
    if (masked && lane_id() < head - TILE_HEADER_BYTES) {
        bytes[TILE_HEADER_BYTES + lane_id()] = (u8)mask_byte<F>(present, lane_id());
    }
    return end_tile<F>(coding, head, present.total, masked, escapes, buffer);
}

template <class F, int HELD>
HC_INLINE u32 make_tile(const Source<F>& source, u32* buffer) {
    if (source.vectors) {
        Plain<F, HELD> plain;
        plain.load(source);
        clear_counts(buffer);
        Coding coding = choose_for<F>(plain.sampled, true, SAMPLED_BLOCKS, buffer);
        u32 lows = plain.sampled[0].any_low() | plain.sampled[1].any_low();
        coding.halves = F::ITEM_BYTES == 4 && __ballot_sync(FULL_WARP, lows != 0) != 0;
        u8* bytes = (u8*)buffer;
        __syncwarp();
        u32 escapes = NOT_PLAIN;
        if (coding.width == 3) {
            escapes = coding.zero ? plain.template put<3, true>(source, coding, bytes) : plain.template put<3, false>(source, coding, bytes);
        } else if (coding.width == 2) {
            escapes = coding.zero ? plain.template put<2, true>(source, coding, bytes) : plain.template put<2, false>(source, coding, bytes);
        } else if (coding.width == 4) {
            escapes = coding.zero ? plain.template put<4, true>(source, coding, bytes) : plain.template put<4, false>(source, coding, bytes);
        } else {
            escapes = plain.template put<F::WIDEST, false>(source, coding, bytes);
        }
        if (escapes == 0 || escapes < 4 * (F::WIDEST - coding.width) * TILE_BLOCKS) {
            return end_tile<F>(coding, TILE_HEADER_BYTES, TILE_BLOCKS, false, escapes, buffer);
        }
        __syncwarp();
    }
    return source.count ? make_any_tile<F>(source, buffer) : 0;
}

// `WARPS` tiles a block of threads.
template <class F, int WARPS, int HELD>
HC_INLINE void encode(const void* in, u64 numel, u64 dtype, u8* out, Workspace* work, u64* size) {
    __shared__ uint4 buffers[WARPS][(Lanes<F>::TILE_WORDS + 3) / 4];
    __shared__ Lengths<WARPS> shared;
    u32 group = take_ticket(work), tile = group * WARPS + threadIdx.x / WARP, tiles = (u32)ceil_div(numel, TILE);
    u32* buffer = (u32*)buffers[threadIdx.x / WARP];
    Source<F> source(in, numel, tile);
    u32 words = make_tile<F, HELD>(source, buffer), total, place = shared.look(work, group, words, total);
    u64 data = HEADER_BYTES + 4ull * tiles;
    if (tile < tiles && lane_id() == 0) ((u32*)(out + HEADER_BYTES))[tile] = place;
    u32* to = (u32*)(out + data) + place;
#pragma unroll 4
    for (u32 i = lane_id(); i < words; i += WARP) to[i] = buffer[i];
    if ((group + 1) * WARPS >= tiles) {
        finish_message(out, data, MAGIC, VERSION, (u32)dtype, 0, numel, TILE, 0, shared.place + total, 0, size);
    }
}

}  // namespace expcode
}  // namespace hybridcomp
