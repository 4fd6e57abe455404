// CPU loops of the casts: bf16, fp16 and block-scaled fp8.
#include <vector>

#include "casts.h"
#include "cpu_casts.h"

namespace hybridcomp {
namespace {

typedef void Cast(const void*, void*, size_t, size_t);

template <class From, class To, bool ADD>
HC_INLINE void cast_range(const void* source, void* target, size_t begin, size_t end) {
    const auto* in = (const typename From::Stored*)source;
    auto* out = (typename To::Stored*)target;
    size_t i = begin;
    for (; !ADD && i + 8 <= end; i += 8) {
        F8 values;
        for (int lane = 0; lane < 8; ++lane) values[lane] = From::load(in[i + lane]);
        To::store8(values, out + i);
    }
    for (; i < end; ++i) {
        float value = From::load(in[i]);
        out[i] = To::store(ADD ? To::load(out[i]) + value : value);
    }
}

// Same dtype: the bits move, NaN payloads included.
template <class T>
HC_INLINE void copy_range(const void* source, void* target, size_t begin, size_t end) {
    typedef typename T::Stored Stored;
    memcpy((Stored*)target + begin, (const Stored*)source + begin, (end - begin) * sizeof(Stored));
}

#define HC_CAST(FROM, TO)                                                                      \
    HC_CLONES void cast_##FROM##_##TO(const void* in, void* out, size_t begin, size_t end) {   \
        cast_range<FROM, TO, false>(in, out, begin, end);                                      \
    }
#define HC_CAST_ADD(FROM)                                                                      \
    HC_CLONES void add_##FROM(const void* in, void* out, size_t begin, size_t end) {           \
        cast_range<FROM, Fp32, true>(in, out, begin, end);                                     \
    }
HC_CAST(Fp32, BFloat16)
HC_CAST(Fp32, Float16)
HC_CAST(BFloat16, Fp32)
HC_CAST(BFloat16, Float16)
HC_CAST(Float16, Fp32)
HC_CAST(Float16, BFloat16)
HC_CAST_ADD(Fp32)
HC_CAST_ADD(BFloat16)
HC_CAST_ADD(Float16)

Cast* const CASTS[3][3] = {
    {copy_range<Fp32>, cast_Fp32_BFloat16, cast_Fp32_Float16},
    {cast_BFloat16_Fp32, copy_range<BFloat16>, cast_BFloat16_Float16},
    {cast_Float16_Fp32, cast_Float16_BFloat16, copy_range<Float16>},
};
Cast* const ADDS[3] = {add_Fp32, add_BFloat16, add_Float16};

// A payload may begin at any byte, the values of one that are read and written in place may not.
bool is_misaligned(const void* at, int dtype) { return (size_t)at % item_nbytes(dtype) != 0; }

}  // namespace

void cast(int from, int to, const void* in, void* out, size_t numel, bool add, int threads) {
    if (numel == 0) return;  // the addresses of no values may be null, which memcpy does not allow
    if (is_misaligned(in, from)) {
        std::vector<u32> aligned(ceil_div(numel * item_nbytes(from), 4));
        memcpy(aligned.data(), in, numel * item_nbytes(from));
        cast(from, to, aligned.data(), out, numel, add, threads);
        return;
    }
    if (is_misaligned(out, to)) {
        size_t nbytes = numel * item_nbytes(to);
        std::vector<u32> aligned(ceil_div(nbytes, 4));
        memcpy(aligned.data(), out, nbytes);
        cast(from, to, in, aligned.data(), numel, add, threads);
        memcpy(out, aligned.data(), nbytes);
        return;
    }
    Cast* loop = add ? ADDS[from] : CASTS[from][to];
    parallel_ranges(numel, 1, threads,
                    [&](size_t begin, size_t end) { loop(in, out, begin, end); });
}

