// SPDX-License-Identifier: Apache-2.0
// The vector vocabulary of vec_scalar.h in two of the 8 elements that a CUDA thread holds (more at
// once need more registers); reductions are over the whole block, that is, over the team's threads.
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
#include "half.h"

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

struct Vec {
  static constexpr int kLanes = 2;
  struct F {
    float x[kLanes];
  };
  struct I {
    uint32_t x[kLanes];
  };
  struct Mask {
    bool x[kLanes];
  };

  template <class Made, class Make>
  __device__ static Made each(Make make) {
    Made made;
#pragma unroll
    for (int k = 0; k < kLanes; ++k) made.x[k] = make(k);
    return made;
  }

  __device__ static F set(float x) {
    return each<F>([=](int) { return x; });
  }
  __device__ static I seti(uint32_t x) {
    return each<I>([=](int) { return x; });
  }
  __device__ static I ramp(uint32_t start, uint32_t step) {
    return each<I>([=](int k) { return start + static_cast<uint32_t>(k) * step; });
  }

  __device__ static F load(const float* p) {
    return each<F>([=](int k) { return p[k]; });
  }
  __device__ static F load(const uint16_t* p) {
    return each<F>([=](int k) { return __uint_as_float(static_cast<uint32_t>(p[k]) << 16); });
  }
  __device__ static F load(const Half* p) {
    return each<F>([=](int k) { return __uint_as_float(float_pattern(p[k])); });
  }
  __device__ static void store(float* p, F a) {
#pragma unroll
    for (int k = 0; k < kLanes; ++k) p[k] = a.x[k];
  }
  __device__ static void store16(uint16_t* p, I a) {
#pragma unroll
    for (int k = 0; k < kLanes; ++k) p[k] = static_cast<uint16_t>(a.x[k]);
  }
  __device__ static I load8(const uint8_t* p) {
    return each<I>([=](int k) { return static_cast<uint32_t>(p[k]); });
  }
  __device__ static I load8s(const uint8_t* p) {
    return each<I>([=](int k) {
      return static_cast<uint32_t>(static_cast<int32_t>(static_cast<int8_t>(p[k])));
    });
  }
  __device__ static void store8(uint8_t* p, I a) {
#pragma unroll
    for (int k = 0; k < kLanes; ++k) p[k] = static_cast<uint8_t>(a.x[k]);
  }

  // --- Arithmetic, with flush to zero ------------------------------------------------------------

  // Whether x is not 0, and of a magnitude of at most 2^-126.
  __device__ static bool is_tiny(float x) { return 2u * __float_as_uint(x) - 1u < 0x01000000u; }
  __device__ static float zero_like(float x) {
    return __uint_as_float(__float_as_uint(x) & 0x80000000u);
  }

  // `enlarged(k)` is what element k was rounded from, times 2^64 and rounded: the result is tiny,
  // so the factors that it was made of leave room for that.  Beside a factor of 0 the other one may
  // not, so the first factor of `fma` must be below 2^64: in a step it is a gradient, a rate or a
  // level of a code.
  template <class Enlarged>
  __device__ static F settled(F r, Enlarged enlarged) {
    bool any_tiny = false;
#pragma unroll
    for (int k = 0; k < kLanes; ++k) any_tiny |= is_tiny(r.x[k]);
    if (any_tiny) {
#pragma unroll
      for (int k = 0; k < kLanes; ++k) {
        if (!is_tiny(r.x[k])) continue;
        const bool normal = fabsf(r.x[k]) == 0x1p-126f && fabsf(enlarged(k)) >= 0x1p-62f;
        if (!normal) r.x[k] = zero_like(r.x[k]);
      }
    }
    return r;
  }
  static constexpr float kLarge = 0x1p64f;

