// The chunked rule in ATen operations on any device: float64 forward, and the backward wherever a
// backend has no kernels for it. cu_seqlens is read on the host to lay the chunks out, so a packed
// call waits for its device.
#pragma once

#include <tuple>

#include "checks.h"

namespace gdn {

std::tuple<at::Tensor, at::Tensor> chunk_forward_aten(
    const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const at::Tensor& g,
    const at::Tensor& beta, const OptTensor& initial_state, const OptTensor& cu_seqlens,
    std::optional<double> scale, bool qk_l2norm, int64_t chunk_size);

// Gradients of q, k, v, g, beta and initial_state in the dtypes of those tensors (initial_state
// absent: f32, or f64 for f64 inputs).
std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor>
chunk_backward_aten(const at::Tensor& grad_o, const OptTensor& grad_final_state,
                    const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                    const at::Tensor& g, const at::Tensor& beta, const OptTensor& initial_state,
                    const OptTensor& cu_seqlens, std::optional<double> scale, bool qk_l2norm,
                    int64_t chunk_size);

}  // namespace gdn
