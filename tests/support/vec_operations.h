// SPDX-License-Identifier: Apache-2.0
// Every operation of vec_scalar.h in another vocabulary, lane by lane against
// that definition.
//
// Included after the header of the other one.  An operation is written down
// once, as a function of a vocabulary `v` and of operands `x`, and is called
// with both vocabularies.
#pragma once

#include <cstdint>
#include <cstdio>
#include <cstring>
#include <random>
#include <string>
#include <type_traits>
#include <vector>

#include "flush_to_zero.h"
#include "format.h"

#undef ZERO8_TARGET
#define ZERO8_TARGET scalar
#include "vec_scalar.h"

namespace vec_operations {

using Scalar = zero8::scalar::Vec;

// --- Operands
// ------------------------------------------------------------------------------------

// As floats: zeros, subnormals, both sides of 2^-126 and of its root, ties of
// every rounding, ends of the integers, infinities, NaN.  As integers: both
// sides of 2^4, 2^5, 2^7, 2^8, 2^15, 2^16 and 2^31.
const uint32_t kSpecial[] = {
    0x00000000, 0x00000001, 0x0000000F, 0x00000010, 0x0000001F, 0x00000020, 0x0000007F, 0x00000080,
    0x000000FF, 0x00000100, 0x00007FFF, 0x00008000, 0x0000FFFF, 0x00010000, 0x007FFFFF, 0x00800000,
    0x00800001, 0x1FFFFFFF, 0x20000000, 0x20000001, 0x3EFFFFFF, 0x3F000000, 0x3F7FFFFF, 0x3F800000,
    0x3F800001, 0x3FC00000, 0x40200000, 0x4B000001, 0x4EFFFFFF, 0x4F000000, 0x5F000000, 0x7F7FFFFF,
    0x7F800000, 0x7F800001, 0x7FC00000, 0x7FFFFFFF, 0x80000000, 0x80000001, 0x807FFFFF, 0x80800000,
    0xBF000000, 0xBF800001, 0xC0200000, 0xCF000000, 0xCF000001, 0xFF7FFFFF, 0xFF800000, 0xFFFFFFFF,
};
constexpr int kSpecials = sizeof kSpecial / sizeof kSpecial[0];
// All triples of these, then random patterns; a multiple of four vectors of any
// length.
constexpr int kTriples = kSpecials * kSpecials * kSpecials, kCount = kTriples + (1 << 15);
static_assert(kCount % 64 == 0);

struct Arrays {
  std::vector<uint32_t> pattern[3];
  std::vector<uint16_t> narrow;  // every one
  std::vector<uint8_t> code;

  Arrays() {
    std::mt19937 random;
    for (int i = 0; i < kCount; ++i) {
      const int digits[] = {i % kSpecials, i / kSpecials % kSpecials, i / kSpecials / kSpecials};
      for (int k = 0; k < 3; ++k) {
        pattern[k].push_back(i < kTriples ? kSpecial[digits[k]] : static_cast<uint32_t>(random()));
      }
      narrow.push_back(static_cast<uint16_t>(i));
      code.push_back(static_cast<uint8_t>(random() % 8 ? random() : 0));
    }
  }
};

inline const Arrays& arrays() {
  static const Arrays made;
  return made;
}

// The operands of the vector whose first element is number i.
template <class V>
struct Operands {
  int i;

  const uint32_t* patterns(int k) const { return &arrays().pattern[k][i]; }
  const float* floats(int k) const { return reinterpret_cast<const float*>(patterns(k)); }
  const uint16_t* narrow() const { return &arrays().narrow[i]; }
  const zero8::Half* halves() const { return reinterpret_cast<const zero8::Half*>(narrow()); }
  const uint8_t* codes() const { return &arrays().code[i]; }
  const uint8_t* bytes() const {
    return reinterpret_cast<const uint8_t*>(arrays().pattern[0].data());
  }
  uint32_t same() const { return arrays().pattern[0][i / 64 * 64]; }  // in all lanes

