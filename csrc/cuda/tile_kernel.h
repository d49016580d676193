// SPDX-License-Identifier: Apache-2.0
// The step of Adam on v of rank 1 in tiles (zero8/spec/shared.py) on a GPU: a kernel of its own, so
// that those of step_kernel.h do not take its registers.
//
// A team walks down the rows of a tile, block by block.  A thread has the same 8 columns in each of
// them: their codes of v, read once, and the sums of their new v, row after row.  Codes and rows'
// scales are made of these sums at the end.
#pragma once

#include <cstdint>

#include "cuda/step_kernel.h"
// In terms of the vocabulary of step_kernel.h:
#include "shares.h"

namespace zero8 {
namespace ZERO8_TARGET {

// --- Codecs --------------------------------------------------------------------------------------

__device__ inline bool is_in_tiles(const Segment& seg) { return seg.moments[0].codec == kShared; }

// Some parameters have no codes.
struct OfTiles {
  template <class Body>
  __device__ static void visit(const Segment& seg, Body body) {
    if (is_in_tiles(seg)) {
      body(InShared());
    } else {
      body(InFloat32());
    }
  }
};

// Neither of them has maps.
static __device__ const CodecMaps kNoMaps = {};

__device__ inline Vec::F level_of(Vec::I code) {
  const Vec::I level_0 = Vec::seti(kOneBits - (255u << Shared::kCellBits));
  const Vec::I bits = Vec::addi(Vec::shl<Shared::kCellBits>(code), level_0);
  return Vec::as_float(Vec::unless_zero(bits, code));
}
// A level in units of 2^-20.
__device__ inline uint32_t level_units(uint32_t code) {
  const uint32_t place = code + 1;  // 16 to an octave
  return code == 0 ? 0 : (16 + place % 16) << (place / 16);
}

// As for other codecs; the codes of v are those of the thread's columns.
template <class Algorithm, class Codecs, class Body>
__device__ void with_decoded(InShared, const Segment& seg, const Stored<Algorithm, Codecs>& stored,
                             const Place& place, const StepScalars& raw, const CodecMaps& maps,
                             Body body) {
  using CodeOfM = CodeOf<Algorithm, InShared, 0>;
  OwnMoments<uint8_t> own = unpacked<Algorithm, InShared>(stored);
  Row<Algorithm, InShared, OwnCodes> codes(own.segment(seg, place));
  const typename Sources<Algorithm>::template Source<CodeOfM> source(
      Number<0>(), own.segment(seg, place), raw, maps, place.own_block(), &codes);
  const Vec::F row = Vec::mul(Vec::set(own.scales[1][0]), Vec::set(Algorithm::decay(raw, 1)));
  body([&](auto& vec, int i, Vec::F* m) {
    m[0] = source.read(vec, i, All());
    m[1] = vec.mul(level_of(Vec::load8(own.values[1] + i)), row);  // (C12)
  });
}

// --- Where tiles lie -----------------------------------------------------------------------------

// Blocks of a segment, one below the other: those of a tile, one that a boundary cuts, or one
// without codes.
struct Rows {
  int64_t segment;
  int64_t per_row;  // blocks
  Block top;
  int count;
  bool is_cut;

  __device__ Block at(const Segment& seg, int row) const {
    return {top.begin + row * seg.row_length, top.local + row * per_row, top.count, top.offset};
  }
};

__device__ inline int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

// Whether a boundary before this element of the parameter cuts a block.
__device__ inline bool is_cut_at(const Segment& seg, int64_t element) {
  return element % seg.row_length % seg.block_size != 0;
}

// Tile number `number` of a segment; zero8/op/launch.py counts them.  The first one may be a block
// that is cut, and so may the last one.  Between them come, band by band, those of whole blocks:
// from each of a band's first blocks downwards, of as many as there are, up to a row.
__device__ inline Rows tile_at(const Segment& seg, int64_t segment, int64_t number) {
  const int64_t local_0 = block_of(seg, seg.first), blocks = num_blocks(seg);
  const int64_t per_row = blocks_per_row(seg), per_band = kRowsPerBand * per_row;
  const bool cuts_first = is_cut_at(seg, seg.first);
  if (cuts_first && number == 0) return {segment, per_row, block_at(seg, 0), 1, true};
  // Whole blocks of the parameter, and those of them that are in the tile's band.
  const int64_t begin = local_0 + cuts_first;
  const int64_t end = local_0 + blocks - is_cut_at(seg, seg.first + seg.numel);
  const int64_t band = begin / per_band;
  int64_t top = begin + number - cuts_first, bottom = least((band + 1) * per_band, end);
  const int64_t of_first_band = least(bottom - begin, per_row);
  if (top >= begin + of_first_band) {
    const int64_t behind = top - begin - of_first_band;
    const int64_t next = (band + 1 + behind / per_row) * per_band;
    top = next + behind % per_row;
    bottom = least(next + per_band, end);
  }
  if (top >= end) return {segment, per_row, block_at(seg, blocks - 1), 1, true};
  const auto count = static_cast<int>((bottom - top + per_row - 1) / per_row);
  return {segment, per_row, block_at(seg, top - local_0), count, false};
}

// Where the codes of a tile lie.
struct TileBytes {
  static constexpr int kColumnsPerByte = Shared::kColumnsPerByte;

