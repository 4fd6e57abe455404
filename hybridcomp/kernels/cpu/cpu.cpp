// The extension hybridcomp.kernels._cpu: whatever the bind_<codec>.cpp beside this file bring.
#include "bind.h"

PyMODINIT_FUNC PyInit__cpu() {
    static PyModuleDef module = {PyModuleDef_HEAD_INIT, "_cpu", nullptr, -1, nullptr, nullptr, nullptr, nullptr, nullptr};
    PyObject* extension = PyModule_Create(&module);
    if (!extension) return nullptr;
    // kernels/__init__.py
    if (!PyModule_AddIntConstant(extension, "VERSION", 5) && hybridcomp::Binding::bind_all(extension)) return extension;
    Py_DECREF(extension);
    return nullptr;
}
