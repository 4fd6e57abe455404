// CPU loops of blockint: one tile of 1024 values at a time, which stays in the L1 cache. Whole tiles
// of finite blocks run on eight lanes, everything else through the functions of blockint.h; the
// bytes are the same, and tests compare both with one reference.
#include "blockint.h"
#include "cpu.h"
#include "level_lanes.h"

namespace hybridcomp {
namespace blockint {
namespace {

struct Layout {
    size_t blocks, tiles, scales, bases, used, total;
    Layout(size_t numel, int bits)
        : blocks(ceil_div(numel, BLOCK)), tiles(ceil_div(numel, TILE)), scales(blocks * 4 * bits),
          bases(scales + blocks), used(bases + tiles), total(align16(used)) {}
};

// Largest finite absmax of a tile that has non-finite blocks.
inline u32 finite_absmax(const u32* absmax, int blocks) {
    u32 largest = 0;
    for (int b = 0; b < blocks; ++b) {
        if (absmax[b] < INF_BITS && absmax[b] > largest) largest = absmax[b];
    }
    return largest;
}

// encode_block for a finite block.
template <int BITS>
HC_INLINE void encode_lanes(const float* values, float inverse, u8* out) {
    constexpr float magic = 12582912.0f + (float)(1 << (BITS - 1));
    U8 levels = {};
    for (int b = 0; b < 4; ++b) {
        F8 scaled = load_lanes<F8>(values + 8 * b) * inverse;
        levels |= ((U8)(scaled + magic) & 255u) << (8 * b);
    }
    pack_level_lanes<BITS>(levels, out);
}

// decode_block for a step that cannot overflow.
template <int BITS, class T, bool ADD>
HC_INLINE void decode_lanes(const u8* in, float step, typename T::Stored* out) {
    U8 levels = unpack_level_lanes<BITS>(in);
    for (int b = 0; b < 4; ++b) {
        I8 level = (I8)((levels >> (8 * b)) & 255u) - (1 << (BITS - 1));
        F8 value = __builtin_convertvector(level, F8) * step;
        if (ADD) value += load_lanes<F8>(out + 8 * b);
        T::store8(value, out + 8 * b);
    }
}

template <int BITS>
void encode_nonfinite_tile(const float* values, const u32* absmax, int blocks, u8* levels,
                           u8* scales, u8* base_out) {
    u32 base = base_of(finite_absmax(absmax, blocks)), words[BITS];
    for (int b = 0; b < blocks; ++b) {
        scales[b] = (u8)scale_code(absmax[b], base);
        encode_block<BITS>(values + b * BLOCK, scales[b], base, words);
        memcpy(levels + b * 4 * BITS, words, 4 * BITS);
    }
    *base_out = (u8)base;
}

template <int BITS>
HC_INLINE void encode_tile(const float* values, int blocks, u8* levels, u8* scales, u8* base_out) {
    u32 absmax[TILE_BLOCKS] = {};
    float inverse[TILE_BLOCKS];
    u32 largest = 0;
    for (int b = 0; b < blocks; ++b) absmax[b] = absmax_bits(values + b * BLOCK);
    for (int b = 0; b < TILE_BLOCKS; ++b) largest = absmax[b] > largest ? absmax[b] : largest;
    if (largest >= INF_BITS) {
        encode_nonfinite_tile<BITS>(values, absmax, blocks, levels, scales, base_out);
        return;
    }
    u32 base = base_of(largest);
    for (int b = 0; b < TILE_BLOCKS; ++b) {
        absmax[b] = scale_code(absmax[b], base);
        inverse[b] = inverse_step<BITS>(absmax[b], base);
    }
    for (int b = 0; b < blocks; ++b) {
        scales[b] = (u8)absmax[b];
        encode_lanes<BITS>(values + b * BLOCK, inverse[b], levels + b * 4 * BITS);
    }
    *base_out = (u8)base;
}

template <int BITS, class T>
HC_INLINE void encode_tiles(const void* source, size_t numel, u8* out, size_t begin, size_t end) {
    const auto* values = (const typename T::Stored*)source;
    Layout layout(numel, BITS);
    for (size_t tile = begin; tile < end; ++tile) {
        size_t first = tile * TILE, block = tile * TILE_BLOCKS;
        u8* levels = out + block * 4 * BITS;
        u8* scales = out + layout.scales + block;
        u8* base = out + layout.bases + tile;
        float buffer[TILE];
        if (first + TILE > numel) {
            int count = (int)(numel - first);
            for (int i = 0; i < count; ++i) buffer[i] = T::load(values[first + i]);
            for (int i = count; i < TILE; ++i) buffer[i] = 0.0f;
            encode_tile<BITS>(buffer, (int)ceil_div(count, BLOCK), levels, scales, base);
        } else if (sizeof(typename T::Stored) == 4) {
            encode_tile<BITS>((const float*)source + first, TILE_BLOCKS, levels, scales, base);
        } else {
            for (int i = 0; i < TILE; ++i) buffer[i] = T::load(values[first + i]);
            encode_tile<BITS>(buffer, TILE_BLOCKS, levels, scales, base);
        }
    }
}

// How a decoded block of fp32 gets into its place.
template <class T, bool ADD>
HC_INLINE void put_values(const float* values, int count, typename T::Stored* out) {
    for (int i = 0; i < count; ++i) out[i] = T::store(ADD ? T::load(out[i]) + values[i] : values[i]);
}

template <int BITS, class T, bool ADD>
HC_INLINE void decode_tile(const u8* levels, const u8* scales, u32 base, typename T::Stored* out) {
    float steps[TILE_BLOCKS];
    for (int b = 0; b < TILE_BLOCKS; ++b) steps[b] = step_of<BITS>(scales[b], base);
    for (int b = 0; b < TILE_BLOCKS; ++b) {
        decode_lanes<BITS, T, ADD>(levels + b * 4 * BITS, steps[b], out + b * BLOCK);
    }
}

template <int BITS, class T, bool ADD>
HC_INLINE void decode_tiles(const u8* in, size_t numel, void* target, size_t begin, size_t end) {
    Layout layout(numel, BITS);
    for (size_t tile = begin; tile < end; ++tile) {
        size_t first = tile * TILE, block = tile * TILE_BLOCKS;
        auto* out = (typename T::Stored*)target + first;
        const u8* levels = in + block * 4 * BITS;
        const u8* scales = in + layout.scales + block;
        u32 base = in[layout.bases + tile];
        if (base < OVERFLOW_TOP >> 4 && first + TILE <= numel) {
            decode_tile<BITS, T, ADD>(levels, scales, base, out);
            continue;
        }
        size_t count = numel - first < (size_t)TILE ? numel - first : (size_t)TILE;
        for (size_t i = 0; i < count; i += BLOCK) {
            u32 packed[BITS];
            float values[BLOCK];
            memcpy(packed, levels + i / BLOCK * 4 * BITS, 4 * BITS);
            decode_block<BITS>(packed, scales[i / BLOCK], base, values);
            put_values<T, ADD>(values, count - i < BLOCK ? (int)(count - i) : BLOCK, out + i);
        }
    }
}

typedef void Encode(const void*, size_t, u8*, size_t, size_t);
typedef void Decode(const u8*, size_t, void*, size_t, size_t);

#define HC_BLOCKINT(BITS, T)                                                                    \
    HC_CLONES void encode_##BITS##_##T(const void* values, size_t numel, u8* out, size_t begin, \
                                       size_t end) {                                            \
        encode_tiles<BITS, T>(values, numel, out, begin, end);                                  \
    }                                                                                           \
    HC_CLONES void decode_##BITS##_##T(const u8* in, size_t numel, void* out, size_t begin,     \
                                       size_t end) {                                            \
        decode_tiles<BITS, T, false>(in, numel, out, begin, end);                               \
    }
#define HC_BLOCKINT_BITS(BITS)                                                               \
    HC_BLOCKINT(BITS, Fp32)                                                                  \
    HC_BLOCKINT(BITS, BFloat16)                                                              \
    HC_BLOCKINT(BITS, Float16)                                                               \
    HC_CLONES void add_##BITS(const u8* in, size_t numel, void* out, size_t begin, size_t end) { \
        decode_tiles<BITS, Fp32, true>(in, numel, out, begin, end);                          \
    }
