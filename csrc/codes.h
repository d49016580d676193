// SPDX-License-Identifier: Apache-2.0
// The 8-bit codes of the moments in terms of Vec: zero8/spec/codec.py, equation by equation.
//
// A code is a struct with four parts, so that the step can interleave them as it likes:
//
//   kScales, kZeroCode, kStoresRoot
//       How many floats each block stores, 1 to kMaxScales; the code of exact 0; whether the code
//       is of sqrt(v), and not of v or m.  The step squares decoded roots, and encodes roots.
//   Decoder(const float* stored, float gain, const DynamicMap&)
//       Of one block, by its kScales floats.  `decode(Vec::I codes)` returns a Vec::F: the values
//       times `gain`.  `decode.chunk(const uint8_t*)` returns an object whose (int k) is the k-th
//       of the next four vectors, 0 <= k < 4; the Decoder and the codes must outlive it.
//   Range()
//       What the block's scales depend on: `add(Vec::F)` is called with every value of the block,
//       in any order, while values are made.  Zeros may be added, as beyond a tail, and on CUDA
//       each thread adds its own values: the Encoder reduces over the block.
//   Encoder(const Range&, const DynamicMap&, const BlockValues&, float* stored)
//       Makes the scales and writes kScales floats.  `encode(Vec::F)`, called with the values in
//       order as dithers count elements, returns a Vec::I of codes, to which `completed<kLeft>` is
//       still to be applied: on packed bytes that is cheaper.  Encoder() encodes nothing.
//
// Values are finite, 0 or normal numbers, below 2^126 in magnitude as limits on gradients see to
// it, and never negative in a second moment.
//
// What a code promises:
//   - Idempotence: the values of all codes and scales that it can make, decoded with gain 1, give
//     the same codes and scales.
//   - Zero means zero: kZeroCode decodes to exact 0 whatever the scales, a block of zeros has
//     scales of 0, and a second moment that is not 0 is never stored as 0.
//   - The same bits on every processor: scales are made of reductions over integers only, and of
//     single float operations.
#include <cstdint>

#include "dither.h"
#include "format.h"

namespace zero8 {
namespace ZERO8_TARGET {

constexpr uint32_t kOneBits = 0x3F800000;
constexpr uint32_t kSignBit = 0x80000000;
constexpr float kSaturation = 0x1p126f;
constexpr int kMaxScales = 2;  // of any code, per block

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

// (D1) for consecutive elements: r(i, t) = i * A + phase modulo 2^32.
struct Dither {
  Vec::I r;

  ZERO8_DEVICE Dither() : r(Vec::seti(0)) {}
  ZERO8_DEVICE Dither(uint32_t phase, uint32_t index)
      : r(Vec::ramp(index * kElementStep + phase, kElementStep)) {}
  ZERO8_DEVICE Vec::I next() {
    const Vec::I now = r;
    r = Vec::addi(r, Vec::seti(kElementStep * Vec::kLanes));
    return now;
  }
};

ZERO8_DEVICE inline Vec::I magnitude_bits(Vec::F x) {
  return Vec::andi(Vec::as_int(x), Vec::seti(~kSignBit));
}

// What the codes of a block depend on besides their range.
struct BlockValues {
  const float* x;         // up to a whole number of vectors, zeros at the end
  int count;              // of them
  int size;               // of the block, more than `count` where others hold the rest of it
  uint32_t phase, index;  // of the dither
  float settling;         // of (C2')
};

// What is left to do to a code: nothing; put in the sign of x where it is not 0; raise it to 1
// where x, never negative, is not 0.
enum class Left { kNothing, kSign, kRaise };

template <Left kLeft>
ZERO8_DEVICE inline Vec::I completed(Vec::I code, Vec::F x) {
  if constexpr (kLeft == Left::kSign) {
    const Vec::I sign = Vec::andi(Vec::shr<24>(Vec::as_int(x)), Vec::seti(128));
    return Vec::choose(Vec::equal(code, Vec::seti(0)), code, Vec::ori(code, sign));
  }
  if constexpr (kLeft == Left::kRaise) {
    return Vec::maxu(code, Vec::minu(Vec::as_int(x), Vec::seti(1)));
  }
  return code;
}

// Largest |x|, of values that are never negative if not kSigned.  Over bit patterns, so that
// neither order nor vector width matters.
template <bool kSigned>
struct Absmax {
  Vec::I largest;

  ZERO8_DEVICE Absmax() : largest(Vec::seti(0)) {}

