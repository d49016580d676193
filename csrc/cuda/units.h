// SPDX-License-Identifier: Apache-2.0
// Codes of 6 bits of a team's block: zero8/spec/packing.py.  Threads share the units in which they
// lie, so they go through shared memory, a byte each.
#pragma once

#include <cstdint>

#include "cuda/place.h"
#include "cuda/team.h"
#include "cuda/words.h"
#include "format.h"

namespace zero8 {
namespace ZERO8_TARGET {

constexpr int kUnitCodes = 4, kUnitBytes = 3;

// Of the team's block, a byte for each element.
__device__ inline uint8_t* team_bytes() {
  __shared__ uint8_t bytes[kMaxBlockSize];
  return bytes + threadIdx.y * blockDim.x * kPerThread;
}

// Calls body(unit, at, n) for this thread's share of a block's units: the unit's bytes, which
// element of the block its first code is of (below 0 if that lies before the block), and how many
// codes it has.
template <class Body>
__device__ void for_units(const Segment& seg, const Block& block, void* values, Body body) {
  const int64_t row = seg.own_row_length, per_row = (row + kUnitCodes - 1) / kUnitCodes;
  const auto unit_of = [&](int64_t element) {
    return element / row * per_row + element % row / kUnitCodes;
  };
  const int64_t first = seg.first + block.begin;
  const int64_t end = unit_of(first + block.count - 1) + 1;
  for (int64_t unit = unit_of(first) + threadIdx.x; unit < end; unit += blockDim.x) {
    const int64_t column = unit % per_row * kUnitCodes;
    const int64_t left = row - column;
    body(static_cast<uint8_t*>(values) + (unit - unit_of(seg.first)) * kUnitBytes,
         static_cast<int>(unit / per_row * row + column - first),
         left < kUnitCodes ? static_cast<int>(left) : kUnitCodes);
  }
}

// Returns this thread's codes, of which those beyond the block are 0.  All threads of the team call
// it together.
template <bool kTwosComplement>
__device__ Words read_units(const Segment& seg, const Place& place, const Moment& moment) {
  uint8_t* bytes = team_bytes();
  const int count = place.block.count;
  for_units(seg, place.block, moment.values, [&](const uint8_t* unit, int at, int n) {
    const uint32_t bits = unit[0] << 16 | unit[1] << 8 | unit[2];
#pragma unroll
    for (int i = 0; i < kUnitCodes; ++i) {
      const bool is_there = i < n && at + i >= 0 && at + i < count;
      const uint32_t code = bits >> (18 - 6 * i) & 63;
      if (is_there) bytes[at + i] = static_cast<uint8_t>(kTwosComplement ? code << 2 : code);
    }
  });
  team_sync();
  uint8_t mine[kPerThread];
#pragma unroll
  for (int k = 0; k < kPerThread; ++k) {
    mine[k] = k < place.n ? bytes[Place::before() + k] : static_cast<uint8_t>(0);
  }
  team_sync();  // before any of them writes again
  return packed(mine);
}

// Writes this thread's codes, whose signs are dropped.  All threads of the team call it together.
__device__ inline void write_units(const Segment& seg, const Place& place, const Moment& moment,
                                   const uint8_t (&mine)[kPerThread]) {
  uint8_t* bytes = team_bytes();
#pragma unroll
  for (int k = 0; k < kPerThread; ++k) bytes[Place::before() + k] = mine[k] & 63;
  team_sync();
  const int count = place.block.count;
  for_units(seg, place.block, moment.values, [&](uint8_t* unit, int at, int n) {
    uint32_t bits = 0;
#pragma unroll
    for (int i = 0; i < kUnitCodes; ++i) {
      const bool is_there = i < n && at + i >= 0 && at + i < count;
      if (is_there) bits |= static_cast<uint32_t>(bytes[at + i]) << (18 - 6 * i);
    }
#pragma unroll
    for (int i = 0; i < kUnitBytes; ++i) unit[i] = static_cast<uint8_t>(bits >> (16 - 8 * i));
  });
  team_sync();
}

}  // namespace ZERO8_TARGET
}  // namespace zero8
