// SPDX-License-Identifier: Apache-2.0
// The codes of `dynamic` in terms of Vec: zero8/spec/dynamic.py, equation by equation.  codes.h
// says what a code consists of and promises.
//
// Included once per target, so in the target's namespace.
#include <cstdint>

namespace zero8::ZERO8_TARGET {

// (C5), (C6)
template <bool kIsSigned>
struct Dynamic {
  static constexpr int kBits = 8;
  static constexpr bool kSigned = kIsSigned, kIsDithered = false;
  static constexpr int kScales = 1;
  static constexpr uint32_t kZeroCode = kSigned ? 127 : 0;
  static constexpr bool kTwosComplement = false;
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
      // Not a look up of the level, which takes twice as long.
      const Vec::I steps = kSigned ? Vec::subi(code, Vec::seti(kZeroCode)) : code;
      const Vec::F place =
          Vec::to_float(kSigned ? Vec::absi(steps) : Vec::addi(steps, Vec::seti(1)));
      const Vec::I decade = Vec::shr<23>(Vec::as_int(place));
      const Vec::F entry =
          Vec::fma_far(Vec::look_up8(map->gap, decade), place, Vec::look_up8(map->origin, decade));
      const Vec::F level = Vec::as_float(Vec::unless_zero(Vec::as_int(entry), steps));
      return vec.mul(level, kSigned ? Vec::negated(scale, steps) : scale);
    }
  };

  struct Encoder {
    static constexpr Left kLeft = Left::kClamp;
    const DynamicMap* map;
    float inverse;

    ZERO8_DEVICE Encoder(const Range& range, const CodecMaps& maps, const BlockValues& block,
                         float* stored)
        : map(&map_of(maps)) {
      *stored = range.extreme(kSigned, block.absmax(), kMinScale);
      inverse = *stored == 0.0f ? 0.0f : 1.0f / *stored;
    }
    ZERO8_DEVICE Vec::I operator()(Vec::F x, Vec::I) const {
      // An n below 2^-126 may be 0 here as well: it has the code of the smallest level in any case.
      const Vec::F n = Vec::mul_far(x, Vec::set(inverse));
      Vec::I bits = kSigned ? Vec::magnitude_bits(n) : Vec::as_int(n);
      bits = Vec::maxu(bits, Vec::seti(map->smallest));
      Vec::I piece = Vec::shr<kPieceShift>(Vec::muli(Vec::shr<16>(bits), Vec::seti(kPieceFactor)));
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
      return kSigned ? code : Vec::unless_zero(code, Vec::as_int(x));
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

using InDynamic = CodecOf<Dynamic<true>, Dynamic<true>, Dynamic<false>>;

}  // namespace zero8::ZERO8_TARGET
