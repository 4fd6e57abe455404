// Runs GPU kernels on the host, so that they can be tested without a GPU: every thread of a block is a
// fiber; exchanges between the lanes of a warp and barriers switch to the next one. Lanes run in an
// order that a seed shuffles, so that a missing barrier shows. Blocks run one after the other.
//
// With HC_WAVE kernels see the intrinsics of HIP for waves of that many lanes, in place of CUDA's. A warp
// is 32 of them, and only its own lanes take part in what it does: of the others a vote has any bits.
#pragma once

#define HC_EMULATED
#ifdef HC_WAVE
#define __HIP__
#define __forceinline__ inline __attribute__((always_inline))
#endif

#include <setjmp.h>
#include <ucontext.h>

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <vector>

#define __global__
#define __device__
#define __host__
#define __constant__
#define __shared__ static
#define __launch_bounds__(...)
#define __restrict__

struct dim3 {
    unsigned x, y, z;
};
struct alignas(16) float4 {
    float x, y, z, w;
};
struct alignas(8) uint2 {
    unsigned x, y;
};
struct alignas(16) uint4 {
    unsigned x, y, z, w;
};
inline float4 make_float4(float x, float y, float z, float w) { return float4{x, y, z, w}; }
inline uint2 make_uint2(unsigned x, unsigned y) { return uint2{x, y}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) {
    return uint4{x, y, z, w};
}

namespace emulator {

constexpr size_t STACK = 256 << 10;
constexpr int WARP = 32;

struct Barrier {
    int arrived = 0, expected = 0;
    unsigned generation = 0;
};

struct Warp {
    Barrier barrier;
    unsigned slots[2][WARP];
};

// Kept for the next blocks: it waits in run_fiber between them.
struct Fiber {
    ucontext_t begin;
    jmp_buf at;
    char* stack = nullptr;
    unsigned thread = 0, exchanges = 0;
    bool finished = true;
};

struct State {
    jmp_buf scheduler;
    std::deque<Fiber> fibers;
    std::vector<Warp> warps;
    Barrier block;
    Fiber* current = nullptr;
    void (*kernel)(uint64_t, uint64_t, uint64_t, uint64_t, uint64_t, uint64_t, uint64_t, uint64_t,
                   uint64_t, uint64_t, uint64_t, uint64_t) = nullptr;
    uint64_t arguments[12];
    dim3 thread, block_index, block_size, grid_size;
    uint64_t random = 1;
};
inline State state;

// Returns to the scheduler; unlike swapcontext, _setjmp and _longjmp make no system call.
inline void yield() {
    if (!_setjmp(state.current->at)) _longjmp(state.scheduler, 1);
}

inline void wait(Barrier& barrier) {
    unsigned generation = barrier.generation;
    if (++barrier.arrived == barrier.expected) {
        barrier.arrived = 0;
        ++barrier.generation;
    }
    while (barrier.generation == generation) yield();
}

inline Warp& warp() { return state.warps[state.current->thread / WARP]; }

// A thread that returned takes part in nothing any more.
inline void leave(Barrier& barrier) {
    --barrier.expected;
    if (barrier.expected && barrier.arrived == barrier.expected) {
        barrier.arrived = 0;
        ++barrier.generation;
    }
}

inline void run_fiber() {
    for (;; yield()) {
        const uint64_t* a = state.arguments;
        state.kernel(a[0], a[1], a[2], a[3], a[4], a[5], a[6], a[7], a[8], a[9], a[10], a[11]);
        leave(warp().barrier);
        leave(state.block);
        state.current->finished = true;
    }
}

// Runs a fiber until it yields.
inline void resume(Fiber& fiber) {
    state.current = &fiber;
    state.thread.x = fiber.thread;
    if (_setjmp(state.scheduler)) return;
    if (fiber.stack) _longjmp(fiber.at, 1);
    fiber.stack = (char*)malloc(STACK);
    getcontext(&fiber.begin);
    fiber.begin.uc_stack.ss_sp = fiber.stack;
    fiber.begin.uc_stack.ss_size = STACK;
    fiber.begin.uc_link = nullptr;
    makecontext(&fiber.begin, run_fiber, 0);
    setcontext(&fiber.begin);
}

// The slots of this exchange, filled by all lanes. Two sets: who is ahead writes the other one.
inline const unsigned* exchange(unsigned value) {
    Warp& mine = warp();
    unsigned* slots = mine.slots[state.current->exchanges++ % 2];
    slots[state.current->thread % WARP] = value;
    wait(mine.barrier);
    return slots;
}

inline void run_block(unsigned threads) {
    state.warps.assign((threads + WARP - 1) / WARP, Warp());
    state.block = Barrier();
    state.block.expected = (int)threads;
    if (state.fibers.size() < threads) state.fibers.resize(threads);
    std::vector<unsigned> order(threads);
    for (unsigned t = 0; t < threads; ++t) {
        Fiber& fiber = state.fibers[t];
        fiber.thread = t, fiber.exchanges = 0, fiber.finished = false;
        ++state.warps[t / WARP].barrier.expected;
        order[t] = t;
    }
    for (unsigned t = threads; t > 1; --t) {
        state.random = state.random * 6364136223846793005ull + 1442695040888963407ull;
        unsigned other = (unsigned)((state.random >> 33) % t), kept = order[t - 1];
        order[t - 1] = order[other], order[other] = kept;
    }
    for (unsigned left = threads; left;) {
        left = 0;
        for (unsigned t : order) {
            Fiber& fiber = state.fibers[t];
            if (fiber.finished) continue;
            resume(fiber);
            left += !fiber.finished;
        }
    }
}

}  // namespace emulator

