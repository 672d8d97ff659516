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

template <class T>
void bounds(const void* page, void* out, int S, int D) {
  const T* rows = static_cast<const T*>(page);
  T *low = static_cast<T*>(out), *high = low + D;
  for (int d = 0; d < D; ++d) low[d] = high[d] = rows[d];
  for (int s = 1; s < S; ++s)
    for (int d = 0; d < D; ++d) {
      const T x = rows[static_cast<int64_t>(s) * D + d];
      const float value = to_float(x);
      const bool nan = value != value;  // a NaN stays: nothing compares to it
      if (nan || value < to_float(low[d])) low[d] = x;
      if (nan || value > to_float(high[d])) high[d] = x;
    }
}

template <class T>
void write_landmark(const Scorer& scorer, const void* page, void* out, int S, int D, float* memory) {
  if (scorer.quantised())
    pack_landmark<T>(scorer, static_cast<const T*>(page), static_cast<uint8_t*>(out), S, D, memory);
  else if (scorer.kind == ScorerKind::minmax)
    bounds<T>(page, out, S, D);
  else
    landmark<T>(page, out, S, D);
}

void landmark_entry(DType kv, const Scorer& scorer, const void* page, void* out, int S, int D, float* memory) {
  if (kv == DType::bf16)
    write_landmark<bf16>(scorer, page, out, S, D, memory);
  else
    write_landmark<float>(scorer, page, out, S, D, memory);
}

// What landmarks of type T are multiplied with, as its dot product wants it. memory: 2 pad_dim(width) floats.
template <class T>
struct Query {
  int width;
  bool pairs;
  float *x, *values;

  Query(int n, bool use_pairs, float* memory) : width(n), pairs(use_pairs), x(memory), values(memory + pad_dim(n)) {}
  void prepare() {
    if (!pairs) {
      tile_order<T>(values, width, x);
      return;
    }
    auto* row = reinterpret_cast<bf16*>(x);
    for (int d = 0; d < pad_dim(width); ++d) from_float(d < width ? values[d] : 0.0f, row[d]);
  }
  // Lane i: product with row(i).
  template <class Row>
  F dot(Row&& row) const {
#if LEANROLL_DOT_BF16
    if (sizeof(T) == 2 && pairs)
      return dot_rows_pairs(reinterpret_cast<const bf16*>(x), width, [&](int i) { return reinterpret_cast<const bf16*>(row(i)); });
#endif
    return dot_rows<T>(x, width, row);
  }
};

// out[n] = query·landmark(n) for the candidates n.
template <class T>
void landmark_products(const ScoreArgs& a, const Query<T>& query, float* out) {
  const char* base = static_cast<const char*>(a.rows);
  const T* rows[W];
  for (int n = a.begin; n < a.end && n < a.begin + a.ahead; ++n) prefetch_bytes(base + a.table[n] * a.page_stride, a.fetch_bytes);
  for (int n = a.begin; n < a.end; n += W) {
    const int count = a.end - n < W ? a.end - n : W;
    for (int i = 0; i < W; ++i) {
      rows[i] = reinterpret_cast<const T*>(base + a.table[n + (i < count ? i : 0)] * a.page_stride);
      if (n + a.ahead + i < a.end) prefetch_bytes(base + a.table[n + a.ahead + i] * a.page_stride, a.fetch_bytes);
    }
    const F s = query.dot([&](int i) { return rows[i]; });
    if (count == W) {
      store(out + n, s);
    } else {
      float last[W];
      store(last, s);
      for (int i = 0; i < count; ++i) out[n + i] = last[i];
    }
  }
}

// x[0, n) = exp(x - max x), and zeros up to the next multiple of 4 W; returns the maximum, and the sum.
inline float exp_below_maximum(float* x, int n, float& total) {
  const int end = (n + 4 * W - 1) / (4 * W) * (4 * W);
  for (int i = n; i < end; ++i) x[i] = -kInf;
  F top = set1(-kInf);
  for (int i = 0; i < n; i += W) top = vmax(top, load(x + i));
  const float m = hmax(top);
  const F shift = set1(m == -kInf ? 0.0f : m);
  F sum = zero();
  for (int i = 0; i < end; i += W) {
    const F p = exp_nonpositive(sub(load(x + i), shift));
    store(x + i, p);
    sum = add(sum, p);
  }
  total = hsum(sum);
  return m;
}

