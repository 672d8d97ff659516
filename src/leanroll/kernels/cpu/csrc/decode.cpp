// Cuts paged attention into work items and runs them on threads. How a (sequence, KV head) is cut depends on that sequence alone
// and its partial results are merged in order, so its output depends neither on the batch nor on the number of threads.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <stdexcept>
#include <string>
#include <type_traits>

#include "kernels.h"
#include "parallel.h"

namespace leanroll {
namespace {

// How far ahead of its use a landmark is fetched.
constexpr int kAheadPages = 32, kAheadBytes = 16384;

enum Slot { kPlan = 0, kThreads = 1, kSelection = 2 };

template <class T>
T* offset(T* base, DType type, int64_t elements) {
  using Byte = std::conditional_t<std::is_const_v<T>, const char, char>;
  return static_cast<T*>(static_cast<Byte*>(base) + elements * size_of(type));
}

int64_t round_up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

int num_pages(const Batch& batch, int b) { return (batch.lengths[b] + batch.S - 1) / batch.S; }
int num_selected(const Batch& batch, int b) { return std::min(num_pages(batch, b), batch.budgets[b]); }

struct Item {
  int row;           // b * Hk + h; b where an item takes all KV heads
  int first, count;  // pages of the row's list, or of the sequence when it is dense
};

// Partial results of all items: statistics, then accumulators.
struct Plan {
  int rows, heads_per_row, heads, padded, num_items;  // KV heads and query heads per row
  const int32_t* selected;
  int width;
  int* start;  // [rows + 1], first item of a row
  Item* items;
  float* partial;  // [items, G * (2 + padded)]

