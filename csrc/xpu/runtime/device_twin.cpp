// The twin's device: host memory that kernels reach only through checked transfers.
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
  twin::gm_register(reinterpret_cast<uint64_t>(p), bytes);
  return p;
}

void device_free(void* p) {
  if (!p) return;
  twin::gm_unregister(reinterpret_cast<uint64_t>(p));
  std::free(p);
}

void device_copy(void* dst, const void* src, size_t bytes, Copy, void*) {
  std::memcpy(dst, src, bytes);
}
void stream_wait(void*) {}
void check_launch(const char*) {}
std::string status_text(int status) { return "twin status " + std::to_string(status); }

}  // namespace xpu
}  // namespace gdn
