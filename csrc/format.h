// SPDX-License-Identifier: Apache-2.0
// What crosses the border between Python and the kernels: plain structs, no tensors.
//
// zero8/op/structs.py has the same structs for numpy; tests/kernel/test_structs.py compares them.
// All strides and counts are in elements, 64 bits wide: a flat ZeRO partition can exceed 2^31.
#pragma once

#include <cstdint>

// For what runs once per vector: a call there would force accumulators and scalars into memory.
#define ZERO8_INLINE __attribute__((always_inline))

// For functions that CUDA compiles too, for the GPU.
#if defined(__CUDACC__)
#define ZERO8_DEVICE __device__
#else
#define ZERO8_DEVICE
#endif

namespace zero8 {

// Calls the macro X(name, number, name in settings, bits of a code, floats that each block stores
// besides: of moments that can be negative, of others) for each codec.  In##name of codes.h and its
// neighbours has the codes.
#define ZERO8_CODECS(X)             \
  X(Dynamic, 1, "dynamic", 8, 1, 1) \
  X(Log, 4, "log", 8, 1, 2)         \
  X(Fp8, 5, "fp8", 8, 1, 1)         \
  X(Log6, 6, "log6", 6, 1, 2)       \
  X(Linear4, 7, "linear4", 4, 1, 1)

enum Codec : int32_t {
  kFloat32 = 0,
#define ZERO8_NUMBER(name, number, ...) k##name = number,
  ZERO8_CODECS(ZERO8_NUMBER)
#undef ZERO8_NUMBER
};
enum DType : int32_t { kFP32 = 0, kBF16 = 1, kFP16 = 2, kINT8 = 3 };
// Of one number.
ZERO8_DEVICE constexpr int64_t size_bytes(int32_t dtype) {
  return dtype == kFP32 ? 4 : dtype == kINT8 ? 1 : 2;
}
enum Rounding : int32_t { kNearest = 0, kDither = 1, kHash = 2 };

constexpr int kMinBlockSize = 64;
constexpr int kMaxBlockSize = 4096;
constexpr int kMaxMoments = 3;  // of any algorithm: algorithms.h

// How large the moments of a codec are.  codes.h has the same of the codes, and both are compared.
struct CodecSize {
  int32_t codec;
  const char* name;
  int bits;
  int scales_of_signed, scales_of_unsigned;
};
constexpr CodecSize kCodecSizes[] = {{kFloat32, "float32", 32, 0, 0},
#define ZERO8_SIZE(name, number, ...) {number, __VA_ARGS__},
                                     ZERO8_CODECS(ZERO8_SIZE)
#undef ZERO8_SIZE
};
// Without a name if the codec is unknown.
ZERO8_DEVICE constexpr CodecSize size_of_codec(int32_t codec) {
  for (const CodecSize& size : kCodecSizes) {
    if (size.codec == codec) return size;
  }
  return {};
}
// A float16 in memory, as a type of its own: uint16_t is a bfloat16.
struct Half {
  uint16_t bits;
};
constexpr uint32_t kHalfInfinityBits = 0x7C00;

// One moment of a segment.
struct Moment {
  void* values;        // codes as packing.h has them, or float for kFloat32
  float* scales;       // per block touched as many as the code has; null for kFloat32
  int64_t num_scales;  // floats at `scales`
  int32_t codec;       // the same for all moments of a segment
  uint32_t phase;      // of the dither
};

// Sums (K1) of the bfloat16 weights of a block as the last step left them: of all, and of those
// that were not 0 before it.  0 if no step has.
struct WeightSums {
  uint32_t all;
  uint32_t without_zeros;
};

// Elements first .. first + numel - 1 of one parameter: zero8/spec/segment.py.
// No __restrict__ on the pointers: two moments may be views of one buffer.
struct Segment {
  void* param;       // float, bfloat16, or int8_t of whole rows, updated in place
  const void* grad;  // float, bfloat16, or Half if param is not bfloat16; any element alignment
  void* correction;  // int8_t, 8 more bits of a bfloat16 parameter; null without
  WeightSums* weight_sums;  // with a correction, per block touched; null without
  void* copy;        // of copy_dtype: the nearest to a float, or a bfloat16 as it is; null without
  void* row_scales;  // of an int8_t parameter, one for each of its own rows; null of others
  Moment moments[kMaxMoments];
  int64_t numel;
  int64_t first;
  int64_t row_length;
  int64_t own_row_length;    // of the parameter's rows where these are shorter: narrow, or int8_t
  int64_t nonfinite_blocks;  // out: blocks left as they were
  int32_t block_size;
  int32_t algorithm;
  int32_t param_dtype;
  int32_t grad_dtype;
  int32_t rounding;
  int32_t scalars;  // index into the array of StepScalars
  uint32_t param_phase;
  int32_t copy_dtype;        // kBF16 or kFP16 with a copy
  int32_t row_scales_dtype;  // kFP32 or kBF16 with row_scales
  int32_t unused;            // 0
};

constexpr uint32_t kPieceFactor = 10304;
constexpr int kPieceShift = 22;

// The numbers of the dither: zero8/spec/dither.py, equations (D1) and (D2).
constexpr uint32_t kElementStep = 0xC13FA9A9u;
constexpr uint32_t kInBlockStep = 32 * 1601u;
constexpr uint32_t kGoldenStep = 0x9E3779B9u;
constexpr int64_t kRunSteps = 32;
// Those of lowbias32.
constexpr uint32_t kHashFactor1 = 0x7FEB352Du, kHashFactor2 = 0x846CA68Bu;

// A dynamic map, ascending, and what finds the nearest entry: zero8/op/codec_maps.py.
struct DynamicMap {
  // Entry t = 2^e + j is gap[e] * t + origin[e], counted from 0; without a sign from -1.  By the
  // exponent of t as a float, modulo 8.
  float gap[8];
  float origin[8];
  float thresholds[256];  // smallest value whose nearest entry is i + 1; the last is +inf
  // The entry's distance from 0, counted in entries, is piecewise linear in |x|.  The piece of x,
  // by its pattern, is number (pattern >> 16) * kPieceFactor >> kPieceShift, modulo 8, or the next
  // one above that one's joint.
  uint32_t joint[8];
  float slope[8];  // 16 fractional bits
  float offset[8];
  uint32_t last[8];   // largest distance in the piece
  uint32_t smallest;  // smaller patterns count as this one
};
// The map of first moments in `linear4`.
struct Linear4Map {
  float levels[16];
  // The smallest value whose nearest entry is i + 1, in the order of a search by halves: row k has
  // those that cut the 2^k parts of the map which k comparisons tell apart.
  float thresholds[4][8];
};
struct CodecMaps {
  DynamicMap of_signed, of_unsigned;
  Linear4Map of_linear4;
};

// What a Segment depends on that stays from step to step: zero8/optimizer/records.py.
struct KeptPiece {
  uint64_t param_offset;              // in bytes from the address of the parameter
  uint64_t grad_offset;               // in bytes from the address of its gradient
  int64_t owner;                      // which of the parameters that step together
  uint32_t moment_keys[kMaxMoments];  // of the dither of each moment
  uint32_t param_key;                 // of the dither of the parameter
};

// The numbers of one gradient, in the order of memory, for its norm: norm.cpp.
struct Numbers {
  const void* data;
  int64_t numel;
  int32_t dtype;   // kFP32 or kBF16
  int32_t unused;  // 0
};

// What a step asks of a tensor: described in zero8/op/kernel.py.
struct TensorRecord {
  uint64_t data;
  int64_t numel;
  int64_t kind;  // one number for dtype and device, or kWithoutMemory
  int64_t contiguous;
  int64_t contents;  // a hash of those of int64 tensors in host memory of up to kMaxHashed elements
};
constexpr int64_t kMaxHashed = 128;
constexpr int64_t kWithoutMemory = -1;  // of its own

}  // namespace zero8
