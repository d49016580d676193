// SPDX-License-Identifier: Apache-2.0
// The fused step on the CPU: decode, update (update.h), encode, in one pass over memory.
//
//     block b:    decode m, v -> (R1)-(R4) -> m', v' and the denominator to a buffer
//     block b:    scales of the moments
//     block b-1:  (R5)-(R7), store p; encode m', v' from the other buffer, store codes
//
// The first loop has the square root and the last one the division, so that neither waits for the
// divider alone; the scales are a chain of dependent operations, which the last loop over the
// block before hides.  The buffers of two blocks (24 bytes per element of a block) stay in the
// first-level cache.  Memory sees, per fp32 parameter, 16 bytes: p, g and two codes read, p and two
// codes written.
//
// Nothing of a block is written before its gradients and new moments are known to be finite.
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
inline Vec::I load8s(const uint8_t* x, First tail) { return Vec::load8s_n(x, tail.n); }
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

template <bool kPairs>
ZERO8_INLINE inline void load_two(const uint16_t* p, Vec::F* x) {
  load_two<kPairs, Vec>(p, x);
}
template <bool, class T>
ZERO8_INLINE inline void load_two(const T* p, Vec::F* x) {
  x[0] = Vec::load(p);
  x[1] = Vec::load(p + Vec::kLanes);
}

template <bool kPairs, class Encoder>
ZERO8_INLINE inline void encode_four(const Encoder& encode, const float* values,
                                     const Vec::I* threshold, uint8_t* codes) {
  Vec::F x[4];
  Vec::I code[4];
  for (int k = 0; k < 4; ++k) {
    x[k] = Vec::load(values + k * Vec::kLanes);
    code[k] = encode(x[k], threshold[k]);
  }
  if constexpr (Encoder::kLeft == Left::kSign) {
    Vec::store8x4_signed(codes, code[0], code[1], code[2], code[3], x, kPairs);
  } else if constexpr (Encoder::kLeft == Left::kUnlessZero) {
    Vec::store8x4_unless_zero(codes, code[0], code[1], code[2], code[3], x, kPairs);
  } else {
    Vec::store8x4(codes, code[0], code[1], code[2], code[3], kPairs);
  }
}

template <bool kPairs, class Sink>
ZERO8_INLINE inline void encode_chunk(Sink& sink, int i) {
  Vec::I threshold[4];
  for (int k = 0; k < 4; ++k) threshold[k] = sink.dither.next_of_two(k % 2);
  encode_four<kPairs>(sink.encode_m, sink.m_values + i, threshold, sink.m + i);
  encode_four<kPairs>(sink.encode_v, sink.v_values + i, threshold, sink.v + i);
}

// --- Blocks --------------------------------------------------------------------------------------

// The blocks of a segment in order, from number `local` on: what block_at says, but the divisions
// are done once.  They would stand in the way of every block's first loads.
class BlockWalk {
 public:
  BlockWalk(const Segment& seg, int64_t local)
      : numel_(seg.numel),
        row_length_(seg.row_length),
        block_size_(seg.block_size),
        block_(block_at(seg, local)) {
    const int64_t in_row = (seg.first + block_.begin + block_.count) % row_length_;
    left_of_row_ = in_row == 0 ? 0 : row_length_ - in_row;
  }
  const Block& block() const { return block_; }
  void advance() {
    const int64_t begin = block_.begin + block_.count;
    if (left_of_row_ == 0) left_of_row_ = row_length_;
    int64_t count = left_of_row_ < block_size_ ? left_of_row_ : block_size_;
    if (count > numel_ - begin) count = numel_ - begin;
    left_of_row_ -= count;
    block_ = {begin, block_.local + 1, static_cast<int>(count), 0};
  }

 private:
  int64_t numel_, row_length_, left_of_row_, block_size_;
  Block block_;
};

// What a step reads of one block.
template <class Moments, class P, class G>
struct Reader {
  const Scalars& s;
  typename Moments::Source source;
  P param;
  const G* g;
  int count;

  Reader(const Segment& seg, const Scalars& scalars, const StepScalars& raw,
         const DynamicMaps& maps, const Block& b)
      : s(scalars),
        source(seg, raw, maps, b),
        param(seg, b),
        g(static_cast<const G*>(seg.grad) + b.begin),
        count(b.count) {}

  // (R1)
  template <bool kPairs, bool kL2>
  ZERO8_INLINE void two_gradients(int i, Vec::F* x) const {
    load_two<kPairs>(g + i, x);
    if constexpr (kL2) {
      Vec::F p[2];
      param.template read_two<kPairs>(i, p);
      for (int k = 0; k < 2; ++k) x[k] = s.gradient(p[k], x[k]);
    }
  }
  template <class Lanes>
  ZERO8_INLINE Vec::F gradient(int i, Lanes lanes) const {
    const Vec::F x = Vec::flushed(load(g + i, lanes));
    Vec vec;
    return s.has_l2 ? s.gradient(param.read(vec, i, lanes), x) : x;
  }

