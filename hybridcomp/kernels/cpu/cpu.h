// What the CPU loops share: dtypes, threads, and one binary for several instruction sets.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <stdexcept>

#include "lanes.h"

// Compiles a function for AVX-512, AVX2 and the baseline; the loader picks a version. Needs GNU ifunc;
// without it only the baseline is compiled.
#if defined(HC_CLONES)
// a build for one machine (by the sanitizers) defines it
#elif defined(__x86_64__) && defined(__GLIBC__) && defined(__GNUC__) && !defined(__clang__)
#define HC_CLONES __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define HC_CLONES
#endif

namespace hybridcomp {

enum class Dtype : int { fp32 = 0, bf16 = 1, fp16 = 2 };

// How values of a dtype are read and written as float, one or eight at a time.
struct Fp32 {
    typedef float Stored;
    HC_INLINE float load(float stored) { return stored; }
    HC_INLINE float store(float value) { return value; }
    HC_INLINE void store8(F8 values, float* out) { store_lanes(values, out); }
};
struct BFloat16 {
    typedef u16 Stored;
    HC_INLINE float load(u16 stored) { return bf16_to_float(stored); }
    HC_INLINE u16 store(float value) { return float_to_bf16(value); }
    HC_INLINE void store8(F8 values, u16* out) { store_lanes(lanes_to_bf16(values), out); }
};
struct Float16 {
    typedef u16 Stored;
    HC_INLINE float load(u16 stored) { return fp16_to_float(stored); }
    HC_INLINE u16 store(float value) { return float_to_fp16(value); }
    HC_INLINE void store8(F8 values, u16* out) { store_lanes(lanes_to_fp16(values), out); }
};

inline size_t item_nbytes(int dtype) { return dtype == (int)Dtype::fp32 ? 4 : 2; }
inline size_t ceil_div(size_t a, size_t b) { return (a + b - 1) / b; }
inline size_t align16(size_t nbytes) { return (nbytes + 15) & ~size_t(15); }

inline void require(bool condition, const char* message) {
    if (!condition) throw std::invalid_argument(message);
}

// Calls body(begin, end) on contiguous shares of `count` units of `unit` values. Below 64 Ki values
// one thread does all, since waking another costs more than it saves.
template <class Body>
void parallel_ranges(size_t count, size_t unit, int threads, const Body& body) {
    size_t useful = count * unit / 65536;
    size_t shares = useful < 1 ? 1 : (useful < (size_t)threads ? useful : (size_t)threads);
    shares = shares < count ? shares : count;  // none is empty
    if (shares <= 1) {
        body(size_t(0), count);
        return;
    }
#pragma omp parallel for num_threads((int)shares) schedule(static, 1)
    for (int64_t share = 0; share < (int64_t)shares; ++share) {
        body(count * share / shares, count * (share + 1) / shares);
    }
}

// Zero the bytes between what was written and the end of the payload.
inline void pad(u8* out, size_t used, size_t total) { memset(out + used, 0, total - used); }

}  // namespace hybridcomp
