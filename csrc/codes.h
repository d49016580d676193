// SPDX-License-Identifier: Apache-2.0
// What a code of moments is in terms of Vec, and what several codes have in common.  log.h,
// dynamic.h, fp8.h and linear4.h have the codes.
//
// A code is a struct with four parts, so that a step can arrange them as it likes:
//
//   kBits, kSigned, kScales, kZeroCode, kTwosComplement, kIsDithered
//       The bits of a code in memory, 8, 6 or 4; whether it has codes of negative values; how many
//       floats each block stores, 1 to kMaxScales; the code of exact 0; whether codes are in two's
//       complement, and so to be loaded by Vec::load8s instead of Vec::load8; whether thresholds
//       are used, and so is dither().
//   kRaised, kLowered
//       With fewer than 8 bits units.h makes bytes of codes, and codes of what the Encoder gives:
//       it adds the one and subtracts the other.  Codes in two's complement get the upper bits of
//       their bytes, so they are multiplied by 4.
//   Decoder(const float* stored, float gain, const CodecMaps&)
//       Of one block, by its kScales floats.  `decode(vec, Vec::I codes)` returns a Vec::F: the
//       values times `gain`; `vec` is a Vec or a QuickVec.
//   Encoder(const Range&, const CodecMaps&, const BlockValues&, float* stored)
//       Makes the scales and writes kScales floats; without kSigned it may change the values.
//       `encode(Vec::F, Vec::I threshold)` returns a Vec::I of codes, to which `completed<kLeft>`
//       is still to be applied: on packed bytes that is cheaper.  Its members are scalars: vectors
//       that are kept from block to block made the step 6 % slower.
//   dither(uint32_t q), kHalf
//       The Dither of the thresholds, which starts with q(i, t) = q, and the threshold that rounds
//       to nearest; not needed without kIsDithered.
//
// log.h has more of each, for the step that has its codes among its own arithmetic.
//
// Values are finite, 0 or normal numbers, below 2^126 in magnitude as limits on gradients see to
// it, and never negative without kSigned.
//
// What a code promises:
//   - Idempotence: the values of all codes and scales that it can make, decoded with gain 1, give
//     the same codes and scales.
//   - Zero means zero: kZeroCode decodes to exact 0 whatever the scales, a block of zeros has
//     scales of 0, and without kSigned what is not 0 is never stored as 0.
//   - The same bits on every processor: scales are made of reductions over integers only, and of
//     single float operations.
#include <cstdint>

#include "format.h"

namespace zero8::ZERO8_TARGET {

constexpr uint32_t kOneBits = 0x3F800000;
constexpr uint32_t kSignBit = 0x80000000, kInfinityBits = 0x7F800000;
constexpr float kSaturation = 0x1p126f;
constexpr int kMaxScales = 2;  // of any code, per block

// A unit of codes of fewer than 8 bits: how many it has, and their bytes.  UNITS of
// zero8/spec/grid.py.
template <class Code>
constexpr int kUnitCodes = Code::kBits == 6 ? 4 : 2;
template <class Code>
constexpr int kUnitBytes = Code::kBits == 6 ? 3 : 1;

ZERO8_DEVICE inline uint32_t bits_of(float x) {
  uint32_t bits;
  __builtin_memcpy(&bits, &x, sizeof bits);
  return bits;
}
ZERO8_DEVICE inline float float_of(uint32_t bits) {
  float x;
  __builtin_memcpy(&x, &bits, sizeof x);
  return x;
}

// (D2) for vector after vector, in the lower halves, which stand under the same upper half.
class Dither {
 public:
  ZERO8_DEVICE Dither() : Dither(0) {}
  // Element 0 has q(i, t) = `first`.
  ZERO8_DEVICE explicit Dither(uint32_t first, uint32_t upper_half = 0)
      : first_(first), upper_half_(upper_half) {}
  // Comes before all others.
  ZERO8_DEVICE ZERO8_INLINE void start(int i = 0) {
    const uint32_t first = first_ + static_cast<uint32_t>(i) * kInBlockStep;
    const Vec::I lower = Vec::andi(Vec::ramp(first, kInBlockStep), Vec::seti(0xFFFF));
    q_ = Vec::ori(lower, Vec::seti(upper_half_ << 16));
  }
  // Of the next vector; the first one begins with element i.
  ZERO8_DEVICE ZERO8_INLINE Vec::I next() {
    const Vec::I now = q_;
    q_ = Vec::add_low16(now, Vec::seti((Vec::kLanes * kInBlockStep) & 0xFFFF));
    return now;
  }

