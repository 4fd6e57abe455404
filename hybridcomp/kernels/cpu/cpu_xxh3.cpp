#include "cpu_xxh3.h"

#include "cpu_instructions.h"

namespace hybridcomp {
namespace xxh3 {
namespace {

constexpr u64 P32_1 = 0x9E3779B1u, P32_2 = 0x85EBCA77u, P32_3 = 0xC2B2AE3Du;
constexpr u64 P64_1 = 0x9E3779B185EBCA87u, P64_2 = 0xC2B2AE3D27D4EB4Fu, P64_3 = 0x165667B19E3779F9u;
constexpr u64 P64_4 = 0x85EBCA77C2B2AE63u, P64_5 = 0x27D4EB2F165667C5u;

const u8 SECRET[192] = {
    0xb8, 0xfe, 0x6c, 0x39, 0x23, 0xa4, 0x4b, 0xbe, 0x7c, 0x01, 0x81, 0x2c, 0xf7, 0x21, 0xad, 0x1c,
    0xde, 0xd4, 0x6d, 0xe9, 0x83, 0x90, 0x97, 0xdb, 0x72, 0x40, 0xa4, 0xa4, 0xb7, 0xb3, 0x67, 0x1f,
    0xcb, 0x79, 0xe6, 0x4e, 0xcc, 0xc0, 0xe5, 0x78, 0x82, 0x5a, 0xd0, 0x7d, 0xcc, 0xff, 0x72, 0x21,
    0xb8, 0x08, 0x46, 0x74, 0xf7, 0x43, 0x24, 0x8e, 0xe0, 0x35, 0x90, 0xe6, 0x81, 0x3a, 0x26, 0x4c,
    0x3c, 0x28, 0x52, 0xbb, 0x91, 0xc3, 0x00, 0xcb, 0x88, 0xd0, 0x65, 0x8b, 0x1b, 0x53, 0x2e, 0xa3,
    0x71, 0x64, 0x48, 0x97, 0xa2, 0x0d, 0xf9, 0x4e, 0x38, 0x19, 0xef, 0x46, 0xa9, 0xde, 0xac, 0xd8,
    0xa8, 0xfa, 0x76, 0x3f, 0xe3, 0x9c, 0x34, 0x3f, 0xf9, 0xdc, 0xbb, 0xc7, 0xc7, 0x0b, 0x4f, 0x1d,
    0x8a, 0x51, 0xe0, 0x4b, 0xcd, 0xb4, 0x59, 0x31, 0xc8, 0x9f, 0x7e, 0xc9, 0xd9, 0x78, 0x73, 0x64,
    0xea, 0xc5, 0xac, 0x83, 0x34, 0xd3, 0xeb, 0xc3, 0xc5, 0x81, 0xa0, 0xff, 0xfa, 0x13, 0x63, 0xeb,
    0x17, 0x0d, 0xdd, 0x51, 0xb7, 0xf0, 0xda, 0x49, 0xd3, 0x16, 0x55, 0x26, 0x29, 0xd4, 0x68, 0x9e,
    0x2b, 0x16, 0xbe, 0x58, 0x7d, 0x47, 0xa1, 0xfc, 0x8f, 0xf8, 0xb8, 0xd1, 0x7a, 0xd0, 0x31, 0xce,
    0x45, 0xcb, 0x3a, 0x8f, 0x95, 0x16, 0x04, 0x28, 0xaf, 0xd7, 0xfb, 0xca, 0xbb, 0x4b, 0x40, 0x7e,
};
constexpr size_t MIXED = sizeof SECRET - STRIPE;  // where the key of a mix begins

HC_INLINE u64 word(const u8* at) {
    u64 found;
    memcpy(&found, at, 8);
    return found;
}

HC_INLINE void take_stripe(u64* sums, const u8* in, const u8* secret) {
    for (int i = 0; i < 8; ++i) {
        u64 data = word(in + 8 * i), key = data ^ word(secret + 8 * i);
        sums[i ^ 1] += data;
        sums[i] += (key & 0xffffffffu) * (key >> 32);
    }
}

void absorb_plain(u64* sums, const u8* in, size_t spans) {
    for (size_t s = 0; s < spans; ++s, in += SPAN) {
        for (size_t n = 0; n < STRIPES; ++n) take_stripe(sums, in + n * STRIPE, SECRET + 8 * n);
        for (int i = 0; i < 8; ++i) {
            sums[i] = (sums[i] ^ sums[i] >> 47 ^ word(SECRET + MIXED + 8 * i)) * P32_1;
        }
    }
}

#ifdef HC_X86
HC_512 void absorb_512(u64* sums, const u8* in, size_t spans) {
    __m512i a = _mm512_loadu_si512(sums), prime = _mm512_set1_epi64((long long)P32_1);
    for (size_t s = 0; s < spans; ++s, in += SPAN) {
        for (size_t n = 0; n < STRIPES; ++n) {
            __m512i data = _mm512_loadu_si512(in + n * STRIPE);
            __m512i key = _mm512_xor_si512(data, _mm512_loadu_si512(SECRET + 8 * n));
            __m512i product = _mm512_mul_epu32(key, _mm512_srli_epi64(key, 32));
            a = _mm512_add_epi64(a, _mm512_add_epi64(product, _mm512_shuffle_epi32(data, (_MM_PERM_ENUM)0x4e)));
        }
        a = _mm512_xor_si512(_mm512_xor_si512(a, _mm512_srli_epi64(a, 47)), _mm512_loadu_si512(SECRET + MIXED));
        __m512i high = _mm512_slli_epi64(_mm512_mul_epu32(_mm512_srli_epi64(a, 32), prime), 32);
        a = _mm512_add_epi64(_mm512_mul_epu32(a, prime), high);
    }
    _mm512_storeu_si512(sums, a);
}

HC_256 void absorb_256(u64* sums, const u8* in, size_t spans) {
    __m256i a[2], prime = _mm256_set1_epi64x((long long)P32_1);
    for (int h = 0; h < 2; ++h) a[h] = _mm256_loadu_si256((const __m256i*)sums + h);
    for (size_t s = 0; s < spans; ++s, in += SPAN) {
        for (size_t n = 0; n < STRIPES; ++n) {
            for (int h = 0; h < 2; ++h) {
                __m256i data = _mm256_loadu_si256((const __m256i*)(in + n * STRIPE) + h);
                __m256i key = _mm256_xor_si256(data, _mm256_loadu_si256((const __m256i*)(SECRET + 8 * n) + h));
                __m256i product = _mm256_mul_epu32(key, _mm256_srli_epi64(key, 32));
                a[h] = _mm256_add_epi64(a[h], _mm256_add_epi64(product, _mm256_shuffle_epi32(data, 0x4e)));
            }
        }
        for (int h = 0; h < 2; ++h) {
            __m256i key = _mm256_loadu_si256((const __m256i*)(SECRET + MIXED) + h);
            __m256i mixed = _mm256_xor_si256(_mm256_xor_si256(a[h], _mm256_srli_epi64(a[h], 47)), key);
            __m256i high = _mm256_slli_epi64(_mm256_mul_epu32(_mm256_srli_epi64(mixed, 32), prime), 32);
            a[h] = _mm256_add_epi64(_mm256_mul_epu32(mixed, prime), high);
        }
    }
    for (int h = 0; h < 2; ++h) _mm256_storeu_si256((__m256i*)sums + h, a[h]);
}
#endif

// Both halves of a product of 128 bits, folded.
HC_INLINE u64 folded(u64 a, u64 b) {
    unsigned __int128 product = (unsigned __int128)a * b;
    return (u64)product ^ (u64)(product >> 64);
}

u64 merged(const Sums& sums, const u8* secret, u64 start) {
    for (int i = 0; i < 4; ++i) {
        start += folded(sums.of[2 * i] ^ word(secret + 16 * i), sums.of[2 * i + 1] ^ word(secret + 16 * i + 8));
    }
    start = (start ^ start >> 37) * 0x165667919E3779F9u;
    return start ^ start >> 32;
}

}  // namespace

Sums begin() { return Sums{{P32_3, P64_1, P64_2, P64_3, P64_4, P32_2, P64_5, P32_1}}; }

void absorb(Sums& sums, const u8* in, size_t spans) {
#ifdef HC_X86
    if (instructions() == Instructions::avx512) return absorb_512(sums.of, in, spans);
    if (instructions() == Instructions::avx2) return absorb_256(sums.of, in, spans);
#endif
    absorb_plain(sums.of, in, spans);
}

void finish(Sums& sums, const u8* in, size_t nbytes, u8* out) {
    const u8* at = in + (nbytes - 1) / SPAN * SPAN;
    size_t stripes = ((nbytes - 1) % SPAN) / STRIPE;
    for (size_t n = 0; n < stripes; ++n) take_stripe(sums.of, at + n * STRIPE, SECRET + 8 * n);
    take_stripe(sums.of, in + nbytes - STRIPE, SECRET + MIXED - 7);
    u64 halves[2] = {merged(sums, SECRET + MIXED - 11, ~(nbytes * P64_2)),
                     merged(sums, SECRET + 11, nbytes * P64_1)};
    for (int i = 0; i < 16; ++i) out[i] = (u8)(halves[i / 8] >> (56 - 8 * (i % 8)));
}

}  // namespace xxh3
}  // namespace hybridcomp
