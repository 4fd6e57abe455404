// The CPU codecs behind one pair of functions, with the checks that the bindings make (kernels/cpu/bind_*.cpp), and
// messages for them: hostile values of every kind, encoded with every setting.
#pragma once

#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "cpu_blockint.h"
#include "cpu_casts.h"
#include "cpu_expcode.h"
#include "cpu_instructions.h"
#include "cpu_mpc.h"
#include "cpu_radix.h"
#include "cpu_stepcode.h"
#include "cpu_stepcode_decode.h"
#include "cpu_zfp.h"

namespace damage {
using namespace hybridcomp;

// Small and fast, and the same everywhere (splitmix64).
struct Random {
    u64 state;
    u64 next() {
        u64 z = (state += 0x9e3779b97f4a7c15ull);
        z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
        z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
        return z ^ (z >> 31);
    }
    size_t below(size_t limit) { return limit ? next() % limit : 0; }
};

// A decoder's arguments, all but the payload. What `setting` and `bound` are is the codec's.
struct Call {
    int setting = 0, relative = 1, dtype = 0, target = 0, add = 0;
    float bound = 0;
    size_t numel = 0;
};

struct Codec {
    const char* name;
    std::vector<int> settings;
    bool same_dtype;  // lossless: decodes to what was encoded, or adds to fp32
    size_t (*room)(const Call&);
    size_t (*encode)(const Call&, const void*, u8*, size_t);
    void (*decode)(const Call&, const u8*, size_t, void*);
    size_t tables = 0;  // bytes that a decoder allocates whatever the payload
    void (*prepare)(const Call&) = nullptr;  // before `decode`, which is watched for what it allocates
};

inline size_t item_bytes(int dtype) { return dtype == 0 ? 4 : 2; }

template <size_t (*SIZE)(size_t, int), void (*ENCODE)(int, int, const void*, size_t, u8*, int),
          void (*DECODE)(int, int, const u8*, void*, size_t, bool, int)>
Codec fixed(const char* name, std::vector<int> settings) {
    return {name, settings, false,
            [](const Call& c) { return SIZE(c.numel, c.setting); },
            [](const Call& c, const void* in, u8* out, size_t) {
                ENCODE(c.setting, c.dtype, in, c.numel, out, 1);
                return SIZE(c.numel, c.setting);
            },
            [](const Call& c, const u8* in, size_t nbytes, void* out) {
                require(nbytes >= SIZE(c.numel, c.setting), "payload is too short");
                DECODE(c.setting, c.target, in, out, c.numel, c.add, 1);
            }};
}

inline Codec narrow(const char* name, int dtype) {  // `setting`: the dtype on the wire
    return {name, {dtype}, false,
            [](const Call& c) -> size_t { return align16(2 * c.numel); },
            [](const Call& c, const void* in, u8* out, size_t room) {
                memset(out, 0, room);
                cast(c.dtype, c.setting, in, out, c.numel, false, 1);
                return room;
            },
            [](const Call& c, const u8* in, size_t nbytes, void* out) {
                require(nbytes >= align16(2 * c.numel), "payload is too short");
                cast(c.setting, c.target, in, out, c.numel, c.add, 1);
            }};
}

#ifdef WITH_RADIX
inline radix::Settings radix_settings(const Call& c) {
    return {c.setting, c.relative != 0, c.bound};
}
#endif

// Values of one of nine kinds, as fp32.
inline std::vector<float> hostile(Random& random, size_t numel) {
    std::vector<float> values(numel);
    int kind = (int)random.below(9), exponent = (int)random.below(250) - 125;
    for (size_t i = 0; i < numel; ++i) {
        u64 bits = random.next();
        // about normal: the mean of four uniform numbers
        float value = (float)((bits & 0xffff) + (bits >> 16 & 0xffff) + (bits >> 32 & 0xffff) +
                              (bits >> 48)) / 65536.0f - 2.0f;
        if (kind == 1) value = 0.0f;
        if (kind == 2) value = i % 97 == 5 ? 1e6f : value * 1e-3f;  // an outlier a segment
        if (kind == 3) value = i % 5 ? 0.0f : value;
        if (kind == 4) value = std::ldexp(value, exponent);
        if (kind == 5) value = std::ldexp(value, (int)(bits % 60) - 30);  // every exponent
        if (kind == 6) value = bits_float((u32)bits);  // NaN and Inf among them
        if (kind == 7) value = bits_float((u32)bits & 0x807fffffu);  // subnormal
        if (kind == 8) value = bits % 7 ? (float)(bits % 3) : bits_float(0x7f800000u | (u32)bits % 2);
        values[i] = value;
    }
    return values;
}

#ifdef WITH_STEPCODE
// What sender and receiver of stepcode both hold: values that follow from the call.
inline std::vector<u16>& reference() {
    static std::vector<u16> held;
    return held;
}

inline int half_dtype(const Call& c) { return c.dtype == 2 ? 2 : 1; }

// `setting`: the instructions, as far as the machine has them.
inline void hold_reference(const Call& c) {
    Random random{float_bits(c.bound) * 0x9e3779b97f4a7c15ull + c.numel};
    std::vector<float> values = hostile(random, c.numel);
    std::vector<u16>(c.numel).swap(reference());
    cast(0, half_dtype(c), values.data(), reference().data(), c.numel, false, 1);
    allowed_instructions() = (Instructions)c.setting;
}

// The reference with steps: few or many, short ones, signs alone, or other values.
inline std::vector<u16> stepped(const Call& c, const u16* others) {
    Random random{float_bits(c.bound) + c.numel};
    std::vector<u16> values = reference();
    size_t often = 1 + random.below(40), kind = random.below(4);
    for (size_t i = 0; i < values.size(); ++i) {
        if (random.below(often)) continue;
        if (kind == 0) values[i] = (u16)(values[i] + random.below(7) - 3);
        if (kind == 1) values[i] ^= 0x8000u;
        if (kind == 2) values[i] = others[i];
        if (kind == 3) values[i] = (u16)(values[i] + (random.next() >> random.below(64)));
    }
    return values;
}
#endif

inline std::vector<Codec> codecs() {
    std::vector<Codec> found = {narrow("bf16", 1), narrow("fp16", 2),
                                fixed<fp8::wire_nbytes, fp8::encode, fp8::decode>("fp8", {0, 1})};
#ifdef WITH_BLOCKINT
    found.push_back(fixed<blockint::wire_nbytes, blockint::encode, blockint::decode>(
        "blockint", {2, 3, 4, 5, 6, 7, 8, 18, 19, 20, 36, 52, 66, 68, 72, 83, 132, 148}));
#endif
#ifdef WITH_ZFP
    found.push_back(fixed<zfp::wire_nbytes, zfp::encode, zfp::decode>(
        "zfp", {10, 16, 24, 32, 36, 37, 55, 64, 96, 128}));
#endif
#ifdef WITH_MPC
    found.push_back({"mpc", {1, 2, 3, 8, 32}, true,
        [](const Call& c) { return mpc::wire_nbytes(c.numel, c.dtype); },
        [](const Call& c, const void* in, u8* out, size_t) {
            return mpc::encode(c.setting, c.dtype, in, c.numel, out, 1);
        },
        [](const Call& c, const u8* in, size_t nbytes, void* out) {
            mpc::decode(c.setting, c.dtype, in, nbytes, out, c.numel, c.add, 1);
        }});
#endif
#ifdef WITH_RADIX
    found.push_back({"radix", {64, 80, 256, 1024, 4096}, false,
        [](const Call& c) { return radix::wire_nbytes(c.numel, c.setting, c.dtype); },
        [](const Call& c, const void* in, u8* out, size_t) {
            return radix::encode(radix_settings(c), c.dtype, in, c.numel, out, 1);
        },
        [](const Call& c, const u8* in, size_t nbytes, void* out) {
            radix::decode(radix_settings(c), c.target, in, nbytes, out, c.numel, c.add, 1);
        }});
#endif
#ifdef WITH_EXPCODE
    found.push_back({"expcode", {0}, true,
        [](const Call& c) { return expcode::wire_nbytes(c.numel, c.dtype); },
        [](const Call& c, const void* in, u8* out, size_t) {
            return expcode::encode(c.dtype, in, c.numel, out, 1);
        },
        [](const Call& c, const u8* in, size_t nbytes, void* out) {
            expcode::decode(c.dtype, in, nbytes, out, c.numel, c.add, 1);
        }});
#endif
#ifdef WITH_STEPCODE
    found.push_back({"stepcode", {0, 1, 2}, true,
        [](const Call& c) { return stepcode::wire_nbytes(c.numel); },
        [](const Call& c, const void* in, u8* out, size_t) {
            hold_reference(c);
            std::vector<u16> values = stepped(c, (const u16*)in);
            return stepcode::encode(half_dtype(c), values.data(), reference().data(), c.numel, out, 1);
        },
        [](const Call& c, const u8* in, size_t nbytes, void* out) {
            stepcode::decode(half_dtype(c), in, nbytes, reference().data(), (u16*)out, c.numel, 1);
        },
        4 * (stepcode::CONTEXTS << stepcode::PRECISION), hold_reference});
#endif
    return found;
}

struct Message {
    Call call;
    std::vector<u8> payload;
};

inline size_t length(Random& random) {
    static const size_t limits[10] = {40, 40, 40, 300, 1100, 1100, 1100, 4200, 9000, 20000};
    return 1 + random.below(limits[random.below(10)]);
}

// The messages that are damaged: a whole one each, the same for one seed.
inline std::vector<Message> bank(const Codec& codec, u64 seed, size_t count) {
    Random random{seed * 0x2545f4914f6cdd1dull + 1};
    std::vector<Message> found;
    while (found.size() < count) {
        Call call;
        call.setting = codec.settings[found.size() % codec.settings.size()];
        call.dtype = (int)random.below(3), call.numel = length(random);
        call.relative = random.below(4) != 0;
        call.bound = std::ldexp(1.0f + (float)random.below(100) / 128.0f, -1 - (int)random.below(22));
        std::vector<float> values = hostile(random, call.numel);
        std::vector<u8> stored(item_bytes(call.dtype) * call.numel);
        cast(0, call.dtype, values.data(), stored.data(), call.numel, false, 1);
        size_t room = codec.room(call), offset = found.size() % 16;  // anywhere, as payloads may
        std::vector<u8> out(offset + room);
        room = codec.encode(call, stored.data(), out.data() + offset, room);
        found.push_back({call, {out.begin() + offset, out.begin() + offset + room}});
    }
    return found;
}

}  // namespace damage
