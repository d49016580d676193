// SPDX-License-Identifier: Apache-2.0
// The fused step: decode, AdamW, encode, in one pass over memory.  The only place where the
// arithmetic of the step is written; equation numbers are those of zero8/reference.py.
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
// Bit equality across targets rests on: one rounding per operation, fused operations written as
// Vec::fma, -ffp-contract=off, reductions over integers only, and flush to zero, which the caller
// has set.  Included once per target; ZERO8_TARGET names the namespace, and nothing here is a
// template of the standard library, which the linker would merge across targets.
#include <cstdint>

#include "blocks.h"
#include "codes.h"
#include "format.h"

namespace zero8 {
namespace ZERO8_TARGET {

// A gradient at or above this, or NaN, counts as not finite: its square would overflow.
constexpr uint32_t kGradientLimitBits = (127 + 63) << 23;

constexpr int64_t kPrefetchDistance = 512;  // elements
constexpr int kChunk = 4 * Vec::kLanes;

// --- Whole vectors and tails -------------------------------------------------------------------

// Which lanes of a vector count: all, known to the compiler, or the first n of a block's tail.
struct All {};
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
Vec::F load(const T* x, All) {
  return Vec::load(x);
}
template <class T>
Vec::F load(const T* x, First tail) {
  return Vec::load_n(x, tail.n);
}
inline Vec::I load8(const uint8_t* x, uint32_t, All) { return Vec::load8(x); }
inline Vec::I load8(const uint8_t* x, uint32_t fill, First tail) {
  return Vec::load8_n(x, tail.n, fill);
}
inline void store(float* p, Vec::F x, All) { Vec::store(p, x); }
inline void store(float* p, Vec::F x, First tail) { Vec::store_n(p, x, tail.n); }
inline void store16(uint16_t* p, Vec::I x, All) { Vec::store16(p, x); }
inline void store16(uint16_t* p, Vec::I x, First tail) { Vec::store16_n(p, x, tail.n); }
inline void store8(uint8_t* p, Vec::I x, All) { Vec::store8(p, x); }
inline void store8(uint8_t* p, Vec::I x, First tail) { Vec::store8_n(p, x, tail.n); }

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
inline Vec::I largest_of_chunk(const uint16_t* x) {
  const Vec::I magnitude = Vec::seti(0x7FFF7FFF);
  const Vec::I ab = Vec::andi(Vec::load_pairs(x), magnitude);
  const Vec::I cd = Vec::andi(Vec::load_pairs(x + 2 * Vec::kLanes), magnitude);
  const Vec::I pairs = Vec::maxu16(ab, cd);
  return Vec::maxu(Vec::shl<16>(pairs), Vec::andi(pairs, Vec::seti(0xFFFF0000)));
}

// --- Parameters and gradients ------------------------------------------------------------------

inline Vec::Mask is_nan(Vec::F x) { return Vec::above(magnitude_bits(x), Vec::seti(0x7F800000)); }

// Whether any rounding to bfloat16 could overflow, or the value is not finite.
inline bool any_extreme(Vec::I bits) {
  return Vec::any(Vec::above(Vec::andi(bits, Vec::seti(~kSignBit)), Vec::seti(0x7F7EFFFF)));
}

// Whether the upper 16 bits of a float, here in the lower half, are those of infinity or NaN.
inline Vec::Mask is_beyond(Vec::I high) {
  const Vec::I exponent = Vec::seti(0x7F80);
  return Vec::equal(Vec::andi(high, exponent), exponent);
}

// The parameters of one block: how they are read as float32, and rounded and written (R7).
class Float32 {
 public:
  float* p;

  Float32(const Segment& seg, const Block& b, uint32_t)
      : p(static_cast<float*>(seg.param) + b.begin) {}
  template <class Lanes>
  Vec::F read(int i, Lanes lanes) const {
    return load(p + i, lanes);
  }
  template <class Lanes>
  void write(int i, Vec::F x, Lanes lanes) {
    store(p + i, x, lanes);
  }
};

class BFloat16 {
 public:
  uint16_t* p;

  BFloat16(const Segment& seg, const Block& b, uint32_t index)
      : p(static_cast<uint16_t*>(seg.param) + b.begin),
        rounding_(seg.rounding),
        dither_(seg.param_phase, index) {}
  template <class Lanes>
  Vec::F read(int i, Lanes lanes) const {
    return load(p + i, lanes);
  }
  template <class Lanes>
  void write(int i, Vec::F x, Lanes lanes) {
    const Vec::I bits = Vec::as_int(x);
    Vec::I high = Vec::shr<16>(Vec::addi(bits, threshold(bits)));
    if (any_extreme(bits)) {
      // A finite value that would become infinite is truncated, except when rounding to nearest.
      if (rounding_ != kNearest) high = Vec::choose(is_beyond(high), Vec::shr<16>(bits), high);
      high = Vec::choose(is_nan(x), Vec::seti(0x7FC0), high);
    }
    store16(p + i, high, lanes);
  }

