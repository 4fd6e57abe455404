// Blocks of blockint with Lloyd levels: 32 values are a register of bytes of AVX2.
#include "cpu_blockint_lloyd_512.h"

namespace hybridcomp {
namespace blockint {

#ifdef HC_X86
namespace {

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

// Levels of a block, in the order of `fine_256`.
HC_256 inline __m256i levels_256(const Tile& tile, int b) {
    __m256i fine = tile.fine[b], magnitude = _mm256_abs_epi8(fine), bin = tile.bins[b];
    u32 row = tile.rows[b];
    __m256i level = _mm256_shuffle_epi8(row_256(TABLES.level[row]), bin);
    __m256i last = _mm256_shuffle_epi8(row_256(TABLES.last[row]), bin);
    level = _mm256_sub_epi8(level, _mm256_cmpgt_epi8(magnitude, last));
    return _mm256_add_epi8(_mm256_sign_epi8(level, fine), _mm256_set1_epi8(8));
}

HC_256 inline void store_levels(const Tile& tile, int blocks, u8* levels) {
    // of each block value k + 8 b to byte b of word k
    const __m256i words = _mm256_broadcastsi128_si256(
        _mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15));
    for (int b = 0; b < blocks; b += 2) {
        __m256i one = levels_256(tile, b), two = levels_256(tile, b + 1);
        __m256i upper = _mm256_slli_epi32(_mm256_permute2x128_si256(one, two, 0x31), 4);
        __m256i packed = _mm256_or_si256(_mm256_permute2x128_si256(one, two, 0x20), upper);
        packed = _mm256_shuffle_epi8(packed, words);
        if (b + 1 < blocks) {
            _mm256_storeu_si256((__m256i*)(levels + b * 16), packed);
        } else {
            _mm_storeu_si128((__m128i*)(levels + b * 16), _mm256_castsi256_si128(packed));
        }
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
