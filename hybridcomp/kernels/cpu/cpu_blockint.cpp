// CPU loops of blockint: one tile of 1024 values at a time, which stays in the L1 cache. Whole tiles
// of finite blocks run on eight lanes, everything else through the functions of blockint.h; the
// bytes are the same, and tests compare both with one reference.
#include "blockint.h"
#include "cpu_blockint.h"
#include "cpu_blockint_lloyd.h"
#include "level_lanes.h"
#include "rotation_lanes.h"

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

// encode_block for a finite block, whose code is known; `share` is that of Lloyd levels.
template <int BITS, Spacing SPACING, bool RANDOM>
HC_INLINE void encode_lanes(const float* values, u32 first, float inverse, float share, u8* out) {
    constexpr float magic = (RANDOM ? dither::MAGIC : ROUNDING) + (float)(1 << (BITS - 1));
    U8 levels = {}, lanes = {0, 1, 2, 3, 4, 5, 6, 7};
    for (int b = 0; b < 4; ++b) {
        F8 value = load_lanes<F8>(values + 8 * b), scaled = value * inverse;
        if (SPACING == Spacing::gaussian) scaled = gaussian_cell(scaled) - 0.5f;
        if (SPACING == Spacing::lloyd) scaled = lloyd_cell(lloyd_clipped((scaled + ROUNDING - ROUNDING) * share));
        U8 level = (U8)(scaled + magic);
        if (RANDOM) {
            U8 seeds = lanes * dither::SPREAD + dither::seed_of(first + 8 * b, inverse);
            level = dither::level_of(level, dither::random_bits((U8)value, seeds));
        }
        levels |= (level & 255u) << (8 * b);
    }
    pack_level_lanes<BITS>(levels, out);
}

// lloyd_code of a finite block, and its share.
HC_INLINE u32 lloyd_choice(const float* values, u32 code, u32 base, float inverse, float& share) {
    i32 gain = 0;
    for (int i = 0; i < BLOCK; ++i) gain += lloyd_gain(lloyd_bin(lloyd_fine(values[i], inverse)));
    u32 sent = lloyd_code(code, gain);
    share = lloyd_share(code, base, sent != code);
    return sent;
}

// decode_block for a step that cannot overflow.
template <int BITS, Spacing SPACING, class T, bool ADD>
HC_INLINE void decode_lanes(const u8* in, float step, typename T::Stored* out) {
    U8 levels = unpack_level_lanes<BITS>(in);
    for (int b = 0; b < 4; ++b) {
        I8 level = (I8)((levels >> (8 * b)) & 255u);
        level = SPACING == Spacing::gaussian ? 2 * level - 15 : level - (1 << (BITS - 1));
        F8 value = __builtin_convertvector(level, F8);
        if (SPACING == Spacing::gaussian) value = gaussian_value(value);
        if (SPACING == Spacing::lloyd) value = lloyd_value(value);
        value *= step;
        if (ADD) value += load_lanes<F8>(out + 8 * b);
        T::store8(value, out + 8 * b);
    }
}

template <int BITS, Spacing SPACING, bool RANDOM>
void encode_nonfinite_tile(const float* values, u32 first, const u32* absmax, int blocks, u8* levels,
                           u8* scales, u8* base_out) {
    u32 base = base_of(finite_absmax(absmax, blocks)), words[BITS];
    for (int b = 0; b < blocks; ++b) {
        u32 code = scale_code<SPACING>(absmax[b], base);
        code = encode_block<BITS, SPACING, RANDOM>(values + b * BLOCK, first + b * BLOCK, code, base, words);
        scales[b] = (u8)code;
        memcpy(levels + b * 4 * BITS, words, 4 * BITS);
    }
    *base_out = (u8)base;
}

