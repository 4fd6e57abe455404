// Lanes of AVX-512 that the passes of stepcode share.
#pragma once

#include "cpu_stepcode_256.h"

#ifdef HC_X86
namespace hybridcomp {
namespace stepcode {

// 32 values, and their contexts.
struct Contexts512 {
    __m512i lowest, most;
    __m128i shift;
    HC_512 Contexts512(u32 dtype, u32 first)
        : lowest(_mm512_set1_epi16((short)first)), most(_mm512_set1_epi16(CONTEXTS - 1)),
          shift(_mm_cvtsi32_si128((int)mantissa_bits(dtype))) {}
    HC_512 __m512i exponent(__m512i old) const {
        return _mm512_srl_epi16(_mm512_and_si512(old, _mm512_set1_epi16(0x7fff)), shift);
    }
    HC_512 __m512i of(__m512i old) const {
        return _mm512_min_epu16(_mm512_subs_epu16(exponent(old), lowest), most);
    }
};

HC_512 inline __m512i lower_half(__m512i halves) {
    return _mm512_cvtepu16_epi32(_mm512_castsi512_si256(halves));
}
HC_512 inline __m512i upper_half(__m512i halves) {
    return _mm512_cvtepu16_epi32(_mm512_extracti64x4_epi64(halves, 1));
}

// Looks up sixteen entries.
HC_512 inline __m512i entries_512(const u32* entries, __m512i places) {
    __m256i low = entries_256(entries, _mm512_castsi512_si256(places));
    __m256i high = entries_256(entries, _mm512_extracti64x4_epi64(places, 1));
    return _mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1);
}

}  // namespace stepcode
}  // namespace hybridcomp
#endif
