// Blocks of blockint with Lloyd levels: 32 values are a register of bytes of AVX2, 64 are one of AVX-512, whose
// VBMI looks up a byte of 128.
#include "cpu_blockint_lloyd.h"

#include "blockint.h"

namespace hybridcomp {
namespace blockint {

#ifdef HC_X86
namespace {

constexpr int BINS = 16;       // of eight magnitudes each, 127 included: at most one level begins in a bin
constexpr int ROWS = 32;       // for each mantissa of T, one for T itself and one for the next below it
constexpr int BIAS = 128;      // of gains, as bytes without a sign

// For every row and bin the level of the first magnitude, and the last magnitude that has it; gains of bins
// of four magnitudes, the even ones and the odd ones. For AVX-512 levels + 8 of all magnitudes, and gains in order.
struct Tables {
    alignas(64) u8 level[ROWS][BINS], last[ROWS][BINS], gains[2][BINS], whole[ROWS][128], in_order[64];
    Tables() {
        for (int row = 0; row < ROWS; ++row) {
            float share = lloyd_share(15 - row / 2, 128, row % 2);
            for (int bin = 0; bin < BINS; ++bin) {
                u8 begin = of(8 * bin, share), end = 8 * bin;
                while (end < 8 * bin + 7 && of(end + 1, share) == begin) ++end;
                level[row][bin] = begin, last[row][bin] = end;
            }
            for (int magnitude = 0; magnitude < 128; ++magnitude) whole[row][magnitude] = of(magnitude, share) + 8;
        }
        for (int bin = 0; bin < 2 * BINS; ++bin) gains[bin % 2][bin / 2] = lloyd_gain(bin) + BIAS;
        for (int bin = 0; bin < 64; ++bin) in_order[bin] = gains[bin % 2][bin / 2 % BINS];
    }
    static u8 of(int magnitude, float share) {
        return quantize<4, Spacing::lloyd, false>((float)magnitude, 1.0f, share, 0) - 8;
    }
};
const Tables TABLES;

HC_256 inline __m256i row_256(const u8* row) {
    return _mm256_broadcastsi128_si256(_mm_load_si128((const __m128i*)row));
}

// Values -> bytes in -127..127. Of lane L of 128 bits byte 4 b + i is value 4 L + 8 b + i.
HC_256 inline __m256i fine_256(const float* values, float inverse) {
    __m256 scale = _mm256_set1_ps(inverse);
    __m256i words[4];
#pragma GCC unroll 4
    for (int b = 0; b < 4; ++b) {
        words[b] = _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_loadu_ps(values + 8 * b), scale));
    }
    return _mm256_packs_epi16(_mm256_packs_epi32(words[0], words[1]), _mm256_packs_epi32(words[2], words[3]));
}

// Codes and inverse steps of a tile, given the largest magnitude of each block; returns its base.
template <class Scales>
HC_INLINE u32 first_scales(u32 largest, Scales& tile) {
    u32 base = base_of(largest);
    for (int b = 0; b < TILE_BLOCKS; ++b) {
        tile.codes[b] = scale_code<Spacing::lloyd>(tile.codes[b], base);
        tile.inverse[b] = inverse_step<4, Spacing::lloyd>(tile.codes[b], base);
    }
    return base;
}

// What the passes over a tile hand on: largest magnitudes, then codes of T, inverse steps, fine values, four sums of
// gains + BIAS in a word, rows of `TABLES`.
struct Tile {
    alignas(64) u32 codes[TILE_BLOCKS];
    alignas(64) float inverse[TILE_BLOCKS];
    alignas(32) __m256i fine[TILE_BLOCKS], bins[TILE_BLOCKS];
    alignas(32) u16 sums[TILE_BLOCKS];
    alignas(32) u32 rows[TILE_BLOCKS];
};

// Largest magnitudes of eight blocks.
HC_256 inline __m256i absmax_256(const float* values) {
    __m256i magnitude = _mm256_set1_epi32(0x7fffffff), four[2];
#pragma GCC unroll 2
    for (int half = 0; half < 2; ++half) {
        __m256i block[4];
#pragma GCC unroll 4
        for (int b = 0; b < 4; ++b) {
            const auto* from = (const __m256i*)(values + (4 * half + b) * BLOCK);
            __m256i first = _mm256_and_si256(_mm256_loadu_si256(from), magnitude);
#pragma GCC unroll 3
            for (int i = 1; i < 4; ++i) {
                first = _mm256_max_epu32(first, _mm256_and_si256(_mm256_loadu_si256(from + i), magnitude));
            }
            block[b] = first;
        }
        __m256i low = _mm256_max_epu32(_mm256_unpacklo_epi32(block[0], block[1]),
                                       _mm256_unpackhi_epi32(block[0], block[1]));
        __m256i high = _mm256_max_epu32(_mm256_unpacklo_epi32(block[2], block[3]),
                                        _mm256_unpackhi_epi32(block[2], block[3]));
        four[half] = _mm256_max_epu32(_mm256_unpacklo_epi64(low, high), _mm256_unpackhi_epi64(low, high));
    }
    return _mm256_max_epu32(_mm256_permute2x128_si256(four[0], four[1], 0x20),
                            _mm256_permute2x128_si256(four[0], four[1], 0x31));
}

// Scales of a tile; false if it holds a NaN or Inf.
HC_256 inline bool scales_256(const float* values, Tile& tile, u8* base) {
    __m256i all = _mm256_setzero_si256();
    for (int b = 0; b < TILE_BLOCKS; b += 8) {
        __m256i found = absmax_256(values + b * BLOCK);
        all = _mm256_max_epu32(all, found);
        _mm256_store_si256((__m256i*)(tile.codes + b), found);
    }
    __m128i half = _mm_max_epu32(_mm256_castsi256_si128(all), _mm256_extracti128_si256(all, 1));
    half = _mm_max_epu32(half, _mm_shuffle_epi32(half, 0x4e));
    u32 largest = (u32)_mm_cvtsi128_si32(_mm_max_epu32(half, _mm_shuffle_epi32(half, 0xb1)));
    if (largest >= INF_BITS) return false;
    *base = (u8)first_scales(largest, tile);
    return true;
}

HC_256 inline __m256i bins_256(__m256i magnitude) {
    return _mm256_and_si256(_mm256_srli_epi16(magnitude, 3), _mm256_set1_epi8(15));
}

HC_256 inline void sum_gains(const float* values, int blocks, Tile& tile) {
    __m256i even = row_256(TABLES.gains[0]), odd = row_256(TABLES.gains[1]);
    for (int first = 0; first < blocks; first += 4) {
        __m256i sums[4];
#pragma GCC unroll 4
        for (int b = 0; b < 4; ++b) {
            __m256i fine = fine_256(values + (first + b) * BLOCK, tile.inverse[first + b]);
            __m256i magnitude = _mm256_abs_epi8(fine), bin = bins_256(magnitude);
            tile.fine[first + b] = fine;
            tile.bins[first + b] = bin;
            // whether a magnitude is in the second half of its bin, in the highest bit
            __m256i second = _mm256_slli_epi16(magnitude, 5);
            __m256i gains = _mm256_blendv_epi8(_mm256_shuffle_epi8(even, bin), _mm256_shuffle_epi8(odd, bin), second);
            sums[b] = _mm256_sad_epu8(gains, _mm256_setzero_si256());
        }
        // words of lanes: blocks 0, 1, 0, 1, 2, 3, 2, 3
        __m256i four = _mm256_packus_epi32(sums[1], sums[3]);
        four = _mm256_or_si256(_mm256_packus_epi32(sums[0], sums[2]), _mm256_slli_epi32(four, 16));
        __m128i two = _mm_add_epi16(_mm256_castsi256_si128(four), _mm256_extracti128_si256(four, 1));
        two = _mm_add_epi16(two, _mm_srli_epi64(two, 32));
        _mm_storel_epi64((__m128i*)(tile.sums + first), _mm_shuffle_epi32(two, 0x08));
    }
}

HC_256 inline void choose_scales(int blocks, Tile& tile, u8* scales) {
    alignas(32) u32 sent[TILE_BLOCKS];
    for (int b = 0; b < blocks; b += 8) {
        __m256i code = _mm256_load_si256((const __m256i*)(tile.codes + b));
        __m256i sum = _mm256_cvtepu16_epi32(_mm_load_si128((const __m128i*)(tile.sums + b)));
        // lloyd_code: -1 where the next scale below is taken
        __m256i lower = _mm256_cmpgt_epi32(sum, _mm256_set1_epi32(BIAS * BLOCK));
        lower = _mm256_and_si256(lower, _mm256_cmpgt_epi32(_mm256_set1_epi32(LAST_CODE), code));
        __m256i mantissa = _mm256_andnot_si256(code, _mm256_set1_epi32(15));
        __m256i row = _mm256_sub_epi32(_mm256_add_epi32(mantissa, mantissa), lower);
        _mm256_store_si256((__m256i*)(tile.rows + b), row);
        _mm256_store_si256((__m256i*)(sent + b), _mm256_sub_epi32(code, lower));
    }
    for (int b = 0; b < blocks; ++b) scales[b] = (u8)sent[b];
}

HC_256 inline void store_levels(const Tile& tile, int blocks, u8* levels) {
    // value k + 8 b to byte b of word k
    __m128i words = _mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    for (int b = 0; b < blocks; ++b) {
        __m256i fine = tile.fine[b], magnitude = _mm256_abs_epi8(fine), bin = tile.bins[b];
        u32 row = tile.rows[b];
        __m256i level = _mm256_shuffle_epi8(row_256(TABLES.level[row]), bin);
        __m256i last = _mm256_shuffle_epi8(row_256(TABLES.last[row]), bin);
        level = _mm256_sub_epi8(level, _mm256_cmpgt_epi8(magnitude, last));
        level = _mm256_add_epi8(_mm256_sign_epi8(level, fine), _mm256_set1_epi8(8));
        __m128i upper = _mm_slli_epi32(_mm256_extracti128_si256(level, 1), 4);
        __m128i packed = _mm_or_si128(_mm256_castsi256_si128(level), upper);
        _mm_storeu_si128((__m128i*)(levels + b * 16), _mm_shuffle_epi8(packed, words));
    }
}

HC_256 bool encode_256(const float* values, int blocks, u8* levels, u8* scales, u8* base) {
    Tile tile;
    if (!scales_256(values, tile, base)) return false;
    sum_gains(values, blocks, tile);
    choose_scales(blocks, tile, scales);
    store_levels(tile, blocks, levels);
    return true;
}

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

// fine_256 of two blocks: of every lane of 128 bits bytes 0 to 7 are of the first one, byte 4 b + i value
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
            // of an index only the lower six bits count
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

// For each byte of two blocks' payload the two levels in it, as places in a register of `fine`.
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

bool has_vbmi() {
    static const bool has = __builtin_cpu_supports("avx512vbmi");
    return has && instructions() == Instructions::avx512;
}

}  // namespace
#endif

bool lloyd_in_lanes(const float* values, int blocks, u8* levels, u8* scales, u8* base) {
#ifdef HC_X86
    if (has_vbmi()) return encode_512(values, blocks, levels, scales, base);
    if (instructions() != Instructions::plain) return encode_256(values, blocks, levels, scales, base);
#endif
    return false;
}

}  // namespace blockint
}  // namespace hybridcomp
