// SPDX-License-Identifier: Apache-2.0
// What a code of moments is in terms of Vec, and what several codes have in common.  log.h,
// dynamic.h, fp8.h and linear4.h have the codes.
//
// A code is a struct with four parts, so that the step can arrange them as it likes:
//
//   kBits, kSigned, kScales, kZeroCode, kTwosComplement, kHasPairs, kIsDithered
//       The bits of a code in memory, 8, 6 or 4; whether it has codes of negative values; how many
//       floats each block stores, 1 to kMaxScales; the code of exact 0; whether codes are in two's
//       complement, and so to be loaded by Vec::load8s instead of Vec::load8; whether pairs of
//       vectors are served; whether thresholds are used, and so is dither().
//   kRaised, kLowered
//       With fewer than 8 bits packing.h makes bytes of codes, and codes of what the Encoder gives:
//       it adds the one and subtracts the other.  Codes in two's complement get the upper bits of
//       their bytes, so they are multiplied by 4.
//   Decoder(const float* stored, float gain, const CodecMaps&)
//       Of one block, by its kScales floats.  `decode(vec, Vec::I codes)` returns a Vec::F: the
//       values times `gain`; `vec` is a Vec or a QuickVec.  On the CPU
//       `decode.chunk(const uint8_t*)` returns a Chunk for the next four vectors, whose
//       two<kPairs>(vec, int k, Vec::F*) gives numbers k and k + 1, k being 0 or 2, in order or as
//       a pair: see Dither.  The Decoder and the codes must outlive it.
//   Range()
//       What the block's scales depend on: `add(Vec::F)` is called with every value of the block,
//       in any order, while values are made.  Zeros may be added, as beyond a tail, and on CUDA
//       each thread adds its own values: the Encoder reduces over the block.  It tells the
//       `largest()` pattern, which without kSigned is that of NaN if there is one.
//   Encoder(const Range&, const CodecMaps&, const BlockValues&, float* stored)
//       Makes the scales and writes kScales floats; it may change the values.  `encode(Vec::F,
//       Vec::I threshold)` returns a Vec::I of codes, to which `completed<kLeft>` is still to be
//       applied: on packed bytes that is cheaper.  Encoder() encodes nothing.  Its members are
//       scalars, as it is copied and kept from block to block: vectors made the step 6 % slower.
//   dither(uint32_t q)
//       The Dither of the thresholds, which starts with q(i, t) = q; not needed without
//       kIsDithered.
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

#include "dither.h"
#include "format.h"

namespace zero8 {
namespace ZERO8_TARGET {

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
//
// Vectors are in order, or they come in pairs, the first of elements 0, 2, 4, ... and the second of
// 1, 3, 5, ...: so 16-bit numbers become two vectors of floats with two instructions.
class Dither {
 public:
  ZERO8_DEVICE Dither() : Dither(0) {}
  // Element 0 has q(i, t) = `first`.
  ZERO8_DEVICE explicit Dither(uint32_t first, uint32_t upper_half = 0)
      : first_(first), upper_half_(upper_half) {}
  // From element i on; comes before all others.
  ZERO8_DEVICE ZERO8_INLINE void start(int i, bool pairs) {
    const uint32_t first = first_ + static_cast<uint32_t>(i) * kInBlockStep;
    q_[0] = ramp(first, pairs ? 2 * kInBlockStep : kInBlockStep);
    q_[1] = Vec::add_low16(q_[0], step(pairs ? 1 : Vec::kLanes));
  }
  // Of the next vector, in order; two at a time, in order or a pair, they are next_of_two(0) and
  // next_of_two(1).
  ZERO8_DEVICE ZERO8_INLINE Vec::I next() {
    const Vec::I now = q_[0];
    q_[0] = Vec::add_low16(now, step(Vec::kLanes));
    return now;
  }
  ZERO8_DEVICE ZERO8_INLINE Vec::I next_of_two(int k) {
    const Vec::I now = q_[k];
    q_[k] = Vec::add_low16(now, step(2 * Vec::kLanes));
    return now;
  }

 private:
  uint32_t first_, upper_half_;
  Vec::I q_[2];

