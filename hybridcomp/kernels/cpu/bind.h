// Hand a codec's loops to Python, without a list of codecs: each bind_<codec>.cpp has one Binding, whose
// functions become the module hybridcomp.kernels._cpu.<codec> when Python loads the extension.
//
// Pointers are integers in Python, so that the extension builds without torch; the codecs check tensors before
// they come here, and the sizes are checked once more. Python.h alone compiles in a tenth of pybind11's time.
#pragma once

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <array>
#include <new>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "cpu.h"

namespace hybridcomp {

// Thrown after Python's error was set.
struct Raised {};

// Convert an argument to T; where that fails, Python's error is set.
template <class T>
T argument(PyObject* given) {
    if constexpr (std::is_same_v<T, PyObject*>) {
        return given;
    } else if constexpr (std::is_same_v<T, const char*>) {
        return PyUnicode_AsUTF8(given);
    } else if constexpr (std::is_same_v<T, bool>) {
        return PyObject_IsTrue(given) == 1;
    } else if constexpr (std::is_floating_point_v<T>) {
        return (T)PyFloat_AsDouble(given);
    } else if constexpr (std::is_pointer_v<T>) {
        return (T)argument<uintptr_t>(given);
    } else {
        long long value = PyLong_AsLongLong(given);
        if ((long long)(T)value != value || (std::is_unsigned_v<T> && value < 0)) {
            if (!PyErr_Occurred()) PyErr_SetString(PyExc_OverflowError, "an argument is out of range");
        }
        return (T)value;
    }
}

inline PyObject* result(const char* text) { return PyUnicode_FromString(text); }
template <class T, std::enable_if_t<std::is_integral_v<T>, int> = 0>
PyObject* result(T number) { return PyLong_FromLongLong((long long)number); }
template <size_t N>
PyObject* result(const std::array<u8, N>& raw) {
    return PyBytes_FromStringAndSize((const char*)raw.data(), N);
}
template <class... A>
PyObject* result(const std::tuple<A...>& several) {
    PyObject* found = PyTuple_New(sizeof...(A));
    Py_ssize_t at = 0;
    std::apply([&](const A&... each) { (PyTuple_SET_ITEM(found, at++, result(each)), ...); }, several);
    return found;
}

// F as a function of Python; while it runs, other threads may, unless it takes Python's objects.
template <auto F>
struct Call;

template <class R, class... A, R (*F)(A...)>
struct Call<F> {
    static PyObject* call(PyObject*, PyObject* const* given, Py_ssize_t count) {
        if (count != sizeof...(A)) {
            return PyErr_Format(PyExc_TypeError, "expected %zd arguments, found %zd", sizeof...(A), count);
        }
        return run(given, std::index_sequence_for<A...>());
    }

  private:
    struct Released {
        PyThreadState* state = (std::is_same_v<A, PyObject*> || ...) ? nullptr : PyEval_SaveThread();
        ~Released() {
            if (state) PyEval_RestoreThread(state);
        }
    };

    static R released(A... arguments) {
        Released others;
        return F(arguments...);
    }

    template <size_t... I>
    static PyObject* run(PyObject* const* given, std::index_sequence<I...>) {
        std::tuple<A...> arguments{argument<A>(given[I])...};
        if (PyErr_Occurred()) return nullptr;
        try {
            if constexpr (std::is_void_v<R>) {
                std::apply(released, arguments);
                Py_RETURN_NONE;
            } else {
                return result(std::apply(released, arguments));
            }
        } catch (const Raised&) {
            return nullptr;
        } catch (const std::invalid_argument& error) {
            PyErr_SetString(PyExc_ValueError, error.what());
        } catch (const std::overflow_error& error) {
            PyErr_SetString(PyExc_OverflowError, error.what());
        } catch (const std::bad_alloc&) {
            PyErr_NoMemory();
        } catch (const std::exception& error) {
            PyErr_SetString(PyExc_RuntimeError, error.what());
        }
        return nullptr;
    }
};

template <auto F>
PyMethodDef function(const char* name) {
    return {name, (PyCFunction)(void (*)(void))Call<F>::call, METH_FASTCALL, nullptr};
}

// Kept in a chain: objects of several files are made in no known order.
class Binding {
  public:
    Binding(const char* codec, std::vector<PyMethodDef> functions)
        : codec_(codec), functions_(std::move(functions)), next_(first()) {
        functions_.push_back({nullptr, nullptr, 0, nullptr});
        first() = this;
    }

    // False where Python has an error.
    static bool bind_all(PyObject* extension) {
        const char* name = PyModule_GetName(extension);
        if (!name) return false;
        for (Binding* one = first(); one; one = one->next_) {
            if (PyObject_HasAttrString(extension, one->codec_)) {
                PyErr_Format(PyExc_ImportError, "two files bind kernels of %s", one->codec_);
                return false;
            }
            PyObject* module = PyImport_AddModule((std::string(name) + "." + one->codec_).c_str());
            if (!module || PyModule_AddFunctions(module, one->functions_.data()) ||
                PyObject_SetAttrString(extension, one->codec_, module)) return false;
        }
        return true;
    }

  private:
    static Binding*& first() {
        static Binding* first = nullptr;
        return first;
    }

    const char* codec_;
    std::vector<PyMethodDef> functions_;
    Binding* next_;
};

inline void check_dtype(int dtype, bool add = false) {
    require(dtype >= (int)Dtype::fp32 && dtype <= (int)Dtype::fp16, "unknown dtype code");
    require(!add || dtype == (int)Dtype::fp32, "sums are accumulated in fp32");
}

template <int FIRST, int LAST>
bool in_range(int setting) { return setting >= FIRST && setting <= LAST; }

// `encode` and `decode` of a codec of fixed size with one setting (FixedKernels in kernels/__init__.py).
// SIZE is what its payload takes, POSSIBLE whether a setting is one of its own.
template <size_t (*SIZE)(size_t, int), void (*ENCODE)(int, int, const void*, size_t, u8*, int),
          void (*DECODE)(int, int, const u8*, void*, size_t, bool, int), bool (*POSSIBLE)(int)>
struct Fixed {
    static void encode(int setting, int dtype, const void* in, size_t numel, u8* out, size_t nbytes, int threads) {
        require(POSSIBLE(setting), "setting is out of range");
        require(nbytes >= SIZE(numel, setting), "out is too short");
        check_dtype(dtype);
        ENCODE(setting, dtype, in, numel, out, threads);
    }
    static void decode(int setting, int dtype, const u8* in, size_t nbytes, void* out, size_t numel, bool add,
                       int threads) {
        require(POSSIBLE(setting), "setting is out of range");
        require(nbytes >= SIZE(numel, setting), "payload is too short");
        check_dtype(dtype, add);
        DECODE(setting, dtype, in, out, numel, add, threads);
    }
};

template <size_t (*SIZE)(size_t, int), void (*ENCODE)(int, int, const void*, size_t, u8*, int),
          void (*DECODE)(int, int, const u8*, void*, size_t, bool, int), bool (*POSSIBLE)(int)>
std::vector<PyMethodDef> bind_fixed() {
    using Functions = Fixed<SIZE, ENCODE, DECODE, POSSIBLE>;
    return {function<Functions::encode>("encode"), function<Functions::decode>("decode")};
}

}  // namespace hybridcomp