// `first`: the index of the first value in the message.
template <int BITS, Spacing SPACING, bool RANDOM>
HC_INLINE void encode_tile(const float* values, u32 first, int blocks, u8* levels, u8* scales,
                           u8* base_out) {
    if (SPACING == Spacing::lloyd && lloyd_in_lanes(values, blocks, levels, scales, base_out)) return;
    u32 absmax[TILE_BLOCKS] = {};
    float inverse[TILE_BLOCKS];
    u32 largest = 0;
    for (int b = 0; b < blocks; ++b) absmax[b] = absmax_bits(values + b * BLOCK);
    for (int b = 0; b < TILE_BLOCKS; ++b) largest = absmax[b] > largest ? absmax[b] : largest;
    if (largest >= INF_BITS) {
        encode_nonfinite_tile<BITS, SPACING, RANDOM>(values, first, absmax, blocks, levels, scales,
                                                      base_out);
        return;
    }
    u32 base = base_of(largest);
    for (int b = 0; b < TILE_BLOCKS; ++b) {
        absmax[b] = scale_code<SPACING>(absmax[b], base);
        inverse[b] = inverse_step<BITS, SPACING>(absmax[b], base);
    }
    *base_out = (u8)base;
    for (int b = 0; b < blocks; ++b) {
        const float* block = values + b * BLOCK;
        float share = 0.0f;
        u32 code = absmax[b];
        if (SPACING == Spacing::lloyd) code = lloyd_choice(block, code, base, inverse[b], share);
        scales[b] = (u8)code;
        encode_lanes<BITS, SPACING, RANDOM>(block, first + b * BLOCK, inverse[b], share, levels + b * 4 * BITS);
    }
}

template <int BITS, Spacing SPACING>
HC_INLINE void encode_tile(bool random, const float* values, size_t first, int blocks, u8* levels,
                           u8* scales, u8* base) {
    if (SPACING == Spacing::uniform && random) {
        encode_tile<BITS, Spacing::uniform, true>(values, (u32)first, blocks, levels, scales, base);
    } else {
        encode_tile<BITS, SPACING, false>(values, (u32)first, blocks, levels, scales, base);
    }
}

HC_INLINE void rotate_tile(float* values, size_t count) {
    for (size_t i = 0; i + rotation::LENGTH <= count; i += rotation::LENGTH) {
        rotation::forward_lanes(values + i);
    }
}

HC_INLINE void rotate_back(float* values, size_t count) {
    for (size_t i = 0; i + rotation::LENGTH <= count; i += rotation::LENGTH) {
        rotation::back_lanes(values + i);
    }
}

// Tiles [begin, end) of a message of `numel` values. `source` begins at tile `origin` of it, `out` at its
// beginning; so do those of decode_tiles.
template <int BITS, Spacing SPACING, class T>
HC_INLINE void encode_tiles(const void* source, size_t numel, int setting, u8* out, size_t begin,
                            size_t end, size_t origin) {
    bool rotate = rotated(setting), random = at_random(setting);
    const auto* values = (const typename T::Stored*)source;
    Layout layout(numel, BITS);
    for (size_t tile = begin; tile < end; ++tile) {
        size_t first = tile * TILE, block = tile * TILE_BLOCKS;
        size_t count = numel - first < (size_t)TILE ? numel - first : (size_t)TILE;
        size_t from = first - origin * TILE;
        u8* levels = out + block * 4 * BITS;
        u8* scales = out + layout.scales + block;
        u8* base = out + layout.bases + tile;
        if (sizeof(typename T::Stored) == 4 && count == TILE && !rotate) {
            encode_tile<BITS, SPACING>(random, (const float*)source + from, first, TILE_BLOCKS, levels,
                                        scales, base);
            continue;
        }
        float buffer[TILE];
        for (size_t i = 0; i < count; ++i) buffer[i] = T::load(values[from + i]);
        for (size_t i = count; i < (size_t)TILE; ++i) buffer[i] = 0.0f;
        if (rotate) rotate_tile(buffer, count);
        encode_tile<BITS, SPACING>(random, buffer, first, (int)ceil_div(count, BLOCK), levels, scales, base);
    }
}

// How a decoded block of fp32 gets into its place.
template <class T, bool ADD>
HC_INLINE void put_values(const float* values, int count, typename T::Stored* out) {
    for (int i = 0; i < count; ++i) out[i] = T::store(ADD ? T::load(out[i]) + values[i] : values[i]);
}

