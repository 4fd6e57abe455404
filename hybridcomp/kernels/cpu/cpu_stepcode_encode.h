// The passes over a tile of stepcode's encoder, for each kind of instructions.
#pragma once

#include "cpu_stepcode_model.h"

namespace hybridcomp {
namespace stepcode {

struct Source {
    const u16* values;
    const u16* reference;
    u32 dtype, lowest;
    const Ranges* ranges;
    bool zeros_known;  // every context has symbol 0
};

struct BitWriter {
    u32* words;
    size_t used;
    u64 held;
    u32 count;
    explicit BitWriter(u32* out) : words(out), used(0), held(0), count(0) {}
    void put(u32 bits, u32 number) {
        held |= (u64)bits << count;
        count += number;
        words[used] = (u32)held;
        u32 full = count >> 5;  // without a branch that is hard to predict
        used += full, held >>= full * 32, count &= 31;
    }
    size_t finish() {
        if (count) words[used++] = (u32)held;
        return used;
    }
};

HC_INLINE void code_value(const Source& from, size_t i, u8* symbol, BitWriter& extra) {
    u32 old = from.reference[i], step = step_between(old, from.values[i]);
    Coded coded = coded_of(folded(step), step >> 15);
    if (!from.ranges->of[context_of(old, from.dtype, from.lowest)][coded.symbol]) {
        coded = Coded{ESCAPE, 16, step};
    }
    *symbol = (u8)coded.symbol;
    extra.put(coded.bits, coded.count);
}

// Codes the lanes of `rare` of a group, whose symbol is not the folded step itself. `steps` are folded, with the
// sign flip on top.
HC_INLINE void code_rare(const Source& from, size_t at, u32 rare, const u16* steps, const u16* contexts, u8* to,
                         BitWriter& extra) {
    for (u32 left = rare; left; left &= left - 1) {
        u32 lane = (u32)__builtin_ctz(left);
        Coded coded = coded_of(steps[lane] & 0x7fffu, steps[lane] >> 15);
        if (!from.ranges->of[contexts[lane]][coded.symbol]) {
            coded = Coded{ESCAPE, 16, step_between(from.reference[at + lane], from.values[at + lane])};
        }
        to[lane] = (u8)coded.symbol;
        extra.put(coded.bits, coded.count);
    }
}

// Factor that makes a reciprocal of a frequency 2^-22 too small, so that a quotient is exact or one too small.
constexpr float BELOW = 1.0f - 1.0f / (1 << 22);

// A tile whose words are being written, backwards.
struct Pushing {
    size_t first, count;
    const u8* symbols;
    u32* states;
    u16* to;
};

#ifdef HC_X86
// Computes the symbols of whole groups of 32; returns whether any value has changed.
bool code_512(const Source& from, size_t first, size_t groups, u8* symbols, BitWriter& extra);
bool code_256(const Source& from, size_t first, size_t groups, u8* symbols, BitWriter& extra);
// Writes the words of the first groups of 32, last group first. The AVX2 version writes up to 8 words before `to`.
void push_512(const Source& from, Pushing* tile, size_t groups);
void push_pair_512(const Source& from, Pushing* const* tiles, size_t groups);
void push_256(const Source& from, Pushing* tile, size_t groups);
#endif

}  // namespace stepcode
}  // namespace hybridcomp
