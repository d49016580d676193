// SPDX-License-Identifier: Apache-2.0
// Fills into records that are kept between steps what changes from step to step.
#pragma once

#include <cstdint>

#include "algorithms.h"
#include "format.h"

namespace zero8 {

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

}  // namespace zero8