  ZERO8_DEVICE ZERO8_INLINE void add(Vec::F x) {
    largest = Vec::maxu(largest, kSigned ? magnitude_bits(x) : Vec::as_int(x));
  }
  ZERO8_DEVICE float value() const {
    const float x = float_of(Vec::reduce_maxu(largest));
    return x < kSaturation ? x : kSaturation;
  }
};

// Four vectors of codes that are decoded one by one.
template <class Decoder>
struct ChunkOf {
  const Decoder& decode;
  const uint8_t* codes;

  ZERO8_DEVICE Vec::F operator()(int k) const {
    return decode(Vec::load8(codes + k * Vec::kLanes));
  }
};

// The sign of a first moment is the top bit of its code, but 0 has none.
ZERO8_DEVICE inline Vec::F signed_as(Vec::I code, Vec::F magnitude) {
  const Vec::I sign = Vec::andi(Vec::shl<24>(code), Vec::seti(kSignBit));
  return Vec::as_float(Vec::ori(Vec::as_int(magnitude), sign));
}

// (C2') before the shift: to nearest, but down where that would undo the decay.
ZERO8_DEVICE inline Vec::I settled_offset(Vec::F x, Vec::F inverse, Vec::F settled_inverse,
                                          Vec::I half) {
  const Vec::F magnitude = Vec::as_float(magnitude_bits(x));
  const Vec::I y = Vec::as_int(Vec::fma_far(magnitude, inverse, Vec::set(1.0f)));
  const Vec::I settled = Vec::as_int(Vec::fma_far(magnitude, settled_inverse, Vec::set(1.0f)));
  return Vec::addi(Vec::minu(Vec::addi(y, half), settled), Vec::seti(0u - kOneBits));
}

// (C2)-(C4)
template <bool kSigned, int kOctaves, int kMantissaBits, bool kSquareRoot>
struct Companded {
  static constexpr bool kStoresRoot = kSquareRoot;
  static constexpr int kScales = 1;
  static constexpr uint32_t kZeroCode = 0;
  static constexpr int kShift = 23 - kMantissaBits;
  static constexpr uint32_t kHalf = 1u << (kShift - 1);  // half a cell
  static constexpr uint32_t kMaxCode = kOctaves * (1u << kMantissaBits) - 1u;
  // (C3) of the largest code: 2^(octaves-1) * (2 - 2^-mantissa_bits) - 1.
  static constexpr float kTop =
      static_cast<float>(1 << kOctaves) -
      static_cast<float>(1 << (kOctaves - 1)) / static_cast<float>(1 << kMantissaBits) - 1.0f;
  static constexpr float kMinScale =
      (kSquareRoot ? 0x1p-63f : 0x1p-126f) * static_cast<float>(1 << kMantissaBits);

  struct Decoder {
    Vec::F scale, minus_scale;

    ZERO8_DEVICE Decoder(const float* stored, float gain, const DynamicMap&)
        : scale(Vec::mul(Vec::set(*stored), Vec::set(gain))),
          minus_scale(Vec::mul(Vec::set(*stored), Vec::set(-gain))) {}
    ZERO8_DEVICE Vec::F operator()(Vec::I code) const {
      const Vec::I magnitude = kSigned ? Vec::andi(code, Vec::seti(kMaxCode)) : code;
      const Vec::I y = Vec::addi(Vec::shl<kShift>(magnitude), Vec::seti(kOneBits));
      // (y - 1) * scale: the level y - 1 is exact, so this rounds once, as the product does.
      const Vec::F x = Vec::fma(Vec::as_float(y), scale, minus_scale);
      return kSigned ? signed_as(code, x) : x;
    }
    ZERO8_DEVICE ChunkOf<Decoder> chunk(const uint8_t* codes) const { return {*this, codes}; }
  };

  using Range = Absmax<kSigned>;

  struct Encoder {
    static constexpr Left kLeft = kSigned ? Left::kSign : Left::kRaise;
    Vec::F inverse, settled_inverse;
    Dither dither;

