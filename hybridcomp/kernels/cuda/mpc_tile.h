// mpc: a warp codes a chunk of 1024 words, a group of 32 words in the registers of each lane, so differences
// and transpositions need no exchange between lanes. Words move through shared memory, in 32 rows that are 33
// words apart, so that accesses by row and by column have no bank conflicts.
#pragma once

#include "warp_tiles.h"

#include "mpc.h"

namespace hybridcomp {
namespace mpc {

constexpr int GROUPS = CHUNK / GROUP;
constexpr int ROW = GROUP + 1;
// Words of shared memory: rows, or the kept words of a chunk after up to three words of the previous one
constexpr int BUFFER = GROUPS * ROW + 3;

// A chunk of a message.
struct Place {
    u64 first;        // its first word
    u32 count, used;  // words and groups of it
    HC_INLINE_MEMBER Place(u64 words, u64 chunk)
        : first(chunk * CHUNK),
          count(first >= words ? 0 : (u32)(words - first < CHUNK ? words - first : CHUNK)),
          used((count + GROUP - 1) / GROUP) {}
};

// Words of a message of 16-bit or 32-bit values.
struct Message {
    u64 numel, words, groups;
    bool wide;
    HC_INLINE_MEMBER Message(u64 values, u64 dtype)
        : numel(values), words(dtype == 0 ? values : ceil_div(values, 2)), groups(ceil_div(words, GROUP)),
          wide(dtype == 0) {}

    // A last odd value has a zero high half.
    HC_INLINE_MEMBER u32 word(const void* in, u64 index) const {
        if (wide) return ((const u32*)in)[index];
        const u16* halves = (const u16*)in;
        u32 high = 2 * index + 1 < numel ? halves[2 * index + 1] : 0;
        return halves[2 * index] | high << 16;
    }
    // Whether 16 bytes can move at a time: the number of values is even, and the address is aligned.
    HC_INLINE_MEMBER bool vectors(const void* values, const Place& place) const {
        return place.count == CHUNK && whole_vectors((const u8*)values + 4 * place.first) &&
               (wide || 2 * (place.first + CHUNK) <= numel);
    }
};

HC_INLINE u32 row_of(u32 word) { return word / GROUP * ROW + word % GROUP; }

// Swaps bit B of the word index with bit B of the bit index; words 16 apart become neighbours.
template <int B>
HC_INLINE void transpose_registers(const u32 (&in)[GROUP], u32 (&out)[GROUP]) {
#pragma unroll
    for (int i = 0; i < GROUP / 2; ++i) {
        u32 a = in[i], b = in[i + GROUP / 2];
        if constexpr (B == 4) {
            out[2 * i] = pick_bytes(a, b, 0x5410), out[2 * i + 1] = pick_bytes(a, b, 0x7632);
        } else if constexpr (B == 3) {
            out[2 * i] = pick_bytes(a, b, 0x6240), out[2 * i + 1] = pick_bytes(a, b, 0x7351);
        } else {
            constexpr u32 low = B == 2 ? 0x0f0f0f0fu : B == 1 ? 0x33333333u : 0x55555555u;
            out[2 * i] = choose_bits(low, a, b << (1 << B));
            out[2 * i + 1] = choose_bits(low, a >> (1 << B), b);
        }
    }
}

// 32 x 32 bits, its own inverse.
HC_INLINE void transpose_group(u32 (&words)[GROUP]) {
    u32 other[GROUP];
    transpose_registers<4>(words, other);
    transpose_registers<3>(other, words);
    transpose_registers<2>(words, other);
    transpose_registers<1>(other, words);
    transpose_registers<0>(words, other);
#pragma unroll
    for (int i = 0; i < GROUP; ++i) words[i] = other[i];
}

// Loads a chunk into rows, with zeros after its end; called by a warp.
HC_INLINE void load_rows(const void* in, const Message& message, const Place& place, u32* rows) {
    u32 lane = lane_id();
    if (message.vectors(in, place)) {
        const uint4* from = (const uint4*)((const u8*)in + 4 * place.first);
        uint4 v[CHUNK / 4 / WARP];
#pragma unroll
        for (int i = 0; i < CHUNK / 4 / WARP; ++i) v[i] = from[i * WARP + lane];
#pragma unroll
        for (int i = 0; i < CHUNK / 4 / WARP; ++i) {
            u32* at = rows + row_of(4 * (i * WARP + lane));
            at[0] = v[i].x, at[1] = v[i].y, at[2] = v[i].z, at[3] = v[i].w;
        }
    } else {
        for (u32 i = lane; i < CHUNK; i += WARP) {
            rows[row_of(i)] = i < place.count ? message.word(in, place.first + i) : 0;
        }
    }
    sync_warp();
}

// Step 1 for this lane's group, whose words are in its row.
HC_INLINE void subtract_rows(const u32* rows, u32 count, u32 dim, u32 (&r)[GROUP]) {
    u32 lane = lane_id();
    const u32* row = rows + lane * ROW;
#pragma unroll
    for (int i = 0; i < GROUP; ++i) r[i] = row[i];
    if (dim == 1) {
        u32 before = lane_before(r[GROUP - 1], 1);
#pragma unroll
        for (int i = GROUP - 1; i > 0; --i) r[i] -= r[i - 1];
        r[0] -= lane ? before : 0;
    } else {
#pragma unroll
        for (int i = 0; i < GROUP; ++i) {
            bool inside = (u32)i >= dim;
            if (inside || lane) r[i] -= row[i - (int)dim - (inside ? 0 : 1)];
        }
    }
    if (count < CHUNK) {
#pragma unroll
        for (int i = 0; i < GROUP; ++i) r[i] = lane * GROUP + i < count ? r[i] : 0;
    }
}

// Step 3; every lane has a group.
HC_INLINE void subtract_before_lanes(u32 (&t)[GROUP]) {
    u32 before = lane_before(t[GROUP - 1], 1);
#pragma unroll
    for (int i = GROUP - 1; i > 0; --i) t[i] -= t[i - 1];
    t[0] -= lane_id() ? before : 0;
}

// Undoes differences of neighbours, over all groups.
HC_INLINE void add_before_lanes(u32 (&d)[GROUP]) {
    u32 total = 0;
#pragma unroll
    for (int i = 0; i < GROUP; ++i) total += d[i];
    u32 sum = scan_lanes(total) - total;
#pragma unroll
    for (int i = 0; i < GROUP; ++i) sum += d[i], d[i] = sum;
}

HC_INLINE u32 mask_of(const u32 (&d)[GROUP]) {
    u32 mask = 0;
#pragma unroll
    for (int i = 0; i < GROUP; ++i) mask |= d[i] ? 1u << i : 0;
    return mask;
}

// Undoes step 1 for words in rows, any dim: lane c of `carry` has the last word so far whose number is
// c modulo dim.
HC_INLINE void add_before_rows(u32* rows, u32 dim) {
    u32 lane = lane_id(), carry = 0, shift = 0, step_of_shift = GROUP % dim, own = lane % dim;
    sync_warp();
#pragma unroll 1
    for (u32 g = 0; g < GROUPS; ++g) {
        u32 x = rows[g * ROW + lane];
        for (u32 step = dim; step < WARP; step *= 2) {
            u32 previous = lane_before(x, step);
            x += lane >= step ? previous : 0;
        }
        u32 class_of = own + shift < dim ? own + shift : own + shift - dim;
        x += lane_value(carry, class_of);
        // the last lane of class c, for lane c
        u32 first = lane >= shift ? lane - shift : lane + dim - shift, last = first;
        if (lane < dim) last = first + (WARP - 1 - first) / dim * dim;
        carry = lane_value(x, lane < dim ? last : 0);
        shift = shift + step_of_shift < dim ? shift + step_of_shift : shift + step_of_shift - dim;
        rows[g * ROW + lane] = x;
    }
    sync_warp();
}

// Stores a chunk from rows, or adds it to floats.
template <bool ADD>
struct Rows {
    const Message& message;
    const Place& place;
    u64 dtype;
    void* out;

