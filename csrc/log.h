// SPDX-License-Identifier: Apache-2.0
// The codes of `log` and `log6` in terms of Vec: zero8/spec/log.py, equation by equation.  codes.h
// says what a code consists of and promises.
//
// Included once per target, so in the target's namespace.
#include <cstdint>

namespace zero8::ZERO8_TARGET {

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
  static constexpr float kLeastSettling =
      static_cast<float>(1.0 + 2.0 / 3.0 / static_cast<double>(1 << kMantissaBits));

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
  static constexpr bool kTwosComplement = true;
  using Narrow = Octaves<4, kBits - 3>;
  using Wide = Octaves<8, kBits - 4>;
  static constexpr float kJoint = 0.75f;  // (C3) of `joint`
  static constexpr float kMinScale = 0x1p-100f;
  static constexpr int kSample = 32, kSampleOf = 128;

  struct Decoder {
    Vec::F scale;
    Vec::I shift;

    ZERO8_DEVICE Decoder(const float* stored, float gain, const CodecMaps&)
        : scale(Vec::mul(Vec::set(float_of(bits_of(*stored) & ~kSignBit)), Vec::set(gain))) {
      shift = Vec::seti((*stored < 0.0f ? Wide::kShift : Narrow::kShift) - (8 - kBits));
    }
    template <class AnyVec>
    ZERO8_DEVICE ZERO8_INLINE Vec::F operator()(AnyVec& vec, Vec::I code) const {
      const Vec::I magnitude = Vec::shlv(Vec::absi(code), shift);
      const Vec::F y = Vec::as_float(Vec::addi(magnitude, Vec::seti(kOneBits)));
      // (y - 1) * scale: the level y - 1 is exact, so this rounds once, as the product does.
      const Vec::F signed_scale = Vec::negated(scale, code);
      return vec.fms(y, signed_scale, signed_scale);
    }
  };

  struct Encoder {
    static constexpr Left kLeft = Left::kSign;
    float inverse = 0.0f, settled_inverse = 0.0f;
    uint32_t shift = 0, half = 0;
    bool is_dithered = false;

    ZERO8_DEVICE Encoder() {}
    ZERO8_DEVICE Encoder(const Range&, const CodecMaps&, const BlockValues& block, float* stored)
        : is_dithered(block.settling < Narrow::kLeastSettling) {
      const float absmax = block.absmax();
      const float narrow = Narrow::scale(absmax), wide = Wide::scale(absmax);
      const int samples = block.size / kSampleOf * kSample +
                          (block.size % kSampleOf < kSample ? block.size % kSampleOf : kSample);
      const bool are_small = 16 * large(block, kJoint * narrow) < 11 * samples;
      const bool is_wide = narrow >= kMinScale && are_small != block.takes_other_levels;
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
      const Vec::F magnitude = Vec::as_float(Vec::magnitude_bits(x));
      const Vec::I y = Vec::as_int(Vec::fma_far(magnitude, Vec::set(inverse), Vec::set(1.0f)));
      const Vec::I settled =
          Vec::as_int(Vec::fma_far(magnitude, Vec::set(settled_inverse), Vec::set(1.0f)));
      const Vec::I rounded = Vec::minu(Vec::addi(y, Vec::seti(half)), settled);
      return Vec::shrv(Vec::subi(rounded, Vec::seti(kOneBits)), Vec::seti(shift));
    }
    // (C2"), which as little exceeds the largest code: a cell has 2^shift units of the pattern, of
    // which the threshold takes all but 2^-15 at most.
    struct Dithered {
      static constexpr Left kLeft = Left::kSign;
      float inverse;
      uint32_t shift;

      ZERO8_DEVICE Vec::I operator()(Vec::F x, Vec::I threshold) const {
        const Vec::F magnitude = Vec::as_float(Vec::magnitude_bits(x));
        const Vec::I y = Vec::as_int(Vec::fma_far(magnitude, Vec::set(inverse), Vec::set(1.0f)));
        const Vec::I raised = Vec::addi(y, Vec::shlv(threshold, Vec::seti(shift - 16)));
        return Vec::shrv(Vec::subi(raised, Vec::seti(kOneBits)), Vec::seti(shift));
      }
    };
    ZERO8_DEVICE Dithered dithered() const { return {inverse, shift}; }

