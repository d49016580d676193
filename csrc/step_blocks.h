// SPDX-License-Identifier: Apache-2.0
// The fused step: decode, AdamW, encode, in one pass over memory.  The only place where the
// arithmetic of the step is written; equation numbers are those of zero8/reference.py.
//
//     block b:    scan g | decode m, v -> (R1)-(R7), store p -> m', v' to a buffer
//     block b-1:                          encode from the other buffer, store codes
//
// The two lines run interleaved, vector by vector: the update waits for the divider (one square
// root and one division per element), the encoding is integer work that fits into the gaps.  The
// buffers of two blocks (16 bytes per element of a block) stay in the first-level cache.  Memory
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

// --- Parameters and gradients ------------------------------------------------------------------

struct Float32 {
  using Type = float;

  static void store(float* p, Vec::F x, int n) {
    n == Vec::kLanes ? Vec::store(p, x) : Vec::store_n(p, x, n);
  }
};

struct BFloat16 {
  using Type = uint16_t;

  static void store(uint16_t* p, Vec::I x, int n) {
    n == Vec::kLanes ? Vec::store16(p, x) : Vec::store16_n(p, x, n);
  }
};

template <class T>
Vec::F load(const T* x, int n) {
  return n == Vec::kLanes ? Vec::load(x) : Vec::load_n(x, n);
}

// Rounds an fp32 result to the parameter's type and stores it: (R7).
template <class P>
class ParamWriter;

template <>
class ParamWriter<Float32> {
 public:
  ParamWriter(const Segment&, uint32_t) {}
  void operator()(float* p, Vec::F x, int n) { Float32::store(p, x, n); }
};

template <>
class ParamWriter<BFloat16> {
 public:
  ParamWriter(const Segment& seg, uint32_t index)
      : rounding_(seg.rounding), dither_(seg.param_phase, index) {}

