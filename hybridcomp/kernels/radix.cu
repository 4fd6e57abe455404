// CUDA kernels of radix: 256 threads take a tile, a thread a block of 16 values in registers. A tile is
// put together in shared memory, where its place in bits needs no alignment, and leaves as words.
#include "cuda_tiles.h"

#include "radix.h"

namespace hybridcomp {
namespace radix {

constexpr int THREADS = 256;
static_assert(THREADS == MAX_BLOCKS, "a thread for each block of the largest tile");
// header, mask, six planes, all blocks raw
constexpr int MOST_WORDS = (TILE_HEADER_BYTES + 7 * MAX_BLOCKS / 8) / 4 + MAX_TILE + 2;

__device__ const Tables TABLES = make_tables();

// What a dtype adds to encoding: how far its own rounding may carry an error.
template <class T, int MANTISSA, int LOWEST>
struct Rounded : T {
    static constexpr bool NARROW = true;
    static constexpr u32 RAW_BITS = 16;
    HC_INLINE float half(float limit, u32 absmax) {
        return rounded_limit(limit, absmax, MANTISSA, LOWEST);
    }
};
template <class T>
struct Narrow : Rounded<T, 7, 1> {};
template <>
struct Narrow<Float16> : Rounded<Float16, 10, 113> {};
template <>
struct Narrow<Fp32> : Fp32 {
    static constexpr bool NARROW = false;
    static constexpr u32 RAW_BITS = 32;
    HC_INLINE float half(float limit, u32) { return limit; }
};

HC_INLINE u32 stored_bits(float stored) { return float_bits(stored); }
HC_INLINE u32 stored_bits(u16 stored) { return stored; }

// What is said of a message besides where its values are.
struct Message {
    u64 numel, segment;
    float bound;
    bool relative;
};

struct Head {
    u32 base, span, present, raws, bytes;  // bytes: header, mask and planes
    bool masked, mixed;
};

// The words of a class that is not raw, into `buffer` from bit `position` on.
template <int WORDS>
HC_INLINE void put_digits(const u32* digits, u32 levels, u32 bits, u32 position, u32* buffer) {
#pragma unroll
    for (int j = 0; j < WORDS; ++j) {
        u32 word = 0;
#pragma unroll
        for (int i = BLOCK - WORDS + j; i >= WORDS; i -= WORDS) word = (word + digits[i]) * levels;
        put_word(buffer, position + j * bits, word + digits[j]);
    }
}

template <class T>
HC_INLINE void put_block(const u32* digits, const typename T::Stored* source, u64 left, u32 cls,
                         u32 position, u32* buffer) {
    u32 bits = class_bits(cls, Narrow<T>::RAW_BITS), levels = TABLES.classes[cls].levels;
    if (cls < FIRST_PAIR) {
        put_digits<4>(digits, levels, bits, position, buffer);
    } else if (cls < FIRST_SINGLE) {
        put_digits<8>(digits, levels, bits, position, buffer);
    } else if (cls < RAW) {
        put_digits<16>(digits, levels, bits, position, buffer);
    } else {
        for (int i = 0; i < BLOCK; ++i) {
            put_word(buffer, position + i * bits, (u64)i < left ? stored_bits(source[i]) : 0);
        }
    }
}

// Base, span and flags of a tile from the classes of its blocks (RAW + 1: zero).
HC_INLINE Head make_head(u32 cls, u32 blocks, u32& index) {
    bool present = cls <= RAW, coded = cls < RAW;
    u32 top = coded ? cls + 1 : 0, bottom = coded ? RAW - cls : 0;
    largest_in_block(top, bottom);
    Scan counts = scan_block((present ? 1u : 0) | (cls == RAW ? 1u << 16 : 0));
    index = counts.before & 0xffff;
    Head head;
    head.present = counts.total & 0xffff, head.raws = counts.total >> 16;
    head.base = bottom ? RAW - bottom : RAW;
    head.span = top ? top - 1 - head.base : 0;
    head.masked = head.present < blocks;
    head.mixed = head.raws != 0 && top != 0;
    u32 planes = bits_of(head.span + head.mixed);
    head.bytes = TILE_HEADER_BYTES + (head.masked ? (blocks + 7) / 8 : 0) +
                 planes * ((head.present + 7) / 8);
    return head;
}

// Header, mask and planes into `buffer`.
HC_INLINE void put_head(const Head& head, float step, u32 blocks, u32 cls, u32 index, u32* buffer) {
    if (threadIdx.x == 0) {
        put_word(buffer, 0, float_bits(step));
        put_word(buffer, 32, head.base | head.span << 8 |
                                 ((head.masked ? ZEROS : 0) | (head.mixed ? RAWS : 0)) << 16);
    }
    u32 position = 8 * TILE_HEADER_BYTES;
    bool present = cls <= RAW;
    if (head.masked) {
        u32 mask = __ballot_sync(FULL_WARP, present);
        if (lane_id() == 0 && mask) put_word(buffer, position + threadIdx.x, mask);
        position += 8 * ((blocks + 7) / 8);
    }
    if (!present) return;
    u32 field = cls == RAW ? (head.mixed ? head.span + 1 : 0) : cls - head.base;
    for (u32 plane = 0; field >> plane; ++plane) {
        u32 at = position + plane * 8 * ((head.present + 7) / 8) + index;
        if (field >> plane & 1) atomicOr(buffer + at / 32, 1u << at % 32);
    }
}

// The step of a tile, the same for all its threads.
template <class T>
HC_INLINE Step shared_step(const Message& message, u32 absmax) {
    __shared__ Step shared;
    if (threadIdx.x == 0) {
        float limit = error_limit(message.bound, message.relative, absmax);
        shared = make_step(limit, Narrow<T>::half(limit, absmax), absmax);
    }
    __syncthreads();
    return shared;
}

template <class T>
HC_INLINE u32 classify(const float* values, u32 absmax, Step step, u32* digits) {
    u32 cls = class_of(top_level(absmax, step.inverse), last_class(Narrow<T>::RAW_BITS), TABLES);
    if (cls == RAW) return RAW;
    u32 worst = quantize<Narrow<T>>(values, step, TABLES.classes[cls].levels / 2, digits);
    return worst < float_bits(step.limit) ? cls : RAW;
}

template <class T>
HC_INLINE void encode(const void* in, u64 numel, u64 segment, u64 bound, u64 relative, u64 dtype,
                      u8* out, Workspace* work, u64* size) {
    __shared__ u32 buffer[MOST_WORDS];
    __shared__ u32 place;
    Message message = {numel, segment, bits_float((u32)bound), relative != 0};
    u32 tile = take_ticket(work), tiles = (u32)ceil_div(numel, segment), b = threadIdx.x;
    u64 first = tile * segment, count = numel - first < segment ? numel - first : segment;
    u32 blocks = (u32)ceil_div(count, BLOCK);
    const auto* source = (const typename T::Stored*)in + first;
    bool vectors = vectorizable<T>(source);
    float values[BLOCK];
    u32 absmax = 0, finite_top = 0, digits[BLOCK];
#pragma unroll
    for (int i = 0; i < BLOCK; i += 4) {
        Four v = read4<T>(source, (u64)b * BLOCK + i, count, vectors);
        values[i] = v.x, values[i + 1] = v.y, values[i + 2] = v.z, values[i + 3] = v.w;
    }
#pragma unroll
    for (int i = 0; i < BLOCK; ++i) {
        u32 magnitude = magnitude_bits(values[i]);
        absmax = magnitude > absmax ? magnitude : absmax;
        if (magnitude < INF_BITS && magnitude > finite_top) finite_top = magnitude;
    }
    u32 unused = 0;
    largest_in_block(finite_top, unused);
    Step step = shared_step<T>(message, finite_top);
    bool present = b < blocks && absmax > float_bits(step.limit);
    u32 cls = present ? classify<T>(values, absmax, step, digits) : RAW + 1, index;
    Head head = make_head(cls, blocks, index);
    u32 bits = present ? class_bits(cls, Narrow<T>::RAW_BITS) * class_words(cls) : 0;
    Scan positions = scan_block(bits);
    u32 words = head.present ? (8 * head.bytes + positions.total + 31) / 32 : 0;
    for (u32 i = b; i < words; i += THREADS) buffer[i] = 0;
    __syncthreads();
    if (head.present) {
        put_head(head, step.step, blocks, cls, index, buffer);
        if (present) {
            put_block<T>(digits, source + b * BLOCK, count - (u64)b * BLOCK, cls,
                         8 * head.bytes + positions.before, buffer);
        }
    }
    if (b < WARP) {
        u32 before = look_back(work->states, tile, words);
        if (b == 0) place = before;
    }
    __syncthreads();
    u64 data = HEADER_BYTES + 4ull * tiles;
    u32* target = (u32*)(out + data) + place;
    for (u32 i = b; i < words; i += THREADS) target[i] = buffer[i];
    if (b == 0) ((u32*)(out + HEADER_BYTES))[tile] = place;
    if (tile + 1 == tiles) {
        finish_message(out, data, MAGIC, VERSION, (u32)dtype, relative ? 0 : 1, numel, (u32)segment,
                       (u32)bound, place + words, TAIL_BYTES, size);
    }
}

HC_INLINE float widen(u32 word, u32 dtype) {
    if (dtype == 1) return bf16_to_float((u16)word);
    return dtype == 2 ? fp16_to_float((u16)word) : bits_float(word);
}

template <int WORDS>
HC_INLINE void get_digits(const u32* words, u32 position, u32 end, u32 bits, const Class& cls,
                          float step, float* values) {
    u32 mask = bits < 32 ? (1u << bits) - 1 : ~0u, middle = cls.levels / 2;
#pragma unroll
    for (int j = 0; j < WORDS; ++j) {
        u32 word = get_word(words, position + j * bits, end) & mask;
        if constexpr (WORDS == 4) {
            u32 high = divide(word, cls), low = word - high * cls.divisor;
            u32 inverse = small_inverse(cls.levels);
            u32 third = (high * inverse) >> 24, first = (low * inverse) >> 24;
            values[12 + j] = dequantize(third, middle, step);
            values[8 + j] = dequantize(high - third * cls.levels, middle, step);
            values[4 + j] = dequantize(first, middle, step);
            values[j] = dequantize(low - first * cls.levels, middle, step);
        } else if constexpr (WORDS == 8) {
            u32 high = divide(word, cls);
            values[8 + j] = dequantize(high, middle, step);
            values[j] = dequantize(word - high * cls.divisor, middle, step);
        } else {
            values[j] = dequantize(word, middle, step);
        }
    }
}

// `raw_bits` and `dtype` are those of the message.
HC_INLINE void get_block(const u32* words, u32 position, u32 end, u32 cls, u32 dtype, float step,
                         float* values) {
    u32 bits = class_bits(cls, dtype == 0 ? 32 : 16);
    if (cls < FIRST_PAIR) {
        get_digits<4>(words, position, end, bits, TABLES.classes[cls], step, values);
    } else if (cls < FIRST_SINGLE) {
        get_digits<8>(words, position, end, bits, TABLES.classes[cls], step, values);
    } else if (cls < RAW) {
        get_digits<16>(words, position, end, bits, TABLES.classes[cls], step, values);
    } else {
        u32 mask = bits < 32 ? (1u << bits) - 1 : ~0u;
#pragma unroll
        for (int i = 0; i < BLOCK; ++i) {
            values[i] = widen(get_word(words, position + i * bits, end) & mask, dtype);
        }
    }
}

// The class of this thread's block, RAW + 1 for zero. `position`: the bit where its words begin.
// False for a tile that no encoder made.
HC_INLINE bool read_head(const u32* words, u32 count, u32 blocks, u32 dtype, u32& cls,
                         u32& position) {
    u32 b = threadIdx.x, info = count > 1 ? words[1] : RAW + 1;
    u32 base = info & 255, span = info >> 8 & 255, flags = info >> 16 & 255;
    bool good = base + span <= RAW;
    u32 at = 8 * TILE_HEADER_BYTES;
    bool present = b < blocks;
    if (flags & ZEROS) {
        present = present && (get_word(words, at + b, count) & 1);
        at += 8 * ((blocks + 7) / 8);
    }
    Scan indices = scan_block(present);
    u32 planes = bits_of(span + (flags & RAWS ? 1 : 0)), field = 0;
    for (u32 plane = 0; plane < planes; ++plane, at += 8 * ((indices.total + 7) / 8)) {
        if (present) field |= (get_word(words, at + indices.before, count) & 1) << plane;
    }
    cls = !present ? RAW + 1 : (field > span || base + field > RAW ? RAW : base + field);
    Scan positions = scan_block(present ? class_bits(cls, dtype == 0 ? 32 : 16) * class_words(cls) : 0);
    position = at + positions.before;
    return good && at + positions.total <= 32 * count;
}

template <class T, bool ADD>
HC_INLINE void decode(const u8* in, u64 nbytes, u64 numel, u64 segment, u64 bound, u64 relative,
                      void* target, u32* damage) {
    const u32* header = (const u32*)in;
    u32 tile = blockIdx.x, tiles = (u32)ceil_div(numel, segment), b = threadIdx.x;
    u64 first = tile * segment, count = numel - first < segment ? numel - first : segment;
    u64 data = HEADER_BYTES + 4ull * tiles;
    u32 length = header[6], dtype = header[1] >> 8 & 255;
    bool good = header[0] == MAGIC && (header[1] & 255) == VERSION && dtype <= 2 &&
                header[1] >> 16 == (relative ? 0u : 1u) && header[2] == (u32)numel &&
                header[3] == (u32)(numel >> 32) && header[4] == segment && header[5] == (u32)bound &&
                data + 4ull * length + TAIL_BYTES <= nbytes;
    const u32* offsets = header + HEADER_BYTES / 4;
    u32 begin = offsets[tile], end = tile + 1 < tiles ? offsets[tile + 1] : length;
    good = good && begin <= end && end <= length;
    u32 blocks = (u32)ceil_div(count, BLOCK), cls = RAW + 1, position = 0;
    const u32* words = (const u32*)(in + data) + begin;
    if (good && begin < end) good = read_head(words, end - begin, blocks, dtype, cls, position);
    if (!good) report_damage(damage);
    float values[BLOCK];
#pragma unroll
    for (int i = 0; i < BLOCK; ++i) values[i] = 0.0f;
    if (good && cls <= RAW) {
        get_block(words, position, end - begin, cls, dtype, bits_float(words[0]), values);
    }
    if (b >= blocks) return;
    auto* out = (typename T::Stored*)target + first;
    bool vectors = vectorizable<T>(out);
#pragma unroll
    for (int i = 0; i < BLOCK; i += 4) {
        u64 at = (u64)b * BLOCK + i;
        Four v = {values[i], values[i + 1], values[i + 2], values[i + 3]};
        if constexpr (ADD) v = sum(read4<T>(out, at, count, vectors), v);
        write4<T>(v, out, at, count, vectors);
    }
}

}  // namespace radix
}  // namespace hybridcomp

