// SPDX-License-Identifier: Apache-2.0
// The part of DLPack's C interface (github.com/dmlc/dlpack, version 1) through which torch, from
// 2.10 on, says where a tensor is: some 20 ns a tensor for what takes Python 40 ns a question.
//
// Declared here and not included from torch: the interface is stable, where its header lies and
// from which release on is not.
#pragma once

#include <cstdint>

namespace zero8::dlpack {

constexpr uint32_t kMajorVersion = 1;
constexpr const char* kCapsuleName = "dlpack_exchange_api";

struct Tensor {
  void* data;
  int32_t device_type, device_id;
  int32_t ndim;
  uint8_t dtype_code, dtype_bits;
  uint16_t dtype_lanes;
  int64_t *shape, *strides;  // the tensor's own; strides in elements
  uint64_t byte_offset;
};

struct ExchangeApi {
  uint32_t major_version, minor_version;
  void* earlier_version;
  void *allocate, *managed_from_py_object, *managed_to_py_object;  // not used here
  // 0, or -1 with a Python exception set.  The PyObject* must be a tensor; it keeps what it has.
  int (*from_py_object)(void* py_object, Tensor* out);
};

inline int64_t numel(const Tensor& tensor) {
  int64_t product = 1;
  for (int32_t i = 0; i < tensor.ndim; ++i) product *= tensor.shape[i];
  return product;
}

constexpr int32_t kCpu = 1;  // DLDeviceType
constexpr uint8_t kInt = 0;  // DLDataTypeCode

inline bool is_int64_on_host(const Tensor& tensor) {
  return tensor.device_type == kCpu && tensor.dtype_code == kInt && tensor.dtype_bits == 64 &&
         tensor.dtype_lanes == 1;
}

// As torch sees it: strides of dimensions of one element do not matter, nor any if there are none.
inline bool is_contiguous(const Tensor& tensor) {
  int64_t expected = 1;
  for (int32_t i = tensor.ndim - 1; i >= 0; --i) {
    if (tensor.shape[i] != 1 && tensor.strides[i] != expected) return numel(tensor) == 0;
    expected *= tensor.shape[i];
  }
  return true;
}

}  // namespace zero8::dlpack
