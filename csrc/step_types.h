// SPDX-License-Identifier: Apache-2.0
// The step of any segment: the loops of step_blocks.h and step_log.h, chosen by the codec of its
// moments and the types of its parameter and gradient, with INT8 weights made floats before and
// rounded after.
//
// Included once per target, as step_blocks.h is.
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "step_blocks.h"
// In terms of what that includes:
#include "convert.h"
#include "int8_rows.h"
#include "step_log.h"

namespace zero8::ZERO8_TARGET {

template <class Algorithm, class P, class G>
int64_t step_of(const Segment& seg, const StepScalars& s, const CodecMaps& maps, int64_t begin,
                int64_t end) {
  if (seg.moments[0].codec == kLog) return step_log<Algorithm, P, G>(seg, s, maps, begin, end);
  return step_floats<Algorithm, P, G>(seg, s, maps, begin, end);
}

template <class Algorithm, class P>
int64_t step_of_param(const Segment& seg, const StepScalars& s, const CodecMaps& maps,
                      int64_t begin, int64_t end) {
  if (seg.grad_dtype == kFP32) return step_of<Algorithm, P, float>(seg, s, maps, begin, end);
  return step_of<Algorithm, P, uint16_t>(seg, s, maps, begin, end);
}

template <class Algorithm>
int64_t step_of_float32(const Segment& seg, const StepScalars& s, const CodecMaps& maps,
                        int64_t begin, int64_t end) {
  if (seg.grad_dtype == kFP16) return step_of<Algorithm, Float32, Half>(seg, s, maps, begin, end);
  return step_of_param<Algorithm, Float32>(seg, s, maps, begin, end);
}

// Blocks that are whole rows of INT8 weights, which are floats in `wide` meanwhile.
template <class Algorithm>
int64_t step_of_int8(const Segment& seg, const StepScalars& s, const CodecMaps& maps, int64_t begin,
                     int64_t end, float* wide) {
  const Rows rows(seg, begin, end);
  rows.decode(wide);
  // Without the count, to which other threads may be adding.
  constexpr size_t kCount = offsetof(Segment, nonfinite_blocks);
  constexpr size_t kRest = kCount + sizeof seg.nonfinite_blocks;
  Segment in_floats{};
  std::memcpy(&in_floats, &seg, kCount);
  std::memcpy(reinterpret_cast<char*>(&in_floats) + kRest,
              reinterpret_cast<const char*>(&seg) + kRest, sizeof seg - kRest);
  // Where the segment's first element would be: by numbers, as no array begins there.
  in_floats.param = reinterpret_cast<void*>(reinterpret_cast<uintptr_t>(wide) -
                                            static_cast<uintptr_t>(rows.begin()) * sizeof(float));
  const int64_t skipped = step_of_float32<Algorithm>(in_floats, s, maps, begin, end);
  rows.encode(wide);
  return skipped;
}

template <class Algorithm>
int64_t step_blocks(const Segment& seg, const StepScalars& s, const CodecMaps& maps, int64_t begin,
                    int64_t end, float* wide) {
  if (seg.param_dtype == kINT8) return step_of_int8<Algorithm>(seg, s, maps, begin, end, wide);
  if (seg.param_dtype == kFP32) return step_of_float32<Algorithm>(seg, s, maps, begin, end);
  if (seg.correction) return step_of_param<Algorithm, CorrectedBFloat16>(seg, s, maps, begin, end);
  return step_of_param<Algorithm, BFloat16>(seg, s, maps, begin, end);
}

// Copies elements begin .. end - 1 of a segment's parameter: the nearest to floats, or bfloat16 as
// it is.
inline void copy_params(const Segment& seg, int64_t begin, int64_t end) {
  uint16_t* const copy = static_cast<uint16_t*>(seg.copy) + begin;
  const int64_t count = end - begin;
  if (seg.param_dtype == kBF16) {
    std::memcpy(copy, static_cast<const uint16_t*>(seg.param) + begin, count * sizeof *copy);
    return;
  }
  const float* const p = static_cast<const float*>(seg.param) + begin;
  const bool is_half = seg.copy_dtype == kFP16;
  for_vectors(0, static_cast<int>(count), [&](int i, auto lanes) ZERO8_INLINE {
    const Vec::F x = load(p + i, lanes);
    store16(copy + i, is_half ? nearest_half(x) : nearest_bfloat16(x), lanes);
  });
}

}  // namespace zero8::ZERO8_TARGET

// Defines the target's steps of isa.h.
#define ZERO8_STEP_BLOCKS(target, algorithm) &target::step_blocks<target::algorithm>,
#define ZERO8_CONVERT(target, what, kind) &target::what##_blocks<target::OneMoment<zero8::kind>>,
#define ZERO8_DEFINE_STEPS(target)                                                            \
  const zero8::Steps zero8::ZERO8_STEPS(target) = {                                           \
      {nullptr,                                                                               \
       ZERO8_ALGORITHMS(ZERO8_STEP_BLOCKS, target) ZERO8_CONVERSIONS(ZERO8_CONVERT, target)}, \
      &target::copy_params,                                                                   \
  };
