// SPDX-License-Identifier: Apache-2.0
// What nvcc and NVRTC compile: the kernels `zero8_step_*`, with C linkage, for the CUDA driver to
// launch. There is no launcher in C++: it would need CUDA's headers and runtime library, while the
// driver's own call serves code of both compilers.
#include "cuda/step_kernel.h"
