// SPDX-License-Identifier: Apache-2.0
// Steps of several threads over segments of many kinds, for the sanitizers to watch.
//
//     csrc_driver        any number of threads must write the bits of one
//     csrc_driver ISA    makes a race: two threads step over the same segment
#include <sys/mman.h>

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>

#include "algorithms.h"
#include "format.h"
#include "isa.h"

namespace {

// --- The kinds of segments ---

struct Types {
  zero8::DType param, grad;
  bool is_corrected = false;

  // Whether the parameter's rounding is chosen by the segment.
  bool is_rounded() const { return param != zero8::kFP32 && !is_corrected; }
  // Of INT8 weights.
  zero8::DType row_scales() const { return grad == zero8::kBF16 ? zero8::kBF16 : zero8::kFP32; }
};
constexpr Types kTypes[] = {
    {zero8::kFP32, zero8::kFP32},       {zero8::kFP32, zero8::kBF16},
    {zero8::kFP32, zero8::kFP16},       {zero8::kBF16, zero8::kFP32},
    {zero8::kBF16, zero8::kBF16},       {zero8::kBF16, zero8::kFP32, true},
    {zero8::kBF16, zero8::kBF16, true}, {zero8::kINT8, zero8::kFP32},
    {zero8::kINT8, zero8::kBF16},       {zero8::kINT8, zero8::kFP16},
};
constexpr zero8::Codec kCodecs[] = {zero8::kFloat32, zero8::kDynamic, zero8::kLog,
                                    zero8::kFp8,     zero8::kLog6,    zero8::kLinear4};
constexpr zero8::Rounding kRoundings[] = {zero8::kNearest, zero8::kDither, zero8::kHash};

// With L2 and a short first moment, without it and with a long one.
constexpr zero8::StepScalars kScalars[] = {
    {{0.9f, 0.999f, 0.1f, 0.0316f, 1.0f, 1e-8f, 10.0f, 1e-3f, 0.99f, 0.01f, 1.0f, 1.1f, 1.0f}},
    {{0.9f, 0.999f, 0.1f, 0.0316f, 1.0f, 1e-8f, 10.0f, 1e-3f, 0.99f, 0.0f, 1.0f, 1.01f, 1.0f}},
};

struct Shape {
  int64_t numel, first, row_length;
  int32_t block_size;
  int64_t num_blocks;
  int64_t own_row_length = row_length;
};
// Whose rows share their blocks.
constexpr Shape kNarrow = {650, 3, 60, 64, 11, 5};

// A shape as a segment of these types can have it: of INT8 weights whole rows.
Shape shape_for(const Types& types, Shape shape) {
  if (types.param != zero8::kINT8) return shape;
  const auto blocks = [&](int64_t elements) {
    return (elements + shape.block_size - 1) / shape.block_size;
  };
  shape.first = 0;
  shape.numel -= shape.numel % shape.own_row_length;
  shape.num_blocks = shape.numel / shape.row_length * blocks(shape.row_length) +
                     blocks(shape.numel % shape.row_length);
  return shape;
}

// Of one moment: floats, a byte for each code, four codes of 6 bits in three bytes, or two of 4
// bits in one.
int64_t moment_bytes(zero8::Codec codec, const Shape& shape) {
  if (codec == zero8::kFloat32) return 4 * shape.numel;
  if (codec != zero8::kLog6 && codec != zero8::kLinear4) return shape.numel;
  const int64_t codes = codec == zero8::kLog6 ? 4 : 2, bytes = codec == zero8::kLog6 ? 3 : 1;
  const auto unit_of = [&](int64_t element) {
    const int64_t row = shape.own_row_length;
    return element / row * ((row + codes - 1) / codes) + element % row / codes;
  };
  return bytes * (unit_of(shape.first + shape.numel - 1) - unit_of(shape.first) + 1);
}

// Powers of two, as patterns of exponents: equal ones in the first half, then ones of `octaves`.
// Blocks of `log` are of both kinds then, and some hold more than they can tell apart.
uint32_t exponent_of(int64_t i, int64_t numel, int bias, int octaves) {
  return static_cast<uint32_t>(bias - 1 - (i < numel / 2 ? 0 : i % octaves));
}

// Ascending entries -1 .. 1 or 0 .. 1 at equal distances: a map of a single piece.
void fill(zero8::DynamicMap& map, bool is_signed) {
  const auto level = [=](float i) { return is_signed ? (i - 127.0f) / 128.0f : i / 255.0f; };
  for (int i = 0; i < 256; ++i) {
    map.levels[i] = level(static_cast<float>(i));
    map.thresholds[i] = i < 255 ? level(static_cast<float>(i) + 0.5f) : INFINITY;
  }
  for (int i = 0; i < 8; ++i) {
    map.joint[i] = 0x7F800000;
    map.slope[i] = (is_signed ? 128.0f : 255.0f) * 65536.0f;
    map.offset[i] = 32768.0f;
    map.last[i] = is_signed ? 128 : 255;
  }
}

constexpr Shape kShapes[] = {
    {1237, 501, 700, 256, 2 + 3 + 2},  // the end of a row, a row, the beginning of a row
    {4 * 1031, 0, 1031, 256, 4 * 5},
    {9001, 0, 9001, zero8::kMaxBlockSize, 3},
    kNarrow,
};
constexpr int kNumSegments = sizeof kShapes / sizeof kShapes[0];
// Every second block of this one gets an infinite gradient.  3 threads cut it, and so do 8: several
// of them add to its count of such blocks.
constexpr int kSegmentWithInfinities = 1;
constexpr int kNumSteps = 3, kNumInfinities = 10, kNumThreads[] = {2, 3, 8};

struct Kind {
  zero8::Codec codec;
  Types types;
  zero8::Rounding rounding;
};

// Bytes that end where an inaccessible page begins: the address sanitizer does not see masked loads
// and stores, the processor does.
class Bytes {
 public:
  explicit Bytes(int64_t size) : size_(size) {
    const size_t used = (size + kPage - 1) / kPage * kPage;
    length_ = used + kPage;
    map_ = mmap(nullptr, length_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    char* const guard = static_cast<char*>(map_) + used;
    if (map_ == MAP_FAILED || mprotect(guard, kPage, PROT_NONE)) std::abort();
    data_ = guard - size;
  }
  // Items of so many bytes, all with the first ones of `value`.
  Bytes(int64_t items, int64_t of_item, uint32_t value) : Bytes(items * of_item) {
    for (int64_t i = 0; i < items; ++i) set(i, of_item, value);
  }
  ~Bytes() { munmap(map_, length_); }
  Bytes(const Bytes&) = delete;
  void set(int64_t i, int64_t of_item, uint32_t value) {
    std::memcpy(data_ + i * of_item, &value, of_item);
  }
  char* data() const { return data_; }
  bool operator==(const Bytes& other) const { return !std::memcmp(data_, other.data_, size_); }

 private:
  static constexpr size_t kPage = 65536;  // a multiple of every processor's
  int64_t size_;
  void* map_;
  size_t length_;
  char* data_;
};

// One segment of Adam's, and its memory.
class Owned {
 public:
  Owned(const Kind& kind, const Shape& shape)
      : shape_(shape),
        types_(kind.types),
        size_(zero8::size_of_codec(kind.codec)),
        row_scales_(shape.numel / shape.own_row_length, zero8::size_bytes(types_.row_scales()),
                    types_.row_scales() == zero8::kFP32 ? 0x3C23D70A : 0x3C24),
        correction_(shape.numel, 1, 1),
        param_(shape.numel, zero8::size_bytes(types_.param),
               types_.param == zero8::kFP32   ? 0x3F800000
               : types_.param == zero8::kBF16 ? 0x3F80
                                              : 100),
        grad_(shape.numel, zero8::size_bytes(types_.grad), 0),
        m_(moment_bytes(kind.codec, shape)),
        v_(moment_bytes(kind.codec, shape)),
        m_scale_(shape.num_blocks * size_.scales_of_signed, sizeof(float), 0),
        v_scale_(shape.num_blocks * size_.scales_of_unsigned, sizeof(float), 0) {
    for (int64_t i = 0; i < shape.numel; ++i) {
      set_grad(i, types_.grad == zero8::kFP16 ? exponent_of(i, shape.numel, 15, 14) << 10
                                              : exponent_of(i, shape.numel, 127, 40) << 23);
    }
  }
  zero8::Segment segment(const Kind& kind) const {
    zero8::Segment s{};
    s.param = param_.data();
    s.grad = grad_.data();
    s.correction = types_.is_corrected ? correction_.data() : nullptr;
    if (types_.param == zero8::kINT8) {
      s.row_scales = row_scales_.data();
      s.row_scales_dtype = types_.row_scales();
    }
    s.algorithm = zero8::kAdam;
    s.moments[0] = {m_.data(), reinterpret_cast<float*>(m_scale_.data()), 0, kind.codec, 0};
    s.moments[1] = {v_.data(), reinterpret_cast<float*>(v_scale_.data()), 0, kind.codec, 0};
    s.numel = shape_.numel;
    s.first = shape_.first;
    s.row_length = shape_.row_length;
    s.own_row_length = shape_.own_row_length;
    s.block_size = shape_.block_size;
    s.param_dtype = types_.param;
    s.grad_dtype = types_.grad;
    s.rounding = kind.rounding;
    return s;
  }
  void add_infinities() {
    for (int k = 0; k < kNumInfinities; ++k) {
      const int64_t row = 2 * k / 5, block = 2 * k % 5;  // of 5 blocks in a row
      set_grad(row * shape_.row_length + block * shape_.block_size + 3,
               types_.grad == zero8::kFP16 ? 0x7C00 : 0x7F800000);
    }
  }
  bool operator==(const Owned& other) const {
    return param_ == other.param_ && row_scales_ == other.row_scales_ &&
           correction_ == other.correction_ && m_ == other.m_ && v_ == other.v_ &&
           m_scale_ == other.m_scale_ && v_scale_ == other.v_scale_;
  }

