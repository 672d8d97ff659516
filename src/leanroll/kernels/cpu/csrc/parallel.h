// Threads come from the OpenMP runtime that torch has loaded, found at run time by symbol. Linking a runtime of our own could
// bring a second thread pool into the process (always with Clang), whose spinning threads would fight with torch's.
#pragma once

#include <atomic>
#include <cstdint>

namespace leanroll {

// Name of the runtime's file, or null when the process has none.
const char* openmp_library();

class Team {
 public:
  Team(int thread, int size) : thread_(thread), size_(size) {}
  int thread() const { return thread_; }
  int size() const { return size_; }
  void barrier() const;

  // Items 0..n-1, each taken by the next free thread. Every counter serves one loop of one region.
  template <class Body>
  void each(std::atomic<int64_t>& counter, int64_t n, Body&& body) const {
    for (int64_t i; (i = counter.fetch_add(1, std::memory_order_relaxed)) < n;) body(i);
  }

  // Items 0..n-1 in one stretch per thread, so that each reads its own part of memory in order; a thread that has done its own
  // goes on with the others'. counters: one per thread.
  template <class Body>
  void each_in_stretches(std::atomic<int64_t>* counters, int64_t n, Body&& body) const {
    for (int step = 0; step < size_; ++step) {
      const int owner = (thread_ + step) % size_;
      const int64_t begin = n * owner / size_, end = n * (owner + 1) / size_;
      for (int64_t i; (i = begin + counters[owner].fetch_add(1, std::memory_order_relaxed)) < end;) body(i);
    }
  }

 private:
  int thread_, size_;
};

void run_team(int threads, void (*body)(void*, const Team&), void* data);

template <class Body>
void parallel(int threads, Body&& body) {
  run_team(
      threads, [](void* data, const Team& team) { (*static_cast<Body*>(data))(team); }, &body);
}

// Scratch memory of the calling thread, 64-byte aligned, kept between calls. `slot` tells buffers in use at once apart.
void* scratch(int slot, int64_t bytes);

}  // namespace leanroll
