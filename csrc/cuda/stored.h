// SPDX-License-Identifier: Apache-2.0
// What a thread reads of a block, as it is stored; and codes of 6 or 4 bits as they are read and
// written (zero8/spec/packing.py).  Threads share the units in which these lie, so they go through
// shared memory, a byte each.
#pragma once

#include <cstdint>

#include "cuda/place.h"
#include "cuda/words.h"
#include "format.h"

namespace zero8::ZERO8_TARGET {

// Of the team's block, a byte for each element.
__device__ inline uint8_t* team_bytes() {
  __shared__ uint8_t bytes[kMaxBlockSize];
  return bytes + threadIdx.y * blockDim.x * kPerThread;
}

// Calls body(unit, at, n) for this thread's share of a block's units: the unit's bytes, which
// element of the block its first code is of (below 0 if that lies before the block), and how many
// codes it has.
template <class Code, class Body>
__device__ void for_units(const Segment& seg, const Block& block, void* values, Body body) {
  constexpr int kCodes = kUnitCodes<Code>;
  const int64_t row = seg.own_row_length, per_row = units_per_row(seg, kCodes);
  const int64_t first = seg.first + block.begin;
  const int64_t end = unit_of(seg, first + block.count - 1, kCodes) + 1;
  for (int64_t unit = unit_of(seg, first, kCodes) + threadIdx.x; unit < end; unit += blockDim.x) {
    const int64_t column = unit % per_row * kCodes;
    const int64_t left = row - column;
    body(
        static_cast<uint8_t*>(values) + (unit - unit_of(seg, seg.first, kCodes)) * kUnitBytes<Code>,
        static_cast<int>(unit / per_row * row + column - first),
        left < kCodes ? static_cast<int>(left) : kCodes);
  }
}

// Returns this thread's codes, a byte each, of which those beyond the block are kZeroCode's.  All
// threads of the team call it together.
template <class Code>
__device__ Words read_units(const Segment& seg, const Place& place, const Moment& moment) {
  constexpr int kBits = Code::kBits, kBytes = kUnitBytes<Code>;
  uint8_t* bytes = team_bytes();
  const int count = place.block.count;
  for_units<Code>(seg, place.block, moment.values, [&](const uint8_t* unit, int at, int n) {
    uint32_t bits = 0;
#pragma unroll
    for (int i = 0; i < kBytes; ++i) bits = bits << 8 | unit[i];
#pragma unroll
    for (int i = 0; i < kUnitCodes<Code>; ++i) {
      const bool is_there = i < n && at + i >= 0 && at + i < count;
      const uint32_t code = bits >> (8 * kBytes - kBits * (i + 1)) & ((1u << kBits) - 1);
      const uint32_t byte = Code::kTwosComplement ? code << (8 - kBits) : code + Code::kRaised;
      if (is_there) bytes[at + i] = static_cast<uint8_t>(byte);
    }
  });
  team_sync();
  uint8_t mine[kPerThread];
#pragma unroll
  for (int k = 0; k < kPerThread; ++k) {
    mine[k] = k < place.n ? bytes[Place::before() + k] : static_cast<uint8_t>(Code::kZeroCode);
  }
  team_sync();  // before any of them writes again
  return packed(mine);
}

// Writes this thread's codes, of which the lower bits count.  All threads of the team call it
// together.
template <class Code>
__device__ void write_units(const Segment& seg, const Place& place, const Moment& moment,
                            const uint8_t (&mine)[kPerThread]) {
  constexpr int kBits = Code::kBits, kBytes = kUnitBytes<Code>;
  uint8_t* bytes = team_bytes();
#pragma unroll
  for (int k = 0; k < kPerThread; ++k) {
    bytes[Place::before() + k] = (mine[k] - Code::kLowered) & ((1u << kBits) - 1);
  }
  team_sync();
  const int count = place.block.count;
  for_units<Code>(seg, place.block, moment.values, [&](uint8_t* unit, int at, int n) {
    uint32_t bits = 0;
#pragma unroll
    for (int i = 0; i < kUnitCodes<Code>; ++i) {
      const bool is_there = i < n && at + i >= 0 && at + i < count;
      if (is_there) bits |= static_cast<uint32_t>(bytes[at + i]) << (8 * kBytes - kBits * (i + 1));
    }
#pragma unroll
    for (int i = 0; i < kBytes; ++i) unit[i] = static_cast<uint8_t>(bits >> (8 * (kBytes - 1 - i)));
  });
  team_sync();
}

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
