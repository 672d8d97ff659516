// Vectors by compiler extension (GCC, Clang): four lanes, whatever the machine has.
#pragma once

#include <cmath>
#include <cstring>

#include "../kernels.h"

namespace leanroll {
namespace {

typedef float F __attribute__((vector_size(16)));
typedef int32_t I __attribute__((vector_size(16)));
constexpr int W = 4;
constexpr int kHeadBlock = 2, kTileBlock = 2;  // accumulators of the value pass: heads x tiles x 2
constexpr int kWeightRows = 2, kInputRows = 2;  // accumulators of the linear kernel
#define LEANROLL_DOT_BF16 0
#define LEANROLL_DOT_INT4 0
#define LEANROLL_TRANSPOSE 0

inline F zero() { return F{0, 0, 0, 0}; }
inline F set1(float x) { return F{x, x, x, x}; }
inline F load(const float* p) {
  F v;
  std::memcpy(&v, p, 16);
  return v;
}
inline void store(float* p, F v) { std::memcpy(p, &v, 16); }
inline F load_n(const float* p, int n) {
  F v = zero();
  std::memcpy(&v, p, 4 * static_cast<size_t>(n));
  return v;
}
inline F fma(F a, F b, F c) { return a * b + c; }
inline F vmax(F a, F b) { return a > b ? a : b; }
inline F select_gt(F a, F b, F yes, F no) { return a > b ? yes : no; }
inline float hsum(F v) { return (v[0] + v[1]) + (v[2] + v[3]); }
inline float hmax(F v) { return std::fmax(std::fmax(v[0], v[1]), std::fmax(v[2], v[3])); }
inline F reduce_rows(const F* r) { return F{hsum(r[0]), hsum(r[1]), hsum(r[2]), hsum(r[3])}; }
// Lane i of sums = sum of the i-th four of the 16 values in v.
inline F quad_sums(const F* v) { return reduce_rows(v); }
inline F quad_maxima(const F* v) { return F{hmax(v[0]), hmax(v[1]), hmax(v[2]), hmax(v[3])}; }
// Adds k (a whole number, |k| < 127) to the exponent of x.
inline F scale_pow2(F x, F k) {
  const I e = __builtin_convertvector(k, I) << 23;
  return x * (F)(e + (127 << 23));
}
// Lane i of v where bit i is set, `other` elsewhere.
inline F keep_bits(F v, unsigned bits, float other) {
  const I lane = {1, 2, 4, 8};
  return (lane & static_cast<int32_t>(bits)) != 0 ? v : set1(other);
}
// A tile is 2W values. From float: in order. From bf16: the even ones, then the odd ones (see `natural`).
inline void load2(const float* p, F& a, F& b) { a = load(p), b = load(p + W); }
inline void load2(const bf16* p, F& a, F& b) {
  I x;
  std::memcpy(&x, p, 16);
  a = (F)(x << 16), b = (F)(x & static_cast<int32_t>(0xffff0000));
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
  const F even = a, odd = b;
  a = F{even[0], odd[0], even[1], odd[1]}, b = F{even[2], odd[2], even[3], odd[3]};
}
inline void natural(const float*, F&, F&) {}

}  // namespace
}  // namespace leanroll
