// CUDA kernels of zfp: a lane takes a block of 4 values, a warp 32 of them, which begin and end at a
// multiple of 32 bits at every rate. Where a block is whole words it is stored as it is; else the warp
// puts its bits together in shared memory.
#include "cuda_device.h"

#include "zfp.h"

namespace hybridcomp {
namespace zfp {

constexpr int THREADS = 256;
constexpr int WARPS = THREADS / WARP;
constexpr int MOST_WORDS = 128 + 8;  // of a warp's blocks, and of the padding behind the last ones

__device__ const Tables TABLES = make_tables();

// Words of 32 bits. The stream is whole words of 64 bits, filled up to 16 bytes.
HC_INLINE u64 stream_words(u64 blocks, u64 maxbits) {
    return align16(ceil_div(blocks * maxbits, 64) * 8) / 4;
}

// zfp's rule for a last block of 1, 2 or 3 values.
HC_INLINE void fill_block(float* block, u64 count) {
    if (count < 2) block[1] = block[0];
    if (count < 3) block[2] = block[1];
    if (count < 4) block[3] = block[0];
}

HC_INLINE Bits encode_one(const float* v, u32 maxbits) {
    if (maxbits > SHORT_BITS) return encode_block(v, maxbits, TABLES.encode);
    u32 absmax = largest(largest(magnitude_bits(v[0]), magnitude_bits(v[1])),
                         largest(magnitude_bits(v[2]), magnitude_bits(v[3])));
    u32 header = block_header(absmax);
    Coefficients k = transform(v[0], v[1], v[2], v[3], header);
    Bits planes = {planes_of(k.a >> 16, k.b >> 16, k.c >> 16, k.d >> 16), 0};
    return encode_planes<true>(planes, header, maxbits, TABLES.encode);
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

template <class T>
HC_INLINE void encode(const void* source, u64 numel, u64 chunk, u64 slot, u64 skip, u64 maxbits,
                      u8* out) {
    __shared__ u32 shared[WARPS][MOST_WORDS];
    Chunk mine(numel, chunk, slot, skip);
    const auto* in = (const typename T::Stored*)source + mine.first;
    u64 blocks = ceil_div(mine.count, BLOCK), first = warp_id() * WARP, block = first + lane_id();
    if (first >= blocks) return;
    Four held = read4<T>(in, block * BLOCK, mine.count, vectorizable<T>(in));
    float values[BLOCK] = {held.x, held.y, held.z, held.w};
    bool there = block < blocks;
    if (there && mine.count - block * BLOCK < BLOCK) fill_block(values, mine.count - block * BLOCK);
    Bits bits = encode_one(values, (u32)maxbits);
    if (!there) bits = Bits{0, 0};
    u32* words = (u32*)(out + mine.payload) + first * maxbits / 32;
    u64 end = stream_words(blocks, maxbits) - first * maxbits / 32;  // words from here on
    bool last = first + WARP >= blocks;
    if (!last && maxbits % 32 == 0) {
        for (u32 i = 0; i < maxbits / 32; ++i) words[lane_id() * (maxbits / 32) + i] = word_of(bits, i);
        return;
    }
    u32* gathered = shared[threadIdx.x / WARP];
    for (u32 i = lane_id(); i < MOST_WORDS; i += WARP) gathered[i] = 0;
    __syncwarp();
    merge(bits, lane_id() * (u32)maxbits, (u32)maxbits, gathered);
    __syncwarp();
    u64 count = last ? end : maxbits;
    for (u32 i = lane_id(); i < count; i += WARP) words[i] = gathered[i];
}

// Bits `position` .. of a stream of `count` words, past whose end there is nothing.
HC_INLINE u32 read_bits(const u32* words, u64 position, u64 count) {
    u64 first = position / 32;
    u32 shift = position % 32;
    u32 low = first < count ? words[first] : 0, high = first + 1 < count ? words[first + 1] : 0;
    return low >> shift | (high << 1) << (31 - shift);
}

HC_INLINE void decode_one(Bits bits, u32 maxbits, float* values) {
    if (maxbits > SHORT_BITS) {
        decode_block(bits, maxbits, TABLES.decode, values);
        return;
    }
    bits = first_bits(bits, maxbits);
    Bits planes = decode_planes<true>(bits, maxbits, TABLES.decode);
    u64 high = coefficients_of(planes.low);
    Coefficients k = {coefficient(high, 0, 0), coefficient(high, 0, 1), coefficient(high, 0, 2),
                      coefficient(high, 0, 3)};
    Values v = untransform(k, (u32)bits.low & 511);
    values[0] = v.x, values[1] = v.y, values[2] = v.z, values[3] = v.w;
}

template <class T, bool ADD>
HC_INLINE void decode(const u8* in, u64 numel, u64 chunk, u64 slot, u64 skip, u64 maxbits,
                      void* target) {
    Chunk mine(numel, chunk, slot, skip);
    u64 blocks = ceil_div(mine.count, BLOCK), block = warp_id() * WARP + lane_id();
    if (block >= blocks) return;
    auto* out = (typename T::Stored*)target + mine.first;
    bool vectors = vectorizable<T>(out);
    const u32* words = (const u32*)(in + mine.payload);
    u64 count = stream_words(blocks, maxbits), position = block * maxbits;
    Bits bits = {0, 0};
    bits.low = read_bits(words, position, count);
    if (maxbits > 32) bits.low |= (u64)read_bits(words, position + 32, count) << 32;
    if (maxbits > 64) bits.high = read_bits(words, position + 64, count);
    if (maxbits > 96) bits.high |= (u64)read_bits(words, position + 96, count) << 32;
    float values[BLOCK];
    decode_one(bits, (u32)maxbits, values);
    Four v = {values[0], values[1], values[2], values[3]};
    if constexpr (ADD) v = sum(read4<T>(out, block * BLOCK, mine.count, vectors), v);
    write4<T>(v, out, block * BLOCK, mine.count, vectors);
}

}  // namespace zfp
}  // namespace hybridcomp

#define HC_ENCODE(NAME, T)                                                                    \
    extern "C" __global__ void __launch_bounds__(256)                                         \
    zfp_encode_##NAME(const void* values, unsigned long long numel, unsigned long long chunk, \
                      unsigned long long slot, unsigned long long skip,                       \
                      unsigned long long maxbits, unsigned char* out) {                       \
        hybridcomp::zfp::encode<hybridcomp::T>(values, numel, chunk, slot, skip, maxbits, out); \
    }
#define HC_DECODE(NAME, T, ADD)                                                               \
    extern "C" __global__ void __launch_bounds__(256)                                         \
    NAME(const unsigned char* in, unsigned long long numel, unsigned long long chunk,         \
         unsigned long long slot, unsigned long long skip, unsigned long long maxbits,        \
         void* out) {                                                                         \
        hybridcomp::zfp::decode<hybridcomp::T, ADD>(in, numel, chunk, slot, skip, maxbits, out); \
    }
HC_ENCODE(fp32, Fp32)
HC_ENCODE(bf16, BFloat16)
HC_ENCODE(fp16, Float16)
HC_DECODE(zfp_decode_fp32, Fp32, false)
HC_DECODE(zfp_decode_bf16, BFloat16, false)
HC_DECODE(zfp_decode_fp16, Float16, false)
HC_DECODE(zfp_add, Fp32, true)
