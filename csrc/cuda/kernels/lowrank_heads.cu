#include "lowrank_heads.cuh"

#include "append.cuh"
#include "launch.h"
#include "lowrank.h"
#include "select.h"

namespace gdn {
namespace cuda {
namespace {

bool same_dtype(const RecurrentArgs& a, DType window) {
  return a.window.k_dtype == window && a.window.u_dtype == window;
}
// Four neighbouring rows of V at a time.
bool four_rows(const RecurrentArgs& a, const View& x) {
  return x.dtype == a.q.dtype && vector_view(x, 4);
}

constexpr int64_t kAheadBytes = 12 << 20;
constexpr int kHeadsTokens = 4;  // of a sequence at a time

template <class WT>
int shared_bytes(const RecurrentArgs& a) {
  return HeadsShared<WT, kHeadsTokens>::bytes(static_cast<int>(a.window.R),
                                              static_cast<int>(a.HV / a.H));
}

template <class AT, class WT, int TG, bool NORM, bool MANY>
cudaError_t launch_heads(const RecurrentArgs& a, const WindowCall& call, cudaStream_t stream) {
  const auto kernel = lowrank_heads<AT, WT, TG, NORM, MANY>;
  const int heads = static_cast<int>(a.HV / a.H);
  const int shared = HeadsShared<WT, TG>::bytes(static_cast<int>(a.window.R), heads);
  cudaError_t error = allow_shared(kernel, shared);
  if (error == cudaSuccess) {
    error = cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout,
                                 cudaSharedmemCarveoutMaxShared);
  }
  LowrankHeadsGrid grid;
  grid.early = call.early;
  grid.norm = call.norm;
  // What a small batch fetches is used before it leaves L2; a large one gains nothing
  // (docs/tried/cuda.md).
  grid.ahead = !call.early && a.seqs.N * a.H * shared <= kAheadBytes;
  for (; error == cudaSuccess && grid.first < a.seqs.N; grid.first += kMaxGridY) {
    const int64_t count = a.seqs.N - grid.first < kMaxGridY ? a.seqs.N - grid.first : kMaxGridY;
    error = launch(kernel, dim3(static_cast<unsigned>(a.H), static_cast<unsigned>(count)),
                   dim3(32 * heads), shared, stream, a, grid);
  }
  return error;
}

template <class AT, class WT, bool NORM>
cudaError_t launch_tokens(const RecurrentArgs& a, const WindowCall& call, cudaStream_t stream) {
  if (a.seqs.cu_seqlens.ptr || a.seqs.T > kHeadsTokens) {
    return launch_heads<AT, WT, kHeadsTokens, NORM, true>(a, call, stream);
  }
  return a.seqs.T == 1 ? launch_heads<AT, WT, 1, NORM, false>(a, call, stream)
                       : launch_heads<AT, WT, kHeadsTokens, NORM, false>(a, call, stream);
}

template <class AT, class WT>
cudaError_t launch_type(const RecurrentArgs& a, const WindowCall& call, cudaStream_t stream) {
  return call.norm.on ? launch_tokens<AT, WT, true>(a, call, stream)
                      : launch_tokens<AT, WT, false>(a, call, stream);
}

}  // namespace

bool lowrank_heads_can(const RecurrentArgs& a, const WindowCall& call) {
  const DType at = a.q.dtype;
  if (at == DType::f32 || !(same_dtype(a, at) || same_dtype(a, DType::f32))) return false;
  if (a.K != 128 || a.V != 128 || a.HV / a.H > kMaxHeads || countable_blocks(a.H) == 0)
    return false;
  if (a.seqs.T < 1 || a.window.R < kHeadsTokens) return false;
  const bool rows =
      four_rows(a, a.v) &&
      (call.norm.on ? four_rows(a, call.norm.z) && four_rows(a, call.norm.y) : four_rows(a, a.out));
  return rows && vector_updates(a) &&
         (a.window.u_dtype == DType::f32 ? shared_bytes<float>(a) : shared_bytes<bf16>(a)) <=
             shared_limit();
}

cudaError_t launch_lowrank_heads(const RecurrentArgs& a, const WindowCall& call,
                                 cudaStream_t stream) {
  const bool wide = a.window.u_dtype == DType::f32;
  if (a.q.dtype == DType::bf16) {
    return wide ? launch_type<bf16, float>(a, call, stream)
                : launch_type<bf16, bf16>(a, call, stream);
  }
  return wide ? launch_type<f16, float>(a, call, stream) : launch_type<f16, f16>(a, call, stream);
}

}  // namespace cuda
}  // namespace gdn