  uint8_t* first;
  int64_t stride;  // from row to row
  int count;       // of all rows
  int per_row;

  __device__ TileBytes(const Segment& seg, const Rows& rows)
      : stride(units_per_row(seg, kColumnsPerByte)) {
    const int64_t unit = unit_of(seg, seg.first + rows.top.begin, kColumnsPerByte);
    first = static_cast<uint8_t*>(seg.moments[1].values) +
            (unit - unit_of(seg, seg.first, kColumnsPerByte));
    // A block that is cut may begin within the columns of a byte.
    const int lead = rows.top.offset % kColumnsPerByte;
    per_row = (lead + rows.top.count + kColumnsPerByte - 1) / kColumnsPerByte;
    count = rows.count * per_row;
  }
  __device__ uint8_t& at(int i) const { return first[i / per_row * stride + i % per_row]; }
  __device__ Shares shares(const Rows& rows) const {
    if (rows.is_cut) return Shares(rows.top);
    return Shares(Tile{0, rows.count, rows.top.count, per_row});
  }
};

// The codes of this thread's columns, 0 beyond the tile.
__device__ inline Words codes_of_columns(const Segment& seg, const Rows& rows) {
  const TileBytes bytes(seg, rows);
  const Shares shares = bytes.shares(rows);
  uint8_t codes[kPerThread];
#pragma unroll
  for (int k = 0; k < kPerThread; ++k) {
    const int column = Place::before() + k;
    codes[k] = column < shares.columns ? bytes.at(shares.code_of(column)) : 0;
  }
  return packed(codes);
}

// --- Sums ----------------------------------------------------------------------------------------

// A float for each of a team's columns, in shared memory.  Of a warp's, element k of a thread is
// number k * kStride + thread: neither threads that have the same k nor lanes of sums meet in a
// bank.
constexpr int kStride = kWarp + 2;
constexpr int kPerWarp = kPerThread * kStride;

struct TeamFloats {
  float x[kMaxThreads / kWarp * kPerWarp];

