// Lanes of AVX2 that the passes of stepcode share.
#pragma once

#include "cpu_stepcode_shared.h"

#ifdef HC_X86
namespace hybridcomp {
namespace stepcode {

// 16 values, and their contexts.
struct Contexts256 {
    __m256i lowest, most;
    __m128i shift;
    HC_256 Contexts256(u32 dtype, u32 first)
        : lowest(_mm256_set1_epi16((short)first)), most(_mm256_set1_epi16(CONTEXTS - 1)),
          shift(_mm_cvtsi32_si128((int)mantissa_bits(dtype))) {}
    HC_256 __m256i exponent(__m256i old) const {
        return _mm256_srl_epi16(_mm256_and_si256(old, _mm256_set1_epi16(0x7fff)), shift);
    }
    HC_256 __m256i of(__m256i old) const {
        return _mm256_min_epu16(_mm256_subs_epu16(exponent(old), lowest), most);
    }
};

// An entry of 32 bits for each context, looked up eight at a time.
struct ByContext256 {
    __m256i low, high;
    HC_256 explicit ByContext256(const void* entries)
        : low(_mm256_loadu_si256((const __m256i*)entries)), high(_mm256_loadu_si256((const __m256i*)entries + 1)) {}
    HC_256 __m256i of(__m256i context) const {
        __m256 first = _mm256_castsi256_ps(_mm256_permutevar8x32_epi32(low, context));
        __m256 second = _mm256_castsi256_ps(_mm256_permutevar8x32_epi32(high, context));
        __m256 upper = _mm256_castsi256_ps(_mm256_slli_epi32(context, 28));  // its sign: context 8 and more
        return _mm256_castps_si256(_mm256_blendv_ps(first, second, upper));
    }
};

// Returns folded steps; the top bit says whether the sign flips.
HC_256 inline __m256i folded_256(__m256i old, __m256i value) {
    const __m256i low = _mm256_set1_epi16(0x7fff);
    __m256i doubled = _mm256_slli_epi16(_mm256_sub_epi16(value, old), 1);
    __m256i z = _mm256_and_si256(_mm256_xor_si256(doubled, _mm256_srai_epi16(doubled, 15)), low);
    return _mm256_or_si256(z, _mm256_andnot_si256(low, _mm256_xor_si256(old, value)));
}

// Narrows two times 16 lanes, all below 256, to 32 bytes in order.
HC_256 inline __m256i bytes_256(__m256i first, __m256i second) {
    return _mm256_permute4x64_epi64(_mm256_packus_epi16(first, second), 0xd8);
}

// Widens lanes 8 EIGHTH to 8 EIGHTH + 7 of 16.
template <int EIGHTH>
HC_256 inline __m256i eighth_256(__m256i halves) {
    return _mm256_cvtepu16_epi32(_mm256_extracti128_si256(halves, EIGHTH));
}

// Looks up eight entries one by one, which is faster than a gather on an EPYC.
HC_256 inline __m256i entries_256(const u32* entries, __m256i places) {
    u64 p[4];
    _mm256_storeu_si256((__m256i*)p, places);
    __m128i half[2];
    for (int h = 0; h < 2; ++h) {
        u64 first = p[2 * h], second = p[2 * h + 1];
        __m128i a = _mm_insert_epi32(_mm_cvtsi32_si128((int)entries[(u32)first]), (int)entries[first >> 32], 1);
        __m128i b = _mm_insert_epi32(_mm_cvtsi32_si128((int)entries[(u32)second]), (int)entries[second >> 32], 1);
        half[h] = _mm_unpacklo_epi64(a, b);
    }
    return _mm256_inserti128_si256(_mm256_castsi128_si256(half[0]), half[1], 1);
}

HC_256 inline u32 mask_256(__m256i lanes) { return (u32)_mm256_movemask_ps(_mm256_castsi256_ps(lanes)); }

}  // namespace stepcode
}  // namespace hybridcomp
#endif
