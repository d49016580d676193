// SPDX-License-Identifier: Apache-2.0
// The codes of v in `shared`, from sums over tiles: zero8/spec/shared.py, equations (C13), (C14).
//
// Included once per target, after chunks.h, packing.h and tiles.h, so in the target's namespace.
#include <cstdint>

namespace zero8 {
namespace ZERO8_TARGET {

// --- Levels --------------------------------------------------------------------------------------

inline Vec::F level_of(Vec::I code) {
  const Vec::I level_0 = Vec::seti(kOneBits - (255u << Shared::kCellBits));
  const Vec::I bits = Vec::addi(Vec::shl<Shared::kCellBits>(code), level_0);
  return Vec::as_float(Vec::unless_zero(bits, code));
}

// The level of each column.
inline void expand(const uint8_t* codes, const Shares& shares, float* levels) {
  for_vectors(0, shares.count(), [&](int i, auto lanes) ZERO8_INLINE {
    store(levels + i, level_of(load8(codes + i, 0, lanes)), lanes);
  });
  if (shares.shift == 0) return;
  // From the last one, as no column lies before its code.
  for (int i = shares.columns - 1; i > 0; --i) levels[i] = levels[shares.code_of(i)];
}

// The sum of all columns' levels, rounded once: in integers, which these are in units of 2^-20.
inline float sum_of_levels(const uint8_t* codes, const Shares& shares) {
  const auto units = [](uint32_t code) ZERO8_INLINE {
    const uint32_t place = code + 1;  // 16 to an octave
    return code == 0 ? 0 : (16 + place % 16) << (place / 16);
  };
  const int count = shares.count();
  int64_t sum = 0;
  if (shares.shift == 0) {  // of whole bands: worth a loop that becomes vectors
    for (int i = 0; i < count; ++i) sum += units(codes[i]);
  } else {
    for (int i = 0; i < count; ++i) {
      sum += static_cast<int64_t>(units(codes[i])) * (shares.begin_of(i + 1) - shares.begin_of(i));
    }
  }
  return static_cast<float>(sum) * 0x1p-20f;
}

// --- Sums of new values --------------------------------------------------------------------------

// Of the values of a row, chunk after chunk: their own sum, and those of their columns.  All are 0
// or normal, and not negative, so no sum is tiny.
class RowSum {
 public:
  // Values from element i on, of whole vectors; the next ones follow.
  template <int kVectors>
  ZERO8_INLINE void add(int i, const float* values, float* sums) {
    constexpr int kInLanes = Shared::kSumLanes / Vec::kLanes;
    constexpr int kOwn = kVectors < kInLanes ? kVectors : kInLanes;
    if (i > 0 && i % Shared::kRun == 0) end_run();
    float* const kept = lanes_ + i % Shared::kSumLanes;
    const Vec::F one = Vec::set(1.0f);
    Vec::F lanes[kOwn];  // not in memory, where each sum would wait for the last one's store
    for (int k = 0; k < kOwn; ++k) lanes[k] = Vec::load(kept + k * Vec::kLanes);
    for (int k = 0; k < kVectors; ++k) {
      float* const of_columns = sums + i + k * Vec::kLanes;
      const Vec::F x = Vec::load(values + i + k * Vec::kLanes);
      Vec::store(of_columns, Vec::fma_far(x, one, Vec::load(of_columns)));
      lanes[k % kOwn] = Vec::fma_far(x, one, lanes[k % kOwn]);
    }
    for (int k = 0; k < kOwn; ++k) Vec::store(kept + k * Vec::kLanes, lanes[k]);
  }
  // Returns the sum, after which that of the next row begins.
  float end() {
    end_run();
    const float total = total_;
    total_ = 0.0f;
    return total;
  }

 private:
  alignas(64) float lanes_[Shared::kSumLanes] = {};
  float total_ = 0.0f;

