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

// A thread a sequence.
__global__ void __launch_bounds__(kOrderGroup)
    write_order(const __grid_constant__ RecurrentArgs a, uint4* order, int64_t first, int64_t count,
                bool early) {
  __shared__ int folding[32];            // sequences of each warp
  __shared__ uint4 sorted[kOrderGroup];  // those that fold, then the others
  let_next_kernel_start();
  const int i = threadIdx.x, warp = i >> 5, lane = i & 31;
  const int64_t group = int64_t{blockIdx.x} * kOrderGroup, n = first + group + i;
  const int here = count - group < kOrderGroup ? static_cast<int>(count - group) : kOrderGroup;
  if (!early) wait_for_previous_kernel();
  WindowPlan plan;
  bool fold = false;
  if (i < here) {
    plan = plan_window<false>(a, n, false);
    fold = plan.fold;
    if (plan.row >= 0 && !fold) {
      a.window.fill[plan.row * a.window.s_fill] =
          pack_fill({plan.pending + plan.tokens, plan.tokens > 0 ? plan.tokens - 1 : 0, 0});
    }
  }
  const unsigned folds = __ballot_sync(kFullMask, fold);
  if (lane == 0) folding[warp] = __popc(folds);
  __syncthreads();
  const int others = lane < blockDim.x / 32 ? folding[lane] : 0;
  const int all = lane_sum(others);
  const int before = lane_sum(lane < warp ? others : 0) + __popc(folds & ((1u << lane) - 1));
  if (i < here) sorted[fold ? before : all + i - before] = pack_order(plan, n);
  __syncthreads();
  if (i < here) {
    // One that folds stands where places * all / room steps up.
    const int tail = kOrderTail < here * 3 / 4 ? kOrderTail : here * 3 / 4;
    const int room = here - tail > all ? here - tail : all;
    const int from = i < room ? i * all / room : all, to = i < room ? (i + 1) * all / room : all;
    order[first + group + i] = sorted[to > from ? from : all + i - from];
  }
  // Who waits for this kernel waits for those before it.
  if (early) wait_for_previous_kernel();
}

bool vector_window(const Window& w) {
  const int64_t e = 16 / size_of(w.k_dtype);
  return aligned(w.k, 16) && w.sk_p % e == 0 && w.sk_h % e == 0 && w.sk_r % e == 0;
}

// Offsets inside a head's rows, window or tokens are 32-bit in the kernels.
bool small_offsets(const RecurrentArgs& a) {
  const int64_t R = a.window.R, T = a.seqs.T, most = INT64_C(1) << 31;
  const auto fits = [&](int64_t n, int64_t stride) { return n * stride < most && stride >= 0; };
  return fits(R, a.window.su_r) && fits(R, a.window.sk_r) && fits(R, a.window.sg_r) &&
         (!a.q.ptr || (fits(T, a.q.st) && fits(T, a.k.st) && fits(T, a.v.st) && fits(T, a.out.st) &&
                       fits(a.V, a.v.sd)));
}

// Whether the fast kernels take a call; window_any.cuh takes the others.
bool vectors_can(const RecurrentArgs& a) {
  return (a.K == 64 || a.K == 128 || a.K == 256) && (!a.state.ptr || vector_state(a.state)) &&
         vector_window(a.window) && (!a.q.ptr || (vector_view(a.q, 8) && vector_view(a.k, 8))) &&
         small_offsets(a);
}

}  // namespace

cudaError_t order_windows(const RecurrentArgs& a, uint4* order, int64_t first, int64_t count,
                          bool early, cudaStream_t stream) {
  const int64_t threads = count < kOrderGroup ? (count + 31) / 32 * 32 : kOrderGroup;
  return launch(write_order, dim3(static_cast<unsigned>((count + kOrderGroup - 1) / kOrderGroup)),
                dim3(static_cast<unsigned>(threads)), 0, stream, a, order, first, count, early);
}

size_t window_workspace(const RecurrentArgs& a) {
  if (!a.state.ptr || !vectors_can(a)) return 0;
  // Enough for groups of one token or of four (buffered_launch.cuh).
  const auto bytes = [&](auto ws) {
    return static_cast<size_t>(a.seqs.N) *
           (sizeof(WindowPlan) + static_cast<size_t>(ws.floats_a_sequence()) * sizeof(float));
  };
  const size_t one = bytes(workspace_of<bf16, 256, 1>(a, nullptr));
  const size_t many = bytes(workspace_of<bf16, 256, 4>(a, nullptr));
  return one > many ? one : many;
}

bool window_takes_norm(const RecurrentArgs& a) {
  if (!vectors_can(a) || a.V > (a.K == 256 && a.state.ptr ? 64 : 128)) return false;
  // Kernels that stand alone are bound by their instructions, and the norm has a launch of its own
  // (docs/tried/cuda.md).
  const bool alone = a.state.ptr && stands_alone(a, 128);
  const DType st = a.state.dtype;
  return !alone || (st == DType::f32    ? !usual_kernels<float>(a, false)
                    : st == DType::bf16 ? !usual_kernels<bf16>(a, false)
                                        : !usual_kernels<f16>(a, false));
}

cudaError_t recurrent_window(const RecurrentArgs& a, const WindowCall& call, cudaStream_t stream) {
  if (a.seqs.N == 0 || a.V == 0) return cudaSuccess;
  if (!vectors_can(a)) return window_of_any_shape(a, call, stream);
  if (!a.state.ptr) return lowrank(a, call, stream);
  switch (a.state.dtype) {
    case DType::f32:
      return buffered_f32(a, call, stream);
    case DType::bf16:
      return buffered_bf16(a, call, stream);
    default:
      return buffered_f16(a, call, stream);
  }
}

cudaError_t window_reset(const RecurrentArgs& a, cudaStream_t stream) {
  if (a.seqs.N == 0) return cudaSuccess;
  return launch(reset_fill, dim3(static_cast<unsigned>((a.seqs.N + 127) / 128)), dim3(128), 0,
                stream, a);
}

}  // namespace cuda
}  // namespace gdn
