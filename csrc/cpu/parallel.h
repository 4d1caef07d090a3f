// How a kernel asks for threads without knowing whose they are.
#pragma once

#include <cstdint>

namespace gdn::cpu {

// run(n, body, data): calls body(data, begin, end) over disjoint ranges that cover [0, n).
struct Parallel {
  int threads = 1;
  void (*run)(int64_t n, void (*body)(void*, int64_t, int64_t), void* data) = nullptr;
};

// Scratch of the calling thread, 64-byte aligned: kept until the thread ends or asks for more, so
// that no call maps memory anew. Contents are undefined, and the next request may return the same
// block.
float* thread_scratch(int64_t floats);

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