  typename V::F raw(int k) const { return V::load(floats(k)); }
  typename V::F read(int k) const { return V::flushed(raw(k)); }  // as a step reads numbers
  typename V::I integer(int k) const { return V::as_int(raw(k)); }
  typename V::I below(int k, uint32_t end) const {  // `end` is a power of two
    return V::andi(integer(k), V::seti(end - 1));
  }
};

struct Two {
  uint8_t bytes[2];
};
struct Three {
  uint8_t bytes[3];
};

// --- What contracts ask of operands
// --------------------------------------------------------------

using Condition = bool (*)(const Operands<Scalar>&);

inline bool all(const Operands<Scalar>&) { return true; }
inline bool is_zero_or_normal(uint32_t x) { return (x & 0x7F800000) || !(x & 0x7FFFFFFF); }
inline bool no_subnormals(const Operands<Scalar>& x) {
  return is_zero_or_normal(*x.patterns(0)) && is_zero_or_normal(*x.patterns(1)) &&
         is_zero_or_normal(*x.patterns(2));
}
// In double, a product is exact, and a sum right to 2^-53.
inline bool is_far(double x) { return x == 0.0 || !(x > -0x1p-125 && x < 0x1p-125); }
// Operands of max and min are results, so not subnormal.
inline bool has_larger(const Operands<Scalar>& x) {
  const bool both_zero = *x.floats(0) == 0.0f && *x.floats(1) == 0.0f;
  return no_subnormals(x) && !both_zero && *x.floats(0) == *x.floats(0);
}
inline bool has_far_product(const Operands<Scalar>& x) {
  return no_subnormals(x) && is_far(static_cast<double>(*x.floats(0)) * *x.floats(1));
}
inline bool has_far_sum(const Operands<Scalar>& x) {
  const double product = static_cast<double>(*x.floats(0)) * *x.floats(1);
  return no_subnormals(x) && is_far(product + *x.floats(2));
}
inline bool has_factor_below_2_to_64(const Operands<Scalar>& x) {
  return (*x.patterns(0) & 0x7FFFFFFF) < 0x5F800000;
}
inline bool is_zero_normal_or_infinite(uint32_t x) {
  return is_zero_or_normal(x) && (x & 0x7FFFFFFF) <= 0x7F800000;
}
inline bool are_two_magnitudes(const Operands<Scalar>& x) {
  return is_zero_normal_or_infinite(*x.patterns(0)) && is_zero_normal_or_infinite(*x.patterns(1));
}
inline bool is_one_magnitude(const Operands<Scalar>& x) {
  return is_zero_normal_or_infinite(*x.patterns(0));
}
inline bool is_in_int32(const Operands<Scalar>& x) {
  return (*x.patterns(0) & 0x7FFFFFFF) < 0x4F000000;
}

// --- The comparison
// ------------------------------------------------------------------------------

// The processor's mode for what flushes by itself.
struct NoMode {};

template <class V>
void put(uint32_t* to, typename V::F x) {
  V::store(reinterpret_cast<float*>(to), x);
}
template <class V>
void put(uint32_t* to, typename V::I x) {
  V::store(reinterpret_cast<float*>(to), V::as_float(x));
}

// Calls call(vocabulary, operands, element) for the elements from 0 in steps of
// `step` vectors.
template <class V, class Mode, class Call>
void for_operands(int step, Call call) {
  [[maybe_unused]] const Mode mode;
  for (int i = 0; i < kCount; i += step * V::kLanes) call(V(), Operands<V>{i}, i);
}

// Compares V, which computes in a mode, with the definition.
template <class V, class Mode>
class Comparison {
  using Flush = zero8::FlushToZero;

 public:
  // A line for each operation: its name, how many results were compared, and
  // how many differ.
  std::string report;

  // Operations that return a vector.
  template <class Call>
  void lanes(const char* name, Call call, Condition condition = all) {
    std::vector<uint32_t> got(kCount), wanted(kCount);
    for_operands<V, Mode>(1, [&](auto v, auto x, int i) { put<V>(&got[i], call(v, x)); });
    for_operands<Scalar, Flush>(
        1, [&](auto v, auto x, int i) { put<Scalar>(&wanted[i], call(v, x)); });
    begin(std::is_same_v<decltype(call(V(), Operands<V>{0})), typename V::F>);
    for (int i = 0; i < kCount; ++i) {
      if (condition({i})) compare(got[i], wanted[i]);
    }
    end(name);
  }