  __device__ static F flushed(F a) {
    return settled(a, [=](int k) { return __fmul_rn(a.x[k], kLarge); });
  }
  __device__ static F mul_far(F a, F b) {
    return each<F>([=](int k) { return __fmul_rn(a.x[k], b.x[k]); });
  }
  __device__ static F fma_far(F a, F b, F c) {
    return each<F>([=](int k) { return __fmaf_rn(a.x[k], b.x[k], c.x[k]); });
  }
  __device__ static F div_far(F a, F b) {
    return each<F>([=](int k) { return __fdiv_rn(a.x[k], b.x[k]); });
  }
  __device__ static F mul(F a, F b) {
    return settled(mul_far(a, b),
                   [=](int k) { return __fmul_rn(__fmul_rn(a.x[k], kLarge), b.x[k]); });
  }
  __device__ static F fma(F a, F b, F c) {
    return settled(fma_far(a, b, c), [=](int k) {
      return __fmaf_rn(__fmul_rn(a.x[k], kLarge), b.x[k], __fmul_rn(c.x[k], kLarge));
    });
  }
  __device__ static F fms(F a, F b, F c) { return fma(a, b, minus(c)); }
  __device__ static F minus(F a) {
    return each<F>([=](int k) { return -a.x[k]; });
  }
  __device__ static F div(F a, F b) {
    return settled(div_far(a, b),
                   [=](int k) { return __fdiv_rn(__fmul_rn(a.x[k], kLarge), b.x[k]); });
  }
  // The root of a normal number is never tiny.
  __device__ static F sqrt(F a) {
    return each<F>([=](int k) { return __fsqrt_rn(a.x[k]); });
  }

  // --- All else is exact -------------------------------------------------------------------------

  __device__ static F max(F a, F b) {
    return each<F>([=](int k) { return max_or_nan(a.x[k], b.x[k]); });
  }
  __device__ static F min(F a, F b) {
    return each<F>([=](int k) { return min_or_nan(a.x[k], b.x[k]); });
  }
  __device__ static Mask not_below(F a, F b) {
    return each<Mask>([=](int k) { return a.x[k] >= b.x[k]; });
  }

  __device__ static I as_int(F a) {
    return each<I>([=](int k) { return __float_as_uint(a.x[k]); });
  }
  __device__ static F as_float(I a) {
    return each<F>([=](int k) { return __uint_as_float(a.x[k]); });
  }
  __device__ static I magnitude_bits(F a) {
    return each<I>([=](int k) { return __float_as_uint(a.x[k]) & 0x7FFFFFFFu; });
  }
  __device__ static F to_float(I a) {
    return each<F>([=](int k) { return __int2float_rn(static_cast<int32_t>(a.x[k])); });
  }
  // Beyond 2^31 something else than on the CPU: so large are only positions that are not used.
  __device__ static I truncate(F a) {
    return each<I>([=](int k) { return static_cast<uint32_t>(__float2int_rz(a.x[k])); });
  }

  __device__ static I addi(I a, I b) {
    return each<I>([=](int k) { return a.x[k] + b.x[k]; });
  }
  __device__ static I subi(I a, I b) {
    return each<I>([=](int k) { return a.x[k] - b.x[k]; });
  }
  template <uint32_t kFactor, int kShift>
  __device__ static I scaled_upper(I a) {
    return each<I>([=](int k) { return (a.x[k] >> 16) * kFactor >> kShift; });
  }
  __device__ static I muli(I a, I b) {
    return each<I>([=](int k) { return a.x[k] * b.x[k]; });
  }
  __device__ static I add_low16(I a, I b) {
    return each<I>([=](int k) { return (a.x[k] & 0xFFFF0000u) | ((a.x[k] + b.x[k]) & 0xFFFFu); });
  }
  __device__ static I absi(I a) {
    return each<I>([=](int k) { return static_cast<int32_t>(a.x[k]) < 0 ? 0u - a.x[k] : a.x[k]; });
  }
  __device__ static I andi(I a, I b) {
    return each<I>([=](int k) { return a.x[k] & b.x[k]; });
  }
  __device__ static I ori(I a, I b) {
    return each<I>([=](int k) { return a.x[k] | b.x[k]; });
  }
  __device__ static I xori(I a, I b) {
    return each<I>([=](int k) { return a.x[k] ^ b.x[k]; });
  }
  template <int kBits>
  __device__ static I shl(I a) {
    return each<I>([=](int k) { return a.x[k] << kBits; });
  }
  template <int kBits>
  __device__ static I shr(I a) {
    return each<I>([=](int k) { return a.x[k] >> kBits; });
  }
  __device__ static I shlv(I a, I bits) {
    return each<I>([=](int k) { return a.x[k] << bits.x[k]; });
  }
  __device__ static I shrv(I a, I bits) {
    return each<I>([=](int k) { return a.x[k] >> bits.x[k]; });
  }
  __device__ static I maxu(I a, I b) {
    return each<I>([=](int k) { return a.x[k] > b.x[k] ? a.x[k] : b.x[k]; });
  }
  __device__ static I minu(I a, I b) {
    return each<I>([=](int k) { return a.x[k] < b.x[k] ? a.x[k] : b.x[k]; });
  }
  // As floats, whose instruction takes a magnitude for free.
  __device__ static I max_magnitude(I a, F x) {
    return each<I>(
        [=](int k) { return __float_as_uint(fmaxf(__uint_as_float(a.x[k]), fabsf(x.x[k]))); });
  }
  __device__ static I maxs(I a, I b) { return choose(above(a, b), a, b); }
  __device__ static Mask equal(I a, I b) {
    return each<Mask>([=](int k) { return a.x[k] == b.x[k]; });
  }
  __device__ static Mask above(I a, I b) {
    return each<Mask>(
        [=](int k) { return static_cast<int32_t>(a.x[k]) > static_cast<int32_t>(b.x[k]); });
  }
  __device__ static I choose(Mask m, I yes, I no) {
    return each<I>([=](int k) { return m.x[k] ? yes.x[k] : no.x[k]; });
  }
  __device__ static I incremented(I a, Mask m) {
    return each<I>([=](int k) { return a.x[k] + (m.x[k] ? 1u : 0u); });
  }
  __device__ static I signed_as(I a, F x) {
    return each<I>([=](int k) { return __float_as_uint(x.x[k]) >> 31 ? 0u - a.x[k] : a.x[k]; });
  }
  __device__ static F negated(F x, I c) {
    return each<F>(
        [=](int k) { return __uint_as_float(__float_as_uint(x.x[k]) ^ (c.x[k] & 0x80000000u)); });
  }
  __device__ static I unless_zero(I x, I c) {
    return each<I>([=](int k) { return c.x[k] ? x.x[k] : 0u; });
  }
  __device__ static int count(Mask m) {
    int count = 0;
#pragma unroll
    for (int k = 0; k < kLanes; ++k) count += m.x[k];
    return count;
  }
  // In this thread.
  __device__ static bool any(Mask m) { return count(m) > 0; }

