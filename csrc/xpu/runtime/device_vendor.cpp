// The vendor's runtime. Never compiled where it was written: the calls are those of public sources
// that use xpu/runtime.h (docs/xpu.md lists them).
#include <stdexcept>

#include "device.h"
#include "xpu/runtime.h"

namespace gdn {
namespace xpu {
namespace {

void require(int status, const char* call) {
  if (status != 0) throw std::runtime_error(std::string(call) + " failed: " + status_text(status));
}

}  // namespace

std::string status_text(int status) {
  switch (status) {
    case 711:
      return "711, simulator error";
    case 713:
      return "713, kernel ended abnormally";
    case 714:
      return "714, kernel exception (an illegal address is the usual cause)";
    default:
      return "status " + std::to_string(status);
  }
}

const char* device_name() { return "xpu"; }

int device_count() {
  int n = 0;
  require(xpu_device_count(&n), "xpu_device_count");
  return n;
}

void set_device(int index) { require(xpu_set_device(index), "xpu_set_device"); }

int current_device() {
  int index = 0;
  require(xpu_current_device(&index), "xpu_current_device");
  return index;
}

void* device_alloc(size_t bytes) {
  if (bytes == 0) return nullptr;
  void* p = nullptr;
  require(xpu_malloc(&p, bytes), "xpu_malloc");
  return p;
}

void device_free(void* p) {
  if (p) require(xpu_free(p), "xpu_free");
}

void device_copy(void* dst, const void* src, size_t bytes, Copy kind, void* stream) {
  if (bytes == 0) return;
  auto direction = kind == Copy::host_to_device   ? XPU_HOST_TO_DEVICE
                   : kind == Copy::device_to_host ? XPU_DEVICE_TO_HOST
                                                  : XPU_DEVICE_TO_DEVICE;
  require(xpu_memcpy_async(dst, src, bytes, direction, static_cast<XPUStream>(stream)),
          "xpu_memcpy_async");
}

void stream_wait(void* stream) { require(xpu_wait(static_cast<XPUStream>(stream)), "xpu_wait"); }

// No call of the public API reports the status of a launch without waiting for it.
void check_launch(const char*) {}

}  // namespace xpu
}  // namespace gdn