 private:
  Vec::I threshold(Vec::I bits) {
    if (rounding_ == kNearest) {
      return Vec::addi(Vec::seti(0x7FFF), Vec::andi(Vec::shr<16>(bits), Vec::seti(1)));
    }
    Vec::I r = dither_.next();
    if (rounding_ == kHash) {
      r = Vec::muli(Vec::xori(r, Vec::shr<16>(r)), Vec::seti(0x7FEB352Du));
      r = Vec::muli(Vec::xori(r, Vec::shr<15>(r)), Vec::seti(0x846CA68Bu));
      r = Vec::xori(r, Vec::shr<16>(r));
    }
    return Vec::shr<16>(r);
  }

  int32_t rounding_;
  Dither dither_;
};

// A bfloat16 and the 8 bits below it as a signed remainder: a 24-bit weight, without noise.
class CorrectedBFloat16 {
 public:
  uint16_t* p;

  CorrectedBFloat16(const Segment& seg, const Block& b, uint32_t)
      : p(static_cast<uint16_t*>(seg.param) + b.begin),
        correction_(static_cast<uint8_t*>(seg.correction) + b.begin) {}
  template <class Lanes>
  Vec::F read(int i, Lanes lanes) const {
    const Vec::I c = load8(correction_ + i, 0, lanes);
    const Vec::I sign = Vec::shl<9>(Vec::andi(c, Vec::seti(128)));
    const Vec::I bits = Vec::addi(Vec::as_int(load(p + i, lanes)), Vec::shl<8>(c));
    return Vec::as_float(Vec::subi(bits, sign));
  }
  template <class Lanes>
  void write(int i, Vec::F x, Lanes lanes) {
    // 24 bits, rounded half up in magnitude; the bfloat16 is the nearest one to them.
    const Vec::I bits = Vec::as_int(x);
    const Vec::I wide = Vec::shr<8>(Vec::addi(bits, Vec::seti(128)));
    Vec::I high = Vec::shr<8>(Vec::addi(wide, Vec::seti(128)));
    Vec::I low = Vec::andi(wide, Vec::seti(255));
    if (any_extreme(bits)) {
      // Where the nearest is infinite: the largest finite one and the largest remainder.
      const Vec::Mask beyond = is_beyond(high);
      high = Vec::choose(beyond, Vec::shr<16>(bits), high);
      low = Vec::choose(beyond, Vec::minu(low, Vec::seti(127)), low);
      high = Vec::choose(is_nan(x), Vec::seti(0x7FC0), high);
      low = Vec::choose(is_nan(x), Vec::seti(0), low);
    }
    store16(p + i, high, lanes);
    store8(correction_ + i, low, lanes);
  }

 private:
  uint8_t* correction_;
};

// The step's scalars in every lane.
struct Scalars {
  Vec::F one_minus_beta1, sqrt_one_minus_beta2, inverse_sqrt_correction2, eps;
  Vec::F max_ratio, min_ratio, minus_step_size, decay, l2, grad_sign;
  bool has_l2;

  explicit Scalars(const StepScalars& s)
      : one_minus_beta1(
            Vec::set(s.l2 == 0.0f ? s.grad_sign * s.one_minus_beta1 : s.one_minus_beta1)),
        sqrt_one_minus_beta2(Vec::set(s.sqrt_one_minus_beta2)),
        inverse_sqrt_correction2(Vec::set(s.inverse_sqrt_correction2)),
        eps(Vec::set(s.eps)),
        max_ratio(Vec::set(s.max_ratio)),
        min_ratio(Vec::set(-s.max_ratio)),
        minus_step_size(Vec::set(-s.step_size)),
        decay(Vec::set(s.decay)),
        l2(Vec::set(s.l2)),
        grad_sign(Vec::set(s.grad_sign)),
        has_l2((bits_of(s.l2) & ~kSignBit) != 0) {}  // an integer test is cheaper in the loop

