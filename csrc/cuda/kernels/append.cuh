// append_entries as a launch of its own, for sequences of more blocks than win_fill can count.
#pragma once

#include "launch.h"
#include "window.cuh"

namespace gdn {
namespace cuda {

inline int countable_blocks(int64_t blocks) { return blocks <= 255 ? static_cast<int>(blocks) : 0; }

// blockIdx.x = sequence.
static __global__ void __launch_bounds__(256)
    append_window(const __grid_constant__ RecurrentArgs a, int64_t first, bool flush) {
  const int64_t n = first + blockIdx.x;
  wait_for_previous_kernel();
  const WindowPlan plan = plan_window<false>(a, n, flush);
  let_next_kernel_start();
  if (plan.row < 0 || (plan.tokens == 0 && !plan.fold)) return;
  append_entries(a, plan, n);
}

inline cudaError_t launch_append(const RecurrentArgs& a, bool flush, cudaStream_t stream) {
  constexpr int64_t kMaxGridX = 2147483647;
  cudaError_t error = cudaSuccess;
  for (int64_t first = 0; error == cudaSuccess && first < a.seqs.N; first += kMaxGridX) {
    const int64_t count = a.seqs.N - first < kMaxGridX ? a.seqs.N - first : kMaxGridX;
    error = launch(append_window, dim3(static_cast<unsigned>(count)), dim3(256), 0, stream, a,
                   first, flush);
  }
  return error;
}

}  // namespace cuda
}  // namespace gdn
