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
#include "update.h"

namespace zero8 {
namespace ZERO8_TARGET {

// --- What a thread has of a block ----------------------------------------------------------------

// Elements at .. at + n - 1 of a segment.
struct Place {
  const Block& block;  // that they are in
  int64_t at;
  int n;

  __device__ explicit Place(const Block& whole) : block(whole), at(whole.begin + before()) {
    const int rest = block.count - before();
    n = rest < 0 ? 0 : rest < kPerThread ? rest : kPerThread;
  }
  // How many elements the threads before this one have.
  __device__ static int before() { return static_cast<int>(threadIdx.x) * kPerThread; }

  // The elements as a segment of one block, in arrays of the thread's own.
  __device__ Segment own(const Segment& seg) const {
    Segment own = seg;
    own.first += at;
    return own;
  }
  __device__ Block own_block() const { return {0, 0, kPerThread, block.offset + before()}; }
};

// Calls body(moments), an object of the type that says how the segment's moments are stored.
template <class Body>
__device__ void for_moments(const Segment& seg, Body body) {
  if (seg.codec == kLog) {
    body(LogPair());
  } else if (seg.codec == kDynamic) {
    body(DynamicPair());
  } else {
    body(Plain());
  }
}

// What a step reads: all of it is asked for before any of it is used.
struct Stored {
  Words param, correction, grad, exp_avg, exp_avg_sq;
  float exp_avg_scale[kMaxScales], exp_avg_sq_scale[kMaxScales];

  __device__ Stored(const Segment& seg, const Place& place) {
    grad = floats(seg.grad, seg.grad_dtype, place);
    param = floats(seg.param, seg.param_dtype, place);
    if (seg.correction) correction = bytes(seg.correction, 0, place);
    for_moments(seg, [&](auto moments) {
      using Moments = decltype(moments);
      if constexpr (Moments::kQuantized) {
        using M = typename Moments::MCode;
        using V = typename Moments::VCode;
        exp_avg = bytes(seg.exp_avg, M::kZeroCode, place);
        exp_avg_sq = bytes(seg.exp_avg_sq, V::kZeroCode, place);
        copy<M::kScales>(exp_avg_scale, seg.exp_avg_scale + place.block.local * M::kScales);
        copy<V::kScales>(exp_avg_sq_scale, seg.exp_avg_sq_scale + place.block.local * V::kScales);
      } else {
        exp_avg = floats(seg.exp_avg, kFP32, place);
        exp_avg_sq = floats(seg.exp_avg_sq, kFP32, place);
      }
    });
  }

  template <int kCount>
  __device__ static void copy(float* to, const float* from) {
#pragma unroll
    for (int k = 0; k < kCount; ++k) to[k] = from[k];
  }

 private:
  __device__ static Words floats(const void* p, int32_t dtype, const Place& place) {
    if (dtype == kFP32) return read<float>(static_cast<const float*>(p) + place.at, place.n, 0.0f);
    return read<uint16_t>(static_cast<const uint16_t*>(p) + place.at, place.n, 0);
  }
  __device__ static Words bytes(const void* p, uint32_t beyond, const Place& place) {
    return read<uint8_t>(static_cast<const uint8_t*>(p) + place.at, place.n,
                         static_cast<uint8_t>(beyond));
  }
};

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

// The gradients, which are of type T in memory.
template <class T>
__device__ Values widened(const Stored& stored) {
  T narrow[kPerThread];
  unpack(stored.grad, narrow);
  Values g;
  for_vectors_quickly(
      [&](auto& vec, int i) { Vec::store(g.x + i, vec.flushed(Vec::load(narrow + i))); });
  return g;
}

__device__ inline Values grad_of(const Segment& seg, const Stored& stored) {
  if (seg.grad_dtype == kFP32) return widened<float>(stored);
  if (seg.grad_dtype == kFP16) return widened<Half>(stored);
  return widened<uint16_t>(stored);
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
    body(OwnParam<BFloat16<false>>());
  }
}

__device__ inline Values param_of(const Segment& seg, const Stored& stored, const Place& place) {
  Values p;
  for_param(seg, [&](auto own) {
    unpack(stored.param, own.p);
    unpack(stored.correction, own.correction);
    const auto param = own.param(seg, place);
    for_vectors_quickly([&](auto& vec, int i) { Vec::store(p.x + i, param.read(vec, i, All())); });
  });
  return p;
}

__device__ inline void write_param(const Segment& seg, const Place& place, const Values& p) {
  for_param(seg, [&](auto own) {
    using P = typename decltype(own)::Kind;
    auto param = own.param(seg, place);
    for_vectors([&](int i) { param.write(i, Vec::load(p.x + i), All()); });
    write(static_cast<typename P::Stored*>(seg.param) + place.at, own.p, place.n);
    if constexpr (P::kCorrected) {
      write(static_cast<uint8_t*>(seg.correction) + place.at, own.correction, place.n);
    }
  });
}

// --- Moments -------------------------------------------------------------------------------------

// The thread's moments as a segment of their own.
template <class Moments>
struct OwnMoments {
  typename Moments::Stored m[kPerThread], v[kPerThread];
  float m_scale[kMaxScales], v_scale[kMaxScales];

