// SPDX-License-Identifier: Apache-2.0
// Halves without a processor's own conversion: on the CPU's baseline and on CUDA.
//
// Compiled for every target, so in the target's namespace: the linker merges what has one name.
#include <cstdint>

#include "format.h"

namespace zero8::ZERO8_TARGET {

// The pattern of the float of the same value; of NaN one of NaN.
ZERO8_DEVICE inline uint32_t float_pattern(Half half) {
  const uint32_t magnitude = half.bits & 0x7FFFu;
  // Multiples of 2^-24 up to 2^-14 are exact, and none is a subnormal float, which the CPU's
  // threads would take for zero.
  const float small = static_cast<float>(magnitude) * 0x1p-24f;
  uint32_t pattern;
  __builtin_memcpy(&pattern, &small, sizeof pattern);
  if (magnitude >= 0x0400u) {
    const uint32_t bias = magnitude < kHalfInfinityBits ? 127u - 15u : 255u - 31u;
    pattern = (magnitude << 13) + (bias << 23);
  }
  return pattern | (half.bits & 0x8000u) << 16;
}

}  // namespace zero8::ZERO8_TARGET
