// SPDX-License-Identifier: Apache-2.0
// The arrays that a step moves through memory: stream.cpp.
#pragma once

#include <cstdint>

namespace zero8 {

// An array of states.
struct State {
  uint8_t* data;
  int64_t bits;  // per element
};

struct Streams {
  uint8_t* param;
  const uint8_t* grad;
  int64_t param_size;  // bytes per element, of the gradient too
  const State* states;
  int64_t num_states;
  int64_t numel;
};

// Reads grad, and reads and writes back param and states, with `num_threads` threads.
void copy(const Streams& streams, int num_threads);

}  // namespace zero8
