// CPU loops of topk. Threads choose the values of contiguous shares of the chunks; one thread packs the
// chosen values, one of 64.
//
// A chunk is read twice. The first pass finds the largest magnitude in each of GROUPS columns; the most-th
// largest of these bounds the values kept from below, so that few candidates are left (75 for 64, on
// normal values).
#include <algorithm>
#include <functional>
#include <vector>

#include "cpu_topk.h"
#include "topk.h"

namespace hybridcomp {
namespace topk {
namespace {

constexpr u32 GROUPS = 256;
// above this number of values kept, columns give no useful bound
constexpr u32 FEW = GROUPS / 2;

// Chosen values; room for `most` places and codes of each chunk.
struct Chosen {
    std::vector<u32> counts;
    std::vector<u16> places, scales;
    std::vector<u8> codes;
    Chosen(size_t chunks, size_t most)
        : counts(chunks), places(chunks * most), scales(chunks), codes(chunks * most) {}
};

template <class T>
HC_INLINE void read_bits(const typename T::Stored* in, u32 count, u32* bits) {
    for (u32 i = 0; i < count; ++i) bits[i] = float_bits(T::load(in[i]));
    for (u32 i = count; i < CHUNK; ++i) bits[i] = 0;
}

HC_INLINE void column_maxima(const u32* bits, i32* maxima) {
    for (u32 c = 0; c < GROUPS; ++c) maxima[c] = 0;
    for (u32 row = 0; row < CHUNK; row += GROUPS) {
        for (u32 c = 0; c < GROUPS; ++c) {
            i32 magnitude = (i32)(bits[row + c] & MAGNITUDE);
            maxima[c] = magnitude > maxima[c] ? magnitude : maxima[c];
        }
    }
}

// The places of magnitudes from `least` on, in order; returns how many.
HC_INLINE u32 candidates(const u32* bits, i32 least, u16* places) {
    u32 found = 0;
    for (u32 i = 0; i < CHUNK; i += 8) {
        I8 above = (I8)(load_lanes<U8>(bits + i) & MAGNITUDE) >= least;
        if (none(above)) continue;
        for (u32 lane = 0; lane < 8; ++lane) {
            places[found] = (u16)(i + lane);
            found += above[lane] & 1;
        }
    }
    return found;
}

// Chooses at most `most` values of a chunk; returns how many.
HC_INLINE u32 choose(const u32* bits, u32 most, int width, u16* places, u8* codes, u16& scale) {
    i32 maxima[GROUPS];
    column_maxima(bits, maxima);
    scale = BROKEN;
    i32 largest = 0;
    for (u32 c = 0; c < GROUPS; ++c) largest = maxima[c] > largest ? maxima[c] : largest;
    if (largest >= (i32)INF_BITS) return 0;
    i32 bound = 1;
    if (most <= FEW) {
        std::nth_element(maxima, maxima + most - 1, maxima + GROUPS, std::greater<i32>());
        bound = maxima[most - 1] > 1 ? maxima[most - 1] : 1;
    }
    u16 at[CHUNK + 8];  // candidates() writes one place too many
    u32 sizes[CHUNK], found = candidates(bits, bound, at);
    scale = 0;
    if (found == 0) return 0;
    for (u32 i = 0; i < found; ++i) sizes[i] = bits[at[i]] & MAGNITUDE;
    u32 kept = found < most ? found : most;
    Cut cut = {0, 0};
    if (found > most) {
        std::nth_element(sizes, sizes + most - 1, sizes + found, std::greater<u32>());
        cut.least = sizes[most - 1];
        cut.room = most;
        for (u32 i = 0; i < most; ++i) cut.room -= sizes[i] > cut.least;
    }
    std::nth_element(sizes, sizes + (kept - 1) / 2, sizes + kept, std::greater<u32>());
    scale = scale_of(sizes[(kept - 1) / 2]);
    if (scale == 0) return 0;
    float wide = bf16_to_float(scale);
    u32 count = 0;
    for (u32 i = 0; i < found; ++i) {
        if (!cut.keeps(bits[at[i]] & MAGNITUDE)) continue;
        places[count] = at[i];
        codes[count++] = (u8)code_of(bits[at[i]], wide, width);
    }
    return count;
}

template <class T>
HC_INLINE void choose_chunks(const Settings& settings, const void* in, size_t numel, Chosen& chosen,
                             size_t begin, size_t end) {
    const auto* values = (const typename T::Stored*)in;
    size_t chunks = chosen.counts.size();
    for (size_t chunk = begin; chunk < end; ++chunk) {
        size_t first = chunk * CHUNK, slot = chunk * settings.most;
        u32 bits[CHUNK];
        read_bits<T>(values + first, (u32)std::min<size_t>(CHUNK, numel - first), bits);
        u32 most = chunk + 1 < chunks ? settings.most : settings.last;
        chosen.counts[chunk] = choose(bits, most, settings.bits, chosen.places.data() + slot,
                                      chosen.codes.data() + slot, chosen.scales[chunk]);
    }
}

HC_CLONES void choose_share(const Settings& settings, int dtype, const void* in, size_t numel,
                            Chosen& chosen, size_t begin, size_t end) {
    if (dtype == (int)Dtype::fp32) choose_chunks<Fp32>(settings, in, numel, chosen, begin, end);
    else if (dtype == (int)Dtype::bf16) choose_chunks<BFloat16>(settings, in, numel, chosen, begin, end);
    else choose_chunks<Float16>(settings, in, numel, chosen, begin, end);
}

// Writes numbers of few bits, from the lowest bit on.
class BitWriter {
  public:
    explicit BitWriter(u8* out) : out_(out) {}
    void put(u64 number, int width) {  // below 2^width, width up to 32
        word_ |= number << held_;
        held_ += width;
        for (; held_ >= 8; held_ -= 8, word_ >>= 8) *out_++ = (u8)word_;
    }
    void zeros(size_t count) {
        for (; count > 32; count -= 32) put(0, 32);
        put(0, (int)count);
    }
    void end() {
        if (held_) *out_++ = (u8)word_;
    }

