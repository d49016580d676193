// SPDX-License-Identifier: Apache-2.0
// The sum of squares of gradients in one read, the same bits for any number of threads and on every
// processor: gradients are cut into chunks of fixed size, each chunk is summed in kLanes lanes, and
// the sums of chunks are added in order.
//
// The square of a float or bfloat16 is exact in double, so that fma would make no difference.
// Against the exact sum the relative error is below n / kLanes x 2^-53 for a chunk of n elements,
// plus 2^-53 per chunk.
#include <vector>

#include "host.h"
#include "parallel.h"

namespace zero8 {
namespace {

constexpr int64_t kChunkNumel = 1 << 16;
constexpr int kLanes = 16;

inline double value(const float* x) { return *x; }
inline double value(const uint16_t* x) {
  const uint32_t bits = static_cast<uint32_t>(*x) << 16;
  float bfloat16;
  __builtin_memcpy(&bfloat16, &bits, sizeof bfloat16);
  return bfloat16;
}

template <class T>
__attribute__((always_inline)) inline double sum_of_chunk(const T* x, int64_t numel) {
  double lane[kLanes] = {};
  int64_t i = 0;
  for (; i + kLanes <= numel; i += kLanes) {
    for (int k = 0; k < kLanes; ++k) lane[k] += value(x + i + k) * value(x + i + k);
  }
  for (int k = 0; i < numel; ++i, ++k) lane[k] += value(x + i) * value(x + i);
  for (int width = kLanes / 2; width > 0; width /= 2) {
    for (int k = 0; k < width; ++k) lane[k] += lane[k + width];
  }
  return lane[0];
}

// Compiled several times; the loader picks the widest clone that the processor can run.
#if defined(__x86_64__)
#define ZERO8_CLONES __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define ZERO8_CLONES
#endif
ZERO8_CLONES double sum_of_floats(const float* x, int64_t numel) { return sum_of_chunk(x, numel); }
ZERO8_CLONES double sum_of_bfloat16s(const uint16_t* x, int64_t numel) {
  return sum_of_chunk(x, numel);
}

double sum_of(const Numbers& chunk) {
  return chunk.dtype == kBF16
             ? sum_of_bfloat16s(static_cast<const uint16_t*>(chunk.data), chunk.numel)
             : sum_of_floats(static_cast<const float*>(chunk.data), chunk.numel);
}

std::vector<Numbers> chunks_of(const Numbers* gradients, int64_t num_gradients) {
  std::vector<Numbers> chunks;
  for (int64_t k = 0; k < num_gradients; ++k) {
    const Numbers& g = gradients[k];
    const int64_t item_bytes = g.dtype == kBF16 ? 2 : 4;
    for (int64_t begin = 0; begin < g.numel; begin += kChunkNumel) {
      const int64_t left = g.numel - begin;
      chunks.push_back({static_cast<const uint8_t*>(g.data) + begin * item_bytes,
                        left < kChunkNumel ? left : kChunkNumel, g.dtype, 0});
    }
  }
  return chunks;
}

}  // namespace

double sum_of_squares(const Numbers* gradients, int64_t num_gradients, int num_threads) {
  const std::vector<Numbers> chunks = chunks_of(gradients, num_gradients);
  const int64_t num_chunks = static_cast<int64_t>(chunks.size());
  std::vector<double> sums(chunks.size());
  parallel(num_threads, [&](int64_t thread, int64_t threads) {
    const int64_t end = num_chunks * (thread + 1) / threads;
    for (int64_t k = num_chunks * thread / threads; k < end; ++k) sums[k] = sum_of(chunks[k]);
  });
  double total = 0.0;
  for (const double sum : sums) total += sum;
  return total;
}

}  // namespace zero8
