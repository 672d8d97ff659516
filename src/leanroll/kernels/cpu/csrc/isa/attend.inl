// Decode attention over one chunk of pages: scores of all its tokens, softmax statistics, weighted sum of values.
#pragma once

namespace leanroll {
namespace {

// Eight consecutive tokens of a page, of which [lo, hi) may be read. Pointers are to the first KV head of the item.
template <class T>
struct Groups {
  int count = 0;
  const T* k[kChunkGroups + 1];
  const T* v[kChunkGroups + 1];
  uint8_t lo[kChunkGroups + 1], hi[kChunkGroups + 1], bits[kChunkGroups + 1];
};

// Memory is asked for in the order in which it lies (page by page, all heads), some way ahead of its use, since the
// order of use (head by head) defeats the hardware's prefetcher.
struct Stream {
  const char* pages[2 * kChunkGroups + kNextPages];
  int count = 0, page = 0;
  int64_t page_bytes = 0, offset = 0;

  void ask(int64_t bytes) {
    while (bytes > 0 && page < count) {
      const int64_t left = page_bytes - offset, now = bytes < left ? bytes : left;
      const char* p = pages[page] + offset;
      for (int64_t i = 0; i < now; i += 64) __builtin_prefetch(p + i, 0, kFetch);
      bytes -= now, offset += now;
      if (offset == page_bytes) ++page, offset = 0;
    }
  }
};

template <class T>
inline void list_groups(const AttendArgs& a, Groups<T>& groups, Stream& stream) {
  int n = 0, pages = 0;
  const T* values[kChunkGroups];
  for (int i = 0; i < a.count; ++i) {
    const int logical = a.pages ? a.pages[a.first + i] : a.first + i;
    if (logical < 0) continue;
    const int start = logical * a.S;
    if (start >= a.end || start + a.S <= a.begin) continue;
    const int64_t offset = a.table[logical] * a.page_stride;
    const T* k = static_cast<const T*>(a.k) + offset;
    const T* v = static_cast<const T*>(a.v) + offset;
    stream.pages[pages] = reinterpret_cast<const char*>(k), values[pages] = v, ++pages;
    for (int s = 0; s < a.S; s += kGroup) {
      const int lo = a.begin > start + s ? a.begin - start - s : 0;
      const int hi = a.end < start + s + kGroup ? a.end - start - s : kGroup;
      if (lo >= hi) continue;
      groups.k[n] = k + static_cast<int64_t>(s) * a.D, groups.v[n] = v + static_cast<int64_t>(s) * a.D;
      groups.lo[n] = static_cast<uint8_t>(lo), groups.hi[n] = static_cast<uint8_t>(hi);
      groups.bits[n] = static_cast<uint8_t>((0xffu << lo) & (0xffu >> (kGroup - hi)));
      ++n;
    }
  }
  groups.count = n;
  // A second half for the last vector of an odd count; its lanes are masked out.
  if (n > 0) groups.k[n] = groups.k[n - 1], groups.bits[n] = 0;

  for (int i = 0; i < pages; ++i) stream.pages[pages + i] = reinterpret_cast<const char*>(values[i]);
  stream.count = 2 * pages;
  for (int i = 0; i < a.num_next; ++i) stream.pages[stream.count++] = static_cast<const char*>(a.next[i]);
  stream.page_bytes = static_cast<int64_t>(a.H) * a.S * a.D * static_cast<int64_t>(sizeof(T));
}

// Raw q·k of every token; slots that may not be read get -inf, whatever they hold.
// kDim: the head dimension where it is known at compile time, which spares address arithmetic; 0 otherwise.
template <class T, bool kPairs, int kDim>
void chunk_scores(const AttendArgs& a, const Groups<T>& groups, Stream& stream, const void* q, float* scores) {
  constexpr unsigned all = (1u << W) - 1u;
  constexpr int step = W > kGroup ? W / kGroup : 1, parts = W < kGroup ? kGroup / W : 1;
  const int D = kDim ? kDim : a.D, padded = pad_dim(D);
  const int64_t group_bytes = static_cast<int64_t>(kGroup) * D * static_cast<int64_t>(sizeof(T));
  const int block = a.H == 1 ? groups.count : kBlockGroups;
  const F scale = set1(a.scale);
  for (int begin = 0; begin < groups.count; begin += block) {
    const int end = begin + block < groups.count ? begin + block : groups.count;
    for (int head = 0; head < a.H; ++head) {
      const int64_t shift = static_cast<int64_t>(head) * a.S * D;
      for (int g = begin; g < end; g += step) {
        stream.ask(step * group_bytes);
        for (int part = 0; part < parts; ++part) {
          const T* first = groups.k[g] + shift + static_cast<int64_t>(part) * W * D;
          const T* second = groups.k[g + step - 1] + shift - static_cast<int64_t>(step - 1) * kGroup * D;
          const T* rows[W];
          if constexpr (kDim == 0)
            for (int i = 0; i < W; ++i) rows[i] = (i < kGroup ? first : second) + static_cast<int64_t>(i) * D;
          const auto row = [&](int i) {
            if constexpr (kDim == 0) return rows[i];
            return (i < kGroup ? first : second) + static_cast<int64_t>(i) * D;
          };
          const unsigned last = step == 1 ? 0u : groups.bits[g + step - 1] * 256u;
          const unsigned bits = (last | groups.bits[g]) >> (part * W) & all;
          for (int h = head * a.G; h < (head + 1) * a.G; ++h) {
            F s;
#if LEANROLL_DOT_BF16
            if constexpr (kPairs)
              s = dot_rows_pairs(static_cast<const bf16*>(q) + h * padded, D, row);
            else
#endif
              s = dot_rows<T>(static_cast<const float*>(q) + h * padded, D, row);
            s = mul(s, scale);
            if (bits != all) s = keep_bits(s, bits, -kInf);
            store(scores + h * kScoreStride + g * kGroup + part * W, s);
          }
        }
      }
    }
  }
}

// Scores → exp(score - m) in place; fills m and l.
inline void chunk_softmax(const AttendArgs& a, int tokens, float* scores) {
  for (int h = 0; h < a.H * a.G; ++h) {
    float* row = scores + h * kScoreStride;
    if (a.softcap > 0.0f) {
      const F cap = set1(a.softcap), inverse = set1(1.0f / a.softcap), lowest = set1(-kInf);
      for (int t = 0; t < tokens; t += W) {
        const F s = load(row + t);
        store(row + t, select_gt(lowest, s, s, select_gt(s, lowest, mul(cap, tanh_vector(mul(s, inverse))), s)));
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
template <class T, int H, int N, bool kTail, int kDim>
inline void add_values(const AttendArgs& a, const Groups<T>& groups, Stream* stream, int begin, int end, int head, int d0,
                       const float* p, float* acc) {
  const int D = kDim ? kDim : a.D, padded = pad_dim(D);
  const int64_t shift = static_cast<int64_t>(head) * a.S * D + d0;
  const int64_t group_bytes = static_cast<int64_t>(kGroup) * D * static_cast<int64_t>(sizeof(T));
  F sum[H][N][2];
  for (int h = 0; h < H; ++h)
    for (int n = 0; n < N; ++n)
      sum[h][n][0] = load(acc + h * padded + n * 2 * W), sum[h][n][1] = load(acc + h * padded + n * 2 * W + W);
  for (int g = begin; g < end; ++g) {
    if (stream) stream->ask(group_bytes);
    const T* rows = groups.v[g] + shift;
    const float* weights = p + g * kGroup;
    const auto token = [&](int t) {
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
    };
    for (int t = groups.lo[g]; t < groups.hi[g]; ++t) token(t);
  }
  for (int h = 0; h < H; ++h)
    for (int n = 0; n < N; ++n)
      store(acc + h * padded + n * 2 * W, sum[h][n][0]), store(acc + h * padded + n * 2 * W + W, sum[h][n][1]);
}

template <class T, int N, bool kTail, int kDim>
inline void add_values_heads(const AttendArgs& a, const Groups<T>& groups, Stream* stream, int begin, int end, int head, int d0,
                             const float* p, float* acc) {
  const int padded = pad_dim(kDim ? kDim : a.D);
  for (int h = 0; h < a.G;) {
    const float* ph = p + (head * a.G + h) * kScoreStride;
    float* out = acc + (head * a.G + h) * padded + d0;
    const int left = a.G - h;
    if (kHeadBlock >= 4 && left >= 4)
      add_values<T, 4, N, kTail, kDim>(a, groups, stream, begin, end, head, d0, ph, out), h += 4;
    else if (kHeadBlock >= 4 && left == 3)
      add_values<T, 3, N, kTail, kDim>(a, groups, stream, begin, end, head, d0, ph, out), h += 3;
    else if (left >= 2)
      add_values<T, 2, N, kTail, kDim>(a, groups, stream, begin, end, head, d0, ph, out), h += 2;
    else
      add_values<T, 1, N, kTail, kDim>(a, groups, stream, begin, end, head, d0, ph, out), h += 1;
    stream = nullptr;  // the next heads read the same rows
  }
}

template <class T, int kDim>
void chunk_values(const AttendArgs& a, const Groups<T>& groups, Stream& stream, const float* p) {
  const int D = kDim ? kDim : a.D;
  // Accumulators of one head stay in registers for a block. With wide rows a block is short enough for the first-level cache,
  // since it is read once per tile of dimensions.
  const int block = a.H > 1 ? kBlockGroups : D > 64 ? kBlockGroups * 4 : groups.count;
  for (int begin = 0; begin < groups.count; begin += block) {
    const int end = begin + block < groups.count ? begin + block : groups.count;
    for (int head = 0; head < a.H; ++head) {
      Stream* ask = &stream;
      int d = 0;
      for (; kTileBlock > 1 && d + 4 * W <= D; d += 4 * W, ask = nullptr)
        add_values_heads<T, 2, false, kDim>(a, groups, ask, begin, end, head, d, p, a.acc);
      for (; d + 2 * W <= D; d += 2 * W, ask = nullptr)
        add_values_heads<T, 1, false, kDim>(a, groups, ask, begin, end, head, d, p, a.acc);
      if (d < D) add_values_heads<T, 1, true, kDim>(a, groups, ask, begin, end, head, d, p, a.acc);
    }
  }
}

template <class T, int kDim>
void attend(const AttendArgs& a) {
  constexpr bool kPairs = kHasPairs && sizeof(T) == 2;
  Groups<T> groups;
  Stream stream;
  list_groups(a, groups, stream);
  const int D = kDim ? kDim : a.D, heads = a.H * a.G, padded = pad_dim(D);
  std::memset(a.acc, 0, sizeof(float) * static_cast<size_t>(heads) * padded);
  if (groups.count == 0) {
    for (int h = 0; h < heads; ++h) a.m[h] = -kInf, a.l[h] = 0.0f;
    return;
  }
  // One block of all heads, and more: enough to cover the latency of memory and of address translation.
  stream.ask((a.H * kBlockGroups + kAheadGroups) * static_cast<int64_t>(kGroup) * D * static_cast<int64_t>(sizeof(T)));
  float* scores = a.scratch;
  float* prepared = scores + static_cast<int64_t>(heads) * kScoreStride;
  const bool pairs = kPairs && a.q_dtype == DType::bf16;
  for (int h = 0; h < heads; ++h) {
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
  if (pairs)
    chunk_scores<T, kPairs, kDim>(a, groups, stream, prepared, scores);
  else
    chunk_scores<T, false, kDim>(a, groups, stream, prepared, scores);
  chunk_softmax(a, (groups.count * kGroup + W - 1) / W * W, scores);
  chunk_values<T, kDim>(a, groups, stream, scores);
  for (int h = 0; h < heads; ++h)
    for (int d = 0; d < padded; d += 2 * W) {
      F x = load(a.acc + h * padded + d), y = load(a.acc + h * padded + d + W);
      natural(static_cast<const T*>(nullptr), x, y);
      store(a.acc + h * padded + d, x), store(a.acc + h * padded + d + W, y);
    }
}

void attend_entry(DType kv, const AttendArgs& a) {
  if (kv == DType::bf16)
    a.D == 64 ? attend<bf16, 64>(a) : a.D == 128 ? attend<bf16, 128>(a) : attend<bf16, 0>(a);
  else
    a.D == 64 ? attend<float, 64>(a) : a.D == 128 ? attend<float, 128>(a) : attend<float, 0>(a);
}

}  // namespace
}  // namespace leanroll
