#include "bind.h"
#include "cpu_instructions.h"

namespace hybridcomp {
namespace {

constexpr const char* NAMES[] = {"plain", "avx2", "avx512"};

const char* used() { return NAMES[(int)instructions()]; }

// Returns the name of what is used from now on: less than `name` where the machine lacks that.
const char* limit(const std::string& name) {
    for (int number = 0; number < 3; ++number) {
        if (name != NAMES[number]) continue;
        allowed_instructions() = (Instructions)number;
        return used();
    }
    throw std::invalid_argument("instructions must be plain, avx2 or avx512, found " + name);
}

}  // namespace

const Binding binding("instructions", [](py::module_& module) {
    module.def("limit", &limit);
    module.def("used", &used);
});

}  // namespace hybridcomp