// One landmark per page in the cache's dtype.
template <class T>
void score_landmarks(const ScoreArgs& a) {
  const bool bounds = a.scorer.kind == ScorerKind::minmax, mean = a.scorer.kind == ScorerKind::mean;
  const int width = bounds ? 2 * a.D : a.D;
  Query<T> query(width, kHasPairs && sizeof(T) == 2 && a.q_dtype == DType::bf16 && !mean, a.scratch);
  const auto value = [&](int h, int d) { return element(a.q, a.q_dtype, static_cast<int64_t>(h) * a.D + d); };
  if (mean) {
    for (int d = 0; d < a.D; ++d) {
      float sum = 0.0f;
      for (int h = 0; h < a.G; ++h) sum += value(h, d);
      query.values[d] = sum / static_cast<float>(a.G);
    }
    query.prepare();
    landmark_products(a, query, a.out);
    return;
  }
  const float scale = 1.0f / std::sqrt(static_cast<float>(a.D));
  float* logits = query.values + pad_dim(width);
  for (int h = 0; h < a.G; ++h) {
    for (int d = 0; d < a.D; ++d) {
      const float x = value(h, d);
      query.values[d] = bounds && x > 0.0f ? 0.0f : x;  // a NaN stays
      if (bounds) query.values[a.D + d] = x < 0.0f ? 0.0f : x;
    }
    query.prepare();
    landmark_products(a, query, logits);
    const int n = a.end - a.begin;
    float* l = logits + a.begin;
    for (int i = n; i < n + W; ++i) l[i] = -kInf;
    for (int i = 0; i < n; i += W) store(l + i, mul(load(l + i), set1(scale)));
    float total;
    exp_below_maximum(l, n, total);
    float* out = a.out + a.begin;
    for (int i = 0; i < n; ++i) out[i] = (h ? out[i] : 0.0f) + l[i] / total;
  }
}

// Every key of every page, for the oracle.
template <class T>
struct KeyProducts {
  const ScoreArgs& a;
  int H;
  Query<T> query;
  float* queries;
  int64_t stride;

  KeyProducts(const ScoreArgs& args, int first, int heads, float* memory)
      : a(args), H(heads), query(args.D, kHasPairs && sizeof(T) == 2 && args.q_dtype == DType::bf16, memory), queries(memory),
        stride(2ll * pad_dim(args.D)) {
    for (int h = 0; h < H; ++h) {
      query.x = queries + h * stride, query.values = query.x + stride / 2;
      for (int d = 0; d < a.D; ++d) query.values[d] = element(a.q, a.q_dtype, static_cast<int64_t>(first + h) * a.D + d);
      query.prepare();
    }
  }
  void operator()(int first, int count, float* out, int64_t out_stride) {
    const int S = a.scorer.rows, left = a.num_tokens - first * S, n = count * S < left ? count * S : left;
    const T* rows[kChunkRows + kMaxLanes];
    for (int i = 0; i < n; ++i)
      rows[i] = reinterpret_cast<const T*>(static_cast<const char*>(a.rows) + a.table[first + i / S] * a.page_stride) + i % S * a.D;
    for (int i = n; i < n + W; ++i) rows[i] = rows[0];
    const F scale = set1(1.0f / std::sqrt(static_cast<float>(a.D)));
    for (int h = 0; h < H; ++h) {
      query.x = queries + h * stride;
      float* to = out + h * out_stride;
      for (int i = 0; i < n; i += W) store(to + i, mul(query.dot([&](int j) { return rows[i + j]; }), scale));
      for (int i = n; i < count * S; ++i) to[i] = -kInf;
    }
  }
};

// x[0, n R) → out[p] = sum of page p's R values. x is overwritten; both have room for full vectors.
inline void page_sums(float* x, int n, int R, float* out) {
  float* quads = R == kQuad ? out : x;
  for (int i = 0; i < n * R; i += 4 * W) {
    const F v[4] = {load(x + i), load(x + i + W), load(x + i + 2 * W), load(x + i + 3 * W)};
    store(quads + i / 4, quad_sums(v));
  }
  if (R == kQuad) return;
  const int per_page = R / kQuad;
  for (int p = 0; p < n; ++p) {
    float sum = 0.0f;
    for (int i = 0; i < per_page; ++i) sum += x[p * per_page + i];
    out[p] = sum;
  }
}

