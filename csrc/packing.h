// SPDX-License-Identifier: Apache-2.0
// Codes of fewer than 8 bits: from memory to a byte each, and back.  zero8/spec/packing.py has the
// units in which they lie, zero8/spec/grid.py says where units begin.
//
// Codes are made bytes before they are decoded, and units after they have been encoded, in the
// first-level cache: so the codes themselves, in codes.h, know of bytes alone.
//
// Included once per target, so in the target's namespace.
#include <cstdint>

namespace zero8 {
namespace ZERO8_TARGET {

inline Vec::I load_bytes(const uint8_t* codes) {
  Vec::I x;
  __builtin_memcpy(&x, codes, sizeof x);
  return x;
}
inline void store_bytes(uint8_t* codes, Vec::I x) { __builtin_memcpy(codes, &x, sizeof x); }

// Units of a code of 6 or 4 bits.
template <class Code>
struct Units {
  static_assert(Code::kBits == 6 || Code::kBits == 4);
  static constexpr int kCodes = kUnitCodes<Code>, kBytes = kUnitBytes<Code>;
  // Whose codes fill a vector of bytes.
  static constexpr int kVector = 4 * Vec::kLanes / kCodes;

  static constexpr int count(int codes) { return (codes + kCodes - 1) / kCodes; }
  static constexpr int bytes_of(int codes) { return count(codes) * kBytes; }

  // kVector units from and to bytes, as Code::kTwosComplement, kRaised and kLowered have them.
  ZERO8_INLINE static Vec::I load(const uint8_t* units) {
    if constexpr (Code::kBits == 6) return Vec::load6<Code::kTwosComplement>(units);
    return Vec::addi(Vec::load4(units), Vec::seti(Code::kRaised * 0x01010101u));
  }
  ZERO8_INLINE static void store(uint8_t* units, Vec::I codes) {
    if constexpr (Code::kBits == 6) {
      Vec::store6(units, codes);
    } else {
      // In four bits.
      Vec::store4(units, Vec::addi(codes, Vec::seti((16 - Code::kLowered) * 0x01010101u)));
    }
  }

  static void expand(const uint8_t* units, int num_units, uint8_t* codes) {
    int i = 0;
    for (; i + kVector <= num_units; i += kVector) {
      store_bytes(codes + kCodes * i, load(units + kBytes * i));
    }
    if (i == num_units) return;
    uint8_t rest[kBytes * kVector] = {}, expanded[kCodes * kVector];
    __builtin_memcpy(rest, units + kBytes * i, kBytes * (num_units - i));
    store_bytes(expanded, load(rest));
    __builtin_memcpy(codes + kCodes * i, expanded, kCodes * (num_units - i));
  }
  static void pack(const uint8_t* codes, int num_units, uint8_t* units) {
    int i = 0;
    for (; i + kVector <= num_units; i += kVector) {
      store(units + kBytes * i, load_bytes(codes + kCodes * i));
    }
    if (i == num_units) return;
    uint8_t rest[kCodes * kVector] = {}, made[kBytes * kVector];
    __builtin_memcpy(rest, codes + kCodes * i, kCodes * (num_units - i));
    store(made, load_bytes(rest));
    __builtin_memcpy(units + kBytes * i, made, kBytes * (num_units - i));
  }
  // `count` codes behind `skipped` places of their first unit, of which all bits become 0 like
  // those of places behind them.
  static void pack_row(const uint8_t* codes, int skipped, int count, uint8_t* units) {
    const auto pack_part = [&](int at, int number) {
      uint8_t one[kCodes];
      for (int i = 0; i < kCodes; ++i) {
        one[i] = i < at || i >= at + number ? static_cast<uint8_t>(Code::kLowered) : *codes++;
      }
      pack(one, 1, units);
      units += kBytes;
      count -= number;
    };
    if (skipped) pack_part(skipped, count < kCodes - skipped ? count : kCodes - skipped);
    const int whole = count / kCodes;
    pack(codes, whole, units);
    codes += kCodes * whole;
    units += kBytes * whole;
    count -= kCodes * whole;
    if (count) pack_part(0, count);
  }
};

// Where a block's codes begin: its first unit, and the column of its first element in a row.
struct UnitPlace {
  uint8_t* units;
  int64_t column;
};

// Calls body(units, skipped, count) for the part of a block in each row: its first unit, how many
// codes of it are not the block's, and how many are.  Returns the place of the next block.
template <class Units, class Body>
UnitPlace for_rows(UnitPlace place, int64_t row_length, int count, Body&& body) {
  while (count > 0) {
    const int64_t left = row_length - place.column;
    const int here = left < count ? static_cast<int>(left) : count;
    const int skipped = static_cast<int>(place.column % Units::kCodes);
    body(place.units, skipped, here);
    place.units += Units::bytes_of(skipped + here);
    place.column = here == left ? 0 : place.column + here;
    count -= here;
  }
  return place;
}

// --- The codes of a moment ----------------------------------------------------------------------

// The codes of a moment's blocks, in order, a byte each.
//
//   BlockCodes(Number<k>, segment, local)   of moment k, from block number `local` of a segment on
//   next(block), replaced(block)         of the next block: its codes, and where new ones go
//   load(i)                              its chunks are read in order, now that from element i on
//   keep(block)                          the new codes will be that block's
//   store(i), store_rest()               they are made in order, now that chunk, or all others
template <class Code, int kBits>
class CodesOf;
template <class Code>
struct BlockCodes : CodesOf<Code, Code::kBits> {
  using CodesOf<Code, Code::kBits>::CodesOf;
};

// Of 8 bits: those in memory.
template <class Code>
class CodesOf<Code, 8> {
 public:
  template <int k>
  CodesOf(Number<k>, const Segment& seg, int64_t)
      : values_(static_cast<uint8_t*>(seg.moments[k].values)) {}
  const uint8_t* next(const Block& b) {
    codes_ = values_ + b.begin;
    return codes_;
  }
  ZERO8_INLINE void load(int i) const { prefetch_chunk(codes_ + i); }
  uint8_t* replaced(const Block& b) const { return values_ + b.begin; }
  void keep(const Block&) {}
  ZERO8_INLINE void store(int) const {}
  void store_rest() const {}