#define threadIdx (emulator::state.thread)
#define blockIdx (emulator::state.block_index)
#define blockDim (emulator::state.block_size)
#define gridDim (emulator::state.grid_size)

inline void __syncthreads() { emulator::wait(emulator::state.block); }
inline void __threadfence() {}
#ifndef HC_WAVE
inline void __syncwarp(unsigned = ~0u) { emulator::exchange(0); }
inline unsigned __shfl_xor_sync(unsigned, unsigned value, int mask) {
    unsigned lane = emulator::state.current->thread % 32;
    return emulator::exchange(value)[lane ^ (unsigned)mask];
}
inline unsigned __shfl_sync(unsigned, unsigned value, int lane) {
    return emulator::exchange(value)[lane & 31];
}
inline unsigned __shfl_up_sync(unsigned, unsigned value, unsigned delta) {
    unsigned lane = emulator::state.current->thread % 32;
    const unsigned* slots = emulator::exchange(value);
    return lane >= delta ? slots[lane - delta] : value;
}
inline unsigned __ballot_sync(unsigned, int predicate) {
    const unsigned* slots = emulator::exchange(predicate != 0);
    unsigned found = 0;
    for (int lane = 0; lane < 32; ++lane) found |= slots[lane] << lane;
    return found;
}
inline int __any_sync(unsigned mask, int predicate) { return __ballot_sync(mask, predicate) != 0; }
inline unsigned __byte_perm(unsigned a, unsigned b, unsigned selectors) {
    uint64_t bytes = (uint64_t)b << 32 | a;
    unsigned found = 0;
    for (int i = 0; i < 4; ++i) {
        found |= (unsigned)(bytes >> (8 * (selectors >> (4 * i) & 7)) & 255) << (8 * i);
    }
    return found;
}
#else
constexpr int __HIP_MEMORY_SCOPE_AGENT = 4;
template <class V>
inline V __hip_atomic_load(const V* at, int, int) { return *(const volatile V*)at; }
template <class V>
inline void __hip_atomic_store(V* at, V value, int, int) { *(volatile V*)at = value; }
inline void __builtin_amdgcn_fence(int, const char*) {}
inline void __builtin_amdgcn_wave_barrier() { emulator::exchange(0); }
inline unsigned __lane_id() { return emulator::state.current->thread % HC_WAVE; }
inline uint64_t __ballot(int predicate) {
    const unsigned* slots = emulator::exchange(predicate != 0);
    uint64_t found = 0;
    for (int lane = 0; lane < 32; ++lane) found |= (uint64_t)slots[lane] << lane;
    if (HC_WAVE == 32) return found;
    unsigned others = 2654435761u * (emulator::state.current->exchanges + 1);
    return __lane_id() < 32 ? (uint64_t)others << 32 | found : found << 32 | others;
}
// `width`: the lanes among which a value moves.
inline int __shfl(int value, int lane, int width = HC_WAVE) {
    if (width != 32) abort();
    return (int)emulator::exchange((unsigned)value)[lane & 31];
}
inline int __shfl_xor(int value, int mask, int width = HC_WAVE) {
    if (width != 32 || mask >> 5) abort();
    unsigned lane = emulator::state.current->thread % 32;
    return (int)emulator::exchange((unsigned)value)[lane ^ (unsigned)mask];
}
inline int __shfl_up(int value, unsigned delta, int width = HC_WAVE) {
    if (width != 32) abort();
    unsigned lane = emulator::state.current->thread % 32;
    const unsigned* slots = emulator::exchange((unsigned)value);
    return lane >= delta ? (int)slots[lane - delta] : value;
}
// v_perm_b32: a byte for each of the result's; 0 to 3 are those of b, 4 to 7 those of a.
inline unsigned __builtin_amdgcn_perm(unsigned a, unsigned b, unsigned selectors) {
    uint64_t bytes = (uint64_t)a << 32 | b;
    unsigned found = 0;
    for (int i = 0; i < 4; ++i) {
        unsigned selector = selectors >> (8 * i) & 255;
        if (selector > 7) abort();  // signs and constants
        found |= (unsigned)(bytes >> (8 * selector) & 255) << (8 * i);
    }
    return found;
}
// v_alignbit_b32
inline unsigned __builtin_amdgcn_alignbit(unsigned a, unsigned b, unsigned shift) {
    return (unsigned)(((uint64_t)a << 32 | b) >> (shift & 31));
}
#endif
inline int __popc(unsigned value) { return __builtin_popcount(value); }
inline int __clz(unsigned value) { return value ? __builtin_clz(value) : 32; }
inline unsigned __umulhi(unsigned a, unsigned b) { return (unsigned)((uint64_t)a * b >> 32); }
template <class V>
inline V atomicAdd(V* at, V value) {
    V before = *at;
    *at += value;
    return before;
}
template <class V>
inline V atomicOr(V* at, V value) {
    V before = *at;
    *at |= value;
    return before;
}

// Runs `kernel` over grid_x by grid_y blocks of `threads`.
extern "C" inline __attribute__((used, visibility("default"))) void emulate(
    void* kernel, unsigned grid_x, unsigned grid_y, unsigned threads, const uint64_t* arguments,
    uint64_t seed) {
    emulator::State& state = emulator::state;
    memcpy(&state.kernel, &kernel, sizeof kernel);
    memcpy(state.arguments, arguments, sizeof state.arguments);
    state.block_size = dim3{threads, 1, 1};
    state.grid_size = dim3{grid_x, grid_y, 1};
    state.random = seed;
    for (unsigned y = 0; y < grid_y; ++y) {
        for (unsigned x = 0; x < grid_x; ++x) {
            state.block_index = dim3{x, y, 0};
            emulator::run_block(threads);
        }
    }
}
