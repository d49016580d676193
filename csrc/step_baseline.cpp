// SPDX-License-Identifier: Apache-2.0
// The step for any processor: what the compiler targets by default.
#include "isa.h"

#define ZERO8_TARGET baseline
#include "vec_scalar.h"
// In terms of that vocabulary:
#include "step_types.h"

ZERO8_DEFINE_STEPS
