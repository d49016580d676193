// SPDX-License-Identifier: Apache-2.0
// Between the two loops over a block: what the first one has made, and how the parameters follow
// from it; and both loops made again where a QuickVec was not exact.
//
// Included once per target, after chunks.h, so in the target's namespace.
#include <cstdint>

namespace zero8::ZERO8_TARGET {

// What the last loop over a block needs, in a buffer: vectors of the new moments, and of what the
// algorithm carries from one loop to the other.  And of the old parameters, where the last loop may
// have to be made again.
template <class Algorithm>
struct Buffer {
  static constexpr int kMoments = kMomentsOf[Algorithm::kNumber].count;
  static constexpr int kMade = kMoments + Algorithm::kCarried;
  static constexpr int kRows = kMade + !QuickVec::kIsExact;
  float* values = nullptr;
  int stride = 0;

  float* row(int k) const { return values + k * stride; }
  ZERO8_INLINE void put(int i, const Vec::F* m, const Vec::F* carried) const {
    for (int k = 0; k < kMoments; ++k) Vec::store(row(k) + i, m[k]);
    for (int k = 0; k < Algorithm::kCarried; ++k) Vec::store(row(kMoments + k) + i, carried[k]);
  }
  ZERO8_INLINE void keep_param(int i, Vec::F p) const {
    if constexpr (!QuickVec::kIsExact) Vec::store(row(kMade) + i, p);
  }
  Vec::F kept_param(int i) const { return Vec::load(row(kMade) + i); }
  // Returns p', not rounded yet.
  template <class AnyVec>
  ZERO8_INLINE Vec::F param(AnyVec& vec, const typename Algorithm::Scalars& s, Vec::F p,
                            int i) const {
    Vec::F m[kMoments], carried[Algorithm::kCarried];
    for (int k = 0; k < kMoments; ++k) m[k] = Vec::load(row(k) + i);
    for (int k = 0; k < Algorithm::kCarried; ++k) carried[k] = Vec::load(row(kMoments + k) + i);
    return s.param(vec, p, m, carried);
  }
};

// Updates the parameters of one vector, in memory.
template <class Algorithm, class P, class Lanes>
ZERO8_INLINE inline void step_param(const typename Algorithm::Scalars& s,
                                    const Buffer<Algorithm>& buffer, P& param, int i, Lanes lanes) {
  QuickVec vec;
  const Vec::F p = param.read(vec, i, lanes);
  buffer.keep_param(i, p);
  const Vec::F updated = buffer.param(vec, s, p, i);
  param.write(i, updated, lanes, any_extreme(updated));
}

// Calls body(vec), which makes numbers at `made`, with a QuickVec, and if that has seen tiny
// results, again with a Vec.
template <class Body>
ZERO8_INLINE inline void quickly(const float* made, Body&& body) {
  QuickVec quick;
  body(quick);
  if constexpr (!QuickVec::kIsExact) {
    if (QuickVec::saw_tiny(made)) {
      Vec exact;
      body(exact);
      QuickVec::forget_tiny();
    }
  }
}

// Updates the parameters of a block again, exactly, if that has seen tiny results.
template <class Algorithm, class P>
ZERO8_INLINE inline void correct_params(const typename Algorithm::Scalars& s,
                                        const Buffer<Algorithm>& buffer, P& param, int count) {
  if constexpr (!QuickVec::kIsExact) {
    if (!QuickVec::saw_tiny(buffer.values)) return;
    param.start();
    for_vectors(0, count, [&](int i, auto lanes) ZERO8_INLINE {
      Vec vec;
      const Vec::F p = buffer.param(vec, s, buffer.kept_param(i), i);
      param.write(i, p, lanes, any_extreme(p));
    });
    QuickVec::forget_tiny();
  }
}

}  // namespace zero8::ZERO8_TARGET
