#include "bind.h"
#include "cpu_instructions.h"

namespace hybridcomp {
namespace {

constexpr const char* NAMES[] = {"plain", "avx2", "avx512"};

const char* used() { return NAMES[(int)instructions()]; }

// Limit the instructions to `name`; return the name of those used from now on, the best of this machine below.
const char* limit(const char* name) {
    for (int number = 0; number < 3; ++number) {
        if (strcmp(name, NAMES[number])) continue;
        allowed_instructions() = (Instructions)number;
        return used();
    }
    throw std::invalid_argument(std::string("instructions must be plain, avx2 or avx512, found ") + name);
}

const Binding binding("instructions", {function<limit>("limit"), function<used>("used")});

}  // namespace
}  // namespace hybridcomp
