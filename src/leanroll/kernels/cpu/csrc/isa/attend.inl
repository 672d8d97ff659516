// Decode attention over one chunk of pages: scores of all its tokens, softmax statistics, weighted sum of values.
#pragma once

namespace leanroll {
namespace {

// Eight consecutive tokens of a page, of which [lo, hi) may be read.
template <class T>
struct Groups {
  int count = 0;
  const T* k[kChunkGroups + 1];
  const T* v[kChunkGroups + 1];
  uint8_t lo[kChunkGroups + 1], hi[kChunkGroups + 1], bits[kChunkGroups + 1];
};

template <class T>
inline void list_groups(const AttendArgs& a, Groups<T>& groups) {
  int n = 0;
  for (int i = 0; i < a.count; ++i) {
    const int logical = a.pages ? a.pages[a.first + i] : a.first + i;
    if (logical < 0) continue;
    const int start = logical * a.S;
    if (start >= a.end || start + a.S <= a.begin) continue;
    const int64_t offset = a.table[logical] * a.page_stride;
    for (int s = 0; s < a.S; s += kGroup) {
      const int lo = a.begin > start + s ? a.begin - start - s : 0;
      const int hi = a.end < start + s + kGroup ? a.end - start - s : kGroup;
      if (lo >= hi) continue;
      groups.k[n] = static_cast<const T*>(a.k) + offset + static_cast<int64_t>(s) * a.D;
      groups.v[n] = static_cast<const T*>(a.v) + offset + static_cast<int64_t>(s) * a.D;
      groups.lo[n] = static_cast<uint8_t>(lo), groups.hi[n] = static_cast<uint8_t>(hi);
      groups.bits[n] = static_cast<uint8_t>((0xffu << lo) & (0xffu >> (kGroup - hi)));
      ++n;
    }
  }
  groups.count = n;
  // A second half for the last vector of an odd count; its lanes are masked out.
  if (n > 0) groups.k[n] = groups.k[n - 1], groups.bits[n] = 0;
}

// Raw q·k of every token; slots that may not be read get -inf, whatever they hold.
template <class T>
inline void chunk_scores(const AttendArgs& a, const Groups<T>& groups, const void* q, [[maybe_unused]] bool pairs,
                         float* scores) {
  constexpr int kAhead = 4;
  constexpr unsigned all = (1u << W) - 1u;
  const int D = a.D, padded = pad_dim(D);
  const int64_t group_bytes = static_cast<int64_t>(kGroup) * D * sizeof(T);
  constexpr int step = W > kGroup ? W / kGroup : 1;
  const F scale = set1(a.scale);
  for (int g = 0; g < groups.count; g += step) {
    for (int i = 0; i < step; ++i)
      if (g + kAhead + i < groups.count) prefetch_bytes(groups.k[g + kAhead + i], group_bytes);
    for (int part = 0; part < (W < kGroup ? kGroup / W : 1); ++part) {
      const T* first = groups.k[g] + static_cast<int64_t>(part) * W * D;
      const T* second = groups.k[g + step - 1] - static_cast<int64_t>(step - 1) * kGroup * D;
      const auto row = [&](int i) { return (i < kGroup ? first : second) + static_cast<int64_t>(i) * D; };
      const unsigned bits = ((step == 1 ? 0u : groups.bits[g + step - 1] * 256u) | groups.bits[g]) >> (part * W) & all;
      for (int h = 0; h < a.G; ++h) {
        F s;
#if LEANROLL_DOT_BF16
        if constexpr (sizeof(T) == 2) {
          if (pairs)
            s = dot_rows_pairs(static_cast<const bf16*>(q) + h * padded, D, row);
          else
            s = dot_rows<T>(static_cast<const float*>(q) + h * padded, D, row);
        } else
#endif
          s = dot_rows<T>(static_cast<const float*>(q) + h * padded, D, row);
        s = mul(s, scale);
        if (bits != all) s = keep_bits(s, bits, -kInf);
        store(scores + h * kScoreStride + g * kGroup + part * W, s);
      }
    }
  }
}

// Scores → exp(score - m) in place; fills m and l.
inline void chunk_softmax(const AttendArgs& a, int tokens, float* scores) {
  for (int h = 0; h < a.G; ++h) {
    float* row = scores + h * kScoreStride;
    if (a.softcap > 0.0f) {
      const F cap = set1(a.softcap), inverse = set1(1.0f / a.softcap), lowest = set1(-kInf);
      for (int t = 0; t < tokens; t += W) {
        const F s = load(row + t);
        store(row + t, select_gt(s, lowest, mul(cap, tanh_vector(mul(s, inverse))), lowest));
      }
    }
    F top = set1(-kInf);
    for (int t = 0; t < tokens; t += W) top = vmax(load(row + t), top);
    a.m[h] = hmax(top);
    const F m = set1(a.m[h]);
    F sum = zero();
    for (int t = 0; t < tokens; t += W) {
      const F p = exp_nonpositive(sub(load(row + t), m));
      store(row + t, p);
      sum = add(sum, p);
    }
    a.l[h] = hsum(sum);
  }
}

// acc[h][tiles] += p * v over the groups [begin, end), for H heads and N tiles of 2W dimensions held in registers.
template <class T, int H, int N, bool kTail>
inline void add_values(const Groups<T>& groups, int begin, int end, int D, int d0, const float* p, float* acc, int padded) {
  F sum[H][N][2];
  for (int h = 0; h < H; ++h)
    for (int n = 0; n < N; ++n)
      sum[h][n][0] = load(acc + h * padded + n * 2 * W), sum[h][n][1] = load(acc + h * padded + n * 2 * W + W);
  for (int g = begin; g < end; ++g) {
    const T* rows = groups.v[g] + d0;
    const float* weights = p + g * kGroup;
    for (int t = groups.lo[g]; t < groups.hi[g]; ++t) {
      F v[N][2];
      for (int n = 0; n < N; ++n) {
        if (kTail)
          load2_n(rows + static_cast<int64_t>(t) * D + n * 2 * W, D - d0 - n * 2 * W, v[n][0], v[n][1]);
        else
          load2(rows + static_cast<int64_t>(t) * D + n * 2 * W, v[n][0], v[n][1]);
      }
      for (int h = 0; h < H; ++h) {
        const F w = set1(weights[h * kScoreStride + t]);
        for (int n = 0; n < N; ++n) {
          sum[h][n][0] = fma(w, v[n][0], sum[h][n][0]);
          sum[h][n][1] = fma(w, v[n][1], sum[h][n][1]);
        }
      }
    }
  }
  for (int h = 0; h < H; ++h)
    for (int n = 0; n < N; ++n)
      store(acc + h * padded + n * 2 * W, sum[h][n][0]), store(acc + h * padded + n * 2 * W + W, sum[h][n][1]);
}

template <class T, int N, bool kTail>
inline void add_values_heads(const Groups<T>& g, int begin, int end, int D, int d0, int G, const float* p, float* acc, int padded) {
  for (int h = 0; h < G;) {
    const float* ph = p + h * kScoreStride;
    float* out = acc + h * padded + d0;
    const int left = G - h;
    if (kHeadBlock >= 4 && left >= 4)
      add_values<T, 4, N, kTail>(g, begin, end, D, d0, ph, out, padded), h += 4;
    else if (kHeadBlock >= 4 && left == 3)
      add_values<T, 3, N, kTail>(g, begin, end, D, d0, ph, out, padded), h += 3;
    else if (left >= 2)
      add_values<T, 2, N, kTail>(g, begin, end, D, d0, ph, out, padded), h += 2;
    else
      add_values<T, 1, N, kTail>(g, begin, end, D, d0, ph, out, padded), h += 1;
  }
}

template <class T>
void attend(const AttendArgs& a) {
  Groups<T> groups;
  list_groups(a, groups);
  const int D = a.D, G = a.G, padded = pad_dim(D);
  std::memset(a.acc, 0, sizeof(float) * static_cast<size_t>(G) * padded);
  if (groups.count == 0) {
    for (int h = 0; h < G; ++h) a.m[h] = -kInf, a.l[h] = 0.0f;
    return;
  }
  float* scores = a.scratch;
  float* prepared = scores + static_cast<int64_t>(G) * kScoreStride;
  const bool pairs = kHasPairs && sizeof(T) == 2 && a.q_dtype == DType::bf16;
  for (int h = 0; h < G; ++h) {
    if (pairs) {
      bf16* row = reinterpret_cast<bf16*>(prepared) + h * padded;
      std::memset(row, 0, sizeof(bf16) * static_cast<size_t>(padded));
      std::memcpy(row, static_cast<const bf16*>(a.q) + h * D, sizeof(bf16) * static_cast<size_t>(D));
    } else if (a.q_dtype == DType::bf16) {
      tile_order<T>(static_cast<const bf16*>(a.q) + h * D, D, prepared + h * padded);
    } else {
      tile_order<T>(static_cast<const float*>(a.q) + h * D, D, prepared + h * padded);
    }
  }
  chunk_scores(a, groups, prepared, pairs, scores);
  const int tokens = (groups.count * kGroup + W - 1) / W * W;
  chunk_softmax(a, tokens, scores);

  constexpr int kBlock = 8;  // groups per pass over the dimensions: small enough to stay in the first-level cache
  constexpr int kAhead = 4;
  const int64_t group_bytes = static_cast<int64_t>(kGroup) * D * sizeof(T);
  for (int g = 0; g < groups.count && g < kAhead; ++g) prefetch_bytes(groups.v[g], group_bytes);
  for (int begin = 0; begin < groups.count; begin += kBlock) {
    const int end = begin + kBlock < groups.count ? begin + kBlock : groups.count;
    int d = 0;
    for (; kTileBlock > 1 && d + 4 * W <= D; d += 4 * W)
      add_values_heads<T, 2, false>(groups, begin, end, D, d, G, scores, a.acc, padded);
    for (; d + 2 * W <= D; d += 2 * W)
      add_values_heads<T, 1, false>(groups, begin, end, D, d, G, scores, a.acc, padded);
    if (d < D) add_values_heads<T, 1, true>(groups, begin, end, D, d, G, scores, a.acc, padded);
  }
  for (int h = 0; h < G; ++h)
    for (int d = 0; d < padded; d += 2 * W) {
      F x = load(a.acc + h * padded + d), y = load(a.acc + h * padded + d + W);
      natural(static_cast<const T*>(nullptr), x, y);
      store(a.acc + h * padded + d, x), store(a.acc + h * padded + d + W, y);
    }
}

void attend_entry(DType kv, const AttendArgs& args) {
  if (kv == DType::bf16)
    attend<bf16>(args);
  else
    attend<float>(args);
}

}  // namespace
}  // namespace leanroll
