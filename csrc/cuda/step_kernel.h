// SPDX-License-Identifier: Apache-2.0
// The fused step on a GPU: one launch for a whole list of segments.
//
// A thread holds 8 elements of a block in registers, so to itself it has a segment of one block,
// and the headers of the CPU do the rest; only reductions see the whole block.  Memory sees every
// byte once: 16 per fp32 parameter, as on the CPU.
//
// Compiled by nvcc and by NVRTC (step.cu), and by tests for the host.
#pragma once

#include <cstdint>

#define ZERO8_TARGET cuda
#include "cuda/team.h"
#include "cuda/vec_thread.h"
#include "cuda/words.h"
#include "format.h"
// In terms of that vocabulary:
#include "moments.h"
// In terms of these:
#include "cuda/corrections.h"
#include "cuda/stored.h"

namespace zero8::ZERO8_TARGET {

// The same as numbers, in registers as long as indices are constants.
struct Values {
  float x[kPerThread];
};

// Calls body(i) for each vector of a thread's elements, of which i is the first.
template <class Body>
__device__ void for_vectors(Body body) {
#pragma unroll
  for (int i = 0; i < kPerThread; i += Vec::kLanes) body(i);
}

// --- Parameters and gradients --------------------------------------------------------------------

// Calls body(vec) with a QuickVec, and if that has seen tiny results, again with a Vec.
template <class Body>
__device__ void quickly(Body body) {
  QuickVec quick;
  body(quick);
  if (quick.saw_tiny()) {
    Vec slow;
    body(slow);
  }
}

// Calls body(vec, i) for each vector of a thread's elements, all of them quickly or none.
template <class Body>
__device__ void for_vectors_quickly(Body body) {
  quickly([&](auto& vec) { for_vectors([&](int i) { body(vec, i); }); });
}

// The gradients, which are of type T in memory, times their factor.
template <class T, class Product>
__device__ Values scaled(const Gradient& s, const Words& grad) {
  T narrow[kPerThread];
  unpack(grad, narrow);
  Values g;
  for_vectors_quickly(
      [&](auto& vec, int i) { Vec::store(g.x + i, vec.flushed(Vec::load(narrow + i))); });
  if (s.has_factor) {
    for_vectors([&](int i) {
      Vec vec;
      Vec::store(g.x + i, s.template scaled<Product>(vec, Vec::load(g.x + i)));
    });
  }
  return g;
}

__device__ inline Values grad_of(const Segment& seg, const Gradient& s, const Words& grad) {
  if (seg.grad_dtype == kFP32) return scaled<float, float>(s, grad);
  if (seg.grad_dtype == kFP16) return scaled<Half, float>(s, grad);
  if (seg.param_dtype == kFP32) return scaled<uint16_t, float>(s, grad);
  return scaled<uint16_t, uint16_t>(s, grad);
}

// The thread's parameters as a segment of kind P of their own.
template <class P>
struct OwnParam {
  using Kind = P;
  typename P::Stored p[kPerThread];
  uint8_t correction[kPerThread];

