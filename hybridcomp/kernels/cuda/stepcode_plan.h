// stepcode on a GPU: what one kernel leaves in global memory for the next. An encoder counts, makes the model,
// writes the tiles, and finishes the message; a decoder reads the model and decodes. A tile is a warp's, a
// state of the format a lane's. Nothing is known on the host: grids are those of the smallest tiles.
#pragma once

#include "warp_tiles.h"

#include "stepcode_model.h"

namespace hybridcomp {
namespace stepcode {

constexpr int WARPS = 8, THREADS = WARPS * WARP;
// Slots of 16 states share an entry, from which the search for a symbol starts.
constexpr u32 COARSE = TOTAL / 16;

// Zero before the first kernel. Its size in words of 64 bits: PLAN_WORDS in stepcode.py.
struct Plan {
    u32 good, mode, lowest, tile, model, length;
    u32 reserved[2];
    u32 ranges[CONTEXTS][ROW];
    u8 first[CONTEXTS][COARSE];
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

struct Bounds {
    u64 first;
    u32 count;
    HC_INLINE_MEMBER Bounds(u64 numel, u32 tile, u64 index)
        : first(index * tile),
          count(first >= numel ? 0 : (u32)(numel - first < tile ? numel - first : tile)) {}
};

}  // namespace stepcode
}  // namespace hybridcomp
