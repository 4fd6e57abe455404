// CUDA kernels of mpc: eight chunks of 1024 words for the eight warps of a thread block, with one look-back.
// With HC_PIECES for all pieces of a message.
#include "mpc_tile.h"
#include "table.h"

namespace hybridcomp {
namespace mpc {

template <int WARPS>
HC_INLINE void encode(const void* in, u64 numel, u64 dim, u64 dtype, u8* out, u64* states, u32 group,
                      u64* size) {
    __shared__ u32 buffers[WARPS][BUFFER];
    __shared__ Lengths<WARPS> shared;
    u32 warp = threadIdx.x / WARP, lane = lane_id();
    u64 chunk = (u64)group * WARPS + warp;
    Message message(numel, dtype);
    Place place(message.words, chunk);
    u32 *rows = buffers[warp], d[GROUP], kept = 0;
    if (place.count) {
        load_rows(in, message, place, rows);
        subtract_rows(rows, place.count, (u32)dim, d);
        transpose_group(d);
        // v1.2 tests all 1024 words: after a partial group one more may be nonzero
        subtract_before_lanes(d);
        u32 mask = mask_of(d);
        if (lane < place.used) ((u32*)out)[HEADER_WORDS + chunk * GROUPS + lane] = mask;
        u32 included = scan_lanes(ones_in(mask));
        u32* to = rows + included - ones_in(mask);
        kept = lane_value(included, WARP - 1);
        sync_warp();  // all rows were read
#pragma unroll
        for (int i = 0; i < GROUP; ++i) {
            if (d[i]) *to++ = d[i];
        }
    }
    u32 total, before = shared.look(states, group, kept, total);
    u64 data = HEADER_WORDS + message.groups;
    u32* to = (u32*)out + data + before;
#pragma unroll 8
    for (u32 i = lane; i < kept; i += WARP) to[i] = rows[i];
    if ((u64)(group + 1) * WARPS * CHUNK < message.words) return;
    u64 used = 4 * (data + shared.place + total);
    if (threadIdx.x == 0) {
        ((u32*)out)[0] = header_word((u32)dtype, (u32)dim);
        ((u32*)out)[1] = (u32)numel;
        *size = align16(used);
    }
    if (threadIdx.x < WARP) pad_payload(out, used, align16(used));
}

template <int WARPS, bool ADD>
HC_INLINE void decode(const u8* in, u64 nbytes, u64 numel, u64 dim, u64 dtype, void* out, u64* states,
                      u32 group, u32* damage) {
    __shared__ uint4 buffers[WARPS][(BUFFER + 3) / 4];
    __shared__ Lengths<WARPS> shared;
    u32 warp = threadIdx.x / WARP, lane = lane_id();
    u64 chunk = (u64)group * WARPS + warp;
    Message message(numel, dtype);
    Place place(message.words, chunk);
    const u32* words = (const u32*)in;
    u64 data = HEADER_WORDS + message.groups;
    bool fits = nbytes >= 4 * data && nbytes % 16 == 0;
    bool good = fits && words[0] == header_word((u32)dtype, (u32)dim) && words[1] == (u32)numel;
    u32 mask = fits && lane < place.used ? words[HEADER_WORDS + chunk * GROUPS + lane] : 0;
    u32 included = scan_lanes(ones_in(mask)), kept = lane_value(included, WARP - 1), total;
    u64 at = data + shared.look(states, group, kept, total);
    good = good && data + shared.place + total <= nbytes / 4;
    if (!good) report_damage(damage);
    if (!place.count) return;
    uint4* buffer = buffers[warp];
    u32 *rows = (u32*)buffer, skipped = (u32)at % 4, d[GROUP];
    if (good) {
        const uint4* from = (const uint4*)in + at / 4;
        u32 vectors = (skipped + kept + 3) / 4;
#pragma unroll
        for (u32 i = 0; i < BUFFER / 4; i += WARP) {
            if (i + lane < vectors) fetch(buffer + i + lane, from + i + lane);
        }
    }
    await_fetched();
    const u32* next = rows + skipped + included - ones_in(mask);
    mask = good ? mask : 0;
#pragma unroll
    for (int i = 0; i < GROUP; ++i) {
        d[i] = 0;
        if (mask >> i & 1) d[i] = *next++;
    }
    add_before_lanes(d);
    // words after a partial end are zero before they are transposed
    transpose_group(d);
    if (dim == 1) add_before_lanes(d);
    sync_warp();  // all words were read
#pragma unroll
    for (int i = 0; i < GROUP; ++i) rows[lane * ROW + i] = d[i];
    if (dim != 1) add_before_rows(rows, (u32)dim);
    sync_warp();
    Rows<ADD>{message, place, dtype, out}.store(rows);
}

#ifndef HC_PIECES
extern "C" __global__ void HC_BOUNDS(256, 4)
mpc_encode(const void* values, u64 numel, u64 dim, u64 dtype, u8* out, Workspace* work, u64* size) {
    encode<8>(values, numel, dim, dtype, out, work->states, take_ticket(work), size);
}

#define HC_DECODE(NAME, ADD)                                                                       \
    extern "C" __global__ void HC_BOUNDS(256, 4)                                                   \
    NAME(const u8* in, u64 nbytes, u64 numel, u64 dim, u64 dtype, void* out, Workspace* work, u32* damage) { \
        decode<8, ADD>(in, nbytes, numel, dim, dtype, out, work->states, take_ticket(work), damage); \
    }
#else
extern "C" __global__ void HC_BOUNDS(256, 3)
mpc_encode(HC_BY_VALUE(Pieces) given, u64 dim, u64 dtype, Workspace* work) {
    u32 block = take_ticket(work);
    Piece piece = as_table(given).at_block(block);
    encode<8>((const void*)piece.values, piece.numel, dim, dtype, (u8*)piece.payload,
              work->states + piece.first, (u32)(block - piece.first), (u64*)piece.size);
}

// Each rank's payloads have their own states, one per block.
#define HC_DECODE(NAME, ADD)                                                                       \
    extern "C" __global__ void HC_BOUNDS(256, 3)                                                   \
    NAME(HC_BY_VALUE(Pieces) given, u64 dim, u64 dtype, u64 ranks, Workspace* work, u32* damage) { \
        u32 block = take_ticket(work);                                                             \
        const Piece* piece = ranks_of_block(as_table(given), ranks, block);                        \
        u64* states = work->states + piece->first;                                                 \
        u32 group = (u32)(block - piece->first);                                                   \
        _Pragma("unroll 1") for (u32 rank = 0; rank < (u32)ranks; ++rank, ++piece) {               \
            decode<8, ADD>((const u8*)piece->payload, piece->size, piece->numel, dim, dtype,       \
                           (void*)piece->values, states, group, damage);                           \
            states += gridDim.x;                                                                   \
            sync_warp();                                                                           \
        }                                                                                          \
    }
#endif
HC_DECODE(mpc_decode, false)
HC_DECODE(mpc_add, true)

}  // namespace mpc
}  // namespace hybridcomp
