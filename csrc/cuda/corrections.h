// SPDX-License-Identifier: Apache-2.0
// The corrections of a team's block of bfloat16 weights: as csrc/corrections.h has them on the CPU.
#pragma once

#include <cstdint>

#include "cuda/place.h"
#include "cuda/vec_thread.h"
#include "cuda/words.h"

namespace zero8::ZERO8_TARGET {

// The sum of the block's weights, of which this thread has these.
__device__ inline uint32_t sum_of_block(const Words& weights) {
  uint32_t sum = 0;
#pragma unroll
  for (int k = 0; k < kPerThread / 2; ++k) {
    const auto number = static_cast<uint32_t>(Place::before() / 2 + k);
    sum += sum_of_two(weights.word[k], kGoldenStep + number * kNextFactor);
  }
  return static_cast<uint32_t>(Vec::reduce_sum(static_cast<int>(sum)));
}

// Drops this thread's corrections that belong to other weights than these, in memory, too.
__device__ inline void drop_stale(const Segment& seg, const Place& place, const Words& weights,
                                  Words& correction) {
  bool is_stale = false;
  if (seg.weight_sums) {
    is_stale = are_of_others(seg.weight_sums[place.block.local], sum_of_block(weights));
  }
  uint8_t own[kPerThread];
  unpack(correction, own);
  bool is_changed = false;
#pragma unroll
  for (int k = 0; k < kPerThread; ++k) {
    const bool is_corrected = are_corrected(weights.word[k / 2]) >> (k % 2 * 16 + 15) & 1;
    if ((is_stale || !is_corrected) && own[k] != 0) {
      own[k] = 0;
      is_changed = true;
    }
  }
  if (!is_changed) return;
  correction = packed(own);
  write(static_cast<uint8_t*>(seg.correction) + place.at, own, place.n);
}

// Leaves the sums of a block, before this thread's new weights take the place of those in memory.
__device__ inline void sum_up(const Segment& seg, const Place& place,
                              const uint16_t (&weights)[kPerThread]) {
  uint16_t before[kPerThread], all[kPerThread], without_zeros[kPerThread];
  unpack(read<uint16_t>(static_cast<const uint16_t*>(seg.param) + place.at, place.n, 0), before);
#pragma unroll
  for (int k = 0; k < kPerThread; ++k) {
    all[k] = k < place.n ? weights[k] : 0;
    without_zeros[k] = before[k] & 0x7FFF ? all[k] : 0;
  }
  const WeightSums sums = {sum_of_block(packed(all)), sum_of_block(packed(without_zeros))};
  if (threadIdx.x == 0) seg.weight_sums[place.block.local] = sums;
}

}  // namespace zero8::ZERO8_TARGET
