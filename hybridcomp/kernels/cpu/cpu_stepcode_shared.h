// Layout of a message, for stepcode's encoder and decoder.
#pragma once

#include "cpu_instructions.h"
#include "shares.h"
#include "stepcode_model.h"

namespace hybridcomp {
namespace stepcode {

// The header as bytes: TileHeader, with `lowest` in place of its zero, and the model's length.
struct Head {
    u32 magic;
    u8 version, dtype, mode, lowest;
    u64 numel;
    u32 tile, length, model, reserved;
};
static_assert(sizeof(Head) == HEADER_BYTES, "the header is 32 bytes");

// The ranges of each context, and a bit for each direct symbol in it.
struct Ranges {
    u32 of[CONTEXTS][ROW];
    u32 known[CONTEXTS];
};

}  // namespace stepcode
}  // namespace hybridcomp
