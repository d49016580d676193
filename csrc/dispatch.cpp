// SPDX-License-Identifier: Apache-2.0
// Chooses the instruction set at run time and shares the blocks out among threads.
#include <omp.h>

#define ZERO8_TARGET dispatch
#include "blocks.h"
#include "format.h"

namespace zero8 {
namespace {

// Subnormals read and written as zero while it lives, as the arithmetic is defined; the thread's
// own mode comes back afterwards.
class FlushToZero {
 public:
#if defined(__x86_64__)
  FlushToZero() : saved_(__builtin_ia32_stmxcsr()) { __builtin_ia32_ldmxcsr(saved_ | 0x8040); }
  ~FlushToZero() { __builtin_ia32_ldmxcsr(saved_); }

 private:
  unsigned saved_;
#elif defined(__aarch64__)
  FlushToZero() {
    asm volatile("mrs %0, fpcr" : "=r"(saved_));
    asm volatile("msr fpcr, %0" : : "r"(saved_ | (1u << 24)));
  }
  ~FlushToZero() { asm volatile("msr fpcr, %0" : : "r"(saved_)); }

 private:
  uint64_t saved_;
#else
#error "zero8: no way is known to flush subnormals on this processor"
#endif
};

StepBlocks step_blocks_for(int isa) {
#if defined(__x86_64__)
  if (isa == 1) return step_blocks_avx2;
  if (isa == 2) return step_blocks_avx512;
  if (isa == 3) return step_blocks_avx512vbmi;
#endif
  return step_blocks_baseline;
}

// Steps over blocks begin .. end - 1 of the segments, counted through all of them.
void step_range(Segment* segments, const StepScalars* scalars, const DynamicMaps& maps,
                StepBlocks step_blocks, int64_t begin, int64_t end) {
  const FlushToZero mode;
  for (Segment* seg = segments; begin < end; ++seg) {
    const int64_t count = dispatch::num_blocks(*seg);
    const int64_t stop = end < count ? end : count;
    if (begin < stop) {
      const int64_t skipped = step_blocks(*seg, scalars[seg->scalars], maps, begin, stop);
      if (skipped) __atomic_fetch_add(&seg->nonfinite_blocks, skipped, __ATOMIC_RELAXED);
    }
    begin = begin > count ? begin - count : 0;
    end -= count;
  }
}

}  // namespace

bool isa_supported(int isa) {
#if defined(__x86_64__)
  if (isa == 1) return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  if (isa == 2) {
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
           isa_supported(1);
  }
  if (isa == 3) return __builtin_cpu_supports("avx512vbmi") && isa_supported(2);
#endif
  return isa == 0;
}

void step(Segment* segments, int64_t num_segments, const StepScalars* scalars,
          const DynamicMaps& maps, int num_threads, int isa) {
  const StepBlocks step_blocks = step_blocks_for(isa);
  int64_t total = 0;
  for (int64_t i = 0; i < num_segments; ++i) total += dispatch::num_blocks(segments[i]);
  // A static partition in whole blocks: every block is done by one thread, in any case alike.
  if (num_threads > total) num_threads = static_cast<int>(total);
  if (num_threads <= 1) {
    step_range(segments, scalars, maps, step_blocks, 0, total);
    return;
  }
#pragma omp parallel num_threads(num_threads)
  {
    // The runtime may grant fewer threads than asked for.
    const int64_t thread = omp_get_thread_num(), threads = omp_get_num_threads();
    step_range(segments, scalars, maps, step_blocks, total * thread / threads,
               total * (thread + 1) / threads);
  }
}

}  // namespace zero8
