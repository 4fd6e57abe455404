// Decoder of stepcode on a GPU.
#pragma once

#include "stepcode_plan.h"

namespace hybridcomp {
namespace stepcode {

// Header and model of a piece into its plan, by one block; `plan->good` says whether both are what an encoder
// makes.
HC_INLINE void read_plan(const Piece& piece, u32 dtype, Plan* plan, u32* damage) {
    const u8* in = (const u8*)piece.payload;
    u64 nbytes = piece.size, numel = piece.numel;
    __shared__ u32 begins[CONTEXTS + 1], bad;
    const u32* head = (const u32*)in;
    if (threadIdx.x == 0) {
        bool fits = nbytes >= HEADER_BYTES && head[0] == MAGIC;
        fits = fits && (head[1] & 0xffff) == (VERSION | dtype << 8);
        fits = fits && head[2] == (u32)numel && head[3] == (u32)(numel >> 32);
        u32 mode = fits ? head[1] >> 16 & 0xff : 0, tile = fits ? head[4] : 0, model = 0, at = 0;
        if (mode == UNENCODED) {
            fits = nbytes - HEADER_BYTES >= 2 * numel;
        } else {
            fits = fits && mode == STEPS && (tile & (tile - 1)) == 0;
            fits = fits && tile >= 1u << MIN_TILE_LOG && tile <= 1u << MAX_TILE_LOG;
            model = fits ? head[6] : 0;
            u64 data = fits ? HEADER_BYTES + (u64)model + 4 * ceil_div(numel, tile) : 0;
            fits = fits && nbytes >= data && nbytes - data >= 4ull * head[5] && model % 4 == 0;
            for (u32 c = 0; fits && c < CONTEXTS; ++c) {
                fits = at < model;
                begins[c] = at;
                at += fits ? 1 + 3 * (u32)in[HEADER_BYTES + at] : 0;
            }
            fits = fits && at <= model && model - at < 4;
        }
        bad = !fits, begins[CONTEXTS] = at;
        plan->mode = mode, plan->tile = tile, plan->model = model, plan->lowest = fits ? head[1] >> 24 : 0;
        plan->length = fits ? head[5] : 0;
    }
    __syncthreads();
    u32 c = threadIdx.x;
    bool fits = !bad && plan->mode == STEPS;
    if (fits && c < CONTEXTS) {
        u32 left = begins[c + 1] - begins[c];
        bool read = read_context(in + HEADER_BYTES + begins[c], left, plan->ranges[c]);
        if (!read) atomicOr(&bad, 1u);
    }
    __syncthreads();
    for (u32 i = threadIdx.x; fits && !bad && i < CONTEXTS * COARSE; i += blockDim.x) {
        const u32* row = plan->ranges[i / COARSE];
        u32 slot = i % COARSE * (TOTAL / COARSE), symbol = 0;
        while (start_of(row[symbol]) + frequency_of(row[symbol]) <= slot) ++symbol;
        plan->first[i / COARSE][i % COARSE] = (u8)symbol;
    }
    if (threadIdx.x == 0) plan->good = !bad;
    if (bad) report_damage(damage);
}

// Extra bits of this lane, from `position` on.
HC_INLINE u32 extra_bits(const u32* extra, u32 position, u32 number) {
    u32 shift = position % 32, bits = extra[position / 32] >> shift;
    if (shift + number > 32) bits |= extra[position / 32 + 1] << (32 - shift);
    return bits & ((1u << number) - 1);
}

struct Model {
    u32 ranges[CONTEXTS][ROW];
    u8 first[CONTEXTS][COARSE];
};

// The words of a tile, by one warp: 128 of them in registers, so that nobody waits for memory.
struct Words {
    const u32* from;
    u32 pairs, base, near, far;  // `near` has words 64 base + 2 lane and one more, `far` those 64 behind
    HC_INLINE_MEMBER Words(const u32* words, u32 number) : from(words), pairs((number + 1) / 2), base(0) {
        near = load(0), far = load(1);
    }
    HC_INLINE_MEMBER u32 load(u32 set) const {
        u32 i = set * WARP + lane_id();
        return i < pairs ? from[i] : 0;
    }
    // That of index `at`, at most 96 behind the first that `near` has.
    HC_INLINE_MEMBER u32 get(u32 at) const {
        u32 i = at - 64 * base, low = lane_value(near, i / 2 % WARP), high = lane_value(far, i / 2 % WARP);
        return (i < 64 ? low : high) >> (16 * (i % 2)) & 0xffffu;
    }
    // From here on nothing in front of word `at` is asked for.
    HC_INLINE_MEMBER void pass(u32 at) {
        if (at - 64 * base < 64) return;
        ++base, near = far, far = load(base + 1);
    }
};

// A tile of words and extra bits, by one warp; false if no encoder has made them.
HC_INLINE bool decode_steps(const u32* in, u32 length, const Model& model, u32 dtype, u32 lowest,
                            const u16* reference, u16* out, u32 count) {
    u32 lane = lane_id(), number = in[0], after = STATE_BYTES / 4 + (number + 1) / 2;
    if (length < STATE_BYTES / 4 || number > count || length < after) return false;
    Words words(in + STATE_BYTES / 4, number);
    const u32* extra = in + after;
    u32 state = in[1 + lane], at = 0, position = 0, most = 32 * (length - after), next[AHEAD];
    load_groups(reference, 0, count, next);
#pragma unroll 1
    for (u32 first = 0; first * WARP < count; first += AHEAD) {
        u32 olds[AHEAD];
#pragma unroll
        for (u32 n = 0; n < AHEAD; ++n) olds[n] = next[n];
        load_groups(reference, first + AHEAD, count, next);
#pragma unroll
        for (u32 n = 0; n < AHEAD; ++n) {
            if ((first + n) * WARP >= count) continue;
            u32 i = (first + n) * WARP + lane, old = olds[n], context = context_of(old, dtype, lowest);
            bool active = i < count;
            const u32* row = model.ranges[context];
            u32 slot = state & (TOTAL - 1), symbol = model.first[context][slot / (TOTAL / COARSE)];
            while (start_of(row[symbol]) + frequency_of(row[symbol]) <= slot) ++symbol;
            u32 popped = pop_symbol(state, row[symbol]), bits = 0;
            state = active ? popped : state;
            bool low = active && state < LEAST_STATE;
            u32 mask = ballot(low);
            if (at + ones_in(mask) > number) return false;
            u32 word = words.get(at + lanes_before(mask));
            state = low ? state << 16 | word : state;
            at += ones_in(mask);
            words.pass(at);
            u32 some = active ? extra_count(symbol) : 0;
            if (ballot(some != 0)) {
                u32 included = scan_lanes(some), all = lane_value(included, WARP - 1);
                if (all > most - position) return false;
                if (some) bits = extra_bits(extra, position + included - some, some);
                position += all;
            }
            if (active) out[i] = (u16)after_step(old, step_of(symbol, bits));
        }
    }
    return at == number && most - position < 32 && !ballot(state != LEAST_STATE);
}

HC_INLINE void decode(const Pieces& pieces, u32 dtype, Plan* plans, u32* damage) {
    __shared__ Model model;
    Job job(pieces, plans, blockIdx.x);
    const Plan* plan = job.plan;
    const u8* in = (const u8*)job.piece.payload;
    u64 numel = job.piece.numel;
    u16* out = (u16*)job.piece.values;
    if (!plan->good) return;
    if (plan->mode == UNENCODED) {
        Bounds part(numel, WARPS * LEAST_TILE, job.group);
        copy_values((const u16*)(in + HEADER_BYTES) + part.first, out + part.first, part.count, threadIdx.x,
                    blockDim.x);
        return;
    }
    u64 tiles = ceil_div(numel, plan->tile), index = job.group * WARPS + threadIdx.x / WARP;
    if (job.group * WARPS >= tiles) return;
    copy_words(plan->ranges[0], (u32*)&model, sizeof(Model) / 4);
    __syncthreads();
    if (index >= tiles) return;
    Bounds tile(numel, plan->tile, index);
    const u32* offsets = (const u32*)(in + HEADER_BYTES + plan->model);
    u32 begin = offsets[index], end = index + 1 < tiles ? offsets[index + 1] : plan->length;
    const u16* old = (const u16*)job.piece.reference + tile.first;
    u16* to = out + tile.first;
    u32 lane = lane_id();
    bool good = begin <= end && end <= plan->length;
    if (good && begin == end) {
        if (old != to) copy_values(old, to, tile.count, lane, WARP);
    } else if (good) {
        const u32* from = offsets + tiles + begin;
        bool raw = from[0] == STORED;
        if (raw) {
            good = end - begin == 1 + (tile.count + 1) / 2;
            if (good) copy_values((const u16*)(from + 1), to, tile.count, lane, WARP);
        } else {
            good = decode_steps(from, end - begin, model, dtype, plan->lowest, old, to, tile.count);
        }
    }
    if (!good && lane == 0) atomicOr(damage, 1u);
}

}  // namespace stepcode
}  // namespace hybridcomp