  private:
    u8* out_;
    u64 word_ = 0;
    int held_ = 0;
};

// Calls body(gap, code) for each value kept, in order.
template <class Body>
void each_kept(const Chosen& chosen, size_t most, const Body& body) {
    size_t next = 0;
    for (size_t chunk = 0; chunk < chosen.counts.size(); ++chunk) {
        for (size_t i = chunk * most, end = i + chosen.counts[chunk]; i < end; ++i) {
            size_t place = chunk * CHUNK + chosen.places[i];
            body(place - next, (u32)chosen.codes[i]);
            next = place + 1;
        }
    }
}

// Reads bits from the lowest on, all of which lie before `end`.
class BitReader {
  public:
    BitReader(const u8* in, const u8* end) : in_(in), end_(end) {}
    u32 get(int width) {
        fill(width);
        u32 number = (u32)(word_ & ((1ull << width) - 1));
        word_ >>= width;
        held_ -= width;
        return number;
    }
    // Counts the zeros before the next 1, and consumes both; returns `limit` if there is no 1 before.
    size_t zeros(size_t limit) {
        size_t count = 0;
        while (word_ == 0) {
            count += held_;
            held_ = 0;
            if (count >= limit || in_ == end_) return limit;
            fill(56);
        }
        int more = __builtin_ctzll(word_);
        word_ = word_ >> more >> 1;
        held_ -= more + 1;
        return count + more < limit ? count + more : limit;
    }

