// Model of stepcode: counts from samples of the message, frequencies, and bytes.
#pragma once

#include "stepcode.h"

namespace hybridcomp {
namespace stepcode {

// Runs of RUN values are counted, every stride-th of them: 2^18 values of 2^18 to 2^21, then an eighth, 2^20
// from 2^23 on. With 2^18 of any number sparse changes took 2 % more bits.
constexpr u32 RUN = 512;
HC_INLINE u64 stride_of(u64 numel) {
    u64 some = numel >> 18, most = numel >> 20;
    some = some > 8 ? 8 : some ? some : 1;
    return most > some ? most : some;
}

constexpr u32 MODEL_BYTES = CONTEXTS * (1 + 3 * ESCAPE);  // of the largest, a multiple of 4
static_assert(MODEL_BYTES % 4 == 0, "offsets follow the model");

// Returns the first of the 16 neighbouring exponents with most counted values; `totals` counts each exponent.
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

// A symbol counted once in a whole message is cheaper as an escape than as 3 bytes of the model.
HC_INLINE u32 least_count(u64 numel) { return stride_of(numel) == 1 ? 2 : 1; }

// Returns `part` / `n` in units of 1 / 4095, rounded, at least 1; `n` is above 0.
HC_INLINE u32 share_of(u32 part, u64 n) {
    u64 rounded = ((u64)part * 2 * (TOTAL - 1) + n) / (2 * n);
    return rounded ? (u32)rounded : 1;
}

// Frequencies from counts, [SYMBOLS]: they add up to 4096. Symbols other than 0 that were counted less
// than `least` times become escapes.
HC_INLINE void frequencies_from(const u32* counts, u32 least, u32* frequencies) {
    u64 n = 0;
    u32 sum = 0, escapes = 0;
    for (u32 s = 0; s < ESCAPE; ++s) n += counts[s];
    for (u32 s = 0; s < ESCAPE; ++s) {
        bool kept = counts[s] && (s == 0 || counts[s] >= least);
        frequencies[s] = kept ? share_of(counts[s], n) : 0;
        sum += frequencies[s];
        escapes += kept ? 0 : counts[s];
    }
    frequencies[ESCAPE] = escapes ? share_of(escapes, n) : 1;
    u32 wanted = TOTAL - frequencies[ESCAPE];
    while (sum != wanted) {
        u32 largest = 0;
        for (u32 s = 1; s < ESCAPE; ++s) largest = frequencies[s] > frequencies[largest] ? s : largest;
        if (sum < wanted) {
            frequencies[largest] += wanted - sum;
            sum = wanted;
        } else {
            u32 over = sum - wanted, most = (frequencies[largest] + 3) / 4;
            over = over < most ? over : most;
            frequencies[largest] -= over, sum -= over;
        }
    }
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

// Returns about 256 times the bits of all values of a context.
HC_INLINE u64 cost_of(const u32* counts, const u32* frequencies) {
    u64 cost = 0;
    for (u32 s = 0; s < ESCAPE; ++s) {
        if (!counts[s]) continue;
        u32 symbol = frequencies[s] ? s : ESCAPE, frequency = frequencies[symbol];
        u32 k = log2_floor(frequency), fraction = ((frequency << 8) >> k) - 256;
        cost += (u64)counts[s] * ((PRECISION << 8) - (k << 8) - fraction + (extra_count(symbol) << 8));
    }
    return cost;
}

// Returns the logarithm of the tile size at which 72 bytes, the cost of 32 states, are about 2 %; at most 19.
// `cost`: 256 times the bits of `sampled` values.
HC_INLINE u32 tile_log(u64 cost, u64 sampled) {
    u32 log = MIN_TILE_LOG;
    while (log < MAX_TILE_LOG && (cost << log) < sampled * (30000ull << 8)) ++log;
    return log;
}

// Returns the number of symbols that a context's model lists, from frequencies or ranges: 0 if nothing changed.
HC_INLINE u32 listed_symbols(const u32* ranges) {
    u32 number = 0;
    for (u32 s = 0; s < ESCAPE; ++s) number += frequency_of(ranges[s]) != 0;
    return frequency_of(ranges[0]) == TOTAL - 1 ? 0 : number;
}

// Writes one context's model; returns its bytes.
HC_INLINE u32 write_context(const u32* ranges, u8* out) {
    u32 number = listed_symbols(ranges);
    out[0] = (u8)number;
    u8* at = out + 1;
    for (u32 s = 0; number && s < ESCAPE; ++s) {
        u32 frequency = frequency_of(ranges[s]);
        if (!frequency) continue;
        at[0] = (u8)s, at[1] = (u8)frequency, at[2] = (u8)(frequency >> 8);
        at += 3;
    }
    return 1 + 3 * number;
}

// Reads a context's model of at most `left` bytes into ranges, [SYMBOLS]. Returns its bytes, 0 if no encoder
// writes it.
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
