#include "bind.h"
#include "cpu_changes.h"

namespace hybridcomp {
namespace changes {
namespace {

typedef std::array<u8, DIGEST> Digest;

Digest bind_digest(const u8* in, size_t nbytes, int threads) {
    Digest found;
    digest(in, nbytes, found.data(), threads);
    return found;
}

std::tuple<size_t, Digest> bind_compare(const u16* in, const u16* old, size_t numel, u32* mask, int threads) {
    Digest found;
    size_t differ = compare(in, old, numel, mask, found.data(), threads);
    return {differ, found};
}

const Binding binding("changes", {function<bind_digest>("digest"), function<bind_compare>("compare"),
                                  function<pick>("pick"), function<put>("put"), function<places>("places")});

}  // namespace
}  // namespace changes
}  // namespace hybridcomp
