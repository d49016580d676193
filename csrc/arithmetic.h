// SPDX-License-Identifier: Apache-2.0
// The arithmetic of every algorithm, and the choice of a segment's.
//
// Included once per target, after params.h, so in the target's namespace.
#include "second_moment.h"
// The algorithms, two of which have one:
#include "adam.h"
#include "ademamix.h"
#include "lion.h"
#include "sgd.h"

namespace zero8 {
namespace ZERO8_TARGET {

// Calls body(algorithm), an object of the type that has the arithmetic of the segment's algorithm.
template <class Body>
ZERO8_DEVICE ZERO8_INLINE inline auto with_algorithm(const Segment& seg, Body&& body) {
  if (seg.algorithm == kLion) return body(Lion());
  if (seg.algorithm == kSgd) return body(Sgd());
  if (seg.algorithm == kAdemamix) return body(Ademamix());
  return body(Adam());
}

}  // namespace ZERO8_TARGET
}  // namespace zero8
