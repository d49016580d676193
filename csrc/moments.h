// SPDX-License-Identifier: Apache-2.0
// The moments of a block in terms of Vec: how they are decoded and encoded, whatever algorithm
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

namespace zero8 {
namespace ZERO8_TARGET {

// --- Rows: one item per moment -------------------------------------------------------------------

// A number as a type, for the items of a row.
template <int k>
struct Number {
  static constexpr int value = k;
};

// The code of moment k of an algorithm.
template <class Algorithm, class Codec, int k>
using CodeOf = typename Codec::template Code<kMomentsOf[Algorithm::kNumber].is_signed[k],
                                             kMomentsOf[Algorithm::kNumber].is_dithered[k]>;

// Part<Code> for each moment of an algorithm: types differ where codes do.
template <class Algorithm, class Codec, template <class Code> class Part, int k = 0,
          bool kIsEnd = k == kMomentsOf[Algorithm::kNumber].count>
struct Row {
  Part<CodeOf<Algorithm, Codec, k>> item;
  Row<Algorithm, Codec, Part, k + 1> rest;

  ZERO8_DEVICE Row() {}
  // Each from (Number<k>, arguments), in order.
  template <class... Arguments>
  ZERO8_DEVICE ZERO8_INLINE explicit Row(const Arguments&... arguments)
      : item(Number<k>(), arguments...), rest(arguments...) {}

  // Calls body(Number<k>, item) for each.
  template <class Body>
  ZERO8_DEVICE ZERO8_INLINE void visit(Body&& body) {
    body(Number<k>(), item);
    rest.visit(body);
  }
  template <class Body>
  ZERO8_DEVICE ZERO8_INLINE void visit(Body&& body) const {
    body(Number<k>(), item);
    rest.visit(body);
  }
  template <int kOther>
  ZERO8_DEVICE const auto& at(Number<kOther>) const {
    if constexpr (kOther == k) {
      return item;
    } else {
      return rest.at(Number<kOther>());
    }
  }
  template <int kOther>
  ZERO8_DEVICE auto& at(Number<kOther>) {
    if constexpr (kOther == k) {
      return item;
    } else {
      return rest.at(Number<kOther>());
    }
  }
};
template <class Algorithm, class Codec, template <class Code> class Part, int k>
struct Row<Algorithm, Codec, Part, k, true> {
  template <class... Arguments>
  ZERO8_DEVICE explicit Row(const Arguments&...) {}
  template <class Body>
  ZERO8_DEVICE void visit(Body&&) const {}
};

// --- Codecs --------------------------------------------------------------------------------------

template <int kBits, bool kSigned, bool kDithered>
struct LogOf;
template <int kBits>
struct LogOf<kBits, true, false> {
  using Code = SignedLog<kBits>;
};
template <int kBits>
struct LogOf<kBits, true, true> {
  using Code = DitheredLog<kBits>;
};
template <int kBits>
struct LogOf<kBits, false, true> {
  using Code = Log<kBits>;
};
template <int kBits>
struct InLogOf {
  static constexpr bool kHasPairs = true;
  template <bool kSigned, bool kDithered>
  using Code = typename LogOf<kBits, kSigned, kDithered>::Code;
};
using InLog = InLogOf<8>;
using InLog6 = InLogOf<6>;
// Rounds to nearest, whatever the moment.
struct InDynamic {
  static constexpr bool kHasPairs = false;
  template <bool kSigned, bool>
  using Code = Dynamic<kSigned>;
};
// As InDynamic.
struct InFp8 {
  static constexpr bool kHasPairs = true;
  template <bool kSigned, bool>
  using Code = Fp8<kSigned>;
};
// As InDynamic.
struct InLinear4 {
  static constexpr bool kHasPairs = true;
  template <bool kSigned, bool>
  using Code = Linear4<kSigned>;
};

// Moments that have no code.
struct InFloat32 {};
template <class Codec>
constexpr bool kIsQuantized = true;
template <>
constexpr bool kIsQuantized<InFloat32> = false;

// Not a function: NVRTC takes those without __device__ for the host's.
template <class Code>
constexpr bool kIsValid =
    Code::kScales >= 1 && Code::kScales <= kMaxScales && Code::kZeroCode < 256;
template <class Code, int kBits, int kScales>
constexpr bool kHasSize = kIsValid<Code> && Code::kBits == kBits && Code::kScales == kScales;
template <class InCodec, Codec kCodec, int kBits = kCodecSizes[kCodec].bits,
          int kOfSigned = kCodecSizes[kCodec].scales_of_signed,
          int kOfUnsigned = kCodecSizes[kCodec].scales_of_unsigned>
constexpr bool kIsCodec =
    kHasSize<typename InCodec::template Code<true, false>, kBits, kOfSigned> &&
    kHasSize<typename InCodec::template Code<true, true>, kBits, kOfSigned> &&
    kHasSize<typename InCodec::template Code<false, true>, kBits, kOfUnsigned>;
static_assert(kIsCodec<InDynamic, kDynamic>);
static_assert(kIsCodec<InLog, kLog>);
static_assert(kIsCodec<InFp8, kFp8>);
static_assert(kIsCodec<InLog6, kLog6>);
static_assert(kIsCodec<InLinear4, kLinear4>);

// --- Decoding ------------------------------------------------------------------------------------

template <class Code, class Lanes>
ZERO8_DEVICE ZERO8_INLINE inline Vec::I load_codes(const uint8_t* codes, Lanes lanes) {
  static_assert(!Code::kTwosComplement || Code::kZeroCode == 0, "beyond a tail load8s has 0");
  if constexpr (Code::kTwosComplement) return load8s(codes, lanes);
  return load8(codes, Code::kZeroCode, lanes);
}

// A moment of a block as it is stored, times the algorithm's decay.
template <class Algorithm>
struct Sources {
  template <class C>
  struct Source {
    using Code = C;
    const uint8_t* codes;
    const float* scales;
    typename Code::Decoder decode;

