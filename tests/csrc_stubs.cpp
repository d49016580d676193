// SPDX-License-Identifier: Apache-2.0
// In the place of the targets that a sanitized op does without: only the plain loads and stores of
// the baseline are seen by the address sanitizer, and they compile in a quarter of the time.
#include <cstdlib>

#include "format.h"

namespace zero8 {

int64_t step_blocks_avx2(const Segment&, const StepScalars&, const DynamicMaps&, int64_t, int64_t) {
  std::abort();
}
int64_t step_blocks_avx512(const Segment&, const StepScalars&, const DynamicMaps&, int64_t,
                           int64_t) {
  std::abort();
}
int64_t step_blocks_avx512vbmi(const Segment&, const StepScalars&, const DynamicMaps&, int64_t,
                               int64_t) {
  std::abort();
}

}  // namespace zero8
