// SPDX-License-Identifier: Apache-2.0
// The instruction sets of the CPU, and the step that chooses one of them.
#pragma once

#include <cstdint>

#include "algorithms.h"
#include "format.h"

namespace zero8 {

// Steps over blocks begin .. end - 1 of one segment and returns how many of them it left as they
// were because a gradient or a new moment was not finite.  Of INT8 weights they are whole rows, and
// `wide` is memory for as many floats; else it may be null.
using StepBlocks = int64_t(const Segment&, const StepScalars&, const CodecMaps&, int64_t begin,
                           int64_t end, float* wide);

// Of each target, algorithm and codec; weak, as an op may be built without some of them.
#define ZERO8_STEP_BLOCKS(target, algorithm, codec) step_blocks_##target##_##algorithm##_##codec
#define ZERO8_DECLARE_STEP(target, algorithm, codec) \
  __attribute__((weak)) StepBlocks ZERO8_STEP_BLOCKS(target, algorithm, codec);
// Steps that are defined nowhere are null as well: those of VBMI but for Dynamic's, which
// dispatch.cpp replaces by those of AVX-512.
#define ZERO8_DECLARE_STEPS(target, algorithm) ZERO8_CODECS(ZERO8_DECLARE_STEP, target, algorithm)
ZERO8_ALGORITHMS(ZERO8_DECLARE_STEPS, baseline)
ZERO8_ALGORITHMS(ZERO8_DECLARE_STEPS, avx2)
ZERO8_ALGORITHMS(ZERO8_DECLARE_STEPS, avx512)
ZERO8_ALGORITHMS(ZERO8_DECLARE_STEPS, avx512vbmi)
ZERO8_ALGORITHMS(ZERO8_DECLARE_STEPS, neon)

struct Isa {
  const char* name;  // a key of TARGETS in zero8/op/build.py, in this order
  // By the numbers of algorithm and codec; null in an op that was built without it.
  StepBlocks* step_blocks[kNumAlgorithms][kNumCodecs];
  bool (*is_supported)();  // by this processor

  StepBlocks* step_of(const Segment& seg) const {
    return step_blocks[seg.algorithm][seg.moments[0].codec];
  }
};

// Slowest first.  The table is in dispatch.cpp.
extern const Isa kIsas[];
extern const int kNumIsas;

// Steps over all segments with `num_threads` threads.
void step(Segment* segments, int64_t num_segments, const StepScalars* scalars,
          const CodecMaps& maps, int num_threads, const Isa& isa);

}  // namespace zero8
