// SPDX-License-Identifier: Apache-2.0
// INT8 weights with a scale per row, zero8/spec/int8_rows.py, as floats for a step and back.
//
// Included once per target, after params.h and chunks.h, so in the target's namespace.
#include <cstdint>
#include <cstring>

#include "format.h"

namespace zero8::ZERO8_TARGET {

constexpr float kLargestCode = 127.0f;

// (W2): the scale of a row whose largest magnitude is `limit`.
inline float new_row_scale(float before, float limit, int32_t scales_dtype) {
  if ((kLargestCode - 1.0f) * before <= limit && limit <= kLargestCode * before) return before;
  if (limit == 0.0f) return 0.0f;
  if (bits_of(limit) >= kInfinityBits) {
    return float_of(bits_of(limit) > kInfinityBits ? 0x7FC00000 : kInfinityBits);
  }
  const uint32_t dropped = scales_dtype == kFP32 ? 0xFF : 0xFFFF;
  const float raised = float_of((bits_of(limit / kLargestCode) + dropped) & ~dropped);
  return raised < 0x1p-126f ? 0x1p-126f : raised;
}

// The thresholds q of a row as t of (W3), vector by vector, in order.
template <Rounding kRounding>
class RowThresholds {
 public:
  // `first` are those of the row's first element.
  explicit RowThresholds(const Thresholds& first) : dither_(first.q) {
    if constexpr (kRounding == kDither) dither_.start();
    if constexpr (kRounding == kHash) r_ = Vec::ramp(first.r, kElementStep);
  }
  Vec::F next() {
    Vec::I q;
    if constexpr (kRounding == kDither) {
      q = dither_.next();
    } else {
      q = hashed(r_);
      r_ = Vec::addi(r_, Vec::seti(kElementStep * Vec::kLanes));
    }
    const Vec::F middle = Vec::fma_far(Vec::to_float(q), Vec::set(1.0f), Vec::set(0.5f));
    return Vec::mul_far(middle, Vec::set(0x1p-16f - 0x1p-32f));
  }

 private:
  Dither dither_;
  Vec::I r_;
};

// (W3) of p'/scale'.
template <Rounding kRounding>
ZERO8_INLINE inline Vec::I code_in_row(Vec::F x, RowThresholds<kRounding>& thresholds) {
  const Vec::F one = Vec::set(1.0f), largest = Vec::set(kLargestCode);
  if constexpr (kRounding != kNearest) x = Vec::fma_far(x, one, thresholds.next());
  x = Vec::min(Vec::max(x, Vec::set(-kLargestCode)), largest);
  if constexpr (kRounding == kNearest) {
    // The last bit of 1.5 * 2^23 is 1: whole numbers are added to its pattern.
    constexpr float kWhole = 0x1.8p23f;
    const Vec::F sum = Vec::fma_far(x, one, Vec::set(kWhole));
    return Vec::subi(Vec::as_int(sum), Vec::as_int(Vec::set(kWhole)));
  } else {
    const Vec::I towards_zero = Vec::truncate(x);
    const Vec::Mask is_floor = Vec::not_below(x, Vec::to_float(towards_zero));
    return Vec::incremented(Vec::subi(towards_zero, Vec::seti(1)), is_floor);
  }
}

// Blocks of a segment that are whole rows of INT8 weights.
class Rows {
 public:
  Rows(const Segment& seg, int64_t first_block, int64_t end_block)
      : seg_(seg), columns_(static_cast<int>(seg.own_row_length)) {
    const Block last = block_at(seg, end_block - 1);
    begin_ = block_at(seg, first_block).begin;
    end_ = last.begin + last.count;
  }
  // The segment's element that they begin with.
  int64_t begin() const { return begin_; }

  // (W1)
  void decode(float* p) const {
    for (int64_t at = begin_; at < end_; at += columns_, p += columns_) {
      const uint8_t* codes = codes_at(at);
      const Vec::F scale = Vec::set(scale_at(at));
      for_vectors(0, columns_, [&](int i, auto lanes) ZERO8_INLINE {
        store(p + i, Vec::mul_far(Vec::to_float(load8s(codes + i, lanes)), scale), lanes);
      });
    }
  }
  void encode(const float* p) const {
    switch (seg_.rounding) {
      case kNearest:
        return encode_by<kNearest>(p);
      case kDither:
        return encode_by<kDither>(p);
      default:
        return encode_by<kHash>(p);
    }
  }

 private:
  template <Rounding kRounding>
  void encode_by(const float* p) const {
    for (int64_t at = begin_; at < end_; at += columns_, p += columns_) {
      const float scale = new_row_scale(scale_at(at), largest_of_row(p), seg_.row_scales_dtype);
      set_scale_at(at, scale);
      uint8_t* codes = codes_at(at);
      if (scale == 0.0f || bits_of(scale) >= kInfinityBits) {
        std::memset(codes, 0, columns_);
        continue;
      }
      const Vec::F divisor = Vec::set(scale);
      RowThresholds<kRounding> thresholds({seg_, {at, 0, columns_, 0}, seg_.param_phase});
      for_vectors(0, columns_, [&](int i, auto lanes) ZERO8_INLINE {
        const Vec::F x = Vec::div(load(p + i, lanes), divisor);
        const Vec::I code = code_in_row(x, thresholds);
        store8(codes + i, Vec::andi(code, Vec::seti(255)), lanes);
      });
    }
  }
  float largest_of_row(const float* p) const {
    Vec::I largest = Vec::seti(0);
    int i = 0;
    for (; i + kChunk <= columns_; i += kChunk)
      largest = Vec::maxu(largest, largest_of_chunk(p + i));
    for_vectors(i, columns_, [&](int k, auto lanes) ZERO8_INLINE {
      largest = Vec::maxu(largest, Vec::magnitude_bits(load(p + k, lanes)));
    });
    return float_of(Vec::reduce_maxu(largest));
  }

  uint8_t* codes_at(int64_t element) const { return static_cast<uint8_t*>(seg_.param) + element; }
  float scale_at(int64_t element) const {
    const int64_t row = element / columns_;
    const uint32_t bits = seg_.row_scales_dtype == kFP32
                              ? static_cast<const uint32_t*>(seg_.row_scales)[row]
                              : uint32_t{static_cast<const uint16_t*>(seg_.row_scales)[row]} << 16;
    const bool is_subnormal = (bits & kInfinityBits) == 0;
    return float_of(is_subnormal ? bits & kSignBit : bits);
  }
  void set_scale_at(int64_t element, float scale) const {
    const int64_t row = element / columns_;
    if (seg_.row_scales_dtype == kFP32) {
      static_cast<uint32_t*>(seg_.row_scales)[row] = bits_of(scale);
    } else {
      static_cast<uint16_t*>(seg_.row_scales)[row] = static_cast<uint16_t>(bits_of(scale) >> 16);
    }
  }

  const Segment& seg_;
  int columns_;
  int64_t begin_, end_;
};

}  // namespace zero8::ZERO8_TARGET
