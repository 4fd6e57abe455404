// CUDA kernels of blockint; a warp takes a tile (blockint_tile.h).
#include "blockint_tile.h"

namespace hybridcomp {
namespace blockint {

// One iteration after the other, where all at once need more than 128 registers.
template <bool SERIAL>
HC_INLINE void finish_iteration() {
    if constexpr (SERIAL) asm volatile("" ::: "memory");
}

// A number that the compiler knows nothing of: addresses made of it are not kept over a loop.
HC_INLINE u64 opaque(u64 value) {
    asm volatile("" : "+l"(value));
    return value;
}

// held += this lane's values of a tile, and their residual.
template <class T, bool FEEDBACK, bool SERIAL>
HC_INLINE void add_values(Four* held, const void* source, const float* residual, u64 tile, u64 count) {
    const auto* values = (const typename T::Stored*)source;
    bool vectors = vectorizable<T>(values);
    Place place;
#pragma unroll
    for (int i = 0; i < ROUNDS; ++i) {
        u64 at = tile * TILE + place.value(i);
        Four v = read4<T>(values, at, count, vectors);
        if (FEEDBACK && residual) v = sum(read_fp32(residual, at, count), v);
        held[i] = sum(held[i], v);
        finish_iteration<SERIAL>();
    }
}

// The dtype is known at run time only: what differs between dtypes is small, and every kernel is
// compiled at first use.
template <bool FEEDBACK, bool SERIAL>
HC_INLINE void add_any(u64 dtype, Four* held, const void* values, const float* residual, u64 tile,
                       u64 count) {
    if (dtype == 0) add_values<Fp32, FEEDBACK, SERIAL>(held, values, residual, tile, count);
    else if (dtype == 1) add_values<BFloat16, FEEDBACK, SERIAL>(held, values, residual, tile, count);
    else add_values<Float16, FEEDBACK, SERIAL>(held, values, residual, tile, count);
}

HC_INLINE u64 size_of(u64 dtype) { return dtype == 0 ? 4 : 2; }

HC_INLINE void clear(Four* held) {
#pragma unroll
    for (int i = 0; i < ROUNDS; ++i) held[i] = Four{0.0f, 0.0f, 0.0f, 0.0f};
}

// With FEEDBACK, values + residual is sent, and the residual (fp32, as the values) becomes what is left.
template <bool FEEDBACK>
HC_INLINE void encode(const void* source, u64 numel, u64 chunk, u64 slot, u64 skip, u8* out, u64 dtype,
                      float* residual) {
    Chunk mine(numel, chunk, slot, skip);
    Layout layout(mine.count);
    u64 tile = warp_id();
    if (tile >= layout.tiles) return;  // the whole warp
    Four held[ROUNDS];
    clear(held);
    residual += FEEDBACK ? mine.first : 0;
    add_any<FEEDBACK, false>(dtype, held, (const u8*)source + mine.first * size_of(dtype), residual, tile,
                      mine.count);
    out += mine.payload;
    if constexpr (FEEDBACK) {
        encode_tile<true>(held, tile, mine.count, layout, out, Feedback{residual, 0});
    } else {
        encode_tile<false>(held, tile, mine.count, layout, out, NoFeedback());
    }
}

template <class T, bool ADD>
HC_INLINE void decode(const u8* in, u64 numel, u64 chunk, u64 slot, u64 skip, void* target) {
    Chunk mine(numel, chunk, slot, skip);
    Layout layout(mine.count);
    u64 tile = warp_id();
    if (tile >= layout.tiles) return;
    in += mine.payload;
    auto* out = (typename T::Stored*)target + mine.first;
    bool vectors = vectorizable<T>(out);
    Place place;
    u32 base = in[layout.bases + tile];
#pragma unroll
    for (int i = 0; i < ROUNDS; ++i) {
        u64 at = tile * TILE + place.value(i);
        u64 block = tile * TILE_BLOCKS + i * 4 + place.group;
        Four v = decode_four(in, block, base, layout, mine.count, place);
        if constexpr (ADD) v = sum(read4<T>(out, at, mine.count, vectors), v);
        write4<T>(v, out, at, mine.count, vectors);
    }
}

// What is left of a sum that overflows fp16: Inf, as it comes out natively, where loss scaling sees it.
HC_INLINE float show_half(float value) {
    u32 bits = float_bits(value), magnitude = bits & MAGNITUDE;
    // 65520 is the smallest number that rounds to Inf
    return magnitude >= 0x477ff000u && magnitude < INF_BITS ? bits_float((bits & ~MAGNITUDE) | INF_BITS)
                                                            : value;
}

// held += `ranks` contributions to a tile of a chunk of `numel` values, in rank order: this rank's own
// exact values, and the payloads of the others, `slot` bytes apart. With FEEDBACK there may be a residual
// of the own values (else null), which they take with them and which becomes 0.
template <bool FEEDBACK>
HC_INLINE void add_ranks(Four* held, const u8* payloads, const void* own, u64 numel, u64 ranks, u64 me,
                         u64 slot, u64 dtype, float* residual, u64 tile, const Layout& layout) {
    Place place;
    for (u64 rank = 0; rank < ranks; ++rank) {
        if (rank == me) {
            add_any<FEEDBACK, true>(dtype, held, own, residual, opaque(tile), numel);
            continue;
        }
        const u8* in = payloads + (rank - (rank > me)) * slot;
        u32 base = in[layout.bases + tile];
#pragma unroll
        for (int i = 0; i < ROUNDS; ++i) {
            u64 block = tile * TILE_BLOCKS + i * 4 + place.group;
            held[i] = sum(held[i], decode_four(in, block, base, layout, numel, place));
            finish_iteration<HC_ROTATE || FEEDBACK>();
        }
    }
    if (!FEEDBACK || !residual) return;
#pragma unroll
    for (int i = 0; i < ROUNDS; ++i) {
        u64 at = opaque(tile) * TILE + place.value(i);
        write_fp32(Four{0.0f, 0.0f, 0.0f, 0.0f}, residual, at, numel);
    }
}

// `add_ranks`, in fp32.
template <bool FEEDBACK>
HC_INLINE void add_up(const u8* payloads, const void* own, u64 numel, u64 ranks, u64 me, u64 slot,
                      float* out, u64 dtype, float* residual) {
    Layout layout(numel);
    u64 tile = warp_id();
    if (tile >= layout.tiles) return;
    Place place;
    Four held[ROUNDS];
#pragma unroll
    for (int i = 0; i < ROUNDS; ++i) held[i] = Four{-0.0f, -0.0f, -0.0f, -0.0f};  // changes nothing
    add_ranks<FEEDBACK>(held, payloads, own, numel, ranks, me, slot, dtype, residual, tile, layout);
#pragma unroll
    for (int i = 0; i < ROUNDS; ++i) {
        write_fp32(held[i], out, opaque(tile) * TILE + place.value(i), numel);
    }
}

// `add_ranks`, encoded into `out`. With FEEDBACK there may also be the residual `owner`, which the sum
// begins with and which becomes what the encoding leaves out.
template <bool FEEDBACK>
HC_INLINE void reduce(const u8* payloads, const void* own, u64 numel, u64 ranks, u64 me, u64 slot,
                      u8* out, u64 dtype, float* residual, float* owner) {
    Layout layout(numel);
    u64 tile = warp_id();
    if (tile >= layout.tiles) return;
    Place place;
    Four held[ROUNDS];
    clear(held);
    if (FEEDBACK && owner) {
#pragma unroll
        for (int i = 0; i < ROUNDS; ++i) held[i] = read_fp32(owner, tile * TILE + place.value(i), numel);
    }
    add_ranks<FEEDBACK>(held, payloads, own, numel, ranks, me, slot, dtype, residual, tile, layout);
#pragma unroll
    for (int i = 0; i < ROUNDS; ++i) {
        if (dtype == 2) {
            held[i] = Four{show_half(held[i].x), show_half(held[i].y), show_half(held[i].z),
                           show_half(held[i].w)};
        }
    }
    if constexpr (FEEDBACK) {
        encode_tile<true>(held, opaque(tile), numel, layout, out, Feedback{owner, dtype});
    } else {
        encode_tile<false>(held, tile, numel, layout, out, NoFeedback());
    }
}

}  // namespace blockint
}  // namespace hybridcomp

