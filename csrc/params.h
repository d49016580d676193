// SPDX-License-Identifier: Apache-2.0
// The parameters and gradients of a block in terms of Vec, for the CPU and for CUDA: how they are
// read (R1), rounded and written (R7).  Equation numbers are those of zero8/spec/reference.py.
//
// Included once per target, so in the target's namespace.
#include <cstdint>

#include "blocks.h"
#include "codes.h"
#include "format.h"

namespace zero8::ZERO8_TARGET {

// Which lanes of a vector count: all, known to the compiler.  chunks.h has tails too.
struct All {};

template <class T>
ZERO8_DEVICE Vec::F load(const T* x, All) {
  return Vec::load(x);
}
ZERO8_DEVICE inline Vec::I load8(const uint8_t* x, uint32_t, All) { return Vec::load8(x); }
ZERO8_DEVICE inline Vec::I load8s(const uint8_t* x, All) { return Vec::load8s(x); }
ZERO8_DEVICE inline void store(float* p, Vec::F x, All) { Vec::store(p, x); }
ZERO8_DEVICE inline void store16(uint16_t* p, Vec::I x, All) { Vec::store16(p, x); }
ZERO8_DEVICE inline void store8(uint8_t* p, Vec::I x, All) { Vec::store8(p, x); }

ZERO8_DEVICE inline Vec::Mask is_nan(Vec::F x) {
  return Vec::above(Vec::magnitude_bits(x), Vec::seti(kInfinityBits));
}

// Whether any rounding to bfloat16 could overflow, or a value is not finite.
ZERO8_DEVICE inline bool any_extreme(Vec::F x) {
  return Vec::any(Vec::above(Vec::magnitude_bits(x), Vec::seti(0x7F7EFFFF)));
}

// Whether the upper 16 bits of a float, here in the lower half, are those of infinity or NaN.
ZERO8_DEVICE inline Vec::Mask is_beyond(Vec::I high) {
  const Vec::I exponent = Vec::seti(0x7F80);
  return Vec::equal(Vec::andi(high, exponent), exponent);
}

// The patterns of the nearest bfloat16 and float16, to even in a tie; what is beyond the largest
// becomes infinite, and every NaN the same.
ZERO8_DEVICE inline Vec::I nearest_bfloat16(Vec::F x) {
  const Vec::I bits = Vec::as_int(x);
  const Vec::I odd = Vec::andi(Vec::shr<16>(bits), Vec::seti(1));
  const Vec::I sum = Vec::addi(bits, Vec::addi(odd, Vec::seti(0x7FFF)));
  return Vec::choose(is_nan(x), Vec::seti(0x7FC0), Vec::shr<16>(sum));
}
ZERO8_DEVICE inline Vec::I nearest_half(Vec::F x) {
  constexpr uint32_t kLargest = 0x477FE000, kSmallestNormal = 0x38800000;  // 65504 and 2^-14
  const Vec::I bits = Vec::magnitude_bits(x);
  const Vec::I odd = Vec::andi(Vec::shr<13>(bits), Vec::seti(1));
  const Vec::I sum = Vec::addi(bits, Vec::addi(odd, Vec::seti(0x0FFF)));
  // Half of the difference between the biases of the exponents: 127 - 15.
  Vec::I half = Vec::shr<13>(Vec::subi(sum, Vec::seti(112u << 23)));
  half = Vec::choose(Vec::above(sum, Vec::seti(kLargest | 0x1FFF)), Vec::seti(kHalfInfinityBits),
                     half);
  // Subnormal halves are multiples of 2^-24, and so is the last bit of 0.75 and what follows it.
  const Vec::F shifted = Vec::fma_far(Vec::set(1.0f), Vec::as_float(bits), Vec::set(0.75f));
  const Vec::I multiple = Vec::subi(Vec::as_int(shifted), Vec::seti(0x3F400000));
  half = Vec::choose(Vec::above(Vec::seti(kSmallestNormal), bits), multiple, half);
  half = Vec::choose(is_nan(x), Vec::seti(0x7E00), half);
  return Vec::ori(half, Vec::shr<16>(Vec::andi(Vec::as_int(x), Vec::seti(kSignBit))));
}
// x rounded to a type of products (R1): float or bfloat16.
template <class G>
ZERO8_DEVICE inline Vec::F nearest(Vec::F x) {
  return x;
}
template <>
ZERO8_DEVICE inline Vec::F nearest<uint16_t>(Vec::F x) {
  return Vec::as_float(Vec::shl<16>(nearest_bfloat16(x)));
}

// (D1) and (D2) of the first of a block's elements.
struct Thresholds {
  uint32_t r, q;

