// SPDX-License-Identifier: Apache-2.0
// The kinds of segments over which the tests' drivers step.
#pragma once

#include <cmath>

#include "algorithms.h"
#include "format.h"
#include "isa.h"

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
inline Shape shape_for(const Types& types, Shape shape) {
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
inline int64_t moment_bytes(zero8::Codec codec, const Shape& shape) {
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
inline uint32_t exponent_of(int64_t i, int64_t numel, int bias, int octaves) {
  return static_cast<uint32_t>(bias - 1 - (i < numel / 2 ? 0 : i % octaves));
}

// Ascending entries -1 .. 1 or 0 .. 1 at equal distances: a map of a single piece.
inline void fill(zero8::DynamicMap& map, bool is_signed) {
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
