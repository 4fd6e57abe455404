// A table of tensors is the first argument of kernels that take several tensors, since a launch costs the host
// more time than a short tensor costs the GPU. It is passed by value, so nothing is copied ahead or kept alive,
// and a CUDA graph contains it.
//
// The rows of a plan are positions in tensors whose addresses are arguments, so all messages with that plan
// share them. There is a row for each stretch of the message; few rows are passed by value, many are read from
// the device's memory.
#pragma once

#include "cuda_device.h"

namespace hybridcomp {

// Rows take consecutive tiles; `first` is the row's first tile. For a residual of few bits `residual` is the
// address of its levels, `steps` that of its steps.
struct Row {
    u64 first, values, numel, payload, residual, steps;
};
constexpr u32 TABLE_ROWS = 84;  // arguments of a kernel are at most 4 KB

struct Table {
    u64 count;
    Row rows[TABLE_ROWS];
};

// The row that tile `tile` is in; behind the last one's end it is the last.
HC_INLINE const Row& row_of(const Table& table, u64 tile) {
    u32 low = 0, high = (u32)table.count;
    while (high - low > 1) {
        u32 middle = (low + high) / 2;
        if (table.rows[middle].first <= tile) low = middle;
        else high = middle;
    }
    return table.rows[low];
}

// Rows take consecutive tiles, for sums consecutive thread blocks; `first` is the row's first tile.
struct PlannedRow {
    u64 first, values, numel, payload, out;  // elements, but `payload`: bytes
};

// The row that tile `tile` is in; behind the last one's end it is the last.
template <class R>
HC_INLINE const R& row_of(const R* rows, u64 count, u64 tile) {
    u64 low = 0, high = count;
    while (high - low > 1) {
        u64 middle = (low + high) / 2;
        if (rows[middle].first <= tile) low = middle;
        else high = middle;
    }
    return rows[low];
}

constexpr u32 NEAR_ROWS = 96;
struct NearTable {
    u64 count;
    const PlannedRow* far;  // null: the rows are `near`
    PlannedRow near[NEAR_ROWS];
};

HC_INLINE const PlannedRow& row_of(const NearTable& table, u64 tile) {
    return row_of(table.far ? table.far : table.near, table.count, tile);
}

// A tensor of a message with its own payload of variable length. Pieces take consecutive thread blocks; `first`
// is the piece's first block.
struct Piece {
    u64 first, values, numel, payload;
    u64 size;       // of an encoder the word for the bytes used, of a decoder the bytes of the payload
    u64 reference;  // of stepcode: the earlier values
    u64 scratch;    // where in the memory between two kernels it has its room
};
constexpr u32 NEAR_PIECES = 64;

// Few pieces are passed by value, many are read from the device's memory.
struct Pieces {
    u64 count;
    const Piece* far;  // null: the pieces are `near`
    Piece near[NEAR_PIECES];

    HC_INLINE_MEMBER const Piece* rows() const { return far ? far : near; }
    // Returns the piece of thread block `block`; the last one if several begin there.
    HC_INLINE_MEMBER u32 of_block(u64 block) const {
        return (u32)(&row_of(rows(), count, block) - rows());
    }
    // That piece.
    HC_INLINE_MEMBER Piece at_block(u64 block) const { return row_of(rows(), count, block); }
};

// The payloads of `ranks` ranks for the same values, which follow each other as pieces that begin together: the
// first of them, for block `block`.
HC_INLINE const Piece* ranks_of_block(const Pieces& pieces, u64 ranks, u64 block) {
    return pieces.rows() + pieces.of_block(block) / (u32)ranks * (u32)ranks;
}

}  // namespace hybridcomp
