// SPDX-License-Identifier: Apache-2.0
// The vector vocabulary in one lane of plain C++: the definition of what each name means.
//
// F is a vector of floats, I of unsigned 32-bit integers, Mask of truth values.  Functions that
// end in _n take the first n lanes only, n <= kLanes; lanes beyond are `fill` (0 for floats).
// Arithmetic reads subnormals as zeros and writes zeros for them; loads are exact.
#include <cstdint>

#include "format.h"
#include "half.h"

namespace zero8::ZERO8_TARGET {

struct Vec {
  static constexpr int kLanes = 1;
  using F = float;
  using I = uint32_t;
  using Mask = bool;

  static F set(float x) { return x; }
  static I seti(uint32_t x) { return x; }
  // start, start + step, start + 2 * step, ...
  static I ramp(uint32_t start, uint32_t) { return start; }

  static F load(const float* p) { return *p; }
  static F load_n(const float* p, int) { return *p; }
  static F load(const uint16_t* p) { return as_float(static_cast<uint32_t>(*p) << 16); }
  static F load_n(const uint16_t* p, int) { return load(p); }
  static F load(const Half* p) { return as_float(float_pattern(*p)); }
  static F load_n(const Half* p, int) { return load(p); }
  // Two 16-bit numbers in each lane.
  static I load_pairs(const void* p) {
    I pairs;
    __builtin_memcpy(&pairs, p, sizeof pairs);
    return pairs;
  }
  static void store(float* p, F x) { *p = x; }
  static void store_n(float* p, F x, int) { *p = x; }
  // Lanes must be below 2^16.
  static void store16(uint16_t* p, I x) { *p = static_cast<uint16_t>(x); }
  static void store16_n(uint16_t* p, I x, int) { store16(p, x); }
  // Codes widened to 32 bits, and lanes, which must be below 2^8, narrowed to codes.
  static I load8(const uint8_t* p) { return *p; }
  static I load8_n(const uint8_t* p, int, uint32_t) { return *p; }
  // The same of codes in two's complement.
  static I load8s(const uint8_t* p) {
    return static_cast<uint32_t>(static_cast<int32_t>(static_cast<int8_t>(*p)));
  }
  static I load8s_n(const uint8_t* p, int) { return load8s(p); }
  static void store8(uint8_t* p, I x) { *p = static_cast<uint8_t>(x); }
  static void store8_n(uint8_t* p, I x, int) { store8(p, x); }
  // A unit of four 6-bit codes for each lane (zero8/spec/packing.py), of which each gets a byte:
  // its upper bits if kUpper, else its lower ones.  And back, of the lower six bits of each byte.
  template <bool kUpper>
  static I load6(const uint8_t* p) {
    const uint32_t unit =
        static_cast<uint32_t>(p[0]) << 16 | static_cast<uint32_t>(p[1]) << 8 | p[2];
    I codes = 0;
    for (int k = 0; k < 4; ++k) codes |= (unit >> (18 - 6 * k) & 63) << (8 * k);
    return kUpper ? codes << 2 : codes;
  }
  static void store6(uint8_t* p, I x) {
    uint32_t unit = 0;
    for (int k = 0; k < 4; ++k) unit |= (x >> (8 * k) & 63) << (18 - 6 * k);
    for (int k = 0; k < 3; ++k) p[k] = static_cast<uint8_t>(unit >> (16 - 8 * k));
  }
  // The same of four bits: two units of two codes.
  static I load4(const uint8_t* p) {
    I codes = 0;
    for (int k = 0; k < 4; ++k)
      codes |= static_cast<I>(p[k / 2] >> (k % 2 ? 0 : 4) & 15) << (8 * k);
    return codes;
  }
  static void store4(uint8_t* p, I x) {
    for (int k = 0; k < 2; ++k, x >>= 16)
      p[k] = static_cast<uint8_t>((x & 15) << 4 | (x >> 8 & 15));
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

  // For numbers that come from outside: CPU threads read subnormals as zero anyway.
  static F flushed(F x) { return x; }
  static F mul(F a, F b) {
    return settled(mul_far(a, b), [=] { return a * 0x1p64f * b; });
  }
  static F fma(F a, F b, F c) {
    return settled(fma_far(a, b, c), [=] { return fma_far(a * 0x1p64f, b, c * 0x1p64f); });
  }
  static F mul_far(F a, F b) { return a * b; }
  static F fma_far(F a, F b, F c) { return __builtin_fmaf(a, b, c); }
  static F fms(F a, F b, F c) { return fma(a, b, -c); }
  static F div(F a, F b) { return a / b; }
  static F sqrt(F a) { return __builtin_sqrtf(a); }
  // Of numbers that are not subnormal, nor both zero.  A NaN in b comes through, as with MAXPS and
  // MINPS; a is none.
  static F max(F a, F b) { return a > b ? a : b; }
  static F min(F a, F b) { return a < b ? a : b; }

  static I as_int(F x) {
    I bits;
    __builtin_memcpy(&bits, &x, sizeof bits);
    return bits;
  }
  static F as_float(I bits) {
    F x;
    __builtin_memcpy(&x, &bits, sizeof x);
    return x;
  }
  // The pattern without its sign.
  static I magnitude_bits(F x) { return as_int(x) & 0x7FFFFFFF; }
  // Between signed integers and floats; to_float rounds half to even.
  static F to_float(I x) { return static_cast<float>(static_cast<int32_t>(x)); }
  // NaN and numbers outside the range give the smallest integer, as x86's instructions do; those of
  // ARM and CUDA give the nearest one, and 0 for NaN.
  static I truncate(F x) {
    const bool fits = x >= -0x1p31f && x < 0x1p31f;
    return fits ? static_cast<uint32_t>(static_cast<int32_t>(x)) : 0x80000000u;
  }

  static I addi(I a, I b) { return a + b; }
  static I subi(I a, I b) { return a - b; }
  static I muli(I a, I b) { return a * b; }
  // (a >> 16) * kFactor >> kShift; the factor is below 2^16, the shift at least 16.
  template <uint32_t kFactor, int kShift>
  static I scaled_upper(I a) {
    return (a >> 16) * kFactor >> kShift;
  }
  // In the lower 16 bits, modulo 2^16; the upper ones are those of a, and of b 0.
  static I add_low16(I a, I b) { return (a & 0xFFFF0000) | ((a + b) & 0xFFFF); }
  static I absi(I a) { return static_cast<int32_t>(a) < 0 ? 0u - a : a; }
  static I andi(I a, I b) { return a & b; }
  static I ori(I a, I b) { return a | b; }
  static I xori(I a, I b) { return a ^ b; }
  template <int kBits>
  static I shl(I a) {
    return a << kBits;
  }
  template <int kBits>
  static I shr(I a) {
    return a >> kBits;
  }
  // By as many bits as each lane of the other says, less than 32.
  static I shlv(I a, I bits) { return a << bits; }
  static I shrv(I a, I bits) { return a >> bits; }
  static I maxu(I a, I b) { return a > b ? a : b; }
  static I minu(I a, I b) { return a < b ? a : b; }
  // The larger of a, the pattern of a magnitude, and the magnitude of x, which is not NaN.
  static I max_magnitude(I a, F x) { return maxu(a, as_int(x) & 0x7FFFFFFF); }
  // The larger of each pair of 16-bit numbers in each lane.
  static I maxu16(I a, I b) {
    return maxu(a & 0xFFFF, b & 0xFFFF) | maxu(a & 0xFFFF0000, b & 0xFFFF0000);
  }
  static I maxs(I a, I b) { return static_cast<int32_t>(a) > static_cast<int32_t>(b) ? a : b; }
  static Mask equal(I a, I b) { return a == b; }
  static Mask above(I a, I b) { return static_cast<int32_t>(a) > static_cast<int32_t>(b); }
  static int count(Mask m) { return m; }
  static bool any(Mask m) { return m; }
  static I choose(Mask m, I yes, I no) { return m ? yes : no; }
  // a + 1 where the mask is set.
  static I incremented(I a, Mask m) { return m ? a + 1 : a; }
  // Negated where x is negative; a is 0 where x is.
  static I signed_as(I a, F x) { return as_int(x) >> 31 ? 0u - a : a; }
  // With the other sign where c is negative.
  static F negated(F x, I c) { return as_float(as_int(x) ^ (c & 0x80000000)); }
  // Where c, which is below 2^31, is 0 too, 0.
  static I unless_zero(I x, I c) { return c ? x : 0; }

  static Mask not_below(F a, F b) { return a >= b; }
  static F look_up(const float* table, I index) { return table[index]; }
  // Tables of 8 numbers; only the low 3 bits of the index count.
  static I look_up8(const uint32_t* table, I index) { return table[index & 7]; }
  static F look_up8(const float* table, I index) { return table[index & 7]; }
  // Of 16 numbers; only the low 4 bits count.
  static F look_up16(const float* table, I index) { return table[index & 15]; }

  static uint32_t reduce_maxu(I a) { return a; }
  static uint32_t reduce_minu(I a) { return a; }
  // Sums counts over all parts of a block: a CPU thread has the whole.
  static int reduce_sum(int count) { return count; }

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

}  // namespace zero8::ZERO8_TARGET

#include "exact_vec.h"
