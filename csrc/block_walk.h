// SPDX-License-Identifier: Apache-2.0
// The blocks of a segment, one after another.
//
// Included once per target, after blocks.h, so in the target's namespace.
#include <cstdint>

namespace zero8::ZERO8_TARGET {

// The blocks of a segment in order, from number `local` on: what block_at says, but the divisions
// are done once.  They would stand in the way of every block's first loads.
class BlockWalk {
 public:
  BlockWalk(const Segment& seg, int64_t local)
      : numel_(seg.numel),
        row_length_(seg.row_length),
        block_size_(seg.block_size),
        block_(block_at(seg, local)) {
    const int64_t in_row = (seg.first + block_.begin + block_.count) % row_length_;
    left_of_row_ = in_row == 0 ? 0 : row_length_ - in_row;
  }
  const Block& block() const { return block_; }
  void advance() {
    const int64_t begin = block_.begin + block_.count;
    if (left_of_row_ == 0) left_of_row_ = row_length_;
    int64_t count = left_of_row_ < block_size_ ? left_of_row_ : block_size_;
    if (count > numel_ - begin) count = numel_ - begin;
    left_of_row_ -= count;
    block_ = {begin, block_.local + 1, static_cast<int>(count), 0};
  }

 private:
  int64_t numel_, row_length_, left_of_row_, block_size_;
  Block block_;
};

}  // namespace zero8::ZERO8_TARGET