  int64_t partial_floats() const { return round_up(static_cast<int64_t>(heads) * (2 + padded), 16); }
  float* m(int item) const { return partial + item * partial_floats(); }
  float* l(int item) const { return m(item) + heads; }
  float* acc(int item) const { return m(item) + 2 * heads; }
};

// count(row, first) → number of pages to read, and the first of them.
template <class Count>
Plan make_plan(const Batch& batch, const int32_t* selected, int width, Count&& count) {
  Plan plan;
  // A selection belongs to one KV head; without one, all heads of a sequence read the same pages, which lie side by side.
  plan.heads_per_row = selected ? 1 : batch.Hk;
  plan.rows = batch.B * batch.Hk / plan.heads_per_row, plan.heads = batch.Hq / batch.Hk * plan.heads_per_row;
  plan.padded = pad_dim(batch.D);
  plan.selected = selected, plan.width = width;
  const int per_item = std::max(1, kChunkTokens / batch.S);
  int64_t total = 0;
  for (int row = 0; row < plan.rows; ++row) {
    int first = 0;
    total += (count(row, first) + per_item - 1) / per_item;
  }
  const int64_t starts = round_up(static_cast<int64_t>(sizeof(int)) * (plan.rows + 1), 64);
  const int64_t items = round_up(static_cast<int64_t>(sizeof(Item)) * total, 64);
  char* memory = static_cast<char*>(scratch(kPlan, starts + items + total * plan.partial_floats() * 4 + 64));
  plan.start = reinterpret_cast<int*>(memory);
  plan.items = reinterpret_cast<Item*>(memory + starts);
  plan.partial = reinterpret_cast<float*>(memory + starts + items);
  int n = 0;
  for (int row = 0; row < plan.rows; ++row) {
    int first = 0;
    const int pages = count(row, first);
    plan.start[row] = n;
    for (int i = 0; i < pages; i += per_item) plan.items[n++] = Item{row, first + i, std::min(per_item, pages - i)};
  }
  plan.start[plan.rows] = plan.num_items = n;
  return plan;
}

Plan dense_plan(const Batch& batch, const Attention& attention) {
  return make_plan(batch, nullptr, 0, [&](int row, int& first) {
    const int b = row;
    first = attention.window > 0 ? std::max(0, batch.lengths[b] - attention.window) / batch.S : 0;
    return num_pages(batch, b) - first;
  });
}

// The first pages of keys that an item will read.
int first_pages(const Pool& pool, const Batch& batch, const Plan& plan, const Item& item, const void** out) {
  const int head_row = item.row * plan.heads_per_row;
  const int32_t* table = batch.table + static_cast<int64_t>(head_row / batch.Hk) * batch.max_pages;
  const int32_t* list = plan.selected ? plan.selected + static_cast<int64_t>(item.row) * plan.width : nullptr;
  int n = 0;
  for (; n < std::min(kNextPages, item.count); ++n) {
    const int logical = list ? list[item.first + n] : item.first + n;
    if (logical < 0) break;
    const int64_t row = static_cast<int64_t>(table[logical]) * batch.Hk + head_row % batch.Hk;
    out[n] = offset<const void>(pool.k, pool.dtype, row * batch.S * batch.D);
  }
  return n;
}

void attend_item(const Pool& pool, const Batch& batch, const Attention& attention, DType q_dtype, const void* q, const Plan& plan,
                 int i, int next, float* memory) {
  const Item& item = plan.items[i];
  const int head_row = item.row * plan.heads_per_row;
  const int b = head_row / batch.Hk, h = head_row % batch.Hk, D = batch.D;
  AttendArgs args;
  args.page_stride = static_cast<int64_t>(batch.Hk) * batch.S * D;
  const int64_t head = static_cast<int64_t>(h) * batch.S * D;
  args.k = offset<const void>(pool.k, pool.dtype, head), args.v = offset<const void>(pool.v, pool.dtype, head);
  args.q = offset(q, q_dtype, static_cast<int64_t>(item.row) * plan.heads * D), args.q_dtype = q_dtype;
  args.H = plan.heads_per_row, args.G = batch.Hq / batch.Hk, args.D = D, args.S = batch.S;
  args.scale = attention.scale, args.softcap = attention.softcap;
  args.table = batch.table + static_cast<int64_t>(b) * batch.max_pages;
  args.pages = plan.selected ? plan.selected + static_cast<int64_t>(item.row) * plan.width : nullptr;
  args.first = item.first, args.count = item.count;
  args.end = batch.lengths[b], args.begin = attention.window > 0 ? std::max(0, args.end - attention.window) : 0;
  args.m = plan.m(i), args.l = plan.l(i), args.acc = plan.acc(i), args.scratch = memory;
  const void* pages[kNextPages];
  args.next = pages, args.num_next = 0;
  if (next < plan.num_items) args.num_next = first_pages(pool, batch, plan, plan.items[next], pages);
  isa().attend(pool.dtype, args);
}

void merge_row(const Batch& batch, DType dtype, const Plan& plan, int row, void* out, float* memory) {
  const int D = batch.D;
  const int begin = plan.start[row], end = plan.start[row + 1];
  for (int g = 0; g < plan.heads; ++g) {
    float m = -std::numeric_limits<float>::infinity(), l = 0.0f;
    for (int i = begin; i < end; ++i) m = std::max(m, plan.m(i)[g]);
    std::fill(memory, memory + D, 0.0f);
    for (int i = begin; i < end; ++i) {
      if (plan.l(i)[g] == 0.0f) continue;  // nothing was read in that chunk
      const float weight = std::exp(plan.m(i)[g] - m);
      const float* acc = plan.acc(i) + static_cast<int64_t>(g) * plan.padded;
      l += plan.l(i)[g] * weight;
      for (int d = 0; d < D; ++d) memory[d] += acc[d] * weight;
    }
    const float inverse = l == 0.0f ? 0.0f : 1.0f / l;
    for (int d = 0; d < D; ++d) memory[d] *= inverse;
    isa().convert(DType::f32, memory, dtype, offset(out, dtype, (static_cast<int64_t>(row) * plan.heads + g) * D), D);
  }
}

void write_token(const Pool& pool, int Hk, int D, int S, DType src, const void* k, const void* v, int64_t t, int h, int64_t slot) {
  const int64_t to = ((slot / S * Hk + h) * S + slot % S) * D, from = (t * Hk + h) * D;
  isa().convert(src, offset(k, src, from), pool.dtype, offset(pool.k, pool.dtype, to), D);
  isa().convert(src, offset(v, src, from), pool.dtype, offset(pool.v, pool.dtype, to), D);
}

void page_landmark(const Pool& pool, const Scorer& scorer, int Hk, int D, int S, int64_t page, int h, float* memory) {
  if (scorer.kind == ScorerKind::oracle) return;
  const int64_t row = page * Hk + h;
  isa().landmark(pool.dtype, scorer, offset(pool.k, pool.dtype, row * S * D),
                 static_cast<char*>(pool.landmarks) + row * scorer.landmark_bytes(pool.dtype, D), S, D, memory);
}

void score_row(const Pool& pool, const Batch& batch, DType q_dtype, const void* q, const Scorer& scorer, int row, float* out,
               float* memory) {
  const int b = row / batch.Hk, h = row % batch.Hk, G = batch.Hq / batch.Hk;
  ScoreArgs args;
  args.scorer = scorer;
  args.q = offset(q, q_dtype, static_cast<int64_t>(row) * G * batch.D), args.q_dtype = q_dtype;
  args.G = G, args.D = batch.D;
  const bool oracle = scorer.kind == ScorerKind::oracle;
  const int64_t bytes = oracle ? static_cast<int64_t>(batch.S) * batch.D * size_of(pool.dtype)
                               : scorer.landmark_bytes(pool.dtype, batch.D);
  args.rows = static_cast<const char*>(oracle ? pool.k : pool.landmarks) + h * bytes;
  args.page_stride = batch.Hk * bytes;
  args.fetch_bytes = bytes;
  args.ahead = static_cast<int>(std::min<int64_t>(kAheadPages, 1 + kAheadBytes / args.fetch_bytes));
  args.table = batch.table + static_cast<int64_t>(b) * batch.max_pages;
  args.begin = batch.first_pages, args.end = num_pages(batch, b) - batch.last_pages;
  args.read_begin = oracle ? 0 : args.begin, args.read_end = oracle ? num_pages(batch, b) : args.end;
  args.num_tokens = batch.lengths[b];
  args.out = out, args.scratch = memory;
  isa().score(pool.dtype, args);
}

void select_row(const float* scores, const Batch& batch, int b, int32_t* out, int width, float* memory) {
  const int n = num_pages(batch, b), count = num_selected(batch, b);
  if (n <= batch.budgets[b]) {
    for (int i = 0; i < n; ++i) out[i] = i;
  } else {
    int at = 0;
    for (; at < batch.first_pages; ++at) out[at] = at;
    const int k = count - batch.first_pages - batch.last_pages;
    isa().select(scores, batch.first_pages, n - batch.last_pages, k, out + at, reinterpret_cast<uint32_t*>(memory));
    for (int i = 0; i < batch.last_pages; ++i) out[at + k + i] = n - batch.last_pages + i;
  }
  std::fill(out + count, out + width, -1);
}

int selection_width(const Batch& batch) {
  int width = 0;
  for (int b = 0; b < batch.B; ++b) width = std::max(width, num_selected(batch, b));
  return width;
}

// Scratch floats of one thread, enough for every kind of item.
int64_t thread_floats(const Batch& batch) {
  const int64_t scoring = score_scratch(batch.D, batch.max_pages) + 2 * round_up(batch.max_pages + 32, 16);
  return round_up(std::max(attend_scratch(batch.Hq, batch.D), scoring), 16);
}

// KV heads that one thread scores together, since their landmarks lie side by side: all, if that leaves enough for every thread.
int heads_together(const Batch& batch, int threads) { return batch.B >= 4 * threads ? batch.Hk : 1; }

void attend_and_merge(const Team& team, const Pool& pool, const Batch& batch, const Attention& attention, DType q_dtype,
                      const void* q, const Plan& plan, void* out, float* memory, std::atomic<int64_t>* counters) {
  // An item is taken one ahead, so that its first pages are on their way in time; the last ones are not, to end together.
  const int64_t n = plan.num_items;
  for (int64_t i = counters[0]++; i < n;) {
    const bool early = i + 4 * team.size() < n;
    const int64_t next = early ? counters[0]++ : n;
    attend_item(pool, batch, attention, q_dtype, q, plan, static_cast<int>(i), static_cast<int>(next), memory);
    i = early ? next : counters[0]++;
  }
  team.barrier();
  team.each(counters[1], plan.rows, [&](int64_t row) { merge_row(batch, q_dtype, plan, static_cast<int>(row), out, memory); });
}

}  // namespace

void write_kv(const Pool& pool, int Hk, int D, int S, DType src, const void* k, const void* v, const int64_t* slots, int64_t T,
              int threads) {
  std::atomic<int64_t> counter{0};
  constexpr int64_t kTokens = 64;
  parallel(T < kTokens ? 1 : threads, [&](const Team& team) {
    team.each(counter, (T + kTokens - 1) / kTokens, [&](int64_t block) {
      for (int64_t t = block * kTokens; t < std::min(T, (block + 1) * kTokens); ++t)
        for (int h = 0; h < Hk; ++h) write_token(pool, Hk, D, S, src, k, v, t, h, slots[t]);
    });
  });
}

void update_landmarks(const Pool& pool, const Scorer& scorer, int Hk, int D, int S, const int32_t* pages, int64_t n, int threads) {
  std::atomic<int64_t> counter{0};
  const int64_t each = round_up(pack_scratch(D), 16);
  float* memory = static_cast<float*>(scratch(kThreads, each * 4 * threads));
  parallel(n * Hk < 16 ? 1 : threads, [&](const Team& team) {
    team.each(counter, n, [&](int64_t i) {
      for (int h = 0; h < Hk; ++h) page_landmark(pool, scorer, Hk, D, S, pages[i], h, memory + each * team.thread());
    });
  });
}

void score_pages(const Pool& pool, const Batch& batch, DType q_dtype, const void* q, const Scorer& scorer, float* out, int threads) {
  std::atomic<int64_t> counter{0};
  const int64_t each = thread_floats(batch);
  float* memory = static_cast<float*>(scratch(kThreads, each * 4 * threads));
  const int heads = heads_together(batch, threads);
  parallel(threads, [&](const Team& team) {
    team.each(counter, static_cast<int64_t>(batch.B) * batch.Hk / heads, [&](int64_t item) {
      for (int h = 0; h < heads; ++h) {
        const int64_t row = item * heads + h;
        float* scores = out + row * batch.max_pages;
        std::fill(scores, scores + batch.max_pages, -std::numeric_limits<float>::infinity());
        score_row(pool, batch, q_dtype, q, scorer, static_cast<int>(row), scores, memory + each * team.thread());
      }
    });
  });
}

void select_pages(const float* scores, const Batch& batch, int32_t* out, int width, int threads) {
  std::atomic<int64_t> counter{0};
  const int64_t each = round_up(batch.max_pages + 32, 16);
  float* memory = static_cast<float*>(scratch(kThreads, each * 4 * threads));
  parallel(threads, [&](const Team& team) {
    team.each(counter, static_cast<int64_t>(batch.B) * batch.Hk, [&](int64_t row) {
      select_row(scores + row * batch.max_pages, batch, static_cast<int>(row / batch.Hk), out + row * width, width,
                 memory + each * team.thread());
    });
  });
}

void decode_attention(const Pool& pool, const Batch& batch, DType q_dtype, const void* q, const int32_t* selected, int width,
                      const Attention& attention, void* out, int threads) {
  const Plan plan = selected ? make_plan(batch, selected, width,
                                         [&](int row, int&) {
                                           int n = width;
                                           while (n > 0 && selected[static_cast<int64_t>(row) * width + n - 1] < 0) --n;
                                           return n;
                                         })
                             : dense_plan(batch, attention);
  const int64_t each = thread_floats(batch);
  float* memory = static_cast<float*>(scratch(kThreads, each * 4 * threads));
  std::atomic<int64_t> counters[2] = {};
  parallel(threads, [&](const Team& team) {
    attend_and_merge(team, pool, batch, attention, q_dtype, q, plan, out, memory + each * team.thread(), counters);
  });
}

void decode_layer(const Pool& pool, const Batch& batch, DType q_dtype, const void* q, const void* k, const void* v,
                  const Scorer& scorer, const Attention& attention, int32_t* selected_out, int width, void* out, int threads) {
  const bool sparse = scorer.kind != ScorerKind::none;
  int32_t* selected = nullptr;
  if (sparse) {
    const int needed = selection_width(batch);
    if (selected_out && width < needed) 
      throw std::invalid_argument("selected_out holds " + std::to_string(width) + " pages per head; expected at least " +
                                  std::to_string(needed) + ", what this batch selects.");
    if (!selected_out) width = needed;
    selected = selected_out ? selected_out
                            : static_cast<int32_t*>(scratch(kSelection, 4ll * batch.B * batch.Hk * std::max(width, 1)));
  }
  const Plan plan = sparse ? make_plan(batch, selected, width, [&](int row, int&) { return num_selected(batch, row / batch.Hk); })
                           : dense_plan(batch, attention);
  const int64_t each = thread_floats(batch);
  float* memory = static_cast<float*>(scratch(kThreads, each * 4 * threads));
  std::atomic<int64_t> counters[3] = {};
  const int heads = heads_together(batch, threads);
  const int64_t page_floats = round_up(batch.max_pages + 32, 16);
  parallel(threads, [&](const Team& team) {
    float* mine = memory + each * team.thread();
    team.each(counters[0], static_cast<int64_t>(batch.B) * batch.Hk / heads, [&](int64_t item) {
      for (int64_t row = item * heads; row < (item + 1) * heads; ++row) {
        const int b = static_cast<int>(row) / batch.Hk, h = static_cast<int>(row) % batch.Hk;
        const int last = batch.lengths[b] - 1;
        const int64_t page = batch.table[static_cast<int64_t>(b) * batch.max_pages + last / batch.S];
        write_token(pool, batch.Hk, batch.D, batch.S, q_dtype, k, v, b, h, page * batch.S + last % batch.S);
        if (!sparse) continue;
        if (batch.lengths[b] % batch.S == 0) page_landmark(pool, scorer, batch.Hk, batch.D, batch.S, page, h, mine);
        float* scores = mine;
        if (num_pages(batch, b) > batch.budgets[b])
          score_row(pool, batch, q_dtype, q, scorer, static_cast<int>(row), scores, scores + 2 * page_floats);
        select_row(scores, batch, b, selected + row * width, width, scores + page_floats);
      }
    });
    team.barrier();
    attend_and_merge(team, pool, batch, attention, q_dtype, q, plan, out, mine, counters + 1);
  });
}

}  // namespace leanroll