  // Whether every gradient is finite and small enough to be squared.
  bool is_finite() const {
    Vec::I largest = Vec::seti(0);
    int i = 0;
    if (!s.has_l2) {
      for (; i + kChunk <= count; i += kChunk)
        largest = Vec::maxu(largest, largest_of_chunk(g + i));
    }
    for_vectors(i, count, [&](int k, auto lanes) ZERO8_INLINE {
      largest = Vec::maxu(largest, magnitude_bits(gradient(k, lanes)));
    });
    return Vec::reduce_maxu(largest) < kGradientLimitBits;
  }
};

// Updates the parameters of one vector, by m' and denominators, in memory.
template <class P, class Lanes>
ZERO8_INLINE inline void step_param(const Scalars& s, P& param, int i, Lanes lanes, Vec::F m,
                                    Vec::F denominator) {
  Vec vec;
  param.write(i, advanced_param(vec, s, param.read(vec, i, lanes), m, denominator), lanes);
}

// A block whose moments are updated in a buffer, and nothing of it in memory.
template <class Moments, class P, bool kPairs>
struct Pending {
  P param;
  typename Moments::Sink sink;
  const float* denominators = nullptr;
  int count = 0;

  ZERO8_INLINE void finish(const Scalars& s) {
    Vec vec;
    int i = 0;
    start(i, kPairs);
    for (; i + kChunk <= count; i += kChunk) {
      prefetch_chunk(param.p + i);
      for (int at = i; at < i + kChunk; at += 2 * Vec::kLanes) {
        Vec::F p[2];
        param.template read_two<kPairs>(at, p);
        for (int k = 0; k < 2; ++k) {
          const int own = at + k * Vec::kLanes;
          p[k] = advanced_param(vec, s, p[k], Vec::load(sink.m_values + own),
                                Vec::load(denominators + own));
        }
        param.template write_two<kPairs>(at, p);
      }
      encode_chunk<kPairs>(sink, i);
    }
    if (i == count) return;
    start(i, false);
    for_vectors(i, count, [&](int k, auto lanes) ZERO8_INLINE {
      step_param(s, param, k, lanes, Vec::load(sink.m_values + k), Vec::load(denominators + k));
      sink.encode(k, lanes);
    });
  }

 private:
  ZERO8_INLINE void start(int i, bool pairs) {
    param.start(i, pairs);
    sink.dither.start(i, pairs);
  }
};

// --- The step ------------------------------------------------------------------------------------

// Whether the scales of a block's m are finite.  If so no m is NaN, of which an MRange need not
// tell.
template <class M>
ZERO8_INLINE inline bool has_finite_scales(const float* scales) {
  bool finite = true;
  for (int k = 0; k < M::kScales; ++k) finite &= (bits_of(scales[k]) & ~kSignBit) < kInfinityBits;
  return finite;
}

// Whether a block with these largest patterns of |m'| and v' has finite gradients and moments.
template <class Moments, class P, class G>
ZERO8_INLINE inline bool can_step(const Reader<Moments, P, G>& reader, uint32_t m, uint32_t v) {
  return are_moments(m, v) && (v < reader.s.large_square || reader.is_finite());
}

template <class P, class G>
int64_t step_plain(const Segment& seg, const StepScalars& raw, const DynamicMaps& maps,
                   int64_t begin, int64_t end) {
  const Scalars s(raw);
  // m', v' and denominators of a block; its last vector may run over.
  alignas(64) float buffer[3 * (kMaxBlockSize + Vec::kLanes)];
  const int stride = seg.block_size + Vec::kLanes;
  float *const new_m = buffer, *const new_v = new_m + stride, *const denominators = new_v + stride;
  int64_t skipped = 0;
  BlockWalk walk(seg, begin);
  for (int64_t local = begin; local < end; ++local, walk.advance()) {
    Reader<Plain, P, G> reader(seg, s, raw, maps, walk.block());
    Vec::I m_largest = Vec::seti(0), v_largest = Vec::seti(0);
    for_vectors(0, reader.count, [&](int i, auto lanes) ZERO8_INLINE {
      Vec vec;
      Vec::F m = reader.source.exp_avg(vec, i, lanes), v = reader.source.exp_avg_sq(vec, i, lanes);
      if (i % kChunk == 0) {
        // The processor's own prefetching does for the four streams of moments.
        prefetch_chunk(reader.param.p + i);
        prefetch_chunk(reader.g + i);
      }
      Vec::store(denominators + i, advance_moments(vec, s, reader.gradient(i, lanes), m, v));
      Vec::store(new_m + i, m);
      Vec::store(new_v + i, v);
      m_largest = Vec::maxu(m_largest, magnitude_bits(m));
      v_largest = Vec::maxu(v_largest, Vec::as_int(v));
    });
    if (!can_step(reader, Vec::reduce_maxu(m_largest), Vec::reduce_maxu(v_largest))) {
      ++skipped;
      continue;
    }
    for_vectors(0, reader.count, [&](int i, auto lanes) ZERO8_INLINE {
      const Vec::F m = Vec::load(new_m + i);
      step_param(s, reader.param, i, lanes, m, Vec::load(denominators + i));
      store(reader.source.m + i, m, lanes);
      store(reader.source.v + i, Vec::load(new_v + i), lanes);
    });
  }
  return skipped;
}

