#include "bind.h"
#include "cpu_blockint.h"

namespace hybridcomp {
namespace blockint {
const Binding binding("blockint", bind_fixed<wire_nbytes, encode, decode, possible>);
}
}  // namespace hybridcomp
