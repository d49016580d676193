// SPDX-License-Identifier: Apache-2.0
// What Python calls beside the step of isa.h: checks, what changes in records, the norm.
#pragma once

#include <cstdint>
#include <string>

#include "algorithms.h"
#include "format.h"

namespace zero8 {

// More than any memory holds, and small enough that sums and products of sizes fit 64 bits.
constexpr int64_t kMaxElements = int64_t{1} << 48;

// Returns which field of the first bad segment no kernel takes, such as "segment 3: block_size: got
// 65536", or an empty string.  Users' mistakes are found before records are made of them.
//
// No kernel checks again: block numbers, the sizes of its buffers and the places of its scales
// follow from these fields.  `takes_int8`: whether the kernel steps over INT8 weights.  Addresses
// are not followed, so the segments may lie on a GPU.
std::string violation(const Segment* segments, int64_t num_segments, int64_t num_scalars,
                      bool takes_int8);

// Writes the running sums of the numbers of blocks of segments without a violation: num_segments +
// 1 of them, from 0.
void sum_blocks(const Segment* segments, int64_t num_segments, int64_t* sums);

// The step that parameters take, by parameter.
struct StepsOfParams {
  const uint64_t* params;  // addresses
  const uint64_t* grads;
  const int64_t* which;  // index into `steps`, and into the array of StepScalars
  int64_t num_params;
  const int64_t* steps;  // numbers, from 1
  int64_t num_steps;
};

// Fills segments, to each of which a piece belongs.  Returns whether all indices are in their
// range; if not, nothing has been written.
bool fill(Segment* segments, const KeptPiece* pieces, int64_t num_segments,
          const StepsOfParams& of);

// The sum of squares of gradients, for their norm, in double precision, the same for any number of
// threads.
double sum_of_squares(const Numbers* gradients, int64_t num_gradients, int num_threads);

}  // namespace zero8
