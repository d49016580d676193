// SPDX-License-Identifier: Apache-2.0
// The ceiling of a step: its memory traffic without its arithmetic.
//
// Reads the gradients, and reads and writes back, unchanged, the parameters and every array of
// state, 256 elements at a time and shared out among threads as the step does it.  A step that is
// as fast as this loop over the same arrays waits for memory and nothing else.
#include "stream.h"

#include <omp.h>

#include "clones.h"

namespace zero8 {
namespace {

constexpr int64_t kBlock = 256;

// Zero, but not to the compiler, which would otherwise leave the loops out.
const volatile uint8_t kZero = 0;

inline void rewrite(uint8_t* __restrict__ x, int64_t bytes, uint8_t zero) {
  for (int64_t i = 0; i < bytes; ++i) x[i] ^= zero;
}

inline void rewrite(uint8_t* __restrict__ x, const uint8_t* __restrict__ other, int64_t bytes,
                    uint8_t zero) {
  for (int64_t i = 0; i < bytes; ++i) x[i] ^= other[i] & zero;
}

// Elements begin .. end - 1.
ZERO8_CLONES void copy_elements(const Streams& s, int64_t begin, int64_t end) {
  const uint8_t zero = kZero;
  for (int64_t i = begin; i < end; i += kBlock) {
    const int64_t count = i + kBlock < end ? kBlock : end - i;
    rewrite(s.param + i * s.param_size, s.grad + i * s.param_size, count * s.param_size, zero);
    for (int64_t k = 0; k < s.num_states; ++k) {
      const State& state = s.states[k];
      rewrite(state.data + i * state.bits / 8, (count * state.bits + 7) / 8, zero);
    }
  }
}

}  // namespace

void copy(const Streams& s, int num_threads) {
  const int64_t total = (s.numel + kBlock - 1) / kBlock;
#pragma omp parallel num_threads(num_threads)
  {
    const int64_t thread = omp_get_thread_num(), threads = omp_get_num_threads();
    const int64_t begin = total * thread / threads * kBlock;
    const int64_t end = total * (thread + 1) / threads * kBlock;
    copy_elements(s, begin, end < s.numel ? end : s.numel);
  }
}

}  // namespace zero8
