// SPDX-License-Identifier: Apache-2.0
// The Python binding: unpacks numpy buffers.  The only file that knows Python.
#include <pybind11/pybind11.h>

#include <string>

#include "format.h"

namespace py = pybind11;

namespace {

// The records of a one-dimensional numpy array whose items have the size of T.
template <class T>
T* records(const py::buffer_info& info, const char* name) {
  if (info.ndim != 1 || info.itemsize != static_cast<py::ssize_t>(sizeof(T))) {
    throw py::value_error(std::string("zero8: ") + name + " records of " +
                          std::to_string(info.itemsize) + " bytes, the kernel expects " +
                          std::to_string(sizeof(T)) + "; rebuild the op with `zero8 build`");
  }
  return static_cast<T*>(info.ptr);
}

void step(const py::buffer& segments, const py::buffer& scalars, const py::buffer& maps,
          int num_threads, int isa) {
  if (isa < 0 || isa >= zero8::kNumIsas || !zero8::isa_supported(isa)) {
    throw py::value_error("zero8: this processor does not have the instruction set asked for");
  }
  const py::buffer_info segment_info = segments.request(true), scalar_info = scalars.request(),
                        map_info = maps.request();
  auto* segment = records<zero8::Segment>(segment_info, "segment");
  const auto* scalar = records<zero8::StepScalars>(scalar_info, "scalar");
  const auto* map = records<zero8::DynamicMaps>(map_info, "map");
  const py::gil_scoped_release release;
  zero8::step(segment, segment_info.size, scalar, *map, num_threads, isa);
}

py::dict isas() {
  py::dict supported;
  for (int isa = 0; isa < zero8::kNumIsas; ++isa) {
    if (zero8::isa_supported(isa)) supported[zero8::kIsaNames[isa]] = isa;
  }
  return supported;
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  module.def("step", &step, "Take one optimizer step on every segment, in place.");
  module.def("isas", &isas, "Instruction sets this processor has, slowest first: name -> number.");
}