  // Lanes are added in halves.  Loops of constant lengths: they become vectors.
  void end_run() {
    static_assert(Shared::kSumLanes == 16);
    float eight[8], four[4];
    for (int k = 0; k < 8; ++k) eight[k] = lanes_[k] + lanes_[k + 8];
    for (int k = 0; k < 4; ++k) four[k] = eight[k] + eight[k + 4];
    total_ += (four[0] + four[2]) + (four[1] + four[3]);
    for (float& lane : lanes_) lane = 0.0f;
  }
};

// The means of codes, up to a factor, in place of the sums of their columns.
inline void make_means(const Shares& shares, float* sums) {
  if (shares.shift == 0) return;
  const int whole = 1 << shares.shift;
  for (int i = 0, begin = 0; i < shares.count(); ++i) {
    const int end = shares.begin_of(i + 1);
    float total = 0.0f;
    for (int k = begin; k < end; ++k) total += sums[k];
    const bool has_all = end - begin == whole;
    sums[i] = has_all ? total : total * static_cast<float>(whole) / static_cast<float>(end - begin);
    begin = end;
  }
}

// --- Encoding ------------------------------------------------------------------------------------

// q is that of the tile's first element.
inline void encode_means(const float* means, const Shares& shares, uint32_t q, uint8_t* codes) {
  Vec::I patterns = Vec::seti(0);
  for_vectors(0, shares.count(), [&](int i, auto lanes) ZERO8_INLINE {
    patterns = Vec::maxu(patterns, Vec::as_int(load(means + i, lanes)));
  });
  const uint32_t bits = Vec::reduce_maxu(patterns);
  const Vec::F largest = Vec::set(bits == 0 ? 1.0f : float_of(bits));
  const uint32_t step = kInBlockStep << shares.shift;
  const uint32_t start = q - static_cast<uint32_t>(shares.lead) * kInBlockStep;
  for_vectors(0, shares.count(), [&](int i, auto lanes) ZERO8_INLINE {
    const Vec::I of_codes = Vec::ramp(start + static_cast<uint32_t>(i) * step, step);
    store8(codes + i, code_of(load(means + i, lanes), largest, of_codes), lanes);
  });
  // The columns before a cut have other segments.
  const First one = {1};
  store8(codes, code_of(load(means, one), largest, Vec::seti(q)), one);
}

// --- The codes of a moment ----------------------------------------------------------------------

// Instead of codes, levels of columns are read; sums are kept instead of codes that are made.
template <>
struct BlockCodes<Shared> {
 public:
  template <int k>
  BlockCodes(Number<k>, const Segment& seg, int64_t)
      : seg_(seg),
        moment_(seg.moments[k]),
        tiles_(seg),
        per_row_(blocks_per_row(seg)),
        units_per_row_(units_per_row(seg, Shared::kColumnsPerByte)),
        first_unit_(unit_of(seg, seg.first, Shared::kColumnsPerByte)) {}

  void start(const Strip& strip) {
    strip_ = strip;
    for (int64_t in_row = strip.first; in_row < strip.end; ++in_row) start_tile(in_row);
  }
  const float* next(const TileBlock& b) {
    if (!b.is_cut) return levels_ + b.column * seg_.block_size;
    expand(bytes_of(b), Shares(b), cut_levels_);
    return cut_levels_;
  }
  template <class Ahead>
  void load(int, const Ahead&) const {}
  uint8_t* replaced(const Block&) const { return nullptr; }
  void keep(const TileBlock& b, const float* values) {
    kept_ = b;
    values_ = values;
    kept_sums_ = b.is_cut ? cut_sums_ : sums_ + b.column * seg_.block_size;
    if (b.is_cut) clear(cut_sums_, b.count);
  }
  ZERO8_INLINE void store(int i) { row_sum_.add<4>(i, values_, kept_sums_); }
  ZERO8_INLINE void store_rest() {
    if (kept_.count == 0) return;
    // Behind the values, up to a whole vector, are zeros.
    for (int i = kept_.count / kChunk * kChunk; i < kept_.count; i += Vec::kLanes) {
      row_sum_.add<1>(i, values_, kept_sums_);
    }
    const float total = row_sum_.end();
    if (kept_.is_cut) {
      store_cut(total);
    } else {
      totals_[kept_.row][kept_.column] = total;
    }
    kept_ = {};
  }
  void finish() {
    for (int64_t in_row = strip_.first; in_row < strip_.end; ++in_row) finish_tile(in_row);
  }

