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

template <class IN, int K, Scan KIND, int ENTRIES = 0>
cudaError_t launch_scan(const ChunkArgs& a, ChunkLayout x, cudaStream_t stream) {
  const auto kernel = chunk_scan<IN, K, KIND, ENTRIES>;
  const int shared = ScanShared<IN, K, ENTRIES>::template kBytes<KIND>;
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

template <class IN, int K, int ENTRIES = 0>
cudaError_t launch_factors(const ChunkArgs& a, const ChunkLayout& x, cudaStream_t stream) {
  const auto kernel = chunk_factors<IN, K, ENTRIES>;
  const int shared = FactorsShared<IN, K>::bytes(static_cast<int>(x.ratio.divisor));
  const cudaError_t error = allow_shared(kernel, shared);
  if (error != cudaSuccess) return error;
  return launch(kernel, dim3(static_cast<unsigned>(x.slots), static_cast<unsigned>(a.H)), dim3(128),
                shared, stream, a, x);
}

// What a scan is launched as depends on how its blocks fill the multiprocessors.
struct ScanBlocks {
  bool one, lone, few;
  template <class IN>
  static ScanBlocks of(const ChunkArgs& a) {
    const int64_t blocks = a.seqs.N * a.HV * (a.V / kScanRows), processors = multiprocessors();
    // A sequence of one chunk has nothing to fetch ahead.
    const bool one = a.seqs.B * a.seqs.T <= kChunk * a.seqs.N;
    // Two stages of two parts fill a multiprocessor.
    return {one, !one && blocks <= processors, Format<IN>::kParts == 1 && blocks <= 2 * processors};
  }
};
template <class IN, int K, Scan KIND, int ENTRIES = 0>
bool scan_fits() {
  return ScanShared<IN, K, ENTRIES>::template kBytes<KIND> <= shared_limit();
}
// Blocks alone on their multiprocessors.
template <class IN>
constexpr Scan kLone = Format<IN>::kParts > 1 ? Scan::ahead : Scan::lone;

template <class IN, int ENTRIES>
cudaError_t lowrank_scan_of(const ChunkArgs& a, const ChunkLayout& x, cudaStream_t stream) {
  const ScanBlocks blocks = ScanBlocks::of<IN>(a);
  return blocks.lone && scan_fits<IN, 64, kLone<IN>, ENTRIES>()
             ? launch_scan<IN, 64, kLone<IN>, ENTRIES>(a, x, stream)
             : launch_scan<IN, 64, Scan::among, ENTRIES>(a, x, stream);
}
// K plays no part here.
template <class IN>
cudaError_t lowrank_scan(const ChunkArgs& a, const ChunkLayout& x, cudaStream_t stream) {
  return window_room(a.window.R) == 16 ? lowrank_scan_of<IN, 16>(a, x, stream)
                                       : lowrank_scan_of<IN, kChunk>(a, x, stream);
}

template <class IN, int K>
cudaError_t chunk_products(const ChunkArgs& a, const ChunkLayout& x, cudaStream_t stream) {
  cudaError_t error;
  if (a.window.fill) {
    error = window_room(a.window.R) == 16 ? launch_factors<IN, K, 16>(a, x, stream)
                                          : launch_factors<IN, K, kChunk>(a, x, stream);
    return error == cudaSuccess ? lowrank_scan<IN>(a, x, stream) : error;
  }
  error = launch_factors<IN, K>(a, x, stream);
  if (error != cudaSuccess) return error;
  const ScanBlocks blocks = ScanBlocks::of<IN>(a);
  constexpr Scan LONE = kLone<IN>;
  const bool pools = plain(a.read) && plain(a.write);
  const bool vectors = LONE == Scan::lone && (!a.read.ptr || x.read_vectors) && x.write_vectors;
  const bool lone = blocks.lone && scan_fits<IN, K, LONE>();
  if (!pools && !(lone && vectors)) return launch_scan<IN, K, Scan::general>(a, x, stream);
  if (lone) return launch_scan<IN, K, LONE>(a, x, stream);
  return blocks.one || !blocks.few ? launch_scan<IN, K, Scan::among>(a, x, stream)
                                   : launch_scan<IN, K, Scan::ahead>(a, x, stream);
}

}  // namespace cuda
}  // namespace gdn
