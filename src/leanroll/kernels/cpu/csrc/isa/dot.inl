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

template <class T, int R>
inline void dot_inputs(const DotArgs& a, int n) {
  // Inputs in blocks of nearly equal size: 8 as 4 + 4 rather than 6 + 2.
  const int blocks = (a.M + kInputRows - 1) / kInputRows;
  int m = 0;
  for (int b = 0; b < blocks; ++b) {
    const int size = (a.M - m + blocks - b - 1) / (blocks - b);
    switch (size) {
      case 1: dot_block<T, R, 1>(a, n, m); break;
      case 2: dot_block<T, R, 2>(a, n, m); break;
      case 3: dot_block<T, R, (kInputRows >= 3 ? 3 : 1)>(a, n, m); break;
      case 4: dot_block<T, R, (kInputRows >= 4 ? 4 : 1)>(a, n, m); break;
      case 5: dot_block<T, R, (kInputRows >= 5 ? 5 : 1)>(a, n, m); break;
      default: dot_block<T, R, (kInputRows >= 6 ? 6 : 1)>(a, n, m); break;
    }
    m += size;
  }
}

template <class T>
void dot(const DotArgs& a) {
  int n = a.begin;
  for (; n + kWeightRows <= a.end; n += kWeightRows) dot_inputs<T, kWeightRows>(a, n);
  for (; n < a.end; ++n) dot_inputs<T, 1>(a, n);
}

void dot_entry(const DotArgs& a) {
  if (a.w_dtype == DType::bf16)
    dot<bf16>(a);
  else
    dot<float>(a);
}

}  // namespace
}  // namespace leanroll
