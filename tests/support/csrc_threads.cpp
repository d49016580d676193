// SPDX-License-Identifier: Apache-2.0
// Steps of several threads, for the thread sanitizer to watch; linked with gomp_of_threads.cpp.
//
//     csrc_threads        steps over segments of every kind; the bits must be those of one thread
//     csrc_threads ISA    makes a race: two threads step over the same segment
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <vector>

#include "csrc_kinds.h"
#include "isa.h"

namespace {

constexpr Shape kShapes[] = {
    {1237, 501, 700, 256, 2 + 3 + 2},  // the end of a row, a row, the beginning of a row
    {5, 0, 5, 64, 1},
    {4 * 1031, 0, 1031, 256, 4 * 5},
    {9001, 0, 9001, zero8::kMaxBlockSize, 3},
    kNarrow,
};
constexpr int64_t kNumel = 1237 + 5 + 4 * 1031 + 9001 + 650, kNumBlocks = 7 + 1 + 20 + 3 + 11;
constexpr int kNumSegments = sizeof kShapes / sizeof kShapes[0];
// Every second block of this one gets an infinite gradient.  3 threads cut it, and so do 8: several
// of them add to its count of such blocks.
constexpr int kSegmentWithInfinities = 2;
constexpr int kNumThreads[] = {2, 3, 8};

struct Kind {
  zero8::Codec codec;
  Types types;
  zero8::Rounding rounding;
};

using Bytes = std::vector<uint8_t>;

// Segments of all shapes, one after the other in the same arrays, as in a partition of ZeRO.
class List {
 public:
  explicit List(const Kind& kind) {
    const int64_t param_size = zero8::size_bytes(kind.types.param);
    int64_t num_moment_bytes = 0;
    for (int k = 0; k < kNumSegments; ++k) {
      shapes_[k] = shape_for(kind.types, kShapes[k]);
      num_moment_bytes += moment_bytes(kind.codec, shapes_[k]);
    }
    const zero8::CodecSize size = zero8::size_of_codec(kind.codec);
    grad_size_ = zero8::size_bytes(kind.types.grad);
    is_half_ = kind.types.grad == zero8::kFP16;
    param_.resize(kNumel * param_size);
    grad_.resize(kNumel * grad_size_);
    correction_.resize(kNumel);
    for (int64_t i = 0; i < kNumel; ++i) {
      const float scale = 0.01f;  // its upper half is a bfloat16
      const int64_t size = zero8::size_bytes(kind.types.row_scales());
      row_scales_.resize(row_scales_.size() + size);
      std::memcpy(&row_scales_[i * size], reinterpret_cast<const char*>(&scale) + 4 - size, size);
    }
    exp_avg_.resize(num_moment_bytes);
    exp_avg_sq_.resize(num_moment_bytes);
    exp_avg_scale_.resize(kNumBlocks * size.scales_of_signed);
    exp_avg_sq_scale_.resize(kNumBlocks * size.scales_of_unsigned);
    for (int64_t i = 0; i < kNumel; ++i) {
      const uint32_t one = param_size == 4 ? 0x3F800000 : param_size == 2 ? 0x3F80 : 100;
      std::memcpy(&param_[i * param_size], &one, param_size);
      write_grad(i, is_half_ ? exponent_of(i, kNumel, 15, 14) << 10
                             : exponent_of(i, kNumel, 127, 40) << 23);
    }
    int64_t element = 0, row = 0, block = 0, moment_byte = 0;
    for (int k = 0; k < kNumSegments; ++k) {
      const Shape& shape = shapes_[k];
      zero8::Segment& segment = segments_[k];
      segment.param = param_.data() + element * param_size;
      segment.grad = grad_.data() + element * grad_size_;
      segment.algorithm = zero8::kAdam;
      segment.moments[0].values = exp_avg_.data() + moment_byte;
      segment.moments[1].values = exp_avg_sq_.data() + moment_byte;
      segment.moments[0].scales = exp_avg_scale_.data() + block * size.scales_of_signed;
      segment.moments[1].scales = exp_avg_sq_scale_.data() + block * size.scales_of_unsigned;
      for (zero8::Moment& moment : segment.moments) moment.codec = kind.codec;
      segment.correction = kind.types.is_corrected ? correction_.data() + element : nullptr;
      if (kind.types.param == zero8::kINT8) {
        segment.row_scales_dtype = kind.types.row_scales();
        const int64_t size = zero8::size_bytes(segment.row_scales_dtype);
        segment.row_scales = row_scales_.data() + row * size;
        row += shape.numel / shape.own_row_length;
      }
      segment.numel = shape.numel;
      segment.first = shape.first;
      segment.row_length = shape.row_length;
      segment.own_row_length = shape.own_row_length;
      segment.block_size = shape.block_size;
      segment.param_dtype = kind.types.param;
      segment.grad_dtype = kind.types.grad;
      segment.rounding = kind.rounding;
      element += shape.numel;
      block += shape.num_blocks;
      moment_byte += moment_bytes(kind.codec, shape);
    }
  }