   private:
    // How many sampled |x| of the block are at least `joint`, which is positive.
    ZERO8_DEVICE static int large(const BlockValues& block, float joint) {
      int count = 0;
      const int first = block.place % kSampleOf;  // a multiple of what one thread holds
      for (int i = 0; i < block.count && first < kSample; i += kSampleOf) {
        for (int k = i; k < i + kSample && k < block.count; k += Vec::kLanes) {
          const Vec::I magnitude = Vec::magnitude_bits(Vec::load(block.x + k));
          count += Vec::count(Vec::above(magnitude, Vec::seti(bits_of(joint) - 1u)));
        }
      }
      return Vec::reduce_sum(count);
    }
  };

  // The threshold is q, with the last two bits replaced by 2.
  ZERO8_DEVICE static Dither dither(uint32_t q) { return Dither((q & ~3u) | 2u); }
};
template <int kCodeBits>
constexpr bool kHasTwoLevels<SignedLog<kCodeBits>> = true;

// Signed values in `log` and `log6` that live long: (C2")
template <int kCodeBits>
struct DitheredLog : SignedLog<kCodeBits> {
  static constexpr bool kIsDithered = true;
  static constexpr uint32_t kHalf = 0x8000;
  using Narrow = typename SignedLog<kCodeBits>::Narrow;

  struct Encoder {
    static constexpr Left kLeft = Left::kSign;
    float inverse = 0.0f;

    ZERO8_DEVICE Encoder() {}
    ZERO8_DEVICE Encoder(const Range&, const CodecMaps&, const BlockValues& block, float* stored) {
      const float absmax = block.absmax();
      const bool is_zero = absmax == 0.0f;
      const float scale = is_zero ? 0.0f : Narrow::scale(absmax);
      *stored = scale;
      inverse = is_zero ? 0.0f : 1.0f / scale;
    }
    // A cell has 2^kShift units of the pattern, 2^18 for 8 bits, of which the threshold takes 8 to
    // 2^18 - 8: no code can exceed the largest, as for SignedLog, and the block's largest element
    // has that one.
    ZERO8_DEVICE Vec::I operator()(Vec::F x, Vec::I threshold) const {
      const Vec::F magnitude = Vec::as_float(Vec::magnitude_bits(x));
      const Vec::I y = Vec::as_int(Vec::fma_far(magnitude, Vec::set(inverse), Vec::set(1.0f)));
      constexpr int kShift = Narrow::kShift;
      const Vec::I distance = Vec::subi(y, Vec::seti(kOneBits));
      return Vec::shr<kShift>(Vec::addi(Vec::shl<kShift - 16>(threshold), distance));
    }
  };
};

// Values that are never negative in `log` and `log6`: (C7), (C8)
template <int kCodeBits>
struct Log {
  static constexpr int kBits = kCodeBits;
  static constexpr bool kSigned = false, kIsDithered = true;
  static constexpr int kScales = 2;
  static constexpr uint32_t kZeroCode = 0, kRaised = 0, kLowered = 0;
  static constexpr bool kTwosComplement = false;
  static constexpr uint32_t kHalf = 0x43008000;  // see dither()
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
  };

  struct Encoder {
    static constexpr Left kLeft = Left::kClamp;
    uint32_t minus_middle = 0;
    float inverse = 0.0f;

    ZERO8_DEVICE Encoder() {}
    ZERO8_DEVICE Encoder(const Range& range, const CodecMaps&, const BlockValues& block,
                         float* stored) {
      const uint32_t high = block.largest;
      const uint32_t low = range.smallest();
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

using InLog = CodecOf<SignedLog<8>, DitheredLog<8>, Log<8>>;
using InLog6 = CodecOf<SignedLog<6>, DitheredLog<6>, Log<6>>;

}  // namespace zero8::ZERO8_TARGET