 private:
  // Of a strip, and a vector behind it.
  static constexpr int kColumns = kMaxBlockSize + Vec::kLanes;
  static constexpr float kLeft = -1.0f;  // in place of the total of a block left as it is

  // Where the codes of a row of a tile lie.
  uint8_t* bytes_at(int64_t row, int64_t in_row) const {
    const int64_t unit =
        row * units_per_row_ + in_row * (seg_.block_size / Shared::kColumnsPerByte);
    return static_cast<uint8_t*>(moment_.values) + (unit - first_unit_);
  }
  uint8_t* bytes_of(const Block& b) const {
    const int64_t unit = unit_of(seg_, seg_.first + b.begin, Shared::kColumnsPerByte);
    return static_cast<uint8_t*>(moment_.values) + (unit - first_unit_);
  }
  float* scale_at(int64_t row, int64_t in_row) const {
    return moment_.scales + row * per_row_ + in_row - block_of(seg_, seg_.first);
  }
  void start_tile(int64_t in_row) {
    const int64_t column = in_row - strip_.first;
    const Tile tile = tiles_.tile_at(strip_, in_row);
    if (tile.rows == 0) return;
    uint8_t codes[kMaxBlockSize];
    for (int row = 0; row < tile.rows; ++row) {
      __builtin_memcpy(codes + row * tile.bytes_per_row, bytes_at(tile.top + row, in_row),
                       tile.bytes_per_row);
      totals_[tile.top - strip_.top + row][column] = kLeft;
    }
    const Shares shares(tile);
    expand(codes, shares, levels_ + column * seg_.block_size);
    clear(sums_ + column * seg_.block_size, tile.columns);
  }
  void finish_tile(int64_t in_row) {
    const int64_t column = in_row - strip_.first;
    const Tile tile = tiles_.tile_at(strip_, in_row);
    const int64_t top = tile.top - strip_.top;
    bool has_new = false;
    for (int row = 0; row < tile.rows; ++row) has_new |= totals_[top + row][column] != kLeft;
    if (!has_new) return;
    uint8_t codes[kMaxBlockSize];
    __builtin_memset(codes, 0, tile.rows * tile.bytes_per_row);
    const int64_t begin = tile.top * seg_.row_length + in_row * seg_.block_size - seg_.first;
    const Block first = {begin, 0, tile.columns, 0};
    const float levels = encode(first, Shares(tile), sums_ + column * seg_.block_size, codes);
    for (int row = 0; row < tile.rows; ++row) {
      __builtin_memcpy(bytes_at(tile.top + row, in_row), codes + row * tile.bytes_per_row,
                       tile.bytes_per_row);
      const float total = totals_[top + row][column];
      if (total != kLeft) *scale_at(tile.top + row, in_row) = row_of(total, levels);
    }
  }
  static void clear(float* sums, int count) {
    for (int i = 0; i < count; i += Vec::kLanes) Vec::store(sums + i, Vec::set(0.0f));
  }
  // A tile of its own.
  void store_cut(float total) {
    const float levels = encode(kept_, Shares(kept_), cut_sums_, bytes_of(kept_));
    moment_.scales[kept_.local] = row_of(total, levels);
  }
  // Of the tile whose first row is a block, from the sums of its columns, which are lost; returns
  // the sum of its new levels.
  float encode(const Block& b, const Shares& shares, float* sums, uint8_t* codes) const {
    make_means(shares, sums);
    encode_means(sums, shares, Thresholds(seg_, b, moment_.phase).q, codes);
    return sum_of_levels(codes, shares);
  }

  const Segment& seg_;
  const Moment& moment_;
  const Tiles tiles_;
  const int64_t per_row_, units_per_row_, first_unit_;
  Strip strip_;
  TileBlock kept_ = {};
  const float* values_ = nullptr;
  float* kept_sums_ = nullptr;
  RowSum row_sum_;
  float totals_[kRowsPerBand][Strip::kMaxBlocks];
  alignas(64) float levels_[kColumns];
  alignas(64) float sums_[kColumns];
  alignas(64) float cut_levels_[kColumns];
  alignas(64) float cut_sums_[kColumns];
};

}  // namespace ZERO8_TARGET
}  // namespace zero8
