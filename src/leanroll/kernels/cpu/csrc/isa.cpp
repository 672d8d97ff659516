// Which instruction sets this machine has, and which one is in use.
#include <atomic>
#include <cstring>
#ifdef LEANROLL_AMX
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include "kernels.h"

namespace leanroll {
namespace {

constexpr int kMaxIsas = 4;
std::atomic<const IsaTable*> current{nullptr};

#ifdef LEANROLL_AMX
// The tile registers are large: Linux gives them to a process that asks.
bool may_use_tiles() {
  constexpr unsigned kTileBf16 = 1u << 22, kTile = 1u << 24;  // CPUID leaf 7, edx
  constexpr int kRequestPermission = 0x1023, kTileData = 18;
  static const bool granted = [] {
    unsigned a, b, c, d;
    return __get_cpuid_count(7, 0, &a, &b, &c, &d) && (d & kTileBf16) && (d & kTile) &&
           syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
  }();
  return granted;
}
#endif

}  // namespace

int available_isas(const IsaTable** out, int capacity) {
  int n = 0;
  const auto put = [&](const IsaTable* table) {
    if (n < capacity) out[n++] = table;
  };
#ifdef LEANROLL_X86
  // The compiler's check includes whether the operating system saves the registers.
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vnni")) {
#ifdef LEANROLL_AMX
    if (may_use_tiles()) put(amx_table());
#endif
    put(avx512_table());
  }
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) put(avx2_table());
#endif
  put(portable_table());
  return n;
}

const IsaTable& isa() {
  const IsaTable* table = current.load(std::memory_order_relaxed);
  if (!table) {
    const IsaTable* all[kMaxIsas];
    available_isas(all, kMaxIsas);
    current.store(table = all[0], std::memory_order_relaxed);
  }
  return *table;
}

bool set_isa(const char* name) {
  const IsaTable* all[kMaxIsas];
  const int n = available_isas(all, kMaxIsas);
  for (int i = 0; i < n; ++i)
    if (std::strcmp(all[i]->name, name) == 0) {
      current.store(all[i], std::memory_order_relaxed);
      return true;
    }
  return false;
}

}  // namespace leanroll
