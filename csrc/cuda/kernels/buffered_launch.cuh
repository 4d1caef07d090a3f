// Launches of the buffered kernels for one state dtype; one file a dtype, as recurrent_launch.cuh.
#pragma once

#include <type_traits>

#include "append.cuh"
#include "buffered.cuh"
#include "launch.h"
#include "select.h"

namespace gdn {
namespace cuda {

template <class ST, int K, int TG>
WindowWorkspace workspace_of(const RecurrentArgs& a, void* memory) {
  WindowWorkspace ws;
  const int64_t N = a.seqs.N, most = a.seqs.T < a.window.R ? a.seqs.T : a.window.R;
  ws.R = static_cast<int>(a.window.R);
  ws.H = static_cast<int>(a.H);
  ws.HV = static_cast<int>(a.HV);
  ws.groups = static_cast<int>(most < 1 ? 1 : (most + TG - 1) / TG);
  ws.column = WindowColumns<ST, K, TG>::kFloats;
  ws.record = record_floats(ws.R, TG);
  ws.fold = (ws.R + 4) / 4 * 4;
  ws.plans = static_cast<WindowPlan*>(memory);
  ws.columns = reinterpret_cast<float*>(ws.plans + N);
  ws.records = ws.columns + N * ws.H * ws.groups * ws.column;
  ws.folds = ws.records + N * ws.HV * ws.groups * ws.record;
  ws.keys = reinterpret_cast<char*>(ws.folds + N * ws.HV * ws.fold);
  ws.key_bytes = static_cast<int>(a.window.R * a.K * 4);
  return ws;
}

template <class ST, class AT, class KT, class UT, int K, int VB, int TG, int MIN_BLOCKS,
          bool ALONE = false, bool PLANNED = false>
cudaError_t launch_buffered_rows(const RecurrentArgs& a, const WindowCall& call,
                                 cudaStream_t stream) {
  const WindowWorkspace ws = workspace_of<ST, K, TG>(a, call.workspace);
  const auto kernel = buffered_rows<ST, AT, KT, UT, K, VB, TG, MIN_BLOCKS, ALONE, PLANNED>;
  const int shared = BufferedShared<ST, AT, KT, K, VB, TG, ALONE>::bytes(ws.R);
  cudaError_t error =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared);
  if (error == cudaSuccess) {
    error = cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout,
                                 cudaSharedmemCarveoutMaxShared);
  }
  BufferedGrid grid;
  grid.row_blocks = FastDiv(static_cast<uint32_t>((a.V + VB - 1) / VB));
  grid.ratio = FastDiv(static_cast<uint32_t>(a.HV / a.H));
  grid.flush = call.flush;
  grid.norm = call.norm;
  grid.wave = MIN_BLOCKS * multiprocessors();
  const int64_t blocks = a.HV * grid.row_blocks.divisor;
  grid.blocks = static_cast<int>(blocks);
  for (; error == cudaSuccess && grid.first < a.seqs.N; grid.first += kMaxGridY) {
    const int64_t count = a.seqs.N - grid.first < kMaxGridY ? a.seqs.N - grid.first : kMaxGridY;
    if constexpr (!ALONE) {
      error = launch(prepare_window<ST, AT, KT, K, TG>,
                     dim3(static_cast<unsigned>(a.H), static_cast<unsigned>(count)), dim3(32), 0,
                     stream, a, ws, grid.first, call.flush, call.early);
      if (error != cudaSuccess) break;
    }
    if constexpr (PLANNED) {
      uint4* const order = static_cast<uint4*>(call.workspace);
      grid.order = order;
      error = order_windows(a, order, grid.first, count, call.early, stream);
      if (error != cudaSuccess) break;
    }
    error = launch(kernel, dim3(static_cast<unsigned>(blocks), static_cast<unsigned>(count)),
                   dim3(VB), shared, stream, a, grid, ws);
  }
  return error;
}

// Whether the blocks of the rows do without a kernel before them: they take the tokens of a
// sequence together, and its counts can hold them twice.
inline bool stands_alone(const RecurrentArgs& a, int rows) {
  return !a.seqs.cu_seqlens.ptr && a.seqs.T <= 4 &&
         countable_blocks(2 * a.HV * ((a.V + rows - 1) / rows)) > 0;
}

template <class ST, class AT, class KT, class UT, int K, int BLOCKS, bool PLANNED>
cudaError_t launch_tokens(const RecurrentArgs& a, const WindowCall& call, cudaStream_t stream) {
  if (a.seqs.T == 1) {
    return launch_buffered_rows<ST, AT, KT, UT, K, 128, 1, BLOCKS, true, PLANNED>(a, call, stream);
  }
  // Planned, a f32 window beside a base of 16 bits would spill registers here.
  constexpr bool planned = PLANNED && (sizeof(ST) == 4 || sizeof(UT) == 2);
  return launch_buffered_rows<ST, AT, KT, UT, K, 128, 4, BLOCKS, true, planned>(a, call, stream);
}

