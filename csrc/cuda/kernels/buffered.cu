#include "buffered_launch.cuh"
#include "kernels.h"

namespace gdn {
namespace cuda {
namespace {

__global__ void __launch_bounds__(128) reset_fill(const __grid_constant__ RecurrentArgs a) {
  const int64_t n = static_cast<int64_t>(blockIdx.x) * 128 + threadIdx.x;
  wait_for_previous_kernel();
  let_next_kernel_start();
  if (n >= a.seqs.N) return;
  const int64_t row = a.seqs.state_indices.ptr ? at(a.seqs.state_indices, n) : n;
  if (row >= 0 && row < a.window.P) a.window.fill[row * a.window.s_fill] = 0;
}

bool vector_window(const Window& w) {
  const int64_t e = 16 / size_of(w.k_dtype);
  return aligned(w.k, 16) && w.sk_p % e == 0 && w.sk_h % e == 0 && w.sk_r % e == 0;
}

cudaError_t run(const RecurrentArgs& a, void* workspace, bool flush, cudaStream_t stream) {
  if (a.seqs.N == 0 || a.V == 0) return cudaSuccess;
  switch (a.state.dtype) {
    case DType::f32:
      return buffered_f32(a, workspace, flush, stream);
    case DType::bf16:
      return buffered_bf16(a, workspace, flush, stream);
    default:
      return buffered_f16(a, workspace, flush, stream);
  }
}

}  // namespace

const char* buffered_refusal(const RecurrentArgs& a) {
  if (a.K != 64 && a.K != 128 && a.K != 256) return "K: the CUDA kernels take K = 64, 128, 256";
  if (a.window.R > kMaxWindow) return "win_k: the CUDA kernels take windows of at most R = 64";
  if (!vector_state(a.state)) {
    return "state: the CUDA kernels take a contiguous, 16-byte aligned key axis (layout "
           "[P, HV, V, K])";
  }
  if (!vector_window(a.window)) return "win_k: the CUDA kernels take 16-byte aligned keys";
  const int64_t e = 16 / size_of(a.state.dtype);
  if (a.q.ptr && (!vector_view(a.q, e) || !vector_view(a.k, e))) {
    return "q, k: the CUDA kernels take a contiguous, 16-byte aligned last axis";
  }
  if (a.q.ptr && (a.q.dtype != a.k.dtype || a.q.dtype != a.v.dtype)) {
    return "q, k, v: the CUDA kernels take one dtype";
  }
  return nullptr;
}

size_t buffered_workspace(const RecurrentArgs& a) {
  const WindowWorkspace ws = workspace_of(a, nullptr);
  return static_cast<size_t>(a.seqs.N) *
         (sizeof(WindowPlan) +
          static_cast<size_t>(a.H) * ws.tokens * static_cast<size_t>(ws.record()) * sizeof(float));
}

cudaError_t recurrent_buffered(const RecurrentArgs& a, void* workspace, cudaStream_t stream) {
  return run(a, workspace, false, stream);
}

cudaError_t window_flush(const RecurrentArgs& a, void* workspace, cudaStream_t stream) {
  return run(a, workspace, true, stream);
}

cudaError_t window_reset(const RecurrentArgs& a, cudaStream_t stream) {
  if (a.seqs.N == 0) return cudaSuccess;
  return launch(reset_fill, dim3(static_cast<unsigned>((a.seqs.N + 127) / 128)), dim3(128), 0,
                stream, a);
}

}  // namespace cuda
}  // namespace gdn
