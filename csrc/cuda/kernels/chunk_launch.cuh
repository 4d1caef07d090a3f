// Host side of chunked prefill on tensor cores, instantiated once per K so that the files compile
// side by side.
#pragma once

#include "chunk_factors.cuh"
#include "chunk_scan.cuh"
#include "launch.h"
#include "select.h"

namespace gdn {
namespace cuda {

template <class... P>
cudaError_t allow_shared(void (*kernel)(P...), int bytes) {
  return cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel),
                              cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
}

template <int K, int STAGES, int MIN_BLOCKS, bool LOWRANK>
cudaError_t launch_scan(const ChunkArgs& a, ChunkLayout x, cudaStream_t stream) {
  const auto kernel = chunk_scan<K, STAGES, MIN_BLOCKS, LOWRANK>;
  const int shared = STAGES * ScanShared<K>::kStage;
  cudaError_t error = allow_shared(kernel, shared);
  for (; error == cudaSuccess && x.first < a.seqs.N; x.first += kMaxGridY) {
    const int64_t count = a.seqs.N - x.first < kMaxGridY ? a.seqs.N - x.first : kMaxGridY;
    error = launch(
        kernel, dim3(static_cast<unsigned>(a.HV * (a.V / kScanRows)), static_cast<unsigned>(count)),
        dim3(128), shared, stream, a, x);
  }
  return error;
}

template <int K>
cudaError_t launch_chunk(const ChunkArgs& a, const ChunkLayout& x, cudaStream_t stream) {
  const int shared = FactorsShared<K>::bytes(static_cast<int>(x.ratio.divisor));
  cudaError_t error = allow_shared(chunk_factors<K>, shared);
  if (error != cudaSuccess) return error;
  error = launch(chunk_factors<K>, dim3(static_cast<unsigned>(x.slots), static_cast<unsigned>(a.H)),
                 dim3(128), shared, stream, a, x);
  if (error != cudaSuccess) return error;
  if (a.window.fill) return launch_scan<K, 2, 2, true>(a, x, stream);
  // Few blocks: each fetches the next chunk while it works on one. Many: they fill in for another.
  const bool few = a.seqs.N * a.HV * (a.V / kScanRows) <= 256;
  return few ? launch_scan<K, 2, 2, false>(a, x, stream)
             : launch_scan<K, 1, 2, false>(a, x, stream);
}

cudaError_t chunk_64(const ChunkArgs& a, const ChunkLayout& x, cudaStream_t stream);
cudaError_t chunk_128(const ChunkArgs& a, const ChunkLayout& x, cudaStream_t stream);

}  // namespace cuda
}  // namespace gdn
