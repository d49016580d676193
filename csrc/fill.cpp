// SPDX-License-Identifier: Apache-2.0
#include "host.h"

namespace zero8 {

namespace {

uint32_t lowbias32(uint32_t x) {
  x = (x ^ (x >> 16)) * kHashFactor1;
  x = (x ^ (x >> 15)) * kHashFactor2;
  return x ^ (x >> 16);
}

// r(0, t) of equation (D1) of zero8/spec/dither.py: what a kernel knows of key and step t.
uint32_t phase_of(uint32_t key, int64_t step) {
  const int64_t run = step / kRunSteps;
  const uint32_t start = lowbias32(key + static_cast<uint32_t>(run) * kElementStep);
  const uint32_t walked = static_cast<uint32_t>(step) * kGoldenStep;
  return run % 2 ? key + walked + start : key - walked + start;
}

bool is_below(int64_t index, int64_t end) { return index >= 0 && index < end; }

}  // namespace

bool fill(Segment* segments, const KeptPiece* pieces, int64_t num_segments,
          const StepsOfParams& of) {
  for (int64_t i = 0; i < of.num_params; ++i) {
    if (!is_below(of.which[i], of.num_steps)) return false;
  }
  for (int64_t i = 0; i < num_segments; ++i) {
    if (!is_below(pieces[i].owner, of.num_params)) return false;
  }
  for (int64_t i = 0; i < num_segments; ++i) {
    const KeptPiece& piece = pieces[i];
    Segment& segment = segments[i];
    const int64_t which = of.which[piece.owner], step = of.steps[which];
    segment.param = reinterpret_cast<void*>(of.params[piece.owner] + piece.param_offset);
    segment.grad = reinterpret_cast<const void*>(of.grads[piece.owner] + piece.grad_offset);
    segment.scalars = static_cast<int32_t>(which);
    for (int k = 0; k < kMaxMoments; ++k) {
      segment.moments[k].phase = phase_of(piece.moment_keys[k], step);
    }
    segment.param_phase = phase_of(piece.param_key, step);
    segment.nonfinite_blocks = 0;
  }
  return true;
}

}  // namespace zero8
