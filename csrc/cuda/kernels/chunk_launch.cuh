// Host side of chunked prefill on tensor cores, instantiated once per dtype and K so that the files
// compile side by side.
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

template <class IN, int K, Scan KIND, bool LOWRANK = false>
cudaError_t launch_scan(const ChunkArgs& a, ChunkLayout x, cudaStream_t stream) {
  const auto kernel = chunk_scan<IN, K, KIND, LOWRANK>;
  const int shared = ScanShared<IN, K>::template kBytes<KIND, LOWRANK>;
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

template <class IN, int K>
cudaError_t launch_factors(const ChunkArgs& a, const ChunkLayout& x, cudaStream_t stream) {
  const auto kernel = chunk_factors<IN, K>;
  const int shared = FactorsShared<IN, K>::bytes(static_cast<int>(x.ratio.divisor));
  const cudaError_t error = allow_shared(kernel, shared);
  if (error != cudaSuccess) return error;
  return launch(kernel, dim3(static_cast<unsigned>(x.slots), static_cast<unsigned>(a.H)), dim3(128),
                shared, stream, a, x);
}

template <class IN, int K>
cudaError_t chunk_products(const ChunkArgs& a, const ChunkLayout& x, cudaStream_t stream) {
  const cudaError_t error = launch_factors<IN, K>(a, x, stream);
  if (error != cudaSuccess) return error;
  const int64_t blocks = a.seqs.N * a.HV * (a.V / kScanRows), processors = multiprocessors();
  // A sequence of one chunk has nothing to fetch ahead.
  const bool one = a.seqs.B * a.seqs.T <= kChunk * a.seqs.N;
  constexpr bool PARTS = Format<IN>::kParts > 1;
  constexpr Scan LONE = PARTS ? Scan::ahead : Scan::lone;
  // Two stages of two parts fill a multiprocessor.
  const bool lone = !one && blocks <= processors, few = !PARTS && blocks <= 2 * processors;
  if (a.window.fill) {
    return lone ? launch_scan<IN, K, LONE, true>(a, x, stream)
                : launch_scan<IN, K, Scan::among, true>(a, x, stream);
  }
  const bool pools = plain(a.read) && plain(a.write);
  const bool vectors = LONE == Scan::lone && (!a.read.ptr || x.read_vectors) && x.write_vectors;
  if (!pools && !(lone && vectors)) return launch_scan<IN, K, Scan::general>(a, x, stream);
  if (lone) return launch_scan<IN, K, LONE>(a, x, stream);
  return one || !few ? launch_scan<IN, K, Scan::among>(a, x, stream)
                     : launch_scan<IN, K, Scan::ahead>(a, x, stream);
}

}  // namespace cuda
}  // namespace gdn