// Softmax over the rows of all pages read, summed per page and over the query heads. Rows are taken in chunks, each with its own
// maximum, so that what is stored is one number per page.
template <class Products>
void score_rows(const ScoreArgs& a) {
  const int R = a.scorer.rows, per_chunk = kChunkRows / R, n = a.read_end - a.read_begin;
  const int64_t stride = kChunkRows + 8 * kMaxLanes, page_stride = n + 4 * kMaxLanes;
  float* logits = a.scratch;
  float* sums = logits + kScoreHeads * stride;
  float* maxima = sums + kScoreHeads * page_stride;  // of a chunk, as many as there can be pages
  float* totals = maxima + kScoreHeads * page_stride;
  float* memory = totals + kScoreHeads * page_stride;
  for (int first = 0; first < a.G; first += kScoreHeads) {
    const int H = a.G - first < kScoreHeads ? a.G - first : kScoreHeads;
    Products products(a, first, H, memory);
    for (int p = 0; p < n; p += per_chunk) {
      const int count = n - p < per_chunk ? n - p : per_chunk;
      products(a.read_begin + p, count, logits, stride);
      for (int h = 0; h < H; ++h) {
        const int64_t chunk = h * page_stride + p / per_chunk;
        maxima[chunk] = exp_below_maximum(logits + h * stride, count * R, totals[chunk]);
        page_sums(logits + h * stride, count, R, sums + h * page_stride + p);
      }
    }
    for (int h = 0; h < H; ++h) {
      const float* maximum = maxima + h * page_stride;
      const int chunks = (n + per_chunk - 1) / per_chunk;
      float top = -kInf, total = 0.0f;
      for (int c = 0; c < chunks; ++c) top = maximum[c] > top ? maximum[c] : top;
      for (int c = 0; c < chunks; ++c) total += totals[h * page_stride + c] * std::exp(maximum[c] - top);
      for (int c = 0; c < chunks; ++c) {
        const float weight = std::exp(maximum[c] - top) / total;
        const int from = a.read_begin + c * per_chunk, to = from + per_chunk;
        const int begin = from > a.begin ? from : a.begin, end = to < a.end ? to : a.end;
        const float* sum = sums + h * page_stride;
        if (first + h)
          for (int i = begin; i < end; ++i) a.out[i] += sum[i - a.read_begin] * weight;
        else
          for (int i = begin; i < end; ++i) a.out[i] = sum[i - a.read_begin] * weight;
      }
    }
  }
}

// x[0, n R) → out[p] = largest of page p's R values. As page_sums.
inline void page_maxima(float* x, int n, int R, float* out) {
  float* quads = R == kQuad ? out : x;
  for (int i = 0; i < n * R; i += 4 * W) {
    const F v[4] = {load(x + i), load(x + i + W), load(x + i + 2 * W), load(x + i + 3 * W)};
    store(quads + i / 4, quad_maxima(v));
  }
  if (R == kQuad) return;
  const int per_page = R / kQuad;
  for (int p = 0; p < n; ++p) {
    float top = -kInf;
    for (int i = 0; i < per_page; ++i) top = x[p * per_page + i] > top ? x[p * per_page + i] : top;
    out[p] = top;
  }
}

// How far a page's best row stays behind the best of all candidates, for the query head for which that is least.
void score_peaks(const ScoreArgs& a) {
  const int R = a.scorer.rows, per_chunk = kChunkRows / R, n = a.end - a.begin;
  const int64_t stride = kChunkRows + 8 * kMaxLanes, page_stride = n + 4 * kMaxLanes;
  float* products_of = a.scratch;
  float* best = products_of + kScoreHeads * stride;
  float* memory = best + kScoreHeads * page_stride;
  for (int first = 0; first < a.G; first += kScoreHeads) {
    const int H = a.G - first < kScoreHeads ? a.G - first : kScoreHeads;
    const WholeProducts products(a, first, H, memory);
    for (int p = 0; p < n; p += per_chunk) {
      const int count = n - p < per_chunk ? n - p : per_chunk;
      products(a.begin + p, count, products_of, stride);
      for (int h = 0; h < H; ++h) page_maxima(products_of + h * stride, count, R, best + h * page_stride + p);
    }
    for (int h = 0; h < H; ++h) {
      float* x = best + h * page_stride;
      for (int i = n; i < n + W; ++i) x[i] = -kInf;
      F top = set1(-kInf);
      for (int i = 0; i < n; i += W) top = vmax(top, load(x + i));
      const float highest = hmax(top);
      float* out = a.out + a.begin;
      for (int i = 0; i < n; ++i) {
        const float behind = x[i] - highest;
        out[i] = first + h && out[i] > behind ? out[i] : behind;
      }
    }
  }
}

template <class T>
void score(const ScoreArgs& args) {
  if (args.scorer.kind == ScorerKind::peak) return score_peaks(args);
  if (args.scorer.quantised())
    score_rows<QuantisedProducts>(args);
  else if (args.scorer.kind == ScorerKind::oracle)
    score_rows<KeyProducts<T>>(args);
  else
    score_landmarks<T>(args);
}

void score_entry(DType kv, const ScoreArgs& args) {
  if (args.begin >= args.end) return;
  if (kv == DType::bf16)
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
