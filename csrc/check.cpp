// SPDX-License-Identifier: Apache-2.0
#include <initializer_list>

#include "algorithms.h"
#include "host.h"

#define ZERO8_TARGET check
#include "blocks.h"

namespace zero8 {
namespace {

constexpr int64_t kMaxColumns = int64_t{1} << 30;  // of INT8 weights: ints count them

// A field, its value, and whether a kernel takes it.
struct Field {
  const char* name;
  int64_t value;
  bool is_taken;
};

// The first that is not taken, with its value; empty without one.  The text is made only then: with
// it the check of a small segment would take as long as its step.
std::string first_wrong(std::initializer_list<Field> fields) {
  for (const Field& field : fields) {
    if (!field.is_taken) return std::string(field.name) + ": got " + std::to_string(field.value);
  }
  return {};
}

bool is_within(int64_t x, int64_t first, int64_t last) { return x >= first && x <= last; }

// Memory with numbers of so many bytes; null if it `may_miss`.
Field address(const char* name, const void* p, int64_t bytes, bool may_miss) {
  const auto number = reinterpret_cast<int64_t>(p);
  return {name, number, number == 0 ? may_miss : number % bytes == 0};
}

std::string wrong_size(const Segment& s) {
  const std::string found = first_wrong({
      {"block_size", s.block_size,
       is_within(s.block_size, kMinBlockSize, kMaxBlockSize) &&
           (s.block_size & (s.block_size - 1)) == 0},
      {"row_length", s.row_length, is_within(s.row_length, 1, kMaxElements)},
      {"own_row_length", s.own_row_length, s.own_row_length >= 1},
      {"numel", s.numel, is_within(s.numel, 0, kMaxElements)},
  });
  if (!found.empty()) return found;
  return first_wrong({{"own_row_length", s.own_row_length, s.row_length % s.own_row_length == 0},
                      {"first", s.first, is_within(s.first, 0, kMaxElements - s.numel)},
                      {"algorithm", s.algorithm, is_within(s.algorithm, 1, kNumAlgorithms - 1)}});
}

// What chooses the code that runs, and the scalars that it reads.
std::string wrong_kind(const Segment& s, int64_t num_scalars, bool takes_int8) {
  const bool are_codes = s.moments[0].codec != kFloat32, is_narrow = s.param_dtype == kBF16;
  const bool is_int8 = takes_int8 && s.param_dtype == kINT8;
  const bool converts = takes_int8 && are_codes && s.param_dtype == kFP32 && s.grad_dtype == kFP32;
  return first_wrong({
      {"algorithm", s.algorithm, s.algorithm < kReadSigned || converts},
      {"param_dtype", s.param_dtype, is_int8 || is_within(s.param_dtype, kFP32, kBF16)},
      {"param_dtype", s.param_dtype, is_narrow || !s.correction},
      {"grad_dtype", s.grad_dtype, is_within(s.grad_dtype, kFP32, is_narrow ? kBF16 : kFP16)},
      {"rounding", s.rounding, is_within(s.rounding, kNearest, kHash)},
      {"copy_dtype", s.copy_dtype,
       !s.copy || is_within(s.copy_dtype, kBF16, is_narrow ? kBF16 : kFP16)},
      {"scalars", s.scalars, is_within(s.scalars, 0, num_scalars - 1)},
  });
}

// Of INT8 weights.
std::string wrong_rows(const Segment& s) {
  const int64_t columns = s.own_row_length;
  const bool is_empty = s.numel == 0;  // and so without rows that say how long they are
  const bool is_whole =
      columns == s.row_length || s.row_length <= s.block_size || s.first + s.numel <= s.row_length;
  return first_wrong({
      {"copy", reinterpret_cast<int64_t>(s.copy), !s.copy},
      {"row_scales_dtype", s.row_scales_dtype, is_within(s.row_scales_dtype, kFP32, kBF16)},
      {"own_row_length", columns, columns <= kMaxColumns},
      {"first", s.first, is_empty || s.first % columns == 0},
      {"numel", s.numel, s.numel % columns == 0},
      {"row_length", s.row_length, is_empty || is_whole},
      address("row_scales", s.row_scales, size_bytes(s.row_scales_dtype), is_empty),
  });
}

std::string wrong_memory(const Segment& s) {
  const bool is_empty = s.numel == 0;
  std::string found = first_wrong({
      address("param", s.param, size_bytes(s.param_dtype), is_empty),
      address("grad", s.grad, size_bytes(s.grad_dtype), is_empty),
      address("copy", s.copy, size_bytes(s.copy_dtype), true),
      address("weight_sums", s.weight_sums, alignof(WeightSums), true),
  });
  const int64_t blocks = check::num_blocks(s);
  for (int k = 0; k < kMomentsOf[s.algorithm].count && found.empty(); ++k) {
    const Moment& moment = s.moments[k];
    const CodecSize size = size_of_codec(moment.codec);
    const bool is_signed = kMomentsOf[s.algorithm].is_signed[k];
    const int scales = is_signed ? size.scales_of_signed : size.scales_of_unsigned;
    found = first_wrong({
        {"codec", moment.codec, size.name && moment.codec == s.moments[0].codec},
        {"scales", moment.num_scales, moment.num_scales == blocks * scales},
        address("values", moment.values, scales ? 1 : sizeof(float), is_empty),
        address("scales", moment.scales, sizeof(float), is_empty || scales == 0),
    });
    if (!found.empty()) found = "moments[" + std::to_string(k) + "]." + found;
  }
  return found;
}

}  // namespace

std::string violation(const Segment* segments, int64_t num_segments, int64_t num_scalars,
                      bool takes_int8) {
  for (int64_t i = 0; i < num_segments; ++i) {
    const Segment& s = segments[i];
    // In this order: what comes later computes with what was checked before.
    std::string found = wrong_size(s);
    if (found.empty()) found = wrong_kind(s, num_scalars, takes_int8);
    if (found.empty() && s.param_dtype == kINT8) found = wrong_rows(s);
    if (found.empty()) found = wrong_memory(s);
    if (!found.empty()) return "segment " + std::to_string(i) + ": " + found;
  }
  return {};
}

void sum_blocks(const Segment* segments, int64_t num_segments, int64_t* sums) {
  sums[0] = 0;
  for (int64_t i = 0; i < num_segments; ++i) sums[i + 1] = sums[i] + check::num_blocks(segments[i]);
}

}  // namespace zero8
