// SPDX-License-Identifier: Apache-2.0
// The step for x86-64 processors with AVX2, FMA and F16C.
#include "isa.h"

#if defined(__x86_64__)
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,bmi2,f16c"))), apply_to = function)
#else
// Of GCC's tunings, measured on Zen 3, that of Skylake makes the fastest step, by 3 % with fp32
// parameters and by 10 % with bf16 ones against the generic one.
#pragma GCC target("avx2,fma,bmi2,f16c,tune=skylake")
#endif
#define ZERO8_TARGET avx2
#include "vec_avx2.h"
// In terms of that vocabulary:
#include "step_types.h"

ZERO8_DEFINE_STEPS(avx2)
#if defined(__clang__)
#pragma clang attribute pop
#endif
#endif
