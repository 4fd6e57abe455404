// Damage to payloads: bits, bytes, words, lengths, pieces of other payloads.
#pragma once

#include "codecs.h"

namespace damage {

// A number that length checks get wrong: near the ends of its range, or near `length`.
inline u32 tricky(Random& random, size_t length) {
    static const u32 ends[] = {0, 1, 2, 3, 0x7f, 0xff, 0x100, 0xffff, 0x7fffffff, 0x80000000u,
                               0xfffffffeu, 0xffffffffu, 0x3fffffff, 0x40000000};
    u32 units = (u32)(length / (random.below(2) ? 4 : 1));
    switch (random.below(4)) {
        case 0: return ends[random.below(sizeof ends / sizeof *ends)];
        case 1: return units + (u32)random.below(9) - 4;
        case 2: return (u32)random.below(units + 1);
        default: return (u32)random.next();
    }
}

// Where: half of the time among the first 64 bytes, where headers are.
inline size_t place(Random& random, size_t length) {
    size_t limit = random.below(2) ? length : std::min<size_t>(length, 64);
    return random.below(limit);
}

inline void mutate_once(Random& random, std::vector<u8>& bytes, const std::vector<u8>& other) {
    size_t n = bytes.size(), kind = random.below(10);
    if (n == 0) return;
    size_t at = place(random, n), much = 1 + random.below(64);
    switch (kind) {
        case 0:
        case 1:
            for (size_t i = random.below(16) + 1; i; --i) {
                bytes[place(random, n)] ^= (u8)(1 << random.below(8));
            }
            break;
        case 2: bytes[at] = (u8)tricky(random, n); break;
        case 3:
        case 4: {
            u32 word = tricky(random, n);
            at &= ~size_t(3);
            memcpy(bytes.data() + at, &word, std::min<size_t>(4, n - at));
            break;
        }
        case 5: bytes.resize(random.below(2) ? random.below(n) : n - std::min(n, much)); break;
        case 6:
            for (size_t i = 0; i < much; ++i) bytes.push_back((u8)random.next());
            break;
        case 7:  // a piece of itself
            for (size_t i = 0, from = random.below(n); i < much; ++i) {
                if (at + i < n && from + i < n) bytes[at + i] = bytes[from + i];
            }
            break;
        case 8:  // from there on another message
            for (size_t i = at; i < n && i < other.size(); ++i) bytes[i] = other[i];
            break;
        default: {
            bool noise = random.below(2);
            u8 fill = random.below(2) ? 0xff : 0;
            size_t to = random.below(4) ? std::min(n, at + much) : n;
            for (size_t i = at; i < to; ++i) bytes[i] = noise ? (u8)random.next() : fill;
        }
    }
}

// Case `index` of `seed`: the arguments and the bytes. One in 32 is whole, and must decode.
struct Case {
    Call call;
    std::vector<u8> payload;
    bool whole;
};

inline Case make_case(const Codec& codec, const std::vector<Message>& messages, u64 seed,
                      u64 index) {
    Random random{seed ^ (index * 0xd1342543de82ef95ull + 0x632be59bd9b4e019ull)};
    random.next();
    const Message& message = messages[random.below(messages.size())];
    const Message& other = messages[random.below(messages.size())];
    Case made{message.call, message.payload, random.below(32) == 0};
    Call& call = made.call;
    call.add = random.below(4) == 0;
    call.target = call.add ? 0 : codec.same_dtype ? call.dtype : (int)random.below(3);
    if (made.whole) return made;
    for (size_t rounds = 1 + random.below(3); rounds; --rounds) {
        mutate_once(random, made.payload, other.payload);
    }
    if (random.below(16) == 0) call.numel = length(random);  // the receiver expects another message
    if (random.below(64) == 0) call.numel = 0;
    return made;
}

}  // namespace damage
