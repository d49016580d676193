// SPDX-License-Identifier: Apache-2.0
// A thread's 8 elements of a segment as they lie in memory, in registers.
#pragma once

#include <cstdint>

#include "cuda/team.h"
#include "format.h"

namespace zero8::ZERO8_TARGET {

// Floats take all words, 16-bit numbers the first four, 8-bit ones the first two; little-endian.
struct Words {
  uint32_t word[kPerThread];
};

template <class T>
__device__ void unpack(const Words& words, T (&x)[kPerThread]) {
  constexpr int kPerWord = sizeof(uint32_t) / sizeof(T);
#pragma unroll
  for (int k = 0; k < kPerThread; ++k) {
    x[k] = static_cast<T>(words.word[k / kPerWord] >> k % kPerWord * 8 * sizeof(T));
  }
}
__device__ inline void unpack(const Words& words, float (&x)[kPerThread]) {
#pragma unroll
  for (int k = 0; k < kPerThread; ++k) x[k] = __uint_as_float(words.word[k]);
}
__device__ inline void unpack(const Words& words, Half (&x)[kPerThread]) {
  uint16_t bits[kPerThread];
  unpack(words, bits);
#pragma unroll
  for (int k = 0; k < kPerThread; ++k) x[k].bits = bits[k];
}

template <class T>
__device__ Words packed(const T (&x)[kPerThread]) {
  constexpr int kPerWord = sizeof(uint32_t) / sizeof(T);
  Words words = {};
#pragma unroll
  for (int k = 0; k < kPerThread; ++k) {
    words.word[k / kPerWord] |= static_cast<uint32_t>(x[k]) << k % kPerWord * 8 * sizeof(T);
  }
  return words;
}
__device__ inline Words packed(const float (&x)[kPerThread]) {
  Words words;
#pragma unroll
  for (int k = 0; k < kPerThread; ++k) words.word[k] = __float_as_uint(x[k]);
  return words;
}

// n of the thread's 8 elements at p are in its block.  16 bytes move at once, or 8 codes, where
// they lie so that they can.
template <class T>
__device__ bool moves_whole(const T* p, int n) {
  constexpr uint64_t kBytes = sizeof(T) == 1 ? 8 : 16;
  return n == kPerThread && reinterpret_cast<uint64_t>(p) % kBytes == 0;
}

template <class T>
__device__ Words read(const T* p, int n, T beyond) {
  if (!moves_whole(p, n)) {
    T x[kPerThread];
#pragma unroll
    for (int k = 0; k < kPerThread; ++k) x[k] = k < n ? p[k] : beyond;
    return packed(x);
  }
  Words words = {};
  if constexpr (sizeof(T) == 1) {
    const uint2 two = *reinterpret_cast<const uint2*>(p);
    words.word[0] = two.x;
    words.word[1] = two.y;
  } else {
#pragma unroll
    for (int k = 0; k < 2 * static_cast<int>(sizeof(T)); k += 4) {
      const uint4 four = reinterpret_cast<const uint4*>(p)[k / 4];
      words.word[k] = four.x;
      words.word[k + 1] = four.y;
      words.word[k + 2] = four.z;
      words.word[k + 3] = four.w;
    }
  }
  return words;
}

template <class T>
__device__ void write(T* p, const T (&x)[kPerThread], int n) {
  if (!moves_whole(p, n)) {
#pragma unroll
    for (int k = 0; k < kPerThread; ++k) {
      if (k < n) p[k] = x[k];
    }
    return;
  }
  const Words words = packed(x);
  if constexpr (sizeof(T) == 1) {
    *reinterpret_cast<uint2*>(p) = make_uint2(words.word[0], words.word[1]);
  } else {
#pragma unroll
    for (int k = 0; k < 2 * static_cast<int>(sizeof(T)); k += 4) {
      reinterpret_cast<uint4*>(p)[k / 4] =
          make_uint4(words.word[k], words.word[k + 1], words.word[k + 2], words.word[k + 3]);
    }
  }
}

}  // namespace zero8::ZERO8_TARGET