  private:
    void fill(int width) {
        for (; held_ < width && in_ < end_; held_ += 8) word_ |= (u64)*in_++ << held_;
    }
    const u8* in_;
    const u8* end_;
    u64 word_ = 0;
    int held_ = 0;
};

template <class T>
void put_values(const Settings& settings, const u8* in, const Sections& at, u32 kept, u32 unary,
                typename T::Stored* out, size_t numel, bool add, float most) {
    BitReader low(in + at.low, in + at.codes), codes(in + at.codes, in + at.unary);
    BitReader ones(in + at.unary, in + at.end);
    size_t place = 0, left = unary;
    for (u32 i = 0; i < kept; ++i, ++place) {
        size_t high = ones.zeros(left);
        require(high < left, "damaged places");
        left -= high + 1;
        place += (high << settings.rice) + low.get(settings.rice);
        require(place < numel, "damaged places");
        u16 scale;
        memcpy(&scale, in + at.scales + 2 * (place / CHUNK), 2);
        float value = value_of(codes.get(settings.bits), bf16_to_float(scale), settings.bits, most);
        out[place] = T::store(add ? T::load(out[place]) + value : value);
    }
    require(ones.zeros(left) == left, "damaged places");
    for (size_t first = 0, chunk = 0; first < numel; first += CHUNK, ++chunk) {
        u16 scale;
        memcpy(&scale, in + at.scales + 2 * chunk, 2);
        if ((scale & 0x7fff) <= 0x7f80) continue;
        size_t end = std::min<size_t>(numel, first + CHUNK);
        for (size_t i = first; i < end; ++i) out[i] = T::store(bits_float(QUIET_NAN_BITS));
    }
}

}  // namespace

size_t encode(const Settings& settings, int dtype, const void* in, size_t numel, u8* out,
              size_t nbytes, int threads) {
    if (numel == 0) return 0;
    size_t chunks = ceil_div(numel, CHUNK);
    Chosen chosen(chunks, settings.most);
    parallel_ranges(chunks, CHUNK, threads, [&](size_t begin, size_t end) {
        choose_share(settings, dtype, in, numel, chosen, begin, end);
    });
    size_t kept = 0, unary = 0;
    each_kept(chosen, settings.most, [&](size_t gap, u32) {
        ++kept;
        unary += (gap >> settings.rice) + 1;
    });
    Sections at(numel, kept, unary, settings.rice, settings.bits);
    require(nbytes >= align16(at.end), "topk: out is too short");
    u32 header[4] = {(u32)kept, (u32)unary, (u32)numel, 0};
    memcpy(out, header, HEADER);
    memcpy(out + at.scales, chosen.scales.data(), 2 * chunks);
    BitWriter low(out + at.low), codes(out + at.codes), ones(out + at.unary);
    each_kept(chosen, settings.most, [&](size_t gap, u32 code) {
        low.put(gap & ((1u << settings.rice) - 1), settings.rice);
        codes.put(code, settings.bits);
        ones.zeros(gap >> settings.rice);
        ones.put(1, 1);
    });
    low.end();
    codes.end();
    ones.end();
    pad(out, at.end, align16(at.end));
    return align16(at.end);
}

void decode(const Settings& settings, int dtype, const u8* in, size_t nbytes, void* out, size_t numel,
            bool add, int threads) {
    if (numel == 0) return;
    require(nbytes >= HEADER, "payload is too short");
    u32 header[4];
    memcpy(header, in, HEADER);
    u32 kept = header[0], unary = header[1];
    require(header[2] == numel && kept <= numel && kept <= unary && unary <= 0x7fffffffu,
            "damaged, or of others");
    Sections at(numel, kept, unary, settings.rice, settings.bits);
    require(nbytes >= at.end, "damaged, or of others");
    size_t item = item_nbytes(dtype);
    if (!add) {
        parallel_ranges(numel, 1, threads, [&](size_t begin, size_t end) {
            memset((u8*)out + begin * item, 0, (end - begin) * item);
        });
    }
    if (dtype == (int)Dtype::fp32) {
        put_values<Fp32>(settings, in, at, kept, unary, (float*)out, numel, add,
                         bits_float(MAX_FINITE_BITS));
    } else if (dtype == (int)Dtype::bf16) {
        put_values<BFloat16>(settings, in, at, kept, unary, (u16*)out, numel, add,
                             bf16_to_float(0x7f7f));
    } else {
        put_values<Float16>(settings, in, at, kept, unary, (u16*)out, numel, add, 65504.0f);
    }
}

}  // namespace topk
}  // namespace hybridcomp
