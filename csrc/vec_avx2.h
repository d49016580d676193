// SPDX-License-Identifier: Apache-2.0
// The vector vocabulary of vec_scalar.h in 8 lanes of AVX2, FMA and F16C.
#include <immintrin.h>

#include <cstdint>

#include "operations.h"
#include "tails.h"

namespace zero8::ZERO8_TARGET {

// As Operations takes them.
struct Types {
  static constexpr int kLanes = 8;
  using F = __m256;
  using I = __m256i;
  using Unsigned = uint32_t __attribute__((vector_size(32)));
  using Signed = int32_t __attribute__((vector_size(32)));
  using Mask = Signed;  // all bits of a lane, or none
};

struct Whole : Operations<Types> {
  using Operations::load;
  static F set(float x) { return _mm256_set1_ps(x); }
  static I ramp(uint32_t start, uint32_t step) {
    return addi(seti(start), muli(_mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7), seti(step)));
  }

  static F load(const uint16_t* p) {
    const __m128i x = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    return as_float(shl<16>(_mm256_cvtepu16_epi32(x)));
  }
  static F load(const Half* p) {
    return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  }
  static void store16(uint16_t* p, I x) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), narrow16(x));
  }
  // Lanes must be below 2^16: the pack saturates.
  static __m128i narrow16(I x) {
    return _mm_packus_epi32(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1));
  }
  static I load8(const uint8_t* p) {
    return _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
  }
  static I load8s(const uint8_t* p) {
    return _mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
  }
  static void store8(uint8_t* p, I x) {
    const __m128i words = narrow16(x);
    _mm_storel_epi64(reinterpret_cast<__m128i*>(p), _mm_packus_epi16(words, words));
  }
  // As base64 encodes: the second of the three bytes twice in each lane, so that two codes begin in
  // each half of it, which products shift to their places.
  static I load6(const uint8_t* p) {
    const __m128i low = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    const __m128i high = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p + 8));
    // Twelve bytes in each half, the last ones of the second.
    const I halves = _mm256_inserti128_si256(_mm256_castsi128_si256(low), high, 1);
    const I x = _mm256_shuffle_epi8(
        halves, _mm256_setr_epi32(0x01020001, 0x04050304, 0x07080607, 0x0A0B090A,  //
                                  0x05060405, 0x08090708, 0x0B0C0A0B, 0x0E0F0D0E));
    const I even = _mm256_mulhi_epu16(andi(x, seti(0x0FC0FC00)), seti(0x04000040));
    const I odd = _mm256_mullo_epi16(andi(x, seti(0x003F03F0)), seti(0x01000010));
    return ori(even, odd);
  }
  static void store6(uint8_t* p, I x) {
    const I twos = _mm256_maddubs_epi16(andi(x, seti(0x3F3F3F3F)), seti(0x01400140));
    const I units = _mm256_madd_epi16(twos, seti(0x00011000));
    const __m128i bytes = _mm_setr_epi8(2, 1, 0, 6, 5, 4, 10, 9, 8, 14, 13, 12, -1, -1, -1, -1);
    const I halves = _mm256_shuffle_epi8(units, _mm256_broadcastsi128_si256(bytes));
    const I words = _mm256_permutevar8x32_epi32(halves, _mm256_setr_epi32(0, 1, 2, 4, 5, 6, 7, 7));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_castsi256_si128(words));
    _mm_storel_epi64(reinterpret_cast<__m128i*>(p + 16), _mm256_extracti128_si256(words, 1));
  }
  static void store8x4(uint8_t* p, const I* code) { store_packed(p, packed(code)); }
  static void store8x4_signed(uint8_t* p, const I* code, const F* x) {
    // Bytes that saturate: of the signs of floats, and 0 only where these are.
    const I ordered = _mm256_packs_epi16(_mm256_packs_epi32(as_int(x[0]), as_int(x[1])),
                                         _mm256_packs_epi32(as_int(x[2]), as_int(x[3])));
    store_packed(p, _mm256_sign_epi8(packed(code), ordered));
  }
  // Packing works on each half by itself: bytes a0 b0 c0 d0 a1 b1 c1 d1, in units of four.
  static I packed(const I* code) {
    return _mm256_packus_epi16(_mm256_packus_epi32(code[0], code[1]),
                               _mm256_packus_epi32(code[2], code[3]));
  }
  static void store_packed(uint8_t* p, I bytes) {
    bytes = _mm256_permutevar8x32_epi32(bytes, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), bytes);
  }
  ZERO8_INLINE static void prefetch(const void* p) {
    _mm_prefetch(static_cast<const char*>(p), _MM_HINT_T0);
  }

  static F mul(F a, F b) { return _mm256_mul_ps(a, b); }
  static F fma(F a, F b, F c) { return _mm256_fmadd_ps(a, b, c); }
  static F fma_far(F a, F b, F c) { return fma(a, b, c); }
  static F fms(F a, F b, F c) { return _mm256_fmsub_ps(a, b, c); }
  static F sqrt(F a) { return _mm256_sqrt_ps(a); }
  static F max(F a, F b) { return _mm256_max_ps(a, b); }
  static F min(F a, F b) { return _mm256_min_ps(a, b); }

  static F to_float(I x) { return _mm256_cvtepi32_ps(x); }
  static I truncate(F x) { return _mm256_cvttps_epi32(x); }

  static I add_low16(I a, I b) { return _mm256_add_epi16(a, b); }
  static I shlv(I a, I bits) { return _mm256_sllv_epi32(a, bits); }
  static I shrv(I a, I bits) { return _mm256_srlv_epi32(a, bits); }
  // Blends look at the top bit of a lane.
  static F negated(F x, I c) { return _mm256_blendv_ps(x, -x, as_float(c)); }
  static I maxu16(I a, I b) { return _mm256_max_epu16(a, b); }
  static int count(Mask m) { return __builtin_popcount(_mm256_movemask_ps(F(m))); }
  static bool any(Mask m) { return _mm256_movemask_ps(F(m)) != 0; }
  static F look_up(const float* table, I index) { return _mm256_i32gather_ps(table, index, 4); }
  static I look_up8(const uint32_t* table, I index) {
    const I* const entries = reinterpret_cast<const I*>(table);
    return _mm256_permutevar8x32_epi32(_mm256_loadu_si256(entries), index);
  }
  static F look_up8(const float* table, I index) {
    return _mm256_permutevar8x32_ps(_mm256_loadu_ps(table), index);
  }
  static F look_up16(const float* table, I index) {
    // Blends look at the top bit of a lane.
    const F is_upper = as_float(shl<28>(index));
    return _mm256_blendv_ps(look_up8(table, index), look_up8(table + 8, index), is_upper);
  }

  static uint32_t reduce_maxu(I a) {
    __m128i x = _mm_max_epu32(_mm256_castsi256_si128(a), _mm256_extracti128_si256(a, 1));
    x = _mm_max_epu32(x, _mm_shuffle_epi32(x, 0x4E));
    x = _mm_max_epu32(x, _mm_shuffle_epi32(x, 0xB1));
    return static_cast<uint32_t>(_mm_cvtsi128_si32(x));
  }
  static uint32_t reduce_minu(I a) { return ~reduce_maxu(xori(a, seti(~0u))); }
};

struct Vec : WithTails<Whole> {
  static I first(int n) { return I(above(seti(static_cast<uint32_t>(n)), ramp(0, 1))); }
  using WithTails::load_n;
  static F load_n(const float* p, int n) { return _mm256_maskload_ps(p, first(n)); }
  static void store_n(float* p, F x, int n) { _mm256_maskstore_ps(p, first(n), x); }
};
using QuickVec = Exact<Vec>;

}  // namespace zero8::ZERO8_TARGET
