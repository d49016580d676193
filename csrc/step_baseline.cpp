// SPDX-License-Identifier: Apache-2.0
// The step for any processor: what the compiler targets by default.
#include "isa.h"

#define ZERO8_TARGET baseline
#include "vec_scalar.h"
// In terms of that vocabulary:
#include "step_blocks.h"

int64_t zero8::step_blocks_baseline(const Segment& seg, const StepScalars& s,
                                    const DynamicMaps& maps, int64_t begin, int64_t end) {
  return baseline::step_blocks(seg, s, maps, begin, end);
}
