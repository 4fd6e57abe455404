// mpc: the lossless MPC stream (Yang, Mukka, Hesaaraki, Burtscher, CLUSTER'15; format of v1.2).
//
// Format of n values as little-endian 32-bit words:
//   word 0            0x63706d00 + 32 * dtype + (dim - 1); dtype 0 fp32, 1 bf16, 2 fp16
//   word 1            n
//   ceil(w / 32)      bitmap: bit L of word k says that word 32 k + L below is not zero
//   the non-zero words, in order; then zeros up to a multiple of 16 bytes, which is ours
// w words go in: fp32 as they are; two 16-bit values a word, the first in the low half, a last odd
// one with a zero high half. dim counts words. For fp32 this is v1.2 byte for byte, including the word
// that v1.2 may append when w is not a multiple of 1024 and that no decoder reads.
//
// Every 1024 words are independent ("chunk"). All arithmetic is modulo 2^32:
//   1. r[i] = x[i] - x[i - dim], the first dim words as they are; r = 0 after the end
//   2. each 32 words are transposed as a 32 x 32 bit matrix: t[L] bit i = r[i] bit L
//   3. d[j] = t[j] - t[j - 1], the first as it is
//   4. zero words are dropped, the bitmap says which
#pragma once

#include "portable.h"

namespace hybridcomp {
namespace mpc {

constexpr int GROUP = 32;
constexpr int CHUNK = 1024;
constexpr u32 MAGIC = 0x63706d00u;
constexpr int HEADER_WORDS = 2;

HC_INLINE u32 header_word(u32 dtype, u32 dim) { return MAGIC + 32 * dtype + (dim - 1); }

// Swaps bit B of the word index with bit B of the bit index, and rotates the word index by one, so
// that all five stages read halves and write pairs, which are whole-vector operations.
template <int B>
HC_INLINE void transpose_stage(const u32* in, u32* out) {
    constexpr int shift = 1 << B;
    constexpr u32 mask = B == 4   ? 0x0000ffffu
                         : B == 3 ? 0x00ff00ffu
                         : B == 2 ? 0x0f0f0f0fu
                         : B == 1 ? 0x33333333u
                                  : 0x55555555u;
    for (int i = 0; i < 16; ++i) {
        u32 a = in[i], b = in[i + 16];
        u32 t = ((a >> shift) ^ b) & mask;
        out[2 * i] = a ^ (t << shift);
        out[2 * i + 1] = b ^ t;
    }
}

// 32 x 32 bits, its own inverse. `words` is overwritten.
HC_INLINE void transpose(u32* words) {
    u32 other[GROUP];
    transpose_stage<4>(words, other);
    transpose_stage<3>(other, words);
    transpose_stage<2>(words, other);
    transpose_stage<1>(other, words);
    transpose_stage<0>(words, other);
    for (int i = 0; i < GROUP; ++i) words[i] = other[i];
}

// Step 4 for 32 words: appends the non-zero ones to `out`, of which 32 words may be written.
HC_INLINE u32 drop_zeros(const u32* words, u32* out, u32& count) {
    u32 mask = 0, kept = 0;
    for (int i = 0; i < GROUP; ++i) {
        u32 keep = words[i] != 0;
        out[kept] = words[i];
        mask |= keep << i;
        kept += keep;
    }
    count = kept;
    return mask;
}

// Steps 4 and 3 backwards for 32 words: `sum` is the word before the group, t[j] = sum of d.
HC_INLINE u32 restore(const u32* kept, u32 mask, u32 sum, u32* words) {
    for (int i = 0; i < GROUP; ++i) {
        u32 present = (mask >> i) & 1;
        // reads only words that are there
        if (present) sum += *kept++;
        words[i] = sum;
    }
    return sum;
}

// Step 1 for a chunk.
HC_INLINE void subtract_before(const u32* words, int dim, u32* out) {
    for (int i = 0; i < dim; ++i) out[i] = words[i];
    for (int i = dim; i < CHUNK; ++i) out[i] = words[i] - words[i - dim];
}

HC_INLINE void add_before(u32* words, int dim) {
    for (int i = dim; i < CHUNK; ++i) words[i] += words[i - dim];
}

// One chunk of 1024 words -> d, steps 1 to 3. `words` and `out` are different.
HC_INLINE void encode_block(const u32* words, int dim, u32* out) {
    u32 transposed[CHUNK];
    subtract_before(words, dim, transposed);
    for (int g = 0; g < CHUNK; g += GROUP) transpose(transposed + g);
    subtract_before(transposed, 1, out);
}

// Steps 2 and 1 backwards, in place; step 3 was undone by restore.
HC_INLINE void decode_block(u32* words, int dim) {
    for (int g = 0; g < CHUNK; g += GROUP) transpose(words + g);
    add_before(words, dim);
}

}  // namespace mpc
}  // namespace hybridcomp