  // (R1).  Without L2 the sign matters to m only: one_minus_beta1 carries it.
  Vec::F gradient(Vec::F p, Vec::F g) const {
    return has_l2 ? Vec::fma(l2, p, Vec::mul(grad_sign, g)) : g;
  }
};

// --- The moments ---------------------------------------------------------------------------------

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

template <class Encoder>
ZERO8_INLINE inline Vec::I encode_one(Encoder& encode, const float* values) {
  const Vec::F x = Vec::load(values);
  return completed<Encoder::kLeft>(encode(x), x);
}

// Both moments in 8 bits.
template <class M, class V>
struct Quantized {
  static constexpr bool kRoot = V::kStoresRoot;
  static constexpr bool kBuffered = true;
  using MRange = typename M::Range;
  using VRange = typename V::Range;

  struct Source {
    const uint8_t *m, *v;
    typename M::Decoder decode_m;
    typename V::Decoder decode_v;

    Source(const Segment& seg, const StepScalars& s, const DynamicMaps& maps, const Block& b)
        : m(static_cast<const uint8_t*>(seg.exp_avg) + b.begin),
          v(static_cast<const uint8_t*>(seg.exp_avg_sq) + b.begin),
          decode_m(seg.exp_avg_scale + b.local * M::kScales, s.beta1, maps.exp_avg),
          decode_v(seg.exp_avg_sq_scale + b.local * V::kScales, kRoot ? s.sqrt_beta2 : s.beta2,
                   maps.exp_avg_sq) {}

    template <class Lanes>
    Vec::F exp_avg(int i, Lanes lanes) const {
      return decode_m(load8(m + i, M::kZeroCode, lanes));
    }
    template <class Lanes>
    Vec::F exp_avg_sq(int i, Lanes lanes) const {
      return decode_v(load8(v + i, V::kZeroCode, lanes));
    }
    ZERO8_INLINE auto exp_avg_chunk(int i) const { return decode_m.chunk(m + i); }
    ZERO8_INLINE auto exp_avg_sq_chunk(int i) const { return decode_v.chunk(v + i); }
    ZERO8_INLINE void prefetch(int i) const {
      prefetch_chunk(m + i);
      prefetch_chunk(v + i);
    }
  };

  // Encodes one block out of a buffer, vector by vector.
  struct Sink {
    uint8_t *m, *v;
    const float *m_values, *v_values;
    int count;
    typename M::Encoder encode_m;
    typename V::Encoder encode_v;

    Sink() : m(nullptr), v(nullptr), m_values(nullptr), v_values(nullptr), count(0) {}
    Sink(const Segment& seg, const StepScalars& s, const DynamicMaps& maps, const Block& b,
         uint32_t index, const float* m_buffer, const float* v_buffer, const MRange& m_range,
         const VRange& v_range)
        : m(static_cast<uint8_t*>(seg.exp_avg) + b.begin),
          v(static_cast<uint8_t*>(seg.exp_avg_sq) + b.begin),
          m_values(m_buffer),
          v_values(v_buffer),
          count(b.count),
          encode_m(m_range, maps.exp_avg, {m_buffer, b.count, 0, 0, s.settling},
                   seg.exp_avg_scale + b.local * M::kScales),
          encode_v(v_range, maps.exp_avg_sq, {v_buffer, b.count, seg.moment_phase, index, 0.0f},
                   seg.exp_avg_sq_scale + b.local * V::kScales) {}

    template <class Lanes>
    ZERO8_INLINE void encode(int i, Lanes lanes) {
      store8(m + i, encode_one(encode_m, m_values + i), lanes);
      store8(v + i, encode_one(encode_v, v_values + i), lanes);
    }
    ZERO8_INLINE void encode_chunk(int i) {
      encode_four(encode_m, m_values + i, m + i);
      encode_four(encode_v, v_values + i, v + i);
    }
  };
};

// Both moments in float32: parameters that are too small or were asked to stay so.
struct Plain {
  static constexpr bool kRoot = false;
  static constexpr bool kBuffered = false;

  struct Source {
    float *m, *v;
    Vec::F beta1, beta2;

    Source(const Segment& seg, const StepScalars& s, const DynamicMaps&, const Block& b)
        : m(static_cast<float*>(seg.exp_avg) + b.begin),
          v(static_cast<float*>(seg.exp_avg_sq) + b.begin),
          beta1(Vec::set(s.beta1)),
          beta2(Vec::set(s.beta2)) {}

    template <class Lanes>
    Vec::F exp_avg(int i, Lanes lanes) const {
      return Vec::mul(load(m + i, lanes), beta1);
    }
    template <class Lanes>
    Vec::F exp_avg_sq(int i, Lanes lanes) const {
      return Vec::mul(load(v + i, lanes), beta2);
    }
    // The processor's own prefetching does for four plain streams.
    ZERO8_INLINE void prefetch(int) const {}
  };
};

// --- The step ------------------------------------------------------------------------------------

// One block of the update; `vector(i, lanes)` does the elements of one vector.
template <class Moments, class P, class G>
struct Update {
  const Scalars s;
  typename Moments::Source source;
  P param;
  const G* g;
  int count;