  __device__ Segment segment(const Segment& seg, const Place& place) {
    Segment own = place.own(seg);
    own.exp_avg = m;
    own.exp_avg_sq = v;
    own.exp_avg_scale = m_scale;
    own.exp_avg_sq_scale = v_scale;
    return own;
  }
};

// Turns parameters and gradients into updated ones, and the moments into what will be encoded.
__device__ inline void update(const Segment& seg, const Stored& stored, const Place& place,
                              const StepScalars& raw, const DynamicMaps& maps, const Values& g,
                              Values& p, Values& m, Values& v) {
  for_moments(seg, [&](auto moments) {
    using Moments = decltype(moments);
    OwnMoments<Moments> own;
    unpack(stored.exp_avg, own.m);
    unpack(stored.exp_avg_sq, own.v);
    if constexpr (Moments::kQuantized) {
      Stored::copy<Moments::MCode::kScales>(own.m_scale, stored.exp_avg_scale);
      Stored::copy<Moments::VCode::kScales>(own.v_scale, stored.exp_avg_sq_scale);
    }
    const typename Moments::Source source(own.segment(seg, place), raw, maps, place.own_block());
    const Scalars s(raw);
    for_vectors([&](int i) {
      Vec::F x, first, second;
      quickly([&](auto& vec) {
        first = source.exp_avg(vec, i, All());
        second = source.exp_avg_sq(vec, i, All());
        const Vec::F denominator = advance_moments(vec, s, Vec::load(g.x + i), first, second);
        x = advanced_param(vec, s, Vec::load(p.x + i), first, denominator);
      });
      Vec::store(p.x + i, x);
      Vec::store(m.x + i, first);
      Vec::store(v.x + i, second);
    });
  });
}

__device__ inline void encode(const Segment& seg, const Place& place, const StepScalars& raw,
                              const DynamicMaps& maps, Values& m, Values& v) {
  for_moments(seg, [&](auto moments) {
    using Moments = decltype(moments);
    using T = typename Moments::Stored;
    OwnMoments<Moments> own;
    if constexpr (Moments::kQuantized) {
      typename Moments::MRange m_range;
      typename Moments::VRange v_range;
      for_vectors([&](int i) {
        m_range.add(Vec::load(m.x + i));
        v_range.add(Vec::load(v.x + i));
      });
      typename Moments::Sink sink(own.segment(seg, place), raw, maps, place.own_block(),
                                  Place::before(), place.block.count, m.x, v.x, m_range, v_range);
      for_vectors([&](int i) { sink.encode(i, All()); });
      // All threads have read the old scales: reductions that made the new ones waited for them.
      if (threadIdx.x == 0) {
        constexpr int kM = Moments::MCode::kScales, kV = Moments::VCode::kScales;
        Stored::copy<kM>(seg.exp_avg_scale + place.block.local * kM, own.m_scale);
        Stored::copy<kV>(seg.exp_avg_sq_scale + place.block.local * kV, own.v_scale);
      }
    } else {
      Stored::copy<kPerThread>(own.m, m.x);
      Stored::copy<kPerThread>(own.v, v.x);
    }
    write(static_cast<T*>(seg.exp_avg) + place.at, own.m, place.n);
    write(static_cast<T*>(seg.exp_avg_sq) + place.at, own.v, place.n);
  });
}

// --- The step ------------------------------------------------------------------------------------

// Returns whether the block's gradients and new moments are finite; if not, it is as it was.
__device__ inline bool step_block(const Segment& seg, const StepScalars& raw,
                                  const DynamicMaps& maps, const Block& block) {
  const Place place(block);
  const Stored stored(seg, place);
  Values p = param_of(seg, stored, place), g = grad_of(seg, stored);
  Vec::I largest = Vec::seti(0);
  for_vectors([&](int i) {
    const Vec::F x = Scalars(raw).gradient(Vec::load(p.x + i), Vec::load(g.x + i));
    largest = Vec::maxu(largest, magnitude_bits(x));
    Vec::store(g.x + i, x);
  });
  if (Vec::reduce_maxu(largest) >= kGradientLimitBits) return false;
  Values m, v;
  update(seg, stored, place, raw, maps, g, p, m, v);
  largest = Vec::seti(0);
  for_vectors([&](int i) {
    const Vec::I patterns = magnitude_bits(Vec::load(m.x + i));
    largest = Vec::maxu(Vec::maxu(largest, patterns), Vec::as_int(Vec::load(v.x + i)));
  });
  if (Vec::reduce_maxu(largest) >= kInfinityBits) return false;
  write_param(seg, place, p);
  encode(seg, place, raw, maps, m, v);
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

}  // namespace ZERO8_TARGET
}  // namespace zero8

