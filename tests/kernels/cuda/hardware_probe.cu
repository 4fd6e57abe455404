// Every function of hardware.h that lanes, words and numbers go through, each with a row of `out` for itself:
// what forms of it must agree on. `a` and `b`: a word for each thread; a row has as many as there are.
#include "hardware.h"

using namespace hybridcomp;

namespace {

struct Rows {
    u32* out;
    u64 threads;
    HC_INLINE_MEMBER void put(u32 value) {
        *out = value;
        out += threads;
    }
};

// Numbers around 1, neither NaN nor Inf.
HC_INLINE float number(u32 word) { return bits_float((word & 0x87ffffffu) | 0x38000000u); }

HC_INLINE void probe_lanes(Rows& rows, u32 a, u32 b) {
    u32 lane = lane_id();
    rows.put(ballot(a & 1)), rows.put(any_in_warp(a > 0xf8000000u)), rows.put(ballot(true));
    rows.put(lane_value(a, b)), rows.put(exchanged(a, 5)), rows.put(lane_before(a, 3));
    rows.put(plus_lane_before(a, 7)), rows.put(other_lane<16>(a));
    rows.put(largest_in_warp(a)), rows.put(union_in_warp(a & b));
    sync_warp();
    // the warps of a wave part ways
    u32 mine = threadIdx.x / WARP % 2 ? ballot(b & 1) : 0;
    rows.put(threadIdx.x / WARP % 2 ? mine : lane_value(b, lane ^ 1));
}

HC_INLINE void probe_words(Rows& rows, u32 a, u32 b) {
    rows.put(ones_in(a)), rows.put(leading_zeros(a)), rows.put(leading_zeros(0)), rows.put(lowest_bit(a | 1));
    rows.put(high_product(a, b)), rows.put(log2_floor(a | 1)), rows.put((u32)reverse_bytes((u64)a << 32 | b));
    rows.put(pick_bytes(a, b, 0x6240)), rows.put(pick_bytes(a, b, 0x7351)), rows.put(pick_bytes(a, b, 0x2367));
    rows.put(pick_bytes(a, b, b & 0x7777u)), rows.put(anew(a));
    for (u32 shift = 0; shift < 32; ++shift) {
        rows.put(funnel_right(a, b, shift)), rows.put(funnel_left(a, b, shift));
        rows.put((u32)dropped((u64)a << 32 | b, shift));
    }
    rows.put(shifted_left(a, b % 64)), rows.put(choose_bits(b, a, ~a)), rows.put(largest_pair(a, b));
}

HC_INLINE void probe_numbers(Rows& rows, float a, float b) {
    rows.put(float_bits(sum_apart(a, b))), rows.put(float_bits(plus_signed(a, -1.0f, b)));
    rows.put(float_bits(product_down(bits_float(magnitude_bits(a)), bits_float(magnitude_bits(b)))));
    rows.put(narrow_bf16(a, b)), rows.put(narrow_fp16(a, b));
    rows.put(float_bits(widen_fp16(narrow_fp16(a, b) & 0xffffu)));
    rows.put(float_bits(larger_magnitude(a, b)) & MAGNITUDE);
    u32 brains = narrow_bf16(a, b), more = narrow_bf16(b, a);
    u32 halves = narrow_fp16(a, b), others = narrow_fp16(b, a);
    rows.put(larger_pair_bf16(brains, more) & 0x7fff7fffu), rows.put(difference_bf16(brains, more));
    rows.put(larger_pair_fp16(halves, others) & 0x7fff7fffu), rows.put(difference_fp16(halves, others));
    // subnormals are neither flushed where they are made nor where they are read
    float tiny = bits_float(magnitude_bits(a) >> 8 & 0x7fffffu);
    rows.put(float_bits(tiny * 0.5f)), rows.put(float_bits(tiny + tiny)), rows.put(float_bits(1.0f / a));
}

HC_INLINE void probe_memory(Rows& rows, const u32* from, u64* states) {
    __shared__ uint4 words[256 / 4];
    __shared__ struct alignas(256) { float values[16]; } table;
    u32 thread = threadIdx.x, quad = thread / 4;
    if (thread % 4 == 0) fetch16(shared_at(words + quad), from + 4 * quad);
    close_fetch();
    await_fetches<0>();
    sync_warp();
    rows.put(((const u32*)words)[thread]);
    sync_warp();
    fetch4(shared_at((u32*)words + thread), from + (thread ^ 1));
    await_all_fetches();
    sync_warp();
    rows.put(((const u32*)words)[thread]);
    if (thread < 16) table.values[thread] = (float)thread + 0.5f;
    __syncthreads();
    u32 levels = 0x3c080400u ^ (thread % 16) * 4;
    rows.put(float_bits(in_table<0>(table.values, levels, table_place(table.values))));
    rows.put(float_bits(in_table<3>(table.values, levels, table_place(table.values))));
    publish(states + thread, ((u64)thread << 32) + 5);
    rows.put((u32)(load_state(states + thread) >> 32));
}

}  // namespace

extern "C" __global__ void HC_BOUNDS(256, 1)
hardware_probe(const unsigned* a, const unsigned* b, unsigned* out, unsigned long long* states) {
    u32 thread = threadIdx.x;
    Rows rows{out + thread, blockDim.x};
    probe_lanes(rows, a[thread], b[thread]);
    probe_words(rows, a[thread], b[thread]);
    probe_numbers(rows, number(a[thread]), number(b[thread]));
    probe_memory(rows, a, (u64*)states);
}
