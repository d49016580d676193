// SPDX-License-Identifier: Apache-2.0
// The vector vocabulary in one lane of plain C++: with operations.h the definition of what each
// name means.
#include <cstdint>

#include "lane.h"
#include "tails.h"

namespace zero8::ZERO8_TARGET {

struct Whole : Lane {
  // A unit of four 6-bit codes for each lane (zero8/spec/packing.py), of which each gets a byte.
  // And back, of the lower six bits of each byte.
  static I load6(const uint8_t* p) {
    const uint32_t unit =
        static_cast<uint32_t>(p[0]) << 16 | static_cast<uint32_t>(p[1]) << 8 | p[2];
    I codes = 0;
    for (int k = 0; k < 4; ++k) codes |= (unit >> (18 - 6 * k) & 63) << (8 * k);
    return codes;
  }
  static void store6(uint8_t* p, I x) {
    uint32_t unit = 0;
    for (int k = 0; k < 4; ++k) unit |= (x >> (8 * k) & 63) << (18 - 6 * k);
    for (int k = 0; k < 3; ++k) p[k] = static_cast<uint8_t>(unit >> (16 - 8 * k));
  }
  // Four vectors of codes; lanes must be below 256, and negative ones become 0.
  static void store8x4(uint8_t* p, const I* code) {
    for (int k = 0; k < 4; ++k) store8(p + k, maxs(code[k], 0));
  }
  // The same, of floats x: negated where x is negative, for which lanes must be below 128, and 0
  // where x is +0.
  static void store8x4_signed(uint8_t* p, const I* code, const F* x) {
    store8x4(p, code);
    for (int k = 0; k < 4; ++k) {
      if (as_int(x[k]) & 0x80000000) p[k] = static_cast<uint8_t>(-p[k]);
    }
  }
  ZERO8_INLINE static void prefetch(const void*) {}

  static F mul(F a, F b) {
    return settled(mul_far(a, b), [=] { return a * 0x1p64f * b; });
  }
  static F fma(F a, F b, F c) {
    return settled(fma_far(a, b, c), [=] { return fma_far(a * 0x1p64f, b, c * 0x1p64f); });
  }
  static F fms(F a, F b, F c) { return fma(a, b, -c); }
  // NaN and numbers outside the range give the smallest integer, as x86's instructions do; those of
  // ARM and CUDA give the nearest one, and 0 for NaN.
  static I truncate(F x) {
    const bool fits = x >= -0x1p31f && x < 0x1p31f;
    return fits ? static_cast<uint32_t>(static_cast<int32_t>(x)) : 0x80000000u;
  }
  // The larger of each pair of 16-bit numbers in each lane.
  static I maxu16(I a, I b) {
    return maxu(a & 0xFFFF, b & 0xFFFF) | maxu(a & 0xFFFF0000, b & 0xFFFF0000);
  }

  static uint32_t reduce_maxu(I a) { return a; }
  static uint32_t reduce_minu(I a) { return a; }

 private:
  // A result as it is defined: rounded, and then flushed.  FPCR.FZ of ARM flushes before it rounds,
  // so r is 0 where it would have been rounded up to 2^-126.  `enlarged()` is the same result of
  // numbers 2^64 times as large: where r is 0, it is 2^-62 in that case only.
  //
  // That numbers so large may overflow does no harm: products and sums with a number of at least
  // 2^64 are 0 or far above 2^-126.  Quotients and roots are never so close below 2^-126 that they
  // would be rounded up to it.
  template <class Enlarged>
  static F settled(F r, [[maybe_unused]] Enlarged enlarged) {
#if defined(__aarch64__)
    if (r == 0.0f && __builtin_fabsf(enlarged()) == 0x1p-62f) return as_float(as_int(r) | 0x800000);
#endif
    return r;
  }
};

using Vec = WithTails<Whole>;
using QuickVec = Exact<Vec>;

}  // namespace zero8::ZERO8_TARGET
