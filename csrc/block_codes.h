// SPDX-License-Identifier: Apache-2.0
// What the CPU's step asks of a codec: two functions, which make a block of codes floats and floats
// codes.  They are compiled once per code, whatever the algorithm and the dtypes of a step.
//
// Included once per target, so in the target's namespace.
#include <cstdint>

namespace zero8::ZERO8_TARGET {

// Makes floats of moment k of a block, times `gain`, with zeros up to a whole vector.  Returns
// whether its scales are finite: see has_finite_scales.
template <class Code>
bool decode_block(const Segment& seg, int k, const Block& b, float gain, const CodecMaps& maps,
                  float* x) {
  const Moment& moment = seg.moments[k];
  const float* const scales = moment.scales + b.local * Code::kScales;
  const uint8_t* codes = static_cast<const uint8_t*>(moment.values) + b.begin;
  alignas(64) uint8_t bytes[kUnitMargin + kMaxBlockSize + kUnitMargin];
  if constexpr (Code::kBits == 8) {
    for (int i = 0; i < b.count; i += kLineBytes) Vec::prefetch(codes + i + kPrefetchDistance);
  } else {
    Units<Code>::expand_block(seg, b, moment.values, bytes + kUnitMargin);
    codes = bytes + kUnitMargin;
  }
  const typename Code::Decoder decode(scales, gain, maps);
  quickly(x, [&](auto& vec) ZERO8_INLINE {
    for_vectors(0, b.count, [&](int i, auto lanes) ZERO8_INLINE {
      Vec::store(x + i, decode(vec, load_codes<Code>(codes + i, lanes)));
    });
  });
  return has_finite_scales<Code>(scales);
}

// Writes codes and scales of the new values of moment k, whose range is `range`.
template <class Code>
void encode_block(const Segment& seg, int k, const Block& b, const BlockValues& values,
                  const CodecMaps& maps, const Range& range) {
  const Moment& moment = seg.moments[k];
  const typename Code::Encoder of_block(range, maps, values,
                                        moment.scales + b.local * Code::kScales);
  uint8_t* codes = static_cast<uint8_t*>(moment.values) + b.begin;
  alignas(64) uint8_t bytes[kMaxBlockSize + kUnitMargin];
  if constexpr (Code::kBits != 8) codes = bytes;
  const auto encode_with = [&](const auto& encode, auto dither) ZERO8_INLINE {
    dither.start();
    int i = 0;
    for (; i + kChunk <= b.count; i += kChunk) {
      Vec::I threshold[4];
      for (int n = 0; n < 4; ++n) threshold[n] = dither.next();
      encode_four(encode, values.x + i, threshold, codes + i);
    }
    for_vectors(i, b.count, [&](int n, auto lanes) ZERO8_INLINE {
      store8(codes + n, encode_one(encode, values.x + n, dither.next()), lanes);
    });
  };
  if constexpr (Code::kIsDithered) {
    if (values.settling == kNoStep) {
      encode_with(of_block, Constant<Code::kHalf>());
    } else {
      encode_with(of_block, Code::dither(Thresholds(seg, b, moment.phase).q));
    }
  } else {
    with_dither<Code>(of_block, Thresholds(seg, b, moment.phase).q, encode_with);
  }
  if constexpr (Code::kBits != 8) Units<Code>::pack_block(seg, b, codes, moment.values);
}

// The functions of one code, the scales of a block, and whether BlockValues::takes_other_levels
// makes a difference.
struct BlockCode {
  bool (*decode)(const Segment&, int k, const Block&, float gain, const CodecMaps&, float* x);
  void (*encode)(const Segment&, int k, const Block&, const BlockValues&, const CodecMaps&,
                 const Range&);
  int num_scales;
  bool has_other_levels;
};
template <class Code>
constexpr BlockCode kBlockCode = {decode_block<Code>, encode_block<Code>, Code::kScales,
                                  kHasTwoLevels<Code>};

// That of moment k of an algorithm in a codec other than kFloat32.
template <class Algorithm>
BlockCode block_code(int32_t codec, int k) {
  BlockCode found{};
  for_codec(codec, [&](auto in) {
    using In = decltype(in);
    found = !is_signed<Algorithm>(k)    ? kBlockCode<typename In::template Code<false, true>>
            : is_dithered<Algorithm>(k) ? kBlockCode<typename In::template Code<true, true>>
                                        : kBlockCode<typename In::template Code<true, false>>;
  });
  return found;
}

}  // namespace zero8::ZERO8_TARGET
