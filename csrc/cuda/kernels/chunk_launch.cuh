// Host side of chunked prefill on tensor cores, instantiated once per dtype and K so that the files
// compile side by side.
#pragma once

#include "chunk_factors.cuh"
#include "chunk_scan.cuh"
#include "launch.h"
#include "select.h"

namespace gdn {
namespace cuda {

// Of the grid of a scan.
inline int64_t stretches_of(const ChunkArgs& a, const ChunkLayout& x) {
  return x.places * x.count_segments + (x.from_segment == 0 ? a.seqs.N : 0);
}

template <class IN, int K, Scan KIND, int ENTRIES = 0, bool CUT = false>
cudaError_t launch_scan(const ChunkArgs& a, ChunkLayout x, cudaStream_t stream) {
  constexpr bool OUTPUTS = KIND != Scan::through;
  const auto kernel = chunk_scan<IN, K, KIND, ENTRIES, CUT>;
  const int shared = ScanShared<IN, K, ENTRIES, OUTPUTS>::template kBytes<KIND>;
  const int64_t slices = (a.V + (OUTPUTS ? 0 : K)) / kScanRows;
  const int64_t all = stretches_of(a, x);
  cudaError_t error = allow_shared(kernel, shared);
  for (; error == cudaSuccess && x.first < all; x.first += kMaxGridY) {
    const int64_t count = all - x.first < kMaxGridY ? all - x.first : kMaxGridY;
    error = launch(kernel, dim3(static_cast<unsigned>(a.HV * slices), static_cast<unsigned>(count)),
                   dim3(ScanShape<KIND, 1>::kThreads), shared, stream, a, x);
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
  static ScanBlocks of(const ChunkArgs& a, const ChunkLayout& x) {
    // The first segment of a sequence stands for all of it.
    const int64_t stretches = x.from_segment == 0 ? a.seqs.N : stretches_of(a, x);
    const int64_t blocks = stretches * a.HV * (a.V / kScanRows), processors = multiprocessors();
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
  const ScanBlocks blocks = ScanBlocks::of<IN>(a, x);
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
  const bool pools = plain(a.read) && plain(a.write);
  constexpr Scan LONE = kLone<IN>;
  const auto scan = [&](auto cut, const ChunkLayout& x, bool lone) {
    constexpr bool CUT = decltype(cut)::value;
    const bool vectors = LONE == Scan::lone && (!a.read.ptr || x.read_vectors) && x.write_vectors;
    lone = lone && scan_fits<IN, K, LONE>();
    if (!pools && !(lone && vectors)) {
      return launch_scan<IN, K, Scan::general, 0, CUT>(a, x, stream);
    }
    if (lone) return launch_scan<IN, K, LONE, 0, CUT>(a, x, stream);
    const ScanBlocks blocks = ScanBlocks::of<IN>(a, x);
    return blocks.one || !blocks.few ? launch_scan<IN, K, Scan::among, 0, CUT>(a, x, stream)
                                     : launch_scan<IN, K, Scan::ahead, 0, CUT>(a, x, stream);
  };
  if (x.places == 0) return scan(std::false_type(), x, ScanBlocks::of<IN>(a, x).lone);
  ChunkLayout part = x;
  part.count_segments = 1;
  part.scan_beside = true;
  error = scan(std::true_type(), part, ScanBlocks::of<IN>(a, part).lone);
  if (error != cudaSuccess) return error;
  part.from_segment = 1;
  part.count_segments = x.segments.most - 2;
  error = launch_scan<IN, K, Scan::through, 0, true>(a, part, stream);
  if (error == cudaSuccess) error = join_segments(a, x, stream);
  if (error != cudaSuccess) return error;
  part.count_segments = x.segments.most - 1;
  part.scan_beside = false;
  return scan(std::true_type(), part, true);
}

}  // namespace cuda
}  // namespace gdn
