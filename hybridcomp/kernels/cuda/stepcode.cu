// CUDA kernels of stepcode, each for all pieces of a message: an encoder is the first five, one after the other, a
// decoder the last two. Of a grid with rows one is a piece's, else blocks take the tiles of all pieces.
#include "stepcode_count.h"
#include "stepcode_decode.h"
#include "stepcode_encode.h"

#define HC_STEPCODE(NAME, ARGUMENTS, CODE)                                                     \
    extern "C" __global__ void HC_BOUNDS(256, 2)                                               \
    stepcode_##NAME(HC_BY_VALUE(Pieces) given, unsigned long long dtype, void* plans ARGUMENTS) { \
        const hybridcomp::Pieces& pieces = hybridcomp::as_table(given);                        \
        CODE;                                                                                  \
    }
#define HC_AND(...) , __VA_ARGS__
#define HC_PIECE pieces.rows()[blockIdx.y], (unsigned)dtype, (hybridcomp::stepcode::Plan*)plans + blockIdx.y
#define HC_ALL pieces, (unsigned)dtype, (hybridcomp::stepcode::Plan*)plans

HC_STEPCODE(exponents, , hybridcomp::stepcode::count_exponents(HC_PIECE))
HC_STEPCODE(count, , hybridcomp::stepcode::count_steps(HC_PIECE))
HC_STEPCODE(model, , hybridcomp::stepcode::make_model(HC_PIECE))
HC_STEPCODE(code, HC_AND(unsigned* scratch), hybridcomp::stepcode::code(HC_ALL, scratch))
HC_STEPCODE(place, HC_AND(unsigned* scratch, void* work),
            hybridcomp::stepcode::place(HC_ALL, scratch, (hybridcomp::Workspace*)work))
HC_STEPCODE(read, HC_AND(unsigned* damage), hybridcomp::stepcode::read_plan(HC_PIECE, damage))
HC_STEPCODE(decode, HC_AND(unsigned* damage), hybridcomp::stepcode::decode(HC_ALL, damage))
