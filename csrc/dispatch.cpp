// SPDX-License-Identifier: Apache-2.0
// Chooses the instruction set at run time and shares the blocks out among threads.
#if defined(__x86_64__)
#include <cpuid.h>
#endif

#include <algorithm>
#include <vector>

#define ZERO8_TARGET dispatch
#include "blocks.h"
#include "flush_to_zero.h"
#include "format.h"
#include "isa.h"
#include "parallel.h"

namespace zero8 {

namespace {

// A block of a list of segments; one past the last block is {number of segments, 0}.
struct Place {
  int64_t segment, block;
};

// Of a part of a segment that is copied, or made floats, while it is in the cache.
constexpr int64_t kElementsOfPart = 16384;

bool is_int8(const Segment& seg) { return seg.param_dtype == kINT8; }

// Number of the segment's block that holds element `element` of the parameter.
int64_t local_block(const Segment& seg, int64_t element) {
  return dispatch::block_of(seg, element) - dispatch::block_of(seg, seg.first);
}

// Past the last block of the part of a segment, up to `stop`, that begins with block `first`.
int64_t part_end(const Segment& seg, int64_t first, int64_t stop) {
  const int64_t end = std::min(first + kElementsOfPart / seg.block_size, stop);
  const int64_t together = dispatch::elements_together(seg);
  if (together == 0 || end == stop) return end;
  // With the rest of the elements that are stepped together.
  const dispatch::Block last = dispatch::block_at(seg, end - 1);
  const int64_t past = seg.first + last.begin + last.count;
  const int64_t next = (past + together - 1) / together * together;
  return next < seg.first + seg.numel ? std::min(local_block(seg, next), stop) : stop;
}

// How many floats the largest part of any INT8 weights takes.
int64_t floats_of_parts(const Segment* segments, int64_t num_segments) {
  int64_t most = 0;
  for (int64_t i = 0; i < num_segments; ++i) {
    if (!is_int8(segments[i])) continue;
    const int64_t of_part = kElementsOfPart + dispatch::elements_together(segments[i]);
    most = std::max(most, std::min(of_part, segments[i].numel));
  }
  return most;
}

// The block of element number `element` of all segments together.
Place place_of(const Segment* segments, int64_t num_segments, int64_t element) {
  int64_t i = 0;
  while (i < num_segments && element >= segments[i].numel) element -= segments[i++].numel;
  if (i == num_segments) return {i, 0};
  const Segment& seg = segments[i];
  element += seg.first;
  if (const int64_t together = dispatch::elements_together(seg)) {
    element = std::max(element / together * together, seg.first);
  }
  return {i, local_block(seg, element)};
}

// Steps over blocks first .. stop - 1 of a segment: a part at a time where the weights are INT8, or
// are copied, which are in the cache then.  `wide` has the memory that StepBlocks need.
int64_t step_segment(const Segment& seg, const StepScalars& scalars, const CodecMaps& maps,
                     const Steps& steps, int64_t first, int64_t stop, float* wide) {
  StepBlocks* const step_blocks = steps.step_blocks[seg.algorithm];
  if (!seg.copy && !is_int8(seg)) return step_blocks(seg, scalars, maps, first, stop, wide);
  int64_t skipped = 0;
  for (int64_t end; first < stop; first = end) {
    end = part_end(seg, first, stop);
    skipped += step_blocks(seg, scalars, maps, first, end, wide);
    if (!seg.copy) continue;
    const dispatch::Block last = dispatch::block_at(seg, end - 1);
    steps.copy_params(seg, dispatch::block_at(seg, first).begin, last.begin + last.count);
  }
  return skipped;
}

// Steps over the blocks from `begin` to just before `end`.
void step_range(Segment* segments, int64_t num_segments, const StepScalars* scalars,
                const CodecMaps& maps, const Steps& steps, Place begin, Place end, float* wide) {
  const FlushToZero mode;
  for (int64_t i = begin.segment; i < num_segments && i <= end.segment; ++i) {
    Segment& seg = segments[i];
    const int64_t first = i == begin.segment ? begin.block : 0;
    const int64_t stop = i == end.segment ? end.block : dispatch::num_blocks(seg);
    if (first >= stop) continue;
    const int64_t skipped = step_segment(seg, scalars[seg.scalars], maps, steps, first, stop, wide);
    if (skipped) __atomic_fetch_add(&seg.nonfinite_blocks, skipped, __ATOMIC_RELAXED);
  }
}

#if defined(__x86_64__)
// GCC before 11 does not know it by name.  Asked once: to a virtual machine CPUID is a call of its
// host, tens of microseconds.
bool has_f16c() {
  static const bool found = [] {
    unsigned eax, ebx, ecx, edx;
    return __get_cpuid(1, &eax, &ebx, &ecx, &edx) && (ecx & bit_F16C);
  }();
  return found;
}
bool has_avx2() {
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && has_f16c();
}
bool has_avx512() {
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") && has_avx2();
}
#endif

}  // namespace

const Isa kIsas[] = {
    {"baseline", &ZERO8_STEPS(baseline), [] { return true; }},
#if defined(__x86_64__)
    {"avx2", &ZERO8_STEPS(avx2), has_avx2},
    {"avx512", &ZERO8_STEPS(avx512), has_avx512},
#elif defined(__aarch64__)
    {"neon", &ZERO8_STEPS(neon), [] { return true; }},
#endif
};
const int kNumIsas = sizeof kIsas / sizeof kIsas[0];

void step(Segment* segments, int64_t num_segments, const StepScalars* scalars,
          const CodecMaps& maps, int num_threads, const Isa& isa) {
  int64_t blocks = 0, numel = 0;
  for (int64_t i = 0; i < num_segments; ++i) {
    blocks += dispatch::num_blocks(segments[i]);
    numel += segments[i].numel;
  }
  if (num_threads > blocks) num_threads = static_cast<int>(blocks);
  // Made before there are threads, where running out of memory is an error that can be caught.
  const int64_t floats = floats_of_parts(segments, num_segments);
  std::vector<float> wide(floats * std::max(num_threads, 1));
  // A static partition into equal parts, but in whole blocks or rows: every one is done by one
  // thread, in any case alike.
  parallel(num_threads, [&](int part, int parts) {
    step_range(segments, num_segments, scalars, maps, *isa.steps,
               place_of(segments, num_segments, numel * part / parts),
               place_of(segments, num_segments, numel * (part + 1) / parts),
               wide.data() + floats * part);
  });
}

}  // namespace zero8
