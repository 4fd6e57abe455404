// Decoder of topk: the place of value i follows from the bit that ends its gap, from i, and from the sum of the
// low bits of all gaps up to it. A thread block decodes a range of these bits, and looks back twice: for the
// number of values before it, and for the sum of their low bits.
#pragma once

#include "topk_bits.h"

namespace hybridcomp {
namespace topk {

constexpr u32 BLOCK_BITS = 32 * THREADS;  // of gaps: a word a thread; in topk.py, too

struct Message {
    u32 kept, unary;
    bool good;
    Sections at;
    HC_INLINE_MEMBER Message(const u8* in, u64 nbytes, u64 numel, const Settings& settings)
        : kept(0), unary(0), good(nbytes >= HEADER && nbytes % 16 == 0), at(numel, 0, 0, 0, 0) {
        if (!good) return;
        const u32* header = (const u32*)in;
        kept = header[0], unary = header[1];
        good = header[2] == numel && kept <= numel && kept <= unary && unary <= 0x7fffffffu;
        at = Sections(numel, kept, unary, settings.rice, settings.bits);
        good = good && nbytes >= at.end;
    }
    HC_INLINE_MEMBER u16 scale(const u8* in, u64 place) const {
        return ((const u16*)(in + at.scales))[place / CHUNK];
    }
};

HC_INLINE bool is_broken(u16 scale) { return (scale & 0x7fff) > 0x7f80; }

// Fills chunks without kept values: with NaN, or with 0 unless values are added.
template <class T, bool ADD>
HC_INLINE void clear(Settings settings, const u8* in, u64 nbytes, u64 numel, void* target, u32* damage) {
    Message message(in, nbytes, numel, settings);
    u64 first = (u64)blockIdx.x * CHUNK;
    bool broken = message.good && is_broken(message.scale(in, first));
    if (!message.good && blockIdx.x == 0) report_damage(damage);
    if (ADD && !broken) return;
    auto* out = (typename T::Stored*)target + first;
    u64 count = numel - first < CHUNK ? numel - first : CHUNK;
    for (u64 i = threadIdx.x; i < count; i += blockDim.x) {
        out[i] = T::store(broken ? bits_float(QUIET_NAN_BITS) : 0.0f);
    }
}

// `work` has two states for each block of the grid.
template <class T, bool ADD>
HC_INLINE void decode(Settings settings, const u8* in, u64 nbytes, u64 numel, void* target,
                      Workspace* work, u32* damage) {
    __shared__ Lengths<WARPS> shared;
    u32 group = take_ticket(work), rice = settings.rice;
    Message message(in, nbytes, numel, settings);
    u64 begin = (u64)group * BLOCK_BITS, bit = begin + 32 * threadIdx.x;
    if (!message.good || begin >= message.unary) return;  // the whole block, and all behind it
    u32 left = bit < message.unary ? message.unary - (u32)bit : 0;
    u32 ends = left ? get_bits(in, nbytes, 8 * message.at.unary + bit, left < 32 ? left : 32) : 0;
    u32 mine = ones_in(ends), included = scan_lanes(mine), total;
    u32 before = shared.look(work->states, group, lane_value(included, WARP - 1), total);
    u32 index = before + included - mine, all = shared.place + total, low = 0;
    for (u32 i = index; i < index + mine; ++i) {
        low += rice ? get_bits(in, nbytes, 8 * message.at.low + (u64)i * rice, rice) : 0;
    }
    included = scan_lanes(low);
    before = shared.look(work->states + gridDim.x, group, lane_value(included, WARP - 1), total);
    low = before + included - low;
    bool good = begin + BLOCK_BITS < message.unary || all == message.kept;
    float most = T::load(T::store(bits_float(MAX_FINITE_BITS)));  // of the dtype
    auto* out = (typename T::Stored*)target;
    for (u32 i = index; ends; ends &= ends - 1, ++i) {
        low += rice ? get_bits(in, nbytes, 8 * message.at.low + (u64)i * rice, rice) : 0;
        u64 place = ((bit + lowest_bit(ends) - i) << rice) + low + i;
        if (i >= message.kept || place >= numel) {
            good = false;
            break;
        }
        u16 scale = message.scale(in, place);
        u32 code = get_bits(in, nbytes, 8 * message.at.codes + (u64)i * settings.bits, settings.bits);
        float value = value_of(code, bf16_to_float(scale), (int)settings.bits, most);
        if (!is_broken(scale)) out[place] = T::store(ADD ? T::load(out[place]) + value : value);
    }
    if (!good) atomicOr(damage, 1u);
}

}  // namespace topk
}  // namespace hybridcomp