  // Those of this thread's warp, or of another one of its team.
  __device__ float* of_warp(int warp = static_cast<int>(threadIdx.x) / kWarp) {
    return x + (static_cast<int>(threadIdx.y * blockDim.x) / kWarp + warp) * kPerWarp;
  }
  __device__ float& own(int k) { return of_warp()[k * kStride + threadIdx.x % kWarp]; }
  __device__ float& of_column(int column) {
    const int thread = column / kPerThread;
    return of_warp(thread / kWarp)[column % kPerThread * kStride + thread % kWarp];
  }
};

__device__ inline TeamFloats& team_floats() {
  __shared__ TeamFloats of_all;
  return of_all;
}

// Of 16 lanes, added in halves.
__device__ inline float sum_of_lanes(const float* lanes) {
  float eight[8], four[4];
#pragma unroll
  for (int k = 0; k < 8; ++k) eight[k] = lanes[k] + lanes[k + 8];
#pragma unroll
  for (int k = 0; k < 4; ++k) four[k] = eight[k] + eight[k + 4];
  return (four[0] + four[2]) + (four[1] + four[3]);
}

// Returns the sum of a row to the team's first thread; its threads call it together.  A run of
// columns is that of a warp.
__device__ inline float sum_of_row(const Values& v) {
  static_assert(Shared::kRun == kWarp * kPerThread && Shared::kSumLanes == 2 * kPerThread);
  TeamFloats& values = team_floats();
  float* const mine = values.of_warp();
  const int thread = static_cast<int>(threadIdx.x) % kWarp;
#pragma unroll
  for (int k = 0; k < kPerThread; ++k) values.own(k) = v.x[k];
  __syncwarp(team_mask());
  float lane = 0.0f;
  if (thread < Shared::kSumLanes) {
    const float* const own = mine + thread % kPerThread * kStride + thread / kPerThread;
#pragma unroll
    for (int k = 0; k < kWarp; k += 2) lane += own[k];
  }
  __syncwarp(team_mask());  // before any of them writes again
  if (thread < Shared::kSumLanes) mine[thread] = lane;
  __syncwarp(team_mask());
  if (thread == 0) mine[0] = sum_of_lanes(mine);
  team_sync();
  float total = 0.0f;
  if (threadIdx.x == 0) {
    const int runs = static_cast<int>(blockDim.x) / kWarp;
    for (int run = 0; run < runs; ++run) total += *values.of_warp(run);
  }
  team_sync();  // before any of them writes again
  return total;
}

// The means of this thread's codes, up to a factor, from the sums of its columns.  The threads of
// the team call it together.
__device__ inline Values means_of(const Shares& shares, const Values& sums) {
  TeamFloats& floats = team_floats();
#pragma unroll
  for (int k = 0; k < kPerThread; ++k) floats.own(k) = sums.x[k];
  team_sync();
  const int whole = 1 << shares.shift;
  Values means;
#pragma unroll
  for (int k = 0; k < kPerThread; ++k) {
    const int begin = shares.begin_of(Place::before() + k);
    const int end = shares.begin_of(Place::before() + k + 1);
    float total = 0.0f;
    for (int column = begin; column < end; ++column) total += floats.of_column(column);
    const int count = end - begin;
    const bool is_mean = count == 0 || count == whole;
    means.x[k] = is_mean ? total : total * static_cast<float>(whole) / static_cast<float>(count);
  }
  team_sync();  // before any of them writes again
  return means;
}

// --- New codes -----------------------------------------------------------------------------------

// Makes this thread's codes of means, of which the first of the tile has the dither q.
__device__ inline void encode_means(const Shares& shares, uint32_t q, const Values& means,
                                    uint8_t (&codes)[kPerThread]) {
  Vec::I patterns = Vec::seti(0);
  for_vectors([&](int i) { patterns = Vec::maxu(patterns, Vec::as_int(Vec::load(means.x + i))); });
  const uint32_t bits = Vec::reduce_maxu(patterns);
  const Vec::F largest = Vec::set(bits == 0 ? 1.0f : float_of(bits));
  const uint32_t step = kInBlockStep << shares.shift;
  const uint32_t start = q - static_cast<uint32_t>(shares.lead) * kInBlockStep;
  for_vectors([&](int i) {
    const int number = Place::before() + i;
    Vec::I of_codes = Vec::ramp(start + static_cast<uint32_t>(number) * step, step);
    // The columns before a cut have other segments.
    if (number == 0) of_codes.x[0] = q;
    Vec::store8(codes + i, code_of(Vec::load(means.x + i), largest, of_codes));
  });
}

// The sum of the levels of all columns, rounded once, from this thread's codes.
__device__ inline float sum_of_levels(const Shares& shares, const uint8_t (&codes)[kPerThread]) {
  uint32_t units = 0;
#pragma unroll
  for (int k = 0; k < kPerThread; ++k) {
    const int code = Place::before() + k;
    units += level_units(codes[k]) *
             static_cast<uint32_t>(shares.begin_of(code + 1) - shares.begin_of(code));
  }
  const auto sum = static_cast<uint32_t>(Vec::reduce_sum(static_cast<int>(units)));
  // Where all of 4096 levels are 1 the sum is 2^32 units; without levels it does not matter.
  return sum == 0 ? static_cast<float>(kMaxBlockSize) : static_cast<float>(sum) * 0x1p-20f;
}

// Makes the codes of a tile from the sums of its columns, and the scales of the rows that have been
// stepped from their own sums, which lie in the scales' place.
__device__ inline void encode_tile(const Segment& seg, const Rows& rows, uint64_t stepped,
                                   const Values& sums) {
  const TileBytes bytes(seg, rows);
  const Shares shares = bytes.shares(rows);
  const Moment& v = seg.moments[1];
  uint8_t codes[kPerThread];
  encode_means(shares, Thresholds(seg, rows.top, v.phase).q, means_of(shares, sums), codes);
  const float levels = sum_of_levels(shares, codes);
#pragma unroll
  for (int k = 0; k < kPerThread; ++k) {
    const int i = Place::before() + k;
    if (i < bytes.count) bytes.at(i) = codes[k];
  }
  for (int row = static_cast<int>(threadIdx.x); row < rows.count;
       row += static_cast<int>(blockDim.x)) {
    float& scale = v.scales[rows.at(seg, row).local];
    if (stepped >> row & 1) scale = row_of(scale, levels);
  }
}

// --- The step ------------------------------------------------------------------------------------

// Adds a row's new v to the sums of its columns; its own sum takes the place of its scale.
__device__ inline void add_row(const Segment& seg, const Block& block, const Values& v,
                               Values& sums) {
  for_vectors([&](int i) {
    const Vec::F sum = Vec::fma_far(Vec::load(v.x + i), Vec::set(1.0f), Vec::load(sums.x + i));
    Vec::store(sums.x + i, sum);
  });
  const float total = sum_of_row(v);
  if (threadIdx.x == 0) seg.moments[1].scales[block.local] = total;
}

// Whether the new v of a row are small enough for a tile, and none is negative.
__device__ inline bool fits_tile(const Values& v) {
  Vec::I largest = Vec::seti(0);
  for_vectors([&](int i) { largest = Vec::maxu(largest, Vec::as_int(Vec::load(v.x + i))); });
  return Vec::reduce_maxu(largest) < kUnsignedLimitBits<InShared>;
}

struct TileWork {
  using Task = Rows;

