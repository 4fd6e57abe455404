// Starts GPU kernels: hybridcomp.kernels._launch, the way from Python to cuLaunchKernel, or to
// hipModuleLaunchKernel, which takes the same arguments.
//
// A launch through CuPy or ctypes costs a Python program several times what the driver needs for it, and
// messages of tensor and pipeline parallelism are so short that this is what they wait for. Here arguments
// go from the interpreter's registers to the driver's array, with no object made in between.
//
// The driver is opened when it is first asked for: the extension is built and imported without one.
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
typedef int (*GetDevice)(int* device);
typedef int (*SetDevice)(int device);
typedef const char* (*ErrorText)(int error);

constexpr Py_ssize_t FIXED = 7, MOST_WORDS = 24;

// CUDA has contexts, which are pushed and popped. HIP has a current device: there a context is its number.
struct Driver {
    const char* kind = nullptr;
    LaunchKernel launch = nullptr;
    Context current = nullptr, pop = nullptr;
    PushContext push = nullptr;
    ErrorString describe = nullptr;
    GetDevice get_device = nullptr;
    SetDevice set_device = nullptr;
    ErrorText text_of = nullptr;
};
Driver driver;

template <class F>
bool find(void* library, const char* name, F& target) {
    target = (F)dlsym(library, name);
    if (!target) PyErr_Format(PyExc_OSError, "%s", dlerror());
    return target != nullptr;
}

bool find_cuda(void* library, Driver& found) {
    found.kind = "CUDA";
    return find(library, "cuLaunchKernel", found.launch) &&
           find(library, "cuCtxGetCurrent", found.current) &&
           find(library, "cuCtxPopCurrent_v2", found.pop) &&
           find(library, "cuCtxPushCurrent_v2", found.push) &&
           find(library, "cuGetErrorString", found.describe);
}

bool find_hip(void* library, Driver& found) {
    found.kind = "HIP";
    return find(library, "hipModuleLaunchKernel", found.launch) &&
           find(library, "hipGetDevice", found.get_device) &&
           find(library, "hipSetDevice", found.set_device) &&
           find(library, "hipGetErrorString", found.text_of);
}

PyObject* open_driver(PyObject*, PyObject* path) {
    const char* name = PyUnicode_AsUTF8(path);
    if (!name) return nullptr;
    void* library = dlopen(name, RTLD_NOW | RTLD_GLOBAL);
    if (!library) return PyErr_Format(PyExc_OSError, "%s", dlerror());
    Driver found;
    bool hip = dlsym(library, "hipModuleLaunchKernel");
    if (!(hip ? find_hip(library, found) : find_cuda(library, found))) return nullptr;
    driver = found;
    Py_RETURN_NONE;
}

PyObject* failed(const char* what, int error) {
    const char* text = nullptr;
    if (driver.text_of) text = driver.text_of(error);
    else if (driver.describe(error, &text)) text = nullptr;
    return PyErr_Format(PyExc_RuntimeError, "%s: %s error %d (%s)", what, driver.kind, error,
                        text ? text : "unknown");
}

int current(void** context) {
    if (driver.current) return driver.current(context);
    int device = 0, error = driver.get_device(&device);
    *context = (void*)(size_t)device;
    return error;
}

int enter(void* context) {
    return driver.push ? driver.push(context) : driver.set_device((int)(size_t)context);
}

void leave(void* before) {
    if (driver.pop) driver.pop(&before);
    else driver.set_device((int)(size_t)before);
}

PyObject* current_context(PyObject*, PyObject*) {
    if (!driver.kind) return PyErr_Format(PyExc_RuntimeError, "no driver is open");
    void* context = nullptr;
    int error = current(&context);
    if (error) return failed("current context", error);
    return PyLong_FromVoidPtr(context);
}

// (function, context, grid_x, grid_y, threads, stream, table, word, ...); `table`: None, or bytes that
// are the first argument of the kernel, by value.
PyObject* launch(PyObject*, PyObject* const* given, Py_ssize_t count) {
    if (!driver.kind) return PyErr_Format(PyExc_RuntimeError, "no driver is open");
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
    bool entered = false;
    error = current(&before);
    if (!error && before != context) {
        error = enter(context);
        entered = !error;
    }
    if (!error) {
        error = driver.launch(function, grid_x, grid_y, 1, threads, 1, 1, 0, stream, arguments, nullptr);
    }
    if (entered) leave(before);
    Py_END_ALLOW_THREADS
    if (error) return failed("launch of a kernel", error);
    Py_RETURN_NONE;
}

PyMethodDef METHODS[] = {
    {"open_driver", open_driver, METH_O, "Open libcuda or AMD's runtime; raises OSError where that fails."},
    {"current_context", current_context, METH_NOARGS, "The context of this thread (CUDA; 0: none), or its device (HIP)."},
    {"launch", (PyCFunction)(void (*)(void))launch, METH_FASTCALL,
     "Launch a kernel; raises RuntimeError with what the driver says."},
    {nullptr, nullptr, 0, nullptr},
};

PyModuleDef MODULE = {PyModuleDef_HEAD_INIT, "_launch", nullptr, -1, METHODS, nullptr, nullptr, nullptr,
                      nullptr};

}  // namespace

PyMODINIT_FUNC PyInit__launch() { return PyModule_Create(&MODULE); }
