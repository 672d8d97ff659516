// Which instruction sets this machine has, and which one is in use.
#include <atomic>
#include <cstring>

#include "kernels.h"

namespace leanroll {
namespace {

std::atomic<const IsaTable*> current{nullptr};

}  // namespace

int available_isas(const IsaTable** out, int capacity) {
  int n = 0;
  const auto put = [&](const IsaTable* table) {
    if (n < capacity) out[n++] = table;
  };
#ifdef LEANROLL_X86
  // The compiler's check includes whether the operating system saves the registers.
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512bf16"))
    put(avx512_table());
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) put(avx2_table());
#endif
  put(portable_table());
  return n;
}

const IsaTable& isa() {
  const IsaTable* table = current.load(std::memory_order_relaxed);
  if (!table) {
    const IsaTable* all[4];
    available_isas(all, 4);
    current.store(table = all[0], std::memory_order_relaxed);
  }
  return *table;
}

bool set_isa(const char* name) {
  const IsaTable* all[4];
  const int n = available_isas(all, 4);
  for (int i = 0; i < n; ++i)
    if (std::strcmp(all[i]->name, name) == 0) {
      current.store(all[i], std::memory_order_relaxed);
      return true;
    }
  return false;
}

}  // namespace leanroll
