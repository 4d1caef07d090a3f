// How a kernel asks for threads without knowing whose they are.
#pragma once

#include <cstddef>
#include <cstdint>

namespace gdn::cpu {

// run(n, body, data): calls body(data, begin, end) over disjoint ranges that cover [0, n).
struct Parallel {
  int threads = 1;
  void (*run)(int64_t n, void (*body)(void*, int64_t, int64_t), void* data) = nullptr;
};

// Scratch of the calling thread, 64-byte aligned: kept until the thread ends or asks for more, so
// that no call maps memory anew. Contents are undefined, and the next request may return the same
// block. Throws std::bad_alloc.
float* thread_scratch(int64_t floats);

// Memory of one scope, 64-byte aligned: for what several threads share, or what must outlive the
// next request for thread_scratch. Contents are undefined. Throws std::bad_alloc.
class ScopedMemory {
 public:
  explicit ScopedMemory(size_t bytes);
  ~ScopedMemory();
  ScopedMemory(const ScopedMemory&) = delete;
  ScopedMemory& operator=(const ScopedMemory&) = delete;
  void* const data;
};

template <class Body>
void parallel_for(const Parallel& p, int64_t n, Body& body) {
  if (n <= 0) return;
  if (p.threads == 1 || n == 1) {
    body(0, n);
    return;
  }
  p.run(
      n, [](void* data, int64_t begin, int64_t end) { (*static_cast<Body*>(data))(begin, end); },
      &body);
}

}  // namespace gdn::cpu
