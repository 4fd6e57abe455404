// Sums over ranks of a tile of blockint: a lane has the 32 values of a block in registers, and the payloads of
// the next ranks are fetched into a ring in shared memory while one is added. A lane reads whole words and has
// its block's step, so nothing is transposed or exchanged; for a rotated group of 64 values, which two lanes hold,
// only the last stage exchanges values.
//
// Own values and residuals, in the message's order, also pass through shared memory: a warp loads consecutive
// 16 bytes per lane, and each lane reads its block there. Chunks of 16 bytes are permuted within 128 bytes, so
// that eight lanes access different banks.
#pragma once

#include "blockint_levels.h"

#ifndef HC_STAGES
#define HC_STAGES 4
#endif
#ifndef HC_SUM_THREADS
#define HC_SUM_THREADS 64
#endif

namespace hybridcomp {
namespace blockint {

constexpr int CHUNK = 16;  // bytes
constexpr int LEVEL_CHUNKS = TILE * HC_BITS / 8 / CHUNK;  // of a tile
constexpr int BLOCK_WORDS = HC_BITS;
constexpr int STEP_VALUES = 8;  // of a word of levels, and its distance in the block

// Waits for all fetches but the last LATER, of all lanes.
template <int LATER>
HC_INLINE void await_fetch() {
    await_fetches<LATER>();
    sync_warp();
}

// A tile of one rank's payload; `base` is the word that contains the tile's base.
struct Stage {
    uint4 levels[LEVEL_CHUNKS];
    u32 base, scales[TILE_BLOCKS / 4], pad[3];
};

// Returns the place of chunk `at` of a block in an array of blocks of CHUNKS chunks.
template <u32 CHUNKS>
HC_INLINE u32 swizzled(u32 block, u32 at) {
    if constexpr (CHUNKS == 8) return block * 8 + (at ^ (block & 7));
    if constexpr (CHUNKS == 4) return block * 4 + (at ^ (block >> 1 & 3));
    if constexpr (CHUNKS == 2) return block * 2 + (at ^ (block >> 2 & 1));
    return block * CHUNKS + at;
}

constexpr u32 LEVELS_EACH = HC_BITS == 8 ? 2 : 1;  // chunks of a block that are permuted

// The words of this lane's block.
HC_INLINE void read_words(const Stage& stage, u32* words) {
    if constexpr (HC_BITS == 8 || HC_BITS == 4) {
#pragma unroll
        for (u32 i = 0; i < LEVELS_EACH; ++i) {
            uint4 v = stage.levels[swizzled<LEVELS_EACH>(lane_id(), i)];
            words[4 * i] = v.x, words[4 * i + 1] = v.y, words[4 * i + 2] = v.z, words[4 * i + 3] = v.w;
        }
    } else {
        const u32* at = (const u32*)stage.levels + BLOCK_WORDS * lane_id();
#pragma unroll
        for (int i = 0; i < BLOCK_WORDS; ++i) words[i] = at[i];
    }
}

// A tile of values of T in shared memory.
template <class T>
struct Shared {
    static constexpr u32 CHUNKS = BLOCK * sizeof(T) / CHUNK;  // of a block
    static constexpr u32 VALUES = CHUNK / sizeof(T);          // of a chunk
    uint4 chunks[TILE_BLOCKS * CHUNKS];

    // Where chunk 32 * `turn` + lane of the tile lies; `lane_at` is that of chunk lane.
    HC_INLINE u32 place(u32 lane_at, u32 turn) {
        return WARP * turn + (CHUNKS == 8 && turn % 2 ? lane_at ^ 4 : lane_at);
    }
    HC_INLINE u32 lane_place() { return swizzled<CHUNKS>(lane_id() / CHUNKS, lane_id() % CHUNKS); }

