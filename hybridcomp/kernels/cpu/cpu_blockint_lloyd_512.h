// Blocks of blockint with Lloyd levels in AVX-512: a register holds 64 values as bytes, and VBMI looks each up in
// a table of 128.
#pragma once

#include "cpu_blockint_lloyd_shared.h"

#ifdef HC_X86
namespace hybridcomp {
namespace blockint {
namespace {

#define HC_VBMI __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,bmi,bmi2,popcnt")))

HC_VBMI inline __m512i larger_512(__m512i one, __m512i two) { return _mm512_max_epu32(one, two); }

// Largest magnitudes of 16 blocks.
HC_VBMI inline __m512i absmax_512(const float* values) {
    __m512i magnitude = _mm512_set1_epi32(0x7fffffff), four[4];
#pragma GCC unroll 4
    for (int q = 0; q < 4; ++q) {
        __m512i block[4];
#pragma GCC unroll 4
        for (int b = 0; b < 4; ++b) {
            const float* from = values + (4 * q + b) * BLOCK;
            block[b] = larger_512(_mm512_and_si512(_mm512_loadu_si512(from), magnitude),
                                  _mm512_and_si512(_mm512_loadu_si512(from + 16), magnitude));
        }
        __m512i low = larger_512(_mm512_unpacklo_epi32(block[0], block[1]), _mm512_unpackhi_epi32(block[0], block[1]));
        __m512i high = larger_512(_mm512_unpacklo_epi32(block[2], block[3]), _mm512_unpackhi_epi32(block[2], block[3]));
        four[q] = larger_512(_mm512_unpacklo_epi64(low, high), _mm512_unpackhi_epi64(low, high));
    }
#pragma GCC unroll 2
    for (int q = 0; q < 4; q += 2) {
        four[q / 2] = larger_512(_mm512_shuffle_i32x4(four[q], four[q + 1], 0x88),
                                 _mm512_shuffle_i32x4(four[q], four[q + 1], 0xdd));
    }
    return larger_512(_mm512_shuffle_i32x4(four[0], four[1], 0x88), _mm512_shuffle_i32x4(four[0], four[1], 0xdd));
}

HC_VBMI inline bool scales_512(const float* values, Tile& tile, u8* base) {
    __m512i first = absmax_512(values), second = absmax_512(values + 16 * BLOCK);
    u32 largest = _mm512_reduce_max_epu32(larger_512(first, second));
    if (largest >= INF_BITS) return false;
    _mm512_store_si512(tile.codes, first);
    _mm512_store_si512(tile.codes + 16, second);
    *base = (u8)first_scales(largest, tile);
    return true;
}

// fine_256 of two blocks. In 128-bit lane L bytes 0 to 7 belong to the first block: byte 4 b + i is value
// 4 L + 16 b + i.
HC_VBMI inline __m512i fine_512(const float* values, const float* inverse) {
    __m512i words[4];
#pragma GCC unroll 4
    for (int b = 0; b < 4; ++b) {
        __m512 scale = _mm512_set1_ps(inverse[b / 2]);
        words[b] = _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_loadu_ps(values + 16 * b), scale));
    }
    return _mm512_packs_epi16(_mm512_packs_epi32(words[0], words[1]), _mm512_packs_epi32(words[2], words[3]));
}

HC_VBMI inline void sum_gains_512(const float* values, int blocks, __m512i* fine, Tile& tile) {
    __m512i table = _mm512_load_si512(TABLES.in_order);
    for (int first = 0; first < blocks; first += 8) {
        __m512i eight = _mm512_setzero_si512();
#pragma GCC unroll 4
        for (int b = 0; b < 4; ++b) {
            int block = first + 2 * b;
            __m512i pair = fine_512(values + block * BLOCK, tile.inverse + block);
            fine[block / 2] = pair;
            // the lookup uses only the lower six bits of an index
            __m512i bin = _mm512_srli_epi16(_mm512_abs_epi8(pair), 2);
            __m512i gains = _mm512_sad_epu8(_mm512_permutexvar_epi8(bin, table), _mm512_setzero_si512());
            eight = _mm512_or_si512(eight, _mm512_slli_epi64(gains, 16 * b));
        }
        eight = _mm512_add_epi16(eight, _mm512_shuffle_i64x2(eight, eight, 0x4e));
        eight = _mm512_add_epi16(eight, _mm512_shuffle_i64x2(eight, eight, 0xb1));
        __m128i both = _mm512_castsi512_si128(eight);  // four sums of first blocks, four of second ones
        _mm_store_si128((__m128i*)(tile.sums + first), _mm_unpacklo_epi16(both, _mm_unpackhi_epi64(both, both)));
    }
}

// For each payload byte of two blocks: the positions in a register of `fine` of its two levels.
struct Places {
    alignas(64) u8 of[64];
    Places() {
        for (int i = 0; i < 64; ++i) {
            int value = i / 8 % 4 + i / 2 % 4 * 8 + i % 2 * 4;
            of[i] = value % 16 / 4 * 16 + i / 32 * 8 + value / 16 * 4 + value % 4;
        }
    }
};
const Places PLACES;

HC_VBMI inline void store_levels_512(const __m512i* fine, const u32* rows, int blocks, u8* levels) {
    __m512i places = _mm512_load_si512(PLACES.of), weights = _mm512_set1_epi16(0x1001);
    for (int b = 0; b < blocks; b += 2) {
        __m512i magnitude = _mm512_abs_epi8(fine[b / 2]);
        const u8 *one = TABLES.whole[rows[b]], *two = TABLES.whole[rows[b + 1]];
        __m512i level = _mm512_permutex2var_epi8(_mm512_load_si512(one), magnitude, _mm512_load_si512(one + 64));
        __m512i other = _mm512_permutex2var_epi8(_mm512_load_si512(two), magnitude, _mm512_load_si512(two + 64));
        level = _mm512_mask_mov_epi64(level, 0xaa, other);
        level = _mm512_mask_sub_epi8(level, _mm512_movepi8_mask(fine[b / 2]), _mm512_set1_epi8(16), level);
        __m512i pairs = _mm512_maddubs_epi16(_mm512_permutexvar_epi8(places, level), weights);
        __m256i packed = _mm512_cvtepi16_epi8(pairs);
        if (b + 1 < blocks) {
            _mm256_storeu_si256((__m256i*)(levels + b * 16), packed);
        } else {
            _mm_storeu_si128((__m128i*)(levels + b * 16), _mm256_castsi256_si128(packed));
        }
    }
}

HC_VBMI bool encode_512(const float* values, int blocks, u8* levels, u8* scales, u8* base) {
    Tile tile;
    alignas(64) __m512i fine[TILE_BLOCKS / 2];
    if (!scales_512(values, tile, base)) return false;
    sum_gains_512(values, blocks, fine, tile);
    tile.rows[blocks & (TILE_BLOCKS - 1)] = 0;  // of the block behind an odd last one
    choose_scales(blocks, tile, scales);
    store_levels_512(fine, tile.rows, blocks, levels);
    return true;
}

}  // namespace
}  // namespace blockint
}  // namespace hybridcomp
#endif
