// SPDX-License-Identifier: Apache-2.0
// The operations of one vector target of the CPU; -DTARGET and -DHEADER say which.
#define ZERO8_TARGET TARGET
#include HEADER
// Against the definition:
#include "vec_operations.h"

extern "C" const char* compared_operations() {
  static vec_operations::Comparison<zero8::TARGET::Vec, zero8::FlushToZero> test;
  test.report.clear();
  vec_operations::compare_arithmetic(test, vec_operations::all);
  vec_operations::compare_conversions(test, vec_operations::all);
  vec_operations::compare_integers(test);
  vec_operations::compare_memory(test);
  vec_operations::compare_chunks_and_tails(test);
  return test.report.c_str();
}