    ZERO8_DEVICE Encoder() : inverse(Vec::set(0.0f)), settled_inverse(Vec::set(0.0f)) {}
    ZERO8_DEVICE Encoder(const Range& range, const DynamicMap&, const BlockValues& block,
                         float* stored)
        : dither(block.phase, block.index) {
      const float absmax = range.value();
      float scale = absmax / kTop;
      if (scale < kMinScale) scale = kMinScale;
      *stored = absmax == 0.0f ? 0.0f : scale;
      const float reciprocal = absmax == 0.0f ? 0.0f : 1.0f / scale;
      inverse = Vec::set(reciprocal);
      settled_inverse = Vec::set(reciprocal * block.settling);
    }
    // No code can exceed the largest: a moment that a step makes of finite gradients is less than
    // kSaturation, so the block's largest element comes within 5 ulps of kMaxCode, too few to
    // carry.
    ZERO8_DEVICE Vec::I operator()(Vec::F x) {
      if constexpr (kSigned) {
        return Vec::shr<kShift>(settled_offset(x, inverse, settled_inverse, Vec::seti(kHalf)));
      } else {
        // The threshold is r's upper bits with the last four replaced by 8.
        const Vec::I y = Vec::as_int(Vec::fma_far(x, inverse, Vec::set(1.0f)));
        const Vec::I r = Vec::andi(Vec::shr<32 - kShift>(dither.next()), Vec::seti(~15u));
        const Vec::I offset = Vec::addi(y, Vec::seti(8u - kOneBits));
        return Vec::shr<kShift>(Vec::addi(offset, r));
      }
    }
  };
};

// (C9)
struct Adaptive {
  static constexpr bool kStoresRoot = false;
  static constexpr int kScales = 1;
  static constexpr uint32_t kZeroCode = 0;
  using Narrow = Companded<true, 4, 5, false>;
  using Wide = Companded<true, 8, 4, false>;
  static constexpr float kJoint = 0.75f;  // (C3) of code 24
  static constexpr float kMinScale = 0x1p-100f;

  struct Decoder {
    Vec::F scale, minus_scale;
    Vec::I shift;

    ZERO8_DEVICE Decoder(const float* stored, float gain, const DynamicMap&) {
      const Vec::F positive = Vec::set(float_of(bits_of(*stored) & ~kSignBit));
      scale = Vec::mul(positive, Vec::set(gain));
      minus_scale = Vec::mul(positive, Vec::set(-gain));
      shift = Vec::seti(*stored < 0.0f ? Wide::kShift : Narrow::kShift);
    }
    ZERO8_DEVICE Vec::F operator()(Vec::I code) const {
      const Vec::I magnitude = Vec::andi(code, Vec::seti(127));
      const Vec::I y = Vec::addi(Vec::shlv(magnitude, shift), Vec::seti(kOneBits));
      return signed_as(code, Vec::fma(Vec::as_float(y), scale, minus_scale));
    }
    ZERO8_DEVICE ChunkOf<Decoder> chunk(const uint8_t* codes) const { return {*this, codes}; }
  };

  using Range = Absmax<true>;

  struct Encoder {
    static constexpr Left kLeft = Left::kSign;
    Vec::F inverse, settled_inverse;
    Vec::I shift, half;

    ZERO8_DEVICE Encoder()
        : inverse(Vec::set(0.0f)), settled_inverse(inverse), shift(Vec::seti(0)), half(shift) {}
    ZERO8_DEVICE Encoder(const Range& range, const DynamicMap& map, const BlockValues& block,
                         float* stored) {
      const Narrow::Encoder narrow(range, map, block, stored);
      const bool is_wide =
          *stored >= kMinScale && 16 * large(block, kJoint * *stored) < 11 * block.size;
      if (is_wide) {
        const Wide::Encoder wide(range, map, block, stored);
        *stored = -*stored;
        inverse = wide.inverse;
        settled_inverse = wide.settled_inverse;
      } else {
        inverse = narrow.inverse;
        settled_inverse = narrow.settled_inverse;
      }
      shift = Vec::seti(is_wide ? Wide::kShift : Narrow::kShift);
      half = Vec::seti(is_wide ? Wide::kHalf : Narrow::kHalf);
    }
    ZERO8_DEVICE Vec::I operator()(Vec::F x) const {
      return Vec::shrv(settled_offset(x, inverse, settled_inverse, half), shift);
    }

   private:
    // How many |x| of the block are at least `joint`, which is positive.
    ZERO8_DEVICE static int large(const BlockValues& block, float joint) {
      int count = 0;
      for (int i = 0; i < block.count; i += Vec::kLanes) {
        const Vec::I magnitude = magnitude_bits(Vec::load(block.x + i));
        count += Vec::count(Vec::above(magnitude, Vec::seti(bits_of(joint) - 1u)));
      }
      return Vec::reduce_sum(count);
    }
  };
};

// (C7), (C8)
struct LogRoot {
  static constexpr bool kStoresRoot = true;
  static constexpr int kScales = 2;
  static constexpr uint32_t kZeroCode = 255;
  static constexpr int32_t kMinSpan = 1 << 23, kMaxSpan = 14 << 23;
  static constexpr uint32_t kMinBits = (127 - 63) << 23;

