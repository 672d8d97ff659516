// Quantised sub-landmarks: packing a full page's, and their products with queries. The layout is stated in kernels/landmarks.py.
#pragma once

namespace leanroll {
namespace {

constexpr float kSmallestScale = 1e-30f;

// x * inverse as whole numbers from -largest to largest.
inline void to_codes(const float* x, int n, float inverse, float largest, int8_t* codes) {
  const float magic = 12582912.0f;  // 1.5 * 2^23: adding it rounds to a whole number, ties to even
  for (int i = 0; i < n; ++i) {
    const float y = (x[i] * inverse + magic) - magic;
    codes[i] = static_cast<int8_t>(y > -largest ? (y < largest ? y : largest) : -largest);
  }
}

// memory: pack_scratch(D) floats. Every operation is done in the order of the Python code, so the bytes are the same.
template <class T>
void pack_landmark(const Scorer& scorer, const T* keys, uint8_t* out, int S, int D, float* memory) {
  const int R = scorer.rows, run = S / R, bits = scorer.bits(), tiles = scorer.tiles(D);
  const int padded = tiles * (kRunBytes * 8 / bits);
  const float largest = bits == 4 ? 7.0f : 127.0f;
  float* mean = memory;
  int8_t* codes = reinterpret_cast<int8_t*>(memory + padded);
  for (int d = D; d < padded; ++d) mean[d] = 0.0f;
  for (int r = 0; r < R; ++r) {
    const T* rows = keys + static_cast<int64_t>(r) * run * D;
    for (int d = 0; d < D; ++d) mean[d] = to_float(rows[d]);
    for (int s = 1; s < run; ++s)
      for (int d = 0; d < D; ++d) mean[d] += to_float(rows[static_cast<int64_t>(s) * D + d]);
    float top = 0.0f;
    for (int d = 0; d < D; ++d) {
      mean[d] /= static_cast<float>(run);
      const float a = std::fabs(mean[d]);
      top = a > top || a != a ? a : top;  // a NaN stays
    }
    bf16 stored;
    from_float(top / largest, stored);
    const float scale = to_float(stored), inverse = scale > kSmallestScale ? 1.0f / scale : 0.0f;
    to_codes(mean, padded, inverse, largest, codes);
    uint8_t* to = out + static_cast<int64_t>(r / kQuad) * tiles * kQuadTile + r % kQuad * kRunBytes;
    for (int t = 0; t < tiles; ++t, to += kQuadTile)
      for (int i = 0; i < kRunBytes; ++i)
        to[i] = static_cast<uint8_t>(bits == 4 ? (codes[t * 16 + i] & 15) | (codes[t * 16 + 8 + i] & 15) << 4 : codes[t * 8 + i]);
    std::memcpy(out + static_cast<int64_t>(R) * tiles * kRunBytes + r * 2, &stored, 2);
  }
}

// Whole numbers for x[0, n) in units of the scale returned, as landmarks.py's whole_queries has them; zeros up to `padded`.
inline float whole_query(const float* x, int n, int padded, int8_t* codes) {
  float top = 0.0f;
  for (int d = 0; d < n; ++d) {
    const float a = std::fabs(x[d]);
    top = a > top || a != a ? a : top;  // a NaN stays
  }
  const float scale = top / 127.0f, inverse = scale > kSmallestScale ? 1.0f / scale : 0.0f;
  to_codes(x, n, inverse, 127.0f, codes);
  for (int d = n; d < padded; ++d) codes[d] = 0;
  return scale;
}

// Codes of one quad as floats, dimensions in order: out[row * width + d].
inline void expand_quad(const uint8_t* codes, int tiles, int bits, int width, float* out) {
  for (int t = 0; t < tiles; ++t)
    for (int r = 0; r < kQuad; ++r) {
      const uint8_t* from = codes + t * kQuadTile + r * kRunBytes;
      float* to = out + r * width + t * (bits == 4 ? 16 : 8);
      if (bits == 4)
        for (int i = 0; i < kRunBytes; ++i) {
          const int byte = static_cast<int8_t>(from[i]);
          to[i] = static_cast<float>(static_cast<int8_t>(from[i] << 4) >> 4);
          to[kRunBytes + i] = static_cast<float>(byte >> 4);
        }
      else
        for (int i = 0; i < kRunBytes; ++i) to[i] = static_cast<float>(static_cast<int8_t>(from[i]));
    }
}

// Scales of four rows, times a factor.
inline void quad_scales(const void* scales, float factor, float* out) {
  bf16 x[kQuad];
  std::memcpy(x, scales, sizeof x);
  for (int i = 0; i < kQuad; ++i) out[i] = to_float(x[i]) * factor;
}

#if LEANROLL_DOT_BF16
// Products of four quads with H queries of bf16 pairs, x[h] = [tiles][low or high][8]; out[h * stride + 4 * quad + row].
template <int H>
void quad_products(const uint8_t* const* quads, int tiles, const bf16* x, int64_t x_stride, I low_values, I high_values,
                   F scale, float* out, int64_t stride) {
  F acc[H][4];
  for (int h = 0; h < H; ++h)
    for (int i = 0; i < 4; ++i) acc[h][i] = zero();
  for (int t = 0; t < tiles; ++t) {
    P low[H], high[H];
    for (int h = 0; h < H; ++h) low[h] = repeat_pairs(x + h * x_stride + t * 16), high[h] = repeat_pairs(x + h * x_stride + t * 16 + 8);
    for (int i = 0; i < 4; ++i) {
      const I codes = load_codes(quads[i] + t * kQuadTile);
      const P a = low_nibbles(codes, low_values), b = high_nibbles(codes, high_values);
      for (int h = 0; h < H; ++h) acc[h][i] = dot_pairs(dot_pairs(acc[h][i], low[h], a), high[h], b);
    }
  }
  for (int h = 0; h < H; ++h) store(out + h * stride, mul(quad_sums(acc[h]), scale));
}
#endif

// Where the quads of pages [first, first + count) and their scales are; returns how many. The last is repeated, for full vectors.
constexpr int kMaxQuads = kChunkRows / kQuad + kMaxLanes;
inline int list_quads(const ScoreArgs& a, int tiles, int first, int count, const uint8_t** quads, const uint8_t** scales) {
  const int per_page = a.scorer.rows / kQuad;
  const auto* base = static_cast<const uint8_t*>(a.rows);
  const int32_t* table = a.table;
  const int64_t page_stride = a.page_stride, fetch_bytes = a.fetch_bytes, quad_bytes = static_cast<int64_t>(tiles) * kQuadTile;
  const int end = first + count, last = a.read_end - a.ahead, ahead = a.ahead;
  int n = 0;
  if (first == a.read_begin)
    for (int p = first; p < first + ahead && p < a.read_end; ++p) prefetch_bytes(base + table[p] * page_stride, fetch_bytes);
  for (int p = first; p < end; ++p) {
    const uint8_t* page = base + table[p] * page_stride;
    if (p < last) prefetch_bytes(base + table[p + ahead] * page_stride, fetch_bytes);
    const uint8_t* page_scales = page + per_page * quad_bytes;
    for (int i = 0; i < per_page; ++i, ++n) quads[n] = page + i * quad_bytes, scales[n] = page_scales + i * kQuad * 2;
  }
  for (int i = 0; i < kMaxLanes / kQuad; ++i) quads[n + i] = quads[n - 1], scales[n + i] = scales[n - 1];
  return n;
}

// H queries against sub-landmarks: prepared once, then asked for the scaled products of a stretch of rows.
struct QuantisedProducts {
  const ScoreArgs& a;
  int H, bits, tiles, width, padded;
  bool pairs;
  float *x, *expanded;

