// The pass of stepcode's decoder in lanes of AVX-512.
#include "cpu_stepcode_512.h"
#include "cpu_stepcode_decode.h"

#ifdef HC_X86
namespace hybridcomp {
namespace stepcode {
namespace {

struct Popped {
    __m512i state, symbol;
};

HC_512 inline Popped pop_lanes(__m512i state, __m512i context, const Tables& tables) {
    __m512i slot = _mm512_and_si512(state, _mm512_set1_epi32(TOTAL - 1));
    __m512i at = _mm512_or_si512(_mm512_slli_epi32(context, PRECISION), slot);
    __m512i entry = entries_512(tables.entries.data(), at);
    __m512i low = _mm512_set1_epi32(0xfff), frequency = _mm512_and_si512(entry, low);
    __m512i added = _mm512_and_si512(_mm512_srli_epi32(entry, 12), low);
    __m512i next = _mm512_mullo_epi32(frequency, _mm512_srli_epi32(state, PRECISION));
    return Popped{_mm512_add_epi32(next, added), _mm512_srli_epi32(entry, 24)};
}

HC_512 inline __m512i take_words(__m512i state, const u8*& words) {
    __mmask16 short_of = _mm512_cmplt_epu32_mask(state, _mm512_set1_epi32(LEAST_STATE));
    __m512i next = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)words));
    words += 2 * __builtin_popcount(short_of);
    __m512i full = _mm512_or_si512(_mm512_slli_epi32(state, 16), _mm512_maskz_expand_epi32(short_of, next));
    return _mm512_mask_mov_epi32(state, short_of, full);
}

}  // namespace

HC_512 size_t decode_512(Tile& tile) {
    const Contexts512 contexts(tile.dtype, tile.lowest);
    const Tables& tables = *tile.tables;
    const __m512i zeros = _mm512_loadu_si512(tables.zeros), slots = _mm512_set1_epi32(TOTAL - 1);
    const __m512i low = _mm512_set1_epi16(0x7fff);
    __m512i s0 = _mm512_loadu_si512(tile.states), s1 = _mm512_loadu_si512(tile.states + 16);
    const u8* words = tile.words;
    size_t i = 0;
    for (; i + LANES <= tile.count && tile.end - words >= 2 * (ptrdiff_t)LANES; i += LANES) {
        __m512i old = _mm512_loadu_si512(tile.reference + i), context = contexts.of(old);
        __m512i c0 = lower_half(context), c1 = upper_half(context);
        __m512i f0 = _mm512_permutexvar_epi32(c0, zeros), f1 = _mm512_permutexvar_epi32(c1, zeros);
        __m512i l0 = _mm512_and_si512(s0, slots), l1 = _mm512_and_si512(s1, slots);
        if ((u32)_mm512_cmplt_epu32_mask(l0, f0) + (u32)_mm512_cmplt_epu32_mask(l1, f1) == 2 * 0xffffu) {
            s0 = _mm512_add_epi32(_mm512_mullo_epi32(f0, _mm512_srli_epi32(s0, PRECISION)), l0);
            s1 = _mm512_add_epi32(_mm512_mullo_epi32(f1, _mm512_srli_epi32(s1, PRECISION)), l1);
            s0 = take_words(s0, words), s1 = take_words(s1, words);
            _mm512_storeu_si512(tile.out + i, old);
            continue;
        }
        Popped p0 = pop_lanes(s0, c0, tables), p1 = pop_lanes(s1, c1, tables);
        s0 = take_words(p0.state, words), s1 = take_words(p1.state, words);
        __m512i symbol = _mm512_inserti64x4(_mm512_castsi256_si512(_mm512_cvtepi32_epi16(p0.symbol)),
                                            _mm512_cvtepi32_epi16(p1.symbol), 1);
        __m512i z = symbol;
        u32 rare = _mm512_cmpgt_epu16_mask(symbol, _mm512_set1_epi16(DIRECT - 1));
        if (rare) {
            alignas(64) u16 folded[LANES];
            _mm512_store_si512(folded, symbol);
            put_rare(folded, rare, tile.extra);
            z = _mm512_load_si512(folded);
        }
        __m512i odd = _mm512_sub_epi16(_mm512_setzero_si512(), _mm512_and_si512(z, _mm512_set1_epi16(1)));
        __m512i down = _mm512_srli_epi16(_mm512_and_si512(z, low), 1);
        // the flip of the sign, and the lower bits
        __m512i step = _mm512_or_si512(_mm512_andnot_si512(low, z), _mm512_and_si512(_mm512_xor_si512(down, odd), low));
        __m512i value = _mm512_and_si512(_mm512_add_epi16(old, step), low);
        __m512i sign = _mm512_andnot_si512(low, _mm512_xor_si512(old, step));
        _mm512_storeu_si512(tile.out + i, _mm512_or_si512(value, sign));
    }
    _mm512_storeu_si512(tile.states, s0);
    _mm512_storeu_si512(tile.states + 16, s1);
    tile.words = words;
    return i;
}

}  // namespace stepcode
}  // namespace hybridcomp
#endif
