// What the encoder and the decoder of stepcode share: where a message's parts lie.
#pragma once

#include "cpu_instructions.h"
#include "shares.h"
#include "stepcode_model.h"

namespace hybridcomp {
namespace stepcode {

// The header as bytes: TileHeader with `mode`, `lowest` for what is zero there, the model's bytes last.
struct Head {
    u32 magic;
    u8 version, dtype, mode, lowest;
    u64 numel;
    u32 tile, length, model, reserved;
};
static_assert(sizeof(Head) == HEADER_BYTES, "the header is 32 bytes");

// Each context's ranges, and a bit for each direct symbol that it has.
struct Ranges {
    u32 of[CONTEXTS][ROW];
    u32 known[CONTEXTS];
};

}  // namespace stepcode
}  // namespace hybridcomp
