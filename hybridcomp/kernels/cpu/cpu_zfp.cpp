// CPU loops of zfp. At every rate a group of 64 blocks begins and ends at a multiple of 64 bits, so
// threads never share a word.
#include "cpu_zfp.h"
#include "zfp.h"

namespace hybridcomp {
namespace zfp {
namespace {

constexpr int GROUP = 64;
constexpr int GROUP_VALUES = GROUP * BLOCK;
constexpr int MAX_WORDS = 2 * GROUP;

constexpr Tables TABLES = make_tables();

// zfp's rule for a last block of 1, 2 or 3 values.
inline void fill_block(float* block, size_t count) {
    if (count < 2) block[1] = block[0];
    if (count < 3) block[2] = block[1];
    if (count < 4) block[3] = block[0];
}

// Positions are those of blocks, so a word is written or read as a whole or not at all; `words` has
// one more than the stream.
HC_INLINE void put(u64* words, size_t position, u64 bits) {
    u32 shift = position & 63;
    words[position >> 6] |= bits << shift;
    words[(position >> 6) + 1] |= (bits >> 1) >> (63 - shift);
}

HC_INLINE u64 get(const u64* words, size_t position) {
    u32 shift = position & 63;
    return words[position >> 6] >> shift | (words[(position >> 6) + 1] << 1) << (63 - shift);
}

// One member of four in each array, so that the arithmetic of all blocks is vector code.
struct Lanes {
    float x[GROUP], y[GROUP], z[GROUP], w[GROUP];
};

template <bool SHORT>
HC_INLINE void encode_group(const float* values, u32 maxbits, u64* words) {
    Lanes v;
    u32 headers[GROUP];
    u32 a[GROUP], b[GROUP], c[GROUP], d[GROUP];
    u64 high[GROUP], low[GROUP];
    for (int i = 0; i < GROUP; ++i) {
        v.x[i] = values[4 * i], v.y[i] = values[4 * i + 1];
        v.z[i] = values[4 * i + 2], v.w[i] = values[4 * i + 3];
    }
    for (int i = 0; i < GROUP; ++i) {
        u32 absmax = largest(largest(magnitude_bits(v.x[i]), magnitude_bits(v.y[i])),
                             largest(magnitude_bits(v.z[i]), magnitude_bits(v.w[i])));
        headers[i] = block_header(absmax);
        Coefficients k = transform(v.x[i], v.y[i], v.z[i], v.w[i], headers[i]);
        a[i] = k.a, b[i] = k.b, c[i] = k.c, d[i] = k.d;
    }
    for (int i = 0; i < GROUP; ++i) {
        high[i] = planes_of(a[i] >> 16, b[i] >> 16, c[i] >> 16, d[i] >> 16);
    }
    for (int i = 0; !SHORT && i < GROUP; ++i) {
        low[i] = planes_of(a[i] & 0xffff, b[i] & 0xffff, c[i] & 0xffff, d[i] & 0xffff);
    }
    for (int i = 0; i < GROUP; ++i) {
        Bits planes = {high[i], SHORT ? 0 : low[i]};
        Bits bits = encode_planes<SHORT>(planes, headers[i], maxbits, TABLES.encode);
        put(words, (size_t)i * maxbits, bits.low);
        if (!SHORT && maxbits > 64) put(words, (size_t)i * maxbits + 64, bits.high);
    }
}

template <bool SHORT>
HC_INLINE void decode_group(const u64* words, u32 maxbits, float* values) {
    u32 headers[GROUP];
    u64 high[GROUP], low[GROUP];
    for (int i = 0; i < GROUP; ++i) {
        Bits bits = {get(words, (size_t)i * maxbits), 0};
        if (!SHORT && maxbits > 64) bits.high = get(words, (size_t)i * maxbits + 64);
        bits = first_bits(bits, maxbits);
        headers[i] = (u32)bits.low & 511;
        Bits planes = decode_planes<SHORT>(bits, maxbits, TABLES.decode);
        high[i] = planes.low, low[i] = planes.high;
    }
    for (int i = 0; i < GROUP; ++i) high[i] = coefficients_of(high[i]);
    for (int i = 0; i < GROUP; ++i) low[i] = SHORT ? 0 : coefficients_of(low[i]);
    Lanes v;
    u32 a[GROUP], b[GROUP], c[GROUP], d[GROUP];
    for (int i = 0; i < GROUP; ++i) {
        a[i] = coefficient(high[i], low[i], 0), b[i] = coefficient(high[i], low[i], 1);
        c[i] = coefficient(high[i], low[i], 2), d[i] = coefficient(high[i], low[i], 3);
    }
    for (int i = 0; i < GROUP; ++i) {
        Values block = untransform(Coefficients{a[i], b[i], c[i], d[i]}, headers[i]);
        v.x[i] = block.x, v.y[i] = block.y, v.z[i] = block.z, v.w[i] = block.w;
    }
    for (int i = 0; i < GROUP; ++i) {
        values[4 * i] = v.x[i], values[4 * i + 1] = v.y[i];
        values[4 * i + 2] = v.z[i], values[4 * i + 3] = v.w[i];
    }
}

template <class T>
HC_INLINE void encode_groups(const void* source, size_t numel, u32 maxbits, u8* out, size_t begin,
                             size_t end) {
    const auto* in = (const typename T::Stored*)source;
    for (size_t group = begin; group < end; ++group) {
        size_t first = group * GROUP_VALUES, left = numel - first;
        size_t count = left < (size_t)GROUP_VALUES ? left : (size_t)GROUP_VALUES;
        int blocks = (int)ceil_div(count, BLOCK);
        float values[GROUP_VALUES];
        u64 words[MAX_WORDS + 2] = {};
        for (size_t i = 0; i < count; ++i) values[i] = T::load(in[first + i]);
        if (count & 3) fill_block(values + (count & ~size_t(3)), count & 3);
        for (int i = blocks * BLOCK; i < GROUP_VALUES; ++i) values[i] = 0.0f;
        if (maxbits <= SHORT_BITS) encode_group<true>(values, maxbits, words);
        else encode_group<false>(values, maxbits, words);
        memcpy(out + group * maxbits * 8, words, ceil_div((size_t)blocks * maxbits, 64) * 8);
    }
}

template <class T, bool ADD>
HC_INLINE void decode_groups(const u8* in, size_t numel, u32 maxbits, void* target, size_t begin,
                             size_t end) {
    auto* out = (typename T::Stored*)target;
    for (size_t group = begin; group < end; ++group) {
        size_t first = group * GROUP_VALUES, left = numel - first;
        size_t count = left < (size_t)GROUP_VALUES ? left : (size_t)GROUP_VALUES;
        int blocks = (int)ceil_div(count, BLOCK);
        float values[GROUP_VALUES];
        u64 words[MAX_WORDS + 2] = {};
        memcpy(words, in + group * maxbits * 8, ceil_div((size_t)blocks * maxbits, 64) * 8);
        if (maxbits <= SHORT_BITS) decode_group<true>(words, maxbits, values);
        else decode_group<false>(words, maxbits, values);
        for (size_t i = 0; i < count; ++i) {
            float value = values[i];
            out[first + i] = T::store(ADD ? T::load(out[first + i]) + value : value);
        }
    }
}

typedef void Encode(const void*, size_t, u32, u8*, size_t, size_t);
typedef void Decode(const u8*, size_t, u32, void*, size_t, size_t);

#define HC_ZFP(T)                                                                              \
    HC_CLONES void encode_##T(const void* in, size_t n, u32 maxbits, u8* out, size_t begin,    \
                              size_t end) {                                                    \
        encode_groups<T>(in, n, maxbits, out, begin, end);                                     \
    }                                                                                          \
    HC_CLONES void decode_##T(const u8* in, size_t n, u32 maxbits, void* out, size_t begin,    \
                              size_t end) {                                                    \
        decode_groups<T, false>(in, n, maxbits, out, begin, end);                              \
    }
HC_ZFP(Fp32)
HC_ZFP(BFloat16)
HC_ZFP(Float16)
HC_CLONES void add_Fp32(const u8* in, size_t n, u32 maxbits, void* out, size_t begin, size_t end) {
    decode_groups<Fp32, true>(in, n, maxbits, out, begin, end);
}

Encode* const ENCODE[3] = {encode_Fp32, encode_BFloat16, encode_Float16};
Decode* const DECODE[3] = {decode_Fp32, decode_BFloat16, decode_Float16};

}  // namespace

size_t wire_nbytes(size_t numel, int maxbits) {
    return align16(ceil_div(ceil_div(numel, BLOCK) * maxbits, 64) * 8);
}

void encode(int maxbits, int dtype, const void* in, size_t numel, u8* out, int threads) {
    size_t used = ceil_div(ceil_div(numel, BLOCK) * maxbits, 64) * 8;
    parallel_ranges(ceil_div(numel, GROUP_VALUES), GROUP_VALUES, threads,
                    [&](size_t begin, size_t end) {
                        ENCODE[dtype](in, numel, (u32)maxbits, out, begin, end);
                    });
    pad(out, used, wire_nbytes(numel, maxbits));
}

void decode(int maxbits, int dtype, const u8* in, void* out, size_t numel, bool add, int threads) {
    Decode* loop = add ? add_Fp32 : DECODE[dtype];
    parallel_ranges(
        ceil_div(numel, GROUP_VALUES), GROUP_VALUES, threads,
        [&](size_t begin, size_t end) { loop(in, numel, (u32)maxbits, out, begin, end); });
}

}  // namespace zfp
}  // namespace hybridcomp
