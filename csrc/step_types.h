// SPDX-License-Identifier: Apache-2.0
// The step of any segment: the loops of step_blocks.h, chosen by the types of its parameter and
// gradient, with INT8 weights made floats before and rounded after.
//
// Included once per target, as step_blocks.h is.
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "step_blocks.h"
// In terms of what that includes:
#include "int8_rows.h"

namespace zero8 {
namespace ZERO8_TARGET {

template <class Algorithm, class Codec, class P, class G>
int64_t step_of(const Segment& seg, const StepScalars& s, const CodecMaps& maps, int64_t begin,
                int64_t end) {
  if constexpr (kIsQuantized<Codec>) {
    return step_quantized<Algorithm, Codec, P, G>(seg, s, maps, begin, end);
  } else {
    return step_plain<Algorithm, P, G>(seg, s, begin, end);
  }
}

template <class Algorithm, class Codec, class P>
int64_t step_of_param(const Segment& seg, const StepScalars& s, const CodecMaps& maps,
                      int64_t begin, int64_t end) {
  if (seg.grad_dtype == kFP32) return step_of<Algorithm, Codec, P, float>(seg, s, maps, begin, end);
  return step_of<Algorithm, Codec, P, uint16_t>(seg, s, maps, begin, end);
}

template <class Algorithm, class Codec, class P>
int64_t step_of_float32(const Segment& seg, const StepScalars& s, const CodecMaps& maps,
                        int64_t begin, int64_t end) {
  if (seg.grad_dtype == kFP16) return step_of<Algorithm, Codec, P, Half>(seg, s, maps, begin, end);
  return step_of_param<Algorithm, Codec, P>(seg, s, maps, begin, end);
}

// Blocks that are whole rows of INT8 weights, which are floats in `wide` meanwhile.
template <class Algorithm, class Codec>
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
  const int64_t skipped =
      step_of_float32<Algorithm, Codec, Float32>(in_floats, s, maps, begin, end);
  rows.encode(wide);
  return skipped;
}

template <class Algorithm, class Codec>
int64_t step_blocks(const Segment& seg, const StepScalars& s, const CodecMaps& maps, int64_t begin,
                    int64_t end, float* wide) {
  if (seg.param_dtype == kINT8) {
    return step_of_int8<Algorithm, Codec>(seg, s, maps, begin, end, wide);
  }
  if (seg.param_dtype == kFP32) {
    if (seg.copy) return step_of_float32<Algorithm, Codec, CopiedFloat32>(seg, s, maps, begin, end);
    return step_of_float32<Algorithm, Codec, Float32>(seg, s, maps, begin, end);
  }
  if (seg.correction) {
    return step_of_param<Algorithm, Codec, CorrectedBFloat16>(seg, s, maps, begin, end);
  }
  if (seg.rounding == kDither) {
    return step_of_param<Algorithm, Codec, BFloat16<true>>(seg, s, maps, begin, end);
  }
  return step_of_param<Algorithm, Codec, BFloat16<false>>(seg, s, maps, begin, end);
}

}  // namespace ZERO8_TARGET
}  // namespace zero8

// Defines the functions of isa.h for the target: of all algorithms and codecs, or of
// ZERO8_ALGORITHM and ZERO8_CODEC alone, so that an op can be compiled in parallel, and only what
// is needed of it.
#define ZERO8_IN(codec) In##codec
#define ZERO8_DEFINE_STEP(target, algorithm, codec)                                                \
  int64_t zero8::ZERO8_STEP_BLOCKS(target, algorithm, codec)(                                      \
      const Segment& seg, const StepScalars& s, const CodecMaps& maps, int64_t begin, int64_t end, \
      float* wide) {                                                                               \
    return target::step_blocks<target::algorithm, target::ZERO8_IN(codec)>(seg, s, maps, begin,    \
                                                                           end, wide);             \
  }
#ifdef ZERO8_CODEC
#define ZERO8_DEFINE_CODECS(target, algorithm) ZERO8_DEFINE_STEP(target, algorithm, ZERO8_CODEC)
#else
#define ZERO8_DEFINE_CODECS(target, algorithm) ZERO8_CODECS(ZERO8_DEFINE_STEP, target, algorithm)
#endif
#ifdef ZERO8_ALGORITHM
#define ZERO8_DEFINE_STEPS ZERO8_DEFINE_CODECS(ZERO8_TARGET, ZERO8_ALGORITHM)
#else
#define ZERO8_DEFINE_STEPS ZERO8_ALGORITHMS(ZERO8_DEFINE_CODECS, ZERO8_TARGET)
#endif
