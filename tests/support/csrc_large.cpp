// SPDX-License-Identifier: Apache-2.0
// One instruction set's step over some blocks of a segment that is too large to step over.
#include <cstring>

#include "isa.h"

extern "C" int step_some_blocks(const char* name, zero8::Segment* segment,
                                const zero8::StepScalars* scalars, const zero8::CodecMaps* maps,
                                int64_t begin, int64_t end) {
  for (int i = 0; i < zero8::kNumIsas; ++i) {
    const zero8::Isa& isa = zero8::kIsas[i];
    if (std::strcmp(isa.name, name) != 0) continue;
    isa.steps->step_blocks[segment->algorithm](*segment, *scalars, *maps, begin, end, nullptr);
    return 0;
  }
  return 1;
}
