// What every file of torch glue of this backend needs: the stream, errors, fresh outputs.
#pragma once

#include <ATen/ATen.h>
#include <c10/core/DeviceGuard.h>

#include "../checks.h"
#include "runtime/host.h"

// On Kunlun's torch the chip presents itself as `cuda`, so the kernels are registered under that
// key; the host twin is a device of its own under PrivateUse1 (torch_device.cpp).
#if defined(GDN_XPU_TWIN)
#define GDN_XPU_KEY PrivateUse1
#else
#include <c10/cuda/CUDAStream.h>
#define GDN_XPU_KEY CUDA
#endif

namespace gdn {
namespace xpu {

// The raw value of the current stream is an XPUStream; the twin has none.
inline void* current_stream() {
#if defined(GDN_XPU_TWIN)
  return nullptr;
#else
  return c10::cuda::getCurrentCUDAStream().stream();
#endif
}

// Runs a launch on the tensor's device and turns what it throws into torch's error.
template <typename F>
void launch(const char* op, const at::Tensor& on, F f) {
  c10::DeviceGuard guard(on.device());
  try {
    f(current_stream());
  } catch (const Unsupported& e) {
    TORCH_CHECK(false, op, ": ", e.what());
  } catch (const c10::Error&) {
    throw;
  } catch (const std::exception& e) {
    TORCH_CHECK(false, op, ": ", e.what());
  }
}

// With cu_seqlens tokens may lie outside every sequence; their outputs are zero.
inline at::Tensor token_output(const at::Tensor& like, at::IntArrayRef sizes,
                               const OptTensor& cu_seqlens) {
  return cu_seqlens ? at::zeros(sizes, like.options()) : new_output(like, sizes);
}

}  // namespace xpu
}  // namespace gdn
