// CPU loops of mpc. Whole chunks are transposed on eight lanes, a partial last one by mpc.h; tests compare
// both with one reference. Each thread encodes a contiguous share of the chunks, to the place of its words if none
// were dropped; then the shares move together. The bytes do not depend on the number of threads.
#include <vector>

#include "cpu_mpc.h"
#include "mpc.h"

namespace hybridcomp {
namespace mpc {
namespace {

struct Layout {
    size_t words, groups, chunks, data;
    Layout(size_t numel, int dtype)
        : words(dtype == 0 ? numel : ceil_div(numel, 2)), groups(ceil_div(words, GROUP)),
          chunks(ceil_div(words, CHUNK)), data(HEADER_WORDS + groups) {}
    size_t groups_before(size_t chunk) const {
        size_t group = chunk * (CHUNK / GROUP);
        return group < groups ? group : groups;
    }
};

// mpc::transpose of 32 groups. g++ unrolls that function's loops instead of vectorizing them, which took
// three quarters of the encoding time (64 of 88 ns a group).
HC_INLINE void transpose_chunk(u32* words) {
    for (int g = 0; g < CHUNK; g += GROUP) {
        U8 v[4];
        for (int i = 0; i < 4; ++i) v[i] = load_lanes<U8>(words + g + 8 * i);
        transpose_stage_lanes<4>(v);
        transpose_stage_lanes<3>(v);
        transpose_stage_lanes<2>(v);
        transpose_stage_lanes<1>(v);
        transpose_stage_lanes<0>(v);
        for (int i = 0; i < 4; ++i) store_lanes(v[i], words + g + 8 * i);
    }
}

HC_INLINE void encode_whole(const u32* words, int dim, u32* d) {
    u32 transposed[CHUNK];
    subtract_before(words, dim, transposed);
    transpose_chunk(transposed);
    subtract_before(transposed, 1, d);
}

// Encodes chunks begin..end; returns the words kept. `bytes` is the length of the values.
HC_INLINE size_t encode_chunks(const u8* in, size_t bytes, int dim, u32* bitmap, u32* out,
                               size_t begin, size_t end) {
    size_t kept = 0;
    for (size_t chunk = begin; chunk < end; ++chunk) {
        size_t first = chunk * CHUNK * 4, left = bytes - first;
        u32 words[CHUNK], d[CHUNK];
        size_t size = left < sizeof(words) ? left : sizeof(words);
        memcpy(words, in + first, size);
        if (size < sizeof(words)) memset((u8*)words + size, 0, sizeof(words) - size);
        size_t count = ceil_div(size, 4);
        if (count < (size_t)CHUNK) {
            // past the end the differences are zero, not the words: choose the words accordingly
            for (size_t i = count; i < CHUNK; ++i) words[i] = i < (size_t)dim ? 0 : words[i - dim];
        }
        if (count == (size_t)CHUNK) encode_whole(words, dim, d);
        else encode_block(words, dim, d);
        int groups = (int)ceil_div(count, GROUP);
        for (int g = 0; g < groups; ++g) {
            u32 number;
            bitmap[chunk * (CHUNK / GROUP) + g] = drop_zeros(d + g * GROUP, out + kept, number);
            kept += number;
        }
        // v1.2 tests all 1024 words: after a partial group one more may be nonzero
        if (groups * GROUP < CHUNK && d[groups * GROUP] != 0) out[kept++] = d[groups * GROUP];
    }
    return kept;
}

HC_INLINE void decode_chunk(const u32* bitmap, int groups, const u32*& data, int dim, u32* words) {
    u32 sum = 0;
    for (int g = 0; g < groups; ++g) {
        sum = restore(data, bitmap[g], sum, words + g * GROUP);
        data += __builtin_popcount(bitmap[g]);
    }
    if (groups * GROUP == CHUNK) {
        transpose_chunk(words);
        add_before(words, dim);
        return;
    }
    for (int i = groups * GROUP; i < CHUNK; ++i) words[i] = 0;
    decode_block(words, dim);
}

template <class T>
HC_INLINE void add_values(const u32* words, size_t count, float* out) {
    const auto* values = (const typename T::Stored*)words;
    for (size_t i = 0; i < count; ++i) out[i] += T::load(values[i]);
}

struct Message {
    const u32* bitmap;
    const u32* data;  // of the first chunk of the share
    size_t numel, groups;
    int dtype, dim;
    bool add;
};

HC_INLINE void decode_chunks(const Message& message, u8* out, size_t begin, size_t end) {
    const u32* data = message.data;
    size_t item = item_nbytes(message.dtype), values = CHUNK * 4 / item;
    for (size_t chunk = begin; chunk < end; ++chunk) {
        size_t group = chunk * (CHUNK / GROUP), first = chunk * values;
        size_t groups = message.groups - group < 32 ? message.groups - group : 32;
        size_t count = message.numel - first < values ? message.numel - first : values;
        u32 words[CHUNK];
        decode_chunk(message.bitmap + group, (int)groups, data, message.dim, words);
        if (!message.add) {
            memcpy(out + first * item, words, count * item);
        } else if (message.dtype == 0) {
            add_values<Fp32>(words, count, (float*)out + first);
        } else if (message.dtype == 1) {
            add_values<BFloat16>(words, count, (float*)out + first);
        } else {
            add_values<Float16>(words, count, (float*)out + first);
        }
    }
}

HC_CLONES size_t encode_share(const u8* in, size_t bytes, int dim, u32* bitmap, u32* out,
                              size_t begin, size_t end) {
    return encode_chunks(in, bytes, dim, bitmap, out, begin, end);
}

HC_CLONES void decode_share(const Message& message, u8* out, size_t begin, size_t end) {
    decode_chunks(message, out, begin, end);
}

// A payload may begin at any byte, but loops read and write its words in place.
bool is_misaligned(const u8* payload) { return (size_t)payload % alignof(u32) != 0; }

HC_CLONES size_t count_bits(const u32* words, size_t count) {
    size_t bits = 0;
    for (size_t i = 0; i < count; ++i) bits += (size_t)__builtin_popcount(words[i]);
    return bits;
}

}  // namespace

size_t wire_nbytes(size_t numel, int dtype) {
    Layout layout(numel, dtype);
    return numel ? align16(4 * (layout.data + layout.groups * GROUP + 1)) : 0;
}

size_t encode(int dim, int dtype, const void* in, size_t numel, u8* out, int threads) {
    if (numel == 0) return 0;
    if (is_misaligned(out)) {
        std::vector<u32> aligned(wire_nbytes(numel, dtype) / 4);
        size_t nbytes = encode(dim, dtype, in, numel, (u8*)aligned.data(), threads);
        memcpy(out, aligned.data(), nbytes);
        return nbytes;
    }
    Layout layout(numel, dtype);
    u32* words = (u32*)out;
    u32* data = words + layout.data;
    words[0] = header_word((u32)dtype, (u32)dim);
    words[1] = (u32)numel;
    size_t bytes = numel * item_nbytes(dtype);
    std::vector<size_t> kept(layout.chunks, 0);  // at the first chunk of each share
    parallel_ranges(layout.chunks, CHUNK, threads, [&](size_t begin, size_t end) {
        kept[begin] = encode_share((const u8*)in, bytes, dim, words + HEADER_WORDS,
                                   data + begin * CHUNK, begin, end);
    });
    size_t used = 0;
    for (size_t chunk = 0; chunk < layout.chunks; ++chunk) {
        if (kept[chunk] == 0) continue;
        memmove(data + used, data + chunk * CHUNK, kept[chunk] * 4);
        used += kept[chunk];
    }
    size_t nbytes = 4 * (layout.data + used);
    pad(out, nbytes, align16(nbytes));
    return align16(nbytes);
}

void decode(int dim, int dtype, const u8* in, size_t nbytes, void* out, size_t numel, bool add,
            int threads) {
    if (numel == 0) return;
    if (is_misaligned(in)) {
        std::vector<u32> aligned(ceil_div(nbytes, 4));
        if (nbytes) memcpy(aligned.data(), in, nbytes);
        decode(dim, dtype, (const u8*)aligned.data(), nbytes, out, numel, add, threads);
        return;
    }
    Layout layout(numel, dtype);
    const u32* words = (const u32*)in;
    require(nbytes >= 4 * layout.data, "mpc: payload is too short for its bitmap");
    require(words[0] == header_word((u32)dtype, (u32)dim),
            "mpc: payload was encoded with another dtype or dim, or is not one of mpc");
    require(words[1] == (u32)numel, "mpc: payload holds another number of values");
    const u32* bitmap = words + HEADER_WORDS;
    require(nbytes / 4 - layout.data >= count_bits(bitmap, layout.groups),
            "mpc: payload is too short for its words");
    parallel_ranges(layout.chunks, CHUNK, threads, [&](size_t begin, size_t end) {
        size_t before = count_bits(bitmap, layout.groups_before(begin));
        Message message = {bitmap, words + layout.data + before, numel, layout.groups,
                           dtype,  dim,                          add};
        decode_share(message, (u8*)out, begin, end);
    });
}

}  // namespace mpc
}  // namespace hybridcomp
