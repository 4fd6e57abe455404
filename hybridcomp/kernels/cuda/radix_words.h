// radix, encode: what a thread makes of a block, its words, and where they go.
#pragma once

#include "radix_device.h"

namespace hybridcomp {
namespace radix {

HC_INLINE u32 low_part(u32 word, u32 position) { return funnel_left(0, word, position); }
HC_INLINE u32 high_part(u32 word, u32 position) { return funnel_left(word, 0, position); }

// Words of some bits, one behind the other. Whole words are stored without a look at what others have
// in the first of them; what is left for the last one, `held`, belongs into it later.
struct Writer {
    u32 *at, held, position;
    HC_INLINE_MEMBER Writer(u32* words, u32 start)
        : at(words + start / 32), held(0), position(start) {}
    HC_INLINE_MEMBER void put(u32 word, u32 bits) {
        held |= low_part(word, position);
        u32 next = position + bits;
        if ((next ^ position) / 32) {
            *at++ = held;
            held = high_part(word, position);
        }
        position = next;
    }
};

// The words of a block: WORDS of them, each of 16 / WORDS digits. For 16-bit values the errors of the
// rounded ones are taken in their own arithmetic, two at a time: one that rounds to less than E does is
// below E. False where that does not tell; errors before that rounding: is_safe.
template <class B, int WORDS>
HC_INLINE bool quantize_words(const B& block, const Step& step, u32 levels, u32* words) {
    constexpr int DIGITS = BLOCK / WORDS;
    // sum of L^k over the digits of a word, times what a digit has too much
    u32 ones = 1;
#pragma unroll
    for (int k = 1; k < DIGITS; ++k) ones = ones * levels + 1;
    u32 excess = ones * (ROUND_BITS - levels / 2), worst = 0;
#pragma unroll
    for (int j = 0; j < WORDS; j += 2) {
        u32 first = 0, second = 0;
#pragma unroll
        for (int k = DIGITS - 1; k >= 0; --k) {
            int i = k * WORDS + j;
            float a = block.value(i) * step.inverse + ROUND;
            float b = block.value(i + 1) * step.inverse + ROUND;
            first = first * levels + float_bits(a), second = second * levels + float_bits(b);
            if constexpr (B::NARROW) {
                u32 both = B::Pairs::narrow((a - ROUND) * step.step, (b - ROUND) * step.step);
                worst = B::Pairs::largest(worst, B::Pairs::difference(both, block.pairs[i / 2]));
            }
        }
        words[j] = first - excess, words[j + 1] = second - excess;
    }
    if constexpr (B::NARROW) {
        u32 limit = B::Pairs::T::store(step.limit);
        return larger(worst & 0x7fffu, worst >> 16 & 0x7fffu) < limit;
    }
    return true;
}

// quantize of radix.h: whether every error is below E. Seldom asked, and so not unrolled.
template <class B>
HC_INLINE bool is_within(const typename B::Stored* at, u32 left, const Step& step) {
    float worst = 0.0f;
#pragma unroll 1
    for (u32 i = 0; i < BLOCK && i < left; ++i) {
        float x = B::load_one(at[i]), a = ((x * step.inverse + ROUND) - ROUND) * step.step;
        worst = larger_magnitude(worst, a - x);
        if constexpr (B::NARROW) {
            worst = larger_magnitude(worst, B::load_one(B::Pairs::T::store(a)) - x);
        }
    }
    return magnitude_bits(worst) < float_bits(step.limit);
}

struct Chosen {
    u32 code;      // class, RAW + 1: zero, and 256 times the bits of a word
    u32 words[8];  // of a class up to FIRST_SINGLE
    HC_INLINE_MEMBER u32 cls() const { return code & 255; }
    HC_INLINE_MEMBER u32 width() const { return code >> 8; }
};

// `at`: where the block lies, of which `left` values are there.
template <class B>
HC_INLINE Chosen choose(const B& block, u32 absmax, const Step& step, bool safe,
                        const typename B::Stored* at, u32 left) {
    Chosen chosen;
    chosen.code = RAW + 1;
    if (absmax <= float_bits(step.limit)) return chosen;
    Coded coded = coded_of<B>(top_level(absmax, step.inverse));
    u32 levels = levels_of(coded.cls);
    bool good = safe;
    if (coded.cls < FIRST_PAIR) {
        good = quantize_words<B, 4>(block, step, levels, chosen.words) && safe;
    } else if (coded.cls < FIRST_SINGLE) {
        good = quantize_words<B, 8>(block, step, levels, chosen.words) && safe;
    }
    if (!good && coded.cls < RAW) good = is_within<B>(at, left, step);
    if (coded.cls == RAW) good = false;
    chosen.code = good ? coded.cls | coded.width << 8 : RAW | B::RAW_BITS << 8;
    return chosen;
}

// Raw values, and classes of one digit a word, are read again.
template <class B>
HC_INLINE void put_block(const typename B::Stored* at, u32 left, const Chosen& chosen,
                         const Step& step, Writer& writer) {
    if (chosen.cls() < FIRST_SINGLE) {
#pragma unroll
        for (int j = 0; j < 4; ++j) writer.put(chosen.words[j], chosen.width());
        if (chosen.cls() < FIRST_PAIR) return;
#pragma unroll
        for (int j = 4; j < 8; ++j) writer.put(chosen.words[j], chosen.width());
    } else if (chosen.cls() <= RAW) {
        u32 excess = ROUND_BITS - ((1u << (chosen.width() - 1)) - 1);
#pragma unroll 1
        for (u32 i = 0; i < BLOCK; ++i) {
            typename B::Stored stored = i < left ? at[i] : (typename B::Stored)0;
            u32 digit = float_bits(B::load_one(stored) * step.inverse + ROUND) - excess;
            writer.put(chosen.cls() == RAW ? B::bits_of(stored) : digit, chosen.width());
        }
    }
}

}  // namespace radix
}  // namespace hybridcomp
