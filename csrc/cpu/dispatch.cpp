// Which instruction set and which precision are in use, and the memory that kernels ask for.
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <new>
#include <stdexcept>

#include "table.h"

namespace gdn::cpu {

#if GDN_WITH_AMX
namespace amx {
extern const Kernels table;
}
#endif
#if defined(__x86_64__)
namespace avx512bf16 {
extern const Kernels table;
}
namespace avx512 {
extern const Kernels table;
}
namespace avx2 {
extern const Kernels table;
}
#elif defined(__aarch64__)
namespace neon {
extern const Kernels table;
}
#endif
namespace scalar {
extern const Kernels table;
}

const std::vector<const Kernels*>& compiled() {
  static const std::vector<const Kernels*> all = {
#if GDN_WITH_AMX
      &amx::table,
#endif
#if defined(__x86_64__)
      &avx512bf16::table, &avx512::table, &avx2::table,
#elif defined(__aarch64__)
      &neon::table,
#endif
      &scalar::table,
  };
  return all;
}

namespace {

const Kernels* choose() {
  const char* forced = std::getenv("GDN_CPU_ISA");
  std::string offered;
  for (const Kernels* k : compiled()) {
    if (forced && *forced ? std::strcmp(k->name, forced) == 0 : k->supported()) {
      if (k->supported()) return k;
      throw std::runtime_error(std::string("GDN_CPU_ISA=") + forced +
                               ": this processor does not support it");
    }
    if (k->supported()) offered += std::string(offered.empty() ? "" : ", ") + k->name;
  }
  throw std::runtime_error(std::string("GDN_CPU_ISA: expected one of ") + offered + ", got '" +
                           forced + "'");
}

Precision initial_precision() {
  const char* mode = std::getenv("GDN_PRECISION");
  if (!mode || !*mode || std::strcmp(mode, "exact") == 0) return Precision::exact;
  if (std::strcmp(mode, "fast") == 0) return Precision::fast;
  if (std::strcmp(mode, "auto") == 0) return Precision::automatic;
  throw std::runtime_error(std::string("GDN_PRECISION: expected exact, fast or auto, got '") +
                           mode + "'");
}

std::atomic<Precision>& current_precision() {
  static std::atomic<Precision> p{initial_precision()};
  return p;
}

void* allocate(size_t alignment, size_t bytes) {
  // A whole number of alignments, as aligned_alloc wants it, and never null for none.
  void* p = std::aligned_alloc(alignment, (bytes / alignment + 1) * alignment);
  if (!p) throw std::bad_alloc();
  return p;
}

}  // namespace

ScopedMemory::ScopedMemory(size_t bytes) : data(allocate(64, bytes)) {}
ScopedMemory::~ScopedMemory() { std::free(data); }

float* thread_scratch(int64_t floats) {
  struct Block {
    float* data = nullptr;
    int64_t size = 0;
    ~Block() { std::free(data); }
  };
  thread_local Block block;
  if (floats > block.size) {
    std::free(block.data);
    block = {};
    block.data = static_cast<float*>(allocate(4096, static_cast<size_t>(floats) * sizeof(float)));
    block.size = floats;
  }
  return block.data;
}

const Kernels& kernels() {
  static const Kernels* const chosen = choose();
  return *chosen;
}

Precision precision() { return current_precision().load(std::memory_order_relaxed); }
void set_precision(Precision p) { current_precision().store(p, std::memory_order_relaxed); }

}  // namespace gdn::cpu