  void step(const zero8::CodecMaps& maps, int num_threads, const zero8::Isa& isa) {
    for (int k = 0; k < kNumSteps; ++k) {
      if (k == 1) add_infinities();
      for (zero8::Segment& segment : segments_) segment.scalars = k % 2;
      zero8::step(segments_, kNumSegments, kScalars, maps, num_threads, isa);
    }
  }

  void race(const zero8::CodecMaps& maps, const zero8::Isa& isa) {
    zero8::Segment twice[] = {segments_[0], segments_[0]};
    zero8::step(twice, 2, kScalars, maps, 2, isa);
  }

  bool counts_infinities() const {
    for (int k = 0; k < kNumSegments; ++k) {
      // The first step meets none.
      const int64_t expected = k == kSegmentWithInfinities ? kNumInfinities * (kNumSteps - 1) : 0;
      if (segments_[k].nonfinite_blocks != expected) return false;
    }
    return true;
  }

  bool operator==(const List& other) const {
    return param_ == other.param_ && row_scales_ == other.row_scales_ &&
           correction_ == other.correction_ && exp_avg_ == other.exp_avg_ &&
           exp_avg_sq_ == other.exp_avg_sq_ && exp_avg_scale_ == other.exp_avg_scale_ &&
           exp_avg_sq_scale_ == other.exp_avg_sq_scale_;
  }

 private:
  static constexpr int kNumSteps = 3, kNumInfinities = 10;

  void add_infinities() {
    const Shape& shape = shapes_[kSegmentWithInfinities];
    int64_t begin = 0;
    for (int k = 0; k < kSegmentWithInfinities; ++k) begin += shapes_[k].numel;
    for (int k = 0; k < kNumInfinities; ++k) {
      const int64_t row = 2 * k / 5, block = 2 * k % 5;  // of 5 blocks in a row
      write_grad(begin + row * shape.row_length + block * shape.block_size + 3,
                 is_half_ ? 0x7C00 : 0x7F800000);
    }
  }

  // `bits` is the pattern of a half, or of a float.
  void write_grad(int64_t i, uint32_t bits) {
    if (grad_size_ == 2 && !is_half_) bits >>= 16;
    std::memcpy(&grad_[i * grad_size_], &bits, grad_size_);
  }

  int64_t grad_size_;
  bool is_half_;
  Bytes param_, row_scales_, grad_, correction_, exp_avg_, exp_avg_sq_;
  std::vector<float> exp_avg_scale_, exp_avg_sq_scale_;
  Shape shapes_[kNumSegments];
  zero8::Segment segments_[kNumSegments]{};
};

void compare(const Kind& kind, const zero8::CodecMaps& maps, const zero8::Isa& isa) {
  List expected(kind);
  expected.step(maps, 1, isa);
  if (!expected.counts_infinities()) {
    std::printf("%s: wrong count with 1 thread\n", isa.name);
    std::exit(1);
  }
  for (const int num_threads : kNumThreads) {
    List list(kind);
    list.step(maps, num_threads, isa);
    if (list == expected && list.counts_infinities()) continue;
    std::printf("%s: codec %d, rounding %d: other bits with %d threads\n", isa.name, kind.codec,
                kind.rounding, num_threads);
    std::exit(1);
  }
}

}  // namespace

int main(int argc, char** argv) {
  auto maps = std::make_unique<zero8::CodecMaps>();
  fill(maps->of_signed, true);
  fill(maps->of_unsigned, false);
  for (int i = 0; i < zero8::kNumIsas; ++i) {
    const zero8::Isa& isa = zero8::kIsas[i];
    if (!isa.is_supported()) continue;
    if (argc > 1) {
      if (!std::strcmp(argv[1], isa.name)) {
        // Whose accesses to memory are vectors, all of them.
        List({zero8::kFloat32, kTypes[0], zero8::kNearest}).race(*maps, isa);
      }
      continue;
    }
    for (const zero8::Codec codec : kCodecs) {
      for (const Types types : kTypes) {
        for (const zero8::Rounding rounding : kRoundings) {
          if (rounding != zero8::kNearest && !types.is_rounded()) continue;
          compare({codec, types, rounding}, *maps, isa);
        }
      }
    }
    std::printf("%s\n", isa.name);
  }
}