  QuantisedProducts(const ScoreArgs& args, int first, int heads, float* memory) : a(args), H(heads) {
    bits = a.scorer.bits(), tiles = a.scorer.tiles(a.D), width = tiles * (bits == 4 ? 16 : 8), padded = pad_dim(tiles * 16);
    pairs = kHasPairs && a.q_dtype == DType::bf16;
    x = memory, expanded = x + static_cast<int64_t>(kScoreHeads) * padded;
    for (int h = 0; h < H; ++h) {
      const int64_t q = static_cast<int64_t>(first + h) * a.D;
      float* row = x + static_cast<int64_t>(h) * padded;
      const auto value = [&](int d) { return d < a.D ? element(a.q, a.q_dtype, q + d) : 0.0f; };
      if (!pairs) {
        for (int d = 0; d < padded; ++d) row[d] = value(d);
      } else if (bits == 4) {
        std::memset(row, 0, 2 * static_cast<size_t>(padded));
        std::memcpy(row, static_cast<const bf16*>(a.q) + q, 2 * static_cast<size_t>(a.D));
      } else {  // an int8 code is 16 times its high nibble plus its low one
        for (int t = 0; t < tiles; ++t)
          for (int i = 0; i < 8; ++i) {
            from_float(value(t * 8 + i), reinterpret_cast<bf16*>(row)[t * 16 + i]);
            from_float(value(t * 8 + i) * 16.0f, reinterpret_cast<bf16*>(row)[t * 16 + 8 + i]);
          }
      }
    }
  }

