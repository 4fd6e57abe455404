// Hardware functions beyond the C++ that CUDA and HIP share: lanes of a warp, bytes and bits of a word,
// conversions, sums rounded once, fetches into shared memory, states that other blocks read. No other file of
// the kernels names an intrinsic, an instruction or an architecture, which tests/kernels/cuda/test_hardware.py
// checks; portable.h has the functions that CPUs share.
//
// Each has a version for NVIDIA (HC_SM is 900 for sm_90), for AMD (HC_AMD), and for the tests' emulator on a
// CPU. Plain C++ gives the same bits where an instruction is missing.
//
// A warp is 32 consecutive lanes; on an AMD GPU with waves of 64 it is half a wave. The other half may have
// diverged, so only this half's bits of a vote count, and shuffles stay among 32 lanes. A wave runs in lockstep,
// and diverged halves run one after the other, so no lane may wait in a loop for another lane of its block,
// except at a barrier.
#pragma once

#include "portable.h"

#ifdef __CUDA_ARCH__
#define HC_SM __CUDA_ARCH__
#else
#define HC_SM 0
#endif
#ifdef __HIP__
#define HC_AMD 1
#else
#define HC_AMD 0
#endif

// NVIDIA generations for which the compiler needs more registers; kernels there run fewer blocks at once.
#define HC_VOLTA (HC_SM > 0 && HC_SM < 750)
#define HC_UP_TO_TURING (HC_SM > 0 && HC_SM < 800)
#define HC_UP_TO_ADA (HC_SM > 0 && HC_SM < 900)
#define HC_BLACKWELL (HC_SM >= 1000)

// Maximum threads per block, and blocks that must fit a multiprocessor. HIP interprets the second number
// differently, and takes as many registers as a kernel needs.
#if HC_AMD
#define HC_BOUNDS(THREADS, BLOCKS) __launch_bounds__(THREADS)
#else
#define HC_BOUNDS(THREADS, BLOCKS) __launch_bounds__(THREADS, BLOCKS)
#endif

// Unrolls a loop over values of a lane for AMD's compiler, which would otherwise move them to memory; NVIDIA's
// compiler needs fewer registers without it.
#if HC_AMD
#define HC_UNROLL_FOR_AMD _Pragma("unroll")
#else
#define HC_UNROLL_FOR_AMD
#endif

// Declares a table as a kernel's first argument, by value; the kernel reads `as_table` of it. The emulator
// passes all arguments as words, so there it is an address. AMD's compiler would copy an indexed argument to
// every thread's memory, so there it is read from the argument segment.
#if HC_SM
#define HC_BY_VALUE(TABLE) const __grid_constant__ hybridcomp::TABLE
#elif HC_AMD && !defined(HC_EMULATED)
#define HC_BY_VALUE(TABLE) const hybridcomp::TABLE
#else
#define HC_BY_VALUE(TABLE) const hybridcomp::TABLE*
#endif

namespace hybridcomp {

constexpr u32 FULL_WARP = 0xffffffffu;  // what `ballot` gives where all lanes say yes
constexpr int WARP = 32;

template <class T>
HC_INLINE const T& as_table(const T& table) {
#if HC_AMD && !defined(HC_EMULATED)
    return *(const T*)__builtin_amdgcn_kernarg_segment_ptr();
#else
    return table;
#endif
}
template <class T>
HC_INLINE const T& as_table(const T* table) { return *table; }

// Lanes. All 32 of a warp take part in each of these.

HC_INLINE u32 lane_id() { return threadIdx.x % WARP; }

// Returns a bit for each lane whose `yes` is true.
HC_INLINE u32 ballot(bool yes) {
#if HC_AMD
    return (u32)((u64)__ballot(yes) >> (__lane_id() & 32));
#else
    return __ballot_sync(FULL_WARP, yes);
#endif
}

HC_INLINE bool any_in_warp(bool yes) {
#if HC_AMD
    return ballot(yes) != 0;
#else
    return __any_sync(FULL_WARP, yes);
#endif
}

HC_INLINE u32 lane_value(u32 value, u32 lane) {
#if HC_AMD
    return (u32)__shfl((int)value, (int)lane, WARP);
#else
    return __shfl_sync(FULL_WARP, value, (int)lane);
#endif
}

// Returns `value` of the lane whose number differs in the bits of `mask`.
HC_INLINE u32 exchanged(u32 value, u32 mask) {
#if HC_AMD
    return (u32)__shfl_xor((int)value, (int)mask, WARP);
#else
    return __shfl_xor_sync(FULL_WARP, value, (int)mask);
#endif
}

// Returns `value` of the lane `step` before this one, or this lane's own if there is none.
HC_INLINE u32 lane_before(u32 value, u32 step) {
#if HC_AMD
    return (u32)__shfl_up((int)value, step, WARP);
#else
    return __shfl_up_sync(FULL_WARP, value, step);
#endif
}

// Returns `value`, plus that of the lane `step` before this one if it exists.
HC_INLINE u32 plus_lane_before(u32 value, u32 step) {
#if HC_SM
    // the shuffle itself says whether there is such a lane
    asm volatile("{.reg .u32 before; .reg .pred some; shfl.sync.up.b32 before|some, %0, %1, 0, -1;"
                 "@some add.u32 %0, %0, before;}"
                 : "+r"(value) : "r"(step));
    return value;
#else
    u32 before = lane_before(value, step);
    return value + (lane_id() >= step ? before : 0);
#endif
}

// Makes earlier writes of all lanes visible to the warp.
HC_INLINE void sync_warp() {
#if HC_AMD
    __builtin_amdgcn_fence(__ATOMIC_RELEASE, "wavefront");
    __builtin_amdgcn_wave_barrier();
    __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "wavefront");
#else
    __syncwarp();
#endif
}

