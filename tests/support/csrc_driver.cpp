// SPDX-License-Identifier: Apache-2.0
// Steps over segments of many kinds in memory of exactly their size, for the sanitizers to watch.
#include <sys/mman.h>

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <memory>

#include "csrc_kinds.h"
#include "isa.h"

namespace {

constexpr Shape kShapes[] = {
    {1237, 501, 700, 256, 2 + 3 + 2},  // the end of a row, a row, the beginning of a row
    {9001, 0, 9001, zero8::kMaxBlockSize, 3},
    kNarrow,
};

// Elements that end where an inaccessible page begins: the address sanitizer does not see masked
// loads and stores, the processor does.
template <class T>
class Array {
 public:
  Array(int64_t size, T value) {
    const size_t bytes = size * sizeof(T), used = (bytes + kPage - 1) / kPage * kPage;
    length_ = used + kPage;
    map_ = mmap(nullptr, length_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    char* const guard = static_cast<char*>(map_) + used;
    if (map_ == MAP_FAILED || mprotect(guard, kPage, PROT_NONE)) std::abort();
    data_ = reinterpret_cast<T*>(guard - bytes);
    for (int64_t i = 0; i < size; ++i) data_[i] = value;
  }
  ~Array() { munmap(map_, length_); }
  Array(const Array&) = delete;
  T* get() { return data_; }
  T& operator[](int64_t i) { return data_[i]; }

 private:
  static constexpr size_t kPage = 65536;  // a multiple of every processor's
  void* map_;
  size_t length_;
  T* data_;
};

void step(const zero8::CodecMaps& maps, const Shape& shape, const zero8::Isa& isa,
          zero8::Codec codec, Types types, zero8::Rounding rounding) {
  const int64_t numel = shape.numel, num_blocks = shape.num_blocks;
  Array<float> wide_param(numel, 1.0f), wide_grad(numel, 0.0f);
  Array<uint16_t> narrow_param(numel, 0x3F80), narrow_grad(numel, 0);
  Array<uint8_t> int8_param(numel, 100);
  Array<float> wide_scales(numel / shape.own_row_length, 0.01f);
  Array<uint16_t> narrow_scales(numel / shape.own_row_length, 0x3C24);
  const bool is_half = types.grad == zero8::kFP16;
  for (int64_t i = 0; i < numel; ++i) {
    const uint32_t bits = exponent_of(i, numel, 127, 40) << 23;
    __builtin_memcpy(&wide_grad[i], &bits, sizeof bits);
    const uint32_t half = exponent_of(i, numel, 15, 14) << 10;
    narrow_grad[i] = static_cast<uint16_t>(is_half ? half : bits >> 16);
  }
  const int64_t bytes = moment_bytes(codec, shape);
  Array<uint8_t> m(bytes, 0), v(bytes, 0), correction(numel, 1);
  Array<float> m_scale(num_blocks, 0.0f);
  Array<float> v_scale(zero8::size_of_codec(codec).scales_of_unsigned * num_blocks, 0.0f);
  zero8::Segment segment{};
  if (types.param == zero8::kFP32) segment.param = wide_param.get();
  if (types.param == zero8::kBF16) segment.param = narrow_param.get();
  if (types.param == zero8::kINT8) {
    segment.param = int8_param.get();
    segment.row_scales_dtype = types.row_scales();
    const bool are_wide = segment.row_scales_dtype == zero8::kFP32;
    segment.row_scales = are_wide ? static_cast<void*>(wide_scales.get()) : narrow_scales.get();
  }
  segment.grad =
      types.grad == zero8::kFP32 ? static_cast<void*>(wide_grad.get()) : narrow_grad.get();
  segment.algorithm = zero8::kAdam;
  segment.moments[0].values = m.get();
  segment.moments[1].values = v.get();
  segment.moments[0].scales = m_scale.get();
  segment.moments[1].scales = v_scale.get();
  for (zero8::Moment& moment : segment.moments) moment.codec = codec;
  segment.correction = types.is_corrected ? correction.get() : nullptr;
  segment.numel = numel;
  segment.first = shape.first;
  segment.row_length = shape.row_length;
  segment.own_row_length = shape.own_row_length;
  segment.block_size = shape.block_size;
  segment.param_dtype = types.param;
  segment.grad_dtype = types.grad;
  segment.rounding = rounding;
  for (int threads = 1; threads <= 3; ++threads) {
    segment.scalars = threads % 2;
    zero8::step(&segment, 1, kScalars, maps, threads, isa);
  }
  wide_grad[7] = NAN;
  narrow_grad[7] = is_half ? 0x7C00 : 0x7F80;
  zero8::step(&segment, 1, kScalars, maps, 2, isa);
  if (segment.nonfinite_blocks != 1) __builtin_trap();
}

}  // namespace

int main() {
  auto maps = std::make_unique<zero8::CodecMaps>();
  fill(maps->of_signed, true);
  fill(maps->of_unsigned, false);
  for (int i = 0; i < zero8::kNumIsas; ++i) {
    const zero8::Isa& isa = zero8::kIsas[i];
    if (!isa.is_supported()) continue;
    for (const zero8::Codec codec : kCodecs) {
      for (const Types types : kTypes) {
        for (const zero8::Rounding rounding : kRoundings) {
          if (rounding != zero8::kNearest && !types.is_rounded()) continue;
          for (const Shape& shape : kShapes) {
            step(*maps, shape_for(types, shape), isa, codec, types, rounding);
          }
        }
      }
    }
    std::printf("%s\n", isa.name);
  }
}
