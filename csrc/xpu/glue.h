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

// The kernels move channels as they lie next to each other; where they do not, a copy does.
inline at::Tensor dense_channels(const at::Tensor& t) {
  return t.dim() > 0 && t.size(-1) > 1 && t.stride(-1) != 1 ? t.contiguous() : t;
}
inline OptTensor dense_channels(const OptTensor& t) {
  return t ? OptTensor(dense_channels(*t)) : OptTensor();
}
// [C, W], by channel or by tap.
inline at::Tensor dense_weight(const at::Tensor& w) {
  const bool dense = w.dim() != 2 || w.is_contiguous() || w.stride(0) == 1;
  return dense ? w : w.contiguous();
}

// With cu_seqlens tokens may lie outside every sequence; their outputs are zero.
inline at::Tensor token_output(const at::Tensor& like, at::IntArrayRef sizes,
                               const OptTensor& cu_seqlens) {
  return cu_seqlens ? at::zeros(sizes, like.options()) : new_output(like, sizes);
}

// The kernels read rows of K. A pool in the layout of transformers, [P, HV, K, V] seen transposed,
// is copied to such rows and back around the launch: on the device, without a look at any index.
class RowPool {
 public:
  // Points `pool`, the block's view of `state`, at rows. `state` may be null: no pool, nothing
  // done.
  RowPool(const at::Tensor* state, StatePool& pool) : given_(state) {
    if (!state || pool.s_k == 1) return;
    TORCH_WARN_ONCE(
        "gdn_ops: a [P, HV, K, V] pool is copied around every call of an XPU op; allocate [P, HV, "
        "V, K] to avoid it");
    copy_ = state->contiguous();
    pool.ptr = copy_.data_ptr();
    pool.s_p = copy_.stride(0);
    pool.s_h = copy_.stride(1);
    pool.s_v = copy_.stride(2);
    pool.s_k = 1;
  }
  void put_back() {
    if (copy_.defined()) given_->copy_(copy_);
  }

 private:
  const at::Tensor* given_;
  at::Tensor copy_;
};

}  // namespace xpu
}  // namespace gdn
