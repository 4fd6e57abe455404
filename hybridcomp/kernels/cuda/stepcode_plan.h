// stepcode on a GPU: state in global memory between kernels. The encoder counts exponents, then the steps of
// each context, makes the models, codes the tiles into scratch memory, and joins them; the decoder reads the models
// and decodes. Each kernel takes all pieces of a message; a warp takes a tile, a lane a state of the format. The
// host does not know the tile sizes, so grids are for the smallest tiles.
#pragma once

#include "table.h"
#include "warp_tiles.h"

#include "stepcode_model.h"

namespace hybridcomp {
namespace stepcode {

constexpr int WARPS = 8, THREADS = WARPS * WARP;
constexpr u32 LEAST_TILE = 1u << MIN_TILE_LOG;
// Slots of 16 states share an entry, from which the search for a symbol starts.
constexpr u32 COARSE = TOTAL / 16;

// State of a piece, zero before the first kernel. PLAN_WORDS in stepcode.py is its size in 64-bit words.
struct Plan {
    u32 good, mode, lowest, tile, model, length;
    u32 reserved[2];
    u32 ranges[CONTEXTS][ROW];  // of an encoder at first the counts
    union {
        u8 first[CONTEXTS][COARSE];  // of a decoder
        u32 exponents[256];          // of an encoder: how often they were counted
    };
};
static_assert(sizeof(Plan) == 8 * 1540, "stepcode.py has this size");

// By all threads of a block.
HC_INLINE void copy_words(const u32* from, u32* to, u32 count) {
    for (u32 i = threadIdx.x; i < count; i += blockDim.x) to[i] = from[i];
}

HC_INLINE u32 lanes_before(u32 mask) { return ones_in(mask & ((1u << lane_id()) - 1)); }

// Unencoded values, 2 bytes each, by `threads` threads of which this is `thread`.
HC_INLINE void copy_values(const u16* from, u16* to, u64 count, u64 thread, u64 threads) {
    for (u64 i = thread; i < count; i += threads) to[i] = from[i];
}

// Groups of 32 values that are loaded while others are coded: groups of a tile depend on each other, and would
// otherwise also wait for memory.
constexpr u32 AHEAD = 4, BATCH = AHEAD * WARP;

// This lane's values of AHEAD groups from `from` on, ascending.
HC_INLINE void load_batch(const u16* from, u32 (&to)[AHEAD]) {
#pragma unroll
    for (u32 n = 0; n < AHEAD; ++n) to[n] = from[n * WARP + lane_id()];
}

struct Bounds {
    u64 first;
    u32 count;
    HC_INLINE_MEMBER Bounds(u64 numel, u32 tile, u64 index)
        : first(index * tile),
          count(first >= numel ? 0 : (u32)(numel - first < tile ? numel - first : tile)) {}
};

// What this block of threads works on, where blocks take the tiles of all pieces one after the other.
struct Job {
    Piece piece;
    Plan* plan;
    u64 group;  // of WARPS tiles within the piece
    HC_INLINE_MEMBER Job(const Pieces& pieces, Plan* plans, u64 block) {
        u32 number = pieces.of_block(block);
        piece = pieces.rows()[number], plan = plans + number, group = block - piece.first;
    }
};

}  // namespace stepcode
}  // namespace hybridcomp
