// SPDX-License-Identifier: Apache-2.0
// The vector vocabulary of vec_scalar.h in 4 lanes of NEON, which every aarch64 processor has.
#include <arm_neon.h>

#include <cstdint>

#include "operations.h"
#include "tails.h"

namespace zero8::ZERO8_TARGET {

// As Operations takes them.
struct Types {
  static constexpr int kLanes = 4;
  using F = float32x4_t;
  using I = uint32x4_t;
  using Unsigned = uint32_t __attribute__((vector_size(16)));
  using Signed = int32_t __attribute__((vector_size(16)));
  using Mask = Signed;  // all bits of a lane, or none
};

struct Whole : Operations<Types> {
  using Operations::load;
  static F set(float x) { return vdupq_n_f32(x); }
  static I ramp(uint32_t start, uint32_t step) {
    const uint32_t lanes[kLanes] = {0, 1, 2, 3};
    return vmlaq_n_u32(seti(start), vld1q_u32(lanes), step);
  }

  static F load(const uint16_t* p) { return as_float(vshll_n_u16(vld1_u16(p), 16)); }
  static F load(const Half* p) {
    return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(reinterpret_cast<const uint16_t*>(p))));
  }
  static void store16(uint16_t* p, I x) { vst1_u16(p, vmovn_u32(x)); }
  static I load8(const uint8_t* p) { return vmovl_u16(vget_low_u16(vmovl_u8(load_four(p)))); }
  static I load8s(const uint8_t* p) {
    const int16x8_t halves = vmovl_s8(vreinterpret_s8_u8(load_four(p)));
    return vreinterpretq_u32_s32(vmovl_s16(vget_low_s16(halves)));
  }
  // Four bytes, and four zeros.
  static uint8x8_t load_four(const uint8_t* p) {
    uint32_t four;
    __builtin_memcpy(&four, p, sizeof four);
    return vcreate_u8(four);
  }
  static void store8(uint8_t* p, I x) {
    const uint16x4_t halves = vmovn_u32(x);
    const uint8x8_t bytes = vmovn_u16(vcombine_u16(halves, halves));
    const uint32_t four = vget_lane_u32(vreinterpret_u32_u8(bytes), 0);
    __builtin_memcpy(p, &four, sizeof four);
  }
  // The bytes of a unit in a lane, the first one highest, and back.
  static I load6(const uint8_t* p) {
    const uint8x16_t twelve = vcombine_u8(vld1_u8(p), load_four(p + 8));
    const uint8_t places[16] = {2, 1, 0, 255, 5, 4, 3, 255, 8, 7, 6, 255, 11, 10, 9, 255};
    const I unit = vreinterpretq_u32_u8(vqtbl1q_u8(twelve, vld1q_u8(places)));
    const I even = ori(andi(shr<18>(unit), seti(0x3F)), andi(shl<10>(unit), seti(0x3F << 16)));
    const I odd = ori(andi(shr<4>(unit), seti(0x3F << 8)), shl<24>(andi(unit, seti(0x3F))));
    return ori(even, odd);
  }
  static void store6(uint8_t* p, I x) {
    const I first = ori(shl<18>(andi(x, seti(63))), shl<4>(andi(x, seti(63 << 8))));
    const I last = ori(shr<10>(andi(x, seti(63 << 16))), shr<24>(andi(x, seti(63u << 24))));
    const uint8_t places[16] = {2, 1, 0, 6, 5, 4, 10, 9, 8, 14, 13, 12, 255, 255, 255, 255};
    const uint8x16_t twelve = vqtbl1q_u8(vreinterpretq_u8_u32(ori(first, last)), vld1q_u8(places));
    vst1_u8(p, vget_low_u8(twelve));
    const uint32_t last_four = vgetq_lane_u32(vreinterpretq_u32_u8(twelve), 2);
    __builtin_memcpy(p + 8, &last_four, sizeof last_four);
  }
  static void store8x4(uint8_t* p, const I* code) { vst1q_u8(p, clamped8(code)); }
  static void store8x4_signed(uint8_t* p, const I* code, const F* x) {
    const uint8x16_t top = vuzp2q_u8(vreinterpretq_u8_u16(upper16(x[0], x[1])),
                                     vreinterpretq_u8_u16(upper16(x[2], x[3])));
    const uint8x16_t negative = vreinterpretq_u8_s8(vshrq_n_s8(vreinterpretq_s8_u8(top), 7));
    vst1q_u8(p, vsubq_u8(veorq_u8(clamped8(code), negative), negative));
  }
  // Narrowed with saturation: what is negative becomes 0.
  static uint8x16_t clamped8(const I* code) {
    return vuzp1q_u8(vreinterpretq_u8_u16(clamped16(code[0], code[1])),
                     vreinterpretq_u8_u16(clamped16(code[2], code[3])));
  }
  static uint16x8_t clamped16(I a, I b) {
    const uint16x4_t first = vqmovun_s32(vreinterpretq_s32_u32(a));
    return vqmovun_high_s32(first, vreinterpretq_s32_u32(b));
  }
  static uint16x8_t upper16(F a, F b) {
    return vuzp2q_u16(vreinterpretq_u16_f32(a), vreinterpretq_u16_f32(b));
  }
  ZERO8_INLINE static void prefetch(const void* p) { __builtin_prefetch(p); }

  static F mul(F a, F b) {
    return settled(mul_far(a, b), [=] { return mul_far(mul_far(a, set(0x1p64f)), b); });
  }
  static F fma(F a, F b, F c) {
    const F larger = set(0x1p64f);
    return settled(fma_far(a, b, c),
                   [=] { return fma_far(mul_far(a, larger), b, mul_far(c, larger)); });
  }
  static F fma_far(F a, F b, F c) { return vfmaq_f32(c, a, b); }
  static F fms(F a, F b, F c) { return fma(a, b, vnegq_f32(c)); }
  static F sqrt(F a) { return vsqrtq_f32(a); }
  static F max(F a, F b) { return vmaxq_f32(a, b); }
  static F min(F a, F b) { return vminq_f32(a, b); }

  static F to_float(I x) { return vcvtq_f32_s32(vreinterpretq_s32_u32(x)); }
  static I truncate(F x) { return vreinterpretq_u32_s32(vcvtq_s32_f32(x)); }

  static I add_low16(I a, I b) {
    return vreinterpretq_u32_u16(vaddq_u16(vreinterpretq_u16_u32(a), vreinterpretq_u16_u32(b)));
  }
  static I shlv(I a, I bits) { return a << bits; }
  static I shrv(I a, I bits) { return a >> bits; }
  static I maxu16(I a, I b) {
    return vreinterpretq_u32_u16(vmaxq_u16(vreinterpretq_u16_u32(a), vreinterpretq_u16_u32(b)));
  }
  static int count(Mask m) { return static_cast<int>(vaddvq_u32(shr<31>(I(m)))); }
  static bool any(Mask m) { return vmaxvq_u32(I(m)) != 0; }

  static F look_up(const float* table, I index) {
    const float found[kLanes] = {table[vgetq_lane_u32(index, 0)], table[vgetq_lane_u32(index, 1)],
                                 table[vgetq_lane_u32(index, 2)], table[vgetq_lane_u32(index, 3)]};
    return load(found);
  }
  // The places of the bytes of number `index` of a table.
  static uint8x16_t bytes_of(I index) {
    return vreinterpretq_u8_u32(vmlaq_u32(seti(0x03020100), index, seti(0x04040404)));
  }
  static I look_up8(const uint32_t* table, I index) {
    const uint8x16x2_t entries = {
        {vreinterpretq_u8_u32(vld1q_u32(table)), vreinterpretq_u8_u32(vld1q_u32(table + kLanes))}};
    return vreinterpretq_u32_u8(vqtbl2q_u8(entries, bytes_of(andi(index, seti(7)))));
  }
  static F look_up8(const float* table, I index) {
    return as_float(look_up8(reinterpret_cast<const uint32_t*>(table), index));
  }
  static F look_up16(const float* table, I index) {
    const uint8_t* const bytes = reinterpret_cast<const uint8_t*>(table);
    return vreinterpretq_f32_u8(vqtbl4q_u8(vld1q_u8_x4(bytes), bytes_of(index)));
  }

  static uint32_t reduce_maxu(I a) { return vmaxvq_u32(a); }
  static uint32_t reduce_minu(I a) { return vminvq_u32(a); }

 private:
  // As in vec_scalar.h, where it is explained.
  template <class Enlarged>
  static F settled(F r, Enlarged enlarged) {
    const Mask is_zero = Mask(r == 0.0f);
    if (!any(is_zero)) return r;
    const Mask is_next = equal(magnitude_bits(enlarged()), seti(0x20800000));
    return as_float(ori(as_int(r), andi(I(is_zero & is_next), seti(0x00800000))));
  }
};

using Vec = WithTails<Whole>;

// The same without a look at every result: the processor remembers whether it has flushed any.
struct QuickVec : Vec {
  static constexpr bool kIsExact = false;

  static F mul(F a, F b) { return mul_far(a, b); }
  static F fma(F a, F b, F c) { return fma_far(a, b, c); }
  static F fms(F a, F b, F c) { return fma_far(a, b, vnegq_f32(c)); }

  // FPSR.UFC; exact zeros do not set it.  Results count from when they are stored, be it in memory
  // that `made` leads to.
  static bool saw_tiny(const float* made) {
    uint64_t status;
    asm volatile("mrs %0, fpsr" : "=r"(status) : "r"(made) : "memory");
    return status & kUnderflow;
  }
  static void forget_tiny() {
    uint64_t status;
    asm volatile("mrs %0, fpsr" : "=r"(status) : : "memory");
    asm volatile("msr fpsr, %0" : : "r"(status & ~kUnderflow) : "memory");
  }

 private:
  static constexpr uint64_t kUnderflow = 1u << 3;
};

}  // namespace zero8::ZERO8_TARGET
