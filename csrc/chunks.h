// SPDX-License-Identifier: Apache-2.0
// Vectors of a block on the CPU, in terms of params.h: whole ones and a tail, and chunks of four.
//
// Included once per target, so in the target's namespace.
#include <cstdint>

namespace zero8::ZERO8_TARGET {

constexpr int64_t kPrefetchDistance = 512;  // elements
constexpr int kLineBytes = 64;
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
  constexpr int kLine = kLineBytes / sizeof(T);
  for (int i = 0; i < kChunk; i += kLine) Vec::prefetch(x + kPrefetchDistance + i);
}

// The largest magnitudes, as patterns, of the floats in a chunk.
inline Vec::I largest_of_chunk(const float* x) {
  const Vec::I ab =
      Vec::maxu(Vec::magnitude_bits(Vec::load(x)), Vec::magnitude_bits(Vec::load(x + Vec::kLanes)));
  x += 2 * Vec::kLanes;
  const Vec::I cd =
      Vec::maxu(Vec::magnitude_bits(Vec::load(x)), Vec::magnitude_bits(Vec::load(x + Vec::kLanes)));
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
ZERO8_INLINE inline void encode_four(const Encoder& encode, const float* values,
                                     const Vec::I* threshold, uint8_t* codes) {
  Vec::F x[4];
  Vec::I code[4];
  for (int k = 0; k < 4; ++k) {
    x[k] = Vec::load(values + k * Vec::kLanes);
    code[k] = encode(x[k], threshold[k]);
  }
  if constexpr (Encoder::kLeft == Left::kSign) {
    Vec::store8x4_signed(codes, code, x);
  } else {
    Vec::store8x4(codes, code);
  }
}

}  // namespace zero8::ZERO8_TARGET
