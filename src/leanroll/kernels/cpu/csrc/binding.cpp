// Python integers to raw pointers. Shapes and dtypes are checked on the Python side (backend.py, ops.py).
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <string>
#include <tuple>
#include <vector>

#include "kernels.h"
#include "parallel.h"

namespace nb = nanobind;
using namespace leanroll;

namespace {

using Address = uint64_t;
template <class T>
T* at(Address address) {
  return reinterpret_cast<T*>(address);
}
DType dtype(int code) { return static_cast<DType>(code); }

using LayerTuple = std::tuple<int, Address, Address, Address>;  // dtype, k, v, landmarks
using ScorerTuple = std::tuple<int, int>;  // kind, rows per page
using BatchTuple = std::tuple<int, int, int, int, int, int, Address, Address, Address, int, int>;

Pool pool_of(const LayerTuple& t) {
  return Pool{dtype(std::get<0>(t)), at<void>(std::get<1>(t)), at<void>(std::get<2>(t)), at<void>(std::get<3>(t))};
}
Scorer scorer_of(const ScorerTuple& t) { return Scorer{static_cast<ScorerKind>(std::get<0>(t)), std::get<1>(t)}; }
Batch batch_of(const BatchTuple& t) {
  const auto& [B, Hq, Hk, D, S, max_pages, table, lengths, budgets, first, last] = t;
  return Batch{B, Hq, Hk, D, S, max_pages, at<const int32_t>(table), at<const int32_t>(lengths), at<const int32_t>(budgets),
               first, last};
}

// weight, bias, N, lora_a, lora_b, lora dtype, rank, scaling, out
using LinearTuple = std::tuple<Address, Address, int, Address, Address, int, int, float, Address>;

}  // namespace

NB_MODULE(_cpu, m) {
  if (!openmp_library())
    throw nb::import_error("no OpenMP runtime is loaded; import torch first, and use a torch built with OpenMP");
  const auto free = nb::call_guard<nb::gil_scoped_release>();

  m.def("landmark_bytes", [](const ScorerTuple& scorer, int kv_dtype, int D) {
    return scorer_of(scorer).landmark_bytes(dtype(kv_dtype), D);
  });
  m.attr("MAX_LINEAR_ROWS") = kMaxLinearRows;
  m.attr("MAX_RANK") = kMaxRank;
  m.def("isa", [] { return std::string(isa().name); });
  m.def("set_isa", [](const std::string& name) { return set_isa(name.c_str()); });
  m.def("available_isas", [] {
    const IsaTable* all[4];
    std::vector<std::string> names;
    const int n = available_isas(all, 4);
    for (int i = 0; i < n; ++i) names.emplace_back(all[i]->name);
    return names;
  });
  m.def("openmp_library", [] { return std::string(openmp_library()); });
  m.def("compiler", [] {
#ifdef __clang__
    return std::string("Clang " __clang_version__);
#else
    return std::string("GCC " __VERSION__);
#endif
  });

  m.def("write_kv", [](const LayerTuple& layer, int Hk, int D, int S, int src, Address k, Address v, Address slots, int64_t T,
                       int threads) {
    write_kv(pool_of(layer), Hk, D, S, dtype(src), at<void>(k), at<void>(v), at<const int64_t>(slots), T, threads);
  }, free);
  m.def("update_landmarks", [](const LayerTuple& layer, const ScorerTuple& scorer, int Hk, int D, int S, Address pages, int64_t n,
                               int threads) {
    update_landmarks(pool_of(layer), scorer_of(scorer), Hk, D, S, at<const int32_t>(pages), n, threads);
  }, free);
  m.def("score_pages", [](const LayerTuple& layer, const BatchTuple& batch, int q_dtype, Address q, const ScorerTuple& scorer,
                          Address out, int threads) {
    score_pages(pool_of(layer), batch_of(batch), dtype(q_dtype), at<void>(q), scorer_of(scorer), at<float>(out), threads);
  }, free);
  m.def("select_pages", [](Address scores, const BatchTuple& batch, Address out, int width, int threads) {
    select_pages(at<const float>(scores), batch_of(batch), at<int32_t>(out), width, threads);
  }, free);
  m.def("decode_attention", [](const LayerTuple& layer, const BatchTuple& batch, int q_dtype, Address q, Address selected,
                               int width, float scale, float softcap, int window, Address out, int threads) {
    decode_attention(pool_of(layer), batch_of(batch), dtype(q_dtype), at<void>(q), at<const int32_t>(selected), width,
                     Attention{scale, softcap, window}, at<void>(out), threads);
  }, free);
  m.def("decode_layer", [](const LayerTuple& layer, const BatchTuple& batch, int q_dtype, Address q, Address k, Address v,
                           const ScorerTuple& scorer, float scale, float softcap, int window, Address selected_out, int width,
                           Address out, int threads) {
    decode_layer(pool_of(layer), batch_of(batch), dtype(q_dtype), at<void>(q), at<void>(k), at<void>(v),
                 scorer_of(scorer), Attention{scale, softcap, window}, at<int32_t>(selected_out), width,
                 at<void>(out), threads);
  }, free);

  m.def("linear_group", [](int type, Address x, int M, int K, const std::vector<LinearTuple>& linears, int out_type, int threads) {
    std::vector<Linear> list;
    list.reserve(linears.size());
    for (const auto& [weight, bias, N, a, b, lora_type, rank, scaling, out] : linears)
      list.push_back(Linear{at<void>(weight), at<void>(bias), N, at<void>(a), at<void>(b), dtype(lora_type), rank, scaling,
                            at<void>(out)});
    linear_group(dtype(type), at<void>(x), M, K, list.data(), static_cast<int>(list.size()), dtype(out_type), threads);
  }, free);
  m.def("rms_norm", [](int type, Address x, Address w, Address y, int M, int H, float eps, float offset, bool float_weight,
                       int threads) {
    rms_norm(dtype(type), at<void>(x), at<void>(w), at<void>(y), M, H, eps, offset, float_weight, threads);
  }, free);
  m.def("silu_mul", [](int type, Address gate, Address up, Address y, int64_t n, int threads) {
    silu_mul(dtype(type), at<void>(gate), at<void>(up), at<void>(y), n, threads);
  }, free);
  m.def("rope", [](int type, Address x, Address cos, Address sin, Address y, int B, int H, int D, int threads) {
    rope(dtype(type), at<void>(x), at<void>(cos), at<void>(sin), at<void>(y), B, H, D, threads);
  }, free);
  m.def("sample_rows", [](Address logits, int B, int V, Address u, float temperature, Address ids, Address logprobs,
                          int threads) {
    return sample_rows(at<const float>(logits), B, V, at<const double>(u), temperature, at<int64_t>(ids), at<float>(logprobs),
                       threads);
  }, free);
  m.def("read_sum", [](Address data, int64_t n, int threads) { return read_sum(at<const float>(data), n, threads); }, free);
}
