// Small-batch products, row-wise functions and sampling: work items on threads.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "kernels.h"
#include "parallel.h"

namespace leanroll {
namespace {

enum Slot { kRows = 0, kLora = 1, kSegments = 0 };
constexpr int kBlock = 32;           // weight rows per item
constexpr int kSegment = 2048;       // vocabulary entries per item of the sampler
constexpr int64_t kSerialBytes = 1 << 16;  // less work than this is done by the calling thread alone

float to_float(DType t, const void* p, int64_t i) {
  if (t == DType::f32) return static_cast<const float*>(p)[i];
  float out;
  isa().convert(DType::bf16, static_cast<const bf16*>(p) + i, DType::f32, &out, 1);
  return out;
}

void round_in_place(DType t, float* x, int64_t n, void* memory) {
  if (t == DType::f32) return;
  isa().convert(DType::f32, x, t, memory, n);
  isa().convert(t, memory, DType::f32, x, n);
}

int64_t row_bytes(int K) { return static_cast<int64_t>(pad_dim(K)) * 4; }

const char* bytes(const void* p) { return static_cast<const char*>(p); }
char* bytes(void* p) { return static_cast<char*>(p); }

}  // namespace

void linear_group(DType dtype, const void* x, int M, int K, const Linear* linears, int count, DType out_dtype, int threads) {
  // Input rows prepared for the weights, and once per dtype of adapters.
  char* rows = static_cast<char*>(scratch(kRows, 3 * M * row_bytes(K)));
  isa().prepare_rows(dtype, x, dtype, rows, row_bytes(K), M, K);
  char* lora_rows[2] = {nullptr, nullptr};
  lora_rows[static_cast<int>(dtype)] = rows;
  bool any_lora = false;
  int64_t blocks = 0, ranks = 0, weight_bytes = 0, lora_floats = 0;
  for (int i = 0; i < count; ++i) {
    const Linear& linear = linears[i];
    blocks += (linear.N + kBlock - 1) / kBlock;
    weight_bytes += static_cast<int64_t>(linear.N) * K * size_of(dtype);
    if (!linear.lora_a) continue;
    any_lora = true;
    ranks += (linear.rank + kBlock - 1) / kBlock;
    lora_floats += 2 * M * (row_bytes(linear.rank) / 4);
    char*& prepared = lora_rows[static_cast<int>(linear.lora_dtype)];
    if (!prepared) {
      prepared = rows + (1 + static_cast<int>(linear.lora_dtype)) * M * row_bytes(K);
      if (dtype == DType::f32 && linear.lora_dtype == DType::bf16) {  // the adapter computes in bf16: round the input first
        bf16* rounded = static_cast<bf16*>(scratch(2, static_cast<int64_t>(M) * K * 2));
        isa().convert(DType::f32, x, DType::bf16, rounded, static_cast<int64_t>(M) * K);
        isa().prepare_rows(DType::bf16, rounded, DType::bf16, prepared, row_bytes(K), M, K);
      } else {
        isa().prepare_rows(dtype, x, linear.lora_dtype, prepared, row_bytes(K), M, K);
      }
    }
  }
  // Per adapter: A x as floats [M, rank], then the same prepared for B.
  float* lora = any_lora ? static_cast<float*>(scratch(kLora, lora_floats * 4)) : nullptr;
  const auto lora_at = [&](int index) {
    float* at = lora;
    for (int i = 0; i < index; ++i)
      if (linears[i].lora_a) at += 2 * M * (row_bytes(linears[i].rank) / 4);
    return at;
  };
  // Finds the linear and the first row of a block of rows.
  const auto locate = [&](int64_t block, bool of_ranks, int& first) {
    for (int i = 0;; ++i) {
      if (of_ranks && !linears[i].lora_a) continue;
      const int64_t here = ((of_ranks ? linears[i].rank : linears[i].N) + kBlock - 1) / kBlock;
      if (block < here) {
        first = static_cast<int>(block) * kBlock;
        return i;
      }
      block -= here;
    }
  };
  std::atomic<int64_t> counters[3] = {};
  parallel(weight_bytes < kSerialBytes ? 1 : threads, [&](const Team& team) {
    if (any_lora) {
      team.each(counters[0], ranks, [&](int64_t block) {
        int first;
        const int index = locate(block, true, first);
        const Linear& linear = linears[index];
        const int64_t stride = row_bytes(linear.rank) / 4;
        DotArgs args{linear.lora_a, linear.lora_dtype, lora_rows[static_cast<int>(linear.lora_dtype)], row_bytes(K), M, K,
                     first, std::min(linear.rank, first + kBlock), lora_at(index) + first, stride};
        isa().dot(args);
      });
      team.barrier();
      team.each(counters[1], count, [&](int64_t index) {
        const Linear& linear = linears[index];
        if (!linear.lora_a) return;
        const int64_t stride = row_bytes(linear.rank) / 4;
        float* ax = lora_at(static_cast<int>(index));
        float* prepared = ax + M * stride;
        for (int m = 0; m < M; ++m) {
          // bf16 adapters round A x to bf16 before B
          if (linear.lora_dtype == DType::bf16) {
            bf16 rounded[1024];
            isa().convert(DType::f32, ax + m * stride, DType::bf16, rounded, linear.rank);
            isa().prepare_rows(DType::bf16, rounded, DType::bf16, prepared + m * stride, 0, 1, linear.rank);
          } else {
            isa().prepare_rows(DType::f32, ax + m * stride, DType::f32, prepared + m * stride, 0, 1, linear.rank);
          }
        }
      });
      team.barrier();
    }
    team.each(counters[2], blocks, [&](int64_t block) {
      int first;
      const int index = locate(block, false, first);
      const Linear& linear = linears[index];
      const int n = std::min(kBlock, linear.N - first);
      float y[kMaxLinearRows * kBlock], delta[kMaxLinearRows * kBlock];
      uint16_t rounded[kBlock];
      isa().dot(DotArgs{linear.weight, dtype, rows, row_bytes(K), M, K, first, first + n, y, kBlock});
      if (linear.lora_a)
        isa().dot(DotArgs{linear.lora_b, linear.lora_dtype, lora_at(index) + M * (row_bytes(linear.rank) / 4),
                          row_bytes(linear.rank), M, linear.rank, first, first + n, delta, kBlock});
      for (int m = 0; m < M; ++m) {
        float* row = y + m * kBlock;
        if (linear.bias)
          for (int i = 0; i < n; ++i) row[i] += to_float(dtype, linear.bias, first + i);
        if (linear.lora_a) {
          // As the unfused module rounds: base to x's dtype, each adapter step to the adapter's.
          round_in_place(dtype, row, n, rounded);
          float* add = delta + m * kBlock;
          round_in_place(linear.lora_dtype, add, n, rounded);
          for (int i = 0; i < n; ++i) add[i] *= linear.scaling;
          round_in_place(linear.lora_dtype, add, n, rounded);
          for (int i = 0; i < n; ++i) row[i] += add[i];
        }
        const int64_t at = static_cast<int64_t>(m) * linear.N + first;
        isa().convert(DType::f32, row, out_dtype, bytes(linear.out) + at * size_of(out_dtype), n);
      }
    });
  });
}

void rms_norm(DType dtype, const void* x, const void* w, void* y, int M, int H, float eps, float offset, bool float_weight,
              int threads) {
  const int64_t row = H * size_of(dtype);
  std::atomic<int64_t> counter{0};
  parallel(row * M < kSerialBytes ? 1 : threads, [&](const Team& team) {
    team.each(counter, M, [&](int64_t m) {
      isa().rms_norm(dtype, bytes(x) + m * row, w, bytes(y) + m * row, H, eps, offset, float_weight);
    });
  });
}

void silu_mul(DType dtype, const void* gate, const void* up, void* y, int64_t n, int threads) {
  constexpr int64_t kElements = 8192;
  std::atomic<int64_t> counter{0};
  parallel(n * size_of(dtype) < kSerialBytes ? 1 : threads, [&](const Team& team) {
    team.each(counter, (n + kElements - 1) / kElements, [&](int64_t block) {
      const int64_t at = block * kElements * size_of(dtype);
      isa().silu_mul(dtype, bytes(gate) + at, bytes(up) + at, bytes(y) + at, std::min(kElements, n - block * kElements));
    });
  });
}

void rope(DType dtype, const void* x, const void* cos, const void* sin, void* y, int B, int H, int D, int threads) {
  const int64_t angle = D * size_of(dtype), row = H * angle;
  std::atomic<int64_t> counter{0};
  parallel(row * B < kSerialBytes ? 1 : threads, [&](const Team& team) {
    team.each(counter, B, [&](int64_t b) {
      isa().rope(dtype, bytes(x) + b * row, bytes(cos) + b * angle, bytes(sin) + b * angle, bytes(y) + b * row, H, D);
    });
  });
}

int sample_rows(const float* logits, int B, int V, const double* u, float temperature, int64_t* ids, float* logprobs, int threads) {
  const float inverse = 1.0f / temperature;
  const int segments = (V + kSegment - 1) / kSegment;
  const int64_t items = static_cast<int64_t>(B) * segments;
  double* sums = static_cast<double*>(scratch(kSegments, items * 12 + static_cast<int64_t>(threads) * kSegment * 4 + 128));
  float* tops = reinterpret_cast<float*>(sums + items);
  float* buffers = tops + items;
  std::atomic<int64_t> counters[2] = {};
  std::atomic<int> bad{-1};
  parallel(threads, [&](const Team& team) {
    team.each(counters[0], items, [&](int64_t i) {
      const int64_t row = i / segments, at = i % segments * kSegment;
      isa().exp_sum(logits + row * V + at, static_cast<int>(std::min<int64_t>(kSegment, V - at)), inverse, tops + i, sums + i);
    });
    team.barrier();
    team.each(counters[1], B, [&](int64_t row) {
      const float* top = tops + row * segments;
      const double* sum = sums + row * segments;
      const float m = *std::max_element(top, top + segments);
      const auto weight = [&](int s) { return std::exp((static_cast<double>(top[s]) - m) / temperature); };
      double total = 0.0;
      for (int s = 0; s < segments; ++s)
        if (!(top[s] == -INFINITY)) total += sum[s] * weight(s);
      if (!std::isfinite(m) || !std::isfinite(total)) {
        bad.store(static_cast<int>(row));
        ids[row] = -1, logprobs[row] = NAN;
        return;
      }
      // The segment that holds u * total, then the entry; cumulative sums in double, in vocabulary order.
      double left = u[row] * total;
      int chosen = -1;
      for (int s = 0; s < segments; ++s) {
        if (top[s] == -INFINITY) continue;
        chosen = s;
        const double mass = sum[s] * weight(s);
        if (left < mass) break;
        if (s + 1 < segments) left -= mass;
      }
      left /= weight(chosen);
      float* p = buffers + static_cast<int64_t>(team.thread()) * kSegment;
      const int64_t at = static_cast<int64_t>(chosen) * kSegment;
      const int n = static_cast<int>(std::min<int64_t>(kSegment, V - at));
      isa().exp_values(logits + row * V + at, n, inverse, top[chosen], p);
      int64_t id = -1;
      for (int i = 0; i < n; ++i) {
        if (p[i] <= 0.0f) continue;
        id = at + i;
        if ((left -= p[i]) < 0.0) break;
      }
      ids[row] = id;
      logprobs[row] = static_cast<float>((static_cast<double>(logits[row * V + id]) - m) / temperature - std::log(total));
    });
  });
  return bad.load();
}

double read_sum(const float* data, int64_t n, int threads) {
  typedef float V __attribute__((vector_size(64)));
  constexpr int64_t kFloats = 1 << 16;
  std::atomic<int64_t> counter{0};
  std::atomic<int64_t> total{0};
  parallel(threads, [&](const Team& team) {
    V sum[4] = {};
    team.each(counter, n / kFloats, [&](int64_t block) {
      const V* p = reinterpret_cast<const V*>(data + block * kFloats);
      for (int64_t i = 0; i < kFloats / 16; i += 4)
        for (int j = 0; j < 4; ++j) sum[j] += p[i + j];
    });
    const V all = sum[0] + sum[1] + sum[2] + sum[3];
    total.fetch_add(static_cast<int64_t>(all[0]));
  });
  return static_cast<double>(total.load());
}

}  // namespace leanroll
