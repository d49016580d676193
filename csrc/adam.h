// SPDX-License-Identifier: Apache-2.0
// The arithmetic of AdamW in terms of Vec, for the CPU and for CUDA: zero8/spec/adam.py,
// equation by equation.
//
// Use Vec::mul_far and Vec::fma_far only where the result is known to be 0 or at least 2^-126: they
// skip the check for tiny results on targets that need one.
//
// Bit equality across targets rests on: one rounding per operation, fused operations written as
// Vec::fma, no contraction by the compiler, reductions over integers only, and flush to zero.
// Included once per target, after params.h, so in the target's namespace.
#include <cstdint>

#include "algorithms.h"

namespace zero8::ZERO8_TARGET {

// The average of squared gradients and the denominator made of it, which AdEMAMix has too.
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

// An algorithm is a struct with these parts:
//
//   kNumber, kCarried
//       Its number, and how many values of each element go from the first loop to the last one, so
//       that one has the square root and the other the division.
//   decay(StepScalars, k), settling(StepScalars, k)
//       By which factor moment k is decoded, and the settling of (C2'), 0 where the dither rounds.
//   Scalars(StepScalars)
//       The scalars in every lane, with those of the gradient, and what `step` functions need:
//   advance(vec, Vec::F g, Vec::F* m, Vec::F* carried)
//       Turns the decoded moments into the new ones.  `vec` is a Vec or, on CUDA, a QuickVec.
//   param(vec, Vec::F p, const Vec::F* m, const Vec::F* carried)
//       Returns p', not rounded yet.  Moments that cannot be negative are not used: their values
//       may have been raised for their codes.
//   proves_finite(const uint32_t* largest)
//       Whether the largest patterns of a block's new moments prove that its gradients are finite
//       and below the limit; if not, they are looked at.
struct Adam {
  static constexpr Algorithm kNumber = kAdam;
  static constexpr int kCarried = 1;  // the denominator

  ZERO8_DEVICE static float decay(const StepScalars& s, int k) {
    return k == 0 ? s.adam.beta1 : s.adam.beta2;
  }
  ZERO8_DEVICE static float settling(const StepScalars& s, int k) {
    return k == 0 ? s.adam.settling : 0.0f;
  }

  struct Scalars : Gradient {
    SecondMoment second;
    Vec::F one_minus_beta1, max_ratio, min_ratio, minus_step_size, decay;

    ZERO8_DEVICE explicit Scalars(const StepScalars& all) : Scalars(all.adam) {}
    ZERO8_DEVICE explicit Scalars(const AdamScalars& s)
        : Gradient(s.l2, s.grad_sign, s.grad_factor),
          second(s),
          one_minus_beta1(Vec::set(with_sign(s.one_minus_beta1))),
          max_ratio(Vec::set(s.max_ratio)),
          min_ratio(Vec::set(-s.max_ratio)),
          minus_step_size(Vec::set(-s.step_size)),
          decay(Vec::set(s.decay)) {}

    template <class AnyVec>
    ZERO8_DEVICE ZERO8_INLINE void advance(AnyVec& vec, Vec::F g, Vec::F* m,
                                           Vec::F* carried) const {
      m[0] = vec.fma(one_minus_beta1, g, m[0]);  // (R2)
      *carried = second.advance(vec, g, m[1]);   // (R3), (R4)
    }
    template <class AnyVec>
    ZERO8_DEVICE ZERO8_INLINE Vec::F param(AnyVec& vec, Vec::F p, const Vec::F* m,
                                           const Vec::F* carried) const {
      const Vec::F ratio = vec.div(m[0], *carried);
      const Vec::F clipped = vec.min(max_ratio, vec.max(min_ratio, ratio));  // (R5)
      return vec.fma(minus_step_size, clipped, vec.mul(decay, p));           // (R6)
    }
    ZERO8_DEVICE bool proves_finite(const uint32_t* largest) const {
      return second.proves_finite(largest[1]);
    }
  };
};

}  // namespace zero8::ZERO8_TARGET
