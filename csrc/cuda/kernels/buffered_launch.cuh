// Launches of the buffered recurrence for one state dtype; one file a dtype, as
// recurrent_launch.cuh.
#pragma once

#include "buffered.cuh"
#include "launch.h"
#include "select.h"

namespace gdn {
namespace cuda {

inline WindowWorkspace workspace_of(const RecurrentArgs& a, void* memory) {
  WindowWorkspace ws;
  ws.plans = static_cast<WindowPlan*>(memory);
  ws.data = reinterpret_cast<float*>(static_cast<char*>(memory) + a.seqs.N * sizeof(WindowPlan));
  ws.R = static_cast<int>(a.window.R);
  const int64_t most = a.seqs.T < a.window.R ? a.seqs.T : a.window.R;
  ws.tokens = static_cast<int>(most < 1 ? 1 : most);
  return ws;
}

template <class ST, class AT, int K, int RPW, int LANES, int WARPS, int MIN_BLOCKS>
cudaError_t launch_buffered_rows(const RecurrentArgs& a, const WindowWorkspace& ws,
                                 cudaStream_t stream) {
  constexpr int rows = RPW * WARPS;
  BufferedGrid grid;
  grid.row_blocks = FastDiv(static_cast<uint32_t>((a.V + rows - 1) / rows));
  grid.ratio = FastDiv(static_cast<uint32_t>(a.HV / a.H));
  for (; grid.first < a.seqs.N; grid.first += kMaxGridY) {
    const int64_t count = a.seqs.N - grid.first < kMaxGridY ? a.seqs.N - grid.first : kMaxGridY;
    const cudaError_t error = launch(
        buffered_rows<ST, AT, K, RPW, LANES, WARPS, MIN_BLOCKS>,
        dim3(static_cast<unsigned>(a.HV) * grid.row_blocks.divisor, static_cast<unsigned>(count)),
        dim3(WARPS * 32), 0, stream, a, grid, ws);
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

template <class ST, class AT, int K>
cudaError_t launch_buffered_k(const RecurrentArgs& a, const WindowWorkspace& ws, bool flush,
                              cudaStream_t stream) {
  for (int64_t first = 0; first < a.seqs.N; first += kMaxGridY) {
    const int64_t count = a.seqs.N - first < kMaxGridY ? a.seqs.N - first : kMaxGridY;
    const cudaError_t error =
        launch(prepare_window<AT>,
               dim3(flush ? 1u : static_cast<unsigned>(a.H), static_cast<unsigned>(count)),
               dim3(128), 0, stream, a, ws, first, flush);
    if (error != cudaSuccess) return error;
  }
  cudaError_t error;
  if constexpr (sizeof(ST) == 4) {
    constexpr int lanes = K == 256 ? 32 : 16;
    error = launch_buffered_rows<ST, AT, K, K == 256 ? 8 : 16, lanes, 2, 6>(a, ws, stream);
  } else {
    constexpr int lanes = K == 64 ? 8 : 16;
    error = launch_buffered_rows<ST, AT, K, 16, lanes, 1, K == 256 ? 8 : 16>(a, ws, stream);
  }
  if (error != cudaSuccess) return error;
  constexpr int64_t kMaxGridX = 2147483647;
  for (int64_t first = 0; first < a.seqs.N; first += kMaxGridX) {
    const int64_t count = a.seqs.N - first < kMaxGridX ? a.seqs.N - first : kMaxGridX;
    error = launch(append_window<AT>, dim3(static_cast<unsigned>(count)), dim3(256), 0, stream, a,
                   ws, first);
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

template <class ST, class AT>
cudaError_t launch_buffered_activation(const RecurrentArgs& a, const WindowWorkspace& ws,
                                       bool flush, cudaStream_t stream) {
  switch (a.K) {
    case 64:
      return launch_buffered_k<ST, AT, 64>(a, ws, flush, stream);
    case 128:
      return launch_buffered_k<ST, AT, 128>(a, ws, flush, stream);
    default:
      return launch_buffered_k<ST, AT, 256>(a, ws, flush, stream);
  }
}

template <class ST>
cudaError_t launch_buffered(const RecurrentArgs& a, void* memory, bool flush, cudaStream_t stream) {
  const WindowWorkspace ws = workspace_of(a, memory);
  switch (a.q.dtype) {
    case DType::f32:
      return launch_buffered_activation<ST, float>(a, ws, flush, stream);
    case DType::bf16:
      return launch_buffered_activation<ST, bf16>(a, ws, flush, stream);
    default:
      return launch_buffered_activation<ST, f16>(a, ws, flush, stream);
  }
}

cudaError_t buffered_f32(const RecurrentArgs& a, void* memory, bool flush, cudaStream_t stream);
cudaError_t buffered_bf16(const RecurrentArgs& a, void* memory, bool flush, cudaStream_t stream);
cudaError_t buffered_f16(const RecurrentArgs& a, void* memory, bool flush, cudaStream_t stream);

}  // namespace cuda
}  // namespace gdn