template <int MASK>
HC_INLINE u32 other_lane(u32 value) { return exchanged(value, MASK); }
HC_INLINE float other_lane_float(float value, u32 mask) {
    return bits_float(exchanged(float_bits(value), mask));
}

// The largest among lanes that differ in the bits of MASKS.
template <int MASK, int... MASKS>
HC_INLINE u32 largest_of(u32 value) {
    u32 other = other_lane<MASK>(value);
    value = other > value ? other : value;
    if constexpr (sizeof...(MASKS) > 0) return largest_of<MASKS...>(value);
    return value;
}

template <int MASK, int... MASKS>
HC_INLINE u32 union_of(u32 value) {
    value |= other_lane<MASK>(value);
    if constexpr (sizeof...(MASKS) > 0) return union_of<MASKS...>(value);
    return value;
}

HC_INLINE u32 largest_in_warp(u32 value) {
#if HC_SM >= 800
    return __reduce_max_sync(FULL_WARP, value);
#else
    return largest_of<1, 2, 4, 8, 16>(value);
#endif
}

HC_INLINE u32 union_in_warp(u32 value) {
#if HC_SM >= 800
    return __reduce_or_sync(FULL_WARP, value);
#else
    return union_of<1, 2, 4, 8, 16>(value);
#endif
}

// Bits and bytes of words.

HC_INLINE u32 ones_in(u32 bits) { return (u32)__popc(bits); }
HC_INLINE u32 leading_zeros(u32 bits) { return (u32)__clz((int)bits); }  // 32 of 0
HC_INLINE u32 lowest_bit(u32 bits) { return 31 - leading_zeros(bits & (0u - bits)); }
HC_INLINE u32 high_product(u32 a, u32 b) { return __umulhi(a, b); }

// Byte i of the result is the byte of a (0 to 3) or b (4 to 7) that nibble i of `selectors` names.
HC_INLINE u32 pick_bytes(u32 a, u32 b, u32 selectors) {
#if HC_AMD
    // an instruction that takes a byte for each, a literal where the selectors are known
    u32 spread = (selectors & 0xfu) | (selectors & 0xf0u) << 4 | (selectors & 0xf00u) << 8 |
                 (selectors & 0xf000u) << 12;
    return __builtin_amdgcn_perm(b, a, spread & 0x07070707u);
#else
    return __byte_perm(a, b, selectors);
#endif
}

// The low word of high:low, shifted to the right by `position` % 32.
HC_INLINE u32 funnel_right(u32 low, u32 high, u32 position) {
#if HC_SM
    return __funnelshift_r(low, high, position);
#elif HC_AMD
    return __builtin_amdgcn_alignbit(high, low, position);
#else
    return low >> position % 32 | (high << 1) << (31 - position % 32);
#endif
}

// The high word of high:low, shifted to the left by `position` % 32.
HC_INLINE u32 funnel_left(u32 low, u32 high, u32 position) {
#if HC_SM
    return __funnelshift_l(low, high, position);
#else
    return high << position % 32 | (low >> 1) >> (31 - position % 32);
#endif
}

// Zero from 32 on.
HC_INLINE u32 shifted_left(u32 word, u32 count) {
#if HC_SM
    u32 shifted;
    asm("shl.b32 %0, %1, %2;" : "=r"(shifted) : "r"(word), "r"(count));
    return shifted;
#else
    return count < 32 ? word << count : 0;
#endif
}