  // Operations that write `vectors` vectors of numbers of type T to memory.
  template <class T, class Call>
  void writes(const char* name, int vectors, Call call, Condition condition = all) {
    std::vector<T> got(kCount), wanted(kCount);
    for_operands<V, Mode>(vectors, [&](auto v, auto x, int i) { call(v, x, &got[i]); });
    for_operands<Scalar, Flush>(vectors, [&](auto v, auto x, int i) { call(v, x, &wanted[i]); });
    begin();
    for (int i = 0; i < kCount; ++i) {
      if (condition({i})) compare(pattern(got[i]), pattern(wanted[i]));
    }
    end(name);
  }

  // Operations that return one number for all lanes; combine(x, y) is that of
  // two lanes.
  template <class Call, class Combine>
  void reduces(const char* name, Call call, Combine combine) {
    std::vector<uint32_t> lane(kCount);
    for_operands<Scalar, Flush>(1, [&](auto v, auto x, int i) { lane[i] = call(v, x); });
    begin();
    for_operands<V, Mode>(1, [&](auto v, auto x, int i) {
      uint32_t wanted = lane[i];
      for (int k = 1; k < V::kLanes; ++k) wanted = combine(wanted, lane[i + k]);
      compare(call(v, x), wanted);
    });
    end(name);
  }

  // Operations that return the first n lanes, and `fill` beyond.
  template <class Call>
  void reads_tails(const char* name, uint32_t fill, Call call) {
    begin(std::is_same_v<decltype(call(V(), Operands<V>{0}, 1)), typename V::F>);
    for_operands<V, Mode>(1, [&](auto v, auto x, int i) {
      const int n = 1 + i / V::kLanes % V::kLanes;
      uint32_t got[V::kLanes];
      put<V>(got, call(v, x, n));
      for (int k = 0; k < V::kLanes; ++k) {
        uint32_t wanted = fill;
        if (k < n) put<Scalar>(&wanted, call(Scalar(), Operands<Scalar>{i + k}, 1));
        compare(got[k], wanted);
      }
    });
    end(name);
  }

  // Operations that write the first n lanes and nothing beside them.
  template <class T, class Call>
  void writes_tails(const char* name, Call call) {
    begin();
    for_operands<V, Mode>(1, [&](auto v, auto x, int i) {
      const int n = 1 + i / V::kLanes % V::kLanes;
      T got[V::kLanes + 2], wanted[V::kLanes + 2];
      std::memset(got, 0x5A, sizeof got);
      std::memset(wanted, 0x5A, sizeof wanted);
      call(v, x, got + 1, n);
      for (int k = 0; k < n; ++k) call(Scalar(), Operands<Scalar>{i + k}, wanted + 1 + k, 1);
      for (int k = 0; k < V::kLanes + 2; ++k) compare(pattern(got[k]), pattern(wanted[k]));
    });
    end(name);
  }

 private:
  bool floats_;  // are compared
  int64_t compared_, differ_;
  char first_[64];  // that differs

  template <class T>
  static uint32_t pattern(T x) {
    uint32_t bits = 0;
    std::memcpy(&bits, &x, sizeof x);
    return bits;
  }

  void begin(bool floats = false) {
    floats_ = floats;
    compared_ = differ_ = 0;
    first_[0] = 0;
  }
  static bool is_nan(uint32_t x) { return (x & 0x7FFFFFFF) > 0x7F800000; }
  // Bit by bit, except that the definition says only where NaN is.
  void compare(uint32_t got, uint32_t wanted) {
    ++compared_;
    if (got == wanted || (floats_ && is_nan(got) && is_nan(wanted))) return;
    if (differ_++ == 0) std::snprintf(first_, sizeof first_, ": got %08x, not %08x", got, wanted);
  }
  void end(const char* name) {
    report += std::string(name) + " " + std::to_string(compared_) + " " + std::to_string(differ_) +
              first_ + "\n";
  }
};

// --- The operations
// ------------------------------------------------------------------------------

template <class Number>
struct Table {
  Number x[256];

