// SPDX-License-Identifier: Apache-2.0
// One step of one target, algorithm and codec as a program, to be emulated: it takes a segment from
// standard input, as programs.py writes it, and returns how many blocks it left as they were.
#include "flush_to_zero.h"
#include "isa.h"
#include "piped.h"

int main() {
  using piped::locate, piped::read;
  const auto sizes = read<int64_t>(2);  // blocks, bytes of memory
  auto segment = read<zero8::Segment>(1);
  const auto scalars = read<zero8::StepScalars>(1);
  const auto maps = read<zero8::CodecMaps>(1);
  auto memory = read<char>(sizes[1]);
  locate(segment[0].param, memory);
  locate(segment[0].grad, memory);
  for (zero8::Moment& moment : segment[0].moments) {
    locate(moment.values, memory);
    locate(moment.scales, memory);
  }
  const zero8::FlushToZero mode;
  return static_cast<int>(zero8::ZERO8_STEP(segment[0], scalars[0], maps[0], 0, sizes[0]));
}
