// CUDA kernels of zfp: a lane takes EACH blocks of 4 values; a warp takes 32 blocks at a time, which begin and
// end at a multiple of 32 bits at every rate. A block of whole words is stored directly; otherwise the warp joins
// its bits in shared memory, which also has the tables of zfp.h.
#include "zfp_device.h"

#ifndef HC_ZFP_BLOCKS
#define HC_ZFP_BLOCKS 5
#endif
#ifndef HC_ZFP_EACH
#define HC_ZFP_EACH 4
#endif

namespace hybridcomp {
namespace zfp {

constexpr int THREADS = 256;
constexpr int WARPS = THREADS / WARP;
constexpr int EACH = HC_ZFP_EACH;
constexpr int MOST_WORDS = 128 + 8;  // of a warp's blocks, and of the padding behind the last ones

alignas(16) __device__ const Tables TABLES = make_tables();

// Words of 32 bits. The stream is whole words of 64 bits, filled up to 16 bytes.
HC_INLINE u64 stream_words(u64 blocks, u64 maxbits) {
    return align16(ceil_div(blocks * maxbits, 64) * 8) / 4;
}

// Copies a table into shared memory, where lanes can read different entries at once.
template <int ENTRIES>
HC_INLINE void copy_table(const u32* from, uint4* to) {
    static_assert(ENTRIES % 4 == 0, "16 bytes at a time");
    for (u32 i = threadIdx.x; i < ENTRIES / 4; i += THREADS) to[i] = ((const uint4*)from)[i];
}

// zfp's rule for a last block of 1, 2 or 3 values.
HC_INLINE void fill_block(float* block, u64 count) {
    if (count < 2) block[1] = block[0];
    if (count < 3) block[2] = block[1];
    if (count < 4) block[3] = block[0];
}

HC_INLINE u32 word_of(Bits bits, u32 index) {
    return (u32)((index < 2 ? bits.low : bits.high) >> (32 * (index & 1)));
}

// ORs `maxbits` bits into `words`, from bit `position` on.
HC_INLINE void merge(Bits bits, u32 position, u32 maxbits, u32* words) {
    u32 shift = position % 32, first = position / 32;
    for (u32 i = 0; 32 * i < maxbits; ++i) {
        u32 word = word_of(bits, i);
        atomicOr(words + first + i, word << shift);
        u32 carry = (word >> 1) >> (31 - shift);
        if (carry) atomicOr(words + first + i + 1, carry);
    }
}

// Stores a warp's blocks from `first` on, at any rate.
HC_INLINE void put_blocks(Bits bits, u64 first, u64 blocks, u64 maxbits, u32* stream,
                          u32* gathered) {
    u32* words = stream + first * maxbits / 32;
    bool last = first + WARP >= blocks;
    if (!last && maxbits % 32 == 0) {
        words += lane_id() * (maxbits / 32);
        for (u32 i = 0; i < maxbits / 32; ++i) words[i] = word_of(bits, i);
        return;
    }
    for (u32 i = lane_id(); i < MOST_WORDS; i += WARP) gathered[i] = 0;
    sync_warp();
    merge(bits, lane_id() * (u32)maxbits, (u32)maxbits, gathered);
    sync_warp();
    u64 count = last ? stream_words(blocks, maxbits) - first * maxbits / 32 : maxbits;
    for (u32 i = lane_id(); i < count; i += WARP) words[i] = gathered[i];
    sync_warp();
}

template <class T>
HC_INLINE void encode(const void* source, u64 numel, u64 maxbits, u8* out) {
    __shared__ uint4 entries[ENCODE_ENTRIES / 4];
    const u32* table = (const u32*)entries;
    __shared__ u32 shared[WARPS][MOST_WORDS];
    const auto* in = (const typename T::Stored*)source;
    u64 blocks = ceil_div(numel, BLOCK);
    u64 start = (u64)blockIdx.x * (THREADS * EACH) + threadIdx.x / WARP * WARP;
    bool vectors = vectorizable<T>(in);
    u32* stream = (u32*)out;
    Four held[EACH];
#pragma unroll
    for (int r = 0; r < EACH; ++r) {
        held[r] = read4<T>(in, (start + r * THREADS + lane_id()) * BLOCK, numel, vectors);
    }
    copy_table<ENCODE_ENTRIES>(TABLES.encode, entries);
    __syncthreads();
#pragma unroll
    for (int r = 0; r < EACH; ++r) {
        u64 first = start + r * THREADS, block = first + lane_id();
        if (first >= blocks) return;
        float values[BLOCK] = {held[r].x, held[r].y, held[r].z, held[r].w};
        if (maxbits == 32 && first + WARP < blocks) {
            stream[block] = encode_word(values, table);
            continue;
        }
        if (maxbits == 64 && first + WARP < blocks) {
            ((u64*)stream)[block] = encode_two_words(values, table);
            continue;
        }
        bool there = block < blocks;
        u64 left = numel - block * BLOCK;
        if (there && left < BLOCK) fill_block(values, left);
        Bits bits = encode_wide(values, (u32)maxbits, table);
        if (!there) bits = Bits{0, 0};
        put_blocks(bits, first, blocks, maxbits, stream, shared[threadIdx.x / WARP]);
    }
}

// Bits `position` .. of a stream of `count` words, past whose end there is nothing.
HC_INLINE u32 read_bits(const u32* words, u64 position, u64 count) {
    u64 first = position / 32;
    u32 shift = position % 32;
    u32 low = first < count ? words[first] : 0, high = first + 1 < count ? words[first + 1] : 0;
    return low >> shift | (high << 1) << (31 - shift);
}

HC_INLINE Bits get_block(const u32* words, u64 block, u64 blocks, u64 maxbits) {
    if (maxbits == 32) return Bits{words[block], 0};
    if (maxbits == 64) return Bits{((const u64*)words)[block], 0};
    u64 count = stream_words(blocks, maxbits), position = block * maxbits;
    Bits bits = {read_bits(words, position, count), 0};
    if (maxbits > 32) bits.low |= (u64)read_bits(words, position + 32, count) << 32;
    if (maxbits > 64) bits.high = read_bits(words, position + 64, count);
    if (maxbits > 96) bits.high |= (u64)read_bits(words, position + 96, count) << 32;
    return bits;
}

template <class T, bool ADD>
HC_INLINE void decode(const u8* in, u64 numel, u64 maxbits, void* target) {
    __shared__ uint4 entries[DECODE_ENTRIES / 4];
    const u32* table = (const u32*)entries;
    u64 blocks = ceil_div(numel, BLOCK);
    u64 start = (u64)blockIdx.x * (THREADS * EACH) + threadIdx.x;
    auto* out = (typename T::Stored*)target;
    bool vectors = vectorizable<T>(out);
    const u32* words = (const u32*)in;
    Bits held[EACH];
#pragma unroll
    for (int r = 0; r < EACH; ++r) {
        u64 block = start + r * THREADS;
        held[r] = Bits{0, 0};
        if (block < blocks) held[r] = get_block(words, block, blocks, maxbits);
    }
    copy_table<DECODE_ENTRIES>(TABLES.decode, entries);
    __syncthreads();
#pragma unroll
    for (int r = 0; r < EACH; ++r) {
        u64 block = start + r * THREADS;
        if (block >= blocks) return;
        Four v = maxbits == 32   ? decode_word((u32)held[r].low, table)
                 : maxbits == 64 ? decode_two_words(held[r].low, table)
                                 : decode_wide(held[r], (u32)maxbits, table);
        if constexpr (ADD) v = sum(read4<T>(out, block * BLOCK, numel, vectors), v);
        write4<T>(v, out, block * BLOCK, numel, vectors);
    }
}

#define HC_ENCODE(NAME, T)                                                                         \
    extern "C" __global__ void HC_BOUNDS(256, HC_ZFP_BLOCKS)                                       \
    zfp_encode_##NAME(const void* values, u64 numel, u64 maxbits, u8* out) {                       \
        encode<T>(values, numel, maxbits, out);                                                    \
    }
#define HC_DECODE(NAME, T, ADD)                                                                    \
    extern "C" __global__ void HC_BOUNDS(256, HC_ZFP_BLOCKS)                                       \
    NAME(const u8* in, u64 numel, u64 maxbits, void* out) { decode<T, ADD>(in, numel, maxbits, out); }
HC_ENCODE(fp32, Fp32)
HC_ENCODE(bf16, BFloat16)
HC_ENCODE(fp16, Float16)
HC_DECODE(zfp_decode_fp32, Fp32, false)
HC_DECODE(zfp_decode_bf16, BFloat16, false)
HC_DECODE(zfp_decode_fp16, Float16, false)
HC_DECODE(zfp_add, Fp32, true)

}  // namespace zfp
}  // namespace hybridcomp
