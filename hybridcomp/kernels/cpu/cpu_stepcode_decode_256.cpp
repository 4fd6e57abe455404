// The pass of stepcode's decoder in lanes of AVX2.
#include "cpu_stepcode_256.h"
#include "cpu_stepcode_decode.h"

#ifdef HC_X86
namespace hybridcomp {
namespace stepcode {
namespace {

// Shuffles of 8 u16 that spread the first ones to the places of a mask, in order, with zeros between.
struct ToPlaces {
    u8 bytes[256][16];
    constexpr ToPlaces() : bytes{} {
        for (u32 mask = 0; mask < 256; ++mask) {
            u32 taken = 0;
            for (u32 lane = 0; lane < 8; ++lane) {
                bool has = mask >> lane & 1;
                bytes[mask][2 * lane] = (u8)(has ? 2 * taken : 0x80);
                bytes[mask][2 * lane + 1] = (u8)(has ? 2 * taken + 1 : 0x80);
                taken += has;
            }
        }
    }
};
alignas(16) constexpr ToPlaces TO_PLACES;

// Groups of zeros alone come rarely, or in long runs: limit of failed checks for them in a row.
constexpr int HOPES = 64;

HC_256 inline __m256i take_words(__m256i state, const u8*& words) {
    __m256i upper = _mm256_srli_epi32(state, 16);
    __m256i short_of = _mm256_cmpeq_epi32(upper, _mm256_setzero_si256());
    u32 mask = mask_256(short_of);
    __m128i next = _mm_loadu_si128((const __m128i*)words);
    next = _mm_shuffle_epi8(next, _mm_load_si128((const __m128i*)TO_PLACES.bytes[mask]));
    words += 2 * __builtin_popcount(mask);
    __m256i full = _mm256_or_si256(_mm256_slli_epi32(state, 16), _mm256_cvtepu16_epi32(next));
    return _mm256_blendv_epi8(state, full, short_of);
}

HC_256 inline __m256i stepped(__m256i old, __m256i z) {
    const __m256i low = _mm256_set1_epi16(0x7fff), one = _mm256_set1_epi16(1);
    __m256i odd = _mm256_sub_epi16(_mm256_setzero_si256(), _mm256_and_si256(z, one));
    __m256i step = _mm256_xor_si256(_mm256_srli_epi16(_mm256_and_si256(z, low), 1), odd);
    __m256i value = _mm256_and_si256(_mm256_add_epi16(old, step), low);
    return _mm256_or_si256(value, _mm256_andnot_si256(low, _mm256_xor_si256(old, z)));
}

}  // namespace

HC_256 size_t decode_256(Tile& tile) {
    const Contexts256 contexts(tile.dtype, tile.lowest);
    const ByContext256 zeros(tile.tables->zeros);
    const u32* entries = tile.tables->entries.data();
    const __m256i slots = _mm256_set1_epi32(TOTAL - 1), direct = _mm256_set1_epi16(DIRECT - 1);
    __m256i s[4];
    for (int h = 0; h < 4; ++h) s[h] = _mm256_loadu_si256((const __m256i*)tile.states + h);
    const u8* words = tile.words;
    size_t i = 0;
    int hopes = HOPES;  // groups in a row that may fail to be quiet before no more are looked at
    for (; i + LANES <= tile.count && tile.end - words >= 2 * (ptrdiff_t)LANES; i += LANES) {
        const __m256i* olds = (const __m256i*)(tile.reference + i);
        __m256i* out = (__m256i*)(tile.out + i);
        __m256i o0 = _mm256_loadu_si256(olds), o1 = _mm256_loadu_si256(olds + 1);
        __m256i c0 = contexts.of(o0), c1 = contexts.of(o1), f[4], l[4], y[4];
        __m256i c[4] = {eighth_256<0>(c0), eighth_256<1>(c0), eighth_256<0>(c1), eighth_256<1>(c1)};
        __m256i quiet = _mm256_setzero_si256();
        for (int h = 0; h < 4; ++h) l[h] = _mm256_and_si256(s[h], slots);
        if (hopes) {
            quiet = _mm256_set1_epi32(-1);
#pragma GCC unroll 4
            for (int h = 0; h < 4; ++h) {
                f[h] = zeros.of(c[h]);
                quiet = _mm256_and_si256(quiet, _mm256_cmpgt_epi32(f[h], l[h]));
            }
            --hopes;
        }
        if (mask_256(quiet) == 0xff) {
            hopes = HOPES;
#pragma GCC unroll 4
            for (int h = 0; h < 4; ++h) {
                s[h] = _mm256_add_epi32(_mm256_mullo_epi32(f[h], _mm256_srli_epi32(s[h], PRECISION)), l[h]);
                s[h] = take_words(s[h], words);
            }
            _mm256_storeu_si256(out, o0), _mm256_storeu_si256(out + 1, o1);
            continue;
        }
#pragma GCC unroll 4
        for (int h = 0; h < 4; ++h) {
            __m256i at = _mm256_or_si256(_mm256_slli_epi32(c[h], PRECISION), l[h]);
            __m256i entry = entries_256(entries, at);
            __m256i frequency = _mm256_and_si256(entry, slots);
            __m256i added = _mm256_and_si256(_mm256_srli_epi32(entry, 12), slots);
            __m256i next = _mm256_mullo_epi32(frequency, _mm256_srli_epi32(s[h], PRECISION));
            s[h] = take_words(_mm256_add_epi32(next, added), words), y[h] = _mm256_srli_epi32(entry, 24);
        }
        __m256i z0 = _mm256_permute4x64_epi64(_mm256_packus_epi32(y[0], y[1]), 0xd8);
        __m256i z1 = _mm256_permute4x64_epi64(_mm256_packus_epi32(y[2], y[3]), 0xd8);
        __m256i beyond = _mm256_packs_epi16(_mm256_cmpgt_epi16(z0, direct), _mm256_cmpgt_epi16(z1, direct));
        u32 rare = (u32)_mm256_movemask_epi8(_mm256_permute4x64_epi64(beyond, 0xd8));
        if (rare) {
            alignas(32) u16 lanes[LANES];
            _mm256_store_si256((__m256i*)lanes, z0), _mm256_store_si256((__m256i*)lanes + 1, z1);
            put_rare(lanes, rare, tile.extra);
            z0 = _mm256_load_si256((const __m256i*)lanes), z1 = _mm256_load_si256((const __m256i*)lanes + 1);
        }
        _mm256_storeu_si256(out, stepped(o0, z0)), _mm256_storeu_si256(out + 1, stepped(o1, z1));
    }
    for (int h = 0; h < 4; ++h) _mm256_storeu_si256((__m256i*)tile.states + h, s[h]);
    tile.words = words;
    return i;
}

}  // namespace stepcode
}  // namespace hybridcomp
#endif
