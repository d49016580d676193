// SPDX-License-Identifier: Apache-2.0
// The processor's mode in which the arithmetic is defined.
#pragma once

#include <cstdint>

namespace zero8 {

// Subnormals read and written as zero while it lives, as the arithmetic is defined; the thread's
// own mode comes back afterwards, and on ARM what FPSR says of its results.
//
// x86 flushes results after it has rounded them, and the arithmetic is defined so; FPCR.FZ of ARM
// flushes before.  In the last quarter ulp below 2^-126, where x86 gives 2^-126, aarch64 gives 0:
// vec_scalar.h and vec_neon.h see to that.
class FlushToZero {
 public:
#if defined(__x86_64__)
  FlushToZero() : saved_(__builtin_ia32_stmxcsr()) { __builtin_ia32_ldmxcsr(saved_ | 0x8040); }
  ~FlushToZero() { __builtin_ia32_ldmxcsr(saved_); }

 private:
  unsigned saved_;
#elif defined(__aarch64__)
  FlushToZero() {
    asm volatile("mrs %0, fpcr" : "=r"(saved_mode_));
    asm volatile("mrs %0, fpsr" : "=r"(saved_status_));
    asm volatile("msr fpcr, %0" : : "r"(saved_mode_ | (1u << 24)));
  }
  ~FlushToZero() {
    asm volatile("msr fpcr, %0" : : "r"(saved_mode_));
    asm volatile("msr fpsr, %0" : : "r"(saved_status_));
  }

 private:
  uint64_t saved_mode_, saved_status_;
#else
#error "zero8: no way is known to flush subnormals on this processor"
#endif
};

}  // namespace zero8