template <int BITS, Spacing SPACING, class T, bool ADD>
HC_INLINE void decode_tile(const u8* levels, const u8* scales, u32 base, typename T::Stored* out) {
    float steps[TILE_BLOCKS];
    for (int b = 0; b < TILE_BLOCKS; ++b) steps[b] = step_of<BITS, SPACING>(scales[b], base);
    for (int b = 0; b < TILE_BLOCKS; ++b) {
        decode_lanes<BITS, SPACING, T, ADD>(levels + b * 4 * BITS, steps[b], out + b * BLOCK);
    }
}

// A tile that is short, or whose steps may overflow.
template <int BITS, Spacing SPACING, class T, bool ADD>
HC_INLINE void decode_blocks(const u8* levels, const u8* scales, u32 base, size_t count,
                             typename T::Stored* out) {
    for (size_t i = 0; i < count; i += BLOCK) {
        u32 packed[BITS];
        float values[BLOCK];
        memcpy(packed, levels + i / BLOCK * 4 * BITS, 4 * BITS);
        decode_block<BITS, SPACING>(packed, scales[i / BLOCK], base, values);
        put_values<T, ADD>(values, count - i < BLOCK ? (int)(count - i) : BLOCK, out + i);
    }
}

template <int BITS, Spacing SPACING, class T, bool ADD>
HC_INLINE void decode_tiles(const u8* in, size_t numel, int setting, void* target, size_t begin,
                            size_t end, size_t origin) {
    bool rotate = rotated(setting);
    Layout layout(numel, BITS);
    for (size_t tile = begin; tile < end; ++tile) {
        size_t first = tile * TILE, block = tile * TILE_BLOCKS;
        size_t count = numel - first < (size_t)TILE ? numel - first : (size_t)TILE;
        auto* out = (typename T::Stored*)target + (first - origin * TILE);
        const u8* levels = in + block * 4 * BITS;
        const u8* scales = in + layout.scales + block;
        u32 base = in[layout.bases + tile];
        bool whole = base < OVERFLOW_TOP >> 4 && count == TILE;
        if (!rotate && whole) {
            decode_tile<BITS, SPACING, T, ADD>(levels, scales, base, out);
        } else if (!rotate) {
            decode_blocks<BITS, SPACING, T, ADD>(levels, scales, base, count, out);
        } else {
            float buffer[TILE];
            if (whole) decode_tile<BITS, SPACING, Fp32, false>(levels, scales, base, buffer);
            else decode_blocks<BITS, SPACING, Fp32, false>(levels, scales, base, count, buffer);
            rotate_back(buffer, count);
            size_t lanes = count / 8 * 8;
            for (size_t i = 0; i < lanes; i += 8) {
                F8 value = load_lanes<F8>(buffer + i);
                if (ADD) value = load_lanes<F8>(out + i) + value;
                T::store8(value, out + i);
            }
            put_values<T, ADD>(buffer + lanes, (int)(count - lanes), out + lanes);
        }
    }
}

typedef void Encode(const void*, size_t, int, u8*, size_t, size_t, size_t);
typedef void Decode(const u8*, size_t, int, void*, size_t, size_t, size_t);

#define HC_BLOCKINT(NAME, BITS, SPACING, T)                                                     \
    HC_CLONES void encode_##NAME##_##T(const void* values, size_t numel, int setting, u8* out,  \
                                       size_t begin, size_t end, size_t origin) {               \
        encode_tiles<BITS, Spacing::SPACING, T>(values, numel, setting, out, begin, end, origin); \
    }                                                                                           \
    HC_CLONES void decode_##NAME##_##T(const u8* in, size_t numel, int setting, void* out,      \
                                       size_t begin, size_t end, size_t origin) {               \
        decode_tiles<BITS, Spacing::SPACING, T, false>(in, numel, setting, out, begin, end, origin); \
    }
#define HC_BLOCKINT_BITS(NAME, BITS, SPACING)                                                   \
    HC_BLOCKINT(NAME, BITS, SPACING, Fp32)                                                     \
    HC_BLOCKINT(NAME, BITS, SPACING, BFloat16)                                                 \
    HC_BLOCKINT(NAME, BITS, SPACING, Float16)                                                  \
    HC_CLONES void add_##NAME(const u8* in, size_t numel, int setting, void* out, size_t begin, \
                              size_t end, size_t origin) {                                      \
        decode_tiles<BITS, Spacing::SPACING, Fp32, true>(in, numel, setting, out, begin, end, origin); \
    }
