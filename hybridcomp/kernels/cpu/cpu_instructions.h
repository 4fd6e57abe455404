// Instruction sets of loops with several versions: the best of this machine, up to a limit that tests and
// benchmarks set. All versions give the same bytes and values.
#pragma once

#include <atomic>

#include "cpu.h"

#if defined(__x86_64__) && defined(__GNUC__) && !defined(HC_PLAIN)
#include <immintrin.h>
// g++ 12 warns of the undefined lanes in its own intrinsics
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"
#define HC_X86
#define HC_512 __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,bmi,bmi2,popcnt")))
#define HC_256 __attribute__((target("avx2,bmi,bmi2,popcnt")))
#endif

namespace hybridcomp {

enum class Instructions : int { plain, avx2, avx512 };

// The most that may be used.
inline std::atomic<Instructions>& allowed_instructions() {
    static std::atomic<Instructions> allowed{Instructions::avx512};
    return allowed;
}

inline Instructions best_instructions() {
#ifdef HC_X86
    bool small = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("bmi") && __builtin_cpu_supports("bmi2") &&
                 __builtin_cpu_supports("popcnt");
    bool wide = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
    return !small ? Instructions::plain : wide ? Instructions::avx512 : Instructions::avx2;
#else
    return Instructions::plain;
#endif
}

inline Instructions instructions() {
    static const Instructions best = best_instructions();
    Instructions allowed = allowed_instructions();
    return best < allowed ? best : allowed;
}

}  // namespace hybridcomp