  ZERO8_DEVICE Thresholds(const Segment& seg, const Block& b, uint32_t phase) {
    const uint32_t index = static_cast<uint32_t>(seg.first + b.begin);
    const uint32_t offset = static_cast<uint32_t>(b.offset);
    r = index * kElementStep + phase;
    q = (((index - offset) * kElementStep + phase) >> 16) + offset * kInBlockStep;
  }
};

// The threshold of hashed rounding: lowbias32 of (D1).
ZERO8_DEVICE inline Vec::I hashed(Vec::I r) {
  r = Vec::muli(Vec::xori(r, Vec::shr<16>(r)), Vec::seti(kHashFactor1));
  r = Vec::muli(Vec::xori(r, Vec::shr<15>(r)), Vec::seti(kHashFactor2));
  return Vec::shr<16>(Vec::xori(r, Vec::shr<16>(r)));
}

// The parameters of one block: how they are read as float32, by Vec or, on CUDA, QuickVec, and
// rounded and written (R7), vector by vector, in order, after `start()`.  `is_extreme` is at least
// any_extreme of what is written.  Product is the wider of their type and of G, that of their
// gradients.
class Float32 {
 public:
  using Stored = float;
  template <class G>
  using Product = float;
  static constexpr bool kCorrected = false;
  float* p;

  ZERO8_DEVICE Float32() : p(nullptr) {}
  ZERO8_DEVICE Float32(const Segment& seg, const Block& b)
      : p(static_cast<float*>(seg.param) + b.begin) {}
  ZERO8_DEVICE void start() {}
  template <class AnyVec, class Lanes>
  ZERO8_DEVICE Vec::F read(AnyVec& vec, int i, Lanes lanes) const {
    return vec.flushed(load(p + i, lanes));
  }
  template <class Lanes>
  ZERO8_DEVICE void write(int i, Vec::F x, Lanes lanes, bool) {
    store(p + i, x, lanes);
  }
};

class BFloat16 {
 public:
  using Stored = uint16_t;
  template <class G>
  using Product = G;
  static constexpr bool kCorrected = false;
  uint16_t* p;

  ZERO8_DEVICE BFloat16() : p(nullptr), rounding_(kNearest) {}
  ZERO8_DEVICE BFloat16(const Segment& seg, const Block& b)
      : p(static_cast<uint16_t*>(seg.param) + b.begin), rounding_(seg.rounding) {
    const Thresholds first(seg, b, seg.param_phase);
    dither_ = Dither(first.q);
    first_r_ = first.r;
  }
  ZERO8_DEVICE void start() {
    dither_.start();
    r_ = Vec::ramp(first_r_, kElementStep);
  }
  template <class AnyVec, class Lanes>
  ZERO8_DEVICE Vec::F read(AnyVec& vec, int i, Lanes lanes) const {
    return vec.flushed(load(p + i, lanes));
  }
  template <class Lanes>
  ZERO8_DEVICE void write(int i, Vec::F x, Lanes lanes, bool is_extreme) {
    const Vec::I bits = Vec::as_int(x);
    const Vec::I threshold = threshold_of(bits);
    Vec::I high = Vec::shr<16>(Vec::addi(bits, threshold));
    if (is_extreme) high = careful(x, high);
    store16(p + i, high, lanes);
  }

 private:
  ZERO8_DEVICE Vec::I threshold_of(Vec::I bits) {
    if (rounding_ == kDither) return dither_.next();
    if (rounding_ == kNearest) {
      return Vec::addi(Vec::seti(0x7FFF), Vec::andi(Vec::shr<16>(bits), Vec::seti(1)));
    }
    const Vec::I r = r_;
    r_ = Vec::addi(r, Vec::seti(kElementStep * Vec::kLanes));
    return hashed(r);
  }
  // What x is rounded to, which is `high` where all is as usual.  A finite value that would become
  // infinite is truncated, except when rounding to nearest.
  ZERO8_DEVICE Vec::I careful(Vec::F x, Vec::I high) const {
    if (rounding_ != kNearest) {
      high = Vec::choose(is_beyond(high), Vec::shr<16>(Vec::as_int(x)), high);
    }
    return Vec::choose(is_nan(x), Vec::seti(0x7FC0), high);
  }

  int32_t rounding_;
  Dither dither_;
  uint32_t first_r_ = 0;
  Vec::I r_;  // (D1), to be hashed
};

// What tells the weights that a step has written from others: zero8/spec/corrections.py.

// All bits but the signs of two bfloat16, of which the first one is the lower half.
constexpr uint32_t kTwoMagnitudes = 0x7FFF7FFF;

// Two bfloat16, in whose signs is whether they are not 0; the other bits are anything.
ZERO8_DEVICE inline uint32_t are_nonzero(uint32_t two) {
  return (two & kTwoMagnitudes) + kTwoMagnitudes;
}
// In the same bits, whether weights can have corrections: others are 0, infinite or NaN.
ZERO8_DEVICE inline uint32_t are_corrected(uint32_t two) {
  const uint32_t are_beyond = (two & kTwoMagnitudes) + 0x00800080;
  return are_nonzero(two) & ~are_beyond;
}
// (K1); the factors of a block are kGoldenStep and kNextFactor more for each next two.
constexpr uint32_t kNextFactor = 2 * kGoldenStep;
ZERO8_DEVICE inline uint32_t sum_of_two(uint32_t two, uint32_t factor) {
  const uint32_t without_sign_of_0 = two & (are_nonzero(two) | kTwoMagnitudes);
  const uint32_t x = without_sign_of_0 * factor;
  return x ^ x >> 15;
}
// (K2)
ZERO8_DEVICE inline bool are_of_others(const WeightSums& left, uint32_t sum) {
  return left.all != 0 && sum != left.all && sum != left.without_zeros;
}

// A bfloat16 and the 8 bits below it as a signed remainder: a 24-bit weight, without noise.
class CorrectedBFloat16 {
 public:
  using Stored = uint16_t;
  template <class G>
  using Product = G;
  static constexpr bool kCorrected = true;
  uint16_t* p;

