// CUDA kernels of expcode: 256 threads take a tile of 2048 values, a warp eight of its blocks of 32. Lane
// is slot: lanes read the values of a block in the order of their slots, so that bytes, escapes and
// levels come out in the order of the format.
#include "cuda_tiles.h"

#include "expcode.h"

namespace hybridcomp {
namespace expcode {

constexpr int THREADS = 256;
constexpr int WARPS = THREADS / WARP;
constexpr int ROUNDS = TILE_BLOCKS / WARPS;  // blocks of a warp; its r-th is block 8 r + warp
constexpr u32 NO_BASE = ~0u;

template <class F>
struct Stored {
    typedef u16 Type;
};
template <>
struct Stored<Single> {
    typedef u32 Type;
};

// The value of this lane's slot.
template <class F>
HC_INLINE u32 value_of_slot(u32 slot) {
    return F::ITEM_BYTES == 4 ? slot / 4 + 8 * (slot % 4) : slot / 2 + 16 * (slot % 2);
}

// The bits of the levels' fields of `WIDTH` bits at `SHIFT`; lane is slot. Bytes 0 .. 4 WIDTH - 1 are
// those of the first lanes.
template <int WIDTH, int SHIFT>
HC_INLINE void put_field(u32 level, u8* out) {
    u32 lane = lane_id(), word = lane / 4;
    u32 field = ((level >> SHIFT) & ((1u << WIDTH) - 1)) << (word / WIDTH * WIDTH);
    if constexpr (WIDTH == 4) field = union_of<16>(field);
    if constexpr (WIDTH == 2) field = union_of<8, 16>(field);
    if constexpr (WIDTH == 1) field = union_of<4, 8, 16>(field);
    if (lane < 4 * WIDTH) out[lane] = (u8)field;
}

template <int WIDTH, int SHIFT>
HC_INLINE u32 get_field(const u8* in) {
    u32 word = lane_id() / 4, byte = in[4 * (word % WIDTH) + lane_id() % 4];
    return ((byte >> (word / WIDTH * WIDTH)) & ((1u << WIDTH) - 1)) << SHIFT;
}

template <int BITS>
HC_INLINE void put_levels(u32 level, u8* out) {
    if constexpr (BITS == 8) out[lane_id()] = (u8)level;
    if constexpr ((BITS & 4) != 0) put_field<4, BITS & 3>(level, out);
    if constexpr ((BITS & 2) != 0) put_field<2, BITS & 1>(level, out + 4 * (BITS & 4));
    if constexpr ((BITS & 1) != 0) put_field<1, 0>(level, out + 4 * (BITS & 6));
}

template <int BITS>
HC_INLINE u32 get_levels(const u8* in) {
    u32 level = 0;
    if constexpr (BITS == 8) level = in[lane_id()];
    if constexpr ((BITS & 4) != 0) level |= get_field<4, BITS & 3>(in);
    if constexpr ((BITS & 2) != 0) level |= get_field<2, BITS & 1>(in + 4 * (BITS & 4));
    if constexpr ((BITS & 1) != 0) level |= get_field<1, 0>(in + 4 * (BITS & 6));
    return level;
}

// What is common to one tile's blocks.
struct Shared {
    u32 counts[256 + 16];     // of the sampled exponents
    u32 escapes[TILE_BLOCKS]; // of a block, then of those before it
    u8 present[TILE_BLOCKS];  // 1: not zero
    u8 number[TILE_BLOCKS];   // of a block among those, or the block of a number
    u32 best, halves, place;
};

// The coding that expcode::choose finds: each thread tries one base. The smallest of cost, then order of
// the codings, then base; width E comes last among equals.
template <class F>
HC_INLINE Coding choose_in_block(Shared& shared, u32 total, u32 first, u32 last) {
    u32 base = threadIdx.x, best = F::WIDEST * total << 11 | 7u << 8;
    u32 zeros = shared.counts[0];
    for (u32 zero = 0; zero < (zeros ? 2u : 1u); ++zero) {
        u32 lowest = zero && first == 0 ? 1 : first;
        for (u32 width = 2; width <= 4; ++width) {
            if (base < lowest || base > last) continue;
            u32 window = (1u << width) - 1 - zero, covered = zero ? zeros : 0;
            for (u32 e = base; e < base + window && e <= last; ++e) covered += shared.counts[e];
            u32 cost = width * total + 8 * (total - covered);
            u32 key = cost << 11 | (3 * zero + width - 2) << 8 | base;
            best = key < best ? key : best;
        }
    }
    u32 inverted = ~best, unused = 0;
    largest_in_block(inverted, unused);
    best = ~inverted;
    u32 order = best >> 8 & 7;
    if (order == 7) return Coding{0, F::WIDEST, false, false};
    return Coding{best & 255, order % 3 + 2, order >= 3, false};
}

// Samples exponents of the values that this thread holds; returns the coding, without `halves`.
template <class F>
HC_INLINE Coding sample(Shared& shared, const u32* turned, u32 present) {
    u32 stride = present / SAMPLED_BLOCKS, first = 255, last = 0, sampled = 0;
    stride = stride ? stride : 1;
    for (u32 i = threadIdx.x; i < 256 + 16; i += THREADS) shared.counts[i] = 0;
    __syncthreads();
#pragma unroll
    for (int r = 0; r < ROUNDS; ++r) {
        u32 block = r * WARPS + threadIdx.x / WARP, number = shared.number[block];
        bool taken = shared.present[block] && number % stride == 0 &&
                     number / stride < SAMPLED_BLOCKS;
        if (!taken) continue;
        u32 e = turned[r] >> F::REST;
        atomicAdd(shared.counts + e, 1u);
        first = e < first ? e : first;
        last = e > last ? e : last;
    }
    sampled = (present + stride - 1) / stride;
    sampled = sampled < SAMPLED_BLOCKS ? sampled : SAMPLED_BLOCKS;
    u32 inverted = 255 - first;
    largest_in_block(inverted, last);  // its barriers also end the counting
    return choose_in_block<F>(shared, sampled * BLOCK, 255 - inverted, last);
}

// Which blocks are zero, and the numbers of the others. Returns how many there are.
HC_INLINE u32 number_blocks(Shared& shared) {
    u32 lane = lane_id(), total = 0;
    __syncthreads();
    if (threadIdx.x < WARP) {
        for (u32 half = 0; half < TILE_BLOCKS; half += WARP) {
            u32 mask = __ballot_sync(FULL_WARP, shared.present[half + lane]);
            shared.number[half + lane] = (u8)(total + __popc(mask & ((1u << lane) - 1)));
            total += __popc(mask);
        }
        if (lane == 0) shared.best = total;
    }
    __syncthreads();
    return shared.best;
}

// escapes[b] becomes the number of those before block b; returns all of them.
HC_INLINE u32 sum_escapes(Shared& shared) {
    __syncthreads();
    if (threadIdx.x < WARP) {
        u32 low = shared.escapes[lane_id()], high = shared.escapes[WARP + lane_id()];
        u32 first = scan_lanes(low), second = scan_lanes(high);
        u32 total = __shfl_sync(FULL_WARP, first, WARP - 1);
        shared.escapes[lane_id()] = first - low;
        shared.escapes[WARP + lane_id()] = total + second - high;
        total += __shfl_sync(FULL_WARP, second, WARP - 1);
        if (lane_id() == 0) shared.best = total;
    }
    __syncthreads();
    u32 total = shared.best;
    __syncthreads();
    return total;
}

template <class F>
HC_INLINE u32 count_escapes(Shared& shared, const u32* turned, Coding coding) {
    __syncthreads();
#pragma unroll
    for (int r = 0; r < ROUNDS; ++r) {
        u32 block = r * WARPS + threadIdx.x / WARP;
        u32 code = code_of(turned[r] >> F::REST, F::WIDEST, coding);
        bool escaped = shared.present[block] && is_escape(code, F::WIDEST, coding);
        u32 mask = __ballot_sync(FULL_WARP, escaped);
        if (lane_id() == 0) shared.escapes[block] = __popc(mask);
    }
    return sum_escapes(shared);
}

// The levels of this warp's blocks. What depends on the width at compile time is kept this small: every
// width is another copy.
template <class F, int WIDTH>
HC_INLINE void put_all_levels(const Shared& shared, const u32* turned, Coding coding, u8* blocks) {
#pragma unroll
    for (int r = 0; r < ROUNDS; ++r) {
        u32 block = r * WARPS + threadIdx.x / WARP, bits = turned[r];
        if (!shared.present[block]) continue;
        u32 level = code_of(bits >> F::REST, F::WIDEST, coding);
        if (F::SHARED) level |= ((bits >> 8) & 7u) << WIDTH;
        u8* out = blocks + shared.number[block] * F::block_bytes(WIDTH, coding.halves);
        put_levels<WIDTH + F::SHARED>(level, out + BLOCK);
    }
}

template <class F>
HC_INLINE void put_blocks(const Shared& shared, const u32* turned, Coding coding, u8* blocks,
                          u8* escapes) {
    u32 lane = lane_id(), value = value_of_slot<F>(lane);
    u32 stride = F::block_bytes(coding.width, coding.halves);
#pragma unroll
    for (int r = 0; r < ROUNDS; ++r) {
        u32 block = r * WARPS + threadIdx.x / WARP, bits = turned[r];
        if (!shared.present[block]) continue;
        u8* out = blocks + shared.number[block] * stride;
        out[lane] = (u8)(F::ITEM_BYTES == 4 ? bits >> 16 : bits);
        if (F::ITEM_BYTES == 4 && coding.halves) {
            u8* half = out + BLOCK + 4 * coding.width + 2 * F::half((int)value);
            half[0] = (u8)bits, half[1] = (u8)(bits >> 8);
        }
        u32 exponent = bits >> F::REST;
        bool escaped = is_escape(code_of(exponent, F::WIDEST, coding), F::WIDEST, coding);
        u32 mask = __ballot_sync(FULL_WARP, escaped);
        if (escaped) escapes[shared.escapes[block] + __popc(mask & ((1u << lane) - 1))] = (u8)exponent;
    }
    if (coding.width == 2) put_all_levels<F, 2>(shared, turned, coding, blocks);
    else if (coding.width == 3) put_all_levels<F, 3>(shared, turned, coding, blocks);
    else if (coding.width == 4) put_all_levels<F, 4>(shared, turned, coding, blocks);
    else put_all_levels<F, F::WIDEST>(shared, turned, coding, blocks);
}

template <class F>
HC_INLINE void encode(const void* in, u64 numel, u64 dtype, u8* out, Workspace* work, u64* size) {
    typedef typename Stored<F>::Type Item;
    __shared__ Shared shared;
    u32 tile = take_ticket(work), tiles = (u32)ceil_div(numel, TILE);
    u64 first = (u64)tile * TILE;
    u32 count = (u32)(numel - first < TILE ? numel - first : TILE), blocks = (count + BLOCK - 1) / BLOCK;
    const Item* source = (const Item*)in + first;
    u32 turned[ROUNDS], low = 0, unused = 0;
#pragma unroll
    for (int r = 0; r < ROUNDS; ++r) {
        u32 block = r * WARPS + threadIdx.x / WARP;
        u32 at = block * BLOCK + value_of_slot<F>(lane_id());
        // the last block is filled up with copies of the last value
        u32 bits = block < blocks ? source[at < count ? at : count - 1] : 0;
        u32 any = __ballot_sync(FULL_WARP, bits != 0);
        if (lane_id() == 0) shared.present[block] = any != 0;
        low |= bits & 0xffff;
        turned[r] = F::turn(bits);
    }
    u32 present = number_blocks(shared);
    Coding coding = sample<F>(shared, turned, present);
    largest_in_block(low, unused);
    coding.halves = F::ITEM_BYTES == 4 && low != 0;
    u32 escapes = count_escapes<F>(shared, turned, coding);
    if (escapes && escapes >= 4 * (F::WIDEST - coding.width) * present) {
        coding = Coding{0, F::WIDEST, false, coding.halves};
        escapes = count_escapes<F>(shared, turned, coding);
    }
    bool masked = present < blocks;
    u32 head = TILE_HEADER_BYTES + (masked ? (blocks + 7) / 8 : 0);
    u32 body = head + present * F::block_bytes(coding.width, coding.halves);
    u32 words = present ? (body + escapes + 3) / 4 : 0;
    if (threadIdx.x < WARP) {
        u32 before = look_back(work->states, tile, words);
        if (threadIdx.x == 0) shared.place = before;
    }
    __syncthreads();
    u64 data = HEADER_BYTES + 4ull * tiles;
    u8* target = out + data + 4ull * shared.place;
    if (threadIdx.x == 0) ((u32*)(out + HEADER_BYTES))[tile] = shared.place;
    if (present) {
        if (threadIdx.x == 0) {
            bool none = F::ITEM_BYTES == 4 && !coding.halves;
            target[0] = (u8)coding.base;
            target[1] = (u8)(coding.width | (masked ? ZERO_BLOCKS : 0) |
                             (coding.zero ? ZERO_CODE : 0) | (none ? ZERO_HALVES : 0));
            target[2] = (u8)escapes, target[3] = (u8)(escapes >> 8);
        }
        if (masked && threadIdx.x < (blocks + 7) / 8) {
            u32 byte = 0;
            for (u32 i = 0; i < 8; ++i) byte |= (u32)shared.present[8 * threadIdx.x + i] << i;
            target[TILE_HEADER_BYTES + threadIdx.x] = (u8)byte;
        }
        if (threadIdx.x < 4 * words - body - escapes) target[body + escapes + threadIdx.x] = 0;
        put_blocks<F>(shared, turned, coding, target + head, target + body);
    }
    if (tile + 1 == tiles) {
        finish_message(out, data, MAGIC, VERSION, (u32)dtype, 0, numel, TILE, 0,
                       shared.place + words, 0, size);
    }
}

// Where the parts of a tile are.
struct Body {
    Coding coding;
    const u8* blocks;
    const u8* escapes;
    u32 count;  // escapes
};

template <class F>
HC_INLINE bool read_head(Shared& shared, const u8* in, u32 nbytes, u32 blocks, Body& body) {
    bool good = nbytes >= TILE_HEADER_BYTES;
    u32 flags = good ? in[1] : 0, width = flags & 15, masks = (blocks + 7) / 8;
    bool masked = flags & ZERO_BLOCKS, halves = F::ITEM_BYTES == 4 && !(flags & ZERO_HALVES);
    good = good && ((width >= 2 && width <= 4) || width == F::WIDEST);
    good = good && (!masked || nbytes >= TILE_HEADER_BYTES + masks);
    if (threadIdx.x < TILE_BLOCKS) {
        u32 b = threadIdx.x, there = good && b < blocks;
        if (there && masked) there = in[TILE_HEADER_BYTES + b / 8] >> (b % 8) & 1;
        shared.present[b] = (u8)there;
    }
    u32 present = number_blocks(shared);
    body.coding = Coding{good ? in[0] : 0u, width, (flags & ZERO_CODE) != 0, halves};
    body.count = good ? in[2] | (u32)in[3] << 8 : 0;
    body.blocks = in + TILE_HEADER_BYTES + (masked ? masks : 0);
    u32 data = present * F::block_bytes(width, halves);
    body.escapes = body.blocks + data;
    return good && (u32)(body.escapes - in) + body.count <= nbytes;
}

// The levels of this warp's blocks, 0 where a block is not there.
template <class F, int WIDTH>
HC_INLINE void get_all_levels(Shared& shared, const Body& body, u32* levels) {
#pragma unroll
    for (int r = 0; r < ROUNDS; ++r) {
        u32 block = r * WARPS + threadIdx.x / WARP;
        const u8* in = body.blocks + shared.number[block] * F::block_bytes(WIDTH, body.coding.halves);
        levels[r] = shared.present[block] ? get_levels<WIDTH + F::SHARED>(in + BLOCK) : 0;
    }
}

// Adds or writes the values of a tile.
template <class F, class T, bool ADD>
HC_INLINE bool get_blocks(Shared& shared, const Body& body, u32 count, void* target) {
    typedef typename Stored<F>::Type Item;
    u32 levels[ROUNDS], lane = lane_id(), value = value_of_slot<F>(lane), width = body.coding.width;
    if (width == 2) get_all_levels<F, 2>(shared, body, levels);
    else if (width == 3) get_all_levels<F, 3>(shared, body, levels);
    else if (width == 4) get_all_levels<F, 4>(shared, body, levels);
    else get_all_levels<F, F::WIDEST>(shared, body, levels);
    u32 field = (1u << width) - 1, stride = F::block_bytes(width, body.coding.halves);
#pragma unroll
    for (int r = 0; r < ROUNDS; ++r) {
        u32 block = r * WARPS + threadIdx.x / WARP;
        bool escaped = shared.present[block] && is_escape(levels[r] & field, F::WIDEST, body.coding);
        u32 mask = __ballot_sync(FULL_WARP, escaped);
        if (lane == 0) shared.escapes[block] = __popc(mask);
    }
    if (sum_escapes(shared) != body.count) return false;
#pragma unroll
    for (int r = 0; r < ROUNDS; ++r) {
        u32 block = r * WARPS + threadIdx.x / WARP, at = block * BLOCK + value, bits = 0;
        if (shared.present[block]) {
            const u8* in = body.blocks + shared.number[block] * stride;
            u32 code = levels[r] & field;
            bool escaped = is_escape(code, F::WIDEST, body.coding);
            u32 mask = __ballot_sync(FULL_WARP, escaped);
            u32 exponent = exponent_of(code, F::WIDEST, body.coding);
            if (escaped) exponent = body.escapes[shared.escapes[block] + __popc(mask & ((1u << lane) - 1))];
            bits = exponent << F::REST | (u32)in[lane] << (F::ITEM_BYTES == 4 ? 16 : 0);
            if (F::SHARED) bits |= ((levels[r] >> width) & 7u) << 8;
            if (body.coding.halves) {
                const u8* half = in + BLOCK + 4 * width + 2 * F::half((int)value);
                bits |= half[0] | (u32)half[1] << 8;
            }
            bits = F::turn_back(bits);
        }
        if (at >= count) continue;
        if constexpr (ADD) {
            ((float*)target)[at] += T::load(F::ITEM_BYTES == 4 ? bits_float(bits) : (u16)bits);
        } else {
            ((Item*)target)[at] = (Item)bits;
        }
    }
    return true;
}

template <class F, class T, bool ADD>
HC_INLINE void decode(const u8* in, u64 nbytes, u64 numel, u64 dtype, void* target,
                      u32* damage) {
    __shared__ Shared shared;
    const u32* header = (const u32*)in;
    u32 tile = blockIdx.x, tiles = (u32)ceil_div(numel, TILE), length = header[6];
    u64 first = (u64)tile * TILE, data = HEADER_BYTES + 4ull * tiles;
    u32 count = (u32)(numel - first < TILE ? numel - first : TILE), blocks = (count + BLOCK - 1) / BLOCK;
    bool good = header[0] == MAGIC && header[1] == (VERSION | (u32)dtype << 8) &&
                header[2] == (u32)numel && header[3] == (u32)(numel >> 32) && header[4] == TILE &&
                data + 4ull * length <= nbytes;
    const u32* offsets = header + HEADER_BYTES / 4;
    u32 begin = offsets[tile], end = tile + 1 < tiles ? offsets[tile + 1] : length;
    good = good && begin <= end && end <= length;
    Body body;
    u32 span = good ? 4 * (end - begin) : 0;
    bool empty = good && begin == end;
    bool read = read_head<F>(shared, in + data + 4ull * (good ? begin : 0), span, blocks, body);
    auto* out = (u8*)target + first * (ADD ? 4 : F::ITEM_BYTES);
    if (empty || !read) {
        if (!empty) report_damage(damage);
        for (u32 i = threadIdx.x; !ADD && i < count * F::ITEM_BYTES; i += THREADS) out[i] = 0;
        return;
    }
    if (!get_blocks<F, T, ADD>(shared, body, count, out)) report_damage(damage);
}

}  // namespace expcode
}  // namespace hybridcomp

