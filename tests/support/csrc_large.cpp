// SPDX-License-Identifier: Apache-2.0
// Steps over the last blocks of a segment of more than 2^32 elements, and over
// a segment that holds only these: both must write the same bytes.
#include <sys/mman.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "isa.h"

namespace {

constexpr int64_t kRow = 4100, kBlockSize = 256, kBlocksPerRow = 17;
constexpr int64_t kRows = (int64_t{1} << 32) / kRow + 2;
constexpr int64_t kFirstRow = kRows - 2;  // of those that are stepped over
constexpr int64_t kNumel = kRows * kRow, kFirst = kFirstRow * kRow, kRest = kNumel - kFirst;
constexpr int64_t kBlocks = kRows * kBlocksPerRow, kFirstBlock = kFirstRow * kBlocksPerRow;
static_assert(kFirst < int64_t{1} << 32 && kNumel > int64_t{1} << 32, "rows on either side");

// Address space whose pages get memory when they are written to.
template <class T>
T* reserve(int64_t size) {
  void* const data = mmap(nullptr, size * sizeof(T), PROT_READ | PROT_WRITE,
                          MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (data == MAP_FAILED) std::abort();
  return static_cast<T*>(data);
}

zero8::Segment segment(int64_t numel, int64_t first, int64_t blocks) {
  zero8::Segment s{};
  float* const param = reserve<float>(numel);
  float* const grad = reserve<float>(numel);
  uint8_t* const m = reserve<uint8_t>(numel);
  uint8_t* const v = reserve<uint8_t>(numel);
  for (int64_t i = 0; i < kRest; ++i) {
    const int64_t at = numel - kRest + i;
    param[at] = 1.0f;
    grad[at] = static_cast<float>(i % 97 - 40) / 16.0f;
  }
  s.param = param;
  s.grad = grad;
  s.algorithm = zero8::kAdam;
  s.moments[0] = {m, reserve<float>(blocks), blocks, zero8::kLog, 0};
  s.moments[1] = {v, reserve<float>(2 * blocks), 2 * blocks, zero8::kLog, 12345};
  s.numel = numel;
  s.first = first;
  s.row_length = kRow;
  s.block_size = kBlockSize;
  return s;
}

template <class T>
void compare(const void* large, const void* small, int64_t offset, int64_t size, const char* name) {
  if (std::memcmp(static_cast<const T*>(large) + offset, small, size * sizeof(T)) == 0) return;
  std::printf("%s differs\n", name);
  std::exit(1);
}

}  // namespace

int main() {
  const zero8::StepScalars scalars = {
      {0.9f, 0.999f, 0.1f, 0.0316f, 31.6f, 1e-8f, 10.0f, 1e-3f, 0.99f, 0.0f, 1.0f, 1.1f, 1.0f}};
  const auto maps = reserve<zero8::CodecMaps>(1);
  zero8::Segment large = segment(kNumel, 0, kBlocks);
  zero8::Segment small = segment(kRest, kFirst, kBlocks - kFirstBlock);
  for (int i = 0; i < zero8::kNumIsas; ++i) {
    const zero8::Isa& isa = zero8::kIsas[i];
    if (!isa.is_supported()) continue;
    isa.steps->step_blocks[large.algorithm](large, scalars, *maps, kFirstBlock, kBlocks, nullptr);
    isa.steps->step_blocks[small.algorithm](small, scalars, *maps, 0, kBlocks - kFirstBlock,
                                            nullptr);
    compare<float>(large.param, small.param, kFirst, kRest, "param");
    for (int k = 0; k < 2; ++k) {
      const zero8::Moment &ours = large.moments[k], &theirs = small.moments[k];
      const int per_block = k + 1;
      compare<uint8_t>(ours.values, theirs.values, kFirst, kRest, "codes");
      compare<float>(ours.scales, theirs.scales, per_block * kFirstBlock,
                     per_block * (kBlocks - kFirstBlock), "scales");
    }
    if (static_cast<float*>(small.param)[0] == 1.0f) std::abort();
    std::printf("%s\n", isa.name);
  }
}
