// AVX2 and FMA: eight lanes.
#pragma once

#include <immintrin.h>

#include <cmath>
#include <cstring>

#include "../kernels.h"

namespace leanroll {
namespace {

typedef __m256 F;
constexpr int W = 8;
constexpr int kHeadBlock = 4, kTileBlock = 1;
constexpr int kWeightRows = 2, kInputRows = 4;
#define LEANROLL_DOT_BF16 0
#define LEANROLL_DOT_INT4 1
#define LEANROLL_TRANSPOSE 0

inline F zero() { return _mm256_setzero_ps(); }
inline F set1(float x) { return _mm256_set1_ps(x); }
inline F load(const float* p) { return _mm256_loadu_ps(p); }
inline void store(float* p, F v) { _mm256_storeu_ps(p, v); }
inline __m256i lane_index() { return _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7); }
inline F load_n(const float* p, int n) {
  return _mm256_maskload_ps(p, _mm256_cmpgt_epi32(_mm256_set1_epi32(n), lane_index()));
}
inline F fma(F a, F b, F c) { return _mm256_fmadd_ps(a, b, c); }
inline F vmax(F a, F b) { return _mm256_max_ps(a, b); }
inline F select_gt(F a, F b, F yes, F no) { return _mm256_blendv_ps(no, yes, _mm256_cmp_ps(a, b, _CMP_GT_OQ)); }
inline float hsum(F v) {
  __m128 s = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
  s = _mm_add_ps(s, _mm_movehl_ps(s, s));
  return _mm_cvtss_f32(_mm_add_ss(s, _mm_movehdup_ps(s)));
}
inline float hmax(F v) {
  __m128 s = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
  s = _mm_max_ps(s, _mm_movehl_ps(s, s));
  return _mm_cvtss_f32(_mm_max_ss(s, _mm_movehdup_ps(s)));
}
inline F reduce_rows(const F* r) {
  const F a = _mm256_hadd_ps(_mm256_hadd_ps(r[0], r[1]), _mm256_hadd_ps(r[2], r[3]));
  const F b = _mm256_hadd_ps(_mm256_hadd_ps(r[4], r[5]), _mm256_hadd_ps(r[6], r[7]));
  return _mm256_add_ps(_mm256_permute2f128_ps(a, b, 0x20), _mm256_permute2f128_ps(a, b, 0x31));
}
// Lane i of sums = sum of the i-th four of the 32 values in v.
inline F quad_sums(const F* v) {
  const F sums = _mm256_hadd_ps(_mm256_hadd_ps(v[0], v[1]), _mm256_hadd_ps(v[2], v[3]));
  return _mm256_permutevar8x32_ps(sums, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
}
inline F scale_pow2(F x, F k) {
  const __m256i e = _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(k), _mm256_set1_epi32(127)), 23);
  return _mm256_mul_ps(x, _mm256_castsi256_ps(e));
}
inline F keep_bits(F v, unsigned bits, float other) {
  const __m256i lane = _mm256_sllv_epi32(_mm256_set1_epi32(1), lane_index());
  const __m256i set = _mm256_and_si256(_mm256_set1_epi32(static_cast<int>(bits)), lane);
  return _mm256_blendv_ps(set1(other), v, _mm256_castsi256_ps(_mm256_cmpeq_epi32(set, lane)));
}
inline void load2(const float* p, F& a, F& b) { a = load(p), b = load(p + W); }
inline void load2(const bf16* p, F& a, F& b) {
  const __m256i x = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  a = _mm256_castsi256_ps(_mm256_slli_epi32(x, 16));
  b = _mm256_castsi256_ps(_mm256_and_si256(x, _mm256_set1_epi32(static_cast<int>(0xffff0000))));
}
inline void load2_n(const float* p, int n, F& a, F& b) {
  a = load_n(p, n < W ? n : W), b = load_n(p + W, n > W ? n - W : 0);
}
inline void load2_n(const bf16* p, int n, F& a, F& b) {
  bf16 tile[2 * W] = {};
  std::memcpy(tile, p, 2 * static_cast<size_t>(n));
  load2(tile, a, b);
}
inline void natural(const bf16*, F& a, F& b) {
  const F lo = _mm256_unpacklo_ps(a, b), hi = _mm256_unpackhi_ps(a, b);
  a = _mm256_permute2f128_ps(lo, hi, 0x20), b = _mm256_permute2f128_ps(lo, hi, 0x31);
}
inline void natural(const float*, F&, F&) {}

// Bytes: one tile of one quad of int4 rows, or what it is multiplied with.
typedef __m256i C;
constexpr int kByteTiles = 1;
inline C no_bytes() { return _mm256_setzero_si256(); }
inline C eights() { return _mm256_set1_epi8(8); }
inline C load_bytes(const void* p) { return _mm256_loadu_si256(static_cast<const __m256i*>(p)); }
inline C load_last_tile(const void* p) { return load_bytes(p); }
// Two's complement nibbles, 8 higher: from 0 to 15.
inline C raised(C x) { return _mm256_xor_si256(x, _mm256_set1_epi8(static_cast<char>(0x88))); }
inline C low_codes(C x) { return _mm256_and_si256(x, _mm256_set1_epi8(15)); }
inline C high_codes(C x) { return _mm256_and_si256(_mm256_srli_epi16(x, 4), _mm256_set1_epi8(15)); }
// Sums of two products of a code and an int8 fit in 16 bits.
inline C dot_codes(C acc, C codes, C q) {
  return _mm256_add_epi32(acc, _mm256_madd_epi16(_mm256_maddubs_epi16(codes, q), _mm256_set1_epi16(1)));
}
inline C minus(C a, C b) { return _mm256_sub_epi32(a, b); }
// The rows of two quads, in order.
inline F row_sums(const C* v) {
  return _mm256_cvtepi32_ps(_mm256_permute4x64_epi64(_mm256_hadd_epi32(v[0], v[1]), 0xd8));
}
// Eight scales, four from each place.
inline F gather_scales(const uint8_t* const* at) {
  const auto quad = [&](int i) { return _mm_loadl_epi64(reinterpret_cast<const __m128i*>(at[i])); };
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_unpacklo_epi64(quad(0), quad(1))), 16));
}
// Lane i = largest of the i-th four of the 32 values in v.
inline F quad_maxima(const F* v) {
  const auto pairs = [](F x, F y) { return _mm256_max_ps(_mm256_shuffle_ps(x, y, 0x88), _mm256_shuffle_ps(x, y, 0xdd)); };
  return _mm256_permutevar8x32_ps(pairs(pairs(v[0], v[1]), pairs(v[2], v[3])), _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
}

}  // namespace
}  // namespace leanroll
