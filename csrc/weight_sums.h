// SPDX-License-Identifier: Apache-2.0
// What tells the weights that a step has written from others: zero8/spec/corrections.py.  For the
// CPU and for CUDA.
//
// Included once per target, so in the target's namespace.
#include <cstdint>

#include "format.h"

namespace zero8::ZERO8_TARGET {

// All bits but the signs of two bfloat16, of which the first one is the lower half.
constexpr uint32_t kTwoMagnitudes = 0x7FFF7FFF;

// Two bfloat16, in whose signs is whether they are not 0; the other bits are anything.
ZERO8_DEVICE inline uint32_t are_nonzero(uint32_t two) {
  return (two & kTwoMagnitudes) + kTwoMagnitudes;
}
// In the same bits, whether weights can have corrections: others are 0, infinite or NaN.
ZERO8_DEVICE inline uint32_t are_corrected(uint32_t two) {
  const uint32_t are_beyond = (two & kTwoMagnitudes) + 0x00800080;
  return are_nonzero(two) & ~are_beyond;
}
// (K1); the factors of a block are kGoldenStep and kNextFactor more for each next two.
constexpr uint32_t kNextFactor = 2 * kGoldenStep;
ZERO8_DEVICE inline uint32_t sum_of_two(uint32_t two, uint32_t factor) {
  const uint32_t without_sign_of_0 = two & (are_nonzero(two) | kTwoMagnitudes);
  const uint32_t x = without_sign_of_0 * factor;
  return x ^ x >> 15;
}
// (K2)
ZERO8_DEVICE inline bool are_of_others(const WeightSums& left, uint32_t sum) {
  return left.all != 0 && sum != left.all && sum != left.without_zeros;
}

}  // namespace zero8::ZERO8_TARGET
