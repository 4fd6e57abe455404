// CUDA kernels of blockint for a table of tensors, each with a payload of its own: the parameters of one
// gather, the parts of a bucket. A warp takes a tile, as in blockint.cu. HC_DTYPE: as there.
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
    encode_tile<E, FEEDBACK>((const typename E::Stored*)row.values, row.numel, tile, (u8*)row.payload,
                             FEEDBACK ? (float*)row.residual : nullptr);
}

template <class E, bool ADD>
HC_INLINE void decode_row(const Table& table) {
    u64 tile = warp_id();
    const Row& row = row_of(table, tile);
    tile -= row.first;
    if (tile >= ceil_div(row.numel, TILE)) return;
    decode_tile<E, ADD>((const u8*)row.payload, row.numel, tile, (typename E::Stored*)row.values);
}

}  // namespace blockint
}  // namespace hybridcomp

#define HC_KERNEL(NAME, CODE, BLOCKS)                                                         \
    extern "C" __global__ void __launch_bounds__(256, BLOCKS) blockint_table_##NAME(HC_TABLE table) { \
        hybridcomp::blockint::CODE(hybridcomp::as_table(table));                              \
    }

#define HC_KERNELS(NAME, E)                                                                 \
    HC_KERNEL(encode_##NAME, encode_row<hybridcomp::E HC_COMMA false>, HC_ROTATE ? 3 : 4)    \
    HC_KERNEL(encode_feedback_##NAME, encode_row<hybridcomp::E HC_COMMA true>, 2)            \
    HC_KERNEL(decode_##NAME, decode_row<hybridcomp::E HC_COMMA false>, HC_ROTATE ? 4 : 5)
#define HC_COMMA ,

#if !defined(HC_DTYPE) || HC_DTYPE == 0
HC_KERNELS(fp32, EightFp32)
HC_KERNEL(add, decode_row<hybridcomp::EightFp32 HC_COMMA true>, HC_ROTATE ? 4 : 5)
#endif
#if !defined(HC_DTYPE) || HC_DTYPE == 1
HC_KERNELS(bf16, EightBf16)
#endif
#if !defined(HC_DTYPE) || HC_DTYPE == 2
HC_KERNELS(fp16, EightFp16)
#endif
