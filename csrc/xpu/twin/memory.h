// The twin's device memory: kernels reach it only through checked transfers, the host only through
// copies. On Kunlun's machines this is torch's own allocator.
#pragma once

#include <cstddef>

namespace gdn {
namespace xpu {
namespace twin {

// Addresses that no host code can use by accident. Zero bytes give null; throws std::bad_alloc.
void* allocate(size_t bytes);
void release(void* p);
// Between any two of device and host memory.
void copy(void* dst, const void* src, size_t bytes);

}  // namespace twin
}  // namespace xpu
}  // namespace gdn
