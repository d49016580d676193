// SPDX-License-Identifier: Apache-2.0
// The fused step on one block: the only place where the arithmetic of the kernels is written.
//
// Equation numbers are those of zero8/reference.py and zero8/codec.py.  Each loop is a plain loop
// over at most kMaxBlockSize elements that the compiler turns into the vectors of the target this
// file is compiled for; the buffers between them stay in the first-level cache.  Memory sees per
// parameter (fp32 parameter and gradient) 12 + 4 bytes: p, g and two codes read, p and codes
// written.
//
// Bit equality across targets rests on: one rounding per operation, every fused operation
// written as fma_, -ffp-contract=off, reductions only over integers, and flush to zero, which the
// caller has set.  Included once per target; ZERO8_TARGET names the namespace.  No templates of the
// standard library here: the linker would merge instantiations compiled for different targets.
#include <cstdint>

#include "format.h"

namespace zero8 {
namespace ZERO8_TARGET {

inline float fma_(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
inline float sqrt_(float a) { return __builtin_sqrtf(a); }
inline float abs_(float a) { return __builtin_fabsf(a); }

// Like MAXPS and MINPS: a NaN in the second argument comes through.
inline float max_(float a, float b) { return a > b ? a : b; }
inline float min_(float a, float b) { return a < b ? a : b; }

inline uint32_t bits_of(float x) {
  uint32_t bits;
  __builtin_memcpy(&bits, &x, sizeof bits);
  return bits;
}
inline float float_of(uint32_t bits) {
  float x;
  __builtin_memcpy(&x, &bits, sizeof x);
  return x;
}

constexpr uint32_t kOneBits = 0x3F800000;
constexpr uint32_t kInfinityBits = 0x7F800000;
constexpr uint32_t kSignBit = 0x80000000;
constexpr float kSaturation = 0x1p126f;

// (D1), and the mixer of hashed rounding.
inline uint32_t dithered(uint32_t phase, uint32_t index) { return index * 0xC13FA9A9u + phase; }
inline uint32_t hashed(uint32_t phase, uint32_t index) {
  uint32_t x = dithered(phase, index);
  x = (x ^ (x >> 16)) * 0x7FEB352Du;
  x = (x ^ (x >> 15)) * 0x846CA68Bu;
  return x ^ (x >> 16);
}

// What the loops of one block share.
struct Work {
  int n;
  uint32_t index;  // of the block's first element in the parameter; dither needs it modulo 2^32
  float m[kMaxBlockSize];
  float v[kMaxBlockSize];
};

// --- Codes -------------------------------------------------------------------------------------

// Companded code of a moment: equations (C2)-(C4).
template <bool kSigned, int kMantissaBits, bool kSquareRoot>
struct Companded {
  static constexpr int kShift = 23 - kMantissaBits;
  static constexpr int kMaxCode = 8 * (1 << kMantissaBits) - 1;
  static constexpr float kTop = kSigned ? 247.0f : 251.0f;
  static constexpr float kMinScale =
      (kSquareRoot ? 0x1p-63f : 0x1p-126f) * static_cast<float>(1 << kMantissaBits);
  static constexpr bool kStoresRoot = kSquareRoot;

  // out[i] = levels[code[i]] * scale: (C1), (C3).
  static void decode(const uint8_t* code, float scale, const DynamicMap&, int n, float* out) {
#pragma omp simd
    for (int i = 0; i < n; ++i) {
      const uint32_t c = code[i];
      const float level = float_of(((c & kMaxCode) << kShift) + kOneBits) - 1.0f;
      const uint32_t sign = kSigned ? (c & 128u) << 24 : 0u;
      out[i] = float_of(bits_of(level) | sign) * scale;
    }
  }

  static float scale_of(float absmax, const float*, int) {
    const float scale = absmax / kTop * kTop / kTop;
    return absmax == 0.0f ? 0.0f : max_(scale, kMinScale);
  }

  static void encode(const float* x, float scale, const DynamicMap&, uint32_t phase,
                     uint32_t index, int n, uint8_t* code) {
    const float inverse = scale == 0.0f ? 0.0f : 1.0f / scale;
#pragma omp simd
    for (int i = 0; i < n; ++i) {
      const uint32_t y = bits_of(fma_(abs_(x[i]), inverse, 1.0f)) - kOneBits;
      if constexpr (kSigned) {
        const uint32_t rounded = (y + (1u << (kShift - 1))) >> kShift;
        const uint32_t c = rounded < kMaxCode ? rounded : kMaxCode;
        const uint32_t sign = (bits_of(x[i]) >> 24) & 128u;
        code[i] = static_cast<uint8_t>(c | (c > 0 ? sign : 0u));
      } else {
        const uint32_t r = dithered(phase, index + static_cast<uint32_t>(i));
        const uint32_t threshold = ((r >> (32 - kShift)) & ~15u) | 8u;
        const uint32_t rounded = (y + threshold) >> kShift;
        const uint32_t c = rounded < kMaxCode ? rounded : kMaxCode;
        code[i] = static_cast<uint8_t>(x[i] > 0.0f && c == 0 ? 1u : c);
      }
    }
  }
};

// Nearest entry of a dynamic map: equations (C5), (C6).
template <bool kSigned>
struct Dynamic {
  static constexpr float kMinScale = 0x1p-104f;
  static constexpr bool kStoresRoot = false;

  static void decode(const uint8_t* code, float scale, const DynamicMap& map, int n, float* out) {
#pragma omp simd
    for (int i = 0; i < n; ++i) out[i] = map.levels[code[i]] * scale;
  }

  static float scale_of(float absmax, const float* x, int n) {
    bool positive = !kSigned;  // is +absmax in the block?
    if constexpr (kSigned) {
      for (int i = 0; i < n; ++i) positive |= x[i] >= absmax;
    }
    if (absmax == 0.0f) return 0.0f;
    if (absmax < kMinScale) return kMinScale;
    return positive ? absmax : -absmax;
  }

  static void encode(const float* x, float scale, const DynamicMap& map, uint32_t, uint32_t, int n,
                     uint8_t* code) {
    const float inverse = scale == 0.0f ? 0.0f : 1.0f / scale;
    for (int i = 0; i < n; ++i) {
      // A bucket of equal upper 16 bits holds at most one threshold, so one comparison decides.
      const float normalized = x[i] * inverse;
      uint32_t c = map.bucket[bits_of(normalized) >> 16];
      c += normalized >= map.thresholds[c];
      if constexpr (!kSigned) c = x[i] > 0.0f && c == 0 ? 1u : c;
      code[i] = static_cast<uint8_t>(c);
    }
  }
};

// --- Parameters and gradients --------------------------------------------------------------------

struct Float32 {
  using Type = float;
  static float load(const float* x, int i) { return x[i]; }
};

struct BFloat16 {
  using Type = uint16_t;
  static float load(const uint16_t* x, int i) {
    return float_of(static_cast<uint32_t>(x[i]) << 16);
  }
};

inline uint16_t bfloat16_nearest(float x) {
  const uint32_t bits = bits_of(x);
  const uint32_t rounded = (bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16;
  return static_cast<uint16_t>((bits & ~kSignBit) > kInfinityBits ? 0x7FC0u : rounded);
}

// (R7): the dropped bits carry where they and the threshold exceed 2^16; never into infinity.
inline uint16_t bfloat16_stochastic(float x, uint32_t threshold) {
  const uint32_t bits = bits_of(x);
  const uint32_t rounded = (bits + threshold) >> 16;
  const bool overflow = (rounded & 0x7F80u) == 0x7F80u;
  const uint32_t high = overflow ? bits >> 16 : rounded;
  return static_cast<uint16_t>((bits & ~kSignBit) > kInfinityBits ? 0x7FC0u : high);
}

inline void store(float* p, const float* x, const Segment&, uint32_t, int n) {
#pragma omp simd
  for (int i = 0; i < n; ++i) p[i] = x[i];
}

inline void store(uint16_t* p, const float* x, const Segment& seg, uint32_t index, int n) {
  const uint32_t phase = seg.param_phase;
  if (seg.rounding == kNearest) {
#pragma omp simd
    for (int i = 0; i < n; ++i) p[i] = bfloat16_nearest(x[i]);
  } else if (seg.rounding == kHash) {
#pragma omp simd
    for (int i = 0; i < n; ++i) {
      p[i] = bfloat16_stochastic(x[i], hashed(phase, index + static_cast<uint32_t>(i)) >> 16);
    }
  } else {
#pragma omp simd
    for (int i = 0; i < n; ++i) {
      p[i] = bfloat16_stochastic(x[i], dithered(phase, index + static_cast<uint32_t>(i)) >> 16);
    }
  }
}

// --- The step ------------------------------------------------------------------------------------

// (R1)-(R3).  On entry w.m and w.v hold the decayed moments M and V (or V's root), on return
// m' and v'.  False if some v' is not finite.
template <class P, class G, bool kRoot>
bool update_moments(const typename P::Type* p, const typename G::Type* g, const StepScalars& s,
                    Work& w) {
  uint32_t largest = 0;
#pragma omp simd reduction(max : largest)
  for (int i = 0; i < w.n; ++i) {
    float grad = s.grad_sign * G::load(g, i);
    if (s.l2 != 0.0f) grad = fma_(s.l2, P::load(p, i), grad);
    const float h = s.sqrt_one_minus_beta2 * grad;
    const float decayed = kRoot ? w.v[i] * w.v[i] : w.v[i];
    const float v = fma_(h, h, decayed);
    w.m[i] = fma_(s.one_minus_beta1, grad, w.m[i]);
    w.v[i] = v;
    const uint32_t magnitude = bits_of(v) & ~kSignBit;  // orders NaN above infinity
    largest = largest > magnitude ? largest : magnitude;
  }
  return largest < kInfinityBits;
}

// (R4)-(R7).  On entry m' and v'; on return v' has become its root where kRoot.
template <class P, bool kRoot>
void update_param(typename P::Type* p, const Segment& seg, const StepScalars& s, Work& w) {
  float updated[kMaxBlockSize];
#pragma omp simd
  for (int i = 0; i < w.n; ++i) {
    const float root = sqrt_(w.v[i]);
    const float denominator = fma_(root, s.inverse_sqrt_correction2, s.eps);
    const float ratio = w.m[i] / denominator;
    const float clipped = min_(s.max_ratio, max_(-s.max_ratio, ratio));
    updated[i] = fma_(-s.step_size, clipped, s.decay * P::load(p, i));
    if (kRoot) w.v[i] = root;
  }
  store(p, updated, seg, w.index, w.n);
}

inline float absmax(const float* x, int n) {
  uint32_t largest = 0;
#pragma omp simd reduction(max : largest)
  for (int i = 0; i < n; ++i) {
    const uint32_t magnitude = bits_of(x[i]) & ~kSignBit;
    largest = largest > magnitude ? largest : magnitude;
  }
  return min_(float_of(largest), kSaturation);
}

// Both moments in 8 bits: M and V are decoded, m' and v' encoded.
template <class M, class V>
struct Quantized {
  static constexpr bool kRoot = V::kStoresRoot;

  static void load(const Segment& seg, const StepScalars& s, const DynamicMaps& maps, Block b,
                   Work& w) {
    const auto* m = static_cast<const uint8_t*>(seg.exp_avg) + b.begin;
    const auto* v = static_cast<const uint8_t*>(seg.exp_avg_sq) + b.begin;
    const float gain = kRoot ? s.sqrt_beta2 : s.beta2;
    M::decode(m, seg.exp_avg_scale[b.local] * s.beta1, maps.exp_avg, w.n, w.m);
    V::decode(v, seg.exp_avg_sq_scale[b.local] * gain, maps.exp_avg_sq, w.n, w.v);
  }

  static void store(const Segment& seg, const DynamicMaps& maps, Block b, const Work& w) {
    auto* m = static_cast<uint8_t*>(seg.exp_avg) + b.begin;
    auto* v = static_cast<uint8_t*>(seg.exp_avg_sq) + b.begin;
    const float m_scale = M::scale_of(absmax(w.m, w.n), w.m, w.n);
    const float v_scale = V::scale_of(absmax(w.v, w.n), w.v, w.n);
    seg.exp_avg_scale[b.local] = m_scale;
    seg.exp_avg_sq_scale[b.local] = v_scale;
    M::encode(w.m, m_scale, maps.exp_avg, 0, 0, w.n, m);
    V::encode(w.v, v_scale, maps.exp_avg_sq, seg.moment_phase, w.index, w.n, v);
  }
};

// Both moments in float32: parameters that are too small or were asked to stay so.
struct Plain {
  static constexpr bool kRoot = false;

  static void load(const Segment& seg, const StepScalars& s, const DynamicMaps&, Block b,
                   Work& w) {
    const auto* m = static_cast<const float*>(seg.exp_avg) + b.begin;
    const auto* v = static_cast<const float*>(seg.exp_avg_sq) + b.begin;
#pragma omp simd
    for (int i = 0; i < w.n; ++i) {
      w.m[i] = m[i] * s.beta1;
      w.v[i] = v[i] * s.beta2;
    }
  }

  static void store(const Segment& seg, const DynamicMaps&, Block b, const Work& w) {
    auto* m = static_cast<float*>(seg.exp_avg) + b.begin;
    auto* v = static_cast<float*>(seg.exp_avg_sq) + b.begin;
#pragma omp simd
    for (int i = 0; i < w.n; ++i) {
      m[i] = w.m[i];
      v[i] = w.v[i];
    }
  }
};

template <class Moments, class P, class G>
bool step_block_typed(const Segment& seg, const StepScalars& s, const DynamicMaps& maps, Block b) {
  Work w;
  w.n = b.count;
  w.index = static_cast<uint32_t>(seg.first + b.begin);
  auto* p = static_cast<typename P::Type*>(seg.param) + b.begin;
  const auto* g = static_cast<const typename G::Type*>(seg.grad) + b.begin;
  Moments::load(seg, s, maps, b, w);
  if (!update_moments<P, G, Moments::kRoot>(p, g, s, w)) return false;
  update_param<P, Moments::kRoot>(p, seg, s, w);
  Moments::store(seg, maps, b, w);
  return true;
}

template <class Moments>
bool step_block_of(const Segment& seg, const StepScalars& s, const DynamicMaps& maps, Block b) {
  const bool wide_param = seg.param_dtype == kFP32, wide_grad = seg.grad_dtype == kFP32;
  if (wide_param && wide_grad) return step_block_typed<Moments, Float32, Float32>(seg, s, maps, b);
  if (wide_param) return step_block_typed<Moments, Float32, BFloat16>(seg, s, maps, b);
  if (wide_grad) return step_block_typed<Moments, BFloat16, Float32>(seg, s, maps, b);
  return step_block_typed<Moments, BFloat16, BFloat16>(seg, s, maps, b);
}

inline bool step_block(const Segment& seg, const StepScalars& s, const DynamicMaps& maps,
                       Block b) {
  using CompandedPair = Quantized<Companded<true, 4, false>, Companded<false, 5, true>>;
  using DynamicPair = Quantized<Dynamic<true>, Dynamic<false>>;
  if (seg.codec == kCompanded) return step_block_of<CompandedPair>(seg, s, maps, b);
  if (seg.codec == kDynamic) return step_block_of<DynamicPair>(seg, s, maps, b);
  return step_block_of<Plain>(seg, s, maps, b);
}

}  // namespace ZERO8_TARGET
}  // namespace zero8
