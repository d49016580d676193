// SPDX-License-Identifier: Apache-2.0
#include "check.h"

#define ZERO8_TARGET check
#include "blocks.h"

namespace zero8 {
namespace {

std::string wrong(const char* field, int64_t got, const std::string& expected) {
  return std::string(field) + ": got " + std::to_string(got) + ", expected " + expected;
}

std::string wrong_size(const Segment& s) {
  const bool is_served = s.block_size >= kMinBlockSize && s.block_size <= kMaxBlockSize;
  if (!is_served || (s.block_size & (s.block_size - 1)) != 0) {
    return wrong("block_size", s.block_size, "a power of two from 64 to 4096");
  }
  if (s.row_length < 1 || s.row_length > kMaxElements) {
    return wrong("row_length", s.row_length, "1 to 2^48");
  }
  if (s.numel < 0 || s.numel > kMaxElements) return wrong("numel", s.numel, "0 to 2^48");
  if (s.first < 0 || s.first > kMaxElements - s.numel) {
    return wrong("first", s.first, "an element of a parameter of at most 2^48");
  }
  return {};
}

// What chooses the code that runs, and the scalars that it reads.
std::string wrong_kind(const Segment& s, int64_t num_scalars) {
  if (s.codec != kFloat32 && s.codec != kDynamic && s.codec != kLog) {
    return wrong("codec", s.codec, "0 (float32), 1 (dynamic) or 4 (log)");
  }
  if (s.param_dtype != kFP32 && s.param_dtype != kBF16) {
    return wrong("param_dtype", s.param_dtype, "0 (float32) or 1 (bfloat16)");
  }
  const bool takes_half = s.param_dtype == kFP32;
  if (s.grad_dtype != kFP32 && s.grad_dtype != kBF16 && !(takes_half && s.grad_dtype == kFP16)) {
    return wrong("grad_dtype", s.grad_dtype,
                 takes_half ? "0 (float32), 1 (bfloat16) or 2 (float16)"
                            : "0 (float32) or 1 (bfloat16) for a bfloat16 parameter");
  }
  if (s.rounding < kNearest || s.rounding > kHash) return wrong("rounding", s.rounding, "0 to 2");
  if (s.correction && s.param_dtype != kBF16) {
    return wrong("param_dtype", s.param_dtype, "1 (bfloat16) with a correction");
  }
  if (s.scalars < 0 || s.scalars >= num_scalars) {
    return wrong("scalars", s.scalars, "less than " + std::to_string(num_scalars));
  }
  return {};
}

std::string wrong_address(const char* field, const void* p, int64_t alignment_bytes) {
  const auto address = reinterpret_cast<uint64_t>(p);
  if (address == 0) return std::string(field) + ": got no memory";
  if (address % alignment_bytes == 0) return {};
  return wrong(field, static_cast<int64_t>(address),
               "an address that is a multiple of " + std::to_string(alignment_bytes));
}

std::string wrong_memory(const Segment& s) {
  const ScalesPerBlock per_block = kScalesPerBlock[s.codec];
  const int64_t blocks = check::num_blocks(s);
  if (s.num_exp_avg_scales != blocks * per_block.exp_avg) {
    return wrong("exp_avg_scale", s.num_exp_avg_scales,
                 std::to_string(blocks * per_block.exp_avg) + " scales");
  }
  if (s.num_exp_avg_sq_scales != blocks * per_block.exp_avg_sq) {
    return wrong("exp_avg_sq_scale", s.num_exp_avg_sq_scales,
                 std::to_string(blocks * per_block.exp_avg_sq) + " scales");
  }
  if (s.numel == 0) return {};
  const bool is_quantized = s.codec != kFloat32;
  const int64_t moment_bytes = is_quantized ? 1 : 4;
  const struct {
    const char* field;
    const void* p;
    int64_t bytes;
    bool is_used;
  } arrays[] = {
      {"param", s.param, s.param_dtype == kFP32 ? 4 : 2, true},
      {"grad", s.grad, s.grad_dtype == kFP32 ? 4 : 2, true},
      {"exp_avg", s.exp_avg, moment_bytes, true},
      {"exp_avg_sq", s.exp_avg_sq, moment_bytes, true},
      {"exp_avg_scale", s.exp_avg_scale, 4, is_quantized},
      {"exp_avg_sq_scale", s.exp_avg_sq_scale, 4, is_quantized},
  };
  for (const auto& array : arrays) {
    if (!array.is_used) continue;
    std::string found = wrong_address(array.field, array.p, array.bytes);
    if (!found.empty()) return found;
  }
  return {};
}

}  // namespace

std::string violation(const Segment* segments, int64_t num_segments, int64_t num_scalars) {
  for (int64_t i = 0; i < num_segments; ++i) {
    // In this order: what comes later computes with what was checked before.
    std::string found = wrong_size(segments[i]);
    if (found.empty()) found = wrong_kind(segments[i], num_scalars);
    if (found.empty()) found = wrong_memory(segments[i]);
    if (!found.empty()) return "segment " + std::to_string(i) + ": " + found;
  }
  return {};
}

}  // namespace zero8
