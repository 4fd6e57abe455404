#include "bind.h"
#include "cpu_zfp.h"

namespace hybridcomp {
namespace zfp {
const Binding binding("zfp", bind_fixed<wire_nbytes, encode, decode, in_range<10, 128>>());
}
}  // namespace hybridcomp