  ZERO8_DEVICE static Vec::I step(uint32_t elements) {
    return Vec::seti((elements * kInBlockStep) & 0xFFFF);
  }
  ZERO8_DEVICE Vec::I ramp(uint32_t start, uint32_t step) const {
    const Vec::I lower = Vec::andi(Vec::ramp(start, step), Vec::seti(0xFFFF));
    return Vec::ori(lower, Vec::seti(upper_half_ << 16));
  }
};

// Whether thresholds are used where the settling of a step says so, and only there: of an encoder
// that then `is_dithered`, and has an encoder `dithered()`.
template <class Code>
constexpr bool kMayDither = false;

// What the codes of a block depend on besides their range.
struct BlockValues {
  float* x;        // up to a whole number of vectors, zeros at the end
  int count;       // of them
  int place;       // how many others lie before them
  int size;        // of all together: more than `count` where others hold the rest
  float settling;  // of (C2')
};

// Four vectors of codes, of which the Decoder takes two at a time as they are loaded.
template <class Decoder>
struct ChunkOf {
  const Decoder& decode;
  const uint8_t* codes;

  template <bool kPairs, class V>
  ZERO8_DEVICE ZERO8_INLINE void two(V& vec, int k, typename V::F* x) const {
    const uint8_t* from = codes + k * V::kLanes;
    typename V::I code[2];
    if constexpr (kPairs) {
      V::load8_pair(from, code);
    } else {
      V::load8_two(from, code);
    }
    x[0] = decode(vec, code[0]);
    x[1] = decode(vec, code[1]);
  }
};

// What is left to do to a code: negate it where x is negative; make it 0 where it is negative; make
// it 0 where x, never negative, is 0.
enum class Left { kSign, kClamp, kUnlessZero };

template <Left kLeft>
ZERO8_DEVICE inline Vec::I completed(Vec::I code, Vec::F x) {
  if constexpr (kLeft == Left::kSign) return Vec::andi(Vec::signed_as(code, x), Vec::seti(255));
  if constexpr (kLeft == Left::kClamp) return Vec::maxs(code, Vec::seti(0));
  return Vec::unless_zero(code, Vec::as_int(x));
}

// Largest |x|, of values that are never negative if not kSigned.  Over bit patterns, so that
// neither order nor vector width matters.  Where a signed value is NaN it means nothing.
template <bool kSigned>
struct Absmax {
  Vec::I patterns;

  ZERO8_DEVICE Absmax() : patterns(Vec::seti(0)) {}

  ZERO8_DEVICE ZERO8_INLINE void add(Vec::F x) {
    patterns = kSigned ? Vec::max_magnitude(patterns, x) : Vec::maxu(patterns, Vec::as_int(x));
  }
  ZERO8_DEVICE uint32_t largest() const { return Vec::reduce_maxu(patterns); }
  ZERO8_DEVICE float value() const {
    const float x = float_of(largest());
    return x < kSaturation ? x : kSaturation;
  }
};

// The element of largest magnitude, with its sign: (C6).
template <bool kSigned>
struct Extremes {
  Absmax<kSigned> absmax;
  Vec::I positive;  // the largest of the elements that are not negative

  ZERO8_DEVICE Extremes() : positive(Vec::seti(0)) {}

  ZERO8_DEVICE ZERO8_INLINE void add(Vec::F x) {
    absmax.add(x);
    if constexpr (kSigned) positive = Vec::maxs(positive, Vec::as_int(x));
  }
  ZERO8_DEVICE uint32_t largest() const { return absmax.largest(); }
  // The scale, or `min_scale` if that is more; 0 for a block of zeros.
  ZERO8_DEVICE float scale(float min_scale) const {
    const float magnitude = absmax.value();
    const bool is_positive = !kSigned || float_of(Vec::reduce_maxu(positive)) >= magnitude;
    if (magnitude == 0.0f) return 0.0f;
    return magnitude < min_scale ? min_scale : is_positive ? magnitude : -magnitude;
  }
};

}  // namespace ZERO8_TARGET
}  // namespace zero8
