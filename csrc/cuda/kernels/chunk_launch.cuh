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

template <int K, Scan KIND, bool LOWRANK = false>
cudaError_t launch_scan(const ChunkArgs& a, ChunkLayout x, cudaStream_t stream) {
  const auto kernel = chunk_scan<K, KIND, LOWRANK>;
  const int shared = ScanShared<K>::template bytes<KIND, LOWRANK>();
  cudaError_t error = allow_shared(kernel, shared);
  for (; error == cudaSuccess && x.first < a.seqs.N; x.first += kMaxGridY) {
    const int64_t count = a.seqs.N - x.first < kMaxGridY ? a.seqs.N - x.first : kMaxGridY;
    error = launch(
        kernel, dim3(static_cast<unsigned>(a.HV * (a.V / kScanRows)), static_cast<unsigned>(count)),
        dim3(ScanShape<KIND>::kThreads), shared, stream, a, x);
  }
  return error;
}

inline bool plain(const StatePool& s) {
  return !s.ptr || (s.dtype == DType::f32 && vector_state(s));
}

template <int K, int MIN_BLOCKS>
cudaError_t launch_factors(const ChunkArgs& a, const ChunkLayout& x, cudaStream_t stream) {
  const auto kernel = chunk_factors<K, MIN_BLOCKS>;
  const int shared = FactorsShared<K>::bytes(static_cast<int>(x.ratio.divisor));
  const cudaError_t error = allow_shared(kernel, shared);
  if (error != cudaSuccess) return error;
  return launch(kernel, dim3(static_cast<unsigned>(x.slots), static_cast<unsigned>(a.H)), dim3(128),
                shared, stream, a, x);
}

template <int K>
cudaError_t launch_chunk(const ChunkArgs& a, const ChunkLayout& x, cudaStream_t stream) {
  const cudaError_t error = launch_factors<K, 3>(a, x, stream);
  if (error != cudaSuccess) return error;
  const int64_t blocks = a.seqs.N * a.HV * (a.V / kScanRows), processors = multiprocessors();
  // A sequence of one chunk has nothing to fetch ahead.
  const bool one = a.seqs.B * a.seqs.T <= kChunk * a.seqs.N;
  const bool lone = !one && blocks <= processors;
  if (a.window.fill) {
    return lone ? launch_scan<K, Scan::lone, true>(a, x, stream)
                : launch_scan<K, Scan::among, true>(a, x, stream);
  }
  if (!plain(a.read) || !plain(a.write)) return launch_scan<K, Scan::general>(a, x, stream);
  if (lone) return launch_scan<K, Scan::lone>(a, x, stream);
  return one || blocks > 2 * processors ? launch_scan<K, Scan::among>(a, x, stream)
                                        : launch_scan<K, Scan::ahead>(a, x, stream);
}

cudaError_t chunk_64(const ChunkArgs& a, const ChunkLayout& x, cudaStream_t stream);
cudaError_t chunk_128(const ChunkArgs& a, const ChunkLayout& x, cudaStream_t stream);

}  // namespace cuda
}  // namespace gdn