// Drops less than 32 bits.
HC_INLINE u64 dropped(u64 bits, u32 count) {
#if HC_SM
    u32 high = (u32)(bits >> 32);
    return (u64)(high >> count) << 32 | __funnelshift_r((u32)bits, high, count);
#else
    return bits >> count;
#endif
}

// Takes the bits of `mask` from a, others from b, in one instruction; NVIDIA's compiler would use two.
HC_INLINE u32 choose_bits(u32 mask, u32 a, u32 b) {
#if HC_SM
    u32 found;
    asm("lop3.b32 %0, %1, %2, %3, 0xe4;" : "=r"(found) : "r"(a), "r"(b), "r"(mask));
    return found;
#else
    return (a & mask) | (b & ~mask);
#endif
}

// The larger of the low halves beside the larger of the high halves.
HC_INLINE u32 largest_pair(u32 a, u32 b) {
#if HC_SM >= 900
    u32 found;
    asm("max.u16x2 %0, %1, %2;" : "=r"(found) : "r"(a), "r"(b));
    return found;
#else
    u32 high = a > b ? a : b, low = (a & 0xffffu) > (b & 0xffffu) ? a : b;
    return (high & 0xffff0000u) | (low & 0xffffu);
#endif
}

// Barriers for the optimizer.

// Returns the same number, but hides that from the compiler, which then recomputes results here instead of
// keeping them in registers from earlier uses or from before a loop.
HC_INLINE u32 anew(u32 value) {
#if HC_SM
    asm volatile("" : "+r"(value));
#elif HC_AMD && !defined(HC_EMULATED)
    asm volatile("" : "+v"(value));
#endif
    return value;
}

// Keeps a loop from unrolling, where that would take too many registers.
HC_INLINE void finish_iteration() { asm volatile("" ::: "memory"); }

// Returns a sum that the compiler may not move: merging the sums of two branches after them would take one
// more register per value.
HC_INLINE float sum_apart(float a, float b) {
#if HC_SM
    return __fadd_rn(a, b);
#else
    return a + b;
#endif
}

// Floats. NVIDIA's versions may turn a NaN into another NaN.

// Returns a * b + c, rounded once; `b` is 1 or -1, so it is a sum or a difference.
HC_INLINE float plus_signed(float a, float b, float c) {
#if HC_SM
    return __fmaf_rn(a, b, c);
#elif HC_AMD
    return __builtin_fmaf(a, b, c);
#else
    return c + a * b;
#endif
}

// Returns a * b rounded down; neither is negative or NaN.
HC_INLINE float product_down(float a, float b) {
#if HC_SM
    return __fmul_rd(a, b);
#else
    return rounded_down((double)a * (double)b);
#endif
}

// Narrows numbers that are neither NaN nor Inf; numbers that are too large become the largest one.
HC_INLINE u32 narrow_bf16(float low, float high) {
#if HC_SM >= 800
    u32 both;
    asm("cvt.rn.satfinite.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
    return both;
#else
    return pair(float_to_bf16(low), float_to_bf16(high));
#endif
}

HC_INLINE u32 narrow_fp16(float low, float high) {
#if HC_SM >= 800
    u32 both;
    asm("cvt.rn.satfinite.f16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
    return both;
#else
    return pair(float_to_fp16(low), float_to_fp16(high));
#endif
}

// A NaN comes out as some NaN.
HC_INLINE float widen_fp16(u32 half) {
#if HC_SM >= 530
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"((u16)half));
    return value;
#else
    return fp16_to_float((u16)half);
#endif
}

// Returns the larger magnitude as a float, NaN if one is NaN.
HC_INLINE float larger_magnitude(float a, float b) {
#if HC_SM >= 800
    float found;
    asm("{.reg .f32 x, y; abs.f32 x, %1; abs.f32 y, %2; max.NaN.f32 %0, x, y;}"
        : "=f"(found) : "f"(a), "f"(b));
    return found;
#else
    u32 first = magnitude_bits(a), second = magnitude_bits(b);
    return bits_float(first > second ? first : second);
#endif
}

// Returns the larger magnitudes of two pairs; signs of the result are arbitrary.
HC_INLINE u32 larger_pair_bf16(u32 a, u32 b) {
#if HC_SM >= 860
    u32 found;
    asm("max.NaN.xorsign.abs.bf16x2 %0, %1, %2;" : "=r"(found) : "r"(a), "r"(b));
    return found;
#else
    return largest_pair(a & 0x7fff7fffu, b & 0x7fff7fffu);
#endif
}

HC_INLINE u32 larger_pair_fp16(u32 a, u32 b) {
#if HC_SM >= 860
    u32 found;
    asm("max.NaN.xorsign.abs.f16x2 %0, %1, %2;" : "=r"(found) : "r"(a), "r"(b));
    return found;
#else
    return largest_pair(a & 0x7fff7fffu, b & 0x7fff7fffu);
#endif
}

// a - b of two pairs of numbers, rounded.
HC_INLINE u32 difference_bf16(u32 a, u32 b) {
#if HC_SM >= 800
    u32 found;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(found) : "r"(b), "r"(0xbf80bf80u), "r"(a));
    return found;
#else
    return narrow_bf16(bits_float(a << 16) - bits_float(b << 16),
                       bits_float(a & 0xffff0000u) - bits_float(b & 0xffff0000u));
#endif
}

HC_INLINE u32 difference_fp16(u32 a, u32 b) {
#if HC_SM >= 530
    u32 found;
    asm("sub.rn.f16x2 %0, %1, %2;" : "=r"(found) : "r"(a), "r"(b));
    return found;
#else
    return narrow_fp16(widen_fp16(a & 0xffffu) - widen_fp16(b & 0xffffu),
                       widen_fp16(a >> 16) - widen_fp16(b >> 16));
#endif
}

// Two numbers as bytes, where the hardware has such a conversion: e4m3 for 3 bits of MANTISSA, else e5m2.
#define HC_NARROWS_FP8 (HC_SM >= 890)
template <int MANTISSA>
HC_INLINE u32 narrow_fp8(float low, float high) {
    u16 both = 0;
#if HC_SM >= 890
    if constexpr (MANTISSA == 3) {
        asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(both) : "f"(high), "f"(low));
    } else {
        asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(both) : "f"(high), "f"(low));
    }
