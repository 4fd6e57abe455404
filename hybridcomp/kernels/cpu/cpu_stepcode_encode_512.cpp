// The passes of stepcode's encoder in lanes of AVX-512.
#include "cpu_stepcode_512.h"
#include "cpu_stepcode_encode.h"

#ifdef HC_X86
namespace hybridcomp {
namespace stepcode {

HC_512 bool code_512(const Source& from, size_t first, size_t groups, u8* symbols, BitWriter& extra) {
    const Contexts512 contexts(from.dtype, from.lowest);
    const __m512i known = _mm512_loadu_si512(from.ranges->known), one = _mm512_set1_epi32(1);
    const __m512i low = _mm512_set1_epi16(0x7fff);
    bool changed = false;
    for (size_t g = 0; g < groups; ++g) {
        size_t at = first + g * LANES;
        u8* to = symbols + g * LANES;
        __m512i old = _mm512_loadu_si512(from.reference + at), value = _mm512_loadu_si512(from.values + at);
        __mmask32 moved = _mm512_cmpneq_epi16_mask(old, value);
        if (moved == 0 && from.zeros_known) {
            _mm256_storeu_si256((__m256i*)to, _mm256_setzero_si256());
            continue;
        }
        changed |= moved != 0;
        __m512i d = _mm512_and_si512(_mm512_sub_epi16(value, old), low);
        __m512i sign = _mm512_srai_epi16(_mm512_slli_epi16(d, 1), 15);
        __m512i z = _mm512_and_si512(_mm512_xor_si512(_mm512_slli_epi16(d, 1), sign), low);
        __mmask32 rare = _mm512_cmpgt_epu16_mask(z, _mm512_set1_epi16(DIRECT - 1)) |
                         _mm512_movepi16_mask(_mm512_xor_si512(old, value));
        __m512i context = contexts.of(old);
        __m512i has0 = _mm512_srlv_epi32(_mm512_permutexvar_epi32(lower_half(context), known), lower_half(z));
        __m512i has1 = _mm512_srlv_epi32(_mm512_permutexvar_epi32(upper_half(context), known), upper_half(z));
        rare |= (u32)_mm512_testn_epi32_mask(has0, one) | (u32)_mm512_testn_epi32_mask(has1, one) << 16;
        _mm256_storeu_si256((__m256i*)to, _mm512_cvtepi16_epi8(z));
        if (!rare) continue;
        alignas(64) u16 steps[LANES], rows[LANES];
        _mm512_store_si512(steps, _mm512_or_si512(z, _mm512_andnot_si512(low, _mm512_xor_si512(old, value))));
        _mm512_store_si512(rows, context);
        code_rare(from, at, rare, steps, rows, to, extra);
    }
    return changed;
}

namespace {

// Returns the states after symbols. The quotient, of states below 2^20 frequency, is a float's, then corrected.
HC_512 inline __m512i push_lanes(__m512i state, __m512i range, __m512 share) {
    __m512i frequency = _mm512_and_si512(range, _mm512_set1_epi32(0xffff));
    __m512i quotient = _mm512_cvttps_epu32(_mm512_mul_ps(_mm512_cvtepu32_ps(state), share));
    __m512i rest = _mm512_sub_epi32(state, _mm512_mullo_epi32(quotient, frequency));
    __m512i within = _mm512_srai_epi32(_mm512_sub_epi32(rest, frequency), 31);
    __m512i mend = _mm512_andnot_si512(within, _mm512_sub_epi32(_mm512_set1_epi32(TOTAL), frequency));
    __m512i low = _mm512_add_epi32(rest, _mm512_srli_epi32(range, 16));
    return _mm512_add_epi32(_mm512_add_epi32(_mm512_slli_epi32(quotient, PRECISION), low), mend);
}

HC_512 inline __m512 shares_of(__m512i range) {
    __m512i frequency = _mm512_and_si512(range, _mm512_set1_epi32(0xffff));
    return _mm512_div_ps(_mm512_set1_ps(BELOW), _mm512_cvtepu32_ps(frequency));
}

HC_512 inline __m512i give_words(__m512i state, __m512i range, u16*& to) {
    __m512i limit = _mm512_slli_epi32(range, 20);  // the start leaves at the top
    __mmask16 over = _mm512_cmpge_epu32_mask(state, limit);
    to -= __builtin_popcount(over);
    __m256i words = _mm512_cvtepi32_epi16(_mm512_maskz_compress_epi32(over, state));
    _mm256_mask_storeu_epi16(to, (__mmask16)((1u << __builtin_popcount(over)) - 1), words);
    return _mm512_mask_srli_epi32(state, over, state, 16);
}

// Writes words of TILES tiles in turn, since states of one tile depend on each other.
template <int TILES>
HC_512 void push_wide(const Source& from, Pushing* const* tiles, size_t groups) {
    const Contexts512 contexts(from.dtype, from.lowest);
    u32 zero_ranges[CONTEXTS];
    for (u32 c = 0; c < CONTEXTS; ++c) zero_ranges[c] = from.ranges->of[c][0];
    const __m512i zeros = _mm512_loadu_si512(zero_ranges);
    const __m512 zero_shares = shares_of(zeros);  // of what a context lacks: never used
    const u32* rows = from.ranges->of[0];
    __m512i s0[TILES], s1[TILES];
    u16* to[TILES];
    for (int n = 0; n < TILES; ++n) {
        s0[n] = _mm512_loadu_si512(tiles[n]->states), s1[n] = _mm512_loadu_si512(tiles[n]->states + 16);
        to[n] = tiles[n]->to;
    }
    for (size_t g = groups; g-- > 0;) {
#pragma GCC unroll 4
        for (int n = 0; n < TILES; ++n) {
            __m512i context = contexts.of(_mm512_loadu_si512(from.reference + tiles[n]->first + g * LANES));
            __m256i symbol = _mm256_loadu_si256((const __m256i*)(tiles[n]->symbols + g * LANES));
            __m512i c0 = lower_half(context), c1 = upper_half(context), r0, r1;
            __m512 h0, h1;
            if (_mm256_testz_si256(symbol, symbol)) {
                r0 = _mm512_permutexvar_epi32(c0, zeros), r1 = _mm512_permutexvar_epi32(c1, zeros);
                h0 = _mm512_permutexvar_ps(c0, zero_shares), h1 = _mm512_permutexvar_ps(c1, zero_shares);
            } else {
                __m512i y0 = _mm512_cvtepu8_epi32(_mm256_castsi256_si128(symbol));
                __m512i y1 = _mm512_cvtepu8_epi32(_mm256_extracti128_si256(symbol, 1));
                r0 = entries_512(rows, _mm512_add_epi32(_mm512_slli_epi32(c0, 7), y0));
                r1 = entries_512(rows, _mm512_add_epi32(_mm512_slli_epi32(c1, 7), y1));
                h0 = shares_of(r0), h1 = shares_of(r1);
            }
            s1[n] = push_lanes(give_words(s1[n], r1, to[n]), r1, h1);
            s0[n] = push_lanes(give_words(s0[n], r0, to[n]), r0, h0);
        }
    }
    for (int n = 0; n < TILES; ++n) {
        _mm512_storeu_si512(tiles[n]->states, s0[n]);
        _mm512_storeu_si512(tiles[n]->states + 16, s1[n]);
        tiles[n]->to = to[n];
    }
}

}  // namespace

HC_512 void push_512(const Source& from, Pushing* tile, size_t groups) { push_wide<1>(from, &tile, groups); }

HC_512 void push_pair_512(const Source& from, Pushing* const* tiles, size_t groups) {
    push_wide<2>(from, tiles, groups);
}

}  // namespace stepcode
}  // namespace hybridcomp
#endif