#define HC_ENCODE(NAME, T)                                                                    \
    extern "C" __global__ void __launch_bounds__(256, 4)                                      \
    radix_encode_##NAME(const void* values, unsigned long long numel,                         \
                        unsigned long long segment, unsigned long long bound,                 \
                        unsigned long long relative, unsigned long long dtype,                \
                        unsigned char* out, void* work, unsigned long long* size) {           \
        hybridcomp::radix::encode<hybridcomp::T>(values, numel, segment, bound, relative,     \
                                                 dtype, out, (hybridcomp::Workspace*)work,    \
                                                 size);                                       \
    }
#define HC_DECODE(NAME, T, ADD)                                                               \
    extern "C" __global__ void __launch_bounds__(256)                                         \
    NAME(const unsigned char* in, unsigned long long nbytes, unsigned long long numel,        \
         unsigned long long segment, unsigned long long bound, unsigned long long relative,   \
         void* out, unsigned int* damage) {                                                   \
        hybridcomp::radix::decode<hybridcomp::T, ADD>(in, nbytes, numel, segment, bound,      \
                                                      relative, out, damage);                 \
    }
HC_ENCODE(fp32, Fp32)
HC_ENCODE(bf16, BFloat16)
HC_ENCODE(fp16, Float16)
HC_DECODE(radix_decode_fp32, Fp32, false)
HC_DECODE(radix_decode_bf16, BFloat16, false)
HC_DECODE(radix_decode_fp16, Float16, false)
HC_DECODE(radix_add, Fp32, true)
