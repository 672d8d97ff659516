// Small-batch products, row-wise functions and sampling: work items on threads.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "kernels.h"
#include "parallel.h"

namespace leanroll {
namespace {

enum Slot { kRows = 0, kLora = 1, kRounded = 2, kSegments = 0 };
constexpr int kBlock = 32;           // weight rows per item
constexpr int kRankBlock = 8;        // the same for A of an adapter, which has few
constexpr int kSegment = 2048;       // vocabulary entries per item of the sampler
constexpr int64_t kSerialBytes = 1 << 16;  // less work than this is done by the calling thread alone

int64_t row_bytes(int K) { return static_cast<int64_t>(pad_dim(K)) * 4; }

const char* bytes(const void* p) { return static_cast<const char*>(p); }
char* bytes(void* p) { return static_cast<char*>(p); }

int64_t blocks_of(int n, int size) { return (n + size - 1) / size; }

// One linear layer in a group: where its items begin, and what is made of its adapter's A.
struct Part {
  const Linear* linear;
  int64_t first_block, first_rank_block;  // items of the layers before it
  float* low;                             // A x, [M, pad_dim(rank)]
};

// x as `dot` wants it against weights of a dtype.
const char* prepared(DType dtype, const void* x, DType weights, int M, int K, char* memory) {
  if (dtype == DType::f32 && weights == DType::bf16) {  // an adapter in bf16 reads x rounded
    void* rounded = scratch(kRounded, static_cast<int64_t>(M) * K * 2);
    isa().convert(DType::f32, x, DType::bf16, rounded, static_cast<int64_t>(M) * K);
    dtype = DType::bf16, x = rounded;
  }
  isa().prepare_rows(dtype, x, weights, memory, row_bytes(K), M, K);
  return memory;
}

// Rows [first, first + kRankBlock) of A x.
void shrink(const Part& part, int first, const char* rows, int M, int K) {
  const Linear& linear = *part.linear;
  const int end = std::min(linear.rank, first + kRankBlock), stride = pad_dim(linear.rank);
  isa().dot(DotArgs{linear.lora_a, linear.lora_dtype, rows, row_bytes(K), M, K, first, end, part.low + first, stride});
  if (linear.lora_dtype == DType::f32) return;
  for (int m = 0; m < M; ++m) {
    bf16 rounded[kRankBlock];
    float* low = part.low + static_cast<int64_t>(m) * stride + first;
    isa().convert(DType::f32, low, DType::bf16, rounded, end - first);
    isa().convert(DType::bf16, rounded, DType::f32, low, end - first);
  }
}

// Outputs [first, first + kBlock).
void produce(const Part& part, int first, DType dtype, const char* rows, int M, int K, DType out_dtype) {
  const Linear& linear = *part.linear;
  const int end = std::min(linear.N, first + kBlock);
  float y[kMaxLinearRows * kBlock], delta[kMaxLinearRows * kBlock];
  isa().dot(DotArgs{linear.weight, dtype, rows, row_bytes(K), M, K, first, end, y, kBlock});
  if (linear.lora_a)
    isa().expand(ExpandArgs{linear.lora_b, linear.lora_dtype, part.low, pad_dim(linear.rank), M, linear.rank, first, end, delta, kBlock});
  for (int m = 0; m < M; ++m)
    isa().finish(FinishArgs{dtype, linear.lora_dtype, out_dtype, y + m * kBlock, linear.lora_a ? delta + m * kBlock : nullptr,
                            linear.scaling, linear.bias ? bytes(linear.bias) + first * size_of(dtype) : nullptr,
                            bytes(linear.out) + (static_cast<int64_t>(m) * linear.N + first) * size_of(out_dtype), end - first});
}

}  // namespace

void linear_group(DType dtype, const void* x, int M, int K, const Linear* linears, int count, DType out_dtype, int threads) {
  std::vector<Part> parts;
  parts.reserve(static_cast<size_t>(count));
  int64_t blocks = 0, rank_blocks = 0, weight_bytes = 0, low_floats = 0;
  bool adapters[2] = {false, false};
  for (const Linear* linear = linears; linear < linears + count; ++linear) {
    parts.push_back(Part{linear, blocks, rank_blocks, nullptr});
    blocks += blocks_of(linear->N, kBlock);
    weight_bytes += static_cast<int64_t>(linear->N) * K * size_of(dtype);
    if (!linear->lora_a) continue;
    rank_blocks += blocks_of(linear->rank, kRankBlock);
    low_floats += static_cast<int64_t>(M) * pad_dim(linear->rank);
    adapters[static_cast<int>(linear->lora_dtype)] = true;
  }
  if (low_floats) {
    float* low = static_cast<float*>(scratch(kLora, low_floats * 4));
    for (Part& part : parts) {
      part.low = low;
      if (part.linear->lora_a) low += static_cast<int64_t>(M) * pad_dim(part.linear->rank);
    }
  }
  char* memory = static_cast<char*>(scratch(kRows, 2 * prepared_rows(M) * row_bytes(K)));
  const char* rows = prepared(dtype, x, dtype, M, K, memory);
  const char* adapter_rows[2] = {rows, rows};
  const DType other = dtype == DType::f32 ? DType::bf16 : DType::f32;
  if (adapters[static_cast<int>(other)])
    adapter_rows[static_cast<int>(other)] = prepared(dtype, x, other, M, K, memory + prepared_rows(M) * row_bytes(K));

  if (weight_bytes < kSerialBytes) threads = 1;
  std::vector<std::atomic<int64_t>> stretches(static_cast<size_t>(threads));
  std::atomic<int64_t> counter{0};
  parallel(threads, [&](const Team& team) {
    if (rank_blocks) {
      team.each(counter, rank_blocks, [&](int64_t block) {
        const Part* part = &parts.back();
        while (!part->linear->lora_a || block < part->first_rank_block) --part;
        const int first = static_cast<int>(block - part->first_rank_block) * kRankBlock;
        shrink(*part, first, adapter_rows[static_cast<int>(part->linear->lora_dtype)], M, K);
      });
      team.barrier();
    }
    team.each_in_stretches(stretches.data(), blocks, [&](int64_t block) {
      const Part* part = &parts.back();
      while (block < part->first_block) --part;
      produce(*part, static_cast<int>(block - part->first_block) * kBlock, dtype, rows, M, K, out_dtype);
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
  // As the attention kernel reads: asked for ahead of time, since hardware alone does not keep every memory busy.
  constexpr int64_t kFloats = 1 << 18, kAhead = 1 << 12;
  std::atomic<int64_t> counter{0};
  std::atomic<int64_t> total{0};
  parallel(threads, [&](const Team& team) {
    V sum[4] = {};
    team.each(counter, n / kFloats, [&](int64_t block) {
      const V* p = reinterpret_cast<const V*>(data + block * kFloats);
      for (int64_t i = 0; i < kFloats / 16; i += 4)
        for (int j = 0; j < 4; ++j) {
          __builtin_prefetch(p + i + j + kAhead / 16, 0, 3);
          sum[j] += p[i + j];
        }
    });
    const V all = sum[0] + sum[1] + sum[2] + sum[3];
    total.fetch_add(static_cast<int64_t>(all[0]));
  });
  return static_cast<double>(total.load());
}

}  // namespace leanroll
