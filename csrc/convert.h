// SPDX-License-Identifier: Apache-2.0
// A moment made floats, and floats made a moment, as `dequantize` and `quantize` of
// zero8/spec/codec.py do without a step: for states that are loaded, saved, or looked at.
//
// The floats are the segment's parameter or gradient, in float32.  Included once per target, after
// step_blocks.h, so in the target's namespace.
#include <cstdint>
#include <cstring>

namespace zero8::ZERO8_TARGET {

template <Algorithm kKind>
struct OneMoment {
  static constexpr Algorithm kNumber = kKind;
};

// Moment 0 of a segment, block by block, in its codec.
struct Coded {
  const Segment& seg;
  const CodecMaps& maps;
  BlockCode code;

  template <class Kind>
  Coded(Kind, const Segment& segment, const CodecMaps& all_maps)
      : seg(segment), maps(all_maps), code(block_code<Kind>(segment.moments[0].codec, 0)) {}
  float* scales(const Block& b) const { return seg.moments[0].scales + b.local * code.num_scales; }

  // NaN where a scale is not finite.
  void decode(const Block& b, float* x) const {
    code.decode(seg, 0, b, 1.0f, maps, x);
    bool is_finite = true;
    for (int i = 0; i < code.num_scales; ++i) {
      is_finite &= (bits_of(scales(b)[i]) & ~kSignBit) < kInfinityBits;
    }
    for (int i = 0; i < b.count && !is_finite; ++i) x[i] = __builtin_nanf("");
  }
  void encode(const Block& b, const Range& range, float* x, bool takes_other_levels = false) const {
    code.encode(seg, 0, b, {range.largest(), x, b.count, 0, b.count, kNoStep, takes_other_levels},
                maps, range);
  }
  // Whether a block decodes to `x`.
  bool holds(const Block& b, const float* x) const {
    alignas(64) float decoded[kMaxBlockSize + Vec::kLanes];
    code.decode(seg, 0, b, 1.0f, maps, decoded);
    bool are_equal = true;
    for (int i = 0; i < b.count; ++i) are_equal &= decoded[i] == x[i];
    return are_equal;
  }
};

template <class Kind>
int64_t read_blocks(const Segment& seg, const StepScalars&, const CodecMaps& maps, int64_t begin,
                    int64_t end, float*) {
  const Coded moment(Kind(), seg, maps);
  alignas(64) float x[kMaxBlockSize + Vec::kLanes];
  BlockWalk walk(seg, begin);
  for (int64_t local = begin; local < end; ++local, walk.advance()) {
    const Block b = walk.block();
    moment.decode(b, x);
    std::memcpy(static_cast<float*>(seg.param) + b.begin, x, b.count * sizeof *x);
  }
  return 0;
}

constexpr uint32_t kNormalBits = 0x00800000;  // of the smallest normal number

// Copies values, 0 for subnormals, with zeros up to a whole vector.  Returns whether all are
// values that the moment can have.
template <bool kSigned>
bool copy_values(const float* values, int count, uint32_t largest, float* x) {
  bool are_valid = true;
  for (int i = 0; i < count; ++i) {
    const uint32_t bits = bits_of(values[i]), magnitude = bits & ~kSignBit;
    are_valid &= magnitude < kInfinityBits && (kSigned || bits <= kSignBit);
    const uint32_t kept = magnitude < largest ? magnitude : largest;
    x[i] = float_of(magnitude < kNormalBits ? 0u : kept | (bits & kSignBit));
  }
  for (int i = count; i < count + Vec::kLanes; ++i) x[i] = 0.0f;
  return are_valid;
}

// A block with a value that its moment cannot have gets scales of NaN: steps leave it as it is.
template <class Kind>
int64_t write_blocks(const Segment& seg, const StepScalars&, const CodecMaps& maps, int64_t begin,
                     int64_t end, float*) {
  constexpr bool kSigned = is_signed<Kind>(0);
  const Coded moment(Kind(), seg, maps);
  // `log` stores the pattern of an unsigned block's largest value, other scales saturate.
  const bool saturates = kSigned || moment.code.num_scales == 1;
  const uint32_t largest = saturates ? bits_of(kSaturation) : kInfinityBits;
  alignas(64) float x[kMaxBlockSize + Vec::kLanes];
  BlockWalk walk(seg, begin);
  for (int64_t local = begin; local < end; ++local, walk.advance()) {
    const Block b = walk.block();
    const float* const from = static_cast<const float*>(seg.grad) + b.begin;
    const bool are_valid = copy_values<kSigned>(from, b.count, largest, x);
    // Not 0, of which there is no scale.
    for (int i = 0; i < b.count && !are_valid; ++i) x[i] = 1.0f;
    Range range(kSigned);
    for_vectors(0, b.count,
                [&](int i, auto) ZERO8_INLINE { range.add(kSigned, Vec::load(x + i)); });
    moment.encode(b, range, x);
    if (moment.code.has_other_levels && !moment.holds(b, x)) {
      moment.encode(b, range, x, true);
      if (!moment.holds(b, x)) moment.encode(b, range, x);
    }
    for (int i = 0; i < moment.code.num_scales && !are_valid; ++i) {
      moment.scales(b)[i] = __builtin_nanf("");
    }
  }
  return 0;
}

}  // namespace zero8::ZERO8_TARGET
