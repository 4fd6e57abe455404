// radix, encode: HC_TILE_WARPS warps a segment, HC_TILES segments for each look-back. A thread quantizes
// its blocks straight into their words, of which only those that two threads share are put together with
// atomics. Four barriers.
#pragma once

#include "radix_device.h"

#ifndef HC_TILE_WARPS
#define HC_TILE_WARPS 4
#endif
#ifndef HC_TILES
#define HC_TILES 2
#endif
#ifndef HC_WINDOW
#define HC_WINDOW 2  // states that a lane looks at when it looks back
#endif

namespace hybridcomp {
namespace radix {

constexpr u32 TILE_WARPS = HC_TILE_WARPS;
constexpr u32 TILES = HC_TILES;
constexpr u32 TILE_THREADS = TILE_WARPS * WARP;
constexpr u32 EACH = MAX_BLOCKS / TILE_THREADS;  // blocks of a thread, one behind the other
constexpr u32 ENCODE_THREADS = TILE_THREADS * TILES;
constexpr u32 FIRST_ARRIVAL = 1u << 24;  // above the words of all segments of a block of threads
static_assert(EACH == 1 || EACH == 2 || EACH == 4, "planes are put together for these");

HC_INLINE u32 low_part(u32 word, u32 position) {
#if HC_ARCH
    return __funnelshift_l(0, word, position);
#else
    return word << position % 32;
#endif
}
HC_INLINE u32 high_part(u32 word, u32 position) {
#if HC_ARCH
    return __funnelshift_l(word, 0, position);
#else
    return (word >> 1) >> (31 - position % 32);
#endif
}

// Words of some bits, one behind the other. Whole words are stored without a look at what others have
// in the first of them; what is left for the last one, `held`, belongs into it later.
struct Writer {
    u32 *at, held, position;
    HC_INLINE_MEMBER Writer(u32* words, u32 start) : at(words + start / 32), held(0), position(start) {}
    HC_INLINE_MEMBER void put(u32 word, u32 bits) {
        held |= low_part(word, position);
        u32 next = position + bits;
        if ((next ^ position) / 32) {
            *at++ = held;
            held = high_part(word, position);
        }
        position = next;
    }
};

// The words of a block: WORDS of them, each of 16 / WORDS digits. Returns false where an error has to be
// looked at once more.
template <class B, int WORDS>
HC_INLINE bool quantize_words(const B& block, const Step& step, u32 levels, u32* words) {
    constexpr int DIGITS = BLOCK / WORDS;
    // sum of L^k over the digits of a word, times what a digit has too much
    u32 ones = 1;
#pragma unroll
    for (int k = 1; k < DIGITS; ++k) ones = ones * levels + 1;
    u32 excess = ones * (ROUND_BITS - levels / 2), worst = 0;
#pragma unroll
    for (int j = 0; j < WORDS; j += 2) {
        u32 first = 0, second = 0;
#pragma unroll
        for (int k = DIGITS - 1; k >= 0; --k) {
            int i = k * WORDS + j;
            float a = block.value(i) * step.inverse + ROUND, b = block.value(i + 1) * step.inverse + ROUND;
            first = first * levels + float_bits(a), second = second * levels + float_bits(b);
            if constexpr (B::NARROW) {
                u32 both = B::Pairs::narrow((a - ROUND) * step.step, (b - ROUND) * step.step);
                worst = B::Pairs::largest(worst, B::Pairs::difference(both, block.pairs[i / 2]));
            }
        }
        words[j] = first - excess, words[j + 1] = second - excess;
    }
    if constexpr (B::NARROW) {
        u32 limit = B::Pairs::T::store(step.limit);
        return greater(worst & 0x7fffu, worst >> 16 & 0x7fffu) < limit;
    }
    return true;
}

// quantize of radix.h: whether every error is below E. Seldom asked, and so not unrolled.
template <class B>
HC_INLINE bool is_within(const typename B::Stored* at, u32 left, const Step& step) {
    float worst = 0.0f;
#pragma unroll 1
    for (u32 i = 0; i < BLOCK && i < left; ++i) {
        float x = B::load_one(at[i]), a = ((x * step.inverse + ROUND) - ROUND) * step.step;
        worst = greater_magnitude(worst, a - x);
        if constexpr (B::NARROW) worst = greater_magnitude(worst, B::load_one(B::Pairs::T::store(a)) - x);
    }
    return magnitude_bits(worst) < float_bits(step.limit);
}

struct Chosen {
    u32 cls, width;  // cls RAW + 1: zero
    u32 words[8];    // of a class up to FIRST_SINGLE
};

// `at`: where the block lies, of which `left` values are there.
template <class B>
HC_INLINE Chosen choose(const B& block, u32 absmax, const Step& step, bool safe, const typename B::Stored* at, u32 left) {
    Chosen chosen;
    chosen.cls = RAW + 1, chosen.width = 0;
    if (absmax <= float_bits(step.limit)) return chosen;
    Coded coded = coded_of<B>(top_level(absmax, step.inverse));
    u32 levels = levels_of(coded.cls);
    bool good = safe;
    if (coded.cls < FIRST_PAIR) good = quantize_words<B, 4>(block, step, levels, chosen.words) && safe;
    else if (coded.cls < FIRST_SINGLE) good = quantize_words<B, 8>(block, step, levels, chosen.words) && safe;
    if (!good && coded.cls < RAW) good = is_within<B>(at, left, step);
    if (coded.cls == RAW) good = false;
    chosen.cls = good ? coded.cls : RAW;
    chosen.width = good ? coded.width : B::RAW_BITS;
    return chosen;
}

// Raw values, and classes of one digit a word, are read again.
template <class B>
HC_INLINE void put_block(const typename B::Stored* at, u32 left, const Chosen& chosen, const Step& step, Writer& writer) {
    if (chosen.cls < FIRST_SINGLE) {
#pragma unroll
        for (int j = 0; j < 4; ++j) writer.put(chosen.words[j], chosen.width);
        if (chosen.cls < FIRST_PAIR) return;
#pragma unroll
        for (int j = 4; j < 8; ++j) writer.put(chosen.words[j], chosen.width);
    } else if (chosen.cls <= RAW) {
        u32 excess = ROUND_BITS - ((1u << (chosen.width - 1)) - 1);
#pragma unroll 1
        for (u32 i = 0; i < BLOCK; ++i) {
            typename B::Stored stored = i < left ? at[i] : (typename B::Stored)0;
            u32 word = B::bits_of(stored);
            if (chosen.cls != RAW) word = float_bits(B::load_one(stored) * step.inverse + ROUND) - excess;
            writer.put(word, chosen.width);
        }
    }
}

// What all threads of a segment know of it.
struct Head {
    u32 base, span, present, mask_bytes, planes, plane_bytes, bytes, words;
    bool mixed;
};

HC_INLINE u32 lowest_of(u32 word) { return 31 - (u32)__clz((int)(word & (0u - word))); }

// `classes`: a bit for each class that there is; `sums`: bits + 2^20 * blocks that are not zero.
HC_INLINE Head make_head(u32 low, u32 high, u32 sums, u32 blocks) {
    constexpr u32 RAW_BIT = 1u << (RAW - 32);
    Head head;
    u32 coded = high & ~RAW_BIT;
    bool some = (low | coded) != 0;
    u32 top = coded ? 63 - (u32)__clz((int)coded) : 31 - (u32)__clz((int)(low | 1));
    u32 base = low ? lowest_of(low) : 32 + lowest_of(coded ? coded : 1);
    head.base = some ? base : RAW, head.span = some ? top - base : 0;
    head.mixed = some && (high & RAW_BIT) != 0;
    head.present = sums >> 20;
    head.mask_bytes = head.present < blocks ? (blocks + 7) / 8 : 0;
    head.planes = 32 - (u32)__clz((int)(head.span + head.mixed));
    head.plane_bytes = (head.present + 7) / 8;
    head.bytes = TILE_HEADER_BYTES + head.mask_bytes + head.planes * head.plane_bytes;
    head.words = head.present ? (8 * head.bytes + (sums & 0xfffff) + 31) / 32 : 0;
    return head;
}

// Every EACH-th bit: bit i goes to bit EACH * i.
HC_INLINE u32 spread(u32 bits) {
    if (EACH == 2) {
        bits = (bits | bits << 8) & 0x00ff00ffu;
        bits = (bits | bits << 4) & 0x0f0f0f0fu;
        bits = (bits | bits << 2) & 0x33333333u;
        bits = (bits | bits << 1) & 0x55555555u;
    } else if (EACH == 4) {
        bits = (bits | bits << 12) & 0x000f000fu;
        bits = (bits | bits << 6) & 0x03030303u;
        bits = (bits | bits << 3) & 0x11111111u;
    }
    return bits;
}

// A bit of each of a warp's blocks, in `rows` rows that are `stride` bits apart from bit `at` on, which
// is that of the warp's first block. Lane EACH * r + part has a word of row r.
HC_INLINE void put_rows(const u32* fields, u32 rows, u32 at, u32 stride, u32* buffer) {
    constexpr u32 LANES = WARP / EACH;  // of a word
    u32 lane = lane_id(), part = lane % EACH, word = 0;
    u32 mine[EACH];
#pragma unroll
    for (u32 k = 0; k < EACH; ++k) mine[k] = 0;
    for (u32 r = 0; r < rows; ++r) {
#pragma unroll
        for (u32 k = 0; k < EACH; ++k) {
            u32 found = __ballot_sync(FULL_WARP, fields[k] >> r & 1);
            mine[k] = lane / EACH == r ? found : mine[k];
        }
    }
#pragma unroll
    for (u32 k = 0; k < EACH; ++k) {
        u32 bits = EACH == 1 ? mine[k] : mine[k] >> (part * LANES % 32) & ((1u << LANES % 32) - 1);
        word |= spread(bits) << k;
    }
    if (word) put_word(buffer, at + lane / EACH * stride + 32 * part, word);
}

// Header, mask and planes. `b`: the thread of the segment; `index`: of its first block among those that
// are not zero.
HC_INLINE void put_head(const Head& head, float step, const Chosen* chosen, u32 b, u32 index, u32* buffer) {
    u32 fields[EACH], at = 8 * TILE_HEADER_BYTES, first = b / WARP * WARP * EACH;
    if (b == 0) {
        buffer[0] = float_bits(step);
        buffer[1] = head.base | head.span << 8 | ((head.mask_bytes ? ZEROS : 0) | (head.mixed ? RAWS : 0)) << 16;
    }
    if (head.mask_bytes) {
#pragma unroll
        for (u32 k = 0; k < EACH; ++k) fields[k] = chosen[k].cls <= RAW;
        put_rows(fields, 1, at + first, 0, buffer);
        at += 8 * head.mask_bytes;
    }
#pragma unroll
    for (u32 k = 0; k < EACH; ++k) {
        u32 cls = chosen[k].cls;
        fields[k] = cls < RAW ? cls - head.base : cls == RAW && head.mixed ? head.span + 1 : 0;
    }
    if (!head.mask_bytes) {
        put_rows(fields, head.planes, at + first, 8 * head.plane_bytes, buffer);
        return;
    }
#pragma unroll
    for (u32 k = 0; k < EACH; ++k) {
        if (chosen[k].cls > RAW) continue;
        for (u32 plane = 0; fields[k] >> plane; ++plane) {
            u32 bit = at + plane * 8 * head.plane_bytes + index;
            if (fields[k] >> plane & 1) atomicOr(buffer + bit / 32, 1u << bit % 32);
        }
        ++index;
    }
}

// look_back of cuda_tiles.h behind its first line, HC_WINDOW states a lane at a time.
HC_INLINE u32 look_far_back(u64* states, u32 tile, u32 mine) {
    u32 lane = lane_id(), total = 0;
    for (u32 end = tile; end > 0;) {
        u64 window[HC_WINDOW];
#pragma unroll
        for (u32 k = 0; k < HC_WINDOW; ++k) {
            u32 back = WARP * k + lane;
            window[k] = back < end ? load_state(states + end - 1 - back) : PREFIX;
        }
        bool found = false;
#pragma unroll
        for (u32 k = 0; k < HC_WINDOW; ++k) {
            if (found) continue;
            u32 back = WARP * k + lane;
            while ((window[k] >> 32) == 0) window[k] = load_state(states + end - 1 - back);
            u32 whole = __ballot_sync(FULL_WARP, (window[k] >> 32) == 2), nearest = whole & (0u - whole);
            total += sum_of_lanes(whole == 0 || (1u << lane) <= nearest ? (u32)window[k] : 0);
            found = whole != 0;
        }
        end = found || end < HC_WINDOW * WARP ? 0 : end - HC_WINDOW * WARP;
    }
    if (lane == 0 && tile) publish(states + tile, PREFIX | (u64)(total + mine));
    return total;
}

constexpr u32 HEAD_WORDS = (TILE_HEADER_BYTES + 7 * MAX_BLOCKS / 8) / 4;  // with mask and six planes

template <class B>
struct TileMemory {
    u32 buffer[HEAD_WORDS + MAX_TILE * B::RAW_BITS / 32 + 1];
    u32 sums[TILE_WARPS], tops[TILE_WARPS];
    u32 classes[2];  // bits of those that there are
};

template <class B>
HC_INLINE void encode(const void* in, u64 numel, u64 segment, u64 bound, u64 relative, u64 dtype, u8* out,
                      Workspace* work, u64* size) {
    __shared__ TileMemory<B> memory[TILES];
    __shared__ u32 lengths[TILES], state, begin;
    u32 which = threadIdx.x / TILE_THREADS, b = threadIdx.x % TILE_THREADS, warp = b / WARP;
    TileMemory<B>& mine = memory[which];
    u32* buffer = mine.buffer;
    for (u32 i = b; i < HEAD_WORDS; i += TILE_THREADS) buffer[i] = 0;
    if (b < 2) mine.classes[b] = 0;
    if (threadIdx.x == 0) state = 0;
    u32 group = take_ticket(work), tile = group * TILES + which, tiles = (u32)ceil_div(numel, segment);
    u64 first = (u64)tile * segment;
    u32 count = first >= numel ? 0 : (u32)(numel - first < segment ? numel - first : segment);
    u32 blocks = (count + BLOCK - 1) / BLOCK;
    const auto* source = (const typename B::Stored*)in + first;
    bool vectors = ((u64)source & 15) == 0;
    B values[EACH];
    u32 absmax[EACH], top = 0;
#pragma unroll
    for (u32 k = 0; k < EACH; ++k) {
        u32 at = (b * EACH + k) * BLOCK;
        values[k].load(source + at, at < count ? count - at : 0, vectors);
    }
#pragma unroll
    for (u32 k = 0; k < EACH; ++k) {
        absmax[k] = values[k].absmax();
        top = greater(top, absmax[k] < INF_BITS ? absmax[k] : finite_top(values[k]));
    }
    top = greatest_in_warp(top);
    if (lane_id() == 0) mine.tops[warp] = top;
    __syncthreads();
#pragma unroll
    for (u32 w = 0; w < TILE_WARPS; ++w) top = greater(top, mine.tops[w]);
    float limit = limit_of(bits_float((u32)bound), relative != 0, top), half = half_of<B>(limit, top);
    Step step = make_step(limit, half, top);
    bool safe = is_safe(step, half, top);
    Chosen chosen[EACH];
    u32 sums = 0, low = 0, high = 0;
#pragma unroll
    for (u32 k = 0; k < EACH; ++k) {
        u32 at = (b * EACH + k) * BLOCK;
        chosen[k] = choose(values[k], absmax[k], step, safe, source + at, at < count ? count - at : 0);
        u32 cls = chosen[k].cls;
        sums += cls <= RAW ? size_of(cls, chosen[k].width) + (1u << 20) : 0;
        low |= cls < 32 ? 1u << cls : 0, high |= cls >= 32 && cls <= RAW ? 1u << (cls - 32) : 0;
    }
    low = union_in_warp(low), high = union_in_warp(high);
    u32 included = scan_lanes(sums);
    if (lane_id() == WARP - 1) {
        mine.sums[warp] = included;
        if (low) atomicOr(mine.classes, low);
        if (high) atomicOr(mine.classes + 1, high);
    }
    __syncthreads();
    u32 before = included - sums, all = 0;
#pragma unroll
    for (u32 w = 0; w < TILE_WARPS; ++w) before += w < warp ? mine.sums[w] : 0, all += mine.sums[w];
    Head head = make_head(mine.classes[0], mine.classes[1], all, blocks);
    // the last segment to come here says how long all are, and will look back
    u32 total = 0;
    if (warp == 0) {
        if (lane_id() == 0) {
            lengths[which] = head.words;
            u32 arrived = atomicAdd(&state, head.words + FIRST_ARRIVAL);
            if (arrived / FIRST_ARRIVAL == TILES - 1) {
                total = arrived % FIRST_ARRIVAL + head.words + FIRST_ARRIVAL;
                publish(work->states + group, (group ? AGGREGATE : PREFIX) | total % FIRST_ARRIVAL);
            }
        }
        total = __shfl_sync(FULL_WARP, total, 0);
    }
    u32 used = 8 * head.bytes + (all & 0xfffff);
    if (b == 0 && used % 32) buffer[used / 32] = 0;  // nobody has a whole word there
    Writer writer(buffer, 8 * head.bytes + (before & 0xfffff));
#pragma unroll
    for (u32 k = 0; k < EACH; ++k) {
        u32 at = (b * EACH + k) * BLOCK;
        put_block<B>(source + at, count - at, chosen[k], step, writer);
    }
    __syncthreads();
    if (writer.held) atomicOr(writer.at, writer.held);
    if (head.present) put_head(head, step.step, chosen, b, before >> 20, buffer);
    if (total) {
        u32 found = look_far_back(work->states, group, total % FIRST_ARRIVAL);
        if (lane_id() == 0) begin = found;
    }
    __syncthreads();
    u32 place = begin, end = begin;
#pragma unroll
    for (u32 t = 0; t < TILES; ++t) place += t < which ? lengths[t] : 0, end += lengths[t];
    u64 data = HEADER_BYTES + 4ull * tiles;
    u32* target = (u32*)(out + data) + place;
#pragma unroll 4
    for (u32 i = b; i < head.words; i += TILE_THREADS) target[i] = buffer[i];
    if (b == 0 && tile < tiles) ((u32*)(out + HEADER_BYTES))[tile] = place;
    if ((group + 1) * TILES >= tiles) {
        finish_message(out, data, MAGIC, VERSION, (u32)dtype, relative ? 0 : 1, numel, (u32)segment, (u32)bound,
                       end, TAIL_BYTES, size);
    }
}

}  // namespace radix
}  // namespace hybridcomp
