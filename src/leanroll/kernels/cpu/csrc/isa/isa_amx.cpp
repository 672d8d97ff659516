// AVX-512 with BF16, and tile products (AMX) of bf16 weights: Xeon from the fourth generation on.
#include "simd_avx512.h"

namespace leanroll {
namespace {

// A tile is 16 rows of 64 bytes. Weights are read where they lie, 16 rows of 32; inputs are laid out once per call as the other
// factor: pairs of K in rows, inputs in columns. A product is thus [weight row, input].
constexpr int kSide = 16, kDepth = 32;
constexpr int64_t kTileElements = kSide * kDepth;
constexpr int kAheadRows = 2 * kSide;  // weights are asked for this many rows ahead: the next item's

int tiles_of(int n, int size) { return (n + size - 1) / size; }

// The shape of the tile registers while it lives. Other libraries on this thread find theirs again.
class TileShape {
 public:
  TileShape() {
    _tile_storeconfig(before_);
    alignas(64) uint8_t config[64] = {};
    config[0] = 1;  // palette
    for (int i = 0; i < 8; ++i) config[16 + 2 * i] = 64, config[48 + i] = kSide;  // bytes per row, rows
    _tile_loadconfig(config);
  }
  ~TileShape() {
    if (before_[0])
      _tile_loadconfig(before_);
    else
      _tile_release();
  }
  TileShape(const TileShape&) = delete;
  TileShape& operator=(const TileShape&) = delete;

 private:
  alignas(64) uint8_t before_[64];
};

void prepare_rows(DType x, const void* src, DType w, void* dst, int64_t dst_stride, int M, int K) {
  if (x != DType::bf16 || w != DType::bf16) return avx512_table()->prepare_rows(x, src, w, dst, dst_stride, M, K);
  const bf16* rows = static_cast<const bf16*>(src);
  float* out = static_cast<float*>(dst);
  for (int m = 0; m < M; m += kSide)
    for (int k = 0; k < K; k += kDepth, out += kTileElements / 2) {
      alignas(64) float pairs[kSide * kSide] = {};
      for (int i = 0; i < kSide && m + i < M; ++i)
        _mm512_store_si512(pairs + i * kSide,
                           _mm512_maskz_loadu_epi16(first_halves(K - k), rows + static_cast<int64_t>(m + i) * K + k));
      transpose_tile(pairs, kSide, out);
    }
}

// What a tile register loads: weights in place, or a padded copy at the matrix's edges.
struct WeightTile {
  const bf16* at;
  int64_t stride;
  alignas(64) bf16 copy[kTileElements];

  void point(const bf16* w, int rows, int depth, int K) {
    at = w, stride = K;
    if (rows == kSide && depth == kDepth) return;
    for (int i = 0; i < kSide; ++i)
      _mm512_store_si512(copy + i * kDepth,
                         i < rows ? _mm512_maskz_loadu_epi16(first_halves(depth), w + static_cast<int64_t>(i) * K) : _mm512_setzero_si512());
    at = copy, stride = kDepth;
  }
};

inline void fetch_ahead(const bf16* w, int K) {
  for (int i = 0; i < kSide; ++i) __builtin_prefetch(w + static_cast<int64_t>(kAheadRows + i) * K, 0, 2);
}

// Sums of 16 weight rows and 16 inputs, [weight row, input], to y[input][weight row].
inline void put(const float* sums, const DotArgs& a, int n, int m) {
  alignas(64) float by_input[kSide * kSide];
  transpose_tile(sums, kSide, by_input);
  const __mmask16 lanes = first_lanes(a.end - n);
  for (int i = 0; i < kSide && m + i < a.M; ++i)
    _mm512_mask_storeu_ps(a.y + (m + i) * a.y_stride_m + n - a.begin, lanes, _mm512_load_ps(by_input + i * kSide));
}

// Up to 32 weight rows from n on and up to 32 inputs from m on. Every sum walks over K in the same order, whatever else is there.
void block(const DotArgs& a, int n, int m) {
  const bool two_rows = n + kSide < a.end, two_inputs = m + kSide < a.M;
  const int steps = tiles_of(a.K, kDepth);
  const bf16* x = static_cast<const bf16*>(a.x) + static_cast<int64_t>(m / kSide) * steps * kTileElements;
  const bf16* w = static_cast<const bf16*>(a.w) + static_cast<int64_t>(n) * a.K;
  WeightTile first, second;
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (int step = 0; step < steps; ++step, w += kDepth, x += kTileElements) {
    const int depth = a.K - step * kDepth < kDepth ? a.K - step * kDepth : kDepth;
    first.point(w, a.end - n < kSide ? a.end - n : kSide, depth, a.K);
    _tile_loadd(4, first.at, first.stride * 2);
    _tile_loadd(6, x, 2 * kDepth);
    _tile_dpbf16ps(0, 4, 6);
    if (two_rows) {
      const bf16* below = w + static_cast<int64_t>(kSide) * a.K;
      second.point(below, a.end - n - kSide < kSide ? a.end - n - kSide : kSide, depth, a.K);
      _tile_loadd(5, second.at, second.stride * 2);
      _tile_dpbf16ps(1, 5, 6);
      if (m == 0) fetch_ahead(below, a.K);
    }
    if (two_inputs) {
      _tile_loadd(7, x + steps * kTileElements, 2 * kDepth);
      _tile_dpbf16ps(2, 4, 7);
      if (two_rows) _tile_dpbf16ps(3, 5, 7);
    }
    if (m == 0) fetch_ahead(w, a.K);
  }
  alignas(64) float sums[kSide * kSide];
  _tile_stored(0, sums, 4 * kSide);
  put(sums, a, n, m);
  if (two_rows) {
    _tile_stored(1, sums, 4 * kSide);
    put(sums, a, n + kSide, m);
  }
  if (two_inputs) {
    _tile_stored(2, sums, 4 * kSide);
    put(sums, a, n, m + kSide);
  }
  if (two_rows && two_inputs) {
    _tile_stored(3, sums, 4 * kSide);
    put(sums, a, n + kSide, m + kSide);
  }
}

void dot(const DotArgs& a) {
  if (a.w_dtype != DType::bf16) return avx512_table()->dot(a);
  const TileShape shape;
  for (int m = 0; m < a.M; m += 2 * kSide)
    for (int n = a.begin; n < a.end; n += 2 * kSide) block(a, n, m);
}

}  // namespace

const IsaTable* amx_table() {
  static const IsaTable table = [] {
    IsaTable t = *avx512_table();
    t.name = "amx_bf16", t.prepare_rows = prepare_rows, t.dot = dot;
    return t;
  }();
  return &table;
}

}  // namespace leanroll
