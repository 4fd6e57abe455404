// The model of a message: counts of symbols for each exponent, in samples, made into frequencies.
#include "cpu_stepcode_model.h"

namespace hybridcomp {
namespace stepcode {
namespace {

HC_INLINE void count_run(const u16* values, const u16* reference, size_t count, u32 dtype, u32* even,
                         u32* odd) {
    u32 changed = 0;
    for (size_t i = 0; i < count; ++i) changed += values[i] != reference[i];
    bool sparse = changed < count / 8;  // a branch for each value can be predicted
    for (size_t i = 0; i < count; ++i) {
        u32 old = reference[i], step = step_between(old, values[i]), symbol = 0;
        u32* rows = i % 2 ? odd : even;  // no increment waits for the one before
        if (!sparse || step) symbol = coded_of(folded(step), step >> 15).symbol;
        ++rows[exponent_of(old, dtype) * ROW + symbol];
    }
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
