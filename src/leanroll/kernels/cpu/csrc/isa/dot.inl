// Products of a few input rows with many weight rows. One accumulator per (input, weight row) walks over K in order, so a result
// does not depend on how many inputs come together.
#pragma once

namespace leanroll {
namespace {

// Prepared rows: bf16 weights with pair products keep bf16, everything else is float in tile order. Padded with zeros.
template <class T>
inline bool uses_pairs(DType x) {
  return kHasPairs && sizeof(T) == 2 && x == DType::bf16;
}

void prepare_rows_entry(DType x, const void* src, DType w, void* dst, int64_t dst_stride, int M, int K) {
  for (int m = 0; m < M; ++m) {
    char* row = static_cast<char*>(dst) + m * dst_stride;
    const bf16* xb = static_cast<const bf16*>(src) + static_cast<int64_t>(m) * K;
    const float* xf = static_cast<const float*>(src) + static_cast<int64_t>(m) * K;
    if (w == DType::bf16 && uses_pairs<bf16>(x)) {
      std::memset(row, 0, sizeof(bf16) * static_cast<size_t>(pad_dim(K)));
      std::memcpy(row, xb, sizeof(bf16) * static_cast<size_t>(K));
    } else if (w == DType::bf16) {
      x == DType::bf16 ? tile_order<bf16>(xb, K, reinterpret_cast<float*>(row))
                       : tile_order<bf16>(xf, K, reinterpret_cast<float*>(row));
    } else {
      x == DType::bf16 ? tile_order<float>(xb, K, reinterpret_cast<float*>(row))
                       : tile_order<float>(xf, K, reinterpret_cast<float*>(row));
    }
  }
}

// Weights stream from memory in blocks of a few rows, which hardware prefetchers do not follow: they are asked for this far ahead,
// into the second-level cache (the first has too few outstanding misses; 2.7 times the bandwidth on Zen 4). Reading past the end of
// a matrix in a prefetch is harmless.
constexpr int kPrefetchBytes = 16384;

template <class T>
inline void prefetch(const T* p) {
  __builtin_prefetch(reinterpret_cast<const char*>(p) + kPrefetchBytes, 0, 2);
}

template <class T, int R, int M>
inline void dot_block(const DotArgs& a, int n, int m) {
  const T* w = static_cast<const T*>(a.w) + static_cast<int64_t>(n) * a.K;
  const char* x = static_cast<const char*>(a.x) + m * a.x_stride;
  F acc[R][M];
  for (int r = 0; r < R; ++r)
    for (int i = 0; i < M; ++i) acc[r][i] = zero();
#if LEANROLL_DOT_BF16
  if constexpr (sizeof(T) == 2) {
    int k = 0;
    for (; k + 2 * W <= a.K; k += 2 * W) {
      P wp[R];
      for (int r = 0; r < R; ++r) {
        wp[r] = load_pairs(w + static_cast<int64_t>(r) * a.K + k);
        if (m == 0) prefetch(w + static_cast<int64_t>(r) * a.K + k);
      }
      for (int i = 0; i < M; ++i) {
        const P xp = load_pairs(reinterpret_cast<const bf16*>(x + i * a.x_stride) + k);
        for (int r = 0; r < R; ++r) acc[r][i] = dot_pairs(acc[r][i], wp[r], xp);
      }
    }
    if (k < a.K)
      for (int i = 0; i < M; ++i) {
        const P xp = load_pairs(reinterpret_cast<const bf16*>(x + i * a.x_stride) + k);
        for (int r = 0; r < R; ++r)
          acc[r][i] = dot_pairs(acc[r][i], load_pairs_n(w + static_cast<int64_t>(r) * a.K + k, a.K - k), xp);
      }
  } else
#endif
  {
    int k = 0;
    for (; k < a.K; k += 2 * W) {
      F wa[R], wb[R];
      if (m == 0)
        for (int r = 0; r < R; ++r) prefetch(w + static_cast<int64_t>(r) * a.K + k);
      if (k + 2 * W <= a.K)
        for (int r = 0; r < R; ++r) load2(w + static_cast<int64_t>(r) * a.K + k, wa[r], wb[r]);
      else
        for (int r = 0; r < R; ++r) load2_n(w + static_cast<int64_t>(r) * a.K + k, a.K - k, wa[r], wb[r]);
      for (int i = 0; i < M; ++i) {
        const float* xi = reinterpret_cast<const float*>(x + i * a.x_stride) + k;
        const F xa = load(xi), xb = load(xi + W);
        for (int r = 0; r < R; ++r) acc[r][i] = fma(wb[r], xb, fma(wa[r], xa, acc[r][i]));
      }
    }
  }
  // W sums at a time; each is added up in the same order wherever it stands among them.
  F sums[(R * M + W - 1) / W * W];
  for (int j = 0; j < (R * M + W - 1) / W * W; ++j) sums[j] = j < R * M ? acc[j / M][j % M] : zero();
  for (int j = 0; j < R * M; j += W) {
    float lanes[W];
    store(lanes, reduce_rows(sums + j));
    for (int i = j; i < R * M && i < j + W; ++i) a.y[(m + i % M) * a.y_stride_m + n + i / M - a.begin] = lanes[i - j];
  }
}

template <class T, int M>
void dot_inputs(const DotArgs& a, int m) {
  int n = a.begin;
  for (; n + kWeightRows <= a.end; n += kWeightRows) dot_block<T, kWeightRows, M>(a, n, m);
  for (; n < a.end; ++n) dot_block<T, 1, M>(a, n, m);
}

// Inputs in blocks of nearly equal size (9 as 5 + 4 rather than 8 + 1), which stay in the first-level cache while the weight rows pass.
template <class T>
void dot(const DotArgs& a) {
  const int blocks = (a.M + kInputRows - 1) / kInputRows;
  int m = 0;
  for (int b = 0; b < blocks; ++b) {
    const int size = (a.M - m + blocks - b - 1) / (blocks - b);
    switch (size) {
      case 1: dot_inputs<T, 1>(a, m); break;
      case 2: dot_inputs<T, 2>(a, m); break;
      case 3: dot_inputs<T, (kInputRows >= 3 ? 3 : 1)>(a, m); break;
      case 4: dot_inputs<T, (kInputRows >= 4 ? 4 : 1)>(a, m); break;
      case 5: dot_inputs<T, (kInputRows >= 5 ? 5 : 1)>(a, m); break;
      case 6: dot_inputs<T, (kInputRows >= 6 ? 6 : 1)>(a, m); break;
      case 7: dot_inputs<T, (kInputRows >= 7 ? 7 : 1)>(a, m); break;
      default: dot_inputs<T, (kInputRows >= 8 ? 8 : 1)>(a, m); break;
    }
    m += size;
  }
}

void dot_entry(const DotArgs& a) {
  if (a.w_dtype == DType::bf16)
    dot<bf16>(a);
  else
    dot<float>(a);
}

// M inputs from row m on against one transposed tile of weights, added to y where `more`.
template <int M>
inline void expand_tile(const float* tile, int depth, const float* x, int64_t x_stride, float* y, int64_t y_stride, bool more) {
  F acc[M];
  for (int m = 0; m < M; ++m) acc[m] = more ? load(y + m * y_stride) : zero();
  for (int k = 0; k < depth; ++k) {
    const F w = load(tile + k * W);
    for (int m = 0; m < M; ++m) acc[m] = fma(set1(x[m * x_stride + k]), w, acc[m]);
  }
  for (int m = 0; m < M; ++m) store(y + m * y_stride, acc[m]);
}

// A short K: one transposition of the weights, then W outputs at a time without a sum across lanes.
template <class T>
void expand(const ExpandArgs& a) {
  const T* w = static_cast<const T*>(a.w);
  prefetch_bytes(w + static_cast<int64_t>(a.end) * a.K, static_cast<int64_t>(a.end - a.begin) * a.K * static_cast<int64_t>(sizeof(T)));
  float tile[W * W];  // [k][n]
  for (int n = a.begin; n < a.end; n += W) {
    for (int k = 0; k < a.K; k += W) {
      const int depth = a.K - k < W ? a.K - k : W;
      transpose(w + static_cast<int64_t>(n) * a.K + k, a.K, a.end - n < W ? a.end - n : W, depth, tile);
      const float* x = a.x + k;
      float* y = a.y + n - a.begin;
      int m = 0;
      for (; m + 4 <= a.M; m += 4) expand_tile<4>(tile, depth, x + m * a.x_stride, a.x_stride, y + m * a.y_stride, a.y_stride, k > 0);
      for (; m < a.M; ++m) expand_tile<1>(tile, depth, x + m * a.x_stride, a.x_stride, y + m * a.y_stride, a.y_stride, k > 0);
    }
  }
}

void expand_entry(const ExpandArgs& a) {
  if (a.w_dtype == DType::bf16)
    expand<bf16>(a);
  else
    expand<float>(a);
}

// As the unfused modules round: the base product to x's dtype, each step of the adapter to the adapter's.
template <class X, class L, class O>
void finish(const FinishArgs& a) {
  const X* bias = static_cast<const X*>(a.bias);
  O* out = static_cast<O*>(a.out);
  for (int i = 0; i < a.n; ++i) {
    float y = a.y[i];
    if (bias) y += to_float(bias[i]);
    if (a.delta) y = round_to<X>(y) + round_to<L>(round_to<L>(a.delta[i]) * a.scaling);
    from_float(y, out[i]);
  }
}

template <class X, class L>
void finish_into(const FinishArgs& a) {
  if (a.out_dtype == DType::bf16)
    finish<X, L, bf16>(a);
  else
    finish<X, L, float>(a);
}

void finish_entry(const FinishArgs& a) {
  const bool narrow = a.lora_dtype == DType::bf16;
  if (a.dtype == DType::bf16)
    narrow ? finish_into<bf16, bf16>(a) : finish_into<bf16, float>(a);
  else
    narrow ? finish_into<float, bf16>(a) : finish_into<float, float>(a);
}

}  // namespace
}  // namespace leanroll