#endif
    return both;
}

// Copies 16 or 4 bytes into shared memory, asynchronously and without registers where the hardware can.

#if HC_SM >= 800
typedef u32 SharedAt;
HC_INLINE SharedAt shared_at(const void* shared) { return (u32)__cvta_generic_to_shared(shared); }
HC_INLINE void fetch16(SharedAt to, const void* from) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" :: "r"(to), "l"(from) : "memory");
}
HC_INLINE void fetch4(SharedAt to, const void* from) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" :: "r"(to), "l"(from) : "memory");
}
#else
typedef u8* SharedAt;
HC_INLINE SharedAt shared_at(void* shared) { return (u8*)shared; }
HC_INLINE void fetch16(SharedAt to, const void* from) { *(uint4*)to = *(const uint4*)from; }
HC_INLINE void fetch4(SharedAt to, const void* from) { *(u32*)to = *(const u32*)from; }
#endif

HC_INLINE void close_fetch() {
#if HC_SM >= 800
    asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}

// Waits for all closed fetches of this lane but the last LATER.
template <int LATER>
HC_INLINE void await_fetches() {
#if HC_SM >= 800
    asm volatile("cp.async.wait_group %0;" :: "n"(LATER) : "memory");
#endif
}

// Waits for all fetches of this lane.
HC_INLINE void await_all_fetches() {
#if HC_SM >= 800
    asm volatile("cp.async.wait_all;" ::: "memory");
#endif
}

// Where a table of 16 floats begins, at a multiple of 256 bytes, for `in_table`.
HC_INLINE u32 table_place(const float* table) {
#if HC_SM
    return (u32)__cvta_generic_to_shared(table);
#else
    return 0;
#endif
}

// Returns the float at offset byte BYTE of `levels` in such a table, which begins at `at`.
template <int BYTE>
HC_INLINE float in_table(const float* table, u32 levels, u32 at) {
#if HC_SM
    float found;
    asm("ld.shared.f32 %0, [%1];" : "=f"(found) : "r"(pick_bytes(levels, at, 0x7650 | BYTE)));
    return found;
#else
    return *(const float*)((const u8*)table + pick_bytes(levels, at, 0x4440 | BYTE));
#endif
}

// States that blocks publish to each other. Readers need only the state itself, no earlier writes of the block,
// so no fence is needed. (A fence would also flush the L1 cache of the multiprocessor.)

HC_INLINE u64 load_state(const u64* at) {
#if HC_AMD
    return __hip_atomic_load(at, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_AGENT);
#else
    return *(const volatile u64*)at;
#endif
}

HC_INLINE void publish(u64* at, u64 state) {
#if HC_AMD
    __hip_atomic_store(at, state, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_AGENT);
#else
    *(volatile u64*)at = state;
#endif
}

}  // namespace hybridcomp