    HC_INLINE_MEMBER float value(u32 bits) const {
        return dtype == 1 ? bf16_to_float((u16)bits) : fp16_to_float((u16)bits);
    }
    HC_INLINE_MEMBER void one(u32 word, u64 index) const {
        if (message.wide) {
            if constexpr (ADD) ((float*)out)[index] += bits_float(word);
            else ((u32*)out)[index] = word;
            return;
        }
        for (u32 k = 0; k < 2 && 2 * index + k < message.numel; ++k, word >>= 16) {
            if constexpr (ADD) ((float*)out)[2 * index + k] += value(word & 0xffffu);
            else ((u16*)out)[2 * index + k] = (u16)word;
        }
    }
    HC_INLINE_MEMBER void store(const u32* rows) const {
        u32 lane = lane_id();
        const u8* first = (const u8*)out + (ADD && !message.wide ? 8 : 4) * place.first;
        bool vectors = place.count == CHUNK && whole_vectors(first) &&
                       (message.wide || 2 * (place.first + CHUNK) <= message.numel);
        if (!vectors) {
#pragma unroll 4
            for (u32 i = lane; i < place.count; i += WARP) one(rows[row_of(i)], place.first + i);
            return;
        }
#pragma unroll 4
        for (u32 i = lane; i < CHUNK / 4; i += WARP) {
            const u32* at = rows + row_of(4 * i);
            if constexpr (!ADD) {
                ((uint4*)first)[i] = make_uint4(at[0], at[1], at[2], at[3]);
            } else if (message.wide) {
                float4 v = ((float4*)first)[i];
                v.x += bits_float(at[0]), v.y += bits_float(at[1]);
                v.z += bits_float(at[2]), v.w += bits_float(at[3]);
                ((float4*)first)[i] = v;
            } else {
                for (u32 k = 0; k < 2; ++k) {
                    float4 v = ((float4*)first)[2 * i + k];
                    u32 low = at[2 * k], high = at[2 * k + 1];
                    v.x += value(low & 0xffffu), v.y += value(low >> 16);
                    v.z += value(high & 0xffffu), v.w += value(high >> 16);
                    ((float4*)first)[2 * i + k] = v;
                }
            }
        }
    }
};

}  // namespace mpc
}  // namespace hybridcomp
