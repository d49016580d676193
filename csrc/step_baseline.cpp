// SPDX-License-Identifier: Apache-2.0
// The step for any processor: what the compiler targets by default.
#define ZERO8_TARGET baseline
#include "step_block.h"

bool zero8::step_block_baseline(const Segment& seg, const StepScalars& s, const DynamicMaps& maps,
                                Block b) {
  return baseline::step_block(seg, s, maps, b);
}