    HC_INLINE_MEMBER void fetch(const T* tile) {
        u32 at = lane_place();
        const u8* from = (const u8*)tile + CHUNK * lane_id();
        SharedAt to = shared_at(chunks);
#pragma unroll
        for (u32 i = 0; i < CHUNKS; ++i) fetch16(to + CHUNK * place(at, i), from + CHUNK * WARP * i);
    }
    HC_INLINE_MEMBER void flush(T* tile) const {
        u32 at = lane_place();
        u8* to = (u8*)tile + CHUNK * lane_id();
#pragma unroll
        for (u32 i = 0; i < CHUNKS; ++i) store16(chunks[place(at, i)], to + CHUNK * WARP * i);
    }
    // Chunk `at` of this lane's block.
    HC_INLINE_MEMBER uint4& mine(u32 at) { return chunks[swizzled<CHUNKS>(lane_id(), at)]; }
};

HC_INLINE void floats_of(uint4 v, float* out) {
    out[0] = bits_float(v.x), out[1] = bits_float(v.y), out[2] = bits_float(v.z), out[3] = bits_float(v.w);
}

// Eight values from 8 * `at` on of this lane's block.
HC_INLINE void read_eight(Shared<float>& shared, u32 at, EightFp32& eight) {
    floats_of(shared.mine(2 * at), eight.values), floats_of(shared.mine(2 * at + 1), eight.values + 4);
}

template <class E>
HC_INLINE void read_eight(Shared<u16>& shared, u32 at, E& eight) { eight.load((const u16*)&shared.mine(at)); }

// A value of a block that is NaN, may overflow or is not there.
struct Care {
    bool twice, nan, there;
    HC_INLINE_MEMBER float operator()(float value) const {
        value = twice ? finite(value * 2.0f) : value;
        value = nan ? bits_float(QUIET_NAN_BITS) : value;
        return there ? value : 0.0f;  // a sum of it would be encoded
    }
};

template <int K = 0>
HC_INLINE void add_values_of(const u32* levels, float step, const Table& table, const Magic& magic,
                             float* held) {
    if constexpr (K < BLOCK) {
        held[K] = held[K] + value_of<K>(levels, step, table, magic);
        add_values_of<K + 1>(levels, step, table, magic, held);
    }
}

template <int K = 0>
HC_INLINE void add_values_of(const u32* levels, float step, const Table& table, const Magic& magic,
                             float* held, Care care) {
    if constexpr (K < BLOCK) {
        held[K] = sum_apart(held[K], care(value_of<K>(levels, step, table, magic)));
        add_values_of<K + 1>(levels, step, table, magic, held, care);
    }
}

// held += one rank's block. The last tile, and tiles with a block that is NaN or may overflow, take a separate
// branch. `whole`: the group of 64 values is whole.
HC_INLINE void add_stage(float* held, const Stage& stage, const Table& table, u32 base, u32 blocks,
                         bool whole, const Magic& magic) {
    bool there = lane_id() < blocks;
    u32 code = ((const u8*)stage.scales)[lane_id()], top = 16 * base + 15 - code;
    u32 words[BLOCK_WORDS], levels[WORDS];
    read_words(stage, words);
    unpack_block(words, levels);
    bool any = !there || code > LAST_CODE + GAUSSIAN || top >= OVERFLOW_TOP;
    if constexpr (ROTATE) any = any || !whole || base >= LARGE_BASE;
    if (!any_in_warp(any)) {
        float step = bits_float((top << 19) - 0x800000u) *  // half_top
                     (SPACING != Spacing::uniform ? 2.0f : 2.0f / (float)top_level(HC_BITS));
        if (GAUSSIAN) step = code == ZERO_CODE ? 0.0f : step;
        if constexpr (ROTATE) {
            float x[BLOCK], odd = odd_sign();
            values_of(levels, step, table, magic, x);
            stages_in_block(x);
            stage_across_blocks(x, true);
#pragma unroll
            for (int k = 0; k < BLOCK; ++k) held[k] = plus_in_d(held[k], x[k], k, odd);
        } else {
            add_values_of(levels, step, table, magic, held);
        }
        return;
    }
    code = there ? code : LAST_CODE;
    bool twice;
    float step = careful_step(code, base, twice);
    Care care = {twice, code == NONFINITE_CODE, there};
    if constexpr (ROTATE) {
        float x[BLOCK];
        values_of(levels, step, table, magic, x);
#pragma unroll
        for (int k = 0; k < BLOCK; ++k) x[k] = care(x[k]);
        rotate_block_back(x, whole);
#pragma unroll
        for (int k = 0; k < BLOCK; ++k) held[k] = sum_apart(held[k], x[k]);
    } else {
        add_values_of(levels, step, table, magic, held, care);
    }
}

}  // namespace blockint
}  // namespace hybridcomp
