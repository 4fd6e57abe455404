// Model of a message: symbols are counted by exponent in samples; the counts become frequencies.
#include "cpu_stepcode_model.h"

#include "cpu_stepcode_256.h"
#include "cpu_stepcode_512.h"

namespace hybridcomp {
namespace stepcode {
namespace {

void count_value(u32 old, u32 value, u32 dtype, u32* rows) {
    u32 step = step_between(old, value);
    ++rows[exponent_of(old, dtype) * ROW + coded_of(folded(step), step >> 15).symbol];
}

// Counts into two tables in turn, so that no increment waits for the previous one.
void count_plain(const u16* values, const u16* reference, size_t count, u32 dtype, u32* even, u32* odd) {
    for (size_t i = 0; i < count; ++i) count_value(reference[i], values[i], dtype, i % 2 ? odd : even);
}

#ifdef HC_X86
// Counts a whole group of 32 at `places`, except lanes of `rare`, whose steps have extra bits.
HC_INLINE void count_group(const u16* values, const u16* reference, u32 dtype, const u16* places, u32 rare,
                           u32* even, u32* odd) {
    if (!rare) {
        for (u32 i = 0; i < LANES; i += 2) ++even[places[i]], ++odd[places[i + 1]];
        return;
    }
    for (u32 i = 0; i < LANES; ++i) {
        if (rare >> i & 1) count_value(reference[i], values[i], dtype, even);
        else ++(i % 2 ? odd : even)[places[i]];
    }
}

HC_256 void count_256(const u16* values, const u16* reference, size_t groups, u32 dtype, u32* even, u32* odd) {
    const Contexts256 exponents_from_zero(dtype, 0);
    for (size_t at = 0; at < groups * LANES; at += LANES) {
        alignas(32) u16 places[LANES];
        __m256i few[2];
        for (int h = 0; h < 2; ++h) {
            __m256i old = _mm256_loadu_si256((const __m256i*)(reference + at) + h);
            __m256i z = folded_256(old, _mm256_loadu_si256((const __m256i*)(values + at) + h));
            __m256i row = _mm256_slli_epi16(exponents_from_zero.exponent(old), 7);
            few[h] = _mm256_cmpeq_epi16(_mm256_min_epu16(z, _mm256_set1_epi16(DIRECT - 1)), z);
            _mm256_store_si256((__m256i*)places + h, _mm256_or_si256(row, z));
        }
        __m256i both = _mm256_permute4x64_epi64(_mm256_packs_epi16(few[0], few[1]), 0xd8);
        count_group(values + at, reference + at, dtype, places, ~(u32)_mm256_movemask_epi8(both), even, odd);
    }
}

HC_512 void count_512(const u16* values, const u16* reference, size_t groups, u32 dtype, u32* even, u32* odd) {
    const Contexts512 exponents_from_zero(dtype, 0);
    const __m512i low = _mm512_set1_epi16(0x7fff);
    for (size_t g = 0; g < groups; ++g) {
        size_t at = g * LANES;
        __m512i old = _mm512_loadu_si512(reference + at), value = _mm512_loadu_si512(values + at);
        __m512i exponent = exponents_from_zero.exponent(old);
        __m512i d = _mm512_and_si512(_mm512_sub_epi16(value, old), low);
        __m512i sign = _mm512_srai_epi16(_mm512_slli_epi16(d, 1), 15);
        __m512i z = _mm512_and_si512(_mm512_xor_si512(_mm512_slli_epi16(d, 1), sign), low);
        __mmask32 rare = _mm512_cmpgt_epu16_mask(z, _mm512_set1_epi16(DIRECT - 1)) |
                         _mm512_movepi16_mask(_mm512_xor_si512(old, value));
        alignas(64) u16 places[LANES];
        _mm512_store_si512(places, _mm512_or_si512(_mm512_slli_epi16(exponent, 7), z));
        count_group(values + at, reference + at, dtype, places, rare, even, odd);
    }
}
#endif

void count_run(const u16* values, const u16* reference, size_t count, u32 dtype, u32* even, u32* odd) {
    size_t done = 0;
#ifdef HC_X86
    Instructions with = instructions();
    if (with != Instructions::plain) {
        done = count / LANES * LANES;
        (with == Instructions::avx512 ? count_512 : count_256)(values, reference, count / LANES, dtype, even, odd);
    }
#endif
    count_plain(values + done, reference + done, count - done, dtype, even, odd);
}

// Counts, [exponents][ROW], of the sampled values.
std::vector<u32> count_samples(const u16* values, const u16* reference, size_t numel, u32 dtype) {
    size_t size = (size_t)exponents(dtype) * ROW, stride = stride_of(numel) * RUN;
    std::vector<u32> counts(2 * size, 0);
    for (size_t first = 0; first < numel; first += stride) {
        size_t count = numel - first < RUN ? numel - first : RUN;
        count_run(values + first, reference + first, count, dtype, counts.data(), counts.data() + size);
    }
    for (size_t i = 0; i < size; ++i) counts[i] += counts[size + i];
    counts.resize(size);
    return counts;
}

}  // namespace

Ranges make_model(const u16* values, const u16* reference, Head& head, u8* out) {
    u32 dtype = head.dtype;
    std::vector<u32> counts = count_samples(values, reference, head.numel, dtype);
    std::vector<u32> totals(exponents(dtype), 0);
    for (u32 e = 0; e < exponents(dtype); ++e) {
        for (u32 s = 0; s < SYMBOLS; ++s) totals[e] += counts[e * ROW + s];
    }
    head.lowest = (u8)lowest_exponent(totals.data(), dtype);
    u32 sums[CONTEXTS][ROW] = {};
    for (u32 e = 0; e < exponents(dtype); ++e) {
        if (!totals[e]) continue;
        u32 context = context_of(e << mantissa_bits(dtype), dtype, head.lowest);
        for (u32 s = 0; s < SYMBOLS; ++s) sums[context][s] += counts[e * ROW + s];
    }
    Ranges ranges = {};
    u64 cost = 0, sampled = 0;
    u8* at = out;
    for (u32 c = 0; c < CONTEXTS; ++c) {
        u32* row = ranges.of[c];
        frequencies_from(sums[c], least_count(head.numel), row);
        cost += cost_of(sums[c], row);
        for (u32 s = 0; s < ESCAPE; ++s) sampled += sums[c][s];
        ranges_from(row);
        at += write_context(row, at);
        for (u32 s = 0; s < DIRECT; ++s) ranges.known[c] |= (u32)(row[s] != 0) << s;
    }
    head.tile = 1u << tile_log(cost, sampled);
    head.model = (u32)ceil_div(at - out, 4) * 4;
    pad(out, at - out, head.model);
    return ranges;
}

}  // namespace stepcode
}  // namespace hybridcomp
