// SPDX-License-Identifier: Apache-2.0
// The arithmetic of AdEMAMix in terms of Vec: zero8/spec/ademamix.py, equation by equation.
// adam.h has the contract of an algorithm, and says what bit equality rests on.
//
// Included once per target, after params.h, so in the target's namespace.
#include <cstdint>

#include "algorithms.h"

namespace zero8::ZERO8_TARGET {

struct Ademamix {
  static constexpr Algorithm kNumber = kAdemamix;
  static constexpr int kCarried = 1;  // the denominator

  ZERO8_DEVICE static float decay(const StepScalars& s, int k) {
    return k == 0 ? s.ademamix.beta1 : k == 1 ? s.ademamix.beta3 : s.ademamix.beta2;
  }
  ZERO8_DEVICE static float settling(const StepScalars& s, int k) {
    return k == 0 ? s.ademamix.settling : 0.0f;
  }

  struct Scalars : Gradient {
    SecondMoment second;
    Vec::F one_minus_beta1, one_minus_beta3, inverse_correction1, alpha;
    Vec::F max_ratio, min_ratio, minus_lr, decay;

    ZERO8_DEVICE explicit Scalars(const StepScalars& all) : Scalars(all.ademamix) {}
    ZERO8_DEVICE explicit Scalars(const AdemamixScalars& s)
        : Gradient(s.l2, s.grad_sign, s.grad_factor),
          second(s),
          one_minus_beta1(Vec::set(with_sign(s.one_minus_beta1))),
          one_minus_beta3(Vec::set(with_sign(s.one_minus_beta3))),
          inverse_correction1(Vec::set(s.inverse_correction1)),
          alpha(Vec::set(s.alpha)),
          max_ratio(Vec::set(s.max_ratio)),
          min_ratio(Vec::set(-s.max_ratio)),
          minus_lr(Vec::set(-s.lr)),
          decay(Vec::set(s.decay)) {}

    template <class AnyVec>
    ZERO8_DEVICE ZERO8_INLINE void advance(AnyVec& vec, Vec::F g, Vec::F* m,
                                           Vec::F* carried) const {
      m[0] = vec.fma(one_minus_beta1, g, m[0]);  // (E1)
      m[1] = vec.fma(one_minus_beta3, g, m[1]);  // (E2)
      *carried = second.advance(vec, g, m[2]);   // (R3), (R4)
    }
    template <class AnyVec>
    ZERO8_DEVICE ZERO8_INLINE Vec::F param(AnyVec& vec, Vec::F p, const Vec::F* m,
                                           const Vec::F* carried) const {
      const Vec::F fast = vec.mul(inverse_correction1, m[0]);
      const Vec::F ratio = vec.div(vec.fma(alpha, m[1], fast), *carried);
      const Vec::F clipped = vec.min(max_ratio, vec.max(min_ratio, ratio));  // (E3)
      return vec.fma(minus_lr, clipped, vec.mul(decay, p));                  // (E4)
    }
    ZERO8_DEVICE bool proves_finite(const uint32_t* largest) const {
      return second.proves_finite(largest[2]);
    }
  };
};

}  // namespace zero8::ZERO8_TARGET
