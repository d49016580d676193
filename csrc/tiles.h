// SPDX-License-Identifier: Apache-2.0
// Where tiles lie, zero8/spec/tiles.py, and the blocks of a segment, one tile beside the other.
//
// Included once per target, after shares.h, so in the target's namespace.
#include <cstdint>

namespace zero8 {
namespace ZERO8_TARGET {

inline int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }
inline int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

// Rows of the grid by blocks of each: a part of a band, whose tiles are complete.  Narrower ones
// would keep the sums of their columns in the first-level cache, but memory is read the slower the
// shorter the runs are: 4096 by 4096 parameters took 10 % longer with a quarter of the columns.
struct Strip {
  static constexpr int kColumns = kMaxBlockSize;
  static constexpr int kMaxBlocks = kColumns / kMinBlockSize;

  int64_t top = 0, bottom = 0;  // rows, the last one excluded, as all ends are
  int64_t first = 0, end = 0;   // blocks of a row
};

// A block of a walk over tiles.
struct TileBlock : Block {
  int row, column;  // which row of its strip, and which block of the row
  bool is_cut;      // by an end of the segment
};

// Blocks `begin` .. `end` - 1 of a segment, which are those of whole bands as far as the segment
// holds them: strip after strip, and in each row after row.
class TileWalk {
 public:
  TileWalk(const Segment& seg, int64_t begin, int64_t end)
      : numel_(seg.numel),
        first_(seg.first),
        row_length_(seg.row_length),
        block_size_(seg.block_size),
        per_row_(blocks_per_row(seg)),
        local_0_(block_of(seg, seg.first)),
        begin_(local_0_ + begin),
        end_(local_0_ + end) {
    strip_.bottom = row_ = begin_ / per_row_;
    bottom_ = begin < end ? (end_ - 1) / per_row_ + 1 : strip_.bottom;
    strip_.end = per_row_;
    start_strip();
  }
  bool begins_part() const { return begins_strip_; }
  const Strip& part() const { return strip_; }
  bool has_block() const { return row_ < strip_.bottom; }
  TileBlock block() const {
    const int64_t column = in_row_ * block_size_;
    const int64_t whole = smaller(block_size_, row_length_ - column);
    const int64_t begin = row_ * row_length_ + column - first_;
    const int64_t offset = begin < 0 ? -begin : 0;
    const int64_t count = smaller(whole, numel_ - begin) - offset;
    const Block b = {begin + offset, row_ * per_row_ + in_row_ - local_0_, static_cast<int>(count),
                     static_cast<int>(offset)};
    return {b, static_cast<int>(row_ - strip_.top), static_cast<int>(in_row_ - strip_.first),
            count < whole};
  }
  // As that of BlockWalk: behind the end of a strip comes its next row.
  struct Ahead {
    int last = 0;
    int64_t jump = 0;

    int64_t of(int i) const { return kPrefetchDistance + (i < last ? 0 : jump); }
  };
  Ahead ahead() const {
    const int64_t end = smaller(strip_.end * block_size_, row_length_);
    const int64_t columns = end - strip_.first * block_size_;
    return {static_cast<int>(end - in_row_ * block_size_ - kPrefetchDistance),
            row_length_ - columns};
  }
  void advance() {
    begins_strip_ = false;
    if (++in_row_ < end_in_row_) return;
    ++row_;
    start_row();
    if (row_ == strip_.bottom) start_strip();
  }

 private:
  // The next strip that has any block; the last one stays if there is none.
  void start_strip() {
    constexpr int64_t kRows = kRowsPerBand;
    while (row_ == strip_.bottom && !(strip_.end == per_row_ && strip_.bottom == bottom_)) {
      if (strip_.end == per_row_) {
        strip_.top = strip_.bottom;
        strip_.bottom = smaller((strip_.top / kRows + 1) * kRows, bottom_);
        strip_.end = 0;
      }
      strip_.first = strip_.end;
      strip_.end = smaller(strip_.first + Strip::kColumns / block_size_, per_row_);
      row_ = strip_.top;
      start_row();
    }
    begins_strip_ = true;
  }
  // The first block of the strip's next row that has any; the first row of all blocks, and the last
  // one, may have none.
  void start_row() {
    for (; row_ < strip_.bottom; ++row_) {
      in_row_ = larger(strip_.first, begin_ - row_ * per_row_);
      end_in_row_ = smaller(strip_.end, end_ - row_ * per_row_);
      if (in_row_ < end_in_row_) return;
    }
  }

  int64_t numel_, first_, row_length_, block_size_, per_row_;
  int64_t local_0_, begin_, end_;  // numbers of blocks of the parameter
  int64_t bottom_;
  Strip strip_;
  bool begins_strip_ = true;
  int64_t row_ = 0, in_row_ = 0, end_in_row_ = 0;
};

// The tiles of a segment's whole blocks.
class Tiles {
 public:
  explicit Tiles(const Segment& seg)
      : row_length_(seg.row_length),
        block_size_(seg.block_size),
        per_row_(blocks_per_row(seg)),
        first_(block_of(seg, seg.first)),
        end_(first_ + num_blocks(seg)) {
    if (first_ == end_) return;
    const bool is_first_cut = is_cut(block_at(seg, 0), first_);
    const bool is_last_cut = is_cut(block_at(seg, end_ - first_ - 1), end_ - 1);
    first_ += is_first_cut;
    end_ -= is_last_cut;
  }
  // That of block `in_row` of each of a strip's rows.
  Tile tile_at(const Strip& strip, int64_t in_row) const {
    // The first rows whose block has at least these numbers.
    const int64_t top = larger(strip.top, (first_ - in_row + per_row_ - 1) / per_row_);
    const int64_t bottom = smaller(strip.bottom, (end_ - in_row + per_row_ - 1) / per_row_);
    const auto columns = static_cast<int>(columns_of(in_row));
    constexpr int kColumnsPerByte = Shared::kColumnsPerByte;
    return {top, static_cast<int>(larger(bottom - top, 0)), columns,
            (columns + kColumnsPerByte - 1) / kColumnsPerByte};
  }

 private:
  int64_t columns_of(int64_t in_row) const {
    return smaller(block_size_, row_length_ - in_row * block_size_);
  }
  bool is_cut(const Block& b, int64_t number) const {
    return b.count < columns_of(number % per_row_);
  }

  int64_t row_length_, block_size_, per_row_;
  int64_t first_, end_;  // of the whole blocks, by their numbers in the parameter
};

}  // namespace ZERO8_TARGET
}  // namespace zero8
