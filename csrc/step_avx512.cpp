// SPDX-License-Identifier: Apache-2.0
// The step for x86-64 processors with AVX-512 F, BW, VL and DQ.
#include "format.h"

#if defined(__x86_64__)
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,bmi2"))), apply_to = function)
#else
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,bmi2,prefer-vector-width=512")
#endif
#define ZERO8_TARGET avx512
#include "step_block.h"

bool zero8::step_block_avx512(const Segment& seg, const StepScalars& s, const DynamicMaps& maps,
                          Block b) {
  return avx512::step_block(seg, s, maps, b);
}
#if defined(__clang__)
#pragma clang attribute pop
#endif
#endif