HC_BLOCKINT_BITS(2)
HC_BLOCKINT_BITS(3)
HC_BLOCKINT_BITS(4)
HC_BLOCKINT_BITS(5)
HC_BLOCKINT_BITS(6)
HC_BLOCKINT_BITS(7)
HC_BLOCKINT_BITS(8)

#define HC_ROW(BITS, NAME) {NAME##_##BITS##_Fp32, NAME##_##BITS##_BFloat16, NAME##_##BITS##_Float16}
Encode* const ENCODE[7][3] = {HC_ROW(2, encode), HC_ROW(3, encode), HC_ROW(4, encode),
                              HC_ROW(5, encode), HC_ROW(6, encode), HC_ROW(7, encode),
                              HC_ROW(8, encode)};
Decode* const DECODE[7][3] = {HC_ROW(2, decode), HC_ROW(3, decode), HC_ROW(4, decode),
                              HC_ROW(5, decode), HC_ROW(6, decode), HC_ROW(7, decode),
                              HC_ROW(8, decode)};
Decode* const ADD[7] = {add_2, add_3, add_4, add_5, add_6, add_7, add_8};

}  // namespace

size_t wire_nbytes(size_t numel, int bits) { return Layout(numel, bits).total; }

void encode(int bits, int dtype, const void* values, size_t numel, u8* out, int threads) {
    Encode* loop = ENCODE[bits - 2][dtype];
    Layout layout(numel, bits);
    parallel_ranges(layout.tiles, TILE, threads, [&](size_t begin, size_t end) {
        loop(values, numel, out, begin, end);
    });
    pad(out, layout.used, layout.total);
}

void decode(int bits, int dtype, const u8* in, void* out, size_t numel, bool add, int threads) {
    Decode* loop = add ? ADD[bits - 2] : DECODE[bits - 2][dtype];
    parallel_ranges(ceil_div(numel, TILE), TILE, threads, [&](size_t begin, size_t end) {
        loop(in, numel, out, begin, end);
    });
}

}  // namespace blockint
}  // namespace hybridcomp