// Steps over all segments.  Launched with thread blocks of (largest block size / 8, teams), at most
// 512 threads, and any grid; block sizes are powers of two from 64 to 4096.
//
// first_blocks: num_segments + 1 running sums of the segments' numbers of blocks.
// scalars: without subnormal numbers.
// maps: null if no segment has the codec `dynamic`.
// nonfinite_blocks: of each segment, counted up by the blocks left as they were.
extern "C" __global__ void __maxnreg__(96)
    zero8_step(const zero8::Segment* segments, const int64_t* first_blocks, int64_t num_segments,
               const zero8::StepScalars* scalars, const zero8::DynamicMaps* maps,
               unsigned long long* nonfinite_blocks) {
  using namespace zero8::cuda;
  __shared__ zero8::DynamicMaps shared_maps;
  __shared__ Task tasks[kMaxTasks];
  const int threads = static_cast<int>(blockDim.x * blockDim.y);
  const int thread = static_cast<int>(threadIdx.y * blockDim.x + threadIdx.x);
  if (maps) {
    constexpr int kWords = sizeof shared_maps / sizeof(uint32_t);
    for (int i = thread; i < kWords; i += threads) {
      reinterpret_cast<uint32_t*>(&shared_maps)[i] = reinterpret_cast<const uint32_t*>(maps)[i];
    }
  }
  // A thread block takes neighbouring blocks, which lie together in memory.  In shared memory this
  // takes no registers of the loop.
  __shared__ int64_t begin;
  __shared__ int size;
  if (thread == 0) {
    const int64_t total = first_blocks[num_segments];
    begin = total * blockIdx.x / gridDim.x;
    size = static_cast<int>(total * (blockIdx.x + 1) / gridDim.x - begin);
  }
  __syncthreads();
  const int most = threads < kMaxTasks ? threads : kMaxTasks;
  for (int done = 0; done < size; done += most) {
    const int count = size - done < most ? size - done : most;
    __syncthreads();  // the tasks before are done
    if (thread < count) {
      tasks[thread] = task_at(segments, first_blocks, num_segments, begin + done + thread);
    }
    __syncthreads();
    for (int i = static_cast<int>(threadIdx.y); i < count; i += static_cast<int>(blockDim.y)) {
      const Task& task = tasks[i];
      const zero8::Segment& seg = segments[task.segment];
      const bool finite = step_block(seg, scalars[seg.scalars], shared_maps, task.block);
      if (!finite && threadIdx.x == 0) atomicAdd(&nonfinite_blocks[task.segment], 1ull);
    }
  }
}
