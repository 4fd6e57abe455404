// Encoder of stepcode on a GPU. Each tile is coded once, into scratch memory, since its place depends on the
// lengths of all tiles before it; then all tiles are joined.
#pragma once

#include "stepcode_plan.h"

namespace hybridcomp {
namespace stepcode {

constexpr u32 UNCHANGED = 0xfffffffeu;  // in place of a number of words, as STORED is
// Words of 32 bits that a tile's room has beside those of its values (LEAST_ROOM in stepcode.py): what stands in
// front, and the most that a batch adds to a tile which is too long already.
constexpr u32 ROOM_HEAD = 2 + LANES, ROOM_SLACK = BATCH;

// Where a tile is kept between the two kernels: words, or how it is sent; bits of `extra`; states; words from the
// last to the first; extra bits that end where the room ends. Together these are no longer than the values.
struct Room {
    u32* at;
    u32 limit, end;  // words of 32 bits behind the head that a coded tile may take, and that there are
    HC_INLINE_MEMBER Room(u32* scratch, const Piece& piece, u32 tile, u64 index, u32 count)
        : at(scratch + piece.scratch + index * (tile / 2 + ROOM_HEAD + ROOM_SLACK)), limit(count / 2),
          end(limit + ROOM_SLACK) {}
    HC_INLINE_MEMBER u16* words() const { return (u16*)(at + ROOM_HEAD); }
    HC_INLINE_MEMBER u32* extra() const { return at + ROOM_HEAD; }
    HC_INLINE_MEMBER u32 coded_length() const {
        return STATE_BYTES / 4 + (at[0] + 1) / 2 + (at[1] + 31) / 32;
    }
    // Words of 32 bits that the tile takes in the payload.
    HC_INLINE_MEMBER u32 length(u32 count) const {
        return at[0] == UNCHANGED ? 0 : at[0] == STORED ? 1 + (count + 1) / 2 : coded_length();
    }
};

// A range of the model, and what its frequency is divided by.
typedef uint2 Entry;

HC_INLINE void load_entries(const Plan* plan, Entry (*entries)[ROW]) {
    for (u32 i = threadIdx.x; i < CONTEXTS * ROW; i += blockDim.x) {
        u32 range = plan->ranges[0][i], frequency = frequency_of(range);
        entries[0][i] = make_uint2(range, frequency ? 0xffffffffu / frequency : 0);
    }
    __syncthreads();
}

// A state of the format for each lane, and what a tile comes to so far.
struct Coder {
    u32 state = LEAST_STATE, words = 0, extra = 0, moved = 0;