    // `all_codes` is a Row whose items give the codes of block b, a byte each, and a place for the
    // new ones.
    template <int k, class AllCodes>
    ZERO8_DEVICE Source(Number<k>, const Segment& seg, const StepScalars& s, const CodecMaps& maps,
                        const Block& b, AllCodes* all_codes)
        : codes(all_codes->at(Number<k>()).next(b)),
          scales(seg.moments[k].scales + b.local * Code::kScales),
          decode(scales, Algorithm::decay(s, k), maps) {}

    template <class AnyVec, class Lanes>
    ZERO8_DEVICE ZERO8_INLINE Vec::F read(AnyVec& vec, int i, Lanes lanes) const {
      return decode(vec, load_codes<Code>(codes + i, lanes));
    }
    // Whether the scales of a signed code are finite.  If so no value is NaN, of which its Range
    // need not tell.
    ZERO8_DEVICE ZERO8_INLINE bool has_finite_scales() const {
      bool finite = true;
      for (int i = 0; Code::kSigned && i < Code::kScales; ++i) {
        finite &= (bits_of(scales[i]) & ~kSignBit) < kInfinityBits;
      }
      return finite;
    }
  };
};

// What the scales of a moment's block depend on.
template <class Code>
struct RangeOf : Code::Range {
  ZERO8_DEVICE RangeOf() {}
};

// --- Encoding ------------------------------------------------------------------------------------

template <class Encoder>
ZERO8_DEVICE ZERO8_INLINE inline Vec::I encode_one(const Encoder& encode, const float* values,
                                                   Vec::I threshold) {
  const Vec::F x = Vec::load(values);
  return completed<Encoder::kLeft>(encode(x, threshold), x);
}

// Where the new values of a block lie: moment k from `values + k * stride` on, `count` of them,
// behind `place` others of `size`.
struct NewValues {
  float* values;
  int stride;
  int count, place, size;
};

// Encodes a moment of a block, vector by vector.
template <class Algorithm>
struct Sinks {
  template <class C>
  struct Sink {
    using Code = C;
    uint8_t* codes;
    const float* values;
    typename Code::Encoder encode;
    Dither dither;

    ZERO8_DEVICE Sink() : codes(nullptr), values(nullptr) {}
    // `ranges` is a Row of RangeOf; `all_codes` is as for a Source.
    template <int k, class Ranges, class AllCodes>
    ZERO8_DEVICE Sink(Number<k>, const Segment& seg, const StepScalars& s, const CodecMaps& maps,
                      const Block& b, const NewValues& made, const Ranges& ranges,
                      AllCodes* all_codes)
        : codes(all_codes->at(Number<k>()).replaced(b)),
          values(made.values + k * made.stride),
          encode(ranges.at(Number<k>()), maps,
                 {made.values + k * made.stride, made.count, made.place, made.size,
                  Algorithm::settling(s, k)},
                 seg.moments[k].scales + b.local * Code::kScales) {
      if constexpr (Code::kIsDithered || kMayDither<Code>) {
        if (is_dithered()) dither = Code::dither(Thresholds(seg, b, seg.moments[k].phase).q);
      }
    }

    ZERO8_DEVICE ZERO8_INLINE bool is_dithered() const {
      if constexpr (kMayDither<Code>) return encode.is_dithered;
      return Code::kIsDithered;
    }
    ZERO8_DEVICE ZERO8_INLINE void start(int i, bool pairs) {
      if constexpr (Code::kIsDithered) dither.start(i, pairs);
    }
    // The thresholds from element i on, where the code may dither: of each chunk by themselves, so
    // that a step without them keeps none in registers.
    ZERO8_DEVICE ZERO8_INLINE Dither started(int i, bool pairs) const {
      Dither from = dither;
      from.start(i, pairs);
      return from;
    }
    template <class Lanes>
    ZERO8_DEVICE ZERO8_INLINE void write(int i, Lanes lanes) {
      if constexpr (kMayDither<Code>) {
        if (encode.is_dithered) {
          const Vec::I threshold = started(i, false).next();
          store8(codes + i, encode_one(encode.dithered(), values + i, threshold), lanes);
          return;
        }
      }
      store8(codes + i, encode_one(encode, values + i, next()), lanes);
    }

   private:
    ZERO8_DEVICE ZERO8_INLINE Vec::I next() {
      if constexpr (Code::kIsDithered) return dither.next();
      return Vec::seti(0);
    }
  };
};

// --- Segments ------------------------------------------------------------------------------------

// Whether the largest patterns of a block's new moments say that these are numbers, and none that
// cannot be negative is.  Finite gradients make none that is not so, but states may have come from
// anywhere.
template <class Algorithm>
ZERO8_DEVICE inline bool are_moments(const uint32_t* largest) {
  bool are = true;
  for (int k = 0; k < kMomentsOf[Algorithm::kNumber].count; ++k) are &= largest[k] < kInfinityBits;
  return are;
}

}  // namespace ZERO8_TARGET
}  // namespace zero8