  __device__ P param(const Segment& seg, const Place& place) {
    Segment own = place.own(seg);
    own.param = p;
    own.correction = correction;
    return P(own, place.own_block());
  }
};

template <class Body>
__device__ void for_param(const Segment& seg, Body body) {
  if (seg.param_dtype == kFP32) {
    body(OwnParam<Float32>());
  } else if (seg.correction) {
    body(OwnParam<CorrectedBFloat16>());
  } else {
    body(OwnParam<BFloat16>());
  }
}

__device__ inline Values param_of(const Segment& seg, const Words& stored, const Words& correction,
                                  const Place& place) {
  Values p;
  for_param(seg, [&](auto own) {
    unpack(stored, own.p);
    unpack(correction, own.correction);
    const auto param = own.param(seg, place);
    for_vectors_quickly([&](auto& vec, int i) { Vec::store(p.x + i, param.read(vec, i, All())); });
  });
  return p;
}

__device__ inline void write_param(const Segment& seg, const Place& place, const Values& p) {
  for_param(seg, [&](auto own) {
    using P = typename decltype(own)::Kind;
    auto param = own.param(seg, place);
    param.start();
    for_vectors([&](int i) {
      const Vec::F x = Vec::load(p.x + i);
      param.write(i, x, All(), any_extreme(x));
    });
    if constexpr (P::kCorrected) {
      if (seg.weight_sums) sum_up(seg, place, own.p);
    }
    write(static_cast<typename P::Stored*>(seg.param) + place.at, own.p, place.n);
    if constexpr (P::kCorrected) {
      write(static_cast<uint8_t*>(seg.correction) + place.at, own.correction, place.n);
    }
  });
}

// --- Moments -------------------------------------------------------------------------------------

// The moments times the algorithm's decays.
template <class Algorithm>
__device__ void decode(const Segment& seg, const Stored<Algorithm>& stored, const StepScalars& raw,
                       const CodecMaps& maps, Values* moments) {
  if (seg.moments[0].codec == kFloat32) {
    for_moments<Algorithm>([&](auto number) {
      constexpr int k = decltype(number)::value;
      float values[kPerThread];
      unpack(stored.moments[k], values);
      const Vec::F decay = Vec::set(Algorithm::decay(raw, k));
      // The product flushes what is subnormal in memory, as no decay is above 1.
      for_vectors([&](int i) {
        Vec vec;
        Vec::store(moments[k].x + i, vec.mul(Vec::load(values + i), decay));
      });
    });
  }
  for_codec(seg.moments[0].codec, [&](auto codec) {
    for_moments<Algorithm>([&](auto number) {
      constexpr int k = decltype(number)::value;
      using Code = CodeOf<Algorithm, decltype(codec), k>;
      uint8_t codes[kPerThread];
      unpack(stored.moments[k], codes);
      const typename Code::Decoder of_block(stored.scales[k], Algorithm::decay(raw, k), maps);
      for_vectors([&](int i) {
        Vec vec;
        Vec::store(moments[k].x + i, of_block(vec, load_codes<Code>(codes + i, All())));
      });
    });
  });
}

// Turns parameters and gradients into updated ones, and the moments into what will be encoded.  The
// update itself stands here once, and not for each codec: copies of it would need more registers.
template <class Algorithm>
__device__ void update(const Segment& seg, const Stored<Algorithm>& stored, const StepScalars& raw,
                       const CodecMaps& maps, const Values& g, Values& p, Values* moments) {
  decode(seg, stored, raw, maps, moments);
  const typename Algorithm::Scalars s(raw);
  for_vectors([&](int i) {
    Vec::F x, m[kMaxMoments];
    quickly([&](auto& vec) {
      Vec::F carried[Algorithm::kCarried];
      for_moments<Algorithm>([&](auto k) { m[k.value] = Vec::load(moments[k.value].x + i); });
      s.advance(vec, Vec::load(g.x + i), m, carried);
      x = s.param(vec, Vec::load(p.x + i), m, carried);
    });
    Vec::store(p.x + i, x);
    for_moments<Algorithm>([&](auto k) { Vec::store(moments[k.value].x + i, m[k.value]); });
  });
}

// Encodes a thread's part of a moment of the block, and writes codes and scales.
template <class Code>
__device__ void encode_moment(const Segment& seg, const Place& place, const Moment& moment,
                              float settling, const CodecMaps& maps, float* x) {
  Range range(Code::kSigned);
  for_vectors([&](int i) { range.add(Code::kSigned, Vec::load(x + i)); });
  uint8_t codes[kPerThread];
  float scales[kMaxScales];
  const typename Code::Encoder of_block(
      range, maps, {range.largest(), x, kPerThread, Place::before(), place.block.count, settling},
      scales);
  const uint32_t q = Thresholds(place.own(seg), place.own_block(), moment.phase).q;
  with_dither<Code>(of_block, q, [&](const auto& one, auto dither) {
    dither.start();
    for_vectors([&](int i) { store8(codes + i, encode_one(one, x + i, dither.next()), All()); });
  });
  // All threads have read the old scales: reductions that made the new ones waited for them.
  if (threadIdx.x == 0) {
    copy<Code::kScales>(moment.scales + place.block.local * Code::kScales, scales);
  }
  if constexpr (Code::kBits == 8) {
    write(static_cast<uint8_t*>(moment.values) + place.at, codes, place.n);
  } else {
    write_units<Code>(seg, place, moment, codes);
  }
}

template <class Algorithm>
__device__ void encode(const Segment& seg, const Place& place, const StepScalars& raw,
                       const CodecMaps& maps, Values* moments) {
  if (seg.moments[0].codec == kFloat32) {
    for_moments<Algorithm>([&](auto k) {
      write(static_cast<float*>(seg.moments[k.value].values) + place.at, moments[k.value].x,
            place.n);
    });
  }
  for_codec(seg.moments[0].codec, [&](auto codec) {
    for_moments<Algorithm>([&](auto number) {
      constexpr int k = decltype(number)::value;
      encode_moment<CodeOf<Algorithm, decltype(codec), k>>(
          seg, place, seg.moments[k], Algorithm::settling(raw, k), maps, moments[k].x);
    });
  });
}

// --- The step ------------------------------------------------------------------------------------

// Returns whether the block's gradients and new moments are finite; if not, it is as it was.
template <class Algorithm>
__device__ bool step_block(const Segment& seg, const StepScalars& raw, const CodecMaps& maps,
                           const Block& block) {
  const Place place(block);
  const Stored<Algorithm> stored(seg, place);
  Words correction = stored.correction;
  if (seg.correction) drop_stale(seg, place, stored.param, correction);
  Values p = param_of(seg, stored.param, correction, place);
  Values g = grad_of(seg, typename Algorithm::Scalars(raw), stored.grad);
  Vec::I largest = Vec::seti(0);
  for_vectors([&](int i) {
    Vec vec;
    const Vec::F x =
        typename Algorithm::Scalars(raw).gradient(vec, Vec::load(p.x + i), Vec::load(g.x + i));
    largest = Vec::maxu(largest, Vec::magnitude_bits(x));
    Vec::store(g.x + i, x);
  });
  if (Vec::reduce_maxu(largest) >= kGradientLimitBits) return false;
  Values moments[kMaxMoments];
  update(seg, stored, raw, maps, g, p, moments);
  largest = Vec::seti(0);
  for_vectors([&](int i) {
    for_moments<Algorithm>([&](auto number) {
      constexpr int k = decltype(number)::value;
      const Vec::F x = Vec::load(moments[k].x + i);
      const bool is_signed = kMomentsOf[Algorithm::kNumber].is_signed[k];
      largest = Vec::maxu(largest, is_signed ? Vec::magnitude_bits(x) : Vec::as_int(x));
    });
  });
  if (Vec::reduce_maxu(largest) >= kInfinityBits) return false;
  write_param(seg, place, p);
  encode<Algorithm>(seg, place, raw, maps, moments);
  return true;
}

// --- The list ------------------------------------------------------------------------------------

struct Task {
  int64_t segment;
  Block block;
};
// That a thread block looks up at once; more would leave others too little shared memory.
constexpr int kMaxTasks = 128;

// Block number `number` of the list.  Finding it takes a search and divisions, so each thread finds
// another one for the whole thread block.
__device__ inline Task task_at(const Segment* segments, const int64_t* first_blocks,
                               int64_t num_segments, int64_t number) {
  int64_t low = 0, high = num_segments;  // first_blocks[low] <= number < first_blocks[high]
  while (high - low > 1) {
    const int64_t middle = low + (high - low) / 2;
    if (first_blocks[middle] <= number) {
      low = middle;
    } else {
      high = middle;
    }
  }
  return {low, block_at(segments[low], number - first_blocks[low])};
}

// Four bytes of any type.
struct alignas(4) AnyWord {
  unsigned char bytes[4];
};

// A thread block's share of the blocks of all segments, which are of one algorithm.
template <class Algorithm>
__device__ void step_share(const Segment* segments, const int64_t* first_blocks,
                           int64_t num_segments, const StepScalars* scalars, const CodecMaps* maps,
                           unsigned long long* nonfinite_blocks) {
  __shared__ CodecMaps shared_maps;
  __shared__ Task tasks[kMaxTasks];
  const int threads = static_cast<int>(blockDim.x * blockDim.y);
  const int thread = static_cast<int>(threadIdx.y * blockDim.x + threadIdx.x);
  if (maps) {
    constexpr int kWords = sizeof shared_maps / sizeof(AnyWord);
    for (int i = thread; i < kWords; i += threads) {
      reinterpret_cast<AnyWord*>(&shared_maps)[i] = reinterpret_cast<const AnyWord*>(maps)[i];
    }
  }
  // A thread block takes neighbouring blocks, which lie together in memory.  In shared memory what
  // is left of them takes no registers of the loop.
  __shared__ int64_t next, end;
  if (thread == 0) {
    const int64_t total = first_blocks[num_segments];
    next = total * blockIdx.x / gridDim.x;
    end = total * (blockIdx.x + 1) / gridDim.x;
  }
  while (true) {
    __syncthreads();  // the tasks before are done
    const int most = threads < kMaxTasks ? threads : kMaxTasks;
    const int count = end - next < most ? static_cast<int>(end - next) : most;
    if (count == 0) break;
    if (thread < count) {
      tasks[thread] = task_at(segments, first_blocks, num_segments, next + thread);
    }
    __syncthreads();
    if (thread == 0) next += count;
    for (int i = static_cast<int>(threadIdx.y); i < count; i += static_cast<int>(blockDim.y)) {
      const Task& task = tasks[i];
      const Segment& seg = segments[task.segment];
      const bool finite = step_block<Algorithm>(seg, scalars[seg.scalars], shared_maps, task.block);
      if (!finite && threadIdx.x == 0) atomicAdd(&nonfinite_blocks[task.segment], 1ull);
    }
  }
}

}  // namespace zero8::ZERO8_TARGET

