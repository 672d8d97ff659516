// AVX-512 F, BW, DQ, VL, BF16 and VNNI: sixteen lanes, and products of bf16 pairs and of bytes.
#pragma once

#include <immintrin.h>

#include <cmath>
#include <cstring>

#include "../kernels.h"

namespace leanroll {
namespace {

typedef __m512 F;
constexpr int W = 16;
constexpr int kHeadBlock = 4, kTileBlock = 2;
// Two streams of weights, which is as many as memory can be kept busy with and the processor can follow (measured on Zen 4).
constexpr int kWeightRows = 2, kInputRows = 8;
#define LEANROLL_DOT_BF16 1
#define LEANROLL_DOT_INT4 1
#define LEANROLL_TRANSPOSE 1

inline F zero() { return _mm512_setzero_ps(); }
inline F set1(float x) { return _mm512_set1_ps(x); }
inline F load(const float* p) { return _mm512_loadu_ps(p); }
inline void store(float* p, F v) { _mm512_storeu_ps(p, v); }
inline __mmask16 first_lanes(int n) { return static_cast<__mmask16>(n >= 16 ? 0xffffu : (1u << n) - 1u); }
inline F load_n(const float* p, int n) { return _mm512_maskz_loadu_ps(first_lanes(n), p); }
inline F fma(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }
inline F vmax(F a, F b) { return _mm512_max_ps(a, b); }
inline F select_gt(F a, F b, F yes, F no) { return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(a, b, _CMP_GT_OQ), no, yes); }
inline float hsum(F v) { return _mm512_reduce_add_ps(v); }
inline float hmax(F v) { return _mm512_reduce_max_ps(v); }
// Lane i = sum of r[i]: a transposition that adds on the way.
inline F reduce_rows(const F* r) {
  F a[8], b[4], c[2];
  for (int i = 0; i < 8; ++i) {
    const F x = r[2 * i], y = r[2 * i + 1];
    a[i] = _mm512_add_ps(_mm512_unpacklo_ps(x, y), _mm512_unpackhi_ps(x, y));
  }
  for (int i = 0; i < 4; ++i) {
    const __m512d x = _mm512_castps_pd(a[2 * i]), y = _mm512_castps_pd(a[2 * i + 1]);
    b[i] = _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(x, y)), _mm512_castpd_ps(_mm512_unpackhi_pd(x, y)));
  }
  for (int i = 0; i < 2; ++i)
    c[i] = _mm512_add_ps(_mm512_shuffle_f32x4(b[2 * i], b[2 * i + 1], 0x88),
                         _mm512_shuffle_f32x4(b[2 * i], b[2 * i + 1], 0xdd));
  return _mm512_add_ps(_mm512_shuffle_f32x4(c[0], c[1], 0x88), _mm512_shuffle_f32x4(c[0], c[1], 0xdd));
}
// Lane i = the i-th four of the 64 values in v, brought together by a commutative operation.
template <class Join>
inline F join_quads(const F* v, Join&& join) {
  F a[2];
  for (int i = 0; i < 2; ++i) a[i] = join(_mm512_unpacklo_ps(v[2 * i], v[2 * i + 1]), _mm512_unpackhi_ps(v[2 * i], v[2 * i + 1]));
  const __m512d x = _mm512_castps_pd(a[0]), y = _mm512_castps_pd(a[1]);
  const F joined = join(_mm512_castpd_ps(_mm512_unpacklo_pd(x, y)), _mm512_castpd_ps(_mm512_unpackhi_pd(x, y)));
  // The four of register i, group g, are in lane 4g + i.
  return _mm512_permutexvar_ps(_mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15), joined);
}
inline F quad_sums(const F* v) {
  return join_quads(v, [](F x, F y) { return _mm512_add_ps(x, y); });
}
inline F quad_maxima(const F* v) { return join_quads(v, vmax); }
inline F load_wide(const float* p) { return load(p); }
inline F load_wide(const bf16* p) {
  const __m256i x = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(x), 16));
}
// tile[j][i] = rows[i][j], 16 x 16.
template <class T>
inline void transpose_tile(const T* rows, int64_t stride, float* tile) {
  F a[16], b[16];
  for (int i = 0; i < 16; ++i) a[i] = load_wide(rows + i * stride);
  for (int i = 0; i < 16; i += 2) b[i] = _mm512_unpacklo_ps(a[i], a[i + 1]), b[i + 1] = _mm512_unpackhi_ps(a[i], a[i + 1]);
  for (int i = 0; i < 16; i += 4)
    for (int j = 0; j < 2; ++j) {
      const __m512d x = _mm512_castps_pd(b[i + j]), y = _mm512_castps_pd(b[i + j + 2]);
      a[i + 2 * j] = _mm512_castpd_ps(_mm512_unpacklo_pd(x, y)), a[i + 2 * j + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(x, y));
    }
  // a[4g + c] holds, in its lane of 128 bits number q, column 4q + c of rows 4g .. 4g + 3.
  for (int c = 0; c < 4; ++c) {
    const F low01 = _mm512_shuffle_f32x4(a[c], a[4 + c], 0x44), high01 = _mm512_shuffle_f32x4(a[c], a[4 + c], 0xee);
    const F low23 = _mm512_shuffle_f32x4(a[8 + c], a[12 + c], 0x44), high23 = _mm512_shuffle_f32x4(a[8 + c], a[12 + c], 0xee);
    store(tile + 16 * c, _mm512_shuffle_f32x4(low01, low23, 0x88));
    store(tile + 16 * (4 + c), _mm512_shuffle_f32x4(low01, low23, 0xdd));
    store(tile + 16 * (8 + c), _mm512_shuffle_f32x4(high01, high23, 0x88));
    store(tile + 16 * (12 + c), _mm512_shuffle_f32x4(high01, high23, 0xdd));
  }
}
inline F scale_pow2(F x, F k) { return _mm512_scalef_ps(x, k); }
inline F keep_bits(F v, unsigned bits, float other) {
  return _mm512_mask_blend_ps(static_cast<__mmask16>(bits), set1(other), v);
}
inline __mmask32 first_halves(int n) { return n >= 32 ? 0xffffffffu : (1u << n) - 1u; }
inline void split(__m512i x, F& a, F& b) {
  a = _mm512_castsi512_ps(_mm512_slli_epi32(x, 16));
  b = _mm512_castsi512_ps(_mm512_and_si512(x, _mm512_set1_epi32(static_cast<int>(0xffff0000))));
}
inline void load2(const float* p, F& a, F& b) { a = load(p), b = load(p + W); }
inline void load2(const bf16* p, F& a, F& b) { split(_mm512_loadu_si512(p), a, b); }
inline void load2_n(const float* p, int n, F& a, F& b) {
  a = load_n(p, n < W ? n : W), b = load_n(p + W, n > W ? n - W : 0);
}
inline void load2_n(const bf16* p, int n, F& a, F& b) { split(_mm512_maskz_loadu_epi16(first_halves(n), p), a, b); }
inline void natural(const bf16*, F& a, F& b) {
  const __m512i lo = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
  const __m512i hi = _mm512_setr_epi32(8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
  const F even = a, odd = b;
  a = _mm512_permutex2var_ps(even, lo, odd), b = _mm512_permutex2var_ps(even, hi, odd);
}
inline void natural(const float*, F&, F&) {}

// Pairs of bf16: one tile is one register.
typedef __m512bh P;
inline P load_pairs(const bf16* p) { return (P)_mm512_loadu_si512(p); }
inline P load_pairs_n(const bf16* p, int n) { return (P)_mm512_maskz_loadu_epi16(first_halves(n), p); }
inline P repeat_pairs(const bf16* p) {  // four times the same eight
  return (P)_mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
// 32 bytes, each in 16 bits; a nibble is looked up as bf16 in a table of 32, whose halves are equal: the index has a fifth bit.
typedef __m512i I;
inline I load_codes(const uint8_t* p) { return _mm512_cvtepu8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))); }
inline P low_nibbles(I codes, I values) { return (P)_mm512_permutexvar_epi16(codes, values); }
inline P high_nibbles(I codes, I values) { return (P)_mm512_permutexvar_epi16(_mm512_srli_epi16(codes, 4), values); }
// Sixteen scales, four from each place.
inline F gather_scales(const uint8_t* const* at) {
  const auto quad = [&](int i) { return _mm_loadl_epi64(reinterpret_cast<const __m128i*>(at[i])); };
  const __m256i x = _mm256_set_m128i(_mm_unpacklo_epi64(quad(2), quad(3)), _mm_unpacklo_epi64(quad(0), quad(1)));
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(x), 16));
}
inline I nibble_values(bool is_signed) {
  alignas(64) uint16_t values[32];
  for (int i = 0; i < 32; ++i) {
    const float x = static_cast<float>(is_signed ? ((i & 15) ^ 8) - 8 : i & 15);
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    values[i] = static_cast<uint16_t>(bits >> 16);
  }
  return _mm512_load_si512(values);
}
// Bytes: kByteTiles tiles of one quad of int4 rows side by side, or what they are multiplied with.
typedef __m512i C;
constexpr int kByteTiles = 2;
inline C no_bytes() { return _mm512_setzero_si512(); }
inline C eights() { return _mm512_set1_epi8(8); }
inline C load_bytes(const void* p) { return _mm512_loadu_si512(p); }
inline C load_last_tile(const void* p) { return _mm512_zextsi256_si512(_mm256_loadu_si256(static_cast<const __m256i*>(p))); }
// Two's complement nibbles, 8 higher: from 0 to 15.
inline C raised(C x) { return _mm512_xor_si512(x, _mm512_set1_epi8(static_cast<char>(0x88))); }
inline C low_codes(C x) { return _mm512_and_si512(x, _mm512_set1_epi8(15)); }
inline C high_codes(C x) { return _mm512_and_si512(_mm512_srli_epi16(x, 4), _mm512_set1_epi8(15)); }
inline C dot_codes(C acc, C codes, C q) { return _mm512_dpbusd_epi32(acc, codes, q); }
inline C minus(C a, C b) { return _mm512_sub_epi32(a, b); }
// The rows of four quads, in order.
inline F row_sums(const C* v) {
  C pairs[2];
  for (int i = 0; i < 2; ++i)
    pairs[i] = _mm512_add_epi32(_mm512_shuffle_i32x4(v[2 * i], v[2 * i + 1], 0x44), _mm512_shuffle_i32x4(v[2 * i], v[2 * i + 1], 0xee));
  const F x = _mm512_castsi512_ps(pairs[0]), y = _mm512_castsi512_ps(pairs[1]);
  const C sums = _mm512_add_epi32(_mm512_castps_si512(_mm512_shuffle_ps(x, y, 0x88)), _mm512_castps_si512(_mm512_shuffle_ps(x, y, 0xdd)));
  // Each 128 bits hold two rows of the first pair of quads and two of the second.
  return _mm512_cvtepi32_ps(_mm512_permutexvar_epi32(_mm512_setr_epi32(0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15), sums));
}
inline F dot_pairs(F acc, P x, P y) { return _mm512_dpbf16_ps(acc, x, y); }

}  // namespace
}  // namespace leanroll
