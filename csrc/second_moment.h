// SPDX-License-Identifier: Apache-2.0
// The average of squared gradients and the denominator made of it, which Adam and AdEMAMix share:
// (R3), (R4) of zero8/spec/adam.py.
//
// Included once per target, after params.h, so in the target's namespace.
#include <cstdint>

namespace zero8::ZERO8_TARGET {

struct SecondMoment {
  Vec::F sqrt_one_minus_beta2, inverse_sqrt_correction2, eps;
  // A block whose largest v' has a pattern below this has only finite gradients, below 2^63: of
  // another, (1 - beta2) g^2, and so v', is at least twice as large, or NaN.
  uint32_t large_square;

  template <class Scalars>
  ZERO8_DEVICE explicit SecondMoment(const Scalars& s)
      : sqrt_one_minus_beta2(Vec::set(s.sqrt_one_minus_beta2)),
        inverse_sqrt_correction2(Vec::set(s.inverse_sqrt_correction2)),
        eps(Vec::set(s.eps)),
        large_square(bits_of(s.sqrt_one_minus_beta2 * s.sqrt_one_minus_beta2 * 0x1p125f)) {}

  // Turns the decoded v into the new one, and returns the denominator.
  //
  // Far from the smallest numbers are: h, as what is below 2^-126 has a square of 0 beside any v;
  // the denominator, as roots of normal numbers are at least 2^-63 and the correction at least 1;
  // where v is 0 it is eps itself, at least 2^-126, without rounding.
  template <class AnyVec>
  ZERO8_DEVICE ZERO8_INLINE Vec::F advance(AnyVec& vec, Vec::F g, Vec::F& v) const {
    const Vec::F h = vec.mul_far(sqrt_one_minus_beta2, g);
    v = vec.fma(h, h, v);                                            // (R3)
    return vec.fma_far(vec.sqrt(v), inverse_sqrt_correction2, eps);  // (R4)
  }
  ZERO8_DEVICE bool proves_finite(uint32_t largest) const { return largest < large_square; }
};

}  // namespace zero8::ZERO8_TARGET
