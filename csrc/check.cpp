// SPDX-License-Identifier: Apache-2.0
#include "check.h"

#include "algorithms.h"

#define ZERO8_TARGET check
#include "blocks.h"

namespace zero8 {
namespace {

constexpr int64_t kMaxColumns = int64_t{1} << 30;  // of INT8 weights: ints count them

std::string wrong(const std::string& field, int64_t got, const std::string& expected) {
  return field + ": got " + std::to_string(got) + ", expected " + expected;
}

std::string of_moment(int k, const char* field) {
  return "moments[" + std::to_string(k) + "]." + field;
}

std::string wrong_size(const Segment& s) {
  const bool is_served = s.block_size >= kMinBlockSize && s.block_size <= kMaxBlockSize;
  if (!is_served || (s.block_size & (s.block_size - 1)) != 0) {
    return wrong("block_size", s.block_size, "a power of two from 64 to 4096");
  }
  if (s.row_length < 1 || s.row_length > kMaxElements) {
    return wrong("row_length", s.row_length, "1 to 2^48");
  }
  if (s.own_row_length < 1 || s.row_length % s.own_row_length != 0) {
    return wrong("own_row_length", s.own_row_length, "a divisor of row_length");
  }
  if (s.numel < 0 || s.numel > kMaxElements) return wrong("numel", s.numel, "0 to 2^48");
  if (s.first < 0 || s.first > kMaxElements - s.numel) {
    return wrong("first", s.first, "an element of a parameter of at most 2^48");
  }
  return {};
}

std::string codecs_served() {
  std::string names;
  for (const CodecSize& size : kCodecSizes) {
    if (!names.empty()) names += ", ";
    names += std::to_string(size.codec) + " (" + size.name + ")";
  }
  return names;
}

// What chooses the code that runs, and the scalars that it reads.
std::string wrong_kind(const Segment& s, int64_t num_scalars, bool takes_int8) {
  if (s.algorithm < 1 || s.algorithm >= kNumAlgorithms) {
    return wrong("algorithm", s.algorithm, "1 to " + std::to_string(kNumAlgorithms - 1));
  }
  for (int k = 0; k < kMomentsOf[s.algorithm].count; ++k) {
    const int32_t codec = s.moments[k].codec, first = s.moments[0].codec;
    if (!size_of_codec(codec).name) {
      return wrong(of_moment(k, "codec"), codec, "one of " + codecs_served());
    }
    if (codec != first) {
      return wrong(of_moment(k, "codec"), codec, std::to_string(first) + ", as the first has");
    }
  }
  const bool are_codes = s.moments[0].codec != kFloat32;
  const bool converts = takes_int8 && are_codes && s.param_dtype == kFP32 && s.grad_dtype == kFP32;
  if (s.algorithm >= kReadSigned && !converts) {
    return wrong("algorithm", s.algorithm, "1 to 4, or on the CPU a moment's codes and floats");
  }
  if (s.param_dtype != kFP32 && s.param_dtype != kBF16 && !(takes_int8 && s.param_dtype == kINT8)) {
    return wrong(
        "param_dtype", s.param_dtype,
        takes_int8 ? "0 (float32), 1 (bfloat16) or 3 (int8)" : "0 (float32) or 1 (bfloat16)");
  }
  const bool takes_half = s.param_dtype != kBF16;
  if (s.grad_dtype != kFP32 && s.grad_dtype != kBF16 && !(takes_half && s.grad_dtype == kFP16)) {
    return wrong("grad_dtype", s.grad_dtype,
                 takes_half ? "0 (float32), 1 (bfloat16) or 2 (float16)"
                            : "0 (float32) or 1 (bfloat16) for a bfloat16 parameter");
  }
  if (s.rounding < kNearest || s.rounding > kHash) return wrong("rounding", s.rounding, "0 to 2");
  if (s.correction && s.param_dtype != kBF16) {
    return wrong("param_dtype", s.param_dtype, "1 (bfloat16) with a correction");
  }
  if (s.copy && s.copy_dtype != kBF16 && s.copy_dtype != kFP16) {
    return wrong("copy_dtype", s.copy_dtype, "1 (bfloat16) or 2 (float16)");
  }
  if (s.copy && s.param_dtype == kBF16 && s.copy_dtype != kBF16) {
    return wrong("copy_dtype", s.copy_dtype, "1 (bfloat16), as the parameter");
  }
  if (s.scalars < 0 || s.scalars >= num_scalars) {
    return wrong("scalars", s.scalars, "less than " + std::to_string(num_scalars));
  }
  return {};
}

// Of INT8 weights.
std::string wrong_rows(const Segment& s) {
  if (s.copy) return wrong("copy", reinterpret_cast<int64_t>(s.copy), "none of an int8 parameter");
  if (s.row_scales_dtype != kFP32 && s.row_scales_dtype != kBF16) {
    return wrong("row_scales_dtype", s.row_scales_dtype, "0 (float32) or 1 (bfloat16)");
  }
  if (s.own_row_length > kMaxColumns) {
    return wrong("own_row_length", s.own_row_length, "at most 2^30 with an int8 parameter");
  }
  if (s.numel == 0) return {};  // and so no row that says how long they are
  const std::string whole_rows = "a multiple of own_row_length with an int8 parameter";
  if (s.first % s.own_row_length != 0) return wrong("first", s.first, whole_rows);
  if (s.numel % s.own_row_length != 0) return wrong("numel", s.numel, whole_rows);
  const bool is_one_row = s.first + s.numel <= s.row_length;
  if (s.own_row_length != s.row_length && s.row_length > s.block_size && !is_one_row) {
    return wrong("row_length", s.row_length,
                 "own_row_length, a block, or all elements with an int8 parameter");
  }
  return {};
}

bool is_address(const void* p, int64_t alignment_bytes) {
  const auto address = reinterpret_cast<int64_t>(p);
  return address != 0 && address % alignment_bytes == 0;
}

// What is wrong with one that is none.  Names of fields are made only then: with them the check of
// a small segment would take as long as its step.
std::string wrong_address(const std::string& field, const void* p, int64_t alignment_bytes) {
  if (!p) return field + ": got no memory";
  return wrong(field, reinterpret_cast<int64_t>(p),
               "an address that is a multiple of " + std::to_string(alignment_bytes));
}

std::string wrong_array(const char* field, const void* p, int32_t dtype) {
  if (is_address(p, size_bytes(dtype))) return {};
  return wrong_address(field, p, size_bytes(dtype));
}

std::string wrong_moment(const Segment& s, int k, int64_t num_blocks) {
  const Moment& moment = s.moments[k];
  const bool is_signed = kMomentsOf[s.algorithm].is_signed[k];
  const CodecSize size = size_of_codec(moment.codec);
  const int64_t expected =
      num_blocks * (is_signed ? size.scales_of_signed : size.scales_of_unsigned);
  if (moment.num_scales != expected) {
    return wrong(of_moment(k, "scales"), moment.num_scales, std::to_string(expected) + " scales");
  }
  if (s.numel == 0) return {};
  const bool is_quantized = moment.codec != kFloat32;
  const int64_t alignment_bytes = is_quantized ? 1 : 4;
  if (!is_address(moment.values, alignment_bytes)) {
    return wrong_address(of_moment(k, "values"), moment.values, alignment_bytes);
  }
  if (!is_quantized || is_address(moment.scales, 4)) return {};
  return wrong_address(of_moment(k, "scales"), moment.scales, 4);
}

std::string wrong_memory(const Segment& s) {
  std::string found;
  if (s.numel != 0) {
    found = wrong_array("param", s.param, s.param_dtype);
    if (found.empty()) found = wrong_array("grad", s.grad, s.grad_dtype);
    if (found.empty() && s.copy) found = wrong_array("copy", s.copy, s.copy_dtype);
    if (found.empty() && s.param_dtype == kINT8) {
      found = wrong_array("row_scales", s.row_scales, s.row_scales_dtype);
    }
    if (found.empty() && s.weight_sums && !is_address(s.weight_sums, alignof(WeightSums))) {
      found = wrong_address("weight_sums", s.weight_sums, alignof(WeightSums));
    }
    if (!found.empty()) return found;
  }
  const int64_t blocks = check::num_blocks(s);
  for (int k = 0; k < kMomentsOf[s.algorithm].count && found.empty(); ++k) {
    found = wrong_moment(s, k, blocks);
  }
  return found;
}

}  // namespace

std::string violation(const Segment* segments, int64_t num_segments, int64_t num_scalars,
                      bool takes_int8) {
  for (int64_t i = 0; i < num_segments; ++i) {
    // In this order: what comes later computes with what was checked before.
    std::string found = wrong_size(segments[i]);
    if (found.empty()) found = wrong_kind(segments[i], num_scalars, takes_int8);
    if (found.empty() && segments[i].param_dtype == kINT8) found = wrong_rows(segments[i]);
    if (found.empty()) found = wrong_memory(segments[i]);
    if (!found.empty()) return "segment " + std::to_string(i) + ": " + found;
  }
  return {};
}

void sum_blocks(const Segment* segments, int64_t num_segments, int64_t* sums) {
  sums[0] = 0;
  for (int64_t i = 0; i < num_segments; ++i) sums[i + 1] = sums[i] + check::num_blocks(segments[i]);
}

}  // namespace zero8
