// The twin's device: memory that kernels reach only through checked transfers, and the host only
// through copies.
#include <cstdlib>
#include <cstring>
#include <new>

#include "../twin/machine.h"
#include "device.h"

namespace gdn {
namespace xpu {

const char* device_name() { return "xpu-twin"; }
int device_count() { return 1; }
void set_device(int) {}
int current_device() { return 0; }

void* device_alloc(size_t bytes) {
  if (bytes == 0) return nullptr;
  void* p = std::aligned_alloc(256, (bytes + 255) / 256 * 256);
  if (!p) throw std::bad_alloc();
  // Bytes nobody has written are NaN in every float type and -1 in every integer.
  std::memset(p, 0xff, bytes);
  // Exactly the bytes asked for, so that a transfer past the end of a tensor is an error.
  const uint64_t address = reinterpret_cast<uint64_t>(p) | twin::kGmTag;
  twin::gm_register(address, bytes);
  return reinterpret_cast<void*>(address);
}

void device_free(void* p) {
  if (!p) return;
  const uint64_t address = reinterpret_cast<uint64_t>(p);
  twin::gm_unregister(address);
  std::free(twin::gm_host(address));
}

// A host's pointer has no tag to lose.
void device_copy(void* dst, const void* src, size_t bytes, Copy, void*) {
  auto host = [](const void* p) { return twin::gm_host(reinterpret_cast<uint64_t>(p)); };
  std::memcpy(host(dst), host(src), bytes);
}
void stream_wait(void*) {}
void check_launch(const char*) {}
std::string status_text(int status) { return "twin status " + std::to_string(status); }

}  // namespace xpu
}  // namespace gdn