 private:
  uint32_t first_, upper_half_;
  Vec::I q_;
};

// The same threshold for all.
template <uint32_t kThreshold>
struct Constant {
  ZERO8_DEVICE void start() {}
  ZERO8_DEVICE Vec::I next() { return Vec::seti(kThreshold); }
};
using NoDither = Constant<0>;  // for codes without thresholds

// Whether a code has two sets of levels, of which its encoder chooses one for each block.  Then the
// settling of a step says whether thresholds are used: of an encoder that `is_dithered`, which has
// another encoder `dithered()`.
template <class Code>
constexpr bool kHasTwoLevels = false;

// Calls body(encode, dither) with what encodes a block whose thresholds start with q(i, t) = q.
template <class Code, class Body>
ZERO8_DEVICE ZERO8_INLINE inline void with_dither(const typename Code::Encoder& encode, uint32_t q,
                                                  Body&& body) {
  if constexpr (kHasTwoLevels<Code>) {
    if (encode.is_dithered) {
      body(encode.dithered(), Code::dither(q));
    } else {
      body(encode, NoDither());
    }
  } else if constexpr (Code::kIsDithered) {
    body(encode, Code::dither(q));
  } else {
    body(encode, NoDither());
  }
}

// A settling so large that it holds down no code: of values that do not come from a step, which are
// rounded to nearest (C2).
constexpr float kNoStep = 0x1p126f;

// What the codes of a block depend on besides their range.
struct BlockValues {
  uint32_t largest;                 // the pattern of the largest magnitude
  float* x;                         // up to a whole number of vectors, zeros at the end
  int count;                        // of them
  int place;                        // how many others lie before them
  int size;                         // of all together: more than `count` where others hold the rest
  float settling;                   // of (C2'), or kNoStep
  bool takes_other_levels = false;  // than (C9) says, where both are possible

  ZERO8_DEVICE float absmax() const {
    const float x = float_of(largest);
    return x < kSaturation ? x : kSaturation;
  }
};

// What is left to do to a code: negate it where x is negative; make it 0 where it is negative.
enum class Left { kSign, kClamp };

template <Left kLeft>
ZERO8_DEVICE inline Vec::I completed(Vec::I code, Vec::F x) {
  if constexpr (kLeft == Left::kSign) return Vec::andi(Vec::signed_as(code, x), Vec::seti(255));
  return Vec::maxs(code, Vec::seti(0));
}

// What the scales of a block depend on: its values may be added in any order, and zeros too, as
// they are beyond a tail.  Over bit patterns, so that neither order nor vector width matters; where
// a signed value is NaN it means nothing.  On CUDA each thread adds its own.
struct Range {
  Vec::I high;   // the largest magnitude
  Vec::I other;  // if signed the largest value, else the smallest but 0, minus 1, as 0 is ~0 then

  ZERO8_DEVICE explicit Range(bool is_signed = true)
      : high(Vec::seti(0)), other(Vec::seti(is_signed ? 0 : ~0u)) {}

  // `is_signed` is known to the compiler.  Of signed values NaN does not count.
  ZERO8_DEVICE ZERO8_INLINE void add(bool is_signed, Vec::F x) {
    if (is_signed) {
      high = Vec::max_magnitude(high, x);
    } else {
      high = Vec::maxu(high, Vec::as_int(x));
    }
    add_other(is_signed, x);
  }
  ZERO8_DEVICE ZERO8_INLINE void add_other(bool is_signed, Vec::F x) {
    const Vec::I bits = Vec::as_int(x);
    if (is_signed) {
      other = Vec::maxs(other, bits);
    } else {
      other = Vec::minu(other, Vec::addi(bits, Vec::seti(~0u)));
    }
  }
  ZERO8_DEVICE uint32_t largest() const { return Vec::reduce_maxu(high); }
  ZERO8_DEVICE uint32_t smallest() const { return Vec::reduce_minu(other) + 1u; }
  // The element of largest magnitude, with its sign, or `min_scale` if that is more; 0 for a block
  // of zeros: (C6).
  ZERO8_DEVICE float extreme(bool is_signed, float magnitude, float min_scale) const {
    const bool is_positive = !is_signed || float_of(Vec::reduce_maxu(other)) >= magnitude;
    if (magnitude == 0.0f) return 0.0f;
    return magnitude < min_scale ? min_scale : is_positive ? magnitude : -magnitude;
  }
};

template <bool kCondition, class Yes, class No>
struct Choice {
  using Type = Yes;
};
template <class Yes, class No>
struct Choice<false, Yes, No> {
  using Type = No;
};
template <bool kCondition, class Yes, class No>
using IfElse = typename Choice<kCondition, Yes, No>::Type;

// A codec: the codes of moments that can be negative, of those of them that the dither rounds, and
// of moments that cannot be negative.
template <class OfSigned, class OfDithered, class OfUnsigned>
struct CodecOf {
  template <bool kSigned, bool kDithered>
  using Code = IfElse<kSigned, IfElse<kDithered, OfDithered, OfSigned>, OfUnsigned>;
};

}  // namespace zero8::ZERO8_TARGET