  // Rows of pages [first, first + count) → out[h * stride + row], valid up to the next multiple of 4 W.
  void operator()(int first, int count, float* out, int64_t stride) const {
    const uint8_t *quads[kMaxQuads], *scales[kMaxQuads];
    const int n = list_quads(a, tiles, first, count, quads, scales);
    const float factor = 1.0f / std::sqrt(static_cast<float>(a.D));
#if LEANROLL_DOT_BF16
    if (pairs) {
      const auto* rows = reinterpret_cast<const bf16*>(x);
      const I high = nibble_values(true), low = nibble_values(bits == 4);
      for (int i = 0; i < n; i += 4) {
        float* to = out + i * kQuad;
        const F scale = mul(gather_scales(scales + i), set1(factor));
        switch (H) {
          case 1: quad_products<1>(quads + i, tiles, rows, padded * 2, low, high, scale, to, stride); break;
          case 2: quad_products<2>(quads + i, tiles, rows, padded * 2, low, high, scale, to, stride); break;
          case 3: quad_products<3>(quads + i, tiles, rows, padded * 2, low, high, scale, to, stride); break;
          default: quad_products<4>(quads + i, tiles, rows, padded * 2, low, high, scale, to, stride); break;
        }
      }
      return;
    }
#endif
    for (int i = 0; i < n; i += W / kQuad) {
      float scale_of[W];
      for (int j = 0; j < W / kQuad; ++j) {
        expand_quad(quads[i + j], tiles, bits, width, expanded + static_cast<int64_t>(j) * kQuad * width);
        quad_scales(scales[i + j], factor, scale_of + j * kQuad);
      }
      const F scale = load(scale_of);
      for (int h = 0; h < H; ++h) {
        const float* row = x + static_cast<int64_t>(h) * padded;
        const F s = dot_rows<float>(row, width, [&](int j) { return expanded + static_cast<int64_t>(j) * width; });
        store(out + h * stride + i * kQuad, mul(s, scale));
      }
    }
  }
};

#if LEANROLL_DOT_INT4
// Products of W / 4 quads of int4 rows with H whole queries, q[h * q_stride]: [steps][low or high codes][kByteTiles][4 times 8].
// start[h]: what a sum begins with, since codes are taken 8 too high.
template <int H>
void whole_products(const uint8_t* const* quads, int steps, bool odd, const int8_t* q, int64_t q_stride, const C* start,
                    const float* q_scales, F scale, float* out, int64_t stride) {
  constexpr int kQuads = W / kQuad;
  C acc[H][kQuads];
  for (int h = 0; h < H; ++h)
    for (int i = 0; i < kQuads; ++i) acc[h][i] = start[h];
  for (int t = 0; t < steps; ++t, q += 2 * sizeof(C))
    for (int i = 0; i < kQuads; ++i) {
      const uint8_t* at = quads[i] + t * sizeof(C);
      const C codes = raised(odd && t + 1 == steps ? load_last_tile(at) : load_bytes(at));
      const C low = low_codes(codes), high = high_codes(codes);
      for (int h = 0; h < H; ++h)
        acc[h][i] = dot_codes(dot_codes(acc[h][i], low, load_bytes(q + h * q_stride)), high, load_bytes(q + h * q_stride + sizeof(C)));
    }
  for (int h = 0; h < H; ++h) store(out + h * stride, mul(row_sums(acc[h]), mul(scale, set1(q_scales[h]))));
}
#endif

// As QuantisedProducts for int4, with queries of whole numbers: out = sum of code * code, exact, times (row's scale * query's).
struct WholeProducts {
  const ScoreArgs& a;
  int H, tiles;
  int8_t* codes;  // [H][padded], in the order that the products want
  int64_t padded;
  float q_scales[kScoreHeads];
#if LEANROLL_DOT_INT4
  int steps;
  C start[kScoreHeads];
#endif

