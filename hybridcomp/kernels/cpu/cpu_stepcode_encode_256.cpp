// The passes of stepcode's encoder in lanes of AVX2.
#include "cpu_stepcode_256.h"
#include "cpu_stepcode_encode.h"

#ifdef HC_X86
namespace hybridcomp {
namespace stepcode {

namespace {

// Direct symbols of each context: a byte of bits for symbols 8 n to 8 n + 7.
struct Known256 {
    __m256i bytes[4], bit;
    HC_256 explicit Known256(const u32* known) {
        u8 rows[4][CONTEXTS], bits[16];
        for (u32 n = 0; n < 4; ++n) {
            for (u32 c = 0; c < CONTEXTS; ++c) rows[n][c] = (u8)(known[c] >> 8 * n);
            bytes[n] = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i*)rows[n]));
        }
        for (u32 i = 0; i < 16; ++i) bits[i] = (u8)(1u << i % 8);
        bit = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i*)bits));
    }
    // Returns the lanes, of 32 symbols as bytes, whose symbol is not direct or not in their context.
    HC_256 u32 lacking(__m256i symbol, __m256i context) const {
        __m256i held = _mm256_shuffle_epi8(bytes[0], context);
#pragma GCC unroll 4
        for (int n = 1; n < 4; ++n) {
            __m256i beyond = _mm256_cmpgt_epi8(symbol, _mm256_set1_epi8((char)(8 * n - 1)));
            held = _mm256_blendv_epi8(held, _mm256_shuffle_epi8(bytes[n], context), beyond);
        }
        // a symbol from 128 on picks 0
        __m256i has = _mm256_and_si256(held, _mm256_shuffle_epi8(bit, symbol));
        __m256i none = _mm256_cmpeq_epi8(has, _mm256_setzero_si256());
        __m256i large = _mm256_cmpgt_epi8(symbol, _mm256_set1_epi8(DIRECT - 1));
        return (u32)_mm256_movemask_epi8(_mm256_or_si256(none, large));
    }
};

// Shuffles of 8 u16 that move those of a mask to the end, in order.
struct ToEnd {
    u8 bytes[256][16];
    constexpr ToEnd() : bytes{} {
        for (u32 mask = 0; mask < 256; ++mask) {
            u32 place = 8;
            for (u32 lane = 8; lane-- > 0;) {
                if (!(mask >> lane & 1)) continue;
                --place;
                bytes[mask][2 * place] = (u8)(2 * lane), bytes[mask][2 * place + 1] = (u8)(2 * lane + 1);
            }
        }
    }
};
alignas(16) constexpr ToEnd TO_END;

HC_256 inline __m256 float_256(__m256i state) {
    // put both halves into mantissas of floats at 2^23 and 2^39, so that only the sum is rounded
    __m256i low = _mm256_blend_epi16(state, _mm256_set1_epi32(0x4b000000), 0xaa);
    __m256i high = _mm256_or_si256(_mm256_srli_epi32(state, 16), _mm256_set1_epi32(0x53000000));
    __m256 rest = _mm256_sub_ps(_mm256_castsi256_ps(high), _mm256_set1_ps(549764202496.0f));  // 2^39 + 2^23
    return _mm256_add_ps(rest, _mm256_castsi256_ps(low));
}

// Returns the states after symbols. The quotient, of states below 2^20 frequency, is a float's, then corrected.
HC_256 inline __m256i push_lanes(__m256i state, __m256i range, __m256 share) {
    __m256i frequency = _mm256_and_si256(range, _mm256_set1_epi32(0xffff));
    __m256i quotient = _mm256_cvttps_epi32(_mm256_mul_ps(float_256(state), share));
    __m256i rest = _mm256_sub_epi32(state, _mm256_mullo_epi32(quotient, frequency));
    __m256i within = _mm256_cmpgt_epi32(frequency, rest);
    __m256i mend = _mm256_andnot_si256(within, _mm256_sub_epi32(_mm256_set1_epi32(TOTAL), frequency));
    __m256i low = _mm256_add_epi32(rest, _mm256_srli_epi32(range, 16));
    return _mm256_add_epi32(_mm256_add_epi32(_mm256_slli_epi32(quotient, PRECISION), low), mend);
}

HC_256 inline __m256 shares_of(__m256i range) {
    __m256i frequency = _mm256_and_si256(range, _mm256_set1_epi32(0xffff));
    return _mm256_div_ps(_mm256_set1_ps(BELOW), _mm256_cvtepi32_ps(frequency));
}

