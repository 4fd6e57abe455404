// A tile of blockint in the registers of a warp, for HC_BITS bits, HC_GAUSSIAN levels or not, HC_ROTATE
// or not: 32 of its 1024 values in each lane, so that nothing is read twice. Eight lanes share a block
// of 32 values, four consecutive values each, so that values move as 16 (bf16: 8) bytes a lane; a 4 x 4
// transpose of bytes, two shuffles, turns these into the words of blockint.h. An iteration handles
// four blocks.
//
// Lane 8 g + 2 m + h of iteration i has values 8 m + 4 h ... + 3 of block 4 i + g, and after the
// transpose word 4 h + m of it.
#pragma once

#include "cuda_device.h"

#include "blockint.h"
#include "rotation.h"

#ifndef HC_BITS
#define HC_BITS 8
#endif
#ifndef HC_GAUSSIAN
#define HC_GAUSSIAN 0
#endif
#ifndef HC_ROTATE
#define HC_ROTATE 0
#endif

namespace hybridcomp {
namespace blockint {

constexpr int ROUNDS = 8;  // iterations of a tile
constexpr bool GAUSSIAN = HC_GAUSSIAN;

struct Place {
    u32 group, part, row, half;
    HC_INLINE_MEMBER Place()
        : group(lane_id() / 8), part(lane_id() % 8), row(lane_id() % 8 / 2), half(lane_id() % 2) {}
    // of this lane's values in the tile
    HC_INLINE_MEMBER u32 value(int round) const { return (round * 4 + group) * BLOCK + part * 4; }
};

struct Layout {
    u64 blocks, tiles, scales, bases, used, total;
    HC_INLINE_MEMBER explicit Layout(u64 numel)
        : blocks(ceil_div(numel, BLOCK)), tiles(ceil_div(numel, TILE)),
          scales(blocks * 4 * HC_BITS), bases(scales + blocks), used(bases + tiles),
          total(align16(used)) {}
};

// Byte i of row m <-> byte m of row i, over lanes that differ in m; its own inverse.
HC_INLINE u32 transpose_bytes(u32 word, u32 row) {
    u32 other = other_lane<2>(word);
    word = __byte_perm(word, other, row & 1 ? 0x3715 : 0x6240);
    other = other_lane<4>(word);
    return __byte_perm(word, other, row & 2 ? 0x3276 : 0x5410);
}

// The words of a field of WIDTH bits at SHIFT; `index` is which word of the levels this lane has.
template <int WIDTH, int SHIFT>
HC_INLINE void store_field(u32 word, u32 index, bool write, u32* out) {
    u32 field = ((word >> SHIFT) & field_mask<WIDTH>()) << (index / WIDTH * WIDTH);
    if constexpr (WIDTH == 4) field = union_of<1>(field);
    if constexpr (WIDTH == 2) field = union_of<1, 4>(field);
    if constexpr (WIDTH == 1) field = union_of<1, 2, 4>(field);
    if (write && index < WIDTH) out[index] = field;
}

template <int WIDTH, int SHIFT>
HC_INLINE u32 load_field(const u32* in, u32 index) {
    return ((in[index % WIDTH] >> (index / WIDTH * WIDTH)) & field_mask<WIDTH>()) << SHIFT;
}

// Word `index` of a block's levels into its HC_BITS words at `out`, and back.
HC_INLINE void store_word(u32 word, u32 index, bool write, u32* out) {
    if constexpr (HC_BITS == 8) {
        if (write) out[index] = word;
    }
    if constexpr ((HC_BITS & 4) != 0) store_field<4, HC_BITS & 3>(word, index, write, out);
    if constexpr ((HC_BITS & 2) != 0) {
        store_field<2, HC_BITS & 1>(word, index, write, out + (HC_BITS & 4));
    }
    if constexpr ((HC_BITS & 1) != 0) store_field<1, 0>(word, index, write, out + (HC_BITS & 6));
}

HC_INLINE u32 load_word(const u32* in, u32 index) {
    u32 word = 0;
    if constexpr (HC_BITS == 8) word = in[index];
    if constexpr ((HC_BITS & 4) != 0) word |= load_field<4, HC_BITS & 3>(in, index);
    if constexpr ((HC_BITS & 2) != 0) word |= load_field<2, HC_BITS & 1>(in + (HC_BITS & 4), index);
    if constexpr ((HC_BITS & 1) != 0) word |= load_field<1, 0>(in + (HC_BITS & 6), index);
    return word;
}

// A stage of rotation.h over lanes that differ in MASK.
template <int MASK>
HC_INLINE Four stage_lanes(Four v) {
    Four other = {bits_float(other_lane<MASK>(float_bits(v.x))),
                  bits_float(other_lane<MASK>(float_bits(v.y))),
                  bits_float(other_lane<MASK>(float_bits(v.z))),
                  bits_float(other_lane<MASK>(float_bits(v.w)))};
    if ((lane_id() & MASK) == 0) return sum(v, other);
    return Four{other.x - v.x, other.y - v.y, other.z - v.z, other.w - v.w};
}

// rotation::transform: sixteen lanes hold a group, this one the four values from 4 * (lane % 16) on.
HC_INLINE Four transform_lanes(Four v) {
    v = Four{v.x + v.y, v.x - v.y, v.z + v.w, v.z - v.w};
    v = Four{v.x + v.z, v.y + v.w, v.x - v.z, v.y - v.w};
    return stage_lanes<8>(stage_lanes<4>(stage_lanes<2>(stage_lanes<1>(v))));
}

HC_INLINE Four with_signs(Four v) {
    int first = 4 * (int)(lane_id() % 16);
    return Four{rotation::with_sign(v.x, first), rotation::with_sign(v.y, first + 1),
                rotation::with_sign(v.z, first + 2), rotation::with_sign(v.w, first + 3)};
}

HC_INLINE Four scaled(Four v, float by) { return Four{v.x * by, v.y * by, v.z * by, v.w * by}; }

// Whether the group of 64 values around value `at` of the message is whole.
HC_INLINE bool in_group(u64 at, u64 count) { return at / 64 * 64 + 64 <= count; }

HC_INLINE Four rotated(Four v, bool whole) {
    if constexpr (!HC_ROTATE) return v;
    Four y = transform_lanes(scaled(with_signs(v), rotation::FORWARD_SCALE));
    return whole ? y : v;
}

HC_INLINE Four rotated_back(Four v, bool whole) {
    if constexpr (!HC_ROTATE) return v;
    Four x = with_signs(transform_lanes(scaled(v, rotation::BACK_SCALE)));
    x = scaled(x, 1.0f / rotation::BACK_SCALE);
    return whole ? Four{finite(x.x), finite(x.y), finite(x.z), finite(x.w)} : v;
}

// Four levels -> values, still rotated.
HC_INLINE Four dequantized(u32 word, u32 code, u32 base) {
    float step = step_of<HC_BITS, GAUSSIAN>(code, base);
    bool overflow = 16 * base + 15 - code >= OVERFLOW_TOP && code != NONFINITE_CODE;
    if (overflow) step = half_top(code, base) * (GAUSSIAN ? 1.0f : 1.0f / (float)top_level(HC_BITS));
    Four v = {dequantize<HC_BITS, GAUSSIAN>(word & 255u, step),
              dequantize<HC_BITS, GAUSSIAN>(word >> 8 & 255u, step),
              dequantize<HC_BITS, GAUSSIAN>(word >> 16 & 255u, step),
              dequantize<HC_BITS, GAUSSIAN>(word >> 24, step)};
    if (!overflow) return v;
    return Four{finite(v.x * 2.0f), finite(v.y * 2.0f), finite(v.z * 2.0f), finite(v.w * 2.0f)};
}

HC_INLINE Four read_fp32(const float* at, u64 index, u64 count) {
    return read4<Fp32>(at, index, count, vectorizable<Fp32>(at));
}

HC_INLINE void write_fp32(Four v, float* at, u64 index, u64 count) {
    write4<Fp32>(v, at, index, count, vectorizable<Fp32>(at));
}

// Rounded to T.
template <class T>
HC_INLINE Four through(Four v) {
    return Four{T::load(T::store(v.x)), T::load(T::store(v.y)), T::load(T::store(v.z)),
                T::load(T::store(v.w))};
}

// What a message leaves out; 0 where that is not finite: an overflow must not stay for ever.
HC_INLINE float left_out(float value, float sent) {
    float left = value - sent;
    return magnitude_bits(left) < INF_BITS ? left : 0.0f;
}

// The values that a tile is made of, and what becomes of its residual. Rotated values take the
// registers of the values, which then wait where the residual will stand.
struct NoFeedback {
    HC_INLINE_MEMBER void keep(Four, u64, u64) {}
    HC_INLINE_MEMBER void settle(Four, Four, u64, u64) {}
};

// `dtype`: what receivers round to, by its code.
struct Feedback {
    float* residual;
    u64 dtype;
    HC_INLINE_MEMBER void keep(Four values, u64 at, u64 count) {
        if (HC_ROTATE && residual) write_fp32(values, residual, at, count);
    }
    HC_INLINE_MEMBER void settle(Four values, Four sent, u64 at, u64 count) {
        if (!residual) return;
        if (HC_ROTATE) values = read_fp32(residual, at, count);
        if (dtype == 1) sent = through<BFloat16>(sent);
        if (dtype == 2) sent = through<Float16>(sent);
        Four left = {left_out(values.x, sent.x), left_out(values.y, sent.y),
                     left_out(values.z, sent.z), left_out(values.w, sent.w)};
        write_fp32(left, residual, at, count);
    }
};

// A tile in registers -> its place in the payload. Lanes beyond the last block write nothing.
template <bool SETTLE, class F>
HC_INLINE void encode_tile(Four* values, u64 tile, u64 count, const Layout& layout, u8* out,
                           F feedback) {
    Place place;
    if constexpr (HC_ROTATE) {
#pragma unroll
        for (int i = 0; i < ROUNDS; ++i) {
            u64 at = tile * TILE + place.value(i);
            feedback.keep(values[i], at, count);
            values[i] = rotated(values[i], in_group(at, count));
        }
    }
    u32 absmax[ROUNDS], largest = 0;
#pragma unroll
    for (int i = 0; i < ROUNDS; ++i) {
        u32 top = magnitude_bits(values[i].x), next = magnitude_bits(values[i].y);
        top = next > top ? next : top;
        next = magnitude_bits(values[i].z);
        top = next > top ? next : top;
        next = magnitude_bits(values[i].w);
        absmax[i] = largest_of<1, 2, 4>(next > top ? next : top);
        if (absmax[i] < INF_BITS && absmax[i] > largest) largest = absmax[i];
    }
    u32 base = base_of(largest_of<8, 16>(largest));
    u32 index = 4 * place.half + place.row;
#pragma unroll
    for (int i = 0; i < ROUNDS; ++i) {
        u64 block = tile * TILE_BLOCKS + i * 4 + place.group;
        u32 code = scale_code<GAUSSIAN>(absmax[i], base);
        float inverse = inverse_step<HC_BITS, GAUSSIAN>(code == NONFINITE_CODE ? 0 : code, base);
        u32 word = quantize<HC_BITS, GAUSSIAN>(values[i].x, inverse) |
                   quantize<HC_BITS, GAUSSIAN>(values[i].y, inverse) << 8 |
                   quantize<HC_BITS, GAUSSIAN>(values[i].z, inverse) << 16 |
                   quantize<HC_BITS, GAUSSIAN>(values[i].w, inverse) << 24;
        word = code == NONFINITE_CODE ? 0 : word;
        if constexpr (SETTLE) {
            u64 at = tile * TILE + place.value(i);
            Four sent = rotated_back(dequantized(word, code, base), in_group(at, count));
            feedback.settle(values[i], sent, at, count);
        }
        word = transpose_bytes(word, place.row);
        bool write = block < layout.blocks;
        store_word(word, index, write, (u32*)out + block * HC_BITS);
        if (write && place.part == 0) out[layout.scales + block] = (u8)code;
    }
    if (lane_id() == 0) out[layout.bases + tile] = (u8)base;
    if (tile + 1 == layout.tiles) pad_payload(out, layout.used, layout.total);
}

// This lane's four values of one iteration, of `count` in the message.
HC_INLINE Four decode_four(const u8* in, u64 block, u32 base, const Layout& layout, u64 count,
                           const Place& place) {
    bool there = block < layout.blocks;
    u32 code = there ? in[layout.scales + block] : 0;
    u32 word = there ? load_word((const u32*)in + block * HC_BITS, 4 * place.half + place.row) : 0;
    word = transpose_bytes(word, place.row);
    Four v = dequantized(word, code, base);
    if (!there) v = Four{0.0f, 0.0f, 0.0f, 0.0f};  // a sum of it would be encoded
    return rotated_back(v, in_group(block * BLOCK, count));
}

}  // namespace blockint
}  // namespace hybridcomp