  Table() {
    std::mt19937 random(1);
    for (Number& one : x) one = static_cast<Number>(random() % (1 << 24));
  }
};
inline const Table<float> kFloats;
inline const Table<uint32_t> kInts;

// A constant would let the compiler leave out the product, and with it the
// flush.
inline volatile float one = 1.0f;

// `sums` says of which operands sums are defined.
template <class Test>
void compare_arithmetic(Test& test, Condition sums) {
  test.lanes("flushed", [](auto v, auto x) { return v.mul(x.read(0), v.set(one)); });
  test.lanes("mul", [](auto v, auto x) { return v.mul(x.read(0), x.read(1)); });
  test.lanes("fma", [](auto v, auto x) { return v.fma(x.read(0), x.read(1), x.read(2)); }, sums);
  test.lanes(
      "mul_far", [](auto v, auto x) { return v.mul_far(x.read(0), x.read(1)); }, has_far_product);
  test.lanes(
      "fma_far", [](auto v, auto x) { return v.fma_far(x.read(0), x.read(1), x.read(2)); },
      has_far_sum);
  test.lanes("fms", [](auto v, auto x) { return v.fms(x.read(0), x.read(1), x.read(2)); }, sums);
  test.lanes("div", [](auto v, auto x) { return v.div(x.read(0), x.read(1)); });
  test.lanes("sqrt", [](auto v, auto x) { return v.sqrt(x.read(0)); });
  test.lanes("max", [](auto v, auto x) { return v.max(x.raw(0), x.raw(1)); }, has_larger);
  test.lanes("min", [](auto v, auto x) { return v.min(x.raw(0), x.raw(1)); }, has_larger);
  test.lanes("not_below", [](auto v, auto x) {
    return v.choose(v.not_below(x.read(0), x.read(1)), v.seti(1), v.seti(0));
  });
}

// `within` says which floats become integers.
template <class Test>
void compare_conversions(Test& test, Condition within) {
  test.lanes("as_int", [](auto v, auto x) { return v.as_int(x.raw(0)); });
  test.lanes("magnitude_bits", [](auto v, auto x) { return v.magnitude_bits(x.raw(0)); });
  test.lanes("as_float", [](auto v, auto x) { return v.as_float(x.integer(0)); });
  test.lanes("to_float", [](auto v, auto x) { return v.to_float(x.integer(0)); });
  test.lanes("truncate", [](auto v, auto x) { return v.truncate(x.read(0)); }, within);
}

template <class Test>
void compare_integers(Test& test) {
  test.lanes("addi", [](auto v, auto x) { return v.addi(x.integer(0), x.integer(1)); });
  test.lanes("subi", [](auto v, auto x) { return v.subi(x.integer(0), x.integer(1)); });
  test.lanes("scaled_upper",
             [](auto v, auto x) { return v.template scaled_upper<10478, 17>(x.integer(0)); });
  test.lanes("muli", [](auto v, auto x) { return v.muli(x.integer(0), x.integer(1)); });
  test.lanes("add_low16",
             [](auto v, auto x) { return v.add_low16(x.integer(0), x.below(1, 1 << 16)); });
  test.lanes("absi", [](auto v, auto x) { return v.absi(x.integer(0)); });
  test.lanes("andi", [](auto v, auto x) { return v.andi(x.integer(0), x.integer(1)); });
  test.lanes("ori", [](auto v, auto x) { return v.ori(x.integer(0), x.integer(1)); });
  test.lanes("xori", [](auto v, auto x) { return v.xori(x.integer(0), x.integer(1)); });
  test.lanes("shl", [](auto v, auto x) {
    return v.xori(v.template shl<1>(x.integer(0)), v.template shl<23>(x.integer(1)));
  });
  test.lanes("shr", [](auto v, auto x) {
    return v.xori(v.template shr<1>(x.integer(0)), v.template shr<23>(x.integer(1)));
  });
  test.lanes("sra", [](auto v, auto x) {
    return v.xori(v.template sra<1>(x.integer(0)), v.template sra<16>(x.integer(1)));
  });
  test.lanes("shlv", [](auto v, auto x) { return v.shlv(x.integer(0), x.below(1, 32)); });
  test.lanes("shrv", [](auto v, auto x) { return v.shrv(x.integer(0), x.below(1, 32)); });
  test.lanes("maxu", [](auto v, auto x) { return v.maxu(x.integer(0), x.integer(1)); });
  test.lanes("minu", [](auto v, auto x) { return v.minu(x.integer(0), x.integer(1)); });
  test.lanes(
      "max_magnitude",
      [](auto v, auto x) { return v.max_magnitude(x.below(0, 1u << 31), x.raw(1)); },
      are_two_magnitudes);
  test.lanes("maxs", [](auto v, auto x) { return v.maxs(x.integer(0), x.integer(1)); });
  test.lanes("equal", [](auto v, auto x) {
    return v.choose(v.equal(x.integer(0), x.integer(1)), v.seti(1), v.seti(0));
  });
  test.lanes("above", [](auto v, auto x) {
    return v.choose(v.above(x.integer(0), x.integer(1)), v.seti(1), v.seti(0));
  });
  test.lanes("choose", [](auto v, auto x) {
    return v.choose(v.equal(x.integer(0), x.integer(1)), x.integer(1), x.integer(2));
  });
  test.lanes("incremented", [](auto v, auto x) {
    return v.incremented(x.integer(0), v.above(x.integer(1), x.integer(2)));
  });
  test.lanes("signed_as", [](auto v, auto x) {
    return v.signed_as(v.unless_zero(x.integer(0), v.andi(x.integer(1), v.seti(0x7FFFFFFF))),
                       x.raw(1));
  });
  test.lanes("negated", [](auto v, auto x) { return v.as_int(v.negated(x.raw(0), x.integer(1))); });
  test.lanes("unless_zero",
             [](auto v, auto x) { return v.unless_zero(x.integer(0), x.below(1, 1u << 31)); });
  const auto sum = [](uint32_t a, uint32_t b) { return a + b; };
  const auto either = [](uint32_t a, uint32_t b) { return a | b; };
  test.reduces(
      "count", [](auto v, auto x) { return v.count(v.above(x.integer(1), x.integer(0))); }, sum);
  test.reduces(
      "any", [](auto v, auto x) { return v.any(v.equal(x.integer(1), x.integer(0))); }, either);
  test.reduces(
      "reduce_maxu", [](auto v, auto x) { return v.reduce_maxu(x.integer(2)); }, Scalar::maxu);
  test.reduces(
      "reduce_minu", [](auto v, auto x) { return v.reduce_minu(x.integer(2)); }, Scalar::minu);
}

// Memory, tables, and what is the same in all lanes.
template <class Test>
void compare_memory(Test& test) {
  test.lanes("set", [](auto v, auto x) { return v.set(Scalar::as_float(x.same())); });
  test.lanes("seti", [](auto v, auto x) { return v.seti(x.same()); });
  test.lanes("ramp", [](auto v, auto x) { return v.ramp(x.i * 0xC13FA9A9u, 0xC13FA9A9u); });
  test.lanes("reduce_sum", [](auto v, auto x) { return v.seti(v.reduce_sum(x.i / 64)); });
  test.lanes("load(float)", [](auto v, auto x) { return v.as_int(v.load(x.floats(0))); });
  test.lanes("load(uint16_t)", [](auto v, auto x) { return v.as_int(v.load(x.narrow())); });
  test.lanes("load(Half)", [](auto v, auto x) { return v.load(x.halves()); });
  test.lanes("load8", [](auto v, auto x) { return v.load8(x.codes()); });
  test.lanes("load8s", [](auto v, auto x) { return v.load8s(x.codes()); });
  test.template writes<float>("store", 1,
                              [](auto v, auto x, float* out) { v.store(out, x.raw(0)); });
  test.template writes<uint16_t>(
      "store16", 1, [](auto v, auto x, uint16_t* out) { v.store16(out, x.below(0, 1 << 16)); });
  test.template writes<uint8_t>(
      "store8", 1, [](auto v, auto x, uint8_t* out) { v.store8(out, x.below(0, 1 << 8)); });
  test.lanes("look_up", [](auto v, auto x) { return v.look_up(kFloats.x, x.below(0, 256)); });
  test.lanes("look_up8(uint32_t)",
             [](auto v, auto x) { return v.look_up8(kInts.x, x.integer(0)); });
  test.lanes("look_up8(float)", [](auto v, auto x) { return v.look_up8(kFloats.x, x.integer(0)); });
  test.lanes("look_up16", [](auto v, auto x) { return v.look_up16(kFloats.x, x.integer(0)); });
}

// Where lane `lane` of vector number `vector` lies in memory; `pairs` says how
// vectors do.
template <class V>
int position(int vector, int lane, bool pairs) {
  const int first = vector / 2 * 2 * V::kLanes;
  return pairs ? first + 2 * lane + vector % 2 : vector * V::kLanes + lane;
}

// Vector number `vector` of the patterns k that begin at operands x.
template <class V>
typename V::I gathered(const Operands<V>& x, int k, int vector, bool pairs) {
  float lanes[V::kLanes];
  for (int lane = 0; lane < V::kLanes; ++lane) {
    std::memcpy(&lanes[lane], x.patterns(k) + position<V>(vector, lane, pairs), sizeof(float));
  }
  return V::as_int(V::load(lanes));
}

// Operations that return two vectors, in order or a pair, here in memory's order.
template <class Vector, bool kPair = true, class Test, class Call>
void compare_pair(Test& test, const char* name, Call call) {
  test.template writes<uint32_t>(name, 2, [=](auto v, auto x, uint32_t* out) {
    using V = decltype(v);
    typename Vector::template Of<V> pair[2];
    call(v, x, pair);
    for (int k = 0; k < 2; ++k) {
      uint32_t lanes[V::kLanes];
      put<V>(lanes, pair[k]);
      for (int lane = 0; lane < V::kLanes; ++lane) out[position<V>(k, lane, kPair)] = lanes[lane];
    }
  });
}
struct Floats {
  template <class V>
  using Of = typename V::F;
};
struct Integers {
  template <class V>
  using Of = typename V::I;
};

// Four vectors of codes, which are pattern 1, or negative where pattern 2 is;
// and of numbers, which are pattern 0, without its sign if not kSigned.  Where
// such a number with a sign is +0, so is the code.
template <bool kSigned, class V>
struct Four {
  typename V::I codes[4];
  typename V::F x[4];

