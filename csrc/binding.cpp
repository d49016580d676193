// SPDX-License-Identifier: Apache-2.0
// The Python binding: unpacks numpy buffers.  The only file that knows Python.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <cstring>
#include <iterator>
#include <string>
#include <type_traits>
#include <vector>

#include "check.h"
#include "dlpack.h"
#include "fill.h"
#include "format.h"
#include "isa.h"
#include "norm.h"
#include "stream.h"

namespace py = pybind11;

namespace {

// The records of a one-dimensional numpy array whose items have the size of T; the array stays
// where it is for as long.
//
// py::buffer_info would ask for their format, a text that numpy makes anew each time: 1 us.
template <class T>
class Records {
 public:
  Records(const py::buffer& array, const char* name) {
    constexpr int kFlags = PyBUF_STRIDES | (std::is_const_v<T> ? 0 : PyBUF_WRITABLE);
    if (PyObject_GetBuffer(array.ptr(), &view_, kFlags) != 0) throw py::error_already_set();
    if (is_row()) return;
    const std::string found = std::to_string(view_.itemsize);
    PyBuffer_Release(&view_);
    throw py::value_error(std::string("zero8: ") + name + " records of " + found +
                          " bytes, the kernel expects a row of " + std::to_string(sizeof(T)) +
                          "; rebuild the op with `zero8 build`");
  }
  ~Records() { PyBuffer_Release(&view_); }
  Records(const Records&) = delete;
  Records& operator=(const Records&) = delete;

  T* data() const { return static_cast<T*>(view_.buf); }
  int64_t size() const { return view_.shape[0]; }

 private:
  Py_buffer view_;

