// CUDA kernels of blockint for the parts of one tensor, each with a payload of its own: what goes to every
// rank of an all-to-all, and the parameters in the shards of a gather. A warp takes a tile, as in
// blockint.cu; a row of thread blocks takes one rank's payloads, `slot` bytes apart, into values that lie
// `step` elements apart. HC_DTYPE: as in blockint.cu.
#include "blockint_tile.h"
#include "parts.h"

namespace hybridcomp {
namespace blockint {

template <class E>
HC_INLINE void encode_part(const Parts& parts, u64 values, u64 payloads) {
    u64 tile = warp_id();
    Part part = part_of(parts, tile);
    tile -= part.first;
    if (tile >= ceil_div(part.numel, TILE)) return;  // the whole warp
    encode_tile<E, false>((const typename E::Stored*)values + part.start, part.numel, tile,
                          (u8*)payloads + part.payload, nullptr);
}

template <class E>
HC_INLINE void decode_part(const Parts& parts, u64 values, u64 payloads, u64 step, u64 slot) {
    u64 tile = warp_id(), rank = blockIdx.y;
    Part part = part_of(parts, tile);
    tile -= part.first;
    if (tile >= ceil_div(part.numel, TILE)) return;
    decode_tile<E, false>((const u8*)payloads + rank * slot + part.payload, part.numel, tile,
                          (typename E::Stored*)values + rank * step + part.start);
}

}  // namespace blockint
}  // namespace hybridcomp

#define HC_KERNELS(NAME, E)                                                                          \
    extern "C" __global__ void __launch_bounds__(256, HC_ROTATE ? 3 : 4)                             \
        blockint_parts_encode_##NAME(HC_PARTS parts, hybridcomp::u64 values, hybridcomp::u64 payloads) { \
        hybridcomp::blockint::encode_part<hybridcomp::E>(hybridcomp::as_parts(parts), values, payloads); \
    }                                                                                                \
    extern "C" __global__ void __launch_bounds__(256, HC_ROTATE ? 4 : 5)                             \
        blockint_parts_decode_##NAME(HC_PARTS parts, hybridcomp::u64 values, hybridcomp::u64 payloads, \
                                     hybridcomp::u64 step, hybridcomp::u64 slot) {                   \
        hybridcomp::blockint::decode_part<hybridcomp::E>(hybridcomp::as_parts(parts), values, payloads, \
                                                         step, slot);                                \
    }

#if !defined(HC_DTYPE) || HC_DTYPE == 0
HC_KERNELS(fp32, EightFp32)
#endif
#if !defined(HC_DTYPE) || HC_DTYPE == 1
HC_KERNELS(bf16, EightBf16)
#endif
#if !defined(HC_DTYPE) || HC_DTYPE == 2
HC_KERNELS(fp16, EightFp16)
#endif
