// Landmarks, page scores and selection of one (sequence, KV head).
#pragma once

namespace leanroll {
namespace {

template <class T>
void landmark(const void* page, void* out, int S, int D) {
  const T* rows = static_cast<const T*>(page);
  T* mean = static_cast<T*>(out);
  for (int d = 0; d < D; ++d) {
    float sum = 0.0f;
    for (int s = 0; s < S; ++s) sum += to_float(rows[static_cast<int64_t>(s) * D + d]);
    from_float(sum / static_cast<float>(S), mean[d]);
  }
}

void landmark_entry(DType kv, const void* page, void* out, int S, int D) {
  if (kv == DType::bf16)
    landmark<bf16>(page, out, S, D);
  else
    landmark<float>(page, out, S, D);
}

inline float element(const void* p, DType t, int64_t i) {
  return t == DType::bf16 ? to_float(static_cast<const bf16*>(p)[i]) : static_cast<const float*>(p)[i];
}

// out[n] = x·landmark(n) for n in [begin, end).
template <class T, class Dot>
inline void landmark_products(const ScoreArgs& a, float* out, Dot&& dot) {
  constexpr int kAhead = 32;
  const T* base = static_cast<const T*>(a.landmarks);
  const T* rows[W];
  for (int n = a.begin; n < a.end && n < a.begin + kAhead; ++n)
    prefetch_bytes(base + a.table[n] * a.page_stride, a.fetch_bytes);
  for (int n = a.begin; n < a.end; n += W) {
    const int count = a.end - n < W ? a.end - n : W;
    for (int i = 0; i < W; ++i) {
      rows[i] = base + a.table[n + (i < count ? i : 0)] * a.page_stride;
      if (n + kAhead + i < a.end) prefetch_bytes(base + a.table[n + kAhead + i] * a.page_stride, a.fetch_bytes);
    }
    const F s = dot([&](int i) { return rows[i]; });
    if (count == W) {
      store(out + n, s);
    } else {
      float last[W];
      store(last, s);
      for (int i = 0; i < count; ++i) out[n + i] = last[i];
    }
  }
}

template <class T>
void score(const ScoreArgs& a) {
  const int padded = pad_dim(a.D);
  float* x = a.scratch;  // [G, padded]
  if (a.kind == ScorerKind::mean) {
    float* mean = x + padded;
    for (int d = 0; d < a.D; ++d) {
      float sum = 0.0f;
      for (int h = 0; h < a.G; ++h) sum += element(a.q, a.q_dtype, static_cast<int64_t>(h) * a.D + d);
      mean[d] = sum / static_cast<float>(a.G);
    }
    tile_order<T>(mean, a.D, x);
    landmark_products<T>(a, a.out, [&](auto&& row) { return dot_rows<T>(x, a.D, row); });
    return;
  }
  const float scale = 1.0f / std::sqrt(static_cast<float>(a.D));
  float* logits = x + static_cast<int64_t>(a.G) * padded;
  for (int h = 0; h < a.G; ++h) {
    const int64_t offset = static_cast<int64_t>(h) * a.D;
#if LEANROLL_DOT_BF16
    if (sizeof(T) == 2 && a.q_dtype == DType::bf16) {
      bf16* row = reinterpret_cast<bf16*>(x);
      std::memset(row, 0, sizeof(bf16) * static_cast<size_t>(padded));
      std::memcpy(row, static_cast<const bf16*>(a.q) + offset, sizeof(bf16) * static_cast<size_t>(a.D));
      landmark_products<bf16>(a, logits, [&](auto&& rows) { return dot_rows_pairs(row, a.D, rows); });
    } else
#endif
    {
      if (a.q_dtype == DType::bf16)
        tile_order<T>(static_cast<const bf16*>(a.q) + offset, a.D, x);
      else
        tile_order<T>(static_cast<const float*>(a.q) + offset, a.D, x);
      landmark_products<T>(a, logits, [&](auto&& row) { return dot_rows<T>(x, a.D, row); });
    }
    const int n = a.end - a.begin;
    float* l = logits + a.begin;
    for (int i = n; i < n + W; ++i) l[i] = -kInf;
    F top = set1(-kInf);
    for (int i = 0; i < n; i += W) {
      const F s = mul(load(l + i), set1(scale));
      store(l + i, s);
      top = vmax(top, s);
    }
    const F m = set1(hmax(top));
    F sum = zero();
    for (int i = 0; i < n; i += W) {
      const F p = exp_nonpositive(sub(load(l + i), m));
      store(l + i, p);
      sum = add(sum, p);
    }
    const float total = hsum(sum);
    float* out = a.out + a.begin;
    for (int i = 0; i < n; ++i) out[i] = (h ? out[i] : 0.0f) + l[i] / total;
  }
}

void score_entry(DType landmarks, const ScoreArgs& args) {
  if (args.begin >= args.end) return;
  if (landmarks == DType::bf16)
    score<bf16>(args);
  else
    score<float>(args);
}

void select_entry(const float* scores, int begin, int end, int k, int32_t* out, uint32_t* keys) {
  const int n = end - begin;
  if (k <= 0) return;
  for (int i = 0; i < n; ++i) {
    const float s = scores[begin + i] + 0.0f;  // -0 and 0 are a tie
    uint32_t bits;
    std::memcpy(&bits, &s, 4);
    keys[i] = bits & 0x80000000u ? ~bits : bits | 0x80000000u;  // unsigned order = float order
  }
  // Highest threshold that at least k keys reach, bit by bit: 32 counting passes beat any partial sort here, and are
  // deterministic.
  uint32_t threshold = 0;
  for (int bit = 31; bit >= 0; --bit) {
    const uint32_t candidate = threshold | (1u << bit);
    int32_t count = 0;
    for (int i = 0; i < n; ++i) count += keys[i] >= candidate;
    if (count >= k) threshold = candidate;
    if (count == k) break;
  }
  int32_t above = 0;
  for (int i = 0; i < n; ++i) above += keys[i] > threshold;
  int32_t ties = k - above, taken = 0;  // `ties` keys equal to the threshold are taken, the earlier ones
  for (int i = 0; i < n && taken < k; ++i) {
    const bool equal = keys[i] == threshold && ties > 0;
    out[taken] = begin + i;
    taken += keys[i] > threshold || equal;
    ties -= equal;
  }
}

}  // namespace
}  // namespace leanroll
