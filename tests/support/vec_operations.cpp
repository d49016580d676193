// SPDX-License-Identifier: Apache-2.0
// The operations of one vector target of the CPU; -DTARGET and -DHEADER say which.
#define ZERO8_TARGET TARGET
#include HEADER
// Against the definition:
#include "vec_operations.h"

extern "C" const char* compared_operations() {
  using Vec = zero8::TARGET::Vec;
  static vec_operations::Comparison<Vec, zero8::FlushToZero> test;
  test.report.clear();
  vec_operations::compare_arithmetic(test, vec_operations::all);
#if defined(__aarch64__)
  vec_operations::compare_conversions(test, vec_operations::is_in_int32);
#else
  vec_operations::compare_conversions(test, vec_operations::all);
#endif
  vec_operations::compare_integers(test);
  vec_operations::compare_memory(test);
  vec_operations::compare_chunks_and_tails<Vec::kHasPairs>(test);
  if constexpr (Vec::kHasPairs) vec_operations::compare_pairs(test);
  return test.report.c_str();
}