  struct Decoder {
    Vec::I high;
    Vec::F step, gain;

    ZERO8_DEVICE Decoder(const float* stored, float factor, const DynamicMap&)
        : high(Vec::seti(bits_of(stored[0]))), step(Vec::set(stored[1])), gain(Vec::set(factor)) {}
    ZERO8_DEVICE Vec::F operator()(Vec::I code) const {
      const Vec::I offset = Vec::round(Vec::mul_far(Vec::to_float(code), step));
      const Vec::I bits = Vec::maxs(Vec::subi(high, offset), Vec::seti(kMinBits));
      const Vec::I root = Vec::choose(Vec::equal(code, Vec::seti(kZeroCode)), Vec::seti(0), bits);
      // The root is 0 or at least 2^-63, and so is a gain, the root of a normal number.
      return Vec::mul_far(Vec::as_float(root), gain);
    }
    ZERO8_DEVICE ChunkOf<Decoder> chunk(const uint8_t* codes) const { return {*this, codes}; }
  };

  // Roots are not negative, so their patterns order like the values; minus 1, zero is the largest.
  struct Range {
    Vec::I high, below_low;

    ZERO8_DEVICE Range() : high(Vec::seti(0)), below_low(Vec::seti(~0u)) {}

    ZERO8_DEVICE ZERO8_INLINE void add(Vec::F x) {
      high = Vec::maxu(high, Vec::as_int(x));
      below_low = Vec::minu(below_low, Vec::addi(Vec::as_int(x), Vec::seti(~0u)));
    }
  };

  struct Encoder {
    static constexpr Left kLeft = Left::kNothing;
    Vec::I high, last;
    Vec::F inverse;
    Dither dither;

    ZERO8_DEVICE Encoder() : high(Vec::seti(0)), last(Vec::seti(0)), inverse(Vec::set(0.0f)) {}
    ZERO8_DEVICE Encoder(const Range& range, const DynamicMap&, const BlockValues& block,
                         float* stored)
        : dither(block.phase, block.index) {
      const uint32_t top = Vec::reduce_maxu(range.high);
      const uint32_t low = Vec::reduce_minu(range.below_low) + 1u;
      int32_t span = static_cast<int32_t>(top - low);
      span = span < kMinSpan ? kMinSpan : span > kMaxSpan ? kMaxSpan : span;
      const float step = static_cast<float>(span) / 254.0f;
      stored[0] = float_of(top);
      stored[1] = top == 0 ? 0.0f : step;
      high = Vec::seti(top);
      inverse = Vec::set(65536.0f / step);
      // The last code that decodes to 2^-63 or more.
      int32_t room = static_cast<int32_t>(top - kMinBits);
      room = room < 0 ? 0 : room > kMaxSpan ? kMaxSpan : room;
      const float position = static_cast<float>(room) * (65536.0f / step);
      const uint32_t fits = (static_cast<uint32_t>(position) + 8u) >> 16;
      last = Vec::seti(fits < 254u ? fits : 254u);
    }
    ZERO8_DEVICE Vec::I operator()(Vec::F x) {
      const Vec::F distance = Vec::to_float(Vec::subi(high, Vec::as_int(x)));
      const Vec::I position = Vec::truncate(Vec::mul_far(distance, inverse));
      // The threshold is r's upper bits with the last five replaced by 16.
      Vec::I threshold = Vec::shr<16>(dither.next());
      threshold = Vec::ori(Vec::andi(threshold, Vec::seti(~31u)), Vec::seti(16));
      const Vec::I rounded = Vec::shr<16>(Vec::addi(position, threshold));
      const Vec::I code = Vec::minu(rounded, last);
      return Vec::choose(Vec::positive(x), code, Vec::seti(kZeroCode));
    }
  };
};

// (C5), (C6)
template <bool kSigned>
struct Dynamic {
  static constexpr bool kStoresRoot = false;
  static constexpr int kScales = 1;
  static constexpr uint32_t kZeroCode = kSigned ? 127 : 0;
  static constexpr float kMinScale = kSigned ? 0x1p-105f : 0x1p-104f;

  struct Decoder {
    const DynamicMap* map;
    Vec::F scale;

    struct Chunk {
      Vec::F x[4];

      ZERO8_DEVICE Vec::F operator()(int k) const { return x[k]; }
    };