// Steps over all segments, a kernel for each algorithm: together they would take the registers of
// the largest.  Launched with thread blocks of (largest block size / 8, teams), at most 512
// threads, and any grid; block sizes are powers of two from 64 to 4096.  `registers` are those that
// a thread needs without spilling; 128 fit 512 threads on an SM.
//
// first_blocks: num_segments + 1 running sums of the segments' numbers of blocks.
// scalars: without subnormal numbers.
// maps: null if no segment has a codec with maps.
// nonfinite_blocks: of each segment, counted up by the blocks left as they were.
#define ZERO8_KERNEL(name, Algorithm, registers)                                                   \
  extern "C" __global__ void __maxnreg__(registers)                                                \
      name(const zero8::Segment* segments, const int64_t* first_blocks, int64_t num_segments,      \
           const zero8::StepScalars* scalars, const zero8::CodecMaps* maps,                        \
           unsigned long long* nonfinite_blocks) {                                                 \
    zero8::cuda::step_share<zero8::cuda::Algorithm>(segments, first_blocks, num_segments, scalars, \
                                                    maps, nonfinite_blocks);                       \
  }
ZERO8_KERNEL(zero8_step_adam, Adam, 96)
ZERO8_KERNEL(zero8_step_lion, Lion, 96)
ZERO8_KERNEL(zero8_step_sgd, Sgd, 96)
ZERO8_KERNEL(zero8_step_ademamix, Ademamix, 128)
#undef ZERO8_KERNEL
