// SPDX-License-Identifier: Apache-2.0
// The step for aarch64 processors, all of which have NEON.
#include "isa.h"

#if defined(__aarch64__)
#define ZERO8_TARGET neon
#include "vec_neon.h"
// In terms of that vocabulary:
#include "step_types.h"

ZERO8_DEFINE_STEPS(neon)
#endif
