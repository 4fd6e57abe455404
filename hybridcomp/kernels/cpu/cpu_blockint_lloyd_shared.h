// Tables, scales and the state between passes over a tile, for all loops of Lloyd levels.
#pragma once

#include "blockint.h"
#include "cpu_blockint_lloyd.h"

#ifdef HC_X86
namespace hybridcomp {
namespace blockint {
namespace {

constexpr int BINS = 16;       // of eight magnitudes each, 127 included: at most one level begins in a bin
constexpr int ROWS = 32;       // for each mantissa of T, one for T itself and one for the next below it
constexpr int BIAS = 128;      // of gains, as bytes without a sign

// `level`, `last`: for every row and bin the first magnitude's level, and the last magnitude with that level.
// `gains`: of bins of four magnitudes, even and odd bins apart. For AVX-512: levels + 8 of all magnitudes, all gains.
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

// State between the passes over a tile: largest magnitudes (later codes of T), inverse steps, fine values, four sums
// of gains + BIAS in a word, rows of `TABLES`.
struct Tile {
    alignas(64) u32 codes[TILE_BLOCKS];
    alignas(64) float inverse[TILE_BLOCKS];
    alignas(32) __m256i fine[TILE_BLOCKS], bins[TILE_BLOCKS];
    alignas(32) u16 sums[TILE_BLOCKS];
    alignas(32) u32 rows[TILE_BLOCKS];
};

// Codes and inverse steps of a tile, given the largest magnitude of each block; returns its base.
HC_INLINE u32 first_scales(u32 largest, Tile& tile) {
    u32 base = base_of(largest);
    for (int b = 0; b < TILE_BLOCKS; ++b) {
        tile.codes[b] = scale_code<Spacing::lloyd>(tile.codes[b], base);
        tile.inverse[b] = inverse_step<4, Spacing::lloyd>(tile.codes[b], base);
    }
    return base;
}

// Chooses from the sums of gains the codes to send and the rows of `TABLES`.
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

}  // namespace
}  // namespace blockint
}  // namespace hybridcomp
#endif
