// Scalar conversions and vector functions on top of a simd header. Everything is in an unnamed namespace: code compiled for one
// instruction set must never be merged by the linker with another's.
#pragma once

namespace leanroll {
namespace {

constexpr float kInf = __builtin_huge_valf();

inline float to_float(float x) { return x; }
inline float to_float(bf16 x) {
  const uint32_t bits = static_cast<uint32_t>(x.bits) << 16;
  float y;
  std::memcpy(&y, &bits, 4);
  return y;
}
inline void from_float(float x, float& y) { y = x; }
inline void from_float(float x, bf16& y) {  // to nearest, ties to even; NaN stays NaN
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  const bool nan = (bits & 0x7fffffffu) > 0x7f800000u;
  y.bits = static_cast<uint16_t>(nan ? (bits >> 16) | 0x40u : rounded);
}
template <class T>
inline float round_to(float x) {
  T y;
  from_float(x, y);
  return to_float(y);
}

inline float element(const void* p, DType t, int64_t i) {
  return t == DType::bf16 ? to_float(static_cast<const bf16*>(p)[i]) : static_cast<const float*>(p)[i];
}

inline F add(F a, F b) { return a + b; }
inline F sub(F a, F b) { return a - b; }
inline F mul(F a, F b) { return a * b; }

// exp(x) = 2^k * (1 + r + r^2 q(r)), |r| <= ln2 / 2; relative error below 2e-7.
inline F exp_parts(F x, F& k) {
  const F magic = set1(12582912.0f);  // 1.5 * 2^23: adding it rounds to a whole number
  k = sub(add(mul(x, set1(1.44269504088896341f)), magic), magic);
  const F r = fma(k, set1(2.12194440e-4f), fma(k, set1(-0.693359375f), x));
  F q = set1(1.9875691500e-4f);
  q = fma(q, r, set1(1.3981999507e-3f));
  q = fma(q, r, set1(8.3334519073e-3f));
  q = fma(q, r, set1(4.1665795894e-2f));
  q = fma(q, r, set1(1.6666665459e-1f));
  q = fma(q, r, set1(5.0000001201e-1f));
  return fma(mul(q, r), r, r);  // exp(r) - 1
}
inline F exp_nonpositive(F x) {
  const F lowest = set1(-87.0f);
  F k;
  const F e = exp_parts(vmax(lowest, x), k)  /* vmax keeps a NaN in its second place */;
  return select_gt(lowest, x, zero(), scale_pow2(add(e, set1(1.0f)), k));
}
inline F tanh_vector(F x) {
  // tanh|x| = m / (m + 2), m = exp(2|x|) - 1, exact to rounding near 0 as well
  const F a = vmax(x, sub(zero(), x));
  const F twice = sub(zero(), vmax(set1(-30.0f), mul(a, set1(-2.0f))));
  F k;
  const F e = exp_parts(twice, k), power = scale_pow2(set1(1.0f), k);
  const F m = fma(power, e, sub(power, set1(1.0f)));
  const F t = m / add(m, set1(2.0f));
  return select_gt(zero(), x, sub(zero(), t), t);
}

// Fetch into the second-level cache: the first level has too few slots for misses to keep memory busy (measured on Zen 4: 22
// against 10 GB/s per core on scattered 2 KiB pages).
constexpr int kFetch = 2;
inline void prefetch_bytes(const void* p, int64_t bytes) {
  const char* c = static_cast<const char*>(p);
  for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(c + i, 0, kFetch);
}

// One row in the order in which `load2` delivers a T tile; padded with zeros to pad_dim(n).
template <class T, class X>
inline void tile_order(const X* x, int n, float* out) {
  const int padded = pad_dim(n);
  if (sizeof(T) == 4) {
    for (int i = 0; i < n; ++i) out[i] = to_float(x[i]);
    for (int i = n; i < padded; ++i) out[i] = 0.0f;
    return;
  }
  for (int t = 0; t < padded; t += 2 * W)
    for (int i = 0; i < 2 * W; ++i) {
      const int source = t + (i < W ? 2 * i : 2 * (i - W) + 1);
      out[t + i] = source < n ? to_float(x[source]) : 0.0f;
    }
}

// tile[j][i] = rows[i][j] for i < width, j < depth; zero for the other i < W.
template <class T>
inline void transpose(const T* rows, int64_t stride, int width, int depth, float* tile) {
#if LEANROLL_TRANSPOSE
  if (width == W && depth == W) {
    transpose_tile(rows, stride, tile);
    return;
  }
#endif
  for (int j = 0; j < depth; ++j)
    for (int i = 0; i < W; ++i) tile[j * W + i] = i < width ? to_float(rows[i * stride + j]) : 0.0f;
}

#if LEANROLL_DOT_BF16
constexpr bool kHasPairs = true;
#else
constexpr bool kHasPairs = false;
#endif

// Dot products of one prepared row x with W rows, row(i) → const T*; lane i of the result is row i's.
template <class T, class Row>
inline F dot_rows(const float* x, int D, Row&& row) {
  F acc[W];
  for (int i = 0; i < W; ++i) acc[i] = zero();
  int d = 0;
  for (; d + 2 * W <= D; d += 2 * W) {
    const F xa = load(x + d), xb = load(x + d + W);
    for (int i = 0; i < W; ++i) {
      F a, b;
      load2(row(i) + d, a, b);
      acc[i] = fma(xb, b, fma(xa, a, acc[i]));
    }
  }
  if (d < D) {
    const F xa = load(x + d), xb = load(x + d + W);
    for (int i = 0; i < W; ++i) {
      F a, b;
      load2_n(row(i) + d, D - d, a, b);
      acc[i] = fma(xb, b, fma(xa, a, acc[i]));
    }
  }
  return reduce_rows(acc);
}
#if LEANROLL_DOT_BF16
template <class Row>
inline F dot_rows_pairs(const bf16* x, int D, Row&& row) {
  F acc[W];
  for (int i = 0; i < W; ++i) acc[i] = zero();
  int d = 0;
  for (; d + 2 * W <= D; d += 2 * W) {
    const P xp = load_pairs(x + d);
    for (int i = 0; i < W; ++i) acc[i] = dot_pairs(acc[i], xp, load_pairs(row(i) + d));
  }
  if (d < D) {
    const P xp = load_pairs_n(x + d, D - d);
    for (int i = 0; i < W; ++i) acc[i] = dot_pairs(acc[i], xp, load_pairs_n(row(i) + d, D - d));
  }
  return reduce_rows(acc);
}
#endif

}  // namespace
}  // namespace leanroll
