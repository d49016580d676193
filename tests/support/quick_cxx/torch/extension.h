// SPDX-License-Identifier: Apache-2.0
//
// Of torch/extension.h what DeepSpeed's ops use: tensors and pybind11, without torch's modules.
#pragma once
#include <torch/csrc/utils/pybind.h>
#include <torch/types.h>
