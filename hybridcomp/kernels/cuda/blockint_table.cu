// CUDA kernels of blockint for a table of tensors with one payload each, such as the parameters of a gather or
// the parts of a bucket. A warp takes a tile; HC_DTYPE and HC_KEPT as in blockint.cu. Kernels of a plan (`planned`)
// take any number of stretches of one tensor, such as the parts of a bucket for every rank of an all-to-all, or
// the parameters in the shards of a gather.
#include "blockint_tile.h"
#include "table.h"

namespace hybridcomp {
namespace blockint {

template <class E, bool FEEDBACK>
HC_INLINE void encode_row(const Table& table) {
    u64 tile = warp_id();
    const Row& row = row_of(table, tile);
    tile -= row.first;
    if (tile >= ceil_div(row.numel, TILE)) return;  // the whole warp
    Kept residual;
    point(residual, row.residual, row.steps);
    encode_tile<E, FEEDBACK>((const typename E::Stored*)row.values, row.numel, tile, (u8*)row.payload,
                             residual);
}

template <class E, bool ADD>
HC_INLINE void decode_row(const Table& table) {
    u64 tile = warp_id();
    const Row& row = row_of(table, tile);
    tile -= row.first;
    if (tile >= ceil_div(row.numel, TILE)) return;
    decode_tile<E, ADD>((const u8*)row.payload, row.numel, tile, (typename E::Stored*)row.values);
}

template <class E, bool FEEDBACK, bool HELD>
HC_INLINE void encode_planned(const PlannedRow* rows, u64 count, const void* values, u8* payloads,
                              Kept residual) {
    u64 tile = warp_id();
    const PlannedRow& row = row_of(rows, count, tile);
    tile -= row.first;
    if (tile >= ceil_div(row.numel, TILE)) return;  // the whole warp
    encode_tile<E, FEEDBACK, HELD>((const typename E::Stored*)values + row.values, row.numel, tile,
                                   payloads + row.payload, FEEDBACK ? residual + row.values : residual);
}

// Stretches of a tensor without a residual.
template <class E>
HC_INLINE void encode_near(const NearTable& rows, const void* values, u8* payloads) {
    u64 tile = warp_id();
    PlannedRow row = row_of(rows, tile);
    tile -= row.first;
    if (tile >= ceil_div(row.numel, TILE)) return;
    encode_tile<E, false>((const typename E::Stored*)values + row.values, row.numel, tile,
                          payloads + row.payload, (float*)nullptr);
}

// Decodes one rank's payloads per row of the grid; ranks' payloads are `slot` bytes apart, their values `step`.
template <class E>
HC_INLINE void decode_near(const NearTable& rows, const u8* payloads, void* out, u64 step, u64 slot) {
    u64 tile = warp_id(), rank = blockIdx.y;
    PlannedRow row = row_of(rows, tile);
    tile -= row.first;
    if (tile >= ceil_div(row.numel, TILE)) return;
    decode_tile<E, false>(payloads + rank * slot + row.payload, row.numel, tile,
                          (typename E::Stored*)out + rank * step + row.out);
}

#define HC_KERNEL(NAME, CODE, BLOCKS)                                                              \
    extern "C" __global__ void HC_BOUNDS(256, BLOCKS)                                              \
    blockint_table_##NAME(HC_BY_VALUE(Table) table) { CODE(as_table(table)); }

#define HC_PLANNED_ENCODE(NAME, BLOCKS, ...)                                                       \
    extern "C" __global__ void HC_BOUNDS(256, BLOCKS)                                              \
    blockint_planned_##NAME(const PlannedRow* rows, u64 count, const void* values, u8* payloads,   \
                            HC_LEFT(residual)) {                                                   \
        encode_planned<__VA_ARGS__>(rows, count, values, payloads, HC_LEFT_OF(residual));          \
    }
#define HC_COMMA ,
#define HC_FEEDBACK(NAME, E)                                                                       \
    HC_PLANNED_ENCODE(encode_feedback_##NAME, 2, E, true, false)                                   \
    HC_KERNEL(encode_feedback_##NAME, encode_row<E HC_COMMA true>, 2)

#if HC_KEPT < 32
#define HC_KERNELS HC_FEEDBACK
#else
#define HC_KERNELS(NAME, E)                                                                        \
    extern "C" __global__ void HC_BOUNDS(256, HC_ROTATE ? 3 : 4)                                   \
    blockint_planned_encode_##NAME(HC_BY_VALUE(NearTable) rows, const void* values, u8* payloads) { \
        encode_near<E>(as_table(rows), values, payloads);                                          \
    }                                                                                              \
    extern "C" __global__ void HC_BOUNDS(256, HC_ROTATE ? 4 : 5)                                   \
    blockint_planned_decode_##NAME(HC_BY_VALUE(NearTable) rows, const u8* payloads, void* out,     \
                                   u64 step, u64 slot) {                                           \
        decode_near<E>(as_table(rows), payloads, out, step, slot);                                 \
    }                                                                                              \
    HC_KERNEL(encode_##NAME, encode_row<E HC_COMMA false>, HC_ROTATE ? 3 : 4)                      \
    HC_FEEDBACK(NAME, E)                                                                           \
    HC_KERNEL(decode_##NAME, decode_row<E HC_COMMA false>, HC_ROTATE ? 4 : 5)
#endif

#if !defined(HC_DTYPE) || HC_DTYPE == 0
HC_KERNELS(fp32, EightFp32)
#if HC_KEPT == 32
HC_KERNEL(add, decode_row<EightFp32 HC_COMMA true>, HC_ROTATE ? 4 : 5)
HC_PLANNED_ENCODE(encode_held_fp32, 2, EightFp32, true, true)
#endif
#endif
#if !defined(HC_DTYPE) || HC_DTYPE == 1
HC_KERNELS(bf16, EightBf16)
#endif
#if !defined(HC_DTYPE) || HC_DTYPE == 2
HC_KERNELS(fp16, EightFp16)
#endif

}  // namespace blockint
}  // namespace hybridcomp
