// SPDX-License-Identifier: Apache-2.0
// A team: the threads that share a block of the parameter, 8 elements each.  It is a row of the
// thread block (all threadIdx.x of one threadIdx.y), a part of a warp, a warp, or several warps.
//
// Teams go their own ways: masks within a warp, and named barriers across warps, hold up the
// threads of one team only.
#pragma once

#include <cstdint>

#include "format.h"

namespace zero8::ZERO8_TARGET {

constexpr int kPerThread = 8;  // elements
constexpr int kWarp = 32;      // threads
constexpr int kMaxThreads = kMaxBlockSize / kPerThread;

// Waits until as many threads have come to the barrier of this number, 1 or 2: of teams of several
// warps two at most share a thread block (Launch.of).  For a number in a register the compiler
// would reserve all 16 barriers, and fewer thread blocks would fit a multiprocessor.
#if defined(__CUDACC__)
__device__ inline void named_barrier(uint32_t number, uint32_t num_threads) {
  if (number == 1) {
    asm volatile("barrier.sync 1, %0;" ::"r"(num_threads) : "memory");
  } else {
    asm volatile("barrier.sync 2, %0;" ::"r"(num_threads) : "memory");
  }
}
#else
void named_barrier(uint32_t number, uint32_t num_threads);
#endif

// The team's threads in this thread's warp.
__device__ inline uint32_t team_mask() {
  if (blockDim.x >= kWarp) return ~0u;
  return ((1u << blockDim.x) - 1u) << (threadIdx.y * blockDim.x % kWarp);
}

// Combines x over the team: `in_warp` over the threads of a mask, `of_two` two numbers.  All
// threads of the team call it together and get the same.
template <class InWarp, class OfTwo>
__device__ uint32_t reduced(uint32_t x, InWarp in_warp, OfTwo of_two) {
  x = in_warp(team_mask(), x);
  if (blockDim.x <= kWarp) return x;
  __shared__ uint32_t of_warp[kMaxThreads / kWarp];
  const uint32_t begin = threadIdx.y * blockDim.x / kWarp, end = begin + blockDim.x / kWarp;
  if (threadIdx.x % kWarp == 0) of_warp[begin + threadIdx.x / kWarp] = x;
  named_barrier(1 + threadIdx.y, blockDim.x);  // number 0 is __syncthreads
  x = of_warp[begin];
  for (uint32_t warp = begin + 1; warp < end; ++warp) x = of_two(x, of_warp[warp]);
  named_barrier(1 + threadIdx.y, blockDim.x);  // before any of them writes again
  return x;
}

// Waits for the team's threads, which then see what each has written.
__device__ inline void team_sync() {
  if (blockDim.x <= kWarp) {
    __syncwarp(team_mask());
  } else {
    named_barrier(1 + threadIdx.y, blockDim.x);
  }
}

}  // namespace zero8::ZERO8_TARGET
