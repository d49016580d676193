// SPDX-License-Identifier: Apache-2.0
// The codes of the moments in terms of Vec: zero8/spec/log.py and dynamic.py, equation by equation.
// fp8.h has those of `fp8`, linear4.h those of `linear4`.
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
//       values times `gain`; `vec` is a Vec or, on CUDA, a QuickVec.  On the CPU
//       `decode.chunk(const uint8_t*)` returns a Chunk for the next four vectors, whose
//       two<kPairs>(int k, Vec::F*) gives numbers k and k + 1, k being 0 or 2, in order or as a
//       pair: see Dither.  The Decoder and the codes must outlive it.
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

ZERO8_DEVICE inline Vec::I magnitude_bits(Vec::F x) {
  return Vec::andi(Vec::as_int(x), Vec::seti(~kSignBit));
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

// What the codes of a block depend on besides their range.
struct BlockValues {
  float* x;        // up to a whole number of vectors, zeros at the end
  int count;       // of them
  int place;       // how many others lie before them
  int size;        // of all together: more than `count` where others hold the rest
  float settling;  // of (C2')
};

// Four vectors of codes, of which the Decoder takes two at a time.
template <class Decoder>
struct ChunkOf {
  const Decoder& decode;
  const uint8_t* codes;

  template <bool kPairs>
  ZERO8_DEVICE ZERO8_INLINE void two(int k, Vec::F* x) const {
    decode.template two<kPairs>(codes + k * Vec::kLanes, x);
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

// (C2)-(C4)
template <int kOctaves, int kMantissaBits>
struct Octaves {
  static constexpr int kShift = 23 - kMantissaBits;
  static constexpr uint32_t kHalf = 1u << (kShift - 1);  // half a cell
  // (C3) of 127: 2^(octaves-1) * (2 - 2^-mantissa_bits) - 1.
  static constexpr float kTop =
      static_cast<float>(1 << kOctaves) -
      static_cast<float>(1 << (kOctaves - 1)) / static_cast<float>(1 << kMantissaBits) - 1.0f;
  static constexpr float kMinScale = 0x1p-126f * static_cast<float>(1 << kMantissaBits);

  // (C4) of a block that is not all zeros.
  ZERO8_DEVICE static float scale(float absmax) {
    const float scale = absmax / kTop;
    return scale < kMinScale ? kMinScale : scale;
  }
};

// Signed values in `log` and `log6`: (C1), (C9)
template <int kCodeBits>
struct SignedLog {
  static constexpr int kBits = kCodeBits;
  static constexpr bool kSigned = true, kIsDithered = false;
  static constexpr int kScales = 1;
  static constexpr uint32_t kZeroCode = 0;
  static constexpr uint32_t kRaised = 0, kLowered = 0;
  static constexpr bool kTwosComplement = true, kHasPairs = true;
  using Narrow = Octaves<4, kBits - 3>;
  using Wide = Octaves<8, kBits - 4>;
  static constexpr float kJoint = 0.75f;  // (C3) of `joint`
  static constexpr float kMinScale = 0x1p-100f;
  static constexpr int kSample = 32, kSampleOf = 128;

  struct Decoder {
    Vec::F scale;
    Vec::I shift, shift_from_top;

    ZERO8_DEVICE Decoder(const float* stored, float gain, const CodecMaps&)
        : scale(Vec::mul(Vec::set(float_of(bits_of(*stored) & ~kSignBit)), Vec::set(gain))) {
      const uint32_t bits = (*stored < 0.0f ? Wide::kShift : Narrow::kShift) - (8 - kBits);
      shift = Vec::seti(bits);
      shift_from_top = Vec::seti(24 - bits);
    }
    template <class AnyVec>
    ZERO8_DEVICE ZERO8_INLINE Vec::F operator()(AnyVec& vec, Vec::I code) const {
      return value(vec, Vec::shlv(Vec::absi(code), shift), code);
    }
    // V is Vec: that of CUDA, which has no such loads, does not get here.
    template <bool kPairs, class V = Vec>
    ZERO8_DEVICE ZERO8_INLINE void two(const uint8_t* codes, typename V::F* x) const {
      V vec;
      if constexpr (kPairs) {
        typename V::I top[2];
        V::load8_top_pair(codes, top);
        x[0] = value(vec, V::shrv(V::absi(top[0]), shift_from_top), top[0]);
        x[1] = value(vec, V::shrv(V::absi(top[1]), shift_from_top), top[1]);
      } else {
        x[0] = (*this)(vec, V::load8s(codes));
        x[1] = (*this)(vec, V::load8s(codes + V::kLanes));
      }
    }
    using Chunk = ChunkOf<Decoder>;
    ZERO8_DEVICE Chunk chunk(const uint8_t* codes) const { return {*this, codes}; }

   private:
    // Of a magnitude at the place of (C3), with the sign of `code`.
    template <class AnyVec>
    ZERO8_DEVICE ZERO8_INLINE Vec::F value(AnyVec& vec, Vec::I magnitude, Vec::I code) const {
      const Vec::F y = Vec::as_float(Vec::addi(magnitude, Vec::seti(kOneBits)));
      // (y - 1) * scale: the level y - 1 is exact, so this rounds once, as the product does.
      const Vec::F signed_scale = Vec::negated(scale, code);
      return vec.fms(y, signed_scale, signed_scale);
    }
  };

  using Range = Absmax<true>;

  struct Encoder {
    static constexpr Left kLeft = Left::kSign;
    float inverse = 0.0f, settled_inverse = 0.0f;
    uint32_t shift = 0, half = 0;

    ZERO8_DEVICE Encoder() {}
    ZERO8_DEVICE Encoder(const Range& range, const CodecMaps&, const BlockValues& block,
                         float* stored) {
      const float absmax = range.value();
      const float narrow = Narrow::scale(absmax), wide = Wide::scale(absmax);
      const int samples = block.size / kSampleOf * kSample +
                          (block.size % kSampleOf < kSample ? block.size % kSampleOf : kSample);
      const bool is_wide = narrow >= kMinScale && 16 * large(block, kJoint * narrow) < 11 * samples;
      const bool is_zero = absmax == 0.0f;
      *stored = is_zero ? 0.0f : is_wide ? -wide : narrow;
      const float reciprocal = is_zero ? 0.0f : 1.0f / (is_wide ? wide : narrow);
      inverse = reciprocal;
      settled_inverse = reciprocal * block.settling;
      shift = is_wide ? Wide::kShift : Narrow::kShift;
      half = is_wide ? Wide::kHalf : Narrow::kHalf;
    }
    // (C2').  No code can exceed the largest: a moment that a step makes of finite gradients is
    // less than kSaturation, so the block's largest element comes within 5 ulps of the largest
    // code, too few to carry.
    ZERO8_DEVICE Vec::I operator()(Vec::F x, Vec::I) const {
      const Vec::F magnitude = Vec::as_float(magnitude_bits(x));
      const Vec::I y = Vec::as_int(Vec::fma_far(magnitude, Vec::set(inverse), Vec::set(1.0f)));
      const Vec::I settled =
          Vec::as_int(Vec::fma_far(magnitude, Vec::set(settled_inverse), Vec::set(1.0f)));
      const Vec::I rounded = Vec::minu(Vec::addi(y, Vec::seti(half)), settled);
      return Vec::shrv(Vec::subi(rounded, Vec::seti(kOneBits)), Vec::seti(shift));
    }

   private:
    // How many sampled |x| of the block are at least `joint`, which is positive.
    ZERO8_DEVICE static int large(const BlockValues& block, float joint) {
      int count = 0;
      const int first = block.place % kSampleOf;  // a multiple of what one thread holds
      for (int i = 0; i < block.count && first < kSample; i += kSampleOf) {
        for (int k = i; k < i + kSample && k < block.count; k += Vec::kLanes) {
          const Vec::I magnitude = magnitude_bits(Vec::load(block.x + k));
          count += Vec::count(Vec::above(magnitude, Vec::seti(bits_of(joint) - 1u)));
        }
      }
      return Vec::reduce_sum(count);
    }
  };
};

// Signed values in `log` and `log6` that live long: (C2")
template <int kCodeBits>
struct DitheredLog : SignedLog<kCodeBits> {
  static constexpr bool kIsDithered = true;
  using Narrow = typename SignedLog<kCodeBits>::Narrow;
  using Range = typename SignedLog<kCodeBits>::Range;

  struct Encoder {
    static constexpr Left kLeft = Left::kSign;
    float inverse = 0.0f;

    ZERO8_DEVICE Encoder() {}
    ZERO8_DEVICE Encoder(const Range& range, const CodecMaps&, const BlockValues&, float* stored) {
      const float absmax = range.value();
      const bool is_zero = absmax == 0.0f;
      const float scale = is_zero ? 0.0f : Narrow::scale(absmax);
      *stored = scale;
      inverse = is_zero ? 0.0f : 1.0f / scale;
    }
    // A cell has 2^kShift units of the pattern, 2^18 for 8 bits, of which the threshold takes 8 to
    // 2^18 - 8: no code can exceed the largest, as for SignedLog, and the block's largest element
    // has that one.
    ZERO8_DEVICE Vec::I operator()(Vec::F x, Vec::I threshold) const {
      const Vec::F magnitude = Vec::as_float(magnitude_bits(x));
      const Vec::I y = Vec::as_int(Vec::fma_far(magnitude, Vec::set(inverse), Vec::set(1.0f)));
      constexpr int kShift = Narrow::kShift;
      const Vec::I distance = Vec::subi(y, Vec::seti(kOneBits));
      return Vec::shr<kShift>(Vec::addi(Vec::shl<kShift - 16>(threshold), distance));
    }
  };

  // The threshold is q, with the last two bits replaced by 2.
  ZERO8_DEVICE static Dither dither(uint32_t q) { return Dither((q & ~3u) | 2u); }
};

// Values that are never negative in `log` and `log6`: (C7), (C8)
template <int kCodeBits>
struct Log {
  static constexpr int kBits = kCodeBits;
  static constexpr bool kSigned = false, kIsDithered = true;
  static constexpr int kScales = 2;
  static constexpr uint32_t kZeroCode = 0, kRaised = 0, kLowered = 0;
  static constexpr bool kTwosComplement = false, kHasPairs = true;
  static constexpr int32_t kMinSpan = 2 << 23, kMaxSpan = 28 << 23;
  static constexpr uint32_t kNormalBits = 0x00800000, kLowestBits = kNormalBits + 16;
  static constexpr uint32_t kTop = (1u << kBits) - 1;
  static constexpr int kPartBits = kBits - 4;
  static constexpr uint32_t kMiddle = kBits == 8 ? 128 : 0;
  // The smallest element may lie that many units below code 1.
  static constexpr int32_t kMargin = 9;
  // Beyond all numbers: what a block of zeros counts from, so that all of them get code 0.
  static constexpr uint32_t kBeyond = 0x7F000000;

  struct Decoder {
    Vec::I base, step;
    Vec::F gain;

    ZERO8_DEVICE Decoder(const float* stored, float factor, const CodecMaps&)
        : step(Vec::truncate(Vec::set(stored[1]))), gain(Vec::set(factor)) {
      const Vec::I span = Vec::shr<kPartBits>(Vec::muli(step, Vec::seti(kTop)));
      base = Vec::subi(Vec::seti(bits_of(stored[0])), span);
    }
    template <class AnyVec>
    ZERO8_DEVICE ZERO8_INLINE Vec::F operator()(AnyVec& vec, Vec::I code) const {
      const Vec::I bits = Vec::addi(Vec::shr<kPartBits>(Vec::muli(code, step)), base);
      return vec.mul(Vec::as_float(Vec::unless_zero(bits, code)), gain);
    }
    // As that of SignedLog.
    template <bool kPairs, class V = Vec>
    ZERO8_DEVICE ZERO8_INLINE void two(const uint8_t* codes, typename V::F* x) const {
      V vec;
      typename V::I code[2];
      if constexpr (kPairs) {
        V::load8_pair(codes, code);
      } else {
        code[0] = V::load8(codes);
        code[1] = V::load8(codes + V::kLanes);
      }
      x[0] = (*this)(vec, code[0]);
      x[1] = (*this)(vec, code[1]);
    }
    using Chunk = ChunkOf<Decoder>;
    ZERO8_DEVICE Chunk chunk(const uint8_t* codes) const { return {*this, codes}; }
  };

  // Values are not negative, so their patterns order like them; minus 1, zero is the largest.
  struct Range {
    Vec::I high, below_low;

    ZERO8_DEVICE Range() : high(Vec::seti(0)), below_low(Vec::seti(~0u)) {}

    ZERO8_DEVICE ZERO8_INLINE void add(Vec::F x) {
      high = Vec::maxu(high, Vec::as_int(x));
      below_low = Vec::minu(below_low, Vec::addi(Vec::as_int(x), Vec::seti(~0u)));
    }
    ZERO8_DEVICE uint32_t largest() const { return Vec::reduce_maxu(high); }
  };

  struct Encoder {
    static constexpr Left kLeft = Left::kClamp;
    uint32_t minus_middle = 0;
    float inverse = 0.0f;

    ZERO8_DEVICE Encoder() {}
    ZERO8_DEVICE Encoder(const Range& range, const CodecMaps&, const BlockValues& block,
                         float* stored) {
      const uint32_t high = range.largest();
      const uint32_t low = Vec::reduce_minu(range.below_low) + 1u;
      int32_t span = static_cast<int32_t>(high - (low < kLowestBits ? kLowestBits : low));
      span = span < kMinSpan ? kMinSpan : span > kMaxSpan ? kMaxSpan : span;
      const uint32_t step = ((static_cast<uint32_t>(span) << kPartBits) + kTop / 2) / (kTop - 1);
      const uint32_t base = high - ((kTop * step) >> kPartBits);
      const bool is_zero = high == 0;
      stored[0] = float_of(high);
      stored[1] = is_zero ? 0.0f : static_cast<float>(step);
      inverse = static_cast<float>(1 << kPartBits) / static_cast<float>(step);
      minus_middle = 0u - (is_zero ? kBeyond : base + ((kMiddle * step) >> kPartBits));
      const uint32_t first = first_code(base, step);
      const uint32_t lowest = base + ((first * step) >> kPartBits);
      const bool is_below = static_cast<int32_t>(lowest - low) > kMargin;
      if (!is_zero && (first > 1 || is_below)) raise(block, lowest);
    }
    ZERO8_DEVICE Vec::I operator()(Vec::F x, Vec::I threshold) const {
      const Vec::F distance = Vec::to_float(Vec::addi(Vec::as_int(x), Vec::seti(minus_middle)));
      const Vec::I code =
          Vec::truncate(Vec::fma_far(distance, Vec::set(inverse), Vec::as_float(threshold)));
      if constexpr (kMiddle == 128) return code;
      return Vec::subi(code, Vec::seti(128 - kMiddle));
    }

   private:
    // The first code that decodes to a normal number.
    ZERO8_DEVICE static uint32_t first_code(uint32_t base, uint32_t step) {
      const bool all =
          static_cast<int32_t>(base + (step >> kPartBits)) >= static_cast<int32_t>(kNormalBits);
      return all ? 1u : (((kNormalBits - base) << kPartBits) + step - 1u) / step;
    }
    // Raises what is not 0 to the pattern `lowest` at least.  Where code 1 is below the normal
    // numbers, 0 has a place among the codes: it moves far down.
    ZERO8_DEVICE static void raise(const BlockValues& block, uint32_t lowest) {
      const Vec::I far_below = Vec::seti(lowest - (1u << 29));
      for (int i = 0; i < block.count; i += Vec::kLanes) {
        const Vec::I x = Vec::as_int(Vec::load(block.x + i));
        const Vec::I raised = Vec::maxs(x, Vec::seti(lowest));
        const Vec::Mask is_zero = Vec::equal(x, Vec::seti(0));
        Vec::store(block.x + i, Vec::as_float(Vec::choose(is_zero, far_below, raised)));
      }
    }
  };

  // The threshold is 128 + q/65536, whose pattern is 0x4300 and q, with the last five bits of q
  // replaced by 16.
  ZERO8_DEVICE static Dither dither(uint32_t q) { return Dither((q & ~31u) | 16u, 0x4300); }
};

// (C5), (C6)
template <bool kIsSigned>
struct Dynamic {
  static constexpr int kBits = 8;
  static constexpr bool kSigned = kIsSigned, kIsDithered = false;
  static constexpr int kScales = 1;
  static constexpr uint32_t kZeroCode = kSigned ? 127 : 0;
  static constexpr bool kTwosComplement = false, kHasPairs = false;
  static constexpr float kMinScale = kSigned ? 0x1p-105f : 0x1p-104f;

  ZERO8_DEVICE static const DynamicMap& map_of(const CodecMaps& maps) {
    return kSigned ? maps.of_signed : maps.of_unsigned;
  }

  struct Decoder {
    const DynamicMap* map;
    Vec::F scale;

    ZERO8_DEVICE Decoder(const float* stored, float gain, const CodecMaps& maps)
        : map(&map_of(maps)), scale(Vec::mul(Vec::set(*stored), Vec::set(gain))) {}
    template <class AnyVec>
    ZERO8_DEVICE ZERO8_INLINE Vec::F operator()(AnyVec& vec, Vec::I code) const {
      return vec.mul(Vec::look_up(map->levels, code), scale);
    }
    struct Chunk {
      Vec::F four[4];

      template <bool kPairs>
      ZERO8_DEVICE ZERO8_INLINE void two(int k, Vec::F* x) const {
        static_assert(!kPairs);
        x[0] = four[k];
        x[1] = four[k + 1];
      }
    };
    ZERO8_DEVICE Chunk chunk(const uint8_t* codes) const {
      Chunk chunk;
      Vec::look_up_codes(map->levels, map->level_bytes, codes, chunk.four);
      for (Vec::F& x : chunk.four) x = Vec::mul(x, scale);
      return chunk;
    }
  };

  using Range = Extremes<kSigned>;

  struct Encoder {
    static constexpr Left kLeft = kSigned ? Left::kClamp : Left::kUnlessZero;
    const DynamicMap* map = nullptr;
    float inverse = 0.0f;

    ZERO8_DEVICE Encoder() {}
    ZERO8_DEVICE Encoder(const Range& range, const CodecMaps& maps, const BlockValues&,
                         float* stored)
        : map(&map_of(maps)) {
      *stored = range.scale(kMinScale);
      inverse = *stored == 0.0f ? 0.0f : 1.0f / *stored;
    }
    ZERO8_DEVICE Vec::I operator()(Vec::F x, Vec::I) const {
      const Vec::F n = Vec::mul(x, Vec::set(inverse));
      Vec::I bits = kSigned ? magnitude_bits(n) : Vec::as_int(n);
      bits = Vec::maxu(bits, Vec::seti(map->smallest));
      Vec::I piece = Vec::scaled_upper<kPieceFactor, kPieceShift>(bits);
      piece = Vec::incremented(piece, Vec::above(bits, Vec::look_up8(map->joint, piece)));
      const Vec::F slope = Vec::look_up8(map->slope, piece);
      const Vec::F offset = Vec::look_up8(map->offset, piece);
      const Vec::I last = Vec::look_up8(map->last, piece);
      // The distance from 0 in entries, with 16 fractional bits of which the last few are wrong.
      const Vec::I distance = Vec::truncate(Vec::fma_far(Vec::as_float(bits), slope, offset));
      const Vec::Mask unsure = is_near_integer(distance);
      const Vec::I steps = Vec::minu(Vec::shr<16>(distance), last);
      Vec::I code = kSigned ? from_zero(steps, n) : steps;
      if (Vec::any(unsure)) {
        const Vec::I nearest = Vec::shr<16>(Vec::addi(distance, Vec::seti(1u << 15)));
        const Vec::I below = Vec::minu(Vec::subi(nearest, Vec::seti(1)), last);
        code = Vec::choose(unsure, compared(n, below), code);
      }
      return code;
    }

   private:
    // Within 2^-12.  The estimate is wrong by less: two roundings of up to 255 to 24 bits, those of
    // the tables, and 2^-21 of the distance near a joint.
    ZERO8_DEVICE static Vec::Mask is_near_integer(Vec::I distance) {
      const Vec::I shifted = Vec::addi(distance, Vec::seti(16));
      return Vec::equal(Vec::andi(shifted, Vec::seti(0xFFE0)), Vec::seti(0));
    }
    // In the direction of n; below 0 where there is no entry, as there is none for -1.
    ZERO8_DEVICE static Vec::I from_zero(Vec::I steps, Vec::F n) {
      return Vec::addi(Vec::seti(kZeroCode), Vec::signed_as(steps, n));
    }
    // The code of what lies `below` or one more steps from 0.
    ZERO8_DEVICE Vec::I compared(Vec::F n, Vec::I below) const {
      Vec::I low = below;
      if constexpr (kSigned) {
        const Vec::Mask negative = Vec::above(Vec::seti(0), Vec::as_int(n));
        low = Vec::maxs(from_zero(Vec::incremented(below, negative), n), Vec::seti(0));
      }
      return Vec::incremented(low, Vec::not_below(n, Vec::look_up(map->thresholds, low)));
    }
  };
};

}  // namespace ZERO8_TARGET
}  // namespace zero8
