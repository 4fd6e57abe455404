// Lengths and layout of an exchange's parts, by rank, for messages with new lengths; each function takes one pass.
// Arrays are contiguous int64.
#include <memory>

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
    Words(PyObject* array, bool writes = false) {
        int flags = PyBUF_C_CONTIGUOUS | (writes ? PyBUF_WRITABLE : 0);
        if (PyObject_GetBuffer(array, &view_, flags)) throw Raised();
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
std::tuple<int64_t, int64_t, int64_t> read(PyObject* list, int64_t row, PyObject* out) {
    std::unique_ptr<PyObject, void (*)(PyObject*)> items(PySequence_Fast(list, "expected lengths"), Py_DecRef);
    if (!items) throw Raised();
    Words words(out, true);
    size_t count = (size_t)PySequence_Fast_GET_SIZE(items.get());
    require(count == words.size() && count, "out is of another length");
    PyObject** item = PySequence_Fast_ITEMS(items.get());
    int64_t total = 0, least = INT64_MAX, most = INT64_MIN;
    for (size_t i = 0; i < count; ++i) {
        int64_t found = PyLong_AsLongLong(item[i]);
        if (found == -1 && PyErr_Occurred()) throw Raised();
        if (__builtin_mul_overflow(found, row, &found) || __builtin_add_overflow(total, found, &total)) {
            throw std::overflow_error("lengths do not fit into 64 bits");
        }
        words.data()[i] = found;
        if (found < least) least = found;
        if (found > most) most = found;
    }
    return {total, least, most};
}

// Write to `out` the bytes of blockint's payload for each number of values in `numels`.
void blockint_nbytes(PyObject* numels, int setting, PyObject* out) {
    require(blockint::possible(setting), "setting is out of range");
    Words from(numels), to(out, true);
    require(from.size() == to.size(), "out is of another length");
    for (size_t i = 0; i < from.size(); ++i) {
        to.data()[i] = (int64_t)blockint::wire_nbytes((size_t)from.data()[i], setting);
    }
}

// Lay out consecutive parts and their payloads; part `skip` has no payload, its entry of `nbytes` becomes zero.
// A tile has 2^shift values. Writes a row for each part with values; returns the number of rows, their tiles,
// the bytes of all payloads, and the first element of part `skip`.
std::tuple<int64_t, int64_t, int64_t, int64_t> lay_out(PyObject* numels, PyObject* nbytes, size_t skip, int shift,
                                                       PyObject* rows) {
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
    return {row - (Row*)room.data(), tiles, payload, skipped};
}

const Binding binding("lengths", {function<read>("read"), function<blockint_nbytes>("blockint_nbytes"),
                                  function<lay_out>("lay_out")});

}  // namespace
}  // namespace lengths
}  // namespace hybridcomp
