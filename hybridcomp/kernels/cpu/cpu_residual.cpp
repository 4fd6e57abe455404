// CPU loops of residuals in few bits: eight lanes at a time.
#include "cpu_residual.h"

#include "residual.h"

namespace hybridcomp {
namespace residual {
namespace {

constexpr size_t UNIT = 1024;  // values that `load` and `store` take at once

// The levels of values 8 g to 8 g + 7 are in bits `shift` of the words of a block.
HC_INLINE U8 halves(u32 shift) { return U8{0, 0, 0, 0, 4, 4, 4, 4} + shift; }

// Moves these levels to the top of each lane.
template <int BITS>
HC_INLINE U8 lift(U8 words, int g) {
    if constexpr (BITS == 8) return words << (24 - 8 * g);
    else return words << (28u - halves((u32)(8 * g)));
}

template <int BITS>
HC_INLINE void add_block(const u8* levels, float step, float* sums) {
    U8 words;
    if constexpr (BITS == 8) words = load_lanes<U8>(levels);
    else words = repeat<4>(levels);
    for (int g = 0; g < 4; ++g) {
        I8 level = (I8)(lift<BITS>(words, g)) >> (32 - BITS);
        F8 kept = __builtin_convertvector(level, F8) * step;
        store_lanes(load_lanes<F8>(sums + 8 * g) + kept, sums + 8 * g);
    }
}

template <int BITS, class T>
HC_INLINE void add_blocks(Place from, const void* values, size_t count, float* sums) {
    const auto* source = (const typename T::Stored*)values;
    if (values) {
        for (size_t i = 0; i < count; ++i) sums[i] = T::load(source[i]);
    }
    for (size_t i = values ? count : 0; i < ceil_div(count, BLOCK) * BLOCK; ++i) sums[i] = 0.0f;
    if constexpr (BITS == 16) {
        const u16* kept = (const u16*)from.levels;
        for (size_t i = 0; i < count; ++i) sums[i] += bf16_to_float(kept[i]);
    } else {
        for (size_t b = 0; b < ceil_div(count, BLOCK); ++b) {
            add_block<BITS>(from.levels + b * 4 * BITS, step_of(from.steps[b]), sums + b * BLOCK);
        }
    }
}

HC_INLINE F8 left_lanes(const float* sums, const float* sent) {
    F8 left = load_lanes<F8>(sums);
    if (sent) left -= load_lanes<F8>(sent);
    I8 is_finite = (I8)((U8)left & MAGNITUDE) < (i32)INF_BITS;
    return (F8)((U8)left & (U8)is_finite);
}

// left = sums - sent of a block; returns its largest magnitude.
HC_INLINE u32 leave_block(const float* sums, const float* sent, float* left) {
    I8 largest = {};
    for (int g = 0; g < 4; ++g) {
        F8 lanes = left_lanes(sums + 8 * g, sent ? sent + 8 * g : nullptr);
        I8 magnitude = (I8)((U8)lanes & MAGNITUDE);
        largest = magnitude > largest ? magnitude : largest;
        store_lanes(lanes, left + 8 * g);
    }
    return largest_lane(largest);
}

template <int BITS>
HC_INLINE void pack_block(const float* left, float inverse, u8* levels) {
    U8 words = {};
    for (int g = 0; g < 4; ++g) {
        U8 level = (U8)(load_lanes<F8>(left + 8 * g) * inverse + ROUNDING);
        level &= (1u << BITS) - 1;
        if constexpr (BITS == 8) words |= level << (8 * g);
        else words |= level << halves((u32)(8 * g));
    }
    if constexpr (BITS == 8) store_lanes(words, levels);
    else fold<4>(words, levels);
}

// Takes at most UNIT values. All steps at once: one division after another would take half of the time.
template <int BITS>
HC_INLINE void keep_blocks(const float* sums, const float* sent, size_t count, Place to) {
    if constexpr (BITS == 16) {
        u16* out = (u16*)to.levels;
        for (size_t i = 0; i < count; ++i) out[i] = float_to_bf16(left_out(sums[i], sent ? sent[i] : 0.0f));
    } else {
        constexpr int BLOCKS = UNIT / BLOCK;
        float left[UNIT], inverse[BLOCKS];
        u32 codes[BLOCKS] = {};
        int blocks = (int)ceil_div(count, BLOCK);
        for (int b = 0; b < blocks; ++b) {
            codes[b] = leave_block(sums + b * BLOCK, sent ? sent + b * BLOCK : nullptr, left + b * BLOCK);
        }
        for (int b = 0; b < BLOCKS; ++b) {
            codes[b] = step_code<BITS>(codes[b]);
            inverse[b] = 1.0f / step_of(codes[b]);
        }
        for (int b = 0; b < blocks; ++b) {
            to.steps[b] = (u16)codes[b];
            pack_block<BITS>(left + b * BLOCK, inverse[b], to.levels + b * 4 * BITS);
        }
    }
}

#define HC_ADD(BITS, T)                                                                              \
    HC_CLONES void add_##BITS##_##T(Place from, const void* values, size_t count, float* sums) {     \
        add_blocks<BITS, T>(from, values, count, sums);                                              \
    }
#define HC_RESIDUAL(BITS)                                                                            \
    HC_ADD(BITS, Fp32)                                                                               \
    HC_ADD(BITS, BFloat16)                                                                           \
    HC_ADD(BITS, Float16)                                                                            \
    HC_CLONES void keep_##BITS(const float* sums, const float* sent, size_t count, Place to) {       \
        keep_blocks<BITS>(sums, sent, count, to);                                                    \
    }
HC_RESIDUAL(4)
HC_RESIDUAL(8)
HC_RESIDUAL(16)

typedef void Add(Place, const void*, size_t, float*);
typedef void Keep(const float*, const float*, size_t, Place);
#define HC_ROW(BITS) {add_##BITS##_Fp32, add_##BITS##_BFloat16, add_##BITS##_Float16}
Add* const ADD[3][3] = {HC_ROW(4), HC_ROW(8), HC_ROW(16)};
Keep* const KEEP[3] = {keep_4, keep_8, keep_16};

int row_of(int bits) { return bits == 4 ? 0 : bits == 8 ? 1 : 2; }

// Calls body(first, count) for each run of UNIT values.
template <class Body>
void in_units(size_t numel, int threads, const Body& body) {
    parallel_ranges(ceil_div(numel, UNIT), UNIT, threads, [&](size_t begin, size_t end) {
        for (size_t unit = begin; unit < end; ++unit) {
            size_t first = unit * UNIT;
            body(first, numel - first < UNIT ? numel - first : UNIT);
        }
    });
}

}  // namespace

void add(int bits, Place from, int dtype, const void* values, size_t count, float* sums) {
    ADD[row_of(bits)][dtype](from, values, count, sums);
}

void keep(int bits, const float* sums, const float* sent, size_t count, Place to) {
    KEEP[row_of(bits)](sums, sent, count, to);
}

void load(int bits, Place from, size_t numel, float* out, int threads) {
    in_units(numel, threads, [&](size_t first, size_t count) {
        float sums[UNIT];
        add(bits, place_of(bits, from, first), (int)Dtype::fp32, nullptr, count, sums);
        memcpy(out + first, sums, count * sizeof *out);
    });
}

void store(int bits, const float* values, size_t numel, Place to, int threads) {
    in_units(numel, threads, [&](size_t first, size_t count) {
        float sums[UNIT] = {};
        memcpy(sums, values + first, count * sizeof *sums);
        keep(bits, sums, nullptr, count, place_of(bits, to, first));
    });
}

}  // namespace residual
}  // namespace hybridcomp
