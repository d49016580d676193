// SPDX-License-Identifier: Apache-2.0
// The sum of squares of gradients, for their norm: norm.cpp.
#pragma once

#include <cstdint>

#include "format.h"

namespace zero8 {

// The sum of squares in double precision, the same for any number of threads.
double sum_of_squares(const Numbers* gradients, int64_t num_gradients, int num_threads);

}  // namespace zero8
