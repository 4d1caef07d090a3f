// Launches of the buffered recurrence for one state dtype; one file a dtype, as recurrent_launch.cuh.
#pragma once

#include "buffered_stream.cuh"
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
    const cudaError_t error =
        launch(buffered_rows<ST, AT, K, RPW, LANES, WARPS, MIN_BLOCKS>,
               dim3(static_cast<unsigned>(a.HV) * grid.row_blocks.divisor,
                    static_cast<unsigned>(count)),
               dim3(WARPS * 32), 0, stream, a, grid, ws);
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

// Whether buffered_stream takes the call; fills in its grid and shared memory.
template <class ST, class AT, int K, int ROWS>
bool stream_can(const RecurrentArgs& a, const WindowWorkspace& ws, StreamGrid* grid, int* blocks,
                int* shared) {
  int device = 0, processors = 0, most = 0;
  if (!has_dependent_launch() || cudaGetDevice(&device) != cudaSuccess ||
      cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device) != cudaSuccess ||
      cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerBlockOptin, device) !=
          cudaSuccess) {
    return false;
  }
  const Window& w = a.window;
  const int64_t u_size = size_of(w.u_dtype);
  const auto whole = [](int64_t elements, int64_t size) { return elements * size % 16 == 0; };
  const int64_t size = sizeof(AT);
  if (a.seqs.cu_seqlens.ptr || a.seqs.T != 1 || w.R > 32 || a.V % ROWS != 0 ||
      a.state.s_v != K || a.q.sd != 1 || a.k.sd != 1 || a.v.sd != 1 || !aligned(a.q.ptr, 16) ||
      !aligned(a.k.ptr, 16) || !aligned(a.v.ptr, 16) || !whole(a.q.sb, size) ||
      !whole(a.q.sh, size) || !whole(a.k.sb, size) || !whole(a.k.sh, size) ||
      !whole(a.v.sb, size) || !whole(a.v.sh, size) || !aligned(w.u, 16) ||
      !whole(w.su_p, u_size) || !whole(w.su_h, u_size) || !whole(w.su_r, u_size)) {
    return false;
  }
  grid->parts = static_cast<uint32_t>(a.V / ROWS);
  grid->tiles = a.seqs.N * a.HV * grid->parts;
  // Few tiles do not fill the pipelines of all multiprocessors.
  if (grid->tiles < 8 * processors || grid->tiles >= (int64_t{1} << 31)) return false;
  grid->ratio = FastDiv(static_cast<uint32_t>(a.HV / a.H));
  grid->at = stream_layout(ROWS, K, sizeof(ST), sizeof(AT), static_cast<int>(u_size),
                           static_cast<int>(size_of(w.k_dtype)), static_cast<int>(w.R),
                           ws.record());
  const int room = most - 8 * 1024;  // the kernel's own shared variables
  grid->stages = room / grid->at.bytes;
  if (grid->stages > kMaxStages) grid->stages = kMaxStages;
  if (grid->stages < 3) return false;
  *shared = grid->stages * grid->at.bytes;
  *blocks = processors;
  return true;
}

template <class ST, class AT, int K, int ROWS, int LANES, int WARPS, int GROUPS>
cudaError_t launch_buffered_stream(const RecurrentArgs& a, const WindowWorkspace& ws,
                                   cudaStream_t stream, bool* taken) {
  StreamGrid grid;
  int blocks = 0, shared = 0;
  *taken = stream_can<ST, AT, K, ROWS>(a, ws, &grid, &blocks, &shared);
  if (!*taken) return cudaSuccess;
  const auto kernel = buffered_stream<ST, AT, K, ROWS, LANES, WARPS, GROUPS>;
  const cudaError_t error =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared);
  if (error != cudaSuccess) return error;
  return launch(kernel, dim3(static_cast<unsigned>(blocks)), dim3((WARPS * GROUPS + 1) * 32),
                static_cast<size_t>(shared), stream, a, grid, ws);
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
  bool taken = false;
  error = cudaSuccess;
  if constexpr (K == 128) {
    if (!flush) {
      error = launch_buffered_stream<ST, AT, 128, sizeof(ST) == 4 ? 64 : 128, 16,
                                     sizeof(ST) == 4 ? 4 : 8, sizeof(ST) == 4 ? 4 : 2>(
          a, ws, stream, &taken);
    }
  }
  if (taken || error != cudaSuccess) {
    // The streaming kernel has it.
  } else if constexpr (sizeof(ST) == 4) {
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
cudaError_t launch_buffered(const RecurrentArgs& a, void* memory, bool flush,
                            cudaStream_t stream) {
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
