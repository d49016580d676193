// SPDX-License-Identifier: Apache-2.0
// Codes of fewer than 8 bits on the CPU: from memory to a byte each, and back.
// zero8/spec/packing.py has the units in which they lie, zero8/spec/grid.py says where units begin.
//
// Codes are made bytes before they are decoded, and units after they have been encoded, in the
// first-level cache: so the codes themselves, in codes.h, know of bytes alone.
//
// Included once per target, so in the target's namespace.
#include <cstdint>

namespace zero8::ZERO8_TARGET {

inline void store_bytes(uint8_t* codes, Vec::I x) { __builtin_memcpy(codes, &x, sizeof x); }

// Units of a code of 6 or 4 bits.
template <class Code>
class Units {
 public:
  static_assert(Code::kBits == 6 || Code::kBits == 4);
  static constexpr int kCodes = kUnitCodes<Code>, kBytes = kUnitBytes<Code>;
  // Whose codes fill a vector of bytes.
  static constexpr int kVector = 4 * Vec::kLanes / kCodes;

  static constexpr int count(int codes) { return (codes + kCodes - 1) / kCodes; }

  // kVector units from and to bytes, as Code::kTwosComplement, kRaised and kLowered have them.
  ZERO8_INLINE static Vec::I load(const uint8_t* units) {
    if constexpr (Code::kBits == 6) {
      const Vec::I codes = Vec::load6(units);
      return Code::kTwosComplement ? Vec::shl<2>(codes) : codes;
    }
    // Two units in the upper half of a lane.
    const Vec::I two = Vec::as_int(Vec::load(reinterpret_cast<const uint16_t*>(units)));
    const Vec::I first = Vec::ori(Vec::andi(Vec::shr<20>(two), Vec::seti(0x0000000F)),
                                  Vec::andi(Vec::shr<8>(two), Vec::seti(0x00000F00)));
    const Vec::I second = Vec::ori(Vec::andi(Vec::shr<12>(two), Vec::seti(0x000F0000)),
                                   Vec::andi(two, Vec::seti(0x0F000000)));
    return Vec::addi(Vec::ori(first, second), Vec::seti(Code::kRaised * 0x01010101u));
  }
  ZERO8_INLINE static void store(uint8_t* units, Vec::I codes) {
    if constexpr (Code::kBits == 6) {
      Vec::store6(units, codes);
    } else {
      // In four bits.
      codes = Vec::addi(codes, Vec::seti((16 - Code::kLowered) * 0x01010101u));
      const Vec::I upper = Vec::shl<4>(Vec::andi(codes, Vec::seti(0x000F000F)));
      const Vec::I bytes = Vec::ori(upper, Vec::shr<8>(Vec::andi(codes, Vec::seti(0x0F000F00))));
      const Vec::I two = Vec::ori(bytes, Vec::shr<8>(bytes));
      Vec::store16(reinterpret_cast<uint16_t*>(units), Vec::andi(two, Vec::seti(0xFFFF)));
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
      store(units + kBytes * i, Vec::load_pairs(codes + kCodes * i));
    }
    if (i == num_units) return;
    uint8_t rest[kCodes * kVector] = {}, made[kBytes * kVector];
    __builtin_memcpy(rest, codes + kCodes * i, kCodes * (num_units - i));
    store(made, Vec::load_pairs(rest));
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

  // The codes of a block, a byte each, of which a unit before and a vector behind are written over.
  static void expand_block(const Segment& seg, const Block& b, const void* values, uint8_t* codes) {
    for_rows(seg, b, [&](int64_t unit, int skipped, int count) {
      const uint8_t* units = static_cast<const uint8_t*>(values) + unit * kBytes;
      expand(units, Units::count(skipped + count), codes - skipped);
      codes += count;
    });
  }
  static void pack_block(const Segment& seg, const Block& b, const uint8_t* codes, void* values) {
    for_rows(seg, b, [&](int64_t unit, int skipped, int count) {
      pack_row(codes, skipped, count, static_cast<uint8_t*>(values) + unit * kBytes);
      codes += count;
    });
  }

 private:
  // Calls body(unit, skipped, count) for the part of a block in each row: its first unit in memory,
  // how many codes of it are not the block's, and how many are.
  template <class Body>
  static void for_rows(const Segment& seg, const Block& b, Body&& body) {
    const int64_t row = seg.own_row_length, first = seg.first + b.begin;
    if (row % kCodes == 0) {  // so that units follow each other from row to row: without divisions
      body(first / kCodes - seg.first / kCodes, static_cast<int>(first % kCodes), b.count);
      return;
    }
    int64_t unit = unit_of(seg, first, kCodes) - unit_of(seg, seg.first, kCodes);
    int64_t column = first % row;
    for (int count = b.count; count > 0;) {
      const int64_t left = row - column;
      const int here = left < count ? static_cast<int>(left) : count;
      const int skipped = static_cast<int>(column % kCodes);
      body(unit, skipped, here);
      unit += Units::count(skipped + here);
      column = 0;
      count -= here;
    }
  }
};

constexpr int kUnitMargin = 64;  // before and behind a block's codes

}  // namespace zero8::ZERO8_TARGET
