// The device underneath: memory, copies, streams. Two implementations, one linked: device_twin.cpp
// (host memory, launches run at once) and device_vendor.cpp (the C API of xpu/runtime.h).
#pragma once

#include <cstddef>
#include <string>

namespace gdn {
namespace xpu {

const char* device_name();  // "xpu-twin" or "xpu"
int device_count();
void set_device(int index);
int current_device();

// Zero bytes give null. Failures throw std::runtime_error with the runtime's code and its meaning.
void* device_alloc(size_t bytes);
void device_free(void* p);
enum class Copy { host_to_device, device_to_host, device_to_device };
void device_copy(void* dst, const void* src, size_t bytes, Copy kind, void* stream);
void stream_wait(void* stream);

// After a launch: throws if the runtime reports a failure that has already happened. Kernel faults
// appear at the next wait; nothing here waits, so launches can be captured into a graph.
void check_launch(const char* kernel);

// What a status of the runtime means, for messages.
std::string status_text(int status);

}  // namespace xpu
}  // namespace gdn
