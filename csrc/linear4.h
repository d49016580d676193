// SPDX-License-Identifier: Apache-2.0
// The codes of `linear4` in terms of Vec: zero8/spec/linear4.py.  codes.h says what a code consists
// of and promises.
//
// Included once per target, so in the target's namespace.
#include <cstdint>

namespace zero8::ZERO8_TARGET {

// The nearest of 16 levels: (C5), (C6)
template <bool kIsSigned>
struct Linear4 {
  static constexpr int kBits = 4;
  static constexpr bool kSigned = kIsSigned, kIsDithered = false;
  static constexpr int kScales = 1;
  // Code c of a moment that is never negative is byte c + 1, so that 0 is left for what is beyond a
  // block's end: no level is 0.
  static constexpr uint32_t kZeroCode = 0, kRaised = kSigned ? 0 : 1;
  // The encoder gives places in the map, of which that of 0 has code 0, or bytes.
  static constexpr uint32_t kLowered = kSigned ? 7 : 1;
  static constexpr bool kTwosComplement = false;
  static constexpr float kMinScale = kSigned ? 0x1p-118f : 0x1p-122f;

  struct Decoder {
    const Linear4Map* map;
    Vec::F scale;

    ZERO8_DEVICE Decoder(const float* stored, float gain, const CodecMaps& maps)
        : map(&maps.of_linear4), scale(Vec::mul(Vec::set(*stored), Vec::set(gain))) {}
    template <class AnyVec>
    ZERO8_DEVICE ZERO8_INLINE Vec::F operator()(AnyVec& vec, Vec::I code) const {
      if constexpr (!kSigned) {
        return vec.mul(Vec::mul_far(Vec::to_float(code), Vec::set(0x1p-4f)), scale);
      }
      return vec.mul(Vec::look_up16(map->levels, code), scale);
    }
  };

  struct Encoder {
    static constexpr Left kLeft = Left::kClamp;
    const Linear4Map* map;
    float inverse;

    ZERO8_DEVICE Encoder(const Range& range, const CodecMaps& maps, const BlockValues& block,
                         float* stored)
        : map(&maps.of_linear4) {
      *stored = range.extreme(kSigned, block.absmax(), kMinScale);
      inverse = *stored == 0.0f ? 0.0f : 1.0f / *stored;
    }
    ZERO8_DEVICE Vec::I operator()(Vec::F x, Vec::I) const {
      // No number as small as 2^-126 is near a threshold.
      const Vec::F n = Vec::mul_far(x, Vec::set(inverse));
      if constexpr (!kSigned) {
        // 16 n + 1/2 is exact where it decides: its last bit is that of n, or a smaller one.
        const Vec::F sixteenths = Vec::fma_far(n, Vec::set(16.0f), Vec::set(0.5f));
        return Vec::maxs(Vec::truncate(sixteenths), Vec::seti(1));
      }
      const Vec::F middle = Vec::set(map->thresholds[0][0]);
      Vec::I code = Vec::incremented(Vec::seti(0), Vec::not_below(n, middle));
      for (int k = 1; k < 4; ++k) {
        const Vec::Mask is_upper = Vec::not_below(n, Vec::look_up8(map->thresholds[k], code));
        code = Vec::incremented(Vec::addi(code, code), is_upper);
      }
      return code;
    }
  };
};

using InLinear4 = CodecOf<Linear4<true>, Linear4<true>, Linear4<false>>;

}  // namespace zero8::ZERO8_TARGET
