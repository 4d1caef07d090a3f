// Host side of the backward of chunked prefill, instantiated once per dtype.
#pragma once

#include "chunk_backward.cuh"
#include "chunk_launch.cuh"

namespace gdn {
namespace cuda {

using BackwardKernel = void (*)(ChunkBackwardArgs, BackwardLayout);

inline cudaError_t launch_backward_scan(BackwardKernel kernel, int shared,
                                        const ChunkBackwardArgs& a, BackwardLayout x,
                                        cudaStream_t stream) {
  cudaError_t error = allow_shared(kernel, shared);
  // A block of chunk_reverse joins one of chunk_states on its multiprocessor only where the split
  // between cache and shared memory need not change.
  if (error == cudaSuccess) {
    error = cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel),
                                 cudaFuncAttributePreferredSharedMemoryCarveout,
                                 cudaSharedmemCarveoutMaxShared);
  }
  const ChunkArgs& f = a.forward;
  for (; error == cudaSuccess && x.forward.first < f.seqs.N; x.forward.first += kMaxGridY) {
    const int64_t left = f.seqs.N - x.forward.first;
    const dim3 grid(static_cast<unsigned>(f.HV * (f.V / kScanRows)),
                    static_cast<unsigned>(left < kMaxGridY ? left : kMaxGridY));
    error = launch(kernel, grid, dim3(128), shared, stream, a, x);
  }
  return error;
}

template <class IN, int K>
cudaError_t chunk_backward_products(const ChunkBackwardArgs& a, const BackwardLayout& x,
                                    cudaStream_t stream) {
  const ChunkArgs& f = a.forward;
  const int limit = shared_limit();
  using Reverse = ReverseShared<IN, K>;
  cudaError_t error = launch_factors<IN, K>(f, x.forward, stream);
  if (error != cudaSuccess) return error;
  error = launch_backward_scan(chunk_states<IN, K, 2>, StatesShared<IN, K>::template kBytes<2>, a,
                               x, stream);
  if (error != cudaSuccess) return error;
  if constexpr (Format<IN>::kParts == 1) {
    // Blocks alone on their multiprocessors fetch ahead.
    const bool lone = f.seqs.N * f.HV * (f.V / kScanRows) <= multiprocessors() &&
                      Reverse::template kBytes<2> <= limit;
    error = lone ? launch_backward_scan(chunk_reverse<IN, K, 2>, Reverse::template kBytes<2>, a, x,
                                        stream)
                 : launch_backward_scan(chunk_reverse<IN, K, 1>, Reverse::template kBytes<1>, a, x,
                                        stream);
  } else {
    error =
        launch_backward_scan(chunk_reverse<IN, K, 1>, Reverse::template kBytes<1>, a, x, stream);
  }
  if (error != cudaSuccess) return error;
  const int ratio = static_cast<int>(x.forward.ratio.divisor);
  BackwardKernel kernel = chunk_gradients<IN, K, 1>;
  int shared = GradientsShared<IN, K, 1>::bytes(ratio);
  if constexpr (Format<IN>::kParts == 1) {
    const int two = GradientsShared<IN, K, 2>::bytes(ratio);
    if (two <= limit) {
      kernel = chunk_gradients<IN, K, 2>;
      shared = two;
    }
  }
  error = allow_shared(kernel, shared);
  if (error != cudaSuccess) return error;
  return launch(kernel, dim3(static_cast<unsigned>(x.forward.slots), static_cast<unsigned>(f.H)),
                dim3(512), shared, stream, a, x);
}

}  // namespace cuda
}  // namespace gdn