    ZERO8_DEVICE Decoder(const float* stored, float gain, const DynamicMap& dynamic_map)
        : map(&dynamic_map), scale(Vec::mul(Vec::set(*stored), Vec::set(gain))) {}
    ZERO8_DEVICE Vec::F operator()(Vec::I code) const {
      return Vec::mul(Vec::look_up(map->levels, code), scale);
    }
    ZERO8_DEVICE Chunk chunk(const uint8_t* codes) const {
      Chunk four;
      Vec::look_up_codes(map->levels, map->level_bytes, codes, four.x);
      for (Vec::F& x : four.x) x = Vec::mul(x, scale);
      return four;
    }
  };

  struct Range {
    Absmax<kSigned> absmax;
    Vec::I largest;  // of the elements that are not negative

    ZERO8_DEVICE Range() : largest(Vec::seti(0)) {}

    ZERO8_DEVICE ZERO8_INLINE void add(Vec::F x) {
      absmax.add(x);
      if constexpr (kSigned) largest = Vec::maxs(largest, Vec::as_int(x));
    }
  };

  struct Encoder {
    static constexpr Left kLeft = kSigned ? Left::kNothing : Left::kRaise;
    const DynamicMap* map;
    Vec::F inverse;

    ZERO8_DEVICE Encoder() : map(nullptr), inverse(Vec::set(0.0f)) {}
    ZERO8_DEVICE Encoder(const Range& range, const DynamicMap& dynamic_map, const BlockValues&,
                         float* stored)
        : map(&dynamic_map) {
      const float absmax = range.absmax.value();
      const bool positive = !kSigned || float_of(Vec::reduce_maxu(range.largest)) >= absmax;
      float scale = positive ? absmax : -absmax;
      if (absmax < kMinScale) scale = kMinScale;
      *stored = absmax == 0.0f ? 0.0f : scale;
      inverse = Vec::set(absmax == 0.0f ? 0.0f : 1.0f / scale);
    }
    ZERO8_DEVICE Vec::I operator()(Vec::F x) const {
      const Vec::F n = Vec::mul(x, inverse);
      Vec::I bits = kSigned ? magnitude_bits(n) : Vec::as_int(n);
      bits = Vec::maxu(Vec::minu(bits, Vec::seti(kOneBits)), Vec::seti(kOneBits - (31u << 23)));
      const Vec::I octave = Vec::shr<23>(bits);  // modulo 32
      Vec::I piece = Vec::look_up32(map->octave_piece, octave);
      const Vec::Mask next = Vec::above(bits, Vec::look_up32(map->octave_joint, octave));
      piece = Vec::choose(next, Vec::addi(piece, Vec::seti(1)), piece);
      const Vec::F slope = Vec::look_up16(map->slope, piece);
      const Vec::F offset = Vec::look_up16(map->offset, piece);
      const Vec::I last = Vec::look_up16(map->last, piece);
      // The distance from 0 in entries, with 16 fractional bits of which the last few are wrong.
      const Vec::I distance = Vec::truncate(Vec::fma_far(Vec::as_float(bits), slope, offset));
      const Vec::Mask unsure = is_near_integer(distance);
      const Vec::Mask negative = Vec::above(Vec::seti(0), Vec::as_int(n));
      const Vec::I steps = Vec::minu(Vec::shr<16>(distance), last);
      Vec::I code = kSigned ? from_zero(steps, negative) : steps;
      if (Vec::any(unsure)) {
        const Vec::I nearest = Vec::shr<16>(Vec::addi(distance, Vec::seti(1u << 15)));
        const Vec::I below = Vec::minu(Vec::subi(nearest, Vec::seti(1)), last);
        code = Vec::choose(unsure, compared(n, below, negative), code);
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
    ZERO8_DEVICE static Vec::I from_zero(Vec::I steps, Vec::Mask negative) {
      const Vec::I zero = Vec::seti(kZeroCode);
      const Vec::I down = Vec::maxs(Vec::subi(zero, steps), Vec::seti(0));
      return Vec::choose(negative, down, Vec::addi(zero, steps));
    }
    // The code of what lies `below` or one more steps from 0.
    ZERO8_DEVICE Vec::I compared(Vec::F n, Vec::I below, Vec::Mask negative) const {
      Vec::I low = below;
      if constexpr (kSigned) {
        const Vec::I farther = Vec::addi(below, Vec::seti(1));
        low = Vec::choose(negative, from_zero(farther, negative), from_zero(below, negative));
      }
      const Vec::Mask up = Vec::not_below(n, Vec::look_up(map->thresholds, low));
      return Vec::choose(up, Vec::addi(low, Vec::seti(1)), low);
    }
  };
};

}  // namespace ZERO8_TARGET
}  // namespace zero8