    HC_INLINE_MEMBER void push(Entry entry, bool active, const Room& room) {
        bool over = active && overflows(state, entry.x);
        u32 mask = ballot(over);
        words += ones_in(mask);
        if (over) room.words()[words - 1 - lanes_before(mask)] = (u16)state;
        state = over ? state >> 16 : state;
        u32 pushed = push_by_inverse(state, entry.x, entry.y);
        state = active ? pushed : state;
    }
    // The extra bits of a group, `number` of them this lane's.
    HC_INLINE_MEMBER void put_extra(u32 bits, u32 number, const Room& room) {
        u32 included = scan_lanes(number), all = lane_value(included, WARP - 1);
        u32 end = 32 * room.end - extra, fresh = (end - all) / 32 + lane_id();
        if (fresh < end / 32) room.extra()[fresh] = 0;  // no more than 16
        sync_warp();
        if (number) put_word(room.extra(), end - all + included - number, bits);
        extra += all;
    }
    // A group of any steps; lanes that are not `active` have none.
    HC_INLINE_MEMBER void any(u32 step, const Entry* row, bool active, const Room& room) {
        Coded coded = code_of(step);
        Entry entry = row[coded.symbol];
        if (!entry.x) coded = Coded{ESCAPE, 16, step}, entry = row[ESCAPE];
        u32 number = active ? coded.count : 0;
        push(entry, active, room);
        if (ballot(number != 0)) put_extra(coded.bits, number, room);
    }
    // A whole group: nearly always all steps are short ones that the model has, which take no extra bits.
    HC_INLINE_MEMBER void whole(u32 step, const Entry* row, const Room& room) {
        u32 folded = folded_of(step);
        bool direct = folded < DIRECT;
        Entry entry = row[direct ? folded : 0];
        moved |= step;
        if (ballot(!direct || !entry.x)) any(step, row, true, room);
        else push(entry, true, room);
    }
    HC_INLINE_MEMBER bool fits(const Room& room) const {
        return (words + 1) / 2 + (extra + 31) / 32 <= room.limit;
    }
};

// Codes a tile into its room, from its last 32 values to its first, by one warp: first values outside whole batches,
// one by one, then the batches. Returns the OR of this lane's steps, and whether the tile fits.
HC_INLINE bool code_values(const u16* values, const u16* reference, u32 count, u32 dtype, u32 lowest,
                           const Entry (*entries)[ROW], const Room& room, Coder& coder) {
    u32 batches = count / BATCH, lane = lane_id(), olds[AHEAD], news[AHEAD];
    if (batches) {
        load_batch(reference + (batches - 1) * BATCH, olds);
        load_batch(values + (batches - 1) * BATCH, news);
    }
#pragma unroll 1
    for (u32 left = count - batches * BATCH; left;) {
        left = (left - 1) / WARP * WARP;
        u32 i = batches * BATCH + left + lane;
        bool active = i < count;
        u32 old = active ? reference[i] : 0, step = active ? step_between(old, values[i]) : 0;
        coder.moved |= step;
        coder.any(step, entries[context_of(old, dtype, lowest)], active, room);
    }
#pragma unroll 1
    while (batches && coder.fits(room)) {
        u32 next_olds[AHEAD], next_news[AHEAD];
        --batches;
        // those of the first batch once more behind it: a loop without a branch around its loads
        u32 ahead = batches ? batches - 1 : 0;
        load_batch(reference + ahead * BATCH, next_olds);
        load_batch(values + ahead * BATCH, next_news);
#pragma unroll
        for (u32 m = 0; m < AHEAD; ++m) {
            const u32 n = AHEAD - 1 - m;
            coder.whole(step_between(olds[n], news[n]), entries[context_of(olds[n], dtype, lowest)], room);
        }
#pragma unroll
        for (u32 n = 0; n < AHEAD; ++n) olds[n] = next_olds[n], news[n] = next_news[n];
    }
    bool fits = !batches && coder.fits(room);
    // unchanged values may be long, too, where no sample had one: what has changed may be among those left
#pragma unroll 1
    while (batches && !ballot(coder.moved != 0)) {
        u64 at = --batches * (u64)BATCH + lane;
        for (u32 n = 0; n < AHEAD; ++n) coder.moved |= step_between(reference[at + n * WARP], values[at + n * WARP]);
    }
    return fits;
}

// Codes a tile into its room, as it is sent.
HC_INLINE void code_tile(const u16* values, const u16* reference, u32 count, u32 dtype, u32 lowest,
                         const Entry (*entries)[ROW], const Room& room) {
    Coder coder;
    bool fits = dtype == 1 ? code_values(values, reference, count, 1, lowest, entries, room, coder)
                           : code_values(values, reference, count, 2, lowest, entries, room, coder);
    bool changed = ballot(coder.moved != 0) != 0;
    u32 lane = lane_id();
    room.at[2 + lane] = coder.state;
    if (lane == 0) room.at[0] = coder.words, room.at[1] = coder.extra;
    sync_warp();
    bool stored = !fits || room.coded_length() >= 1 + (count + 1) / 2;
    sync_warp();
    if (lane == 0 && (stored || !changed)) room.at[0] = changed ? STORED : UNCHANGED;
}

// Codes every tile into its room; stores the length of a piece's tiles in its plan.
HC_INLINE void code(const Pieces& pieces, u32 dtype, Plan* plans, u32* scratch) {
    __shared__ Entry entries[CONTEXTS][ROW];
    Job job(pieces, plans, blockIdx.x);
    u32 size = job.plan->tile;
    u64 tiles = ceil_div(job.piece.numel, size), index = job.group * WARPS + threadIdx.x / WARP;
    if (job.group * WARPS >= tiles) return;
    load_entries(job.plan, entries);
    if (index >= tiles) return;
    Bounds tile(job.piece.numel, size, index);
    Room room(scratch, job.piece, size, index, tile.count);
    code_tile((const u16*)job.piece.values + tile.first, (const u16*)job.piece.reference + tile.first,
              tile.count, dtype, job.plan->lowest, entries, room);
    sync_warp();
    if (lane_id() == 0) atomicAdd(&job.plan->length, room.length(tile.count));
}

// Copies a tile from its room to its place in the payload; called by one warp.
HC_INLINE void put_tile(const Room& room, const u16* values, u32 count, u32* to) {
    u32 lane = lane_id(), words = room.at[0], extra = room.at[1];
    if (words == UNCHANGED) return;
    if (words == STORED) {
        if (lane == 0) to[0] = STORED, to[(count + 1) / 2] = 0;
        sync_warp();
        copy_values(values, (u16*)(to + 1), count, lane, WARP);
        return;
    }
    if (lane == 0) to[0] = words;
    to[1 + lane] = room.at[2 + lane];
    to += STATE_BYTES / 4;
    for (u32 i = lane; i < (words + 1) / 2; i += WARP) {
        const u16* from = room.words() + words - 1 - 2 * i;
        to[i] = from[0] | (2 * i + 1 < words ? (u32)*(from - 1) << 16 : 0);
    }
    to += (words + 1) / 2;
    u32 begin = 32 * room.end - extra;
    for (u32 i = lane; i < (extra + 31) / 32; i += WARP) {
        u32 at = begin / 32 + i, high = at + 1 < room.end ? room.extra()[at + 1] : 0;
        to[i] = funnel_right(room.extra()[at], high, begin);
    }
}

// Writes the header and the padding of a piece; called by one block.
HC_INLINE void put_header(const Piece& piece, u32 dtype, const Plan* plan, bool raw, u64 used) {
    u8* out = (u8*)piece.payload;
    if (threadIdx.x == 0) {
        u32* head = (u32*)out;
        head[0] = MAGIC;
        head[1] = VERSION | dtype << 8 | (raw ? UNENCODED : STEPS) << 16 | (raw ? 0 : plan->lowest << 24);
        head[2] = (u32)piece.numel, head[3] = (u32)(piece.numel >> 32);
        head[4] = raw ? 0 : plan->tile, head[5] = raw ? 0 : plan->length;
        head[6] = raw ? 0 : plan->model, head[7] = 0;
        *(u64*)piece.size = align16(used);
    }
    if (threadIdx.x < WARP) pad_payload(out, used, align16(used));
}

// Copies all tiles and headers into the payloads, or the values unencoded where that is shorter.
HC_INLINE void place(const Pieces& pieces, u32 dtype, Plan* plans, u32* scratch, Workspace* work) {
    __shared__ Lengths<WARPS> shared;
    Job job(pieces, plans, take_ticket(work));
    const Piece& piece = job.piece;
    const Plan* plan = job.plan;
    u32 size = plan->tile, lane = lane_id(), total;
    u64 tiles = ceil_div(piece.numel, size), index = job.group * WARPS + threadIdx.x / WARP;
    u64 used = HEADER_BYTES + plan->model + 4 * (tiles + plan->length);
    u64 plain = HEADER_BYTES + 2 * piece.numel;
    bool raw = used >= plain;
    u8* out = (u8*)piece.payload;
    const u16* values = (const u16*)piece.values;
    if (job.group == 0) put_header(piece, dtype, plan, raw, raw ? plain : used);
    if (raw) {
        Bounds part(piece.numel, WARPS * LEAST_TILE, job.group);
        copy_values(values + part.first, (u16*)(out + HEADER_BYTES) + part.first, part.count, threadIdx.x,
                    blockDim.x);
        return;
    }
    if (job.group * WARPS >= tiles) return;
    Bounds tile(piece.numel, size, index);
    Room room(scratch, piece, size, index, tile.count);
    u32 length = index < tiles ? room.length(tile.count) : 0;
    u32 begin = shared.look(work->states + piece.first, (u32)job.group, length, total);
    if (index >= tiles) return;
    u32* offsets = (u32*)(out + HEADER_BYTES + plan->model);
    if (lane == 0) offsets[index] = begin;
    put_tile(room, values + tile.first, tile.count, offsets + tiles + begin);
}

}  // namespace stepcode
}  // namespace hybridcomp
