// What the encoder and the decoder of stepcode share: where a message's parts lie, and lanes of AVX-512.
#pragma once

#include <atomic>

#include "shares.h"
#include "stepcode_model.h"

#if defined(__x86_64__) && defined(__GNUC__) && !defined(HC_PLAIN)
#include <immintrin.h>
// g++ 12 takes the undefined lanes of its own intrinsics for a mistake
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"
#define HC_WIDE __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,bmi2,popcnt")))
#endif

namespace hybridcomp {
namespace stepcode {

// The header as bytes: TileHeader with `mode`, `lowest` for what is zero there, the model's bytes last.
struct Head {
    u32 magic;
    u8 version, dtype, mode, lowest;
    u64 numel;
    u32 tile, length, model, reserved;
};
static_assert(sizeof(Head) == HEADER_BYTES, "the header is 32 bytes");

// Each context's ranges, and a bit for each direct symbol that it has.
struct Ranges {
    u32 of[CONTEXTS][ROW];
    u32 known[CONTEXTS];
};

// Whether lanes of AVX-512 may be used; tests compare them with the plain loops.
inline std::atomic<bool>& lanes_allowed() {
    static std::atomic<bool> allowed{true};
    return allowed;
}

#ifdef HC_WIDE
inline bool wide_lanes() {
    static const bool found = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                              __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
                              __builtin_cpu_supports("bmi2");
    return found && lanes_allowed();
}

// 32 values, and their contexts.
struct Contexts {
    __m512i lowest, most;
    __m128i shift;
    HC_WIDE Contexts(u32 dtype, u32 first)
        : lowest(_mm512_set1_epi16((short)first)), most(_mm512_set1_epi16(CONTEXTS - 1)),
          shift(_mm_cvtsi32_si128((int)mantissa_bits(dtype))) {}
    HC_WIDE __m512i exponent(__m512i old) const {
        return _mm512_srl_epi16(_mm512_and_si512(old, _mm512_set1_epi16(0x7fff)), shift);
    }
    HC_WIDE __m512i of(__m512i old) const {
        return _mm512_min_epu16(_mm512_subs_epu16(exponent(old), lowest), most);
    }
};

HC_WIDE inline __m512i lower_half(__m512i halves) {
    return _mm512_cvtepu16_epi32(_mm512_castsi512_si256(halves));
}
HC_WIDE inline __m512i upper_half(__m512i halves) {
    return _mm512_cvtepu16_epi32(_mm512_extracti64x4_epi64(halves, 1));
}
#endif

}  // namespace stepcode
}  // namespace hybridcomp