#define HC_EXPCODE(NAME, F, T)                                                                   \
    extern "C" __global__ void __launch_bounds__(256)                                            \
    expcode_encode_##NAME(const void* values, unsigned long long numel, unsigned long long dtype, \
                          unsigned char* out, void* work, unsigned long long* size) {            \
        hybridcomp::expcode::encode<hybridcomp::expcode::F>(                                     \
            values, numel, dtype, out, (hybridcomp::Workspace*)work, size);                      \
    }                                                                                            \
    extern "C" __global__ void __launch_bounds__(256)                                            \
    expcode_decode_##NAME(const unsigned char* in, unsigned long long nbytes,                    \
                          unsigned long long numel, unsigned long long dtype, void* out,         \
                          unsigned int* damage) {                                                \
        hybridcomp::expcode::decode<hybridcomp::expcode::F, hybridcomp::T, false>(               \
            in, nbytes, numel, dtype, out, damage);                                              \
    }                                                                                            \
    extern "C" __global__ void __launch_bounds__(256)                                            \
    expcode_add_##NAME(const unsigned char* in, unsigned long long nbytes,                       \
                       unsigned long long numel, unsigned long long dtype, void* out,            \
                       unsigned int* damage) {                                                   \
        hybridcomp::expcode::decode<hybridcomp::expcode::F, hybridcomp::T, true>(                \
            in, nbytes, numel, dtype, out, damage);                                              \
    }
HC_EXPCODE(fp32, Single, Fp32)
HC_EXPCODE(bf16, Brain, BFloat16)
HC_EXPCODE(fp16, Half, Float16)
