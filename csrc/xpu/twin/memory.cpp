#include "memory.h"

#include <cstdlib>
#include <cstring>
#include <new>

#include "machine.h"

namespace gdn {
namespace xpu {
namespace twin {

void* allocate(size_t bytes) {
  if (bytes == 0) return nullptr;
  void* p = std::aligned_alloc(256, (bytes + 255) / 256 * 256);
  if (!p) throw std::bad_alloc();
  // Bytes nobody has written are NaN in every float type and -1 in every integer.
  std::memset(p, 0xff, bytes);
  // Exactly the bytes asked for, so that a transfer past the end of a tensor is an error.
  const uint64_t address = reinterpret_cast<uint64_t>(p) | kGmTag;
  gm_register(address, bytes);
  return reinterpret_cast<void*>(address);
}

void release(void* p) {
  if (!p) return;
  const uint64_t address = reinterpret_cast<uint64_t>(p);
  gm_unregister(address);
  std::free(gm_host(address));
}

// A host's pointer has no tag to lose.
void copy(void* dst, const void* src, size_t bytes) {
  std::memcpy(gm_host(reinterpret_cast<uint64_t>(dst)), gm_host(reinterpret_cast<uint64_t>(src)),
              bytes);
}

}  // namespace twin
}  // namespace xpu
}  // namespace gdn