namespace fp8 {
namespace {

struct Layout {
    size_t blocks, scales, used, total;
    explicit Layout(size_t numel)
        : blocks(ceil_div(numel, BLOCK)), scales(ceil_div(numel, 4) * 4),
          used(scales + 4 * blocks), total(align16(used)) {}
};

inline size_t block_size(size_t block, size_t numel) {
    size_t left = numel - block * BLOCK;
    return left < (size_t)BLOCK ? left : (size_t)BLOCK;
}

template <class F, class T>
HC_INLINE void encode_blocks(const void* source, size_t numel, u8* out, size_t begin, size_t end) {
    for (size_t block = begin; block < end; ++block) {
        const auto* in = (const typename T::Stored*)source + block * BLOCK;
        size_t count = block_size(block, numel);
        u32 largest = float_bits(MIN_ABSMAX);
        for (size_t i = 0; i < count; ++i) {
            u32 magnitude = magnitude_bits(T::load(in[i]));
            magnitude = magnitude < INF_BITS ? magnitude : 0u;
            largest = magnitude > largest ? magnitude : largest;
        }
        float inverse = F::largest / bits_float(largest);
        u8* levels = out + block * BLOCK;
        for (size_t i = 0; i < count; ++i) levels[i] = narrow<F>(T::load(in[i]), inverse);
        memcpy(out + Layout(numel).scales + 4 * block, &largest, 4);
    }
}

template <class F, class T, bool ADD>
HC_INLINE void decode_blocks(const u8* in, size_t numel, void* target, size_t begin, size_t end) {
    for (size_t block = begin; block < end; ++block) {
        auto* out = (typename T::Stored*)target + block * BLOCK;
        size_t count = block_size(block, numel);
        float absmax;
        memcpy(&absmax, in + Layout(numel).scales + 4 * block, 4);
        float scale = absmax * (1.0f / F::largest);
        const u8* levels = in + block * BLOCK;
        for (size_t i = 0; i < count; ++i) {
            float value = widen<F>(levels[i], scale);
            out[i] = T::store(ADD ? T::load(out[i]) + value : value);
        }
    }
}

typedef void Encode(const void*, size_t, u8*, size_t, size_t);
typedef void Decode(const u8*, size_t, void*, size_t, size_t);

#define HC_FP8(F, T)                                                                           \
    HC_CLONES void encode_##F##_##T(const void* in, size_t n, u8* out, size_t b, size_t e) {   \
        encode_blocks<F, T>(in, n, out, b, e);                                                 \
    }                                                                                          \
    HC_CLONES void decode_##F##_##T(const u8* in, size_t n, void* out, size_t b, size_t e) {   \
        decode_blocks<F, T, false>(in, n, out, b, e);                                          \
    }
#define HC_FP8_FORMAT(F)                                                                       \
    HC_FP8(F, Fp32)                                                                            \
    HC_FP8(F, BFloat16)                                                                        \
    HC_FP8(F, Float16)                                                                         \
    HC_CLONES void add_##F(const u8* in, size_t n, void* out, size_t b, size_t e) {            \
        decode_blocks<F, Fp32, true>(in, n, out, b, e);                                        \
    }
HC_FP8_FORMAT(E4M3)
HC_FP8_FORMAT(E5M2)

Encode* const ENCODE[2][3] = {{encode_E4M3_Fp32, encode_E4M3_BFloat16, encode_E4M3_Float16},
                              {encode_E5M2_Fp32, encode_E5M2_BFloat16, encode_E5M2_Float16}};
Decode* const DECODE[2][3] = {{decode_E4M3_Fp32, decode_E4M3_BFloat16, decode_E4M3_Float16},
                              {decode_E5M2_Fp32, decode_E5M2_BFloat16, decode_E5M2_Float16}};
Decode* const ADD[2] = {add_E4M3, add_E5M2};

}  // namespace

size_t wire_nbytes(size_t numel, int) { return Layout(numel).total; }

void encode(int format, int dtype, const void* in, size_t numel, u8* out, int threads) {
    Encode* loop = ENCODE[format][dtype];
    Layout layout(numel);
    parallel_ranges(layout.blocks, BLOCK, threads,
                    [&](size_t begin, size_t end) { loop(in, numel, out, begin, end); });
    memset(out + numel, 0, layout.scales - numel);
    pad(out, layout.used, layout.total);
}

void decode(int format, int dtype, const u8* in, void* out, size_t numel, bool add, int threads) {
    Decode* loop = add ? ADD[format] : DECODE[format][dtype];
    parallel_ranges(ceil_div(numel, BLOCK), BLOCK, threads,
                    [&](size_t begin, size_t end) { loop(in, numel, out, begin, end); });
}

}  // namespace fp8
}  // namespace hybridcomp
