// SPDX-License-Identifier: Apache-2.0
// Where the blocks of a segment lie: BlockGrid of zero8/spec/grid.py, in 64-bit integers.
//
// Compiled for every target, so in the target's namespace: the linker merges what has one name.
#include <cstdint>

#include "format.h"

namespace zero8::ZERO8_TARGET {

// Elements begin .. begin + count - 1 of a segment; `local` counts the segment's blocks from 0.
struct Block {
  int64_t begin;
  int64_t local;
  int count;
  int offset;  // how many elements of the block lie before them, in other shards
};

ZERO8_DEVICE inline int64_t blocks_per_row(const Segment& seg) {
  return (seg.row_length + seg.block_size - 1) / seg.block_size;
}

// Number of the block that holds element `element` of the parameter: BlockGrid.block_of.
ZERO8_DEVICE inline int64_t block_of(const Segment& seg, int64_t element) {
  return element / seg.row_length * blocks_per_row(seg) + element % seg.row_length / seg.block_size;
}

ZERO8_DEVICE inline int64_t num_blocks(const Segment& seg) {
  if (seg.numel == 0) return 0;
  return block_of(seg, seg.first + seg.numel - 1) - block_of(seg, seg.first) + 1;
}

// The segment's part of its block number `local`: the segment's ends may cut a block.
ZERO8_DEVICE inline Block block_at(const Segment& seg, int64_t local) {
  const int64_t number = block_of(seg, seg.first) + local;
  const int64_t per_row = blocks_per_row(seg);
  const int64_t row_begin = number / per_row * seg.row_length;
  const int64_t row_end = row_begin + seg.row_length;
  const int64_t whole = row_begin + number % per_row * seg.block_size;
  const int64_t begin = whole < seg.first ? seg.first : whole;
  int64_t end = whole + seg.block_size < row_end ? whole + seg.block_size : row_end;
  if (end > seg.first + seg.numel) end = seg.first + seg.numel;
  return {begin - seg.first, local, static_cast<int>(end - begin), static_cast<int>(begin - whole)};
}

// How many elements of the parameter a step takes together, from each multiple of them on: rows of
// INT8 weights, as many as begin with a block; 0 if it takes any blocks.
ZERO8_DEVICE inline int64_t elements_together(const Segment& seg) {
  if (seg.param_dtype != kINT8) return 0;
  const int64_t columns = seg.own_row_length;
  if (columns == seg.row_length || seg.row_length <= seg.block_size) return seg.row_length;
  // The least common multiple of a row and a block, whose size is a power of two.
  const int64_t power = columns & -columns;
  return columns * (power < seg.block_size ? seg.block_size / power : 1);
}

// Number of the unit of codes, each of at most `codes` of one row, that holds element `element` of
// the parameter: BlockGrid.unit_of.
ZERO8_DEVICE inline int64_t units_per_row(const Segment& seg, int codes) {
  return (seg.own_row_length + codes - 1) / codes;
}
ZERO8_DEVICE inline int64_t unit_of(const Segment& seg, int64_t element, int codes) {
  const int64_t row = seg.own_row_length;
  return element / row * units_per_row(seg, codes) + element % row / codes;
}

}  // namespace zero8::ZERO8_TARGET
