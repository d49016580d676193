// SPDX-License-Identifier: Apache-2.0
// The codes of `fp8` in terms of Vec: zero8/spec/fp8.py, equation by equation.  codes.h says what a
// code consists of and promises.
//
// Included once per target, so in the target's namespace.
#include <cstdint>

namespace zero8::ZERO8_TARGET {

// E4M3: (C10), (C11)
template <bool kIsSigned>
struct Fp8 {
  static constexpr int kBits = 8;
  static constexpr bool kSigned = kIsSigned, kIsDithered = false;
  static constexpr int kScales = 1;
  static constexpr uint32_t kZeroCode = 0;
  static constexpr bool kTwosComplement = false;
  static constexpr float kTop = 448.0f;
  static constexpr float kMinScale = 0x1p-117f;
  // The place of a code in the pattern of a float, whose exponent has another bias.
  static constexpr int kShift = 20;
  static constexpr uint32_t kBias = (127 - 7) << 3;
  // The smallest normal code.  Those below count in the same unit as its octave.
  static constexpr uint32_t kFirstNormal = 8;
  static constexpr float kFirstLevel = 0x1p-6f;

  struct Decoder {
    Vec::F scale;

    ZERO8_DEVICE Decoder(const float* stored, float gain, const CodecMaps&)
        : scale(Vec::mul(Vec::set(*stored), Vec::set(gain))) {}
    template <class AnyVec>
    ZERO8_DEVICE ZERO8_INLINE Vec::F operator()(AnyVec& vec, Vec::I code) const {
      const Vec::I magnitude = kSigned ? Vec::andi(code, Vec::seti(127)) : code;
      const Vec::I pattern = Vec::shl<kShift>(Vec::addi(magnitude, Vec::seti(kBias)));
      const Vec::F normal = Vec::as_float(pattern);
      // Below the normal codes the level is less, and the difference to the first one counts twice.
      const Vec::F small = Vec::fma_far(normal, Vec::set(2.0f), Vec::set(-kFirstLevel));
      const Vec::F level = Vec::min(normal, small);
      return vec.mul(level, kSigned ? Vec::negated(scale, Vec::shl<24>(code)) : scale);
    }
  };

  struct Encoder {
    // A code with its sign is complete, and not negative.
    static constexpr Left kLeft = Left::kClamp;
    float inverse;

    ZERO8_DEVICE Encoder(const Range&, const CodecMaps&, const BlockValues& block, float* stored) {
      const float absmax = block.absmax();
      const float rounded = float_of((bits_of(absmax / kTop) + 8u) & ~15u);
      const float scale = rounded < kMinScale ? kMinScale : rounded;
      *stored = absmax == 0.0f ? 0.0f : scale;
      inverse = absmax == 0.0f ? 0.0f : 1.0f / scale;
    }
    // The sum with 2^20 octaves is rounded, to even in a tie, at the unit of the octave that n is
    // in: its last bits count these units.  No code can exceed the largest, as for SignedLog.
    ZERO8_DEVICE Vec::I operator()(Vec::F x, Vec::I) const {
      const Vec::I bits = Vec::magnitude_bits(Vec::mul_far(x, Vec::set(inverse)));
      const Vec::I octave = Vec::maxu(Vec::andi(bits, Vec::seti(kInfinityBits)),
                                      Vec::seti((kFirstNormal + kBias) << kShift));
      const Vec::I far = Vec::addi(octave, Vec::seti(kShift << 23));
      const Vec::F sum = Vec::fma_far(Vec::as_float(bits), Vec::set(1.0f), Vec::as_float(far));
      const Vec::I units = Vec::subi(Vec::as_int(sum), far);
      // The first octave's units are codes, and each one above has kFirstNormal more.
      const Vec::I below = Vec::subi(Vec::shr<kShift>(octave), Vec::seti(kFirstNormal + kBias));
      const Vec::I code = Vec::addi(units, below);
      if constexpr (!kSigned)
        return Vec::unless_zero(Vec::maxu(code, Vec::seti(1)), Vec::as_int(x));
      const Vec::I sign = Vec::andi(Vec::shr<24>(Vec::as_int(x)), Vec::seti(128));
      return Vec::ori(code, Vec::unless_zero(sign, code));
    }
  };
};

using InFp8 = CodecOf<Fp8<true>, Fp8<true>, Fp8<false>>;

}  // namespace zero8::ZERO8_TARGET
