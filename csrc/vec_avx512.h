// SPDX-License-Identifier: Apache-2.0
// The vector vocabulary of vec_scalar.h in 16 lanes of AVX-512 (F, BW, VL, DQ).
#include <immintrin.h>

#include <cstdint>

#include "operations.h"

namespace zero8::ZERO8_TARGET {

// As Operations takes them.
struct Types {
  static constexpr int kLanes = 16;
  using F = __m512;
  using I = __m512i;
  using Unsigned = uint32_t __attribute__((vector_size(64)));
  using Signed = int32_t __attribute__((vector_size(64)));
  using Mask = __mmask16;
};

struct Vec : Operations<Types> {
  using Operations::load;
  static Mask first(int n) { return static_cast<Mask>((1u << n) - 1u); }

  static F set(float x) { return _mm512_set1_ps(x); }
  static I ramp(uint32_t start, uint32_t step) {
    const I lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    return addi(seti(start), muli(lane, seti(step)));
  }

  static F load_n(const float* p, int n) { return _mm512_maskz_loadu_ps(first(n), p); }
  static F load(const uint16_t* p) {
    return widen16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  }
  static F load_n(const uint16_t* p, int n) {
    return widen16(_mm256_maskz_loadu_epi16(first(n), p));
  }
  static F widen16(__m256i x) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(x), 16));
  }
  static F load(const Half* p) {
    return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  }
  static F load_n(const Half* p, int n) {
    return _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(first(n), p));
  }
  static void store_n(float* p, F x, int n) { _mm512_mask_storeu_ps(p, first(n), x); }
  static void store16(uint16_t* p, I x) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(x));
  }
  static void store16_n(uint16_t* p, I x, int n) {
    _mm512_mask_cvtepi32_storeu_epi16(p, first(n), x);
  }
  static I load8(const uint8_t* p) {
    return _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  }
  static I load8_n(const uint8_t* p, int n, uint32_t fill) {
    const __m128i filled = _mm_set1_epi8(static_cast<char>(fill));
    return _mm512_cvtepu8_epi32(_mm_mask_loadu_epi8(filled, first(n), p));
  }
  static I load8s(const uint8_t* p) {
    return _mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  }
  static I load8s_n(const uint8_t* p, int n) {
    return _mm512_cvtepi8_epi32(_mm_maskz_loadu_epi8(first(n), p));
  }
  static void store8(uint8_t* p, I x) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtepi32_epi8(x));
  }
  static void store8_n(uint8_t* p, I x, int n) { _mm512_mask_cvtepi32_storeu_epi8(p, first(n), x); }
  // As that of vec_avx2.h, with twelve bytes in each quarter.
  static I load6(const uint8_t* p) {
    const I three = _mm512_setr_epi32(0, 1, 2, 0, 3, 4, 5, 0, 6, 7, 8, 0, 9, 10, 11, 0);
    const I quarters = _mm512_permutexvar_epi32(three, _mm512_maskz_loadu_epi32(0x0FFF, p));
    const __m128i bytes = _mm_setr_epi32(0x01020001, 0x04050304, 0x07080607, 0x0A0B090A);
    const I x = _mm512_shuffle_epi8(quarters, _mm512_broadcast_i32x4(bytes));
    const I even = _mm512_mulhi_epu16(andi(x, seti(0x0FC0FC00)), seti(0x04000040));
    const I odd = _mm512_mullo_epi16(andi(x, seti(0x003F03F0)), seti(0x01000010));
    return ori(even, odd);
  }
  static void store6(uint8_t* p, I x) {
    const I twos = _mm512_maddubs_epi16(andi(x, seti(0x3F3F3F3F)), seti(0x01400140));
    const I units = _mm512_madd_epi16(twos, seti(0x00011000));
    const __m128i bytes = _mm_setr_epi8(2, 1, 0, 6, 5, 4, 10, 9, 8, 14, 13, 12, -1, -1, -1, -1);
    const I quarters = _mm512_shuffle_epi8(units, _mm512_broadcast_i32x4(bytes));
    const I words = _mm512_permutexvar_epi32(
        _mm512_setr_epi32(0, 1, 2, 4, 5, 6, 8, 9, 10, 12, 13, 14, 15, 15, 15, 15), quarters);
    _mm512_mask_storeu_epi32(p, 0x0FFF, words);
  }
  static void store8x4(uint8_t* p, const I* code) { store_packed(p, packed(code)); }
  static void store8x4_signed(uint8_t* p, const I* code, const F* x) {
    // Bytes that saturate, with the signs of floats.
    const I ordered = _mm512_packs_epi16(_mm512_packs_epi32(as_int(x[0]), as_int(x[1])),
                                         _mm512_packs_epi32(as_int(x[2]), as_int(x[3])));
    const I codes = packed(code);
    const __mmask64 negative = _mm512_movepi8_mask(ordered);
    store_packed(p, _mm512_mask_sub_epi8(codes, negative, seti(0), codes));
  }
  // Packing works on each quarter by itself: bytes a0 b0 c0 d0 a1 ... d3, in units of four.
  static I packed(const I* code) {
    return _mm512_packus_epi16(_mm512_packus_epi32(code[0], code[1]),
                               _mm512_packus_epi32(code[2], code[3]));
  }
  // Transposes lanes in four rows of four.
  static void store_packed(uint8_t* p, I bytes) {
    const I order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    _mm512_storeu_si512(p, _mm512_permutexvar_epi32(order, bytes));
  }
  ZERO8_INLINE static void prefetch(const void* p) {
    _mm_prefetch(static_cast<const char*>(p), _MM_HINT_T0);
  }

  static F mul(F a, F b) { return _mm512_mul_ps(a, b); }
  static F fma(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }
  static F fma_far(F a, F b, F c) { return fma(a, b, c); }
  static F fms(F a, F b, F c) { return _mm512_fmsub_ps(a, b, c); }
  static F sqrt(F a) { return _mm512_sqrt_ps(a); }
  static F max(F a, F b) { return _mm512_max_ps(a, b); }
  static F min(F a, F b) { return _mm512_min_ps(a, b); }

  static F to_float(I x) { return _mm512_cvtepi32_ps(x); }
  static I truncate(F x) { return _mm512_cvttps_epi32(x); }

  static I add_low16(I a, I b) { return _mm512_add_epi16(a, b); }
  static I shlv(I a, I bits) { return _mm512_sllv_epi32(a, bits); }
  static I shrv(I a, I bits) { return _mm512_srlv_epi32(a, bits); }
  // The larger magnitude, without its sign.
  static I max_magnitude(I a, F x) { return as_int(_mm512_range_ps(as_float(a), x, 0xB)); }
  static I maxu16(I a, I b) { return _mm512_max_epu16(a, b); }
  static Mask equal(I a, I b) { return _mm512_cmpeq_epi32_mask(a, b); }
  static Mask above(I a, I b) { return _mm512_cmpgt_epi32_mask(a, b); }
  static Mask not_below(F a, F b) { return _mm512_cmp_ps_mask(a, b, _CMP_GE_OQ); }
  static I choose(Mask m, I yes, I no) { return _mm512_mask_blend_epi32(m, no, yes); }
  static I incremented(I a, Mask m) { return _mm512_mask_add_epi32(a, m, a, seti(1)); }
  static int count(Mask m) { return __builtin_popcount(m); }
  static bool any(Mask m) { return m != 0; }

  static F look_up(const float* table, I index) { return _mm512_i32gather_ps(index, table, 4); }
  // The table twice, as four bits of the index count here.
  static I look_up8(const uint32_t* table, I index) {
    const __m256i entries = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(table));
    return _mm512_permutexvar_epi32(index, _mm512_broadcast_i64x4(entries));
  }
  static F look_up8(const float* table, I index) {
    return as_float(look_up8(reinterpret_cast<const uint32_t*>(table), index));
  }
  static F look_up16(const float* table, I index) {
    return _mm512_permutexvar_ps(index, _mm512_loadu_ps(table));
  }

  static uint32_t reduce_maxu(I a) { return _mm512_reduce_max_epu32(a); }
  static uint32_t reduce_minu(I a) { return _mm512_reduce_min_epu32(a); }
};
using QuickVec = Exact<Vec>;

}  // namespace zero8::ZERO8_TARGET
