// SPDX-License-Identifier: Apache-2.0
// The Python binding: unpacks numpy buffers.  The only file that knows Python.
//
// In CPython's limited API, so that one binary serves every Python from 3.11 on, the first whose
// limited API has buffers.
#define PY_SSIZE_T_CLEAN
#ifndef Py_LIMITED_API  // CMake defines it too
#define Py_LIMITED_API 0x030B0000
#endif
#include <Python.h>

#include <cstring>
#include <exception>
#include <stdexcept>
#include <string>
#include <type_traits>

#include "dlpack.h"
#include "format.h"
#include "host.h"
#include "isa.h"
#include "parallel.h"

namespace {

// A Python exception has been set.
struct Raised : std::exception {};

[[noreturn]] void fail(const std::string& message) {
  throw std::invalid_argument("zero8: " + message);
}

int integer(PyObject* number) {
  const long value = PyLong_AsLong(number);
  if (value == -1 && PyErr_Occurred()) throw Raised();
  return static_cast<int>(value);
}

// The records of a one-dimensional numpy array whose items have the size of T; the array stays
// where it is for as long.
template <class T>
class Records {
 public:
  Records(PyObject* array, const char* name) {
    // Without PyBUF_FORMAT, a text that numpy makes anew each time: 1 us.
    constexpr int kFlags = PyBUF_STRIDES | (std::is_const_v<T> ? 0 : PyBUF_WRITABLE);
    if (PyObject_GetBuffer(array, &view_, kFlags) != 0) throw Raised();
    if (is_row()) return;
    const std::string found = std::to_string(view_.itemsize);
    PyBuffer_Release(&view_);
    fail(std::string(name) + " records of " + found + " bytes, the kernel expects a row of " +
         std::to_string(sizeof(T)) + "; reinstall zero8");
  }
  ~Records() { PyBuffer_Release(&view_); }
  Records(const Records&) = delete;
  Records& operator=(const Records&) = delete;

  T* data() const { return static_cast<T*>(view_.buf); }
  int64_t size() const { return view_.shape[0]; }

 private:
  Py_buffer view_;

  bool is_row() const {
    return view_.ndim == 1 && view_.itemsize == static_cast<Py_ssize_t>(sizeof(T)) &&
           (view_.shape[0] <= 1 || view_.strides[0] == view_.itemsize);
  }
};

// While it lives, other threads run Python.
class WithoutGil {
 public:
  WithoutGil() : state_(PyEval_SaveThread()) {}
  ~WithoutGil() { PyEval_RestoreThread(state_); }
  WithoutGil(const WithoutGil&) = delete;
  WithoutGil& operator=(const WithoutGil&) = delete;