  void operator()(uint16_t* p, Vec::F x, int n) {
    const Vec::I bits = Vec::as_int(x);
    const Vec::I rounded = Vec::shr<16>(Vec::addi(bits, threshold(bits)));
    // A finite value that would become infinite is truncated, except when rounding to nearest.
    const Vec::I exponent = Vec::seti(0x7F80);
    const bool stochastic = rounding_ != kNearest;
    const Vec::Mask overflow = Vec::equal(Vec::andi(rounded, exponent), exponent);
    Vec::I high = stochastic ? Vec::choose(overflow, Vec::shr<16>(bits), rounded) : rounded;
    const Vec::Mask nan = Vec::above(magnitude_bits(x), Vec::seti(0x7F800000));
    BFloat16::store(p, Vec::choose(nan, Vec::seti(0x7FC0), high), n);
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

// The step's scalars in every lane.
struct Scalars {
  Vec::F one_minus_beta1, sqrt_one_minus_beta2, inverse_sqrt_correction2, eps;
  Vec::F max_ratio, min_ratio, minus_step_size, decay, l2, grad_sign;
  bool has_l2;

  explicit Scalars(const StepScalars& s)
      : one_minus_beta1(Vec::set(s.one_minus_beta1)),
        sqrt_one_minus_beta2(Vec::set(s.sqrt_one_minus_beta2)),
        inverse_sqrt_correction2(Vec::set(s.inverse_sqrt_correction2)),
        eps(Vec::set(s.eps)),
        max_ratio(Vec::set(s.max_ratio)),
        min_ratio(Vec::set(-s.max_ratio)),
        minus_step_size(Vec::set(-s.step_size)),
        decay(Vec::set(s.decay)),
        l2(Vec::set(s.l2)),
        grad_sign(Vec::set(s.grad_sign)),
        has_l2(s.l2 != 0.0f) {}

  // (R1)
  Vec::F gradient(Vec::F p, Vec::F g) const {
    const Vec::F signed_g = Vec::mul(grad_sign, g);
    return has_l2 ? Vec::fma(l2, p, signed_g) : signed_g;
  }
};

// --- The moments ---------------------------------------------------------------------------------

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

    Vec::F exp_avg(int i, int n) const {
      return decode_m(n == Vec::kLanes ? Vec::load8(m + i) : Vec::load8_n(m + i, n, M::kZeroCode));
    }
    Vec::F exp_avg_sq(int i, int n) const {
      return decode_v(n == Vec::kLanes ? Vec::load8(v + i) : Vec::load8_n(v + i, n, V::kZeroCode));
    }
    void prefetch(int i) const {
      Vec::prefetch(m + i + kPrefetchDistance);
      Vec::prefetch(v + i + kPrefetchDistance);
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
    Sink(const Segment& seg, const DynamicMaps& maps, const Block& b, uint32_t index,
         const float* m_buffer, const float* v_buffer, const MRange& m_range, const VRange& v_range)
        : m(static_cast<uint8_t*>(seg.exp_avg) + b.begin),
          v(static_cast<uint8_t*>(seg.exp_avg_sq) + b.begin),
          m_values(m_buffer),
          v_values(v_buffer),
          count(b.count),
          encode_m(m_range, maps.exp_avg, 0, 0, seg.exp_avg_scale + b.local * M::kScales),
          encode_v(v_range, maps.exp_avg_sq, seg.moment_phase, index,
                   seg.exp_avg_sq_scale + b.local * V::kScales) {}

    void encode(int i) {
      const int n = count - i < Vec::kLanes ? count - i : Vec::kLanes;
      const Vec::I m_code = encode_m(Vec::load(m_values + i));
      const Vec::I v_code = encode_v(Vec::load(v_values + i));
      n == Vec::kLanes ? Vec::store8(m + i, m_code) : Vec::store8_n(m + i, m_code, n);
      n == Vec::kLanes ? Vec::store8(v + i, v_code) : Vec::store8_n(v + i, v_code, n);
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

    Vec::F exp_avg(int i, int n) const { return Vec::mul(load(m + i, n), beta1); }
    Vec::F exp_avg_sq(int i, int n) const { return Vec::mul(load(v + i, n), beta2); }
    void prefetch(int) const {}
  };
};

// --- The step ------------------------------------------------------------------------------------

// Whether every gradient of a block is finite and small enough to be squared.
template <class P, class G>
bool gradients_finite(const P* p, const G* g, int count, const Scalars& s) {
  Vec::I largest = Vec::seti(0);
  for (int i = 0; i < count; i += Vec::kLanes) {
    const int n = count - i < Vec::kLanes ? count - i : Vec::kLanes;
    const Vec::F grad = s.has_l2 ? s.gradient(load(p + i, n), load(g + i, n)) : load(g + i, n);
    largest = Vec::maxu(largest, magnitude_bits(grad));  // orders NaN above infinity
  }
  return Vec::reduce_maxu(largest) < kGradientLimitBits;
}

// One block of the update; `vector(i)` does elements i .. i + kLanes - 1.
template <class Moments, class P, class G>
struct Update {
  const Scalars& s;
  typename Moments::Source source;
  typename P::Type* p;
  const typename G::Type* g;
  int count;
  ParamWriter<P> write;

  Update(const Segment& seg, const Scalars& scalars, const StepScalars& raw,
         const DynamicMaps& maps, const Block& b, uint32_t index)
      : s(scalars),
        source(seg, raw, maps, b),
        p(static_cast<typename P::Type*>(seg.param) + b.begin),
        g(static_cast<const typename G::Type*>(seg.grad) + b.begin),
        count(b.count),
        write(seg, index) {}

  // m' and v' (its root where the code stores roots) of elements i ..; p is updated in memory.
  void vector(int i, Vec::F& m, Vec::F& v) {
    const int n = count - i < Vec::kLanes ? count - i : Vec::kLanes;
    Vec::prefetch(p + i + kPrefetchDistance);
    Vec::prefetch(g + i + kPrefetchDistance);
    source.prefetch(i);
    const Vec::F param = load(p + i, n);
    const Vec::F grad = s.gradient(param, load(g + i, n));
    m = Vec::fma(s.one_minus_beta1, grad, source.exp_avg(i, n));  // (R2)
    const Vec::F h = Vec::mul(s.sqrt_one_minus_beta2, grad);
    const Vec::F decayed = source.exp_avg_sq(i, n);
    v = Vec::fma(h, h, Moments::kRoot ? Vec::mul(decayed, decayed) : decayed);  // (R3)
    const Vec::F root = Vec::sqrt(v);
    const Vec::F denominator = Vec::fma(root, s.inverse_sqrt_correction2, s.eps);  // (R4)
    const Vec::F ratio = Vec::div(m, denominator);
    const Vec::F clipped = Vec::min(s.max_ratio, Vec::max(s.min_ratio, ratio));       // (R5)
    write(p + i, Vec::fma(s.minus_step_size, clipped, Vec::mul(s.decay, param)), n);  // (R6)
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
    if (!gradients_finite(update.p, update.g, b.count, s)) {
      ++skipped;
      continue;
    }
    for (int i = 0; i < b.count; i += Vec::kLanes) {
      const int n = b.count - i < Vec::kLanes ? b.count - i : Vec::kLanes;
      Vec::F m, v;
      update.vector(i, m, v);
      Float32::store(update.source.m + i, m, n);
      Float32::store(update.source.v + i, v, n);
    }
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
    if (!gradients_finite(update.p, update.g, b.count, s)) {
      ++skipped;
      continue;
    }
    float* m_values = buffer + half * 2 * stride;
    float* v_values = m_values + stride;
    typename Moments::MRange m_range;
    typename Moments::VRange v_range;
    const auto update_vector = [&](int i) {
      Vec::F m, v;
      update.vector(i, m, v);
      Vec::store(m_values + i, m);
      Vec::store(v_values + i, v);
      m_range.add(m);
      v_range.add(v);
    };
    const int both = b.count < sink.count ? b.count : sink.count;
    int i = 0;
    for (; i < both; i += Vec::kLanes) {
      update_vector(i);
      sink.encode(i);
    }
    for (int j = i; j < sink.count; j += Vec::kLanes) sink.encode(j);
    for (; i < b.count; i += Vec::kLanes) update_vector(i);
    sink = Sink(seg, maps, b, index, m_values, v_values, m_range, v_range);
    half = 1 - half;
  }
  for (int i = 0; i < sink.count; i += Vec::kLanes) sink.encode(i);
  return skipped;
}

template <class P, class G>
int64_t step_typed(const Segment& seg, const StepScalars& s, const DynamicMaps& maps, int64_t begin,
                   int64_t end) {
  using DynamicPair = Quantized<Dynamic<true>, Dynamic<false>>;
  using CompandedPair = Quantized<Companded<true, 8, 4, false>, Companded<false, 8, 5, true>>;
  using LogPair = Quantized<Companded<true, 4, 5, false>, LogRoot>;
  if (seg.codec == kLog) return step_quantized<LogPair, P, G>(seg, s, maps, begin, end);
  if (seg.codec == kCompanded) {
    return step_quantized<CompandedPair, P, G>(seg, s, maps, begin, end);
  }
  if (seg.codec == kDynamic) return step_quantized<DynamicPair, P, G>(seg, s, maps, begin, end);
  return step_plain<P, G>(seg, s, maps, begin, end);
}

inline int64_t step_blocks(const Segment& seg, const StepScalars& s, const DynamicMaps& maps,
                           int64_t begin, int64_t end) {
  const bool wide_param = seg.param_dtype == kFP32, wide_grad = seg.grad_dtype == kFP32;
  if (wide_param && wide_grad) return step_typed<Float32, Float32>(seg, s, maps, begin, end);
  if (wide_param) return step_typed<Float32, BFloat16>(seg, s, maps, begin, end);
  if (wide_grad) return step_typed<BFloat16, Float32>(seg, s, maps, begin, end);
  return step_typed<BFloat16, BFloat16>(seg, s, maps, begin, end);
}

}  // namespace ZERO8_TARGET
}  // namespace zero8
