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

// The steps of an instruction set.
struct Steps {
  StepBlocks* step_blocks[kNumAlgorithms];  // by number; that of 0 is null
  // Writes the copies of elements begin .. end - 1 of a segment's parameter.
  void (*copy_params)(const Segment&, int64_t begin, int64_t end);
};

// Each is in the file of its name; those of another processor are nowhere.
#define ZERO8_STEPS(target) steps_of_##target
extern const Steps ZERO8_STEPS(baseline);
extern const Steps ZERO8_STEPS(avx2);
extern const Steps ZERO8_STEPS(avx512);
extern const Steps ZERO8_STEPS(neon);

struct Isa {
  const char* name;
  const Steps* steps;
  bool (*is_supported)();  // by this processor
};

// Slowest first.  The table is in dispatch.cpp.
extern const Isa kIsas[];
extern const int kNumIsas;

// Steps over all segments with `num_threads` threads.
void step(Segment* segments, int64_t num_segments, const StepScalars* scalars,
          const CodecMaps& maps, int num_threads, const Isa& isa);

}  // namespace zero8
