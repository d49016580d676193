// SPDX-License-Identifier: Apache-2.0
// The code of v in `shared` in terms of Vec: zero8/spec/shared.py, equation (C12).  codes.h says
// what a code consists of.  Its codes are those of columns, made of whole tiles: tile_codes.h.
//
// Included once per target, so in the target's namespace.
#include <cstdint>

namespace zero8 {
namespace ZERO8_TARGET {

// Its Decoder takes levels, not codes: those of the columns, which all rows of a tile share.
struct Shared {
  static constexpr int kBits = 8;
  // The dither is that of columns, not of the elements of a block.
  static constexpr bool kSigned = false, kIsDithered = false;
  static constexpr int kScales = 1;
  static constexpr uint32_t kZeroCode = 0;
  static constexpr uint32_t kRaised = 0, kLowered = 0;
  static constexpr bool kTwosComplement = false, kHasPairs = false;
  static constexpr int kColumnsPerByte = 64;
  static constexpr int kCellBits = 19, kRowBits = 17;
  static constexpr int kRun = 256, kSumLanes = 16;
  static constexpr float kLimit = 0x1p112f, kMinRow = 0x1p-110f, kMaxRow = 0x1p111f;

  struct Decoder {
    Vec::F row;

    ZERO8_DEVICE Decoder(const float* stored, float gain, const CodecMaps&)
        : row(Vec::mul(Vec::set(*stored), Vec::set(gain))) {}
    template <class AnyVec>
    ZERO8_DEVICE ZERO8_INLINE Vec::F operator()(AnyVec& vec, Vec::F level) const {
      return vec.mul(level, row);
    }
    struct Chunk {
      const Decoder& decode;
      const float* levels;

      template <bool kPairs, class V>
      ZERO8_DEVICE ZERO8_INLINE void two(V& vec, int k, typename V::F* x) const {
        static_assert(!kPairs, "levels are in order");
        x[0] = decode(vec, V::load(levels + k * V::kLanes));
        x[1] = decode(vec, V::load(levels + (k + 1) * V::kLanes));
      }
    };
    ZERO8_DEVICE Chunk chunk(const float* levels) const { return {*this, levels}; }
  };

  using Range = Absmax<false>;

  // What a block keeps is made of its tile.
  struct Encoder {
    ZERO8_DEVICE Encoder() {}
    ZERO8_DEVICE Encoder(const Range&, const CodecMaps&, const BlockValues&, float*) {}
  };
};

}  // namespace ZERO8_TARGET
}  // namespace zero8