  Update(const Segment& seg, const Scalars& scalars, const StepScalars& raw,
         const DynamicMaps& maps, const Block& b, uint32_t index)
      : s(scalars),
        source(seg, raw, maps, b),
        param(seg, b, index),
        g(static_cast<const G*>(seg.grad) + b.begin),
        count(b.count) {}

  // Whether every gradient is finite and small enough to be squared.
  bool finite() const {
    Vec::I largest = Vec::seti(0);
    int i = 0;
    if (!s.has_l2) {
      for (; i + kChunk <= count; i += kChunk)
        largest = Vec::maxu(largest, largest_of_chunk(g + i));
    }
    for_vectors(i, count, [&](int k, auto lanes) ZERO8_INLINE {
      Vec::F grad = load(g + k, lanes);
      if (s.has_l2) grad = s.gradient(param.read(k, lanes), grad);
      largest = Vec::maxu(largest, magnitude_bits(grad));  // orders NaN above infinity
    });
    return Vec::reduce_maxu(largest) < kGradientLimitBits;
  }

  // Inlined before GCC looks for functions without effects, whose calls it removes.
  ZERO8_INLINE void prefetch(int i) const {
    prefetch_chunk(param.p + i);
    prefetch_chunk(g + i);
    source.prefetch(i);
  }

  // Turns the decayed moments into m' and v' (its root where the code stores roots); the parameter
  // is updated in memory.
  template <class Lanes>
  ZERO8_INLINE void vector(int i, Lanes lanes, Vec::F& m, Vec::F& v) {
    const Vec::F p = param.read(i, lanes);
    const Vec::F grad = s.gradient(p, load(g + i, lanes));
    m = Vec::fma(s.one_minus_beta1, grad, m);  // (R2)
    const Vec::F h = Vec::mul(s.sqrt_one_minus_beta2, grad);
    const Vec::F decayed = v;
    v = Vec::fma(h, h, Moments::kRoot ? Vec::mul(decayed, decayed) : decayed);  // (R3)
    const Vec::F root = Vec::sqrt(v);
    const Vec::F denominator = Vec::fma(root, s.inverse_sqrt_correction2, s.eps);  // (R4)
    const Vec::F ratio = Vec::div(m, denominator);
    const Vec::F clipped = Vec::min(s.max_ratio, Vec::max(s.min_ratio, ratio));         // (R5)
    param.write(i, Vec::fma(s.minus_step_size, clipped, Vec::mul(s.decay, p)), lanes);  // (R6)
    if (Moments::kRoot) v = root;
  }
};

inline uint32_t dither_index(const Segment& seg, const Block& b) {
  return static_cast<uint32_t>(seg.first + b.begin);
}

template <class P, class G>
int64_t step_plain(const Segment& seg, const StepScalars& raw, const DynamicMaps& maps,
                   int64_t begin, int64_t end) {
  const Scalars s(raw);
  int64_t skipped = 0;
  for (int64_t local = begin; local < end; ++local) {
    const Block b = block_at(seg, local);
    Update<Plain, P, G> update(seg, s, raw, maps, b, dither_index(seg, b));
    if (!update.finite()) {
      ++skipped;
      continue;
    }
    for_vectors(0, b.count, [&](int i, auto lanes) ZERO8_INLINE {
      Vec::F m = update.source.exp_avg(i, lanes), v = update.source.exp_avg_sq(i, lanes);
      if (i % kChunk == 0) update.prefetch(i);
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
    if (!update.finite()) {
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
      update.prefetch(i);
      const auto m = update.source.exp_avg_chunk(i);
      const auto v = update.source.exp_avg_sq_chunk(i);
      for (int k = 0; k < 4; ++k) update_decoded(i + k * Vec::kLanes, All(), m(k), v(k));
      sink.encode_chunk(i);
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
  using DynamicPair = Quantized<Dynamic<true>, Dynamic<false>>;
  using CompandedPair = Quantized<Companded<true, 8, 4, false>, Companded<false, 8, 5, true>>;
  using LogPair = Quantized<Adaptive, LogRoot>;
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
  if (seg.param_dtype == kFP32) return step_param<Float32>(seg, s, maps, begin, end);
  if (seg.correction) return step_param<CorrectedBFloat16>(seg, s, maps, begin, end);
  return step_param<BFloat16>(seg, s, maps, begin, end);
}

}  // namespace ZERO8_TARGET
}  // namespace zero8
