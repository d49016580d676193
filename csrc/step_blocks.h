// SPDX-License-Identifier: Apache-2.0
// The fused step on the CPU: decode, update (update.h), encode, in one pass over memory.
//
//     block b:    scan g | decode m, v -> (R1)-(R7), store p -> m', v' to a buffer
//     block b-1:                          encode from the other buffer, store codes
//
// The two lines run interleaved, four vectors at a time: the update waits for the divider (one
// square root and one division per element), the encoding is integer work that fits into the gaps.
// Four vectors, because their codes fill one vector of bytes.  The buffers of two blocks (16 bytes
// per element of a block) stay in the first-level cache.  Memory
// sees, per fp32 parameter, 16 bytes: p, g and two codes read, p and two codes written.
//
// The caller has set flush to zero.  Included once per target; ZERO8_TARGET names the namespace,
// and nothing here is a template of the standard library, which the linker would merge across
// targets.
#include <cstdint>

#include "format.h"
#include "update.h"

namespace zero8 {
namespace ZERO8_TARGET {

constexpr int64_t kPrefetchDistance = 512;  // elements
constexpr int kChunk = 4 * Vec::kLanes;

// --- Whole vectors and tails -------------------------------------------------------------------

// The first n lanes of a vector: a block's tail.
struct First {
  int n;
};

// Calls body(i, lanes) for the vectors of elements begin .. count - 1, the tail last.
template <class Body>
ZERO8_INLINE inline void for_vectors(int begin, int count, Body&& body) {
  int i = begin;
  for (; i + Vec::kLanes <= count; i += Vec::kLanes) body(i, All());
  if (i < count) body(i, First{count - i});
}

template <class T>
Vec::F load(const T* x, First tail) {
  return Vec::load_n(x, tail.n);
}
inline Vec::I load8(const uint8_t* x, uint32_t fill, First tail) {
  return Vec::load8_n(x, tail.n, fill);
}
inline void store(float* p, Vec::F x, First tail) { Vec::store_n(p, x, tail.n); }
inline void store16(uint16_t* p, Vec::I x, First tail) { Vec::store16_n(p, x, tail.n); }
inline void store8(uint8_t* p, Vec::I x, First tail) { Vec::store8_n(p, x, tail.n); }

// --- Chunks: four vectors ------------------------------------------------------------------------

// The lines of one chunk that will be needed a little later.
template <class T>
ZERO8_INLINE inline void prefetch_chunk(const T* x) {
  constexpr int kLine = 64 / sizeof(T);
  for (int i = 0; i < kChunk; i += kLine) Vec::prefetch(x + kPrefetchDistance + i);
}

// The largest magnitudes, as patterns, of the floats in a chunk.
inline Vec::I largest_of_chunk(const float* x) {
  const Vec::I ab =
      Vec::maxu(magnitude_bits(Vec::load(x)), magnitude_bits(Vec::load(x + Vec::kLanes)));
  x += 2 * Vec::kLanes;
  const Vec::I cd =
      Vec::maxu(magnitude_bits(Vec::load(x)), magnitude_bits(Vec::load(x + Vec::kLanes)));
  return Vec::maxu(ab, cd);
}
// The same of 16-bit numbers, two in each lane; and the larger of these two, in the upper half.
template <class T>
ZERO8_INLINE inline Vec::I largest_pairs(const T* x) {
  const Vec::I magnitude = Vec::seti(0x7FFF7FFF);
  const Vec::I ab = Vec::andi(Vec::load_pairs(x), magnitude);
  const Vec::I cd = Vec::andi(Vec::load_pairs(x + 2 * Vec::kLanes), magnitude);
  return Vec::maxu16(ab, cd);
}
inline Vec::I larger_of_pairs(Vec::I pairs) {
  return Vec::maxu(Vec::shl<16>(pairs), Vec::andi(pairs, Vec::seti(0xFFFF0000)));
}
inline Vec::I largest_of_chunk(const uint16_t* x) { return larger_of_pairs(largest_pairs(x)); }
// All finite halves can be squared.  So not the float's pattern, but the half's, moved to where
// infinity is the limit; the smallest ones become 0.
inline Vec::I largest_of_chunk(const Half* x) {
  const uint32_t distance = kHalfInfinityBits - (kGradientLimitBits >> 16);
  const Vec::I distances = Vec::seti(distance << 16 | distance);
  return larger_of_pairs(Vec::subi(Vec::maxu16(largest_pairs(x), distances), distances));
}

template <class Encoder>
ZERO8_INLINE inline void encode_four(Encoder& encode, const float* values, uint8_t* codes) {
  const Vec::F x[4] = {Vec::load(values), Vec::load(values + Vec::kLanes),
                       Vec::load(values + 2 * Vec::kLanes), Vec::load(values + 3 * Vec::kLanes)};
  const Vec::I a = encode(x[0]), b = encode(x[1]), c = encode(x[2]), d = encode(x[3]);
  if constexpr (Encoder::kLeft == Left::kSign) {
    Vec::store8x4_signed(codes, a, b, c, d, x);
  } else if constexpr (Encoder::kLeft == Left::kRaise) {
    Vec::store8x4_raised(codes, a, b, c, d, x);
  } else {
    Vec::store8x4(codes, a, b, c, d);
  }
}

template <class Sink>
ZERO8_INLINE inline void encode_chunk(Sink& sink, int i) {
  encode_four(sink.encode_m, sink.m_values + i, sink.m + i);
  encode_four(sink.encode_v, sink.v_values + i, sink.v + i);
}

// Inlined before GCC looks for functions without effects, whose calls it removes.
template <class Moments, class P, class G>
ZERO8_INLINE inline void prefetch(const Update<Moments, P, G>& update, int i) {
  prefetch_chunk(update.param.p + i);
  prefetch_chunk(update.g + i);
  // The processor's own prefetching does for the four streams of float32 moments.
  if constexpr (Moments::kQuantized) {
    prefetch_chunk(update.source.m + i);
    prefetch_chunk(update.source.v + i);
  }
}

// Whether every gradient of a block is finite and small enough to be squared.
template <class Moments, class P, class G>
ZERO8_INLINE inline bool is_finite(const Update<Moments, P, G>& update) {
  Vec::I largest = Vec::seti(0);
  int i = 0;
  if (!update.s.has_l2) {
    for (; i + kChunk <= update.count; i += kChunk)
      largest = Vec::maxu(largest, largest_of_chunk(update.g + i));
  }
  for_vectors(i, update.count, [&](int k, auto lanes) ZERO8_INLINE {
    largest = Vec::maxu(largest, update.magnitude(k, lanes));
  });
  return below_limit(largest);
}

// --- The step ------------------------------------------------------------------------------------

template <class P, class G>
int64_t step_plain(const Segment& seg, const StepScalars& raw, const DynamicMaps& maps,
                   int64_t begin, int64_t end) {
  const Scalars s(raw);
  int64_t skipped = 0;
  for (int64_t local = begin; local < end; ++local) {
    const Block b = block_at(seg, local);
    Update<Plain, P, G> update(seg, s, raw, maps, b, dither_index(seg, b));
    if (!is_finite(update)) {
      ++skipped;
      continue;
    }
    for_vectors(0, b.count, [&](int i, auto lanes) ZERO8_INLINE {
      Vec::F m = update.source.exp_avg(i, lanes), v = update.source.exp_avg_sq(i, lanes);
      if (i % kChunk == 0) prefetch(update, i);
      update.vector(i, lanes, m, v);
      store(update.source.m + i, m, lanes);
      store(update.source.v + i, v, lanes);
    });
  }
  return skipped;
}

template <class Moments, class P, class G>
int64_t step_quantized(const Segment& seg, const StepScalars& raw, const DynamicMaps& maps,
                       int64_t begin, int64_t end) {
  using Sink = typename Moments::Sink;
  const Scalars s(raw);
  // Two blocks of m' and v', one behind the other; the last vector of a block may run over.
  alignas(64) float buffer[4 * (kMaxBlockSize + Vec::kLanes)];
  const int stride = seg.block_size + Vec::kLanes;
  Sink sink;  // the previous block, not encoded yet
  int64_t skipped = 0;
  int half = 0;
  for (int64_t local = begin; local < end; ++local) {
    const Block b = block_at(seg, local);
    const uint32_t index = dither_index(seg, b);
    Update<Moments, P, G> update(seg, s, raw, maps, b, index);
    if (!is_finite(update)) {
      ++skipped;
      continue;
    }
    float* m_values = buffer + half * 2 * stride;
    float* v_values = m_values + stride;
    typename Moments::MRange m_range;
    typename Moments::VRange v_range;
    const auto update_decoded = [&](int i, auto lanes, Vec::F m, Vec::F v) ZERO8_INLINE {
      update.vector(i, lanes, m, v);
      Vec::store(m_values + i, m);
      Vec::store(v_values + i, v);
      m_range.add(m);
      v_range.add(v);
    };
    const auto update_vector = [&](int i, auto lanes) ZERO8_INLINE {
      update_decoded(i, lanes, update.source.exp_avg(i, lanes), update.source.exp_avg_sq(i, lanes));
    };
    const auto encode_vector = [&](int i, auto lanes) ZERO8_INLINE { sink.encode(i, lanes); };
    const int both = b.count < sink.count ? b.count : sink.count;
    int i = 0;
    for (; i + kChunk <= both; i += kChunk) {
      prefetch(update, i);
      const auto m = update.source.decode_m.chunk(update.source.m + i);
      const auto v = update.source.decode_v.chunk(update.source.v + i);
      for (int k = 0; k < 4; ++k) update_decoded(i + k * Vec::kLanes, All(), m(k), v(k));
      encode_chunk(sink, i);
    }
    for_vectors(i, sink.count, encode_vector);
    for_vectors(i, b.count, update_vector);
    sink = Sink(seg, raw, maps, b, index, m_values, v_values, m_range, v_range);
    half = 1 - half;
  }
  for_vectors(0, sink.count, [&](int i, auto lanes) ZERO8_INLINE { sink.encode(i, lanes); });
  return skipped;
}

template <class P, class G>
int64_t step_typed(const Segment& seg, const StepScalars& s, const DynamicMaps& maps, int64_t begin,
                   int64_t end) {
  if (seg.codec == kLog) return step_quantized<LogPair, P, G>(seg, s, maps, begin, end);
  if (seg.codec == kCompanded) {
    return step_quantized<CompandedPair, P, G>(seg, s, maps, begin, end);
  }
  if (seg.codec == kDynamic) return step_quantized<DynamicPair, P, G>(seg, s, maps, begin, end);
  return step_plain<P, G>(seg, s, maps, begin, end);
}

template <class P>
int64_t step_param(const Segment& seg, const StepScalars& s, const DynamicMaps& maps, int64_t begin,
                   int64_t end) {
  if (seg.grad_dtype == kFP32) return step_typed<P, float>(seg, s, maps, begin, end);
  return step_typed<P, uint16_t>(seg, s, maps, begin, end);
}

inline int64_t step_blocks(const Segment& seg, const StepScalars& s, const DynamicMaps& maps,
                           int64_t begin, int64_t end) {
  if (seg.param_dtype == kFP32) {
    if (seg.grad_dtype == kFP16) return step_typed<Float32, Half>(seg, s, maps, begin, end);
    return step_param<Float32>(seg, s, maps, begin, end);
  }
  if (seg.correction) return step_param<CorrectedBFloat16>(seg, s, maps, begin, end);
  return step_param<BFloat16>(seg, s, maps, begin, end);
}

}  // namespace ZERO8_TARGET
}  // namespace zero8