  Four(const Operands<V>& operands, bool pairs) {
    const typename V::I zero = V::seti(0);
    for (int k = 0; k < 4; ++k) {
      typename V::I code = V::andi(gathered(operands, 1, k, pairs), V::seti(kSigned ? 127 : 255));
      const typename V::I other = gathered(operands, 2, k, pairs);
      code = V::choose(V::above(zero, other), other, code);
      typename V::I bits = gathered(operands, 0, k, pairs);
      if (!kSigned) bits = V::andi(bits, V::seti(0x7FFFFFFF));
      codes[k] = kSigned ? V::choose(V::equal(bits, zero), zero, code) : code;
      x[k] = V::as_float(bits);
    }
  }
};

// Operations that write four vectors of codes, in order and, if kPairs, as
// pairs: store(v, four, pairs, codes).
template <bool kSigned, bool kPairs, class Test, class Store>
void compare_four(Test& test, const char* name, Store store, Condition condition = all) {
  const auto both = [=](auto v, auto x, uint16_t* out) {
    constexpr int kCodes = 4 * decltype(v)::kLanes;
    uint8_t in_order[kCodes], as_pairs[kCodes] = {};
    store(v, Four<kSigned, decltype(v)>(x, false), false, in_order);
    if (kPairs) store(v, Four<kSigned, decltype(v)>(x, true), true, as_pairs);
    for (int k = 0; k < kCodes; ++k) {
      out[k] = static_cast<uint16_t>(in_order[k] | as_pairs[k] << 8);
    }
  };
  test.template writes<uint16_t>(name, 4, both, condition);
}

// What some targets do not have: pairs of vectors.
template <class Test>
void compare_pairs(Test& test) {
  compare_pair<Floats>(test, "load_pair",
                       [](auto v, auto x, auto* pair) { v.load_pair(x.narrow(), pair); });
  compare_pair<Integers>(test, "load8_pair",
                         [](auto v, auto x, auto* pair) { v.load8_pair(x.codes(), pair); });
  compare_pair<Integers>(test, "load8_top_pair",
                         [](auto v, auto x, auto* pair) { v.load8_top_pair(x.codes(), pair); });
  test.template writes<uint16_t>("store_pair", 2, [](auto v, auto x, uint16_t* out) {
    v.store_pair(out, gathered(x, 0, 0, true), gathered(x, 0, 1, true));
  });
  test.template writes<uint8_t>("store8_pair", 2, [](auto v, auto x, uint8_t* out) {
    const auto code = [&](int k) { return v.andi(gathered(x, 0, k, true), v.seti(255)); };
    v.store8_pair(out, code(0), code(1));
  });
}

// What CUDA's threads do not have: chunks of four vectors, tails.
template <bool kPairs, class Test>
void compare_chunks_and_tails(Test& test) {
  test.lanes("load_pairs", [](auto v, auto x) { return v.load_pairs(x.patterns(0)); });
  test.lanes("maxu16", [](auto v, auto x) { return v.maxu16(x.integer(0), x.integer(1)); });
  test.lanes("prefetch", [](auto v, auto x) {
    v.prefetch(x.codes());
    return v.seti(0);
  });
  compare_pair<Integers, false>(test, "load8_two",
                                [](auto v, auto x, auto* two) { v.load8_two(x.codes(), two); });
  compare_pair<Integers, false>(test, "load8s_two",
                                [](auto v, auto x, auto* two) { v.load8s_two(x.codes(), two); });
  test.lanes("load6", [](auto v, auto x) {
    const auto lower = v.template load6<false>(x.bytes() + 3 * x.i);
    return v.xori(lower, v.template load6<true>(x.bytes() + 3 * x.i));
  });
  test.template writes<Three>(
      "store6", 1, [](auto v, auto x, Three* out) { v.store6(out->bytes, x.integer(0)); });
  test.lanes("load4", [](auto v, auto x) { return v.load4(x.bytes() + 2 * x.i); });
  test.template writes<Two>("store4", 1,
                            [](auto v, auto x, Two* out) { v.store4(out->bytes, x.integer(0)); });
  compare_four<false, kPairs>(test, "store8x4", [](auto v, auto four, bool pairs, uint8_t* out) {
    const auto& codes = four.codes;
    v.store8x4(out, codes[0], codes[1], codes[2], codes[3], pairs);
  });
  const auto with_signs = [](auto v, auto four, bool pairs, uint8_t* out) {
    const auto& codes = four.codes;
    v.store8x4_signed(out, codes[0], codes[1], codes[2], codes[3], four.x, pairs);
  };
  compare_four<true, kPairs>(test, "store8x4_signed", with_signs);
  const auto unless_zero = [](auto v, auto four, bool pairs, uint8_t* out) {
    const auto& codes = four.codes;
    v.store8x4_unless_zero(out, codes[0], codes[1], codes[2], codes[3], four.x, pairs);
  };
  compare_four<false, kPairs>(test, "store8x4_unless_zero", unless_zero, is_one_magnitude);
  test.reads_tails("load_n(float)", 0,
                   [](auto v, auto x, int n) { return v.as_int(v.load_n(x.floats(0), n)); });
  test.reads_tails("load_n(uint16_t)", 0,
                   [](auto v, auto x, int n) { return v.as_int(v.load_n(x.narrow(), n)); });
  test.reads_tails("load_n(Half)", 0,
                   [](auto v, auto x, int n) { return v.load_n(x.halves(), n); });
  test.reads_tails("load8_n", 255,
                   [](auto v, auto x, int n) { return v.load8_n(x.codes(), n, 255); });
  test.reads_tails("load8s_n", 0, [](auto v, auto x, int n) { return v.load8s_n(x.codes(), n); });
  test.template writes_tails<float>(
      "store_n", [](auto v, auto x, float* out, int n) { v.store_n(out, x.raw(0), n); });
  test.template writes_tails<uint16_t>("store16_n", [](auto v, auto x, uint16_t* out, int n) {
    v.store16_n(out, x.below(0, 1 << 16), n);
  });
  test.template writes_tails<uint8_t>("store8_n", [](auto v, auto x, uint8_t* out, int n) {
    v.store8_n(out, x.below(0, 1 << 8), n);
  });
}

}  // namespace vec_operations