// m', v' and denominators of one block, and what its scales depend on.
template <class Moments>
struct Advanced {
  float *m, *v, *denominators;
  typename Moments::MRange m_range;
  typename Moments::VRange v_range;

  ZERO8_INLINE void advance(const Scalars& s, int i, Vec::F g, Vec::F m_i, Vec::F v_i) {
    Vec vec;
    const Vec::F denominator = advance_moments(vec, s, g, m_i, v_i);
    Vec::store(m + i, m_i);
    Vec::store(v + i, v_i);
    Vec::store(denominators + i, denominator);
    m_range.add(m_i);
    v_range.add(v_i);
  }
};

// The whole chunks of a block; returns where they end.  kL2 instead of a question in the loop.
template <bool kPairs, bool kL2, class Moments, class P, class G>
ZERO8_INLINE inline int advance_chunks(const Reader<Moments, P, G>& reader, Advanced<Moments>& to) {
  int i = 0;
  for (; i + kChunk <= reader.count; i += kChunk) {
    prefetch_chunk(reader.g + i);
    prefetch_chunk(reader.source.m + i);
    prefetch_chunk(reader.source.v + i);
    const auto m_chunk = reader.source.decode_m.chunk(reader.source.m + i);
    const auto v_chunk = reader.source.decode_v.chunk(reader.source.v + i);
    for (int k = 0; k < 4; k += 2) {
      const int at = i + k * Vec::kLanes;
      Vec::F g[2], m[2], v[2];
      reader.template two_gradients<kPairs, kL2>(at, g);
      m_chunk.template two<kPairs>(k, m);
      v_chunk.template two<kPairs>(k, v);
      to.advance(reader.s, at, g[0], m[0], v[0]);
      to.advance(reader.s, at + Vec::kLanes, g[1], m[1], v[1]);
    }
  }
  return i;
}

template <class Moments, class P, class G>
int64_t step_quantized(const Segment& seg, const StepScalars& raw, const DynamicMaps& maps,
                       int64_t begin, int64_t end) {
  // Values lie in the buffer as they come: the whole chunks perhaps as pairs, the tail in order.
  constexpr bool kPairs = Moments::kHasPairs && P::kHasPairs && sizeof(G) == sizeof(uint16_t);
  const Scalars s(raw);
  // Two blocks of m', v' and denominators, one behind the other; the last vector of a block may run
  // over.
  alignas(64) float buffer[6 * (kMaxBlockSize + Vec::kLanes)];
  const int stride = seg.block_size + Vec::kLanes;
  Pending<Moments, P, kPairs> pending;
  int64_t skipped = 0;
  int half = 0;
  BlockWalk walk(seg, begin);
  for (int64_t local = begin; local < end; ++local, walk.advance()) {
    const Block b = walk.block();
    const Reader<Moments, P, G> reader(seg, s, raw, maps, b);
    float* const values = buffer + half * 3 * stride;
    Advanced<Moments> to{values, values + stride, values + 2 * stride, {}, {}};
    const int whole = s.has_l2 ? advance_chunks<kPairs, true>(reader, to)
                               : advance_chunks<kPairs, false>(reader, to);
    for_vectors(whole, b.count, [&](int i, auto lanes) ZERO8_INLINE {
      Vec vec;
      to.advance(s, i, reader.gradient(i, lanes), reader.source.exp_avg(vec, i, lanes),
                 reader.source.exp_avg_sq(vec, i, lanes));
    });
    using M = typename Moments::MCode;
    if (!has_finite_scales<M>(seg.exp_avg_scale + b.local * M::kScales) ||
        !can_step(reader, to.m_range.largest(), to.v_range.largest())) {
      ++skipped;
      continue;
    }
    const typename Moments::Sink sink(seg, raw, maps, b, 0, b.count, to.m, to.v, to.m_range,
                                      to.v_range);
    pending.finish(s);
    pending = {reader.param, sink, to.denominators, b.count};
    half = 1 - half;
  }
  pending.finish(s);
  return skipped;
}

template <class P, class G>
int64_t step_typed(const Segment& seg, const StepScalars& s, const DynamicMaps& maps, int64_t begin,
                   int64_t end) {
  if (seg.codec == kLog) return step_quantized<LogPair, P, G>(seg, s, maps, begin, end);
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
  if (seg.rounding == kDither) return step_param<BFloat16<true>>(seg, s, maps, begin, end);
  return step_param<BFloat16<false>>(seg, s, maps, begin, end);
}

}  // namespace ZERO8_TARGET
}  // namespace zero8
