// Raw-pointer kernels. No torch, no Python: every tensor is a pointer and its sizes.
//
// Legend: B sequences, Hq query heads, Hk KV heads, G = Hq / Hk, D head dimension, S tokens per page (a multiple of 8),
// N logical pages of a sequence. Pools are [P, Hk, S, D], landmarks [P, Hk, landmark_bytes]; both contiguous.
//
// Three levels: `isa/*.inl` are single-threaded work items, compiled once per instruction set into an `IsaTable`;
// `decode.cpp` and `linear.cpp` cut the work into items and run them on threads; `binding.cpp` takes Python integers.
#pragma once

#include <cstdint>

namespace leanroll {

struct bf16 {
  uint16_t bits;
};

enum class DType : int { f32 = 0, bf16 = 1 };
inline int64_t size_of(DType t) { return t == DType::f32 ? 4 : 2; }

enum class ScorerKind : int { none = 0, mean = 1, softmax = 2, minmax = 3, int4 = 4, int8 = 5, oracle = 6, peak = 7 };

// Layout of quantised sub-landmarks, see kernels/landmarks.py.
constexpr int kQuad = 4, kRunBytes = 8;       // rows side by side, bytes of each per tile
constexpr int kQuadTile = kQuad * kRunBytes;  // bytes

// What queries are multiplied with: `rows` per page.
struct Scorer {
  ScorerKind kind;
  int rows;

