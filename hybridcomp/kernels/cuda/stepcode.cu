// CUDA kernels of stepcode: an encoder is the first four, one after the other, a decoder the last two.
#include "stepcode_decode.h"
#include "stepcode_encode.h"

typedef unsigned long long u64;

extern "C" __global__ void HC_BOUNDS(256, 2)
stepcode_count(const unsigned short* values, const unsigned short* reference, u64 numel, u64 dtype,
               unsigned int* counts) {
    hybridcomp::stepcode::count(values, reference, numel, (unsigned)dtype, counts);
}

extern "C" __global__ void HC_BOUNDS(256, 2)
stepcode_model(const unsigned int* counts, u64 numel, u64 dtype, void* plan, unsigned char* out) {
    hybridcomp::stepcode::make_model(counts, numel, (unsigned)dtype,
                                     (hybridcomp::stepcode::Plan*)plan, out);
}

extern "C" __global__ void HC_BOUNDS(256, 2)
stepcode_encode(const unsigned short* values, const unsigned short* reference, u64 numel, u64 dtype,
                void* plan, unsigned char* out, void* work) {
    hybridcomp::stepcode::encode(values, reference, numel, (unsigned)dtype,
                                 (hybridcomp::stepcode::Plan*)plan, out, (hybridcomp::Workspace*)work);
}

extern "C" __global__ void HC_BOUNDS(256, 2)
stepcode_finish(const unsigned short* values, u64 numel, u64 dtype, const void* plan, unsigned char* out,
                u64* size) {
    hybridcomp::stepcode::finish(values, numel, (unsigned)dtype, (const hybridcomp::stepcode::Plan*)plan,
                                 out, size);
}

extern "C" __global__ void HC_BOUNDS(256, 2)
stepcode_read(const unsigned char* in, u64 nbytes, u64 numel, u64 dtype, void* plan,
              unsigned int* damage) {
    hybridcomp::stepcode::read_plan(in, nbytes, numel, (unsigned)dtype,
                                    (hybridcomp::stepcode::Plan*)plan, damage);
}

extern "C" __global__ void HC_BOUNDS(256, 2)
stepcode_decode(const unsigned char* in, u64 numel, u64 dtype, const void* plan,
                const unsigned short* reference, unsigned short* out, unsigned int* damage) {
    hybridcomp::stepcode::decode(in, numel, (unsigned)dtype, (const hybridcomp::stepcode::Plan*)plan,
                                 reference, out, damage);
}
