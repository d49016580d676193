// SPDX-License-Identifier: Apache-2.0
// The vector vocabulary of vec_scalar.h in one of the 8 elements that a CUDA thread holds;
// reductions are over the whole block, that is, over the team's threads.
//
// Memory is the thread's own: arrays of 8 with constant indices, which the compiler keeps in
// registers.  Functions for chunks and tails are left out: step_kernel.h has none.
//
// GPUs can flush subnormals as well, but what becomes of results that round up to 2^-126 is not
// documented.  x86 decides by the result rounded with an unbounded exponent.  So arithmetic is IEEE
// here, and results of at most 2^-126 in magnitude, which are rare, are looked at again.
#pragma once

#include <cstdint>

#include "cuda/team.h"
#include "format.h"
#include "lane.h"

namespace zero8::ZERO8_TARGET {

// One instruction each, as there is none for a > b ? a : b.
#if defined(__CUDACC__)
__device__ inline float max_or_nan(float a, float b) {
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(a) : "f"(a), "f"(b));
  return a;
}
__device__ inline float min_or_nan(float a, float b) {
  asm("min.NaN.f32 %0, %1, %2;" : "=f"(a) : "f"(a), "f"(b));
  return a;
}
#else
inline float max_or_nan(float a, float b) { return a > b ? a : b; }
inline float min_or_nan(float a, float b) { return a < b ? a : b; }
#endif

struct Vec : Lane {
  // --- Arithmetic, with flush to zero ------------------------------------------------------------

  // Whether x is not 0, and of a magnitude of at most 2^-126.
  __device__ static bool is_tiny(float x) { return 2u * as_int(x) - 1u < 0x01000000u; }

  // `enlarged()` is what r was rounded from, times 2^64 and rounded: the result is tiny, so the
  // factors that it was made of leave room for that.  Beside a factor of 0 the other one may not,
  // so the first factor of `fma` must be below 2^64: in a step it is a gradient, a rate or a level
  // of a code.
  template <class Enlarged>
  __device__ static float settled(float r, Enlarged enlarged) {
    if (!is_tiny(r)) return r;
    const bool is_normal = fabsf(r) == 0x1p-126f && fabsf(enlarged()) >= 0x1p-62f;
    return is_normal ? r : as_float(as_int(r) & 0x80000000u);
  }
  static constexpr float kLarge = 0x1p64f;

  __device__ static float flushed(float a) {
    return settled(a, [=] { return __fmul_rn(a, kLarge); });
  }
  __device__ static float mul_far(float a, float b) { return __fmul_rn(a, b); }
  __device__ static float fma_far(float a, float b, float c) { return __fmaf_rn(a, b, c); }
  __device__ static float div_far(float a, float b) { return __fdiv_rn(a, b); }
  __device__ static float mul(float a, float b) {
    return settled(mul_far(a, b), [=] { return __fmul_rn(__fmul_rn(a, kLarge), b); });
  }
  __device__ static float fma(float a, float b, float c) {
    return settled(fma_far(a, b, c),
                   [=] { return __fmaf_rn(__fmul_rn(a, kLarge), b, __fmul_rn(c, kLarge)); });
  }
  __device__ static float fms(float a, float b, float c) { return fma(a, b, -c); }
  __device__ static float div(float a, float b) {
    return settled(div_far(a, b), [=] { return __fdiv_rn(__fmul_rn(a, kLarge), b); });
  }
  // The root of a normal number is never tiny.
  __device__ static float sqrt(float a) { return __fsqrt_rn(a); }

  // --- All else is exact -------------------------------------------------------------------------

  __device__ static float max(float a, float b) { return max_or_nan(a, b); }
  __device__ static float min(float a, float b) { return min_or_nan(a, b); }
  // Beyond 2^31 something else than on the CPU: so large are only positions that are not used.
  __device__ static uint32_t truncate(float a) { return static_cast<uint32_t>(__float2int_rz(a)); }

  // --- Over the whole block ----------------------------------------------------------------------

  __device__ static uint32_t reduce_maxu(uint32_t a) {
    return reduced(
        a, [](uint32_t mask, uint32_t x) { return __reduce_max_sync(mask, x); },
        [](uint32_t x, uint32_t y) { return x > y ? x : y; });
  }
  __device__ static uint32_t reduce_minu(uint32_t a) {
    return reduced(
        a, [](uint32_t mask, uint32_t x) { return __reduce_min_sync(mask, x); },
        [](uint32_t x, uint32_t y) { return x < y ? x : y; });
  }
  __device__ static int reduce_sum(int count) {
    return static_cast<int>(reduced(
        static_cast<uint32_t>(count),
        [](uint32_t mask, uint32_t x) { return __reduce_add_sync(mask, x); },
        [](uint32_t x, uint32_t y) { return x + y; }));
  }
};

// The same, but results are looked at together: where any was tiny, all are to be made again with
// Vec.  A look at every result by itself would be a third of the step's instructions.
class QuickVec : public Vec {
 public:
  __device__ float flushed(float a) { return noted(a); }
  __device__ float mul(float a, float b) { return noted(mul_far(a, b)); }
  __device__ float fma(float a, float b, float c) { return noted(fma_far(a, b, c)); }
  __device__ float fms(float a, float b, float c) { return noted(fma_far(a, b, -c)); }
  __device__ float div(float a, float b) { return noted(div_far(a, b)); }
  __device__ bool saw_tiny() const { return smallest_ < 0x01000000u; }  // as is_tiny

 private:
  __device__ float noted(float r) {
    smallest_ = minu(smallest_, 2u * as_int(r) - 1u);
    return r;
  }

  uint32_t smallest_ = ~0u;
};

}  // namespace zero8::ZERO8_TARGET
