// SPDX-License-Identifier: Apache-2.0
// The update of AdamW in terms of Vec, between decoding and encoding.  The only place where the
// arithmetic of the step is written, for the CPU and for CUDA; equation numbers are those of
// zero8/spec/reference.py.
//
// Use Vec::mul_far and Vec::fma_far only where the result is known to be 0 or at least 2^-126: they
// skip the check for tiny results on targets that need one.
//
// Bit equality across targets rests on: one rounding per operation, fused operations written as
// Vec::fma, no contraction by the compiler, reductions over integers only, and flush to zero.
// Included once per target, so in the target's namespace.
#include <cstdint>

#include "blocks.h"
#include "codes.h"
#include "format.h"

namespace zero8 {
namespace ZERO8_TARGET {

// A gradient at or above this, or NaN, counts as not finite: its square would overflow.
constexpr uint32_t kGradientLimitBits = (127 + 63) << 23;

// Which lanes of a vector count: all, known to the compiler.  step_blocks.h has tails too.
struct All {};

template <class T>
ZERO8_DEVICE Vec::F load(const T* x, All) {
  return Vec::load(x);
}
ZERO8_DEVICE inline Vec::I load8(const uint8_t* x, uint32_t, All) { return Vec::load8(x); }
ZERO8_DEVICE inline void store(float* p, Vec::F x, All) { Vec::store(p, x); }
ZERO8_DEVICE inline void store16(uint16_t* p, Vec::I x, All) { Vec::store16(p, x); }
ZERO8_DEVICE inline void store8(uint8_t* p, Vec::I x, All) { Vec::store8(p, x); }

// --- Parameters and gradients ------------------------------------------------------------------

ZERO8_DEVICE inline Vec::Mask is_nan(Vec::F x) {
  return Vec::above(magnitude_bits(x), Vec::seti(0x7F800000));
}

// Whether any rounding to bfloat16 could overflow, or the value is not finite.
ZERO8_DEVICE inline bool any_extreme(Vec::I bits) {
  return Vec::any(Vec::above(Vec::andi(bits, Vec::seti(~kSignBit)), Vec::seti(0x7F7EFFFF)));
}

// Whether the upper 16 bits of a float, here in the lower half, are those of infinity or NaN.
ZERO8_DEVICE inline Vec::Mask is_beyond(Vec::I high) {
  const Vec::I exponent = Vec::seti(0x7F80);
  return Vec::equal(Vec::andi(high, exponent), exponent);
}

// The parameters of one block: how they are read as float32, by Vec or, on CUDA, QuickVec, and
// rounded and written (R7).
class Float32 {
 public:
  using Stored = float;
  static constexpr bool kCorrected = false;
  float* p;

  ZERO8_DEVICE Float32(const Segment& seg, const Block& b, uint32_t)
      : p(static_cast<float*>(seg.param) + b.begin) {}
  template <class AnyVec, class Lanes>
  ZERO8_DEVICE Vec::F read(AnyVec& vec, int i, Lanes lanes) const {
    return vec.flushed(load(p + i, lanes));
  }
  template <class Lanes>
  ZERO8_DEVICE void write(int i, Vec::F x, Lanes lanes) {
    store(p + i, x, lanes);
  }
};

class BFloat16 {
 public:
  using Stored = uint16_t;
  static constexpr bool kCorrected = false;
  uint16_t* p;