  bool is_row() const {
    return view_.ndim == 1 && view_.itemsize == static_cast<py::ssize_t>(sizeof(T)) &&
           (view_.shape[0] <= 1 || view_.strides[0] == view_.itemsize);
  }
};

void check(const zero8::Segment* segments, int64_t num_segments, int64_t num_scalars,
           bool takes_int8) {
  const std::string found = zero8::violation(segments, num_segments, num_scalars, takes_int8);
  if (!found.empty()) throw py::value_error("zero8: " + found);
}

// What `step` checks, for a kernel that is launched from Python, and takes no INT8 weights.
void check_records(const py::buffer& segments, int64_t num_scalars) {
  const Records<const zero8::Segment> rows(segments, "segment");
  check(rows.data(), rows.size(), num_scalars, false);
}

void step(const py::buffer& segments, const py::buffer& scalars, const py::buffer& maps,
          int num_threads, int isa) {
  if (isa < 0 || isa >= zero8::kNumIsas || !zero8::kIsas[isa].is_supported()) {
    throw py::value_error("zero8: this processor does not have the instruction set asked for");
  }
  const Records<zero8::Segment> segment(segments, "segment");
  const Records<const zero8::StepScalars> scalar(scalars, "scalar");
  const Records<const zero8::CodecMaps> map(maps, "map");
  if (map.size() != 1) throw py::value_error("zero8: expected one record of maps");
  check(segment.data(), segment.size(), scalar.size(), true);
  const py::gil_scoped_release release;
  zero8::step(segment.data(), segment.size(), scalar.data(), *map.data(), num_threads,
              zero8::kIsas[isa]);
}

void fill(const py::buffer& segments, const py::buffer& pieces, const py::buffer& addresses,
          const py::buffer& which, const py::buffer& steps) {
  const Records<zero8::Segment> segment(segments, "segment");
  const Records<const zero8::KeptPiece> piece(pieces, "piece");
  const Records<const uint64_t> address(addresses, "address");
  const Records<const int64_t> index(which, "index"), step(steps, "step");
  const zero8::StepsOfParams of{address.data(), address.data() + index.size(),
                                index.data(),   index.size(),
                                step.data(),    step.size()};
  if (segment.size() != piece.size() || address.size() != 2 * index.size() ||
      !zero8::fill(segment.data(), piece.data(), segment.size(), of)) {
    throw py::value_error("zero8: got records of other parameters than step");
  }
}

// The bytes of a contiguous numpy array of uint8.
py::buffer_info bytes_of(const py::buffer& array, bool writable) {
  py::buffer_info info = array.request(writable);
  if (info.ndim != 1 || info.itemsize != 1 || info.strides[0] != 1) {
    throw py::value_error("zero8: got an array that is not one of contiguous bytes");
  }
  return info;
}

bool is_of_codes(int64_t bits) {
  return std::any_of(std::begin(zero8::kCodecSizes), std::end(zero8::kCodecSizes),
                     [&](const zero8::CodecSize& size) { return size.bits == bits; });
}

void copy(const py::buffer& param, const py::buffer& grad, const std::vector<py::buffer>& states,
          int64_t numel, int num_threads) {
  const py::buffer_info param_info = bytes_of(param, true), grad_info = bytes_of(grad, false);
  if (numel < 1) throw py::value_error("zero8: got no elements to copy");
  bool whole = param_info.size % numel == 0 && grad_info.size == param_info.size;
  std::vector<py::buffer_info> state_infos;  // holds the buffers
  std::vector<zero8::State> items;
  for (const py::buffer& state : states) {
    state_infos.push_back(bytes_of(state, true));
    const py::buffer_info& info = state_infos.back();
    const int64_t bits = 8 * info.size / numel;
    items.push_back({static_cast<uint8_t*>(info.ptr), bits});
    whole = whole && bits * numel == 8 * info.size && (bits % 8 == 0 || is_of_codes(bits));
  }
  if (!whole) throw py::value_error("zero8: got arrays of different numbers of elements");
  const zero8::Streams streams{static_cast<uint8_t*>(param_info.ptr),
                               static_cast<const uint8_t*>(grad_info.ptr),
                               param_info.size / numel,
                               items.data(),
                               static_cast<int64_t>(items.size()),
                               numel};
  const py::gil_scoped_release release;
  zero8::copy(streams, num_threads);
}

double sum_of_squares(const py::buffer& gradients, int num_threads) {
  const Records<const zero8::Numbers> numbers(gradients, "gradient");
  const py::gil_scoped_release release;
  return zero8::sum_of_squares(numbers.data(), numbers.size(), num_threads);
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

// Describes objects one after the other.  Those of other types than `tensor_type` are numbers that
// lie between a state's tensors.
class Describer {
 public:
  Describer(const py::capsule& exchange_api, const py::type& tensor_type)
      : api_(static_cast<const zero8::dlpack::ExchangeApi*>(
            PyCapsule_GetPointer(exchange_api.ptr(), zero8::dlpack::kCapsuleName))),
        tensor_type_(reinterpret_cast<PyTypeObject*>(tensor_type.ptr())) {
    if (api_ == nullptr) throw py::error_already_set();
  }

  // Whether torch's interface is one that this knows; if not, nothing else may be called.
  bool is_known() const {
    return api_->major_version == zero8::dlpack::kMajorVersion && api_->from_py_object;
  }

  zero8::TensorRecord operator()(const py::handle& object) const {
    if (!PyObject_TypeCheck(object.ptr(), tensor_type_)) return {0, 0, 0, 1, 0};
    return described(*api_, object.ptr());
  }

 private:
  const zero8::dlpack::ExchangeApi* api_;
  PyTypeObject* tensor_type_;
};

// Returns false, and has written nothing, where torch's interface is unknown.
bool describe(const py::capsule& exchange_api, const py::type& tensor_type, const py::list& objects,
              const py::buffer& out) {
  const Describer describer(exchange_api, tensor_type);
  if (!describer.is_known()) return false;
  const Records<zero8::TensorRecord> records(out, "tensor");
  if (records.size() != static_cast<py::ssize_t>(objects.size())) {
    throw py::value_error("zero8: got another number of records than of objects");
  }
  zero8::TensorRecord* record = records.data();
  for (const py::handle& object : objects) *record++ = describer(object);
  return true;
}

// Writes the addresses of the first objects down and returns whether all else is as it was
// recorded; None where torch's interface is unknown.
py::object describe_again(const py::capsule& exchange_api, const py::type& tensor_type,
                          const py::list& objects, const py::buffer& before,
                          const py::buffer& addresses) {
  const Describer describer(exchange_api, tensor_type);
  if (!describer.is_known()) return py::none();
  const Records<const zero8::TensorRecord> records(before, "tensor");
  const Records<uint64_t> to(addresses, "address");
  if (to.size() > records.size()) throw py::value_error("zero8: got more addresses than objects");
  if (records.size() != static_cast<py::ssize_t>(objects.size())) return py::bool_(false);
  const zero8::TensorRecord* record = records.data();
  uint64_t* address = to.data();
  uint64_t* const end = address + to.size();
  for (const py::handle& object : objects) {
    zero8::TensorRecord now = describer(object);
    if (address != end) {
      if (now.data == 0 && now.numel > 0) return py::bool_(false);  // it has lost its memory
      *address++ = now.data;
      now.data = record->data;
    }
    if (std::memcmp(record++, &now, sizeof now) != 0) return py::bool_(false);
  }
  return py::bool_(true);
}

py::dict isas() {
  py::dict supported;
  for (int isa = 0; isa < zero8::kNumIsas; ++isa) {
    if (zero8::kIsas[isa].is_supported()) supported[zero8::kIsas[isa].name] = isa;
  }
  return supported;
}

}  // namespace

PYBIND11_MODULE(zero8_kernel, module) {
  module.def("step", &step, "Take one optimizer step on every segment, in place.");
  module.def("check", &check_records, "Raise ValueError if a segment is not what kernels rely on.");
  module.def("fill", &fill, "Fill into kept records what changes from step to step: fill.h.");
  module.def("copy", &copy, "Move the memory of a step, and change nothing: stream.h.");
  module.def("sum_of_squares", &sum_of_squares, "Read gradients once, for their norm: norm.h.");
  module.def("describe", &describe, "Write down where tensors are, and of what kind.");
  module.def("describe_again", &describe_again, "Compare tensors with what was written down.");
  module.def("isas", &isas, "Instruction sets this processor has, slowest first: name -> number.");
}