// `dtype`: 0 fp32, 1 bf16, 2 fp16 (kernels/cpu.h).
extern "C" __global__ void __launch_bounds__(256)
blockint_encode(const void* values, unsigned long long numel, unsigned long long chunk,
                unsigned long long slot, unsigned long long skip, unsigned char* out,
                unsigned long long dtype) {
    hybridcomp::blockint::encode<false>(values, numel, chunk, slot, skip, out, dtype, nullptr);
}

extern "C" __global__ void __launch_bounds__(256)
blockint_encode_feedback(const void* values, unsigned long long numel, unsigned long long chunk,
                         unsigned long long slot, unsigned long long skip, unsigned char* out,
                         unsigned long long dtype, float* residual) {
    hybridcomp::blockint::encode<true>(values, numel, chunk, slot, skip, out, dtype, residual);
}

extern "C" __global__ void __launch_bounds__(256)
blockint_reduce(const unsigned char* payloads, const void* own, unsigned long long numel,
                unsigned long long ranks, unsigned long long me, unsigned long long slot,
                unsigned char* out, unsigned long long dtype) {
    hybridcomp::blockint::reduce<false>(payloads, own, numel, ranks, me, slot, out, dtype, nullptr,
                                        nullptr);
}

// Two blocks a multiprocessor: left to itself, the compiler spills to make room for a third.
extern "C" __global__ void __launch_bounds__(256, 2)
blockint_reduce_feedback(const unsigned char* payloads, const void* own, unsigned long long numel,
                         unsigned long long ranks, unsigned long long me, unsigned long long slot,
                         unsigned char* out, unsigned long long dtype, float* residual,
                         float* owner) {
    hybridcomp::blockint::reduce<true>(payloads, own, numel, ranks, me, slot, out, dtype, residual,
                                       owner);
}