HC_BLOCKINT_BITS(2, 2, uniform)
HC_BLOCKINT_BITS(3, 3, uniform)
HC_BLOCKINT_BITS(4, 4, uniform)
HC_BLOCKINT_BITS(5, 5, uniform)
HC_BLOCKINT_BITS(6, 6, uniform)
HC_BLOCKINT_BITS(7, 7, uniform)
HC_BLOCKINT_BITS(8, 8, uniform)
HC_BLOCKINT_BITS(gaussian, 4, gaussian)
HC_BLOCKINT_BITS(lloyd, 4, lloyd)

// By bits - 2; Gaussian and Lloyd levels last.
#define HC_ROW(NAME, KIND) {NAME##_##KIND##_Fp32, NAME##_##KIND##_BFloat16, NAME##_##KIND##_Float16}
#define HC_ROWS(NAME)                                                                     \
    HC_ROW(NAME, 2), HC_ROW(NAME, 3), HC_ROW(NAME, 4), HC_ROW(NAME, 5), HC_ROW(NAME, 6),  \
        HC_ROW(NAME, 7), HC_ROW(NAME, 8), HC_ROW(NAME, gaussian), \
        HC_ROW(NAME, lloyd)
Encode* const ENCODE[9][3] = {HC_ROWS(encode)};
Decode* const DECODE[9][3] = {HC_ROWS(decode)};
Decode* const ADD[9] = {add_2, add_3, add_4, add_5, add_6, add_7, add_8, add_gaussian, add_lloyd};

int row_of(int setting) { return lloyd(setting) ? 8 : gaussian(setting) ? 7 : bits_of(setting) - 2; }

}  // namespace

bool possible(int setting) {
    int bits = bits_of(setting);
    bool uniform = !gaussian(setting) && !lloyd(setting);
    return (setting & ~255) == 0 && bits >= 2 && bits <= (rotated(setting) ? 4 : 8) &&
           (uniform || (bits == 4 && !at_random(setting) && gaussian(setting) != lloyd(setting)));
}

size_t wire_nbytes(size_t numel, int setting) { return Layout(numel, bits_of(setting)).total; }

void encode(int setting, int dtype, const void* values, size_t numel, u8* out, int threads) {
    Encode* loop = ENCODE[row_of(setting)][dtype];
    Layout layout(numel, bits_of(setting));
    parallel_ranges(layout.tiles, TILE, threads, [&](size_t begin, size_t end) {
        loop(values, numel, setting, out, begin, end, 0);
    });
    pad(out, layout.used, layout.total);
}

void encode_kept(int setting, int dtype, const void* values, size_t numel, u8* out, int bits,
                 residual::Place kept, int threads) {
    Encode* encode = ENCODE[row_of(setting)][(int)Dtype::fp32];
    Decode* decode = DECODE[row_of(setting)][(int)Dtype::fp32];
    Layout layout(numel, bits_of(setting));
    parallel_ranges(layout.tiles, TILE, threads, [&](size_t begin, size_t end) {
        for (size_t tile = begin; tile < end; ++tile) {
            size_t first = tile * TILE;
            size_t count = numel - first < (size_t)TILE ? numel - first : (size_t)TILE;
            residual::Place here = residual::place_of(bits, kept, first);
            alignas(32) float sums[TILE], sent[TILE];
            residual::add(bits, here, dtype, (const u8*)values + first * item_nbytes(dtype), count, sums);
            encode(sums, numel, setting, out, tile, tile + 1, tile);
            decode(out, numel, setting, sent, tile, tile + 1, tile);
            for (size_t i = count; i < ceil_div(count, BLOCK) * BLOCK; ++i) sent[i] = 0.0f;
            residual::keep(bits, sums, sent, count, here);
        }
    });
    pad(out, layout.used, layout.total);
}

void decode(int setting, int dtype, const u8* in, void* out, size_t numel, bool add, int threads) {
    Decode* loop = add ? ADD[row_of(setting)] : DECODE[row_of(setting)][dtype];
    parallel_ranges(ceil_div(numel, TILE), TILE, threads, [&](size_t begin, size_t end) {
        loop(in, numel, setting, out, begin, end, 0);
    });
}

}  // namespace blockint
}  // namespace hybridcomp
