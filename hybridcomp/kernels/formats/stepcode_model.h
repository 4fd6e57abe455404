// The model of stepcode: counted in samples of the message, as frequencies, and as bytes.
#pragma once

#include "stepcode.h"

namespace hybridcomp {
namespace stepcode {

// Runs of RUN values are counted, every stride-th of them, so that about 2^18 values are.
constexpr u32 RUN = 512;
HC_INLINE u64 stride_of(u64 numel) { return numel >> 18 ? numel >> 18 : 1; }

constexpr u32 MODEL_BYTES = CONTEXTS * (1 + 3 * ESCAPE);  // of the largest, a multiple of 4
static_assert(MODEL_BYTES % 4 == 0, "offsets follow the model");

// The 16 neighbouring exponents that most of the counted values have; `totals` counts each exponent.
HC_INLINE u32 lowest_exponent(const u32* totals, u32 dtype) {
    u64 sum = 0, most = 0;
    u32 lowest = 0;
    for (u32 e = 0; e < exponents(dtype); ++e) {
        sum += totals[e];
        if (e >= CONTEXTS) sum -= totals[e - CONTEXTS];
        if (e + 1 >= CONTEXTS && sum >= most) most = sum, lowest = e + 1 - CONTEXTS;
    }
    return lowest;
}

// Frequencies from counts, [SYMBOLS]: they add up to 4096, one of them is the escape's.
HC_INLINE void frequencies_from(const u32* counts, u32* frequencies) {
    u64 n = 0;
    u32 sum = 0;
    for (u32 s = 0; s < ESCAPE; ++s) n += counts[s];
    for (u32 s = 0; s < ESCAPE; ++s) {
        u64 rounded = counts[s] ? ((u64)counts[s] * 2 * (TOTAL - 1) + n) / (2 * n) : 0;
        frequencies[s] = counts[s] && rounded == 0 ? 1 : (u32)rounded;
        sum += frequencies[s];
    }
    while (sum != TOTAL - 1) {
        u32 largest = 0;
        for (u32 s = 1; s < ESCAPE; ++s) largest = frequencies[s] > frequencies[largest] ? s : largest;
        if (sum < TOTAL - 1) {
            frequencies[largest] += TOTAL - 1 - sum;
            sum = TOTAL - 1;
        } else {
            u32 over = sum - (TOTAL - 1), most = (frequencies[largest] + 3) / 4;
            over = over < most ? over : most;
            frequencies[largest] -= over, sum -= over;
        }
    }
    frequencies[ESCAPE] = 1;
}

// Ranges from frequencies, in place.
HC_INLINE void ranges_from(u32* frequencies) {
    u32 start = 0;
    for (u32 s = 0; s < SYMBOLS; ++s) {
        u32 frequency = frequencies[s];
        frequencies[s] = frequency ? start << 16 | frequency : 0;
        start += frequency;
    }
}

// 256 times the bits of one of `count` equal symbols of a context, rounded up a little.
HC_INLINE u64 cost_of(u32 symbol, u32 frequency, u32 count) {
    u32 k = log2_floor(frequency), fraction = ((frequency << 8) >> k) - 256;
    return (u64)count * ((PRECISION << 8) - (k << 8) - fraction + (extra_count(symbol) << 8));
}

// Log of the tile in which 72 bytes, what coding in 32 states costs, are about 2 % or 2^18 values.
// `cost`: 256 times the bits of `sampled` values.
HC_INLINE u32 tile_log(u64 cost, u64 sampled) {
    u32 log = MIN_TILE_LOG;
    while (log < MAX_TILE_LOG && (cost << log) < sampled * (30000ull << 8)) ++log;
    return log;
}

// Bytes of one context's model; writes them.
HC_INLINE u32 write_context(const u32* counts, const u32* ranges, u8* out) {
    u32 number = 0;
    for (u32 s = 0; s < ESCAPE; ++s) {
        if (!counts[s]) continue;
        u8* at = out + 1 + 3 * number++;
        u32 frequency = frequency_of(ranges[s]);
        at[0] = (u8)s, at[1] = (u8)frequency, at[2] = (u8)(frequency >> 8);
    }
    out[0] = (u8)number;
    return 1 + 3 * number;
}

// Reads a context's model of at most `left` bytes into ranges, [SYMBOLS]. Returns its bytes, 0 where no
// encoder has made it.
HC_INLINE u32 read_context(const u8* in, u32 left, u32* ranges) {
    if (left < 1 || in[0] > ESCAPE || left < 1 + 3 * (u32)in[0]) return 0;
    u32 number = in[0], sum = 0, next = 0;
    for (u32 s = 0; s < SYMBOLS; ++s) ranges[s] = 0;
    for (u32 i = 0; i < number; ++i) {
        const u8* at = in + 1 + 3 * i;
        u32 symbol = at[0], frequency = at[1] | (u32)at[2] << 8;
        if (symbol < next || symbol >= ESCAPE || frequency == 0 || frequency >= TOTAL) return 0;
        ranges[symbol] = frequency, sum += frequency, next = symbol + 1;
    }
    if (number == 0) ranges[0] = sum = TOTAL - 1;
    if (sum >= TOTAL) return 0;
    ranges[ESCAPE] = TOTAL - sum;
    ranges_from(ranges);
    return 1 + 3 * number;
}

}  // namespace stepcode
}  // namespace hybridcomp
