// append_entries as a launch of its own, for sequences of more blocks than win_fill can count.
#pragma once

#include "launch.h"
#include "window.cuh"

namespace gdn {
namespace cuda {

inline int countable_blocks(int64_t blocks) { return blocks <= 255 ? static_cast<int>(blocks) : 0; }

// blockIdx.x = sequence.
template <int K>
__global__ void __launch_bounds__(256)
    append_window(const __grid_constant__ RecurrentArgs a, int64_t first) {
  const int64_t n = first + blockIdx.x;
  wait_for_previous_kernel();
  const WindowPlan plan = plan_window<false>(a, n, false);
  let_next_kernel_start();
  if (plan.row < 0 || plan.tokens == 0) return;
  append_entries<K>(a, plan, n);
}

template <int K>
cudaError_t launch_append(const RecurrentArgs& a, cudaStream_t stream) {
  constexpr int64_t kMaxGridX = 2147483647;
  cudaError_t error = cudaSuccess;
  for (int64_t first = 0; error == cudaSuccess && first < a.seqs.N; first += kMaxGridX) {
    const int64_t count = a.seqs.N - first < kMaxGridX ? a.seqs.N - first : kMaxGridX;
    error = launch(append_window<K>, dim3(static_cast<unsigned>(count)), dim3(256), 0, stream, a,
                   first);
  }
  return error;
}

}  // namespace cuda
}  // namespace gdn
