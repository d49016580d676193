// SPDX-License-Identifier: Apache-2.0
// The step for any processor: what the compiler targets by default.
#include "isa.h"

#if !defined(__clang__)
// GCC 12 takes the masks of Linear4's search for indices where it makes vectors of the loop.
#pragma GCC optimize("no-tree-loop-vectorize")
#endif
#define ZERO8_TARGET baseline
#include "vec_scalar.h"
// In terms of that vocabulary:
#include "step_types.h"

ZERO8_DEFINE_STEPS(baseline)