  __device__ static Task task_at(const Segment& seg, int64_t segment, int64_t number) {
    if (is_in_tiles(seg)) return tile_at(seg, segment, number);
    return {segment, 1, block_at(seg, number), 1, false};
  }
  __device__ __forceinline__ static int step(const Segment& seg, const StepScalars& raw,
                                             const CodecMaps& maps, const Rows& rows) {
    Words codes = {};
    if (is_in_tiles(seg)) codes = codes_of_columns(seg, rows);
    Values sums = {};
    uint64_t stepped = 0;
    for (int row = 0; row < rows.count; ++row) {
      const bool is_stepped = step_row(seg, raw, maps, rows.at(seg, row), codes, sums);
      stepped |= static_cast<uint64_t>(is_stepped) << row;
    }
    if (is_in_tiles(seg) && stepped != 0) encode_tile(seg, rows, stepped, sums);
    return rows.count - __popcll(stepped);
  }

 private:
  // Steps one block, whose columns have these codes, and adds its new v to their sums.
  __device__ static bool step_row(const Segment& seg, const StepScalars& raw, const CodecMaps& maps,
                                  const Block& block, const Words& codes, Values& sums) {
    const Place place(block);
    Stored<Adam, OfTiles> stored(seg, place);
    if (is_in_tiles(seg)) stored.moments[1] = codes;
    return step_block(seg, stored, place, raw, maps, [&](const Values& p, Values* moments) {
      if (is_in_tiles(seg) && !fits_tile(moments[1])) return false;
      write_param(seg, place, p);
      encode<Adam, OfTiles>(seg, place, raw, maps, moments);
      if (is_in_tiles(seg)) add_row(seg, block, moments[1], sums);
      return true;
    });
  }
};

}  // namespace ZERO8_TARGET
}  // namespace zero8

// Steps over all segments, which are Adam's with codec `shared` or float32 moments.  As the kernels
// of step_kernel.h, but with teams of whole warps, and first_tasks sums up numbers of tiles where
// segments have codes.
extern "C" __global__ void __maxnreg__(128)
    zero8_step_adam_shared(const zero8::Segment* segments, const int64_t* first_tasks,
                           int64_t num_segments, const zero8::StepScalars* scalars,
                           const zero8::CodecMaps*, unsigned long long* nonfinite_blocks) {
  using namespace zero8::cuda;
  do_share<TileWork>(segments, first_tasks, num_segments, scalars, kNoMaps, nonfinite_blocks);
}
