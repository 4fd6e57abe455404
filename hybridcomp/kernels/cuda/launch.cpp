// Starts CUDA kernels: hybridcomp.kernels._launch, the way from Python to cuLaunchKernel.
//
// A launch through CuPy or ctypes costs a Python program several times what the driver needs for it, and
// messages of tensor and pipeline parallelism are so short that this is what they wait for. Here arguments
// go from the interpreter's registers to the driver's array, with no object made in between.
//
// libcuda is opened when it is first asked for: the extension is built and imported without CUDA.
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <dlfcn.h>

namespace {

typedef unsigned long long Word;
typedef int (*LaunchKernel)(void* function, unsigned grid_x, unsigned grid_y, unsigned grid_z,
                            unsigned block_x, unsigned block_y, unsigned block_z, unsigned shared,
                            void* stream, void** arguments, void** extra);
typedef int (*Context)(void** context);
typedef int (*PushContext)(void* context);
typedef int (*ErrorString)(int error, const char** text);

constexpr Py_ssize_t FIXED = 7, MOST_WORDS = 24;

struct Driver {
    LaunchKernel launch = nullptr;
    Context current = nullptr, pop = nullptr;
    PushContext push = nullptr;
    ErrorString describe = nullptr;
};
Driver driver;

template <class F>
bool find(void* library, const char* name, F& target) {
    target = (F)dlsym(library, name);
    if (!target) PyErr_Format(PyExc_OSError, "libcuda has no %s", name);
    return target != nullptr;
}

PyObject* open_driver(PyObject*, PyObject* path) {
    const char* name = PyUnicode_AsUTF8(path);
    if (!name) return nullptr;
    void* library = dlopen(name, RTLD_NOW | RTLD_GLOBAL);
    if (!library) return PyErr_Format(PyExc_OSError, "%s", dlerror());
    Driver found;
    if (!find(library, "cuLaunchKernel", found.launch) ||
        !find(library, "cuCtxGetCurrent", found.current) ||
        !find(library, "cuCtxPopCurrent_v2", found.pop) ||
        !find(library, "cuCtxPushCurrent_v2", found.push) ||
        !find(library, "cuGetErrorString", found.describe)) {
        return nullptr;
    }
    driver = found;
    Py_RETURN_NONE;
}

PyObject* failed(const char* what, int error) {
    const char* text = nullptr;
    if (driver.describe(error, &text) || !text) text = "unknown";
    return PyErr_Format(PyExc_RuntimeError, "%s: CUDA error %d (%s)", what, error, text);
}

PyObject* current_context(PyObject*, PyObject*) {
    if (!driver.current) return PyErr_Format(PyExc_RuntimeError, "libcuda is not open");
    void* context = nullptr;
    int error = driver.current(&context);
    if (error) return failed("cuCtxGetCurrent", error);
    return PyLong_FromVoidPtr(context);
}

// (function, context, grid_x, grid_y, threads, stream, table, word, ...); `table`: None, or bytes that
// are the first argument of the kernel, by value.
PyObject* launch(PyObject*, PyObject* const* given, Py_ssize_t count) {
    if (!driver.launch) return PyErr_Format(PyExc_RuntimeError, "libcuda is not open");
    if (count < FIXED || count > FIXED + MOST_WORDS) {
        return PyErr_Format(PyExc_TypeError, "launch takes %zd arguments and up to %zd words", FIXED,
                            MOST_WORDS);
    }
    void* function = PyLong_AsVoidPtr(given[0]);
    void* context = PyLong_AsVoidPtr(given[1]);
    unsigned grid_x = (unsigned)PyLong_AsUnsignedLong(given[2]);
    unsigned grid_y = (unsigned)PyLong_AsUnsignedLong(given[3]);
    unsigned threads = (unsigned)PyLong_AsUnsignedLong(given[4]);
    void* stream = PyLong_AsVoidPtr(given[5]);
    void* arguments[MOST_WORDS + 1];
    Word words[MOST_WORDS];
    Py_ssize_t number = 0;
    if (given[6] != Py_None) {
        char* table = PyBytes_AsString(given[6]);
        if (!table) return nullptr;
        arguments[number++] = table;
    }
    for (Py_ssize_t i = FIXED; i < count; ++i) {
        words[i - FIXED] = PyLong_AsUnsignedLongLongMask(given[i]);
        arguments[number++] = &words[i - FIXED];
    }
    if (PyErr_Occurred()) return nullptr;
    int error = 0;
    Py_BEGIN_ALLOW_THREADS
    // a thread that has not used the device yet, or uses another one, is in another context
    void* before = nullptr;
    bool pushed = false;
    error = driver.current(&before);
    if (!error && before != context) {
        error = driver.push(context);
        pushed = !error;
    }
    if (!error) {
        error = driver.launch(function, grid_x, grid_y, 1, threads, 1, 1, 0, stream, arguments, nullptr);
    }
    if (pushed) driver.pop(&before);
    Py_END_ALLOW_THREADS
    if (error) return failed("cuLaunchKernel", error);
    Py_RETURN_NONE;
}

PyMethodDef METHODS[] = {
    {"open_driver", open_driver, METH_O, "Open libcuda; raises OSError where that fails."},
    {"current_context", current_context, METH_NOARGS, "The context of this thread, 0: none."},
    {"launch", (PyCFunction)(void (*)(void))launch, METH_FASTCALL,
     "Launch a kernel; raises RuntimeError with what the driver says."},
    {nullptr, nullptr, 0, nullptr},
};

PyModuleDef MODULE = {PyModuleDef_HEAD_INIT, "_launch", nullptr, -1, METHODS, nullptr, nullptr, nullptr,
                      nullptr};

}  // namespace

PyMODINIT_FUNC PyInit__launch() { return PyModule_Create(&MODULE); }