  ZERO8_DEVICE BFloat16(const Segment& seg, const Block& b, uint32_t index)
      : p(static_cast<uint16_t*>(seg.param) + b.begin),
        rounding_(seg.rounding),
        dither_(seg.param_phase, index) {}
  template <class AnyVec, class Lanes>
  ZERO8_DEVICE Vec::F read(AnyVec& vec, int i, Lanes lanes) const {
    return vec.flushed(load(p + i, lanes));
  }
  template <class Lanes>
  ZERO8_DEVICE void write(int i, Vec::F x, Lanes lanes) {
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
  ZERO8_DEVICE Vec::I threshold(Vec::I bits) {
    if (rounding_ == kNearest) {
      return Vec::addi(Vec::seti(0x7FFF), Vec::andi(Vec::shr<16>(bits), Vec::seti(1)));
    }
    Vec::I r = dither_.next();
    if (rounding_ == kHash) {
      r = Vec::muli(Vec::xori(r, Vec::shr<16>(r)), Vec::seti(kHashFactor1));
      r = Vec::muli(Vec::xori(r, Vec::shr<15>(r)), Vec::seti(kHashFactor2));
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
  using Stored = uint16_t;
  static constexpr bool kCorrected = true;
  uint16_t* p;

  ZERO8_DEVICE CorrectedBFloat16(const Segment& seg, const Block& b, uint32_t)
      : p(static_cast<uint16_t*>(seg.param) + b.begin),
        correction_(static_cast<uint8_t*>(seg.correction) + b.begin) {}
  template <class AnyVec, class Lanes>
  ZERO8_DEVICE Vec::F read(AnyVec& vec, int i, Lanes lanes) const {
    const Vec::I c = load8(correction_ + i, 0, lanes);
    const Vec::I sign = Vec::shl<9>(Vec::andi(c, Vec::seti(128)));
    const Vec::I bits = Vec::addi(Vec::as_int(load(p + i, lanes)), Vec::shl<8>(c));
    return vec.flushed(Vec::as_float(Vec::subi(bits, sign)));
  }
  template <class Lanes>
  ZERO8_DEVICE void write(int i, Vec::F x, Lanes lanes) {
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

  ZERO8_DEVICE explicit Scalars(const StepScalars& s)
      : one_minus_beta1(
            Vec::set(has_bits(s.l2) ? s.one_minus_beta1 : s.grad_sign * s.one_minus_beta1)),
        sqrt_one_minus_beta2(Vec::set(s.sqrt_one_minus_beta2)),
        inverse_sqrt_correction2(Vec::set(s.inverse_sqrt_correction2)),
        eps(Vec::set(s.eps)),
        max_ratio(Vec::set(s.max_ratio)),
        min_ratio(Vec::set(-s.max_ratio)),
        minus_step_size(Vec::set(-s.step_size)),
        decay(Vec::set(s.decay)),
        l2(Vec::set(s.l2)),
        grad_sign(Vec::set(s.grad_sign)),
        has_l2(has_bits(s.l2)) {}

  // An integer test is cheaper in the loop, and does not depend on whether subnormals are flushed.
  ZERO8_DEVICE static bool has_bits(float x) { return (bits_of(x) & ~kSignBit) != 0; }

  // (R1).  Without L2 the sign matters to m only: one_minus_beta1 carries it.
  ZERO8_DEVICE Vec::F gradient(Vec::F p, Vec::F g) const {
    return has_l2 ? Vec::fma(l2, p, Vec::mul(grad_sign, g)) : g;
  }
};

// --- The moments ---------------------------------------------------------------------------------

template <class Encoder>
ZERO8_DEVICE ZERO8_INLINE inline Vec::I encode_one(Encoder& encode, const float* values) {
  const Vec::F x = Vec::load(values);
  return completed<Encoder::kLeft>(encode(x), x);
}

// Both moments in 8 bits.
template <class M, class V>
struct Quantized {
  static_assert(M::kScales >= 1 && M::kScales <= kMaxScales && M::kZeroCode < 256);
  static_assert(V::kScales >= 1 && V::kScales <= kMaxScales && V::kZeroCode < 256);
  static_assert(!M::kStoresRoot, "a first moment may be negative");
  static constexpr bool kRoot = V::kStoresRoot;
  static constexpr bool kQuantized = true;
  using Stored = uint8_t;
  using MCode = M;
  using VCode = V;
  using MRange = typename M::Range;
  using VRange = typename V::Range;

  struct Source {
    const uint8_t *m, *v;
    typename M::Decoder decode_m;
    typename V::Decoder decode_v;

    ZERO8_DEVICE Source(const Segment& seg, const StepScalars& s, const DynamicMaps& maps,
                        const Block& b)
        : m(static_cast<const uint8_t*>(seg.exp_avg) + b.begin),
          v(static_cast<const uint8_t*>(seg.exp_avg_sq) + b.begin),
          decode_m(seg.exp_avg_scale + b.local * M::kScales, s.beta1, maps.exp_avg),
          decode_v(seg.exp_avg_sq_scale + b.local * V::kScales, kRoot ? s.sqrt_beta2 : s.beta2,
                   maps.exp_avg_sq) {}

    template <class Lanes>
    ZERO8_DEVICE Vec::F exp_avg(int i, Lanes lanes) const {
      return decode_m(load8(m + i, M::kZeroCode, lanes));
    }
    template <class Lanes>
    ZERO8_DEVICE Vec::F exp_avg_sq(int i, Lanes lanes) const {
      return decode_v(load8(v + i, V::kZeroCode, lanes));
    }
  };

  // Encodes one block out of a buffer, vector by vector.
  struct Sink {
    uint8_t *m, *v;
    const float *m_values, *v_values;
    int count;
    typename M::Encoder encode_m;
    typename V::Encoder encode_v;

    ZERO8_DEVICE Sink() : m(nullptr), v(nullptr), m_values(nullptr), v_values(nullptr), count(0) {}
    ZERO8_DEVICE Sink(const Segment& seg, const StepScalars& s, const DynamicMaps& maps,
                      const Block& b, uint32_t index, const float* m_buffer, const float* v_buffer,
                      const MRange& m_range, const VRange& v_range)
        : m(static_cast<uint8_t*>(seg.exp_avg) + b.begin),
          v(static_cast<uint8_t*>(seg.exp_avg_sq) + b.begin),
          m_values(m_buffer),
          v_values(v_buffer),
          count(b.count),
          encode_m(m_range, maps.exp_avg, {m_buffer, b.count, b.size, 0, 0, s.settling},
                   seg.exp_avg_scale + b.local * M::kScales),
          encode_v(v_range, maps.exp_avg_sq,
                   {v_buffer, b.count, b.size, seg.moment_phase, index, 0.0f},
                   seg.exp_avg_sq_scale + b.local * V::kScales) {}

    template <class Lanes>
    ZERO8_DEVICE ZERO8_INLINE void encode(int i, Lanes lanes) {
      store8(m + i, encode_one(encode_m, m_values + i), lanes);
      store8(v + i, encode_one(encode_v, v_values + i), lanes);
    }
  };
};

using DynamicPair = Quantized<Dynamic<true>, Dynamic<false>>;
using CompandedPair = Quantized<Companded<true, 8, 4, false>, Companded<false, 8, 5, true>>;
using LogPair = Quantized<Adaptive, LogRoot>;

// Not a function: NVRTC takes those without __device__ for the host's.
template <class Moments, Codec kCodec>
constexpr bool kHasScales = Moments::MCode::kScales == kScalesPerBlock[kCodec].exp_avg &&
                            Moments::VCode::kScales == kScalesPerBlock[kCodec].exp_avg_sq;
static_assert(kHasScales<DynamicPair, kDynamic>);
static_assert(kHasScales<CompandedPair, kCompanded>);
static_assert(kHasScales<LogPair, kLog>);

// Both moments in float32: parameters that are too small or were asked to stay so.  The product
// flushes what is subnormal in memory, as no beta is above 1.
struct Plain {
  static constexpr bool kRoot = false;
  static constexpr bool kQuantized = false;
  using Stored = float;

  struct Source {
    float *m, *v;
    Vec::F beta1, beta2;

    ZERO8_DEVICE Source(const Segment& seg, const StepScalars& s, const DynamicMaps&,
                        const Block& b)
        : m(static_cast<float*>(seg.exp_avg) + b.begin),
          v(static_cast<float*>(seg.exp_avg_sq) + b.begin),
          beta1(Vec::set(s.beta1)),
          beta2(Vec::set(s.beta2)) {}

    template <class Lanes>
    ZERO8_DEVICE Vec::F exp_avg(int i, Lanes lanes) const {
      return Vec::mul(load(m + i, lanes), beta1);
    }
    template <class Lanes>
    ZERO8_DEVICE Vec::F exp_avg_sq(int i, Lanes lanes) const {
      return Vec::mul(load(v + i, lanes), beta2);
    }
  };
};

// --- The step ------------------------------------------------------------------------------------

// Whether patterns of |g| in all parts of a block say that its gradients are finite.
ZERO8_DEVICE inline bool below_limit(Vec::I magnitudes) {
  return Vec::reduce_maxu(magnitudes) < kGradientLimitBits;
}

// Turns beta1 m and beta2 v into m' and v', or, if kRoot, their roots, and returns p', not rounded
// yet.  `vec` is a Vec or, on CUDA, a QuickVec.
//
// Far from the smallest numbers are: h, as what is below 2^-126 has a square of 0 beside any v; the
// denominator, as roots of normal numbers are at least 2^-63 and the correction at least 1.
template <bool kRoot, class AnyVec>
ZERO8_DEVICE ZERO8_INLINE inline Vec::F advanced(AnyVec& vec, const Scalars& s, Vec::F p, Vec::F g,
                                                 Vec::F& m, Vec::F& v) {
  if (kRoot) v = vec.mul(v, v);
  m = vec.fma(s.one_minus_beta1, g, m);  // (R2)
  const Vec::F h = vec.mul_far(s.sqrt_one_minus_beta2, g);
  v = vec.fma(h, h, v);  // (R3)
  const Vec::F root = vec.sqrt(v);
  const Vec::F denominator = vec.fma_far(root, s.inverse_sqrt_correction2, s.eps);  // (R4)
  const Vec::F ratio = vec.div(m, denominator);
  const Vec::F clipped = vec.min(s.max_ratio, vec.max(s.min_ratio, ratio));  // (R5)
  if (kRoot) v = root;
  return vec.fma(s.minus_step_size, clipped, vec.mul(s.decay, p));  // (R6)
}

// One block of the update; `vector(i, lanes)` does the elements of one vector.
template <class Moments, class P, class G>
struct Update {
  const Scalars s;
  typename Moments::Source source;
  P param;
  const G* g;
  int count;

  ZERO8_DEVICE Update(const Segment& seg, const Scalars& scalars, const StepScalars& raw,
                      const DynamicMaps& maps, const Block& b, uint32_t index)
      : s(scalars),
        source(seg, raw, maps, b),
        param(seg, b, index),
        g(static_cast<const G*>(seg.grad) + b.begin),
        count(b.count) {}

  template <class Lanes>
  ZERO8_DEVICE Vec::F grad(int i, Lanes lanes) const {
    return Vec::flushed(load(g + i, lanes));
  }

  // The patterns of |g| after (R1), which order NaN above infinity.
  template <class Lanes>
  ZERO8_DEVICE ZERO8_INLINE Vec::I magnitude(int i, Lanes lanes) const {
    const Vec::F x = grad(i, lanes);
    Vec vec;
    return magnitude_bits(s.has_l2 ? s.gradient(param.read(vec, i, lanes), x) : x);
  }

  // Turns the decayed moments, as decoded, into m' and v' as they will be encoded; the parameter is
  // updated in memory.
  template <class Lanes>
  ZERO8_DEVICE ZERO8_INLINE void vector(int i, Lanes lanes, Vec::F& m, Vec::F& v) {
    Vec vec;
    const Vec::F p = param.read(vec, i, lanes);
    const Vec::F x = s.gradient(p, grad(i, lanes));
    param.write(i, advanced<Moments::kRoot>(vec, s, p, x, m, v), lanes);
  }
};

ZERO8_DEVICE inline uint32_t dither_index(const Segment& seg, const Block& b) {
  return static_cast<uint32_t>(seg.first + b.begin);
}

}  // namespace ZERO8_TARGET
}  // namespace zero8