template <class ST, class AT, class KT, class UT, int K>
cudaError_t launch_alone(const RecurrentArgs& a, const WindowCall& call, cudaStream_t stream) {
  // With less than 96 registers these spill, and a spilled value that was asked for is waited for.
  constexpr int blocks = sizeof(ST) == 4 ? 3 : 5;
  // What the order costs, a launch, is won back where blocks follow on others.
  const int64_t all = a.seqs.N * a.HV * ((a.V + 127) / 128);
  if (2 * all > 3 * blocks * multiprocessors()) {
    return launch_tokens<ST, AT, KT, UT, K, blocks, true>(a, call, stream);
  }
  return launch_tokens<ST, AT, KT, UT, K, blocks, false>(a, call, stream);
}

template <class ST, class AT, class KT, class UT, int K>
cudaError_t launch_buffered_k(const RecurrentArgs& a, const WindowCall& call, cudaStream_t stream) {
  const bool one = call.flush || (!a.seqs.cu_seqlens.ptr && a.seqs.T == 1);
  constexpr int rows = K == 256 ? 64 : 128;
  constexpr int blocks = sizeof(ST) == 4 ? 3 : 6;
  constexpr int fewer = sizeof(ST) == 4 ? 3 : 5;
  if constexpr (!kIsAny<AT>) {
    if (stands_alone(a, rows)) return launch_alone<ST, AT, KT, UT, K>(a, call, stream);
  }
  return one ? launch_buffered_rows<ST, AT, KT, UT, K, rows, 1, blocks>(a, call, stream)
             : launch_buffered_rows<ST, AT, KT, UT, K, rows, 4, fewer>(a, call, stream);
}

// Dtypes that have kernels of their own, in files of their own, for K = 128: base, activations,
// window. The others find out as they go.
template <class ST, class AT, class WT>
cudaError_t buffered_usual(const RecurrentArgs& a, const WindowCall& call, cudaStream_t stream);

// Those of a call, or null. Some have only the kernels that stand alone.
template <class ST>
auto usual_kernels(const RecurrentArgs& a, bool flush) -> decltype(&buffered_usual<ST, bf16, ST>) {
  constexpr DType b = DType::bf16, h = DType::f16, f = DType::f32;
  const DType wt = a.window.u_dtype;
  if (a.K != 128 || flush || a.window.k_dtype != wt) return nullptr;
  const bool alone = stands_alone(a, 128);
  const auto is = [&](DType activations, DType window) {
    return a.q.dtype == activations && wt == window;
  };
  if constexpr (sizeof(ST) == 4) {
    if (is(b, f)) return buffered_usual<ST, bf16, float>;
    if (is(h, f)) return buffered_usual<ST, f16, float>;
    if (is(b, b) && alone) return buffered_usual<ST, bf16, bf16>;
    if (is(b, h) && alone) return buffered_usual<ST, bf16, f16>;
    if (is(h, h) && alone) return buffered_usual<ST, f16, f16>;
  } else if (wt == f) {
    if (is(b, f) && alone) return buffered_usual<ST, bf16, float>;
  } else if (vector_updates(a)) {
    if (is(b, TypeOf<ST>::value)) return buffered_usual<ST, bf16, ST>;
    if constexpr (TypeOf<ST>::value == h) {
      if (is(h, h)) return buffered_usual<ST, f16, ST>;
    }
  }
  return nullptr;
}

template <class ST>
cudaError_t launch_buffered(const RecurrentArgs& a, const WindowCall& call, cudaStream_t stream) {
  if (const auto usual = usual_kernels<ST>(a, call.flush)) return usual(a, call, stream);
  switch (a.K) {
    case 64:
      return launch_buffered_k<ST, Any, Any, Any, 64>(a, call, stream);
    case 128:
      return launch_buffered_k<ST, Any, Any, Any, 128>(a, call, stream);
    default:
      return launch_buffered_k<ST, Any, Any, Any, 256>(a, call, stream);
  }
}

cudaError_t buffered_f32(const RecurrentArgs& a, const WindowCall& call, cudaStream_t stream);
cudaError_t buffered_bf16(const RecurrentArgs& a, const WindowCall& call, cudaStream_t stream);
cudaError_t buffered_f16(const RecurrentArgs& a, const WindowCall& call, cudaStream_t stream);
cudaError_t lowrank(const RecurrentArgs& a, const WindowCall& call, cudaStream_t stream);
// For what those do not take; of the call it heeds `flush`.
cudaError_t window_of_any_shape(const RecurrentArgs& a, const WindowCall& call,
                                cudaStream_t stream);

}  // namespace cuda
}  // namespace gdn