  ZERO8_DEVICE CorrectedBFloat16() : p(nullptr), correction_(nullptr) {}
  ZERO8_DEVICE CorrectedBFloat16(const Segment& seg, const Block& b)
      : p(static_cast<uint16_t*>(seg.param) + b.begin),
        correction_(static_cast<uint8_t*>(seg.correction) + b.begin) {}
  ZERO8_DEVICE void start() {}
  template <class AnyVec, class Lanes>
  ZERO8_DEVICE Vec::F read(AnyVec& vec, int i, Lanes lanes) const {
    const Vec::I correction = Vec::shl<8>(load8s(correction_ + i, lanes));
    return vec.flushed(corrected(load(p + i, lanes), correction));
  }
  template <class Lanes>
  ZERO8_DEVICE void write(int i, Vec::F x, Lanes lanes, bool is_extreme) {
    const Vec::I sum = rounded(x);
    Vec::I high = Vec::shr<16>(sum), low = remainder(sum);
    if (is_extreme) careful(x, high, low);
    store16(p + i, high, lanes);
    store8(correction_ + i, low, lanes);
  }

 private:
  ZERO8_DEVICE static Vec::F corrected(Vec::F x, Vec::I correction) {
    return Vec::as_float(Vec::addi(Vec::as_int(x), correction));
  }
  // 24 bits, rounded half up in magnitude, and the nearest bfloat16 to them, in the upper half: for
  // with all divisions rounding down ((b + 128)/256 + 128)/256 is (b + 128 + 32768)/65536.
  ZERO8_DEVICE static Vec::I rounded(Vec::F x) {
    return Vec::addi(Vec::as_int(x), Vec::seti(0x8080));
  }
  // The last 8 of the 24 bits.
  ZERO8_DEVICE static Vec::I remainder(Vec::I sum) {
    return Vec::xori(Vec::andi(Vec::shr<8>(sum), Vec::seti(255)), Vec::seti(128));
  }
  // Where the nearest is infinite: the largest finite one and the largest remainder.
  ZERO8_DEVICE static void careful(Vec::F x, Vec::I& high, Vec::I& low) {
    const Vec::Mask beyond = is_beyond(high);
    high = Vec::choose(beyond, Vec::shr<16>(Vec::as_int(x)), high);
    low = Vec::choose(beyond, Vec::minu(low, Vec::seti(127)), low);
    high = Vec::choose(is_nan(x), Vec::seti(0x7FC0), high);
    low = Vec::choose(is_nan(x), Vec::seti(0), low);
  }

  uint8_t* correction_;
};

// --- Gradients -----------------------------------------------------------------------------------

// A gradient at or above this, or NaN, counts as not finite: its square would overflow.
constexpr uint32_t kGradientLimitBits = (127 + 63) << 23;

// (R1)
struct Gradient {
  Vec::F l2, grad_sign, grad_factor;
  bool has_l2, has_factor;
  float sign;  // that is left to what an algorithm multiplies a gradient by

  ZERO8_DEVICE Gradient(float l2_factor, float sign_of_gradients, float factor)
      : l2(Vec::set(l2_factor)),
        grad_sign(Vec::set(sign_of_gradients)),
        grad_factor(Vec::set(factor)),
        has_l2(has_bits(l2_factor)),
        has_factor(bits_of(factor) != kOneBits),
        sign(has_l2 ? 1.0f : sign_of_gradients) {}

  // Whether gradients are taken as they are in memory.
  ZERO8_DEVICE bool are_as_stored() const { return !has_l2 && !has_factor; }
  // A gradient multiplied by the factor, as if the product had been stored in this type.
  template <class Product, class AnyVec>
  ZERO8_DEVICE Vec::F scaled(AnyVec& vec, Vec::F g) const {
    return has_factor ? nearest<Product>(vec.mul(grad_factor, g)) : g;
  }
  // Without L2 the gradient as it is: the algorithm's factor `with_sign` carries the sign.
  template <class AnyVec>
  ZERO8_DEVICE Vec::F gradient(AnyVec& vec, Vec::F p, Vec::F g) const {
    return has_l2 ? vec.fma(l2, p, vec.mul(grad_sign, g)) : g;
  }
  ZERO8_DEVICE float with_sign(float factor) const { return sign * factor; }

 private:
  // Tests of integers are cheaper in the loop, and this one does not depend on whether subnormals
  // are flushed.
  ZERO8_DEVICE static bool has_bits(float x) { return (bits_of(x) & ~kSignBit) != 0; }
};

}  // namespace zero8::ZERO8_TARGET
