// SPDX-License-Identifier: Apache-2.0
// The arithmetic of Lion in terms of Vec: zero8/spec/lion.py, equation by equation.  adam.h
// has the contract of an algorithm, and says what bit equality rests on.
//
// Included once per target, after params.h, so in the target's namespace.
#include <cstdint>

#include "algorithms.h"

namespace zero8::ZERO8_TARGET {

struct Lion {
  static constexpr Algorithm kNumber = kLion;
  static constexpr int kCarried = 1;  // the direction, whose sign the parameter follows

  // Both of Lion's averages start from the same moment, so it is decoded as it is.
  ZERO8_DEVICE static float decay(const StepScalars&, int) { return 1.0f; }
  ZERO8_DEVICE static float settling(const StepScalars&, int) { return 0.0f; }

  struct Scalars : Gradient {
    Vec::F beta1, beta2, one_minus_beta1, one_minus_beta2, minus_lr, decay;

    ZERO8_DEVICE explicit Scalars(const StepScalars& all) : Scalars(all.lion) {}
    ZERO8_DEVICE explicit Scalars(const LionScalars& s)
        : Gradient(s.l2, s.grad_sign, s.grad_factor),
          beta1(Vec::set(s.beta1)),
          beta2(Vec::set(s.beta2)),
          one_minus_beta1(Vec::set(with_sign(s.one_minus_beta1))),
          one_minus_beta2(Vec::set(with_sign(s.one_minus_beta2))),
          minus_lr(Vec::set(-s.lr)),
          decay(Vec::set(s.decay)) {}

    template <class AnyVec>
    ZERO8_DEVICE ZERO8_INLINE void advance(AnyVec& vec, Vec::F g, Vec::F* m,
                                           Vec::F* carried) const {
      *carried = vec.fma(one_minus_beta1, g, vec.mul(beta1, m[0]));  // (L1)
      m[0] = vec.fma(one_minus_beta2, g, vec.mul(beta2, m[0]));      // (L2)
    }
    // What is not 0 is at least 2^-126, so times 2^126 it is at least 1.
    template <class AnyVec>
    ZERO8_DEVICE ZERO8_INLINE Vec::F param(AnyVec& vec, Vec::F p, const Vec::F*,
                                           const Vec::F* carried) const {
      const Vec::F large = vec.mul_far(*carried, Vec::set(0x1p126f));
      const Vec::F sign = vec.min(Vec::set(1.0f), vec.max(Vec::set(-1.0f), large));
      return vec.fma(minus_lr, sign, vec.mul(decay, p));  // (L3)
    }
    // Maxima of signed moments do not tell of NaN.
    ZERO8_DEVICE bool proves_finite(const uint32_t*) const { return false; }
  };
};

}  // namespace zero8::ZERO8_TARGET
