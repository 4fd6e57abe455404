// Checksums and comparisons of weights, at the speed of memory.
#include "cpu_changes.h"

#include <vector>

#include "cpu_instructions.h"
#include "cpu_xxh3.h"

namespace hybridcomp {
namespace changes {
namespace {

constexpr size_t CHUNK = 1 << 13;  // values compared and hashed before the next: both stay in the cache

// Fills whole words of a mask; returns how many values differ.
size_t differ_plain(const u16* values, const u16* old, size_t words, u32* mask) {
    size_t found = 0;
    for (size_t w = 0; w < words; ++w) {
        u32 bits = 0;
        for (u32 i = 0; i < WORD; ++i) bits |= (u32)(values[w * WORD + i] != old[w * WORD + i]) << i;
        mask[w] = bits;
        found += (size_t)__builtin_popcount(bits);
    }
    return found;
}

#ifdef HC_X86
HC_512 size_t differ_512(const u16* values, const u16* old, size_t words, u32* mask) {
    size_t found = 0;
    for (size_t w = 0; w < words; ++w) {
        mask[w] = _mm512_cmpneq_epi16_mask(_mm512_loadu_si512(values + w * WORD), _mm512_loadu_si512(old + w * WORD));
        found += (size_t)__builtin_popcount(mask[w]);
    }
    return found;
}

HC_256 size_t differ_256(const u16* values, const u16* old, size_t words, u32* mask) {
    size_t found = 0;
    for (size_t w = 0; w < words; ++w) {
        const __m256i* a = (const __m256i*)(values + w * WORD);
        const __m256i* b = (const __m256i*)(old + w * WORD);
        __m256i low = _mm256_cmpeq_epi16(_mm256_loadu_si256(a), _mm256_loadu_si256(b));
        __m256i high = _mm256_cmpeq_epi16(_mm256_loadu_si256(a + 1), _mm256_loadu_si256(b + 1));
        // packs interleaves the quarters of both
        __m256i both = _mm256_permute4x64_epi64(_mm256_packs_epi16(low, high), 0xd8);
        mask[w] = ~(u32)_mm256_movemask_epi8(both);
        found += (size_t)__builtin_popcount(mask[w]);
    }
    return found;
}
#endif

size_t differ_words(const u16* values, const u16* old, size_t words, u32* mask) {
#ifdef HC_X86
    if (instructions() == Instructions::avx512) return differ_512(values, old, words, mask);
    if (instructions() == Instructions::avx2) return differ_256(values, old, words, mask);
#endif
    return differ_plain(values, old, words, mask);
}

// Fills the words of `numel` values; returns how many differ.
size_t differ(const u16* values, const u16* old, size_t numel, u32* mask) {
    size_t words = numel / WORD, found = differ_words(values, old, words, mask);
    if (numel % WORD) {
        mask[words] = 0;
        for (size_t i = words * WORD; i < numel; ++i) mask[words] |= (u32)(values[i] != old[i]) << i % WORD;
        found += (size_t)__builtin_popcount(mask[words]);
    }
    return found;
}

void hash_once(const u8* in, size_t nbytes, u8* out) {
    u8 padded[LEAST] = {};
    if (nbytes < LEAST) {
        if (nbytes) memcpy(padded, in, nbytes);
        in = padded, nbytes = LEAST;
    }
    xxh3::Sums sums = xxh3::begin();
    xxh3::absorb(sums, in, (nbytes - 1) / xxh3::SPAN);
    xxh3::finish(sums, in, nbytes, out);
}

// Compares and hashes one block.
size_t compare_block(const u16* values, const u16* old, size_t numel, u32* mask, u8* out) {
    u32 own[CHUNK / WORD];
    size_t found = 0, nbytes = 2 * numel;
    const u8* in = (const u8*)values;
    xxh3::Sums sums = xxh3::begin();
    for (size_t first = 0; first < numel; first += CHUNK) {
        size_t count = numel - first < CHUNK ? numel - first : CHUNK;
        found += differ(values + first, old + first, count, mask ? mask + first / WORD : own);
        size_t last = 2 * (first + count) < nbytes ? 2 * (first + count) : nbytes - 1;
        xxh3::absorb(sums, in + 2 * first, last / xxh3::SPAN - 2 * first / xxh3::SPAN);
    }
    if (nbytes < LEAST) hash_once(in, nbytes, out);
    else xxh3::finish(sums, in, nbytes, out);
    return found;
}

// Calls block(number, where its digest goes) for each block, and hashes the digests and the size.
template <class Block>
void over_blocks(size_t nbytes, u8* out, int threads, const Block& block) {
    size_t blocks = ceil_div(nbytes, BLOCK);
    std::vector<u8> digests(blocks * DIGEST + 8);
    parallel_ranges(blocks, BLOCK / 2, threads, [&](size_t begin, size_t end) {
        for (size_t b = begin; b < end; ++b) block(b, digests.data() + b * DIGEST);
    });
    for (int i = 0; i < 8; ++i) digests[blocks * DIGEST + i] = (u8)((u64)nbytes >> 8 * i);
    hash_once(digests.data(), digests.size(), out);
}

// Calls take(place) for each bit that is set.
template <class Take>
void over_bits(const u32* mask, size_t numel, const Take& take) {
    for (size_t w = 0; w < ceil_div(numel, WORD); ++w) {
        for (u32 left = mask[w]; left; left &= left - 1) take(w * WORD + (size_t)__builtin_ctz(left));
    }
}

}  // namespace

void digest(const u8* in, size_t nbytes, u8* out, int threads) {
    over_blocks(nbytes, out, threads, [&](size_t b, u8* to) {
        size_t left = nbytes - b * BLOCK;
        hash_once(in + b * BLOCK, left < BLOCK ? left : BLOCK, to);
    });
}

size_t compare(const u16* values, const u16* old, size_t numel, u32* mask, u8* out, int threads) {
    constexpr size_t NUMEL = BLOCK / 2;
    std::vector<size_t> found(ceil_div(numel, NUMEL));
    over_blocks(2 * numel, out, threads, [&](size_t b, u8* to) {
        size_t first = b * NUMEL, left = numel - first, count = left < NUMEL ? left : NUMEL;
        found[b] = compare_block(values + first, old + first, count, mask ? mask + first / WORD : nullptr, to);
    });
    size_t sum = 0;
    for (size_t one : found) sum += one;
    return sum;
}

size_t pick(const u16* values, const u32* mask, size_t numel, u16* out) {
    u16* to = out;
    over_bits(mask, numel, [&](size_t at) { *to++ = values[at]; });
    return (size_t)(to - out);
}

void put(const u16* picked, const u32* mask, size_t numel, u16* out) {
    over_bits(mask, numel, [&](size_t at) { out[at] = *picked++; });
}

void places(const u32* mask, size_t numel, int64_t* out) {
    over_bits(mask, numel, [&](size_t at) { *out++ = (int64_t)at; });
}

}  // namespace changes
}  // namespace hybridcomp
