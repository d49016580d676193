// SPDX-License-Identifier: Apache-2.0
// Parts of vectors, where a processor has no masks for them.
//
// Included once per target, so in the target's namespace.
#include <cstdint>

#include "format.h"

namespace zero8::ZERO8_TARGET {

// Functions that end in _n take the first n lanes only, n <= kLanes; lanes beyond are `fill` (0 for
// floats).
template <class Whole>
struct WithTails : Whole {
  using typename Whole::F;
  using typename Whole::I;
  using Whole::kLanes;

  template <class T>
  static F load_n(const T* p, int n) {
    T padded[kLanes] = {};
    copy_first(padded, p, n);
    return Whole::load(padded);
  }
  static I load8_n(const uint8_t* p, int n, uint32_t fill) {
    uint8_t padded[kLanes];
    __builtin_memset(padded, static_cast<int>(fill), kLanes);
    copy_first(padded, p, n);
    return Whole::load8(padded);
  }
  static I load8s_n(const uint8_t* p, int n) {
    uint8_t padded[kLanes] = {};
    copy_first(padded, p, n);
    return Whole::load8s(padded);
  }
  static void store_n(float* p, F x, int n) {
    float whole[kLanes];
    Whole::store(whole, x);
    copy_first(p, whole, n);
  }
  static void store16_n(uint16_t* p, I x, int n) {
    uint16_t whole[kLanes];
    Whole::store16(whole, x);
    copy_first(p, whole, n);
  }
  static void store8_n(uint8_t* p, I x, int n) {
    uint8_t whole[kLanes];
    Whole::store8(whole, x);
    copy_first(p, whole, n);
  }

 private:
  // By halves: a call of memcpy would cost the loops around it their registers.
  template <int kSize = kLanes, class T>
  ZERO8_INLINE static void copy_first(T* to, const T* from, int n) {
    if (n & kSize) __builtin_memcpy(to, from, kSize * sizeof(T));
    const int done = n & kSize;
    if constexpr (kSize > 1) copy_first<kSize / 2>(to + done, from + done, n);
  }
};

}  // namespace zero8::ZERO8_TARGET
