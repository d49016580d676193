// SPDX-License-Identifier: Apache-2.0
// What a thread reads of a block, as it is stored.
#pragma once

#include <cstdint>

#include "cuda/place.h"
#include "cuda/units.h"
#include "cuda/words.h"
#include "format.h"

namespace zero8::ZERO8_TARGET {

// Calls body(Number<k>) for each moment of an algorithm.
template <class Algorithm, int k = 0, class Body>
__device__ void for_moments(Body body) {
  if constexpr (k < kMomentsOf[Algorithm::kNumber].count) {
    body(Number<k>());
    for_moments<Algorithm, k + 1>(body);
  }
}

template <int kCount>
__device__ void copy(float* to, const float* from) {
#pragma unroll
  for (int k = 0; k < kCount; ++k) to[k] = from[k];
}

// What a step reads: all of it is asked for before any of it is used.
template <class Algorithm>
struct Stored {
  Words param, correction, grad, moments[kMaxMoments];
  float scales[kMaxMoments][kMaxScales];

  __device__ Stored(const Segment& seg, const Place& place) {
    grad = floats(seg.grad, seg.grad_dtype, place);
    param = floats(seg.param, seg.param_dtype, place);
    if (seg.correction) correction = bytes(seg.correction, 0, place);
    if (seg.moments[0].codec == kFloat32) {
      for_moments<Algorithm>(
          [&](auto k) { moments[k.value] = floats(seg.moments[k.value].values, kFP32, place); });
    }
    for_codec(seg.moments[0].codec, [&](auto codec) {
      for_moments<Algorithm>([&](auto number) {
        constexpr int k = decltype(number)::value;
        using Code = CodeOf<Algorithm, decltype(codec), k>;
        const Moment& moment = seg.moments[k];
        if constexpr (Code::kBits == 8) {
          moments[k] = bytes(moment.values, Code::kZeroCode, place);
        } else {
          moments[k] = read_units<Code>(seg, place, moment);
        }
        copy<Code::kScales>(scales[k], moment.scales + place.block.local * Code::kScales);
      });
    });
  }

 private:
  __device__ static Words floats(const void* p, int32_t dtype, const Place& place) {
    if (dtype == kFP32) return read<float>(static_cast<const float*>(p) + place.at, place.n, 0.0f);
    return read<uint16_t>(static_cast<const uint16_t*>(p) + place.at, place.n, 0);
  }
  __device__ static Words bytes(const void* p, uint32_t beyond, const Place& place) {
    return read<uint8_t>(static_cast<const uint8_t*>(p) + place.at, place.n,
                         static_cast<uint8_t>(beyond));
  }
};

}  // namespace zero8::ZERO8_TARGET
