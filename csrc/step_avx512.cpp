// SPDX-License-Identifier: Apache-2.0
// The step for x86-64 processors with AVX-512 F, BW, VL and DQ.
#include "isa.h"

#if defined(__x86_64__)
#if defined(__clang__)
#pragma clang attribute push(                                                    \
    __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,bmi2"))), \
    apply_to = function)
#else
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,bmi2")
#endif
#define ZERO8_TARGET avx512
#if !defined(__clang__)
// GCC warns about the undefined operands of its own intrinsics (its bug 105593).
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"
#endif
#include "vec_avx512.h"
// In terms of that vocabulary:
#include "step_types.h"

ZERO8_DEFINE_STEPS(avx512)
#if defined(__clang__)
#pragma clang attribute pop
#endif
#endif