  __device__ static F look_up(const float* table, I index) {
    return each<F>([=](int k) { return table[index.x[k]]; });
  }
  __device__ static I look_up8(const uint32_t* table, I index) {
    return each<I>([=](int k) { return table[index.x[k] & 7u]; });
  }
  __device__ static F look_up8(const float* table, I index) {
    return each<F>([=](int k) { return table[index.x[k] & 7u]; });
  }
  __device__ static F look_up16(const float* table, I index) {
    return each<F>([=](int k) { return table[index.x[k] & 15u]; });
  }

  // --- Over the whole block ----------------------------------------------------------------------

  __device__ static uint32_t reduce_maxu(I a) {
    uint32_t largest = a.x[0];
#pragma unroll
    for (int k = 1; k < kLanes; ++k) largest = a.x[k] > largest ? a.x[k] : largest;
    return reduced(
        largest, [](uint32_t mask, uint32_t x) { return __reduce_max_sync(mask, x); },
        [](uint32_t x, uint32_t y) { return x > y ? x : y; });
  }
  __device__ static uint32_t reduce_minu(I a) {
    uint32_t smallest = a.x[0];
#pragma unroll
    for (int k = 1; k < kLanes; ++k) smallest = a.x[k] < smallest ? a.x[k] : smallest;
    return reduced(
        smallest, [](uint32_t mask, uint32_t x) { return __reduce_min_sync(mask, x); },
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
  __device__ F flushed(F a) { return noted(a); }
  __device__ F mul(F a, F b) { return noted(mul_far(a, b)); }
  __device__ F fma(F a, F b, F c) { return noted(fma_far(a, b, c)); }
  __device__ F fms(F a, F b, F c) { return noted(fma_far(a, b, minus(c))); }
  __device__ F div(F a, F b) { return noted(div_far(a, b)); }
  __device__ bool saw_tiny() const { return smallest_ < 0x01000000u; }  // as is_tiny

 private:
  __device__ F noted(F r) {
#pragma unroll
    for (int k = 0; k < kLanes; ++k) {
      const uint32_t size = 2u * __float_as_uint(r.x[k]) - 1u;
      smallest_ = size < smallest_ ? size : smallest_;
    }
    return r;
  }

  uint32_t smallest_ = ~0u;
};

}  // namespace zero8::ZERO8_TARGET
