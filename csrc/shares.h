// SPDX-License-Identifier: Apache-2.0
// How the columns of a tile share codes, zero8/spec/tiles.py, and what codes and rows are made of
// sums, zero8/spec/shared.py: for the CPU and for CUDA.
//
// Included once per target, after moments.h, so in the target's namespace.
#include <cstdint>

namespace zero8 {
namespace ZERO8_TARGET {

// A tile of several rows: whole blocks of a segment, one below the other.
struct Tile {
  int64_t top;  // row of the grid
  int rows;     // 0 if there is none
  int columns;
  int bytes_per_row;
};

// How columns share codes: 2^shift of them each, but the first code has `lead` fewer, where a
// boundary cuts the block, and the last one what is left.
struct Shares {
  int columns, shift, lead;

  ZERO8_DEVICE explicit Shares(const Tile& tile) : columns(tile.columns), shift(0), lead(0) {
    while (tile.rows * tile.bytes_per_row << shift < columns) ++shift;
  }
  // Of a block that is cut.
  ZERO8_DEVICE explicit Shares(const Block& b)
      : columns(b.count), shift(6), lead(b.offset % Shared::kColumnsPerByte) {
    static_assert(Shared::kColumnsPerByte == 1 << 6);
  }
  ZERO8_DEVICE int code_of(int column) const { return (column + lead) >> shift; }
  ZERO8_DEVICE int count() const { return code_of(columns - 1) + 1; }
  // The columns of a code: from here to where those of the next one begin.
  ZERO8_DEVICE int begin_of(int code) const {
    const int begin = (code << shift) - lead;
    return begin < 0 ? 0 : begin < columns ? begin : columns;
  }
};

// (C13) of q at the first elements of the codes.
ZERO8_DEVICE inline Vec::I code_of(Vec::F mean, Vec::F largest, Vec::I q) {
  const Vec::I ratio = Vec::as_int(Vec::div(mean, largest));
  const Vec::I threshold = Vec::shl<3>(Vec::ori(Vec::andi(q, Vec::seti(0xFFC0)), Vec::seti(32)));
  const Vec::I offset = Vec::addi(Vec::subi(ratio, Vec::seti(kOneBits)), threshold);
  const Vec::I code = Vec::addi(Vec::sra<Shared::kCellBits>(offset), Vec::seti(255));
  return Vec::unless_zero(Vec::maxs(code, Vec::seti(1)), Vec::as_int(mean));
}

// (C14)
ZERO8_DEVICE inline float row_of(float total, float sum_of_levels) {
  if (total == 0.0f) return 0.0f;
  constexpr uint32_t kLast = 1u << (24 - Shared::kRowBits);
  const float row = float_of((bits_of(total / sum_of_levels) + kLast / 2) & ~(kLast - 1));
  return row < Shared::kMinRow ? Shared::kMinRow : row > Shared::kMaxRow ? Shared::kMaxRow : row;
}

}  // namespace ZERO8_TARGET
}  // namespace zero8