 private:
  // `bits` is the pattern of a half, or of a float.
  void set_grad(int64_t i, uint32_t bits) {
    grad_.set(i, zero8::size_bytes(types_.grad), types_.grad == zero8::kBF16 ? bits >> 16 : bits);
  }

  Shape shape_;
  Types types_;
  zero8::CodecSize size_;
  Bytes row_scales_, correction_, param_, grad_, m_, v_, m_scale_, v_scale_;
};

// Segments of all shapes after some steps.
struct Stepped {
  std::unique_ptr<Owned> owned[kNumSegments];
  zero8::Segment segments[kNumSegments];

  Stepped(const Kind& kind, const zero8::CodecMaps& maps, int num_threads, const zero8::Isa& isa) {
    for (int k = 0; k < kNumSegments; ++k) {
      owned[k].reset(new Owned(kind, shape_for(kind.types, kShapes[k])));
      segments[k] = owned[k]->segment(kind);
    }
    for (int step = 0; step < kNumSteps; ++step) {
      if (step == 1) owned[kSegmentWithInfinities]->add_infinities();
      for (zero8::Segment& segment : segments) segment.scalars = step % 2;
      zero8::step(segments, kNumSegments, kScalars, maps, num_threads, isa);
    }
  }
  bool is_like(const Stepped& other) const {
    for (int k = 0; k < kNumSegments; ++k) {
      // The first step meets no infinity.
      const int64_t skipped = k == kSegmentWithInfinities ? kNumInfinities * (kNumSteps - 1) : 0;
      if (segments[k].nonfinite_blocks != skipped || !(*owned[k] == *other.owned[k])) return false;
    }
    return true;
  }
};

void compare(const Kind& kind, const zero8::CodecMaps& maps, const zero8::Isa& isa) {
  const Stepped expected(kind, maps, 1, isa);
  for (const int num_threads : kNumThreads) {
    if (Stepped(kind, maps, num_threads, isa).is_like(expected)) continue;
    std::printf("%s: codec %d, rounding %d: other bits or counts with %d threads\n", isa.name,
                kind.codec, kind.rounding, num_threads);
    std::exit(1);
  }
}

void race(const zero8::CodecMaps& maps, const zero8::Isa& isa) {
  // Whose accesses to memory are vectors, all of them.
  const Kind kind = {zero8::kFloat32, kTypes[0], zero8::kNearest};
  const Owned owned(kind, kShapes[0]);
  zero8::Segment twice[] = {owned.segment(kind), owned.segment(kind)};
  zero8::step(twice, 2, kScalars, maps, 2, isa);
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
      if (!std::strcmp(argv[1], isa.name)) race(*maps, isa);
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
