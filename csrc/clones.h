// SPDX-License-Identifier: Apache-2.0
// For loops that the compiler vectorizes, outside of the step's own instruction sets.
#pragma once

// Compiles a function several times; the loader picks the widest clone that the processor can run.
#if defined(__x86_64__)
#define ZERO8_CLONES __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define ZERO8_CLONES
#endif
