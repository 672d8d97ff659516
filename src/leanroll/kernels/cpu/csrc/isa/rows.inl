// Row-wise work around attention: conversion, norms, activations, rotation, exponentials.
#pragma once

namespace leanroll {
namespace {

template <class A, class B>
void convert(const void* src, void* dst, int64_t n) {
  for (int64_t i = 0; i < n; ++i) from_float(to_float(static_cast<const A*>(src)[i]), static_cast<B*>(dst)[i]);
}

void convert_entry(DType from, const void* src, DType to, void* dst, int64_t n) {
  if (from == to)
    std::memcpy(dst, src, static_cast<size_t>(n * size_of(from)));
  else if (from == DType::bf16)
    convert<bf16, float>(src, dst, n);
  else
    convert<float, bf16>(src, dst, n);
}

template <class T>
void rms_norm(const void* xs, const void* ws, void* ys, int H, float eps, float offset, bool float_weight) {
  const T* x = static_cast<const T*>(xs);
  const T* w = static_cast<const T*>(ws);
  T* y = static_cast<T*>(ys);
  F sum = zero();
  int i = 0;
  for (; i + 2 * W <= H; i += 2 * W) {
    F a, b;
    load2(x + i, a, b);
    sum = fma(b, b, fma(a, a, sum));
  }
  if (i < H) {
    F a, b;
    load2_n(x + i, H - i, a, b);
    sum = fma(b, b, fma(a, a, sum));
  }
  const float inverse = 1.0f / std::sqrt(hsum(sum) / static_cast<float>(H) + eps);
  if (float_weight) {
    for (int j = 0; j < H; ++j) from_float(to_float(x[j]) * inverse * (offset + to_float(w[j])), y[j]);
  } else {
    for (int j = 0; j < H; ++j) from_float(round_to<T>(to_float(x[j]) * inverse) * (offset + to_float(w[j])), y[j]);
  }
}

void rms_norm_entry(DType t, const void* x, const void* w, void* y, int H, float eps, float offset, bool float_weight) {
  if (t == DType::bf16)
    rms_norm<bf16>(x, w, y, H, eps, offset, float_weight);
  else
    rms_norm<float>(x, w, y, H, eps, offset, float_weight);
}

template <class T>
void silu_mul(const void* gate, const void* up, void* ys, int64_t n) {
  const T* g = static_cast<const T*>(gate);
  const T* u = static_cast<const T*>(up);
  T* y = static_cast<T*>(ys);
  for (int64_t i = 0; i < n; i += 2 * W) {
    const int count = n - i < 2 * W ? static_cast<int>(n - i) : 2 * W;
    F a[2];
    load2_n(g + i, count, a[0], a[1]);
    for (F& x : a) {
      // x / (1 + exp(-x)), with the exponential of a non-positive number only
      const F e = exp_nonpositive(sub(zero(), vmax(x, sub(zero(), x))));
      x = mul(x, select_gt(zero(), x, e, set1(1.0f)) / add(set1(1.0f), e));
    }
    natural(static_cast<const T*>(nullptr), a[0], a[1]);
    float tile[2 * W];
    store(tile, a[0]), store(tile + W, a[1]);
    for (int j = 0; j < count; ++j) from_float(round_to<T>(tile[j]) * to_float(u[i + j]), y[i + j]);
  }
}

void silu_mul_entry(DType t, const void* gate, const void* up, void* y, int64_t n) {
  if (t == DType::bf16)
    silu_mul<bf16>(gate, up, y, n);
  else
    silu_mul<float>(gate, up, y, n);
}

// x * cos + rotate_half(x) * sin, each product rounded to T as a model in T does it.
template <class T>
void rope(const void* xs, const void* cs, const void* ss, void* ys, int H, int D) {
  const T* c = static_cast<const T*>(cs);
  const T* s = static_cast<const T*>(ss);
  const int half = D / 2;
  for (int h = 0; h < H; ++h) {
    const T* x = static_cast<const T*>(xs) + static_cast<int64_t>(h) * D;
    T* y = static_cast<T*>(ys) + static_cast<int64_t>(h) * D;
    for (int d = 0; d < half; ++d) {
      const float a = to_float(x[d]), b = to_float(x[d + half]);
      from_float(round_to<T>(a * to_float(c[d])) + round_to<T>(-b * to_float(s[d])), y[d]);
      from_float(round_to<T>(b * to_float(c[d + half])) + round_to<T>(a * to_float(s[d + half])), y[d + half]);
    }
  }
}

void rope_entry(DType t, const void* x, const void* cos, const void* sin, void* y, int H, int D) {
  if (t == DType::bf16)
    rope<bf16>(x, cos, sin, y, H, D);
  else
    rope<float>(x, cos, sin, y, H, D);
}

void exp_sum_entry(const float* x, int n, float inv_temperature, float* maximum, double* sum) {
  F top = set1(-kInf);
  int i = 0;
  for (; i + W <= n; i += W) top = vmax(load(x + i), top);
  float m = hmax(top);
  for (; i < n; ++i) m = x[i] > m ? x[i] : m;
  double total = 0.0;
  const F shift = set1(m), factor = set1(inv_temperature);
  for (int block = 0; block < n; block += 256) {  // short float sums, added in double
    const int end = block + 256 < n ? block + 256 : n;
    F part = zero();
    for (i = block; i + W <= end; i += W) part = add(part, exp_nonpositive(mul(sub(load(x + i), shift), factor)));
    if (i < end) {
      const F rest = keep_bits(load_n(x + i, end - i), (1u << (end - i)) - 1u, -kInf);
      part = add(part, exp_nonpositive(mul(sub(rest, shift), factor)));
    }
    total += static_cast<double>(hsum(part));
  }
  *maximum = m, *sum = total;
}

void exp_values_entry(const float* x, int n, float inv_temperature, float maximum, float* out) {
  const F shift = set1(maximum), factor = set1(inv_temperature);
  int i = 0;
  for (; i + W <= n; i += W) store(out + i, exp_nonpositive(mul(sub(load(x + i), shift), factor)));
  if (i < n) {
    float rest[W];
    store(rest, exp_nonpositive(mul(sub(load_n(x + i, n - i), shift), factor)));
    for (int j = 0; i + j < n; ++j) out[i + j] = rest[j];
  }
}

}  // namespace
}  // namespace leanroll