 private:
  PyThreadState* state_;
};

void check(const zero8::Segment* segments, int64_t num_segments, int64_t num_scalars,
           bool takes_int8) {
  const std::string found = zero8::violation(segments, num_segments, num_scalars, takes_int8);
  if (!found.empty()) fail(found + ", which no kernel takes; please report this");
}

PyObject* none() {
  Py_INCREF(Py_None);
  return Py_None;
}

// What `step` checks, for a kernel that is launched from Python, and takes no INT8 weights.
PyObject* check_records(PyObject* const* args) {
  const Records<const zero8::Segment> rows(args[0], "segment");
  const Records<int64_t> sums(args[2], "sum");
  if (sums.size() != rows.size() + 1) fail("expected one sum more than segments");
  check(rows.data(), rows.size(), integer(args[1]), false);
  zero8::sum_blocks(rows.data(), rows.size(), sums.data());
  return none();
}

PyObject* step(PyObject* const* args) {
  const Records<zero8::Segment> segment(args[0], "segment");
  const Records<const zero8::StepScalars> scalar(args[1], "scalar");
  const Records<const zero8::CodecMaps> map(args[2], "map");
  const int num_threads = integer(args[3]), isa = integer(args[4]);
  if (isa < 0 || isa >= zero8::kNumIsas || !zero8::kIsas[isa].is_supported()) {
    fail("this processor does not have the instruction set asked for");
  }
  if (map.size() != 1) fail("expected one record of maps");
  check(segment.data(), segment.size(), scalar.size(), true);
  {
    const WithoutGil others;
    zero8::step(segment.data(), segment.size(), scalar.data(), *map.data(), num_threads,
                zero8::kIsas[isa]);
  }
  return none();
}

PyObject* fill(PyObject* const* args) {
  const Records<zero8::Segment> segment(args[0], "segment");
  const Records<const zero8::KeptPiece> piece(args[1], "piece");
  const Records<const uint64_t> address(args[2], "address");
  const Records<const int64_t> index(args[3], "index"), step(args[4], "step");
  const zero8::StepsOfParams of{address.data(), address.data() + index.size(),
                                index.data(),   index.size(),
                                step.data(),    step.size()};
  if (segment.size() != piece.size() || address.size() != 2 * index.size() ||
      !zero8::fill(segment.data(), piece.data(), segment.size(), of)) {
    fail("got records of other parameters than step");
  }
  return none();
}

PyObject* sum_of_squares(PyObject* const* args) {
  const Records<const zero8::Numbers> numbers(args[0], "gradient");
  const int num_threads = integer(args[1]);
  double sum;
  {
    const WithoutGil others;
    sum = zero8::sum_of_squares(numbers.data(), numbers.size(), num_threads);
  }
  return PyFloat_FromDouble(sum);
}

// FNV-1a over whole numbers, of what is small enough to be a description; 0 for other tensors.
int64_t contents_of(const zero8::dlpack::Tensor& t) {
  const int64_t numel = zero8::dlpack::numel(t);
  if (!zero8::dlpack::is_int64_on_host(t) || !zero8::dlpack::is_contiguous(t) || !t.data ||
      numel > zero8::kMaxHashed) {
    return 0;
  }
  const char* data = static_cast<const char*>(t.data) + t.byte_offset;
  uint64_t hash = 0xCBF29CE484222325u;
  for (int64_t i = 0; i < numel; ++i) {
    uint64_t word;
    std::memcpy(&word, data + i * sizeof word, sizeof word);
    hash = (hash ^ word) * 0x100000001B3u;
  }
  return static_cast<int64_t>(hash);
}

zero8::TensorRecord described(const zero8::dlpack::ExchangeApi& api, PyObject* tensor) {
  zero8::dlpack::Tensor t;
  if (api.from_py_object(tensor, &t) != 0) {
    PyErr_Clear();
    return {0, 0, zero8::kWithoutMemory, 0, 0};
  }
  const int64_t dtype = t.dtype_code << 24 | t.dtype_bits << 16 | t.dtype_lanes;
  const int64_t device = static_cast<int64_t>(t.device_type) << 16 | t.device_id;
  return {reinterpret_cast<uint64_t>(t.data) + t.byte_offset, zero8::dlpack::numel(t),
          device << 32 | dtype, zero8::dlpack::is_contiguous(t), contents_of(t)};
}

// Describes the objects of a list.  Those of other types than `tensor_type` are numbers that lie
// between a state's tensors.  Returns False, and has written nothing, where torch's interface is
// unknown.
PyObject* describe(PyObject* const* args) {
  const auto* const api = static_cast<const zero8::dlpack::ExchangeApi*>(
      PyCapsule_GetPointer(args[0], zero8::dlpack::kCapsuleName));
  if (!api) throw Raised();
  auto* const tensor_type = reinterpret_cast<PyTypeObject*>(args[1]);
  const Records<zero8::TensorRecord> records(args[3], "tensor");
  if (api->major_version != zero8::dlpack::kMajorVersion || !api->from_py_object) {
    return PyBool_FromLong(0);
  }
  if (records.size() != PyList_Size(args[2])) fail("got another number of records than of objects");
  for (int64_t i = 0; i < records.size(); ++i) {
    PyObject* const object = PyList_GetItem(args[2], i);
    const bool is_tensor = PyObject_TypeCheck(object, tensor_type);
    records.data()[i] = is_tensor ? described(*api, object) : zero8::TensorRecord{0, 0, 0, 1, 0};
  }
  return PyBool_FromLong(1);
}

PyObject* isas(PyObject* const*) {
  PyObject* const found = PyDict_New();
  for (int isa = 0; found && isa < zero8::kNumIsas; ++isa) {
    PyObject* const number = PyLong_FromLong(zero8::kIsas[isa].is_supported() ? isa : -1);
    const bool is_set = number && PyDict_SetItemString(found, zero8::kIsas[isa].name, number) == 0;
    Py_XDECREF(number);
    if (is_set) continue;
    Py_DECREF(found);
    return nullptr;
  }
  return found;
}

PyObject* has_threads(PyObject* const*) { return PyBool_FromLong(zero8::has_threads()); }

using Function = PyObject*(PyObject* const*);

// What Python calls: a function that takes so many arguments, and may throw.
template <Function* kFunction, int kNumArgs>
PyObject* called(PyObject*, PyObject* tuple) {
  try {
    if (PyTuple_Size(tuple) != kNumArgs) fail("got another number of arguments");
    PyObject* args[kNumArgs + 1];
    for (int i = 0; i < kNumArgs; ++i) args[i] = PyTuple_GetItem(tuple, i);
    return kFunction(args);
  } catch (const Raised&) {
    return nullptr;
  } catch (const std::invalid_argument& error) {
    PyErr_SetString(PyExc_ValueError, error.what());
  } catch (const std::bad_alloc&) {
    PyErr_NoMemory();
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
  }
  return nullptr;
}

template <Function* kFunction, int kNumArgs>
PyMethodDef method(const char* name, const char* doc) noexcept {
  return {name, &called<kFunction, kNumArgs>, METH_VARARGS, doc};
}

PyMethodDef methods[] = {
    method<step, 5>("step", "Take one optimizer step on every segment, in place."),
    method<check_records, 3>("check", "Check segments, and sum up their blocks: host.h."),
    method<fill, 5>("fill", "Fill into kept records what changes from step to step: host.h."),
    method<sum_of_squares, 2>("sum_of_squares", "Read gradients once, for their norm: host.h."),
    method<describe, 4>("describe", "Write down where tensors are, and of what kind."),
    method<isas, 0>("isas", "Return name -> number, slowest first; -1 if the processor lacks it."),
    method<has_threads, 0>("has_threads", "Return whether an OpenMP runtime is loaded."),
    {nullptr, nullptr, 0, nullptr},
};

PyModuleDef definition = {PyModuleDef_HEAD_INIT, "zero8_kernel", {}, 0, methods, {}, {}, {}, {}};

}  // namespace

PyMODINIT_FUNC PyInit_zero8_kernel() { return PyModuleDef_Init(&definition); }
