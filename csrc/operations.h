// SPDX-License-Identifier: Apache-2.0
// The vector vocabulary as far as C++ has operators for it: of numbers, and of vectors of them,
// which GCC and Clang take alike.  vec_scalar.h defines the rest.
//
// F is a vector of floats, I of unsigned 32-bit integers, Mask of truth values.  Arithmetic reads
// subnormals as zeros and writes zeros for them; loads are exact.
//
// Included once per target, so in the target's namespace.
#include <cstdint>

#include "format.h"

namespace zero8::ZERO8_TARGET {

// `Types` has kLanes, F, I and Mask, and I as operators are to take it, Unsigned and Signed.
template <class Types>
struct Operations : Types {
  using typename Types::F;
  using typename Types::I;
  using typename Types::Mask;
  using typename Types::Signed;
  using typename Types::Unsigned;

  ZERO8_DEVICE static I seti(uint32_t x) { return I(x - Unsigned{}); }

  ZERO8_DEVICE static F load(const float* p) { return copied<F>(p); }
  ZERO8_DEVICE static void store(float* p, F x) { __builtin_memcpy(p, &x, sizeof x); }
  // Two 16-bit numbers in each lane.
  ZERO8_DEVICE static I load_pairs(const void* p) { return copied<I>(p); }

  ZERO8_DEVICE static I as_int(F x) { return copied<I>(&x); }
  ZERO8_DEVICE static F as_float(I bits) { return copied<F>(&bits); }
  // The pattern without its sign.
  ZERO8_DEVICE static I magnitude_bits(F x) { return andi(as_int(x), seti(0x7FFFFFFF)); }

  // For numbers that come from outside: CPU threads read subnormals as zero anyway.
  ZERO8_DEVICE static F flushed(F x) { return x; }
  ZERO8_DEVICE static F mul_far(F a, F b) { return a * b; }
  ZERO8_DEVICE static F div(F a, F b) { return a / b; }

  ZERO8_DEVICE static I addi(I a, I b) { return I(Unsigned(a) + Unsigned(b)); }
  ZERO8_DEVICE static I subi(I a, I b) { return I(Unsigned(a) - Unsigned(b)); }
  ZERO8_DEVICE static I muli(I a, I b) { return I(Unsigned(a) * Unsigned(b)); }
  ZERO8_DEVICE static I andi(I a, I b) { return I(Unsigned(a) & Unsigned(b)); }
  ZERO8_DEVICE static I ori(I a, I b) { return I(Unsigned(a) | Unsigned(b)); }
  ZERO8_DEVICE static I xori(I a, I b) { return I(Unsigned(a) ^ Unsigned(b)); }
  template <int kBits>
  ZERO8_DEVICE static I shl(I a) {
    return I(Unsigned(a) << kBits);
  }
  template <int kBits>
  ZERO8_DEVICE static I shr(I a) {
    return I(Unsigned(a) >> kBits);
  }

  ZERO8_DEVICE static Mask equal(I a, I b) { return Mask(Unsigned(a) == Unsigned(b)); }
  ZERO8_DEVICE static Mask above(I a, I b) { return Mask(Signed(a) > Signed(b)); }
  ZERO8_DEVICE static Mask not_below(F a, F b) { return Mask(a >= b); }
  ZERO8_DEVICE static I choose(Mask m, I yes, I no) { return I(m ? Unsigned(yes) : Unsigned(no)); }
  ZERO8_DEVICE static I maxu(I a, I b) { return larger(Unsigned(a), Unsigned(b)); }
  ZERO8_DEVICE static I minu(I a, I b) { return smaller(Unsigned(a), Unsigned(b)); }
  ZERO8_DEVICE static I maxs(I a, I b) { return larger(Signed(a), Signed(b)); }
  ZERO8_DEVICE static I absi(I a) { return larger(Signed(a), Signed(subi(seti(0), a))); }
  // The larger of a, the pattern of a magnitude, and the magnitude of x, which is not NaN.
  ZERO8_DEVICE static I max_magnitude(I a, F x) { return maxu(a, magnitude_bits(x)); }
  // a + 1 where the mask is set.
  ZERO8_DEVICE static I incremented(I a, Mask m) { return choose(m, addi(a, seti(1)), a); }
  // Where c, which is below 2^31, is 0 too, 0.
  ZERO8_DEVICE static I unless_zero(I x, I c) {
    return I(Unsigned(c) != 0 ? Unsigned(x) : Unsigned{});
  }
  // Negated where x is negative; a is 0 where x is.
  ZERO8_DEVICE static I signed_as(I a, F x) {
    const I negative = I(Signed(as_int(x)) >> 31);
    return subi(xori(a, negative), negative);
  }
  // With the other sign where c is negative.
  ZERO8_DEVICE static F negated(F x, I c) {
    return as_float(xori(as_int(x), andi(c, seti(0x80000000))));
  }

  // Sums counts over all parts of a block: a CPU thread has the whole.
  ZERO8_DEVICE static int reduce_sum(int count) { return count; }

  template <class To>
  ZERO8_DEVICE static To copied(const void* p) {
    To to;
    __builtin_memcpy(&to, p, sizeof to);
    return to;
  }

 private:
  // Written so that the compiler sees one instruction in it.
  template <class Number>
  ZERO8_DEVICE static I larger(Number a, Number b) {
    return I(a > b ? a : b);
  }
  template <class Number>
  ZERO8_DEVICE static I smaller(Number a, Number b) {
    return I(a < b ? a : b);
  }
};

// Vec for loops over a block, where every result is as it is defined; vec_neon.h has another.  If
// not kIsExact, its mul, fma and fms may give 0 where 2^-126 is right.  saw_tiny(made) says whether
// any may have done so since forget_tiny(); all that has been made since then is to be made again
// with Vec.
template <class Vec>
struct Exact : Vec {
  static constexpr bool kIsExact = true;
  static bool saw_tiny(const float*) { return false; }
  static void forget_tiny() {}
};

}  // namespace zero8::ZERO8_TARGET
