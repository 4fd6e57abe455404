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

// Reads the words of a tile, by one warp: 128 of them are in registers, ahead of use. Zeros follow the last word.
struct Words {
    const u32* from;
    u32 pairs, next;      // words in twos; that of this lane which is loaded next
    u32 at, near, far;    // `near` has words 2 lane and one more, `far` those 64 behind; `at` of them were taken
    HC_INLINE_MEMBER Words(const u32* words, u32 number)
        : from(words), pairs((number + 1) / 2), next(lane_id()), at(0) {
        near = load(), far = load();
    }
    HC_INLINE_MEMBER u32 load() {
        u32 word = next < pairs ? from[next] : 0;
        next += WARP;
        return word;
    }
    // Returns the next word for each lane of `mask`, in order; any number for other lanes.
    HC_INLINE_MEMBER u32 take(u32 mask) {
        u32 i = at + lanes_before(mask), low = lane_value(near, i / 2 % WARP), high = lane_value(far, i / 2 % WARP);
        at += ones_in(mask);
        if (at >= 64) at -= 64, near = far, far = load();
        return (i < 64 ? low : high) >> (16 * (i % 2)) & 0xffffu;
    }
    HC_INLINE_MEMBER u32 taken() const { return 2 * (next - lane_id()) - 128 + at; }
};

// Decodes a tile value by value: a state of the format for each lane.
struct Decoder {
    const Model& model;
    const u32* extra;
    Words words;
    u32 state, lowest, position, most;  // bits of `extra` that were read, and that there are

    // A group, of which a lane has the step from `old` if it is `active`. Returns it; false in `good` where the
    // extra bits end.
    HC_INLINE_MEMBER u32 step(u32 old, u32 dtype, bool active, bool& good) {
        u32 context = context_of(old, dtype, lowest), slot = state & (TOTAL - 1);
        const u32* row = model.ranges[context];
        u32 symbol = model.first[context][slot / (TOTAL / COARSE)], range = row[symbol];
        while (slot - start_of(range) >= frequency_of(range)) range = row[++symbol];
        u32 popped = pop_symbol(state, range), bits = 0;
        state = active ? popped : state;
        bool low = active && state < LEAST_STATE;
        u32 word = words.take(ballot(low));
        state = low ? state << 16 | word : state;
        bool direct = !active || symbol < DIRECT;
        if (!ballot(!direct)) return unfolded(symbol);
        u32 some = active ? extra_count(symbol) : 0;
        u32 included = scan_lanes(some), all = lane_value(included, WARP - 1);
        good = good && all <= most - position;
        if (good && some) bits = extra_bits(extra, position + included - some, some);
        position += good ? all : 0;
        return step_of(symbol, bits);
    }
};

template <u32 DTYPE>
HC_INLINE bool decode_values(Decoder& decoder, const u16* reference, u16* out, u32 count) {
    u32 lane = lane_id(), batches = count / BATCH, olds[AHEAD];
    bool good = true;
    if (batches) load_batch(reference, olds);
#pragma unroll 1
    for (u32 batch = 0; batch < batches; ++batch, reference += BATCH, out += BATCH) {
        u32 next[AHEAD];
        // those of the last batch once more, and no branch around loads
        load_batch(reference + (batch + 1 < batches ? BATCH : 0), next);
#pragma unroll
        for (u32 n = 0; n < AHEAD; ++n) {
            u32 step = decoder.step(olds[n], DTYPE, true, good);
            out[n * WARP + lane] = (u16)after_step(olds[n], step);
        }
        if (!good) return false;
#pragma unroll
        for (u32 n = 0; n < AHEAD; ++n) olds[n] = next[n];
    }
#pragma unroll 1
    for (u32 i = lane; i - lane < count % BATCH; i += WARP) {
        bool active = i < count % BATCH;
        u32 old = active ? reference[i] : 0, step = decoder.step(old, DTYPE, active, good);
        if (active) out[i] = (u16)after_step(old, step);
    }
    return good;
}

// Decodes a tile of words and extra bits, by one warp; returns false if no encoder writes them.
HC_INLINE bool decode_steps(const u32* in, u32 length, const Model& model, u32 dtype, u32 lowest,
                            const u16* reference, u16* out, u32 count) {
    u32 number = in[0], after = STATE_BYTES / 4 + (number + 1) / 2;
    if (length < STATE_BYTES / 4 || number > count || length < after) return false;
    Decoder decoder = {model, in + after, Words(in + STATE_BYTES / 4, number), in[1 + lane_id()], lowest, 0,
                       32 * (length - after)};
    bool good = dtype == 1 ? decode_values<1>(decoder, reference, out, count)
                           : decode_values<2>(decoder, reference, out, count);
    return good && decoder.words.taken() == number && decoder.most - decoder.position < 32 &&
           !ballot(decoder.state != LEAST_STATE);
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
