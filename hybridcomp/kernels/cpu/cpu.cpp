// The extension hybridcomp.kernels._cpu: whatever the bind_<codec>.cpp beside this file bring.
#include "bind.h"

PYBIND11_MODULE(_cpu, extension) {
    extension.attr("VERSION") = 5;  // kernels/__init__.py
    hybridcomp::Binding::bind_all(extension);
}