extern "C" __global__ void __launch_bounds__(256)
blockint_sum(const unsigned char* payloads, const void* own, unsigned long long numel,
             unsigned long long ranks, unsigned long long me, unsigned long long slot, float* out,
             unsigned long long dtype) {
    hybridcomp::blockint::add_up<false>(payloads, own, numel, ranks, me, slot, out, dtype, nullptr);
}

extern "C" __global__ void __launch_bounds__(256)
blockint_sum_feedback(const unsigned char* payloads, const void* own, unsigned long long numel,
                      unsigned long long ranks, unsigned long long me, unsigned long long slot,
                      float* out, unsigned long long dtype, float* residual) {
    hybridcomp::blockint::add_up<true>(payloads, own, numel, ranks, me, slot, out, dtype, residual);
}

#define HC_DECODE(NAME, T)                                                                       \
    extern "C" __global__ void __launch_bounds__(256)                                            \
    blockint_decode_##NAME(const unsigned char* in, unsigned long long numel,                    \
                           unsigned long long chunk, unsigned long long slot,                    \
                           unsigned long long skip, void* out) {                                 \
        hybridcomp::blockint::decode<hybridcomp::T, false>(in, numel, chunk, slot, skip, out);   \
    }
HC_DECODE(fp32, Fp32)
HC_DECODE(bf16, BFloat16)
HC_DECODE(fp16, Float16)

extern "C" __global__ void __launch_bounds__(256)
blockint_add(const unsigned char* in, unsigned long long numel, unsigned long long chunk,
             unsigned long long slot, unsigned long long skip, void* out) {
    hybridcomp::blockint::decode<hybridcomp::Fp32, true>(in, numel, chunk, slot, skip, out);
}
