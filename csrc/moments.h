// SPDX-License-Identifier: Apache-2.0
// The codecs in terms of Vec, and how codes become floats and floats codes, whatever algorithm
// remembers them, for the CPU and for CUDA.
//
// Included once per target, so in the target's namespace.
#include <cstdint>

#include "algorithms.h"
#include "params.h"
// In terms of codes.h:
#include "dynamic.h"
#include "fp8.h"
#include "linear4.h"
#include "log.h"
// In terms of params.h, the algorithms:
#include "adam.h"
#include "ademamix.h"
#include "lion.h"
#include "sgd.h"

namespace zero8::ZERO8_TARGET {

// --- Codecs --------------------------------------------------------------------------------------

// Calls body(codec) with an object of a codec's struct; not of kFloat32, which has no codes.
template <class Body>
ZERO8_DEVICE inline void for_codec(int32_t codec, Body&& body) {
#define ZERO8_CASE(name, ...) \
  case k##name:               \
    return body(In##name());
  switch (codec) {
    ZERO8_CODECS(ZERO8_CASE)
    default:
      return;
  }
#undef ZERO8_CASE
}

// Whether moment k of an algorithm can be negative, and whether the dither rounds its codes.
template <class Algorithm>
ZERO8_DEVICE constexpr bool is_signed(int k) {
  return kMomentsOf[Algorithm::kNumber].is_signed[k];
}
template <class Algorithm>
ZERO8_DEVICE constexpr bool is_dithered(int k) {
  return kMomentsOf[Algorithm::kNumber].is_dithered[k];
}

// Its code.
template <class Algorithm, class Codec, int k>
using CodeOf = typename Codec::template Code<is_signed<Algorithm>(k), is_dithered<Algorithm>(k)>;

// Not a function: NVRTC takes those without __device__ for the host's.
template <class Code, int kBits, int kScales>
constexpr bool kHasSize = Code::kScales >= 1 && Code::kScales <= kMaxScales &&
                          Code::kZeroCode < 256 && Code::kBits == kBits && Code::kScales == kScales;
template <class InCodec, int kBits, int kOfSigned, int kOfUnsigned>
constexpr bool kIsCodec =
    kHasSize<typename InCodec::template Code<true, false>, kBits, kOfSigned> &&
    kHasSize<typename InCodec::template Code<true, true>, kBits, kOfSigned> &&
    kHasSize<typename InCodec::template Code<false, true>, kBits, kOfUnsigned>;
#define ZERO8_ASSERT(name, number, text, bits, of_signed, of_unsigned) \
  static_assert(kIsCodec<In##name, bits, of_signed, of_unsigned>);
ZERO8_CODECS(ZERO8_ASSERT)
#undef ZERO8_ASSERT

// --- Moments -------------------------------------------------------------------------------------

// A number as a type.
template <int k>
struct Number {
  static constexpr int value = k;
};

template <class Code, class Lanes>
ZERO8_DEVICE ZERO8_INLINE inline Vec::I load_codes(const uint8_t* codes, Lanes lanes) {
  static_assert(!Code::kTwosComplement || Code::kZeroCode == 0, "beyond a tail load8s has 0");
  if constexpr (Code::kTwosComplement) return load8s(codes, lanes);
  return load8(codes, Code::kZeroCode, lanes);
}
template <class Encoder>
ZERO8_DEVICE ZERO8_INLINE inline Vec::I encode_one(const Encoder& encode, const float* values,
                                                   Vec::I threshold) {
  const Vec::F x = Vec::load(values);
  return completed<Encoder::kLeft>(encode(x, threshold), x);
}

// Whether the scales of a block with a signed code are finite.  If so no value is NaN, which the
// largest pattern of signed values does not tell.
template <class Code>
ZERO8_DEVICE ZERO8_INLINE inline bool has_finite_scales(const float* scales) {
  bool finite = true;
  for (int i = 0; Code::kSigned && i < Code::kScales; ++i) {
    finite &= (bits_of(scales[i]) & ~kSignBit) < kInfinityBits;
  }
  return finite;
}

// Whether the largest patterns of a block's new moments say that these are numbers, and none that
// cannot be negative is.  Finite gradients make none that is not so, but states may have come from
// anywhere.
template <class Algorithm>
ZERO8_DEVICE inline bool are_moments(const uint32_t* largest) {
  bool are = true;
  for (int k = 0; k < kMomentsOf[Algorithm::kNumber].count; ++k) are &= largest[k] < kInfinityBits;
  return are;
}

}  // namespace zero8::ZERO8_TARGET
