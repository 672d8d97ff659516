#include "parallel.h"

#include <dlfcn.h>

#include <cstdlib>
#include <initializer_list>
#include <new>

namespace leanroll {
namespace {

struct Runtime {
  void (*parallel)(void (*)(void*), void*, unsigned, unsigned) = nullptr;
  void (*barrier)() = nullptr;
  int (*thread_num)() = nullptr;
  const char* file = nullptr;
};

bool resolve(void* handle, Runtime& runtime) {
  // GCC's names; LLVM's and Intel's runtimes export them too.
  void* entry = dlsym(handle, "GOMP_parallel");
  void* barrier = dlsym(handle, "GOMP_barrier");
  void* number = dlsym(handle, "omp_get_thread_num");
  if (!entry || !barrier || !number) return false;
  runtime.parallel = reinterpret_cast<void (*)(void (*)(void*), void*, unsigned, unsigned)>(entry);
  runtime.barrier = reinterpret_cast<void (*)()>(barrier);
  runtime.thread_num = reinterpret_cast<int (*)()>(number);
  Dl_info info;
  runtime.file = dladdr(entry, &info) ? info.dli_fname : "unknown";
  return true;
}

Runtime find_runtime() {
  Runtime runtime;
  if (resolve(RTLD_DEFAULT, runtime)) return runtime;
  for (const char* name : {"libgomp.so.1", "libiomp5.so", "libomp.so", "libomp.so.5", "libomp.dylib"}) {
    void* handle = dlopen(name, RTLD_LAZY | RTLD_NOLOAD);
    if (handle && resolve(handle, runtime)) return runtime;
  }
  return runtime;
}

const Runtime& runtime() {
  static const Runtime found = find_runtime();
  return found;
}

struct Call {
  void (*body)(void*, const Team&);
  void* data;
  int threads;
};

struct Buffer {
  void* memory = nullptr;
  int64_t bytes = 0;
  ~Buffer() { std::free(memory); }
};

}  // namespace

const char* openmp_library() { return runtime().file; }

void Team::barrier() const {
  if (size_ > 1) runtime().barrier();
}

void run_team(int threads, void (*body)(void*, const Team&), void* data) {
  if (threads <= 1) {
    body(data, Team(0, 1));
    return;
  }
  Call call{body, data, threads};
  runtime().parallel(
      [](void* p) {
        auto* c = static_cast<Call*>(p);
        c->body(c->data, Team(runtime().thread_num(), c->threads));
      },
      &call, static_cast<unsigned>(threads), 0);
}

void* scratch(int slot, int64_t bytes) {
  thread_local Buffer buffers[4];
  Buffer& buffer = buffers[slot];
  if (buffer.bytes < bytes) {
    std::free(buffer.memory);
    buffer.bytes = 0;
    const int64_t rounded = (bytes + bytes / 4 + 4095) / 4096 * 4096;
    buffer.memory = std::aligned_alloc(64, static_cast<size_t>(rounded));
    if (!buffer.memory) throw std::bad_alloc();
    buffer.bytes = rounded;
  }
  return buffer.memory;
}

}  // namespace leanroll
