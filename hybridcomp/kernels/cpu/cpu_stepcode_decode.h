// A tile of stepcode that is being decoded, and its passes for each kind of instructions.
#pragma once

#include "cpu_stepcode_shared.h"

namespace hybridcomp {
namespace stepcode {

// An entry has the frequency (12 bits), the addend for the state (12 bits) and the symbol (8 bits).
struct Tables {
    std::vector<u32> entries;
    u32 zeros[CONTEXTS];  // frequency of symbol 0, whose range begins at 0
    Tables() : entries(CONTEXTS << PRECISION) {}

    void fill(u32 context, const u32* ranges) {
        zeros[context] = frequency_of(ranges[0]);
        u32* row = entries.data() + ((size_t)context << PRECISION);
        for (u32 s = 0; s < SYMBOLS; ++s) {
            u32 frequency = frequency_of(ranges[s]), start = start_of(ranges[s]);
            for (u32 i = 0; i < frequency; ++i) row[start + i] = frequency | i << 12 | s << 24;
        }
    }
    // From the model's bytes.
    bool read(const u8* in, u32 nbytes) {
        u32 at = 0, ranges[SYMBOLS];
        for (u32 c = 0; c < CONTEXTS; ++c) {
            u32 used = read_context(in + at, nbytes - at, ranges);
            if (!used) return false;
            at += used;
            fill(c, ranges);
        }
        return nbytes - at < 4;
    }
};

struct BitReader {
    const u8* words;
    size_t position, count;  // in bits
    bool good;
    u32 take(u32 number) {
        if (number == 0) return 0;  // there may be no word to read
        if (position + number > count) {
            good = false;
            return 0;
        }
        size_t at = position / 32 * 4;
        u64 held = 0;
        if (count / 8 - at >= 8) memcpy(&held, words + at, 8);
        else memcpy(&held, words + at, 4);
        held >>= position % 32;
        position += number;
        return (u32)held & ((1u << number) - 1);
    }
};

// A tile that is being decoded.
struct Tile {
    const Tables* tables;
    u32 dtype, lowest;
    const u16* reference;
    u16* out;
    size_t count;
    const u8* words;
    const u8* end;  // of the words
    BitReader extra;
    u32 states[LANES];
};

// Leading bits of the folded step of each symbol, with the sign flip on top, and the number of its extra bits.
struct Leads {
    u16 folded[SYMBOLS];
    u8 count[SYMBOLS];
    Leads() {
        for (u32 s = 0; s < SYMBOLS; ++s) {
            u32 step = step_of(s, 0);
            folded[s] = (u16)((step & 0x8000u) | (((step << 1) ^ (0u - (step >> 14 & 1))) & 0x7fffu));
            count[s] = (u8)extra_count(s);
        }
    }
};
inline const Leads LEADS;

// Replaces the symbols in the lanes of `rare`, which may have extra bits, by folded steps.
inline void put_rare(u16* lanes, u32 rare, BitReader& extra) {
    for (u32 left = rare; left; left &= left - 1) {
        u32 lane = (u32)__builtin_ctz(left), symbol = lanes[lane];
        u32 bits = extra.take(LEADS.count[symbol]);
        if (symbol == ESCAPE) bits = (bits & 0x8000u) | (((bits << 1) ^ (0u - (bits >> 14 & 1))) & 0x7fffu);
        lanes[lane] = (u16)(LEADS.folded[symbol] | bits);
    }
}

#ifdef HC_X86
// Decodes groups of 32 as long as enough words are left for one; returns the number of values decoded.
size_t decode_512(Tile& tile);
size_t decode_256(Tile& tile);
#endif

}  // namespace stepcode
}  // namespace hybridcomp
