// SPDX-License-Identifier: Apache-2.0
// The corrections of a block of bfloat16 weights on the CPU: those that belong to other weights
// than are in memory are dropped before the block is read, and the new weights are summed up.
//
// Included once per target, after params.h, so in the target's namespace.
#include <cstdint>
#include <cstring>

#include "weight_sums.h"

namespace zero8 {
namespace ZERO8_TARGET {

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
        count_(b.count) {
    drop_stale(static_cast<uint8_t*>(seg.correction) + b.begin);
  }
  template <class Write>
  ZERO8_INLINE void around(Write&& write) const {
    uint16_t before[kMaxBlockSize];
    if (sums_ && !are_all_corrected_) std::memcpy(before, p_, count_ * sizeof *p_);
    write();
    if (!sums_) return;
    sums_->all = sums_->without_zeros = sum_of(p_).sum;
    if (are_all_corrected_) return;
    for (int i = 0; i < count_; ++i) {
      const uint16_t now = p_[i];
      before[i] = before[i] & 0x7FFF ? now : 0;
    }
    sums_->without_zeros = sum_of(before).sum;
  }

 private:
  struct Sum {
    uint32_t sum, are_corrected;  // in the lower sign
  };

  void drop_stale(uint8_t* correction) {
    const Sum now = sum_of(p_);
    are_all_corrected_ = (now.are_corrected & kSign) != 0;
    if (sums_ && are_of_others(*sums_, now.sum)) {
      std::memset(correction, 0, count_);
    } else if (!are_all_corrected_) {
      // Bytes could be those of the members, so the compiler needs others to vectorize the loop.
      const uint16_t* const p = p_;
      const int count = count_;
      for (int i = 0; i < count; ++i) {
        const bool is_corrected = are_corrected(p[i]) & kSign;
        correction[i] = is_corrected ? correction[i] : 0;
      }
    }
  }
  // Of as many weights as the block has.
  Sum sum_of(const uint16_t* weights) const {
    uint32_t sum = 0, corrected = ~0u, factor = kGoldenStep;
    for (int i = 0; i < count_ / 2; ++i) {
      uint32_t two;
      std::memcpy(&two, weights + 2 * i, sizeof two);
      sum += sum_of_two(two, factor);
      corrected &= are_corrected(two);
      factor += kNextFactor;
    }
    corrected &= corrected >> 16;
    if (count_ % 2) {
      const uint32_t last = weights[count_ - 1];
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

}  // namespace ZERO8_TARGET
}  // namespace zero8
