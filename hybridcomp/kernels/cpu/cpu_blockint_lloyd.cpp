// Blocks of blockint with Lloyd levels in lanes of AVX2: 32 values are one register of bytes.
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
// of four magnitudes, the even ones and the odd ones.
struct Tables {
    alignas(32) u8 level[ROWS][BINS], last[ROWS][BINS], gains[2][BINS];
    Tables() {
        for (int row = 0; row < ROWS; ++row) {
            float share = lloyd_share(15 - row / 2, 128, row % 2);
            for (int bin = 0; bin < BINS; ++bin) {
                u8 begin = of(8 * bin, share), end = 8 * bin;
                while (end < 8 * bin + 7 && of(end + 1, share) == begin) ++end;
                level[row][bin] = begin, last[row][bin] = end;
            }
        }
        for (int bin = 0; bin < 2 * BINS; ++bin) gains[bin % 2][bin / 2] = lloyd_gain(bin) + BIAS;
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

// What the passes over a tile hand on: fine values, four sums of gains + BIAS in a word, rows of `TABLES`.
struct Tile {
    alignas(32) __m256i fine[TILE_BLOCKS];
    alignas(32) u16 sums[TILE_BLOCKS];
    alignas(32) u32 rows[TILE_BLOCKS];
};

HC_256 inline __m256i bins_256(__m256i magnitude) {
    return _mm256_and_si256(_mm256_srli_epi16(magnitude, 3), _mm256_set1_epi8(15));
}

HC_256 inline void sum_gains(const float* values, int blocks, const float* inverse, Tile& tile) {
    __m256i even = row_256(TABLES.gains[0]), odd = row_256(TABLES.gains[1]);
    for (int first = 0; first < blocks; first += 4) {
        __m256i four = _mm256_setzero_si256();
#pragma GCC unroll 4
        for (int b = 0; b < 4; ++b) {
            __m256i fine = fine_256(values + (first + b) * BLOCK, inverse[first + b]);
            tile.fine[first + b] = fine;
            __m256i magnitude = _mm256_abs_epi8(fine), bin = bins_256(magnitude);
            // whether a magnitude is in the second half of its bin, in the highest bit
            __m256i second = _mm256_slli_epi16(magnitude, 5);
            __m256i gains = _mm256_blendv_epi8(_mm256_shuffle_epi8(even, bin), _mm256_shuffle_epi8(odd, bin), second);
            __m256i sums = _mm256_sad_epu8(gains, _mm256_setzero_si256());
            four = _mm256_or_si256(four, _mm256_slli_epi64(sums, 16 * b));
        }
        __m128i two = _mm_add_epi16(_mm256_castsi256_si128(four), _mm256_extracti128_si256(four, 1));
        _mm_storel_epi64((__m128i*)(tile.sums + first), _mm_add_epi16(two, _mm_unpackhi_epi64(two, two)));
    }
}

HC_256 inline void choose_scales(int blocks, const u32* codes, Tile& tile, u8* scales) {
    for (int b = 0; b < blocks; ++b) {
        u32 sent = lloyd_code(codes[b], (i32)tile.sums[b] - BIAS * BLOCK);
        tile.rows[b] = ((15 - codes[b]) & 15) * 2 + (sent - codes[b]);
        scales[b] = (u8)sent;
    }
}

HC_256 inline void store_levels(const Tile& tile, int blocks, u8* levels) {
    // value k + 8 b to byte b of word k
    __m128i words = _mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    for (int b = 0; b < blocks; ++b) {
        __m256i fine = tile.fine[b], magnitude = _mm256_abs_epi8(fine), bin = bins_256(magnitude);
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

HC_256 void encode_256(const float* values, int blocks, const u32* codes, const float* inverse, u8* levels,
                       u8* scales) {
    Tile tile;
    sum_gains(values, blocks, inverse, tile);
    choose_scales(blocks, codes, tile, scales);
    store_levels(tile, blocks, levels);
}

}  // namespace
#endif

bool lloyd_in_lanes(const float* values, int blocks, const u32* codes, const float* inverse, u8* levels,
                    u8* scales) {
#ifdef HC_X86
    if (instructions() != Instructions::plain) {
        encode_256(values, blocks, codes, inverse, levels, scales);
        return true;
    }
#endif
    return false;
}

}  // namespace blockint
}  // namespace hybridcomp
