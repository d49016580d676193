// SPDX-License-Identifier: Apache-2.0
// The vectors of a step's loops, where every result of Vec is as it is defined.  vec_neon.h has
// others.
//
// Included once per target, so in the target's namespace.

namespace zero8::ZERO8_TARGET {

// Vec for loops over a block.  If not kIsExact, its mul, fma and fms may give 0 where 2^-126 is
// right.  saw_tiny(made) says whether any may have done so since forget_tiny(); all that has been
// made since then is to be made again with Vec.
struct QuickVec : Vec {
  static constexpr bool kIsExact = true;
  static bool saw_tiny(const float*) { return false; }
  static void forget_tiny() {}
};

}  // namespace zero8::ZERO8_TARGET