  WholeProducts(const ScoreArgs& args, int first, int heads, float* memory) : a(args), H(heads) {
    tiles = a.scorer.tiles(a.D);
    const int width = tiles * 16;
    int8_t* plain = reinterpret_cast<int8_t*>(memory);
    float* x = memory + pad_dim(width) / 4;
    codes = reinterpret_cast<int8_t*>(x + pad_dim(width));
#if LEANROLL_DOT_INT4
    steps = (tiles + kByteTiles - 1) / kByteTiles, padded = static_cast<int64_t>(steps) * 2 * sizeof(C);
#else
    padded = width;
#endif
    for (int h = 0; h < H; ++h) {
      const int64_t q = static_cast<int64_t>(first + h) * a.D;
      for (int d = 0; d < a.D; ++d) x[d] = element(a.q, a.q_dtype, q + d);
      q_scales[h] = whole_query(x, a.D, width, plain);
      int8_t* to = codes + h * padded;
#if LEANROLL_DOT_INT4
      C too_high = no_bytes();
      for (int s = 0; s < steps; ++s)
        for (int part = 0; part < 2; ++part, to += sizeof(C)) {
          for (int i = 0; i < kByteTiles; ++i)
            for (int r = 0; r < kQuad; ++r) {
              const int tile = s * kByteTiles + i;
              int8_t* run = to + i * kQuadTile + r * kRunBytes;
              if (tile < tiles)
                std::memcpy(run, plain + tile * 16 + part * kRunBytes, kRunBytes);
              else
                std::memset(run, 0, kRunBytes);
            }
          too_high = dot_codes(too_high, eights(), load_bytes(to));
        }
      start[h] = minus(no_bytes(), too_high);
#else
      std::memcpy(to, plain, static_cast<size_t>(width));
#endif
    }
  }

  // Rows of pages [first, first + count) → out[h * stride + row], valid up to the next multiple of 4 W.
  void operator()(int first, int count, float* out, int64_t stride) const {
    const uint8_t *quads[kMaxQuads], *scales[kMaxQuads];
    const int n = list_quads(a, tiles, first, count, quads, scales);
#if LEANROLL_DOT_INT4
    const bool odd = tiles % kByteTiles != 0;
    for (int i = 0; i < n; i += W / kQuad) {
      float* to = out + i * kQuad;
      const F scale = gather_scales(scales + i);
      switch (H) {
        case 1: whole_products<1>(quads + i, steps, odd, codes, padded, start, q_scales, scale, to, stride); break;
        case 2: whole_products<2>(quads + i, steps, odd, codes, padded, start, q_scales, scale, to, stride); break;
        case 3: whole_products<3>(quads + i, steps, odd, codes, padded, start, q_scales, scale, to, stride); break;
        default: whole_products<4>(quads + i, steps, odd, codes, padded, start, q_scales, scale, to, stride); break;
      }
    }
#else
    for (int i = 0; i < n; ++i) {
      float scale_of[kQuad];
      quad_scales(scales[i], 1.0f, scale_of);
      for (int h = 0; h < H; ++h)
        for (int r = 0; r < kQuad; ++r) {
          int32_t sum = 0;
          for (int t = 0; t < tiles; ++t) {
            const uint8_t* from = quads[i] + t * kQuadTile + r * kRunBytes;
            const int8_t* q = codes + h * padded + t * 16;
            for (int j = 0; j < kRunBytes; ++j)
              sum += (static_cast<int8_t>(from[j] << 4) >> 4) * q[j] + (static_cast<int8_t>(from[j]) >> 4) * q[kRunBytes + j];
          }
          out[h * stride + i * kQuad + r] = static_cast<float>(sum) * (scale_of[r] * q_scales[h]);
        }
    }
#endif
  }
};

}  // namespace
}  // namespace leanroll
