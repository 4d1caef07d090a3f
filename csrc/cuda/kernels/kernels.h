// The CUDA kernels as the glue sees them. No torch here: argument blocks in, launches on a stream.
//
// Nothing here synchronises, allocates or reads device memory on the host, so every call can be
// captured in a CUDA graph. A function returns the first launch error.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>

#include "../../args.h"

namespace gdn {
namespace cuda {

// `early`: the kernel before this one, ours, writes neither state nor indices, so both may be read
// while it still runs.
cudaError_t recurrent(const RecurrentArgs& a, cudaStream_t stream, bool early = false);

// The gated norm of the layer, where the block that owns a head takes it on.
struct NormTail {
  bool on = false;
  View z, y;
  Param weight;
  float eps = 0.f;
};

// What a call of the window kernels may ask for beside its arguments.
struct WindowCall {
  bool flush = false;
  bool early = false;         // as in recurrent
  void* workspace = nullptr;  // window_workspace bytes, 16-byte aligned
  NormTail norm;              // only where window_takes_norm
};

// `a.state.ptr` null: low-rank. Each of these finds out from the complete block which kernel runs.
size_t window_workspace(const RecurrentArgs& a);
// Whether one block owns all rows of a head, and the norm gains by it.
bool window_takes_norm(const RecurrentArgs& a);
cudaError_t recurrent_window(const RecurrentArgs& a, const WindowCall& call, cudaStream_t stream);
cudaError_t window_reset(const RecurrentArgs& a, cudaStream_t stream);

// Chunked prefill, both forms: into `a.write`, or, where `a.window.fill` is set, into the window.
// `workspace`: chunk_workspace device bytes, 16-byte aligned.
size_t chunk_workspace(const ChunkArgs& a);
cudaError_t chunk(const ChunkArgs& a, void* workspace, cudaStream_t stream);

// Gradients of the functional form. All states are contiguous float32.
// Whether the kernels take it: K = 64 or 128, V a multiple of 64, contiguous K and V of one dtype,
// and few enough value heads a key head for shared memory.
bool chunk_backward_can(const ChunkBackwardArgs& a);
size_t chunk_backward_workspace(const ChunkBackwardArgs& a);
cudaError_t chunk_backward(const ChunkBackwardArgs& a, void* workspace, cudaStream_t stream);

cudaError_t gating(const GatingArgs& a, cudaStream_t stream);
cudaError_t short_conv(const ConvArgs& a, cudaStream_t stream);
// Functional form: `a.state` is the initial state (null: none), `final_state` another tensor.
cudaError_t conv1d(const ConvArgs& a, const ConvPool& final_state, cudaStream_t stream);
cudaError_t conv_gating(const ConvGatingArgs& a, cudaStream_t stream);
cudaError_t gated_rms_norm(const NormArgs& a, cudaStream_t stream);
// The same for x [B, T, HV, V] contiguous and a gate of x's dtype inside a packed projection.
cudaError_t gated_norm_heads(const NormArgs& a, const View& gate, int64_t B, int64_t T, int64_t HV,
                             cudaStream_t stream);

}  // namespace cuda
}  // namespace gdn
