// SPDX-License-Identifier: Apache-2.0
// What a host calls to step on a GPU, for builds with nvcc.
#include "cuda/step_kernel.h"

extern "C" int zero8_step_launch(const zero8::Segment* segments, const int64_t* first_blocks,
                                 int64_t num_segments, const zero8::StepScalars* scalars,
                                 const zero8::DynamicMaps* maps,
                                 unsigned long long* nonfinite_blocks, int team_threads, int teams,
                                 int grid, void* stream) {
  zero8_step<<<grid, dim3(team_threads, teams), 0, static_cast<cudaStream_t>(stream)>>>(
      segments, first_blocks, num_segments, scalars, maps, nonfinite_blocks);
  return static_cast<int>(cudaGetLastError());
}