 private:
  uint8_t* values_;
  const uint8_t* codes_ = nullptr;
};

// Of fewer: copies.  Where a block lies in one row, and begins there with a unit, its chunks are
// expanded and packed among those that are decoded and encoded: the processor does so while it
// waits for its square roots and divisions.  There they are a chunk ahead, and behind: else each
// chunk would wait for its own.
template <class Code, int kBits>
class CodesOf {
 public:
  template <int k>
  CodesOf(Number<k>, const Segment& seg, int64_t local) : row_length_(seg.own_row_length) {
    const int64_t first = seg.first + block_at(seg, local).begin;
    const int64_t units =
        unit_of(seg, first, Units::kCodes) - unit_of(seg, seg.first, Units::kCodes);
    next_.units = static_cast<uint8_t*>(seg.moments[k].values) + units * Units::kBytes;
    next_.column = first % row_length_;
  }
  ZERO8_INLINE const uint8_t* next(const Block& b) {
    read_ = {next_, b.count, in_chunks(b.count)};
    if (read_.in_chunks == 0) {
      expand_rows();
    } else {
      next_.units += Units::bytes_of(b.count);
      next_.column += b.count;
      if (next_.column == row_length_) next_.column = 0;
      expand_chunk(0);
      if (read_.in_chunks < b.count) expand_rest();
    }
    return old_ + kMargin;
  }
  ZERO8_INLINE void load(int i) {
    if (i + kChunk < read_.in_chunks) expand_chunk(i + kChunk);
  }
  uint8_t* replaced(const Block&) { return new_ + kMargin; }
  void keep(const Block&) { kept_ = read_; }
  ZERO8_INLINE void store(int i) const {
    if (0 < i && i < kept_.in_chunks) pack_chunk(i - kChunk);
  }
  ZERO8_INLINE void store_rest() {
    if (kept_.in_chunks == 0) {
      pack_rows();
    } else {
      pack_chunk(kept_.in_chunks - kChunk);
      if (kept_.in_chunks < kept_.count) pack_rest();
    }
    kept_ = {};
  }

 private:
  using Units = zero8::ZERO8_TARGET::Units<Code>;
  // Of which a unit before, and a vector behind, are used.
  static constexpr int kMargin = 64;
  static constexpr int kSize = kMargin + kMaxBlockSize + kMargin;

  // A block: where its units begin, its elements, and how many of them are in chunks of whole
  // units.
  struct Run {
    UnitPlace place;
    int count, in_chunks;
  };

  int in_chunks(int count) const {
    const bool is_one_run =
        next_.column % Units::kCodes == 0 && count <= row_length_ - next_.column;
    return is_one_run ? count / kChunk * kChunk : 0;
  }
  ZERO8_INLINE void expand_chunk(int i) {
    const uint8_t* units = read_.place.units + Units::bytes_of(i);
    Vec::prefetch(units + Units::bytes_of(kPrefetchDistance));
    store_bytes(old_ + kMargin + i, Units::load(units));
  }
  void expand_rest() {
    const int i = read_.in_chunks;
    Units::expand(read_.place.units + Units::bytes_of(i), Units::count(read_.count - i),
                  old_ + kMargin + i);
  }
  void expand_rows() {
    uint8_t* codes = old_ + kMargin;
    next_ = for_rows<Units>(next_, row_length_, read_.count,
                            [&](const uint8_t* units, int skipped, int count) {
                              // Writes over what is before and behind, where the next row's codes
                              // come.
                              Units::expand(units, Units::count(skipped + count), codes - skipped);
                              codes += count;
                            });
  }
  ZERO8_INLINE void pack_chunk(int i) const {
    Units::store(kept_.place.units + Units::bytes_of(i), load_bytes(new_ + kMargin + i));
  }
  void pack_rest() const {
    const int i = kept_.in_chunks;
    Units::pack_row(new_ + kMargin + i, 0, kept_.count - i, kept_.place.units + Units::bytes_of(i));
  }
  void pack_rows() const {
    const uint8_t* codes = new_ + kMargin;
    for_rows<Units>(kept_.place, row_length_, kept_.count,
                    [&](uint8_t* units, int skipped, int count) {
                      Units::pack_row(codes, skipped, count, units);
                      codes += count;
                    });
  }

  int64_t row_length_;
  UnitPlace next_;
  Run read_ = {}, kept_ = {};
  alignas(64) uint8_t old_[kSize];
  alignas(64) uint8_t new_[kSize];
};

}  // namespace ZERO8_TARGET
}  // namespace zero8
