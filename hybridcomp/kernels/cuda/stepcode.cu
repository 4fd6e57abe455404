// CUDA kernels of stepcode, each for all pieces of a message: the first five, in this order, encode, the last two
// decode. In a grid with rows each row takes a piece; otherwise blocks take the tiles of all pieces.
#include "stepcode_count.h"
#include "stepcode_decode.h"
#include "stepcode_encode.h"

namespace hybridcomp {
namespace stepcode {

#define HC_STEPCODE(NAME, ARGUMENTS, CODE)                                                         \
    extern "C" __global__ void HC_BOUNDS(256, 2)                                                   \
    stepcode_##NAME(HC_BY_VALUE(Pieces) given, u64 dtype, void* plans ARGUMENTS) {                 \
        const Pieces& pieces = as_table(given);                                                    \
        CODE;                                                                                      \
    }
#define HC_AND(...) , __VA_ARGS__
#define HC_PIECE pieces.rows()[blockIdx.y], (u32)dtype, (Plan*)plans + blockIdx.y
#define HC_ALL pieces, (u32)dtype, (Plan*)plans

HC_STEPCODE(exponents, , count_exponents(HC_PIECE))
HC_STEPCODE(count, , count_steps(HC_PIECE))
HC_STEPCODE(model, , make_model(HC_PIECE))
HC_STEPCODE(code, HC_AND(u32* scratch), code(HC_ALL, scratch))
HC_STEPCODE(place, HC_AND(u32* scratch, void* work), place(HC_ALL, scratch, (Workspace*)work))
HC_STEPCODE(read, HC_AND(u32* damage), read_plan(HC_PIECE, damage))
HC_STEPCODE(decode, HC_AND(u32* damage), decode(HC_ALL, damage))

}  // namespace stepcode
}  // namespace hybridcomp
