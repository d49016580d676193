// SPDX-License-Identifier: Apache-2.0
// The corrections of a block of bfloat16 weights on the CPU: those that belong to other weights
// than are in memory are dropped before the block is read, and the new weights are summed up.
//
// Included once per target, after params.h, so in the target's namespace.
#include <cstdint>
#include <cstring>

namespace zero8::ZERO8_TARGET {

// Of parameters without corrections.
template <class P>
class Corrections {
 public:
  Corrections() = default;
  Corrections(const Segment&, const Block&) {}
  // Calls write(), which writes the block's new weights.
  template <class Write>
  ZERO8_INLINE void around(Write&& write) const {
    write();
  }
};

template <>
class Corrections<CorrectedBFloat16> {
 public:
  Corrections() = default;
  Corrections(const Segment& seg, const Block& b)
      : p_(static_cast<const uint16_t*>(seg.param) + b.begin),
        sums_(seg.weight_sums ? seg.weight_sums + b.local : nullptr),
        count_(b.count),
        are_all_corrected_(
            drop_stale(p_, count_, sums_, static_cast<uint8_t*>(seg.correction) + b.begin)) {}
  template <class Write>
  ZERO8_INLINE void around(Write&& write) const {
    uint16_t before[kMaxBlockSize];
    if (sums_ && !are_all_corrected_) std::memcpy(before, p_, count_ * sizeof *p_);
    write();
    if (sums_) leave_sums(p_, count_, are_all_corrected_ ? nullptr : before, sums_);
  }

 private:
  struct Sum {
    uint32_t sum, are_corrected;  // in the lower sign
  };

  // Returns whether all weights can have corrections.
  static bool drop_stale(const uint16_t* p, int count, const WeightSums* sums,
                         uint8_t* correction) {
    const Sum now = sum_of(p, count);
    const bool are_all_corrected = (now.are_corrected & kSign) != 0;
    if (sums && are_of_others(*sums, now.sum)) {
      std::memset(correction, 0, count);
    } else if (!are_all_corrected) {
      for (int i = 0; i < count; ++i) {
        const bool is_corrected = are_corrected(p[i]) & kSign;
        correction[i] = is_corrected ? correction[i] : 0;
      }
    }
    return are_all_corrected;
  }
  // `before` are the weights that were there, and are written over; null if none was 0.  Not
  // inlined: it depends neither on the algorithm nor on the gradients.
  [[gnu::noinline]] static void leave_sums(const uint16_t* p, int count, uint16_t* before,
                                           WeightSums* sums) {
    sums->all = sums->without_zeros = sum_of(p, count).sum;
    if (!before) return;
    for (int i = 0; i < count; ++i) before[i] = before[i] & 0x7FFF ? p[i] : 0;
    sums->without_zeros = sum_of(before, count).sum;
  }
  static Sum sum_of(const uint16_t* weights, int count) {
    uint32_t sum = 0, corrected = ~0u, factor = kGoldenStep;
    for (int i = 0; i < count / 2; ++i) {
      uint32_t two;
      std::memcpy(&two, weights + 2 * i, sizeof two);
      sum += sum_of_two(two, factor);
      corrected &= are_corrected(two);
      factor += kNextFactor;
    }
    corrected &= corrected >> 16;
    if (count % 2) {
      const uint32_t last = weights[count - 1];
      sum += sum_of_two(last, factor);
      corrected &= are_corrected(last);
    }
    return {sum, corrected};
  }

  static constexpr uint32_t kSign = 0x8000;
  const uint16_t* p_ = nullptr;
  WeightSums* sums_ = nullptr;
  int count_ = 0;
  bool are_all_corrected_ = true;  // before the step
};

}  // namespace zero8::ZERO8_TARGET
