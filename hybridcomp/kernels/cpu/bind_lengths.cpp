// Lengths of the parts of an exchange, by rank: what a message whose lengths were never met before needs
// of them, in one pass each. Arrays are of int64, contiguous; the caller keeps them as long as a call.
#include "bind.h"
#include "cpu_blockint.h"

namespace hybridcomp {
namespace lengths {
namespace {

// A row of StretchTable in kernels/stretches.py.
struct Row {
    int64_t tile, values, numel, payload, out;
};

class Words {
  public:
    Words(py::handle array, bool writes = false) {
        int flags = PyBUF_C_CONTIGUOUS | (writes ? PyBUF_WRITABLE : 0);
        if (PyObject_GetBuffer(array.ptr(), &view_, flags)) throw py::error_already_set();
        if (view_.itemsize == sizeof(int64_t)) return;
        PyBuffer_Release(&view_);
        throw std::invalid_argument("lengths must be int64");
    }
    ~Words() { PyBuffer_Release(&view_); }
    Words(const Words&) = delete;
    Words& operator=(const Words&) = delete;

    size_t size() const { return (size_t)view_.len / sizeof(int64_t); }
    int64_t* data() const { return (int64_t*)view_.buf; }

  private:
    Py_buffer view_;
};

// Write `row` times each of `list` to `out`: (sum, smallest, largest) of what was written.
py::tuple read(py::handle list, int64_t row, py::handle out) {
    py::object items = py::reinterpret_steal<py::object>(PySequence_Fast(list.ptr(), "expected lengths"));
    if (!items) throw py::error_already_set();
    Words words(out, true);
    size_t count = (size_t)PySequence_Fast_GET_SIZE(items.ptr());
    require(count == words.size() && count, "out is of another length");
    PyObject** item = PySequence_Fast_ITEMS(items.ptr());
    int64_t total = 0, least = INT64_MAX, most = INT64_MIN;
    for (size_t i = 0; i < count; ++i) {
        int64_t found = PyLong_AsLongLong(item[i]);
        if (found == -1 && PyErr_Occurred()) throw py::error_already_set();
        if (__builtin_mul_overflow(found, row, &found) || __builtin_add_overflow(total, found, &total)) {
            throw std::overflow_error("lengths do not fit into 64 bits");
        }
        words.data()[i] = found;
        if (found < least) least = found;
        if (found > most) most = found;
    }
    return py::make_tuple(total, least, most);
}

// Write the payloads' bytes of as many values as each of `numels` says to `out`, with blockint.
void blockint_nbytes(py::handle numels, int setting, py::handle out) {
    require(blockint::possible(setting), "setting is out of range");
    Words from(numels), to(out, true);
    require(from.size() == to.size(), "out is of another length");
    for (size_t i = 0; i < from.size(); ++i) {
        to.data()[i] = (int64_t)blockint::wire_nbytes((size_t)from.data()[i], setting);
    }
}

// Lay out parts that follow each other, as their payloads do, but for part `skip`, which has none: its
// bytes become zero. A tile has 2^shift values. Writes a row for each part that has values:
// (rows, their tiles, bytes of all payloads, first element of the part that was skipped).
py::tuple lay_out(py::handle numels, py::handle nbytes, size_t skip, int shift, py::handle rows) {
    Words lengths(numels), sizes(nbytes, true), room(rows, true);
    require(lengths.size() == sizes.size() && 5 * lengths.size() == room.size(), "arrays do not match");
    require(skip < lengths.size() && shift >= 0 && shift < 32, "no such part");
    Row* row = (Row*)room.data();
    int64_t tiles = 0, values = 0, payload = 0, skipped = 0;
    sizes.data()[skip] = 0;
    for (size_t i = 0; i < lengths.size(); ++i) {
        int64_t numel = lengths.data()[i];
        if (i == skip) {
            skipped = values;
        } else if (numel) {
            *row++ = {tiles, values, numel, payload, values};
            tiles += (numel + ((int64_t)1 << shift) - 1) >> shift;
        }
        values += numel;
        payload += sizes.data()[i];
    }
    return py::make_tuple(row - (Row*)room.data(), tiles, payload, skipped);
}

}  // namespace

const Binding binding("lengths", [](py::module_& module) {
    module.def("read", &read);
    module.def("blockint_nbytes", &blockint_nbytes);
    module.def("lay_out", &lay_out);
});

}  // namespace lengths
}  // namespace hybridcomp
