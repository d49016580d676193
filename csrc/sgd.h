// SPDX-License-Identifier: Apache-2.0
// The arithmetic of SGD with momentum in terms of Vec: zero8/spec/sgd.py, equation by
// equation.  adam.h has the contract of an algorithm, and says what bit equality rests on.
//
// Included once per target, after params.h, so in the target's namespace.
#include <cstdint>

#include "algorithms.h"

namespace zero8::ZERO8_TARGET {

struct Sgd {
  static constexpr Algorithm kNumber = kSgd;
  static constexpr int kCarried = 1;  // the update

  ZERO8_DEVICE static float decay(const StepScalars& s, int) { return s.sgd.momentum; }
  ZERO8_DEVICE static float settling(const StepScalars&, int) { return 0.0f; }

  struct Scalars : Gradient {
    Vec::F grad_share, update_of_moment, update_of_grad, minus_lr, decay;

    ZERO8_DEVICE explicit Scalars(const StepScalars& all) : Scalars(all.sgd) {}
    ZERO8_DEVICE explicit Scalars(const SgdScalars& s)
        : Gradient(s.l2, s.grad_sign, s.grad_factor),
          grad_share(Vec::set(with_sign(s.grad_share))),
          update_of_moment(Vec::set(s.update_of_moment)),
          update_of_grad(Vec::set(with_sign(s.update_of_grad))),
          minus_lr(Vec::set(-s.lr)),
          decay(Vec::set(s.decay)) {}

    template <class AnyVec>
    ZERO8_DEVICE ZERO8_INLINE void advance(AnyVec& vec, Vec::F g, Vec::F* m,
                                           Vec::F* carried) const {
      m[0] = vec.fma(grad_share, g, m[0]);                                     // (M1)
      *carried = vec.fma(update_of_moment, m[0], vec.mul(update_of_grad, g));  // (M2)
    }
    template <class AnyVec>
    ZERO8_DEVICE ZERO8_INLINE Vec::F param(AnyVec& vec, Vec::F p, const Vec::F*,
                                           const Vec::F* carried) const {
      return vec.fma(minus_lr, *carried, vec.mul(decay, p));  // (M3)
    }
    // Maxima of signed moments do not tell of NaN.
    ZERO8_DEVICE bool proves_finite(const uint32_t*) const { return false; }
  };
};

}  // namespace zero8::ZERO8_TARGET
