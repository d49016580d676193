// SPDX-License-Identifier: Apache-2.0
// What a vector of one lane does alike on the CPU's baseline and on CUDA.
//
// Included once per target, so in the target's namespace.
#include <cstdint>

#include "operations.h"

namespace zero8::ZERO8_TARGET {

// Without a processor's own conversion of halves.
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

struct OneLane {
  static constexpr int kLanes = 1;
  using F = float;
  using I = uint32_t;
  using Unsigned = uint32_t;
  using Signed = int32_t;
  using Mask = bool;
};

struct Lane : Operations<OneLane> {
  using Operations::load;
  ZERO8_DEVICE static F set(float x) { return x; }
  // start, start + step, start + 2 * step, ...
  ZERO8_DEVICE static I ramp(uint32_t start, uint32_t) { return start; }

  ZERO8_DEVICE static F load(const uint16_t* p) {
    return as_float(uint32_t{copied<uint16_t>(p)} << 16);
  }
  ZERO8_DEVICE static F load(const Half* p) { return as_float(float_pattern(*p)); }
  // Lanes must be below 2^16.
  ZERO8_DEVICE static void store16(uint16_t* p, I x) {
    const auto lower = static_cast<uint16_t>(x);
    __builtin_memcpy(p, &lower, sizeof lower);
  }
  // Codes widened to 32 bits, those in two's complement, and lanes, which must be below 2^8,
  // narrowed to codes.
  ZERO8_DEVICE static I load8(const uint8_t* p) { return *p; }
  ZERO8_DEVICE static I load8s(const uint8_t* p) {
    return static_cast<uint32_t>(static_cast<int32_t>(static_cast<int8_t>(*p)));
  }
  ZERO8_DEVICE static void store8(uint8_t* p, I x) { *p = static_cast<uint8_t>(x); }

  ZERO8_DEVICE static F fma_far(F a, F b, F c) { return __builtin_fmaf(a, b, c); }
  ZERO8_DEVICE static F sqrt(F a) { return __builtin_sqrtf(a); }
  // Of numbers that are not subnormal, nor both zero.  A NaN in b comes through, as with MAXPS and
  // MINPS; a is none.
  ZERO8_DEVICE static F max(F a, F b) { return a > b ? a : b; }
  ZERO8_DEVICE static F min(F a, F b) { return a < b ? a : b; }

  // Of signed integers; rounds half to even.
  ZERO8_DEVICE static F to_float(I x) { return static_cast<float>(static_cast<int32_t>(x)); }

  // In the lower 16 bits, modulo 2^16; the upper ones are those of a, and of b 0.
  ZERO8_DEVICE static I add_low16(I a, I b) { return (a & 0xFFFF0000) | ((a + b) & 0xFFFF); }
  // By as many bits as each lane of the other says, less than 32.  Operators would be taken for
  // shifts of all lanes alike where they are, which are slower.
  ZERO8_DEVICE static I shlv(I a, I bits) { return a << bits; }
  ZERO8_DEVICE static I shrv(I a, I bits) { return a >> bits; }
  ZERO8_DEVICE static int count(Mask m) { return m; }
  ZERO8_DEVICE static bool any(Mask m) { return m; }
  ZERO8_DEVICE static F look_up(const float* table, I index) { return table[index]; }
  // Tables of 8 numbers; only the low 3 bits of the index count.
  ZERO8_DEVICE static I look_up8(const uint32_t* table, I index) { return table[index & 7]; }
  ZERO8_DEVICE static F look_up8(const float* table, I index) { return table[index & 7]; }
  // The same of 16 numbers; indices are below 16.
  ZERO8_DEVICE static F look_up16(const float* table, I index) { return table[index]; }
};

}  // namespace zero8::ZERO8_TARGET
