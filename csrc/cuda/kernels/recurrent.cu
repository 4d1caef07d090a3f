#include "kernels.h"
#include "recurrent_any.cuh"
#include "recurrent_launch.cuh"

namespace gdn {
namespace cuda {
namespace {

bool vectors_can(const RecurrentArgs& a) {
  const DType d = a.q.dtype;
  if ((a.K != 64 && a.K != 128 && a.K != 256) || !vector_pool(a.state)) return false;
  if (a.k.dtype != d || a.v.dtype != d || a.out.dtype != d) return false;
  if (a.state.s_k == 1) {  // recurrent_rows
    const int64_t e = 16 / size_of(a.state.dtype);
    return vector_view(a.q, e) && vector_view(a.k, e);
  }
  return a.V % Columns::kVector == 0 && vector_view(a.q, Columns::kRows) &&
         vector_view(a.k, Columns::kRows) && vector_view(a.v, Columns::kVector);
}

cudaError_t launch_any(const RecurrentArgs& a, cudaStream_t stream) {
  const int shared = any_shared_floats(static_cast<int>(a.K)) * 4;
  if (shared > 48 * 1024) {
    const cudaError_t error =
        cudaFuncSetAttribute(recurrent_any, cudaFuncAttributeMaxDynamicSharedMemorySize, shared);
    if (error != cudaSuccess) return error;
  }
  return launch_heads(recurrent_any, a, kAnyRows, kAnyWarps, 0, shared, false, stream);
}

}  // namespace

cudaError_t recurrent(const RecurrentArgs& a, cudaStream_t stream, bool early) {
  if (a.seqs.N == 0 || a.V == 0) return cudaSuccess;
  if (!vectors_can(a)) return launch_any(a, stream);
  switch (a.state.dtype) {
    case DType::f32:
      return recurrent_f32(a, early, stream);
    case DType::bf16:
      return recurrent_bf16(a, early, stream);
    default:
      return recurrent_f16(a, early, stream);
  }
}

}  // namespace cuda
}  // namespace gdn
