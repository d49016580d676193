// SPDX-License-Identifier: Apache-2.0
// The blocks of a segment, one after another.
//
// Included once per target, after chunks.h, so in the target's namespace.
#include <cstdint>

namespace zero8 {
namespace ZERO8_TARGET {

// Blocks `begin` .. `end` - 1 of a segment in order: what block_at says, but the divisions are done
// once.  They would stand in the way of every block's first loads.
//
// A walk has parts, after which what is kept of their blocks is stored: this one is a single part.
class BlockWalk {
 public:
  BlockWalk(const Segment& seg, int64_t begin, int64_t end)
      : end_(end),
        numel_(seg.numel),
        row_length_(seg.row_length),
        block_size_(seg.block_size),
        block_(block_at(seg, begin)) {
    const int64_t in_row = (seg.first + block_.begin + block_.count) % row_length_;
    left_of_row_ = in_row == 0 ? 0 : row_length_ - in_row;
  }
  static constexpr bool begins_part() { return false; }
  static int part() { return 0; }
  bool has_block() const { return block_.local < end_; }
  const Block& block() const { return block_; }
  // How far after element i of the block that one lies which is to be fetched now.
  struct Ahead {
    static constexpr int64_t of(int) { return kPrefetchDistance; }
  };
  static Ahead ahead() { return {}; }
  void advance() {
    const int64_t begin = block_.begin + block_.count;
    if (left_of_row_ == 0) left_of_row_ = row_length_;
    int64_t count = left_of_row_ < block_size_ ? left_of_row_ : block_size_;
    if (count > numel_ - begin) count = numel_ - begin;
    left_of_row_ -= count;
    block_ = {begin, block_.local + 1, static_cast<int>(count), 0};
  }

 private:
  int64_t end_, numel_, row_length_, left_of_row_, block_size_;
  Block block_;
};

}  // namespace ZERO8_TARGET
}  // namespace zero8