HC_256 inline __m256i give_words(__m256i state, __m256i range, u16*& to) {
    const __m256i lower = _mm256_set1_epi64x(0x0d0c090805040100);
    __m256i limit = _mm256_slli_epi32(range, 20);  // the start leaves at the top
    __m256i over = _mm256_cmpeq_epi32(_mm256_max_epu32(state, limit), state);
    u32 mask = mask_256(over);
    __m256i halves = _mm256_permute4x64_epi64(_mm256_shuffle_epi8(state, lower), 0x08);
    __m128i moved = _mm_load_si128((const __m128i*)TO_END.bytes[mask]);
    // places before the words of the mask are written again later, or lie before all words
    _mm_storeu_si128((__m128i*)(to - 8), _mm_shuffle_epi8(_mm256_castsi256_si128(halves), moved));
    to -= __builtin_popcount(mask);
    return _mm256_blendv_epi8(state, _mm256_srli_epi32(state, 16), over);
}

}  // namespace

HC_256 bool code_256(const Source& from, size_t first, size_t groups, u8* symbols, BitWriter& extra) {
    const Contexts256 contexts(from.dtype, from.lowest);
    const Known256 known(from.ranges->known);
    const __m256i most = _mm256_set1_epi16(255);
    bool changed = false;
    for (size_t g = 0; g < groups; ++g) {
        size_t at = first + g * LANES;
        u8* to = symbols + g * LANES;
        const __m256i* olds = (const __m256i*)(from.reference + at);
        const __m256i* values = (const __m256i*)(from.values + at);
        __m256i o0 = _mm256_loadu_si256(olds), o1 = _mm256_loadu_si256(olds + 1);
        __m256i n0 = _mm256_loadu_si256(values), n1 = _mm256_loadu_si256(values + 1);
        __m256i other = _mm256_or_si256(_mm256_xor_si256(o0, n0), _mm256_xor_si256(o1, n1));
        bool moved = !_mm256_testz_si256(other, other);
        if (!moved && from.zeros_known) {
            _mm256_storeu_si256((__m256i*)to, _mm256_setzero_si256());
            continue;
        }
        changed |= moved;
        __m256i z0 = folded_256(o0, n0), z1 = folded_256(o1, n1), c0 = contexts.of(o0), c1 = contexts.of(o1);
        __m256i symbol = bytes_256(_mm256_min_epu16(z0, most), _mm256_min_epu16(z1, most));
        _mm256_storeu_si256((__m256i*)to, symbol);
        u32 rare = known.lacking(symbol, bytes_256(c0, c1));
        if (!rare) continue;
        alignas(32) u16 steps[LANES], rows[LANES];
        _mm256_store_si256((__m256i*)steps, z0), _mm256_store_si256((__m256i*)steps + 1, z1);
        _mm256_store_si256((__m256i*)rows, c0), _mm256_store_si256((__m256i*)rows + 1, c1);
        code_rare(from, at, rare, steps, rows, to, extra);
    }
    return changed;
}

HC_256 void push_256(const Source& from, Pushing* tile, size_t groups) {
    const Contexts256 contexts(from.dtype, from.lowest);
    alignas(32) u32 zero_ranges[CONTEXTS];
    alignas(32) float zero_shares[CONTEXTS];  // of what a context lacks: never used
    for (u32 c = 0; c < CONTEXTS; ++c) {
        zero_ranges[c] = from.ranges->of[c][0];
        zero_shares[c] = BELOW / (float)frequency_of(zero_ranges[c]);
    }
    const ByContext256 zeros(zero_ranges), shares(zero_shares);
    const u32* rows = from.ranges->of[0];
    __m256i s[4];
    for (int h = 0; h < 4; ++h) s[h] = _mm256_loadu_si256((const __m256i*)tile->states + h);
    u16* to = tile->to;
    for (size_t g = groups; g-- > 0;) {
        const __m256i* olds = (const __m256i*)(from.reference + tile->first + g * LANES);
        const u8* symbols = tile->symbols + g * LANES;
        __m256i c0 = contexts.of(_mm256_loadu_si256(olds)), c1 = contexts.of(_mm256_loadu_si256(olds + 1));
        __m256i c[4] = {eighth_256<0>(c0), eighth_256<1>(c0), eighth_256<0>(c1), eighth_256<1>(c1)};
        __m256i all = _mm256_loadu_si256((const __m256i*)symbols);
        bool quiet = _mm256_testz_si256(all, all);
#pragma GCC unroll 4
        for (int h = 3; h >= 0; --h) {
            __m256i range;
            __m256 share;
            if (quiet) {
                range = zeros.of(c[h]), share = _mm256_castsi256_ps(shares.of(c[h]));
            } else {
                __m256i symbol = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)(symbols + 8 * h)));
                range = entries_256(rows, _mm256_add_epi32(_mm256_slli_epi32(c[h], 7), symbol));
                share = shares_of(range);
            }
            s[h] = push_lanes(give_words(s[h], range, to), range, share);
        }
    }
    for (int h = 0; h < 4; ++h) _mm256_storeu_si256((__m256i*)tile->states + h, s[h]);
    tile->to = to;
}

}  // namespace stepcode
}  // namespace hybridcomp
#endif