  bool quantised() const { return kind == ScorerKind::int4 || kind == ScorerKind::int8 || kind == ScorerKind::peak; }
  int bits() const { return kind == ScorerKind::int8 ? 8 : 4; }
  int tiles(int D) const { return (D * bits() + kRunBytes * 8 - 1) / (kRunBytes * 8); }
  // Bytes of one (page, KV head).
  int64_t landmark_bytes(DType kv, int D) const {
    if (quantised()) return static_cast<int64_t>(rows) * (tiles(D) * kRunBytes + 2);
    if (kind == ScorerKind::oracle) return 0;
    return (kind == ScorerKind::minmax ? 2 : 1) * D * size_of(kv);
  }
};

// Tokens that one attention work item reads at most. The cut depends on the sequence alone, never on the batch or the
// number of threads, so that a sequence's result does not either.
constexpr int kChunkTokens = 512;
constexpr int kGroup = 8;  // tokens handled together; divides every page size
constexpr int kChunkGroups = kChunkTokens / kGroup;
constexpr int kScoreStride = kChunkTokens + 16;  // floats per head in the score buffer of a work item
constexpr int kBlockGroups = 2;   // groups that one of several KV heads takes before the next head does
constexpr int kAheadGroups = 16;  // how far ahead memory is asked for
constexpr int kNextPages = 8;  // pages of the next item that may be fetched early
constexpr int kDimPad = 32;                      // dimensions are padded to this in scratch rows

inline int pad_dim(int d) { return (d + kDimPad - 1) / kDimPad * kDimPad; }

// One chunk of one sequence, for H neighbouring KV heads (all of them on a dense layer, one where each selects its own
// pages): softmax statistics and unnormalised output of H * G query heads.
struct AttendArgs {
  const void* k;  // pool, already offset to the first KV head
  const void* v;
  int64_t page_stride;  // elements from page to page
  const void* q;        // [H * G, D]
  DType q_dtype;
  int H, G, D, S;
  float scale, softcap;
  const int32_t* table;  // logical page → physical page
  const int32_t* pages;  // logical pages of the chunk, -1 skipped; null: the range starting at `first`
  int first, count;
  int begin, end;  // token positions that may be read
  float* m;        // [H * G] maximum score, -inf when nothing was read
  float* l;        // [H * G] sum of exp(score - m)
  float* acc;      // [H * G, pad_dim(D)] sum of exp(score - m) * v
  float* scratch;  // attend_scratch(H * G, D) floats
  const void* const* next;  // first pages of what this thread does next
  int num_next;
};
inline int64_t attend_scratch(int heads, int D) { return static_cast<int64_t>(heads) * (kScoreStride + pad_dim(D)) + 64; }

// Scores of the candidate pages [begin, end) of one (sequence, KV head).
struct ScoreArgs {
  Scorer scorer;
  const void* q;  // [G, D]
  DType q_dtype;
  int G, D;
  const void* rows;     // landmarks, or for the oracle keys; offset to the KV head
  int64_t page_stride;  // bytes from page to page
  int64_t fetch_bytes;  // of a page's landmark
  int ahead;            // pages to fetch ahead
  const int32_t* table;
  int begin, end;
  int read_begin, read_end;  // pages whose rows are read; more than the candidates for the oracle
  int num_tokens;            // in the cache
  float* out;      // [N]; only [begin, end) is written
  float* scratch;  // score_scratch(D, N) floats
};
constexpr int kScoreHeads = 4;   // query heads that are multiplied with a sub-landmark while it is in registers
constexpr int kChunkRows = 512;  // sub-landmarks whose products are kept; a page of more tokens would not fit
constexpr int kMaxLanes = 16;
inline int64_t pack_scratch(int D) { return 2 * static_cast<int64_t>(pad_dim(D)) + 64; }
inline int64_t score_scratch(int D, int N) {
  const int64_t queries = (kScoreHeads + kMaxLanes + 2) * static_cast<int64_t>(pad_dim(2 * D));
  const int64_t products = kScoreHeads * (kChunkRows + 8ll * kMaxLanes);
  const int64_t pages = kScoreHeads * (3ll * N + 12 * kMaxLanes);
  return queries + products + pages;
}

// Rows [begin, end) of y[m][n] = sum_k x[m][k] * w[n][k].
struct DotArgs {
  const void* w;  // [N, K]
  DType w_dtype;
  const void* x;      // rows as laid out by `prepare_rows`
  int64_t x_stride;   // bytes from row to row
  int M, K;
  int begin, end;
  float* y;            // y[m * y_stride_m + n - begin]
  int64_t y_stride_m;
};

// The same for a short K (an adapter's rank) on plain float rows. `y` has room for full vectors: its rows are a multiple of 16 long.
struct ExpandArgs {
  const void* w;  // [N, K]
  DType w_dtype;
  const float* x;
  int64_t x_stride;  // floats from row to row
  int M, K;
  int begin, end;
  float* y;  // y[m * y_stride + n - begin]
  int64_t y_stride;
};

// n outputs of one input row: out = y + bias, and with an adapter + scaling * delta, rounded as separate modules would.
struct FinishArgs {
  DType dtype, lora_dtype, out_dtype;  // of x and bias, of the adapter, of out
  const float* y;
  const float* delta;  // null: no adapter
  float scaling;
  const void* bias;  // null: none
  void* out;
  int n;
};

// Inputs are multiplied up to 16 at a time.
inline int prepared_rows(int M) { return (M + 15) / 16 * 16; }

struct IsaTable {
  const char* name;
  void (*attend)(DType kv, const AttendArgs&);
  void (*score)(DType kv, const ScoreArgs&);
  // The k best of scores[begin, end), ascending page ids; ties go to the earlier page. keys: end - begin + 16 words.
  void (*select)(const float* scores, int begin, int end, int k, int32_t* out, uint32_t* keys);
  // Of one (page, KV head), all S keys of which are cached. memory: pack_scratch(D) floats.
  void (*landmark)(DType kv, const Scorer&, const void* page, void* out, int S, int D, float* memory);
  void (*convert)(DType from, const void* src, DType to, void* dst, int64_t n);
  // Lays x[M, K] out for `dot` against weights of a dtype. dst: rows of dst_stride bytes, as many as `prepared_rows` says.
  void (*prepare_rows)(DType x, const void* src, DType w, void* dst, int64_t dst_stride, int M, int K);
  void (*dot)(const DotArgs&);
  void (*expand)(const ExpandArgs&);
  void (*finish)(const FinishArgs&);
  void (*rms_norm)(DType t, const void* x, const void* w, void* y, int H, float eps, float offset, bool float_weight);
  void (*silu_mul)(DType t, const void* gate, const void* up, void* y, int64_t n);
  void (*rope)(DType t, const void* x, const void* cos, const void* sin, void* y, int H, int D);
  // Maximum of x[0, n) and the sum of exp((x - maximum) * inv_temperature).
  void (*exp_sum)(const float* x, int n, float inv_temperature, float* maximum, double* sum);
  void (*exp_values)(const float* x, int n, float inv_temperature, float maximum, float* out);
};

const IsaTable* portable_table();
#ifdef LEANROLL_X86
const IsaTable* avx2_table();
const IsaTable* avx512_table();
#endif
#ifdef LEANROLL_AMX
const IsaTable* amx_table();
#endif

// Instruction sets this machine can run, best first.
int available_isas(const IsaTable** out, int capacity);
const IsaTable& isa();
bool set_isa(const char* name);  // false: unknown, or this machine cannot run it

struct Batch {
  int B, Hq, Hk, D, S, max_pages;
  const int32_t* table;    // [B, max_pages]
  const int32_t* lengths;  // [B]
  const int32_t* budgets;  // [B]
  int first_pages, last_pages;
};

struct Pool {
  DType dtype;
  void* k;
  void* v;
  void* landmarks;  // null on a dense layer
};

struct Attention {
  float scale, softcap;
  int window;
};

void write_kv(const Pool& pool, int Hk, int D, int S, DType src, const void* k, const void* v, const int64_t* slots,
              int64_t T, int threads);
void update_landmarks(const Pool& pool, const Scorer& scorer, int Hk, int D, int S, const int32_t* pages, int64_t n, int threads);
void score_pages(const Pool& pool, const Batch& batch, DType q_dtype, const void* q, const Scorer& scorer, float* out, int threads);
void select_pages(const float* scores, const Batch& batch, int32_t* out, int width, int threads);
void decode_attention(const Pool& pool, const Batch& batch, DType q_dtype, const void* q, const int32_t* selected, int width,
                      const Attention& attention, void* out, int threads);
// q, k, v and out share a dtype. selected_out: [B, Hk, width] or null.
void decode_layer(const Pool& pool, const Batch& batch, DType q_dtype, const void* q, const void* k, const void* v,
                  const Scorer& scorer, const Attention& attention, int32_t* selected_out, int width, void* out, int threads);

constexpr int kMaxLinearRows = 64;
constexpr int kMaxRank = 1024;

struct Linear {
  const void* weight;  // [N, K], dtype of x
  const void* bias;    // [N] or null
  int N;
  const void* lora_a;  // [r, K] or null
  const void* lora_b;  // [N, r]
  DType lora_dtype;
  int rank;
  float scaling;
  void* out;  // [M, N], dtype of all outputs
};
void linear_group(DType dtype, const void* x, int M, int K, const Linear* linears, int count, DType out_dtype, int threads);
void rms_norm(DType dtype, const void* x, const void* w, void* y, int M, int H, float eps, float offset, bool float_weight,
              int threads);
void silu_mul(DType dtype, const void* gate, const void* up, void* y, int64_t n, int threads);
void rope(DType dtype, const void* x, const void* cos, const void* sin, void* y, int B, int H, int D, int threads);
// Returns the first row whose logits have no finite maximum or sum, or -1.
int sample_rows(const float* logits, int B, int V, const double* u, float temperature, int64_t* ids, float* logprobs, int threads);
// Sums n floats; for measuring read bandwidth.
double read_sum(const float* data, int64_t n, int threads);

}  // namespace leanroll
