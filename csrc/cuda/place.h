// SPDX-License-Identifier: Apache-2.0
// What a thread has of a block.
#pragma once

#include <cstdint>

#include "cuda/team.h"
#include "format.h"

namespace zero8::ZERO8_TARGET {

// Elements at .. at + n - 1 of a segment.
struct Place {
  const Block& block;  // that they are in
  int64_t at;
  int n;

  __device__ explicit Place(const Block& whole) : block(whole), at(whole.begin + before()) {
    const int rest = block.count - before();
    n = rest < 0 ? 0 : rest < kPerThread ? rest : kPerThread;
  }
  // How many elements the threads before this one have.
  __device__ static int before() { return static_cast<int>(threadIdx.x) * kPerThread; }

  // The elements as a segment of one block, in arrays of the thread's own.
  __device__ Segment own(const Segment& seg) const {
    Segment own = seg;
    own.first += at;
    return own;
  }
  __device__ Block own_block() const { return {0, 0, kPerThread, block.offset + before()}; }
};

}  // namespace zero8::ZERO8_TARGET
