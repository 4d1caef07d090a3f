// What the rows' blocks of a window do, found out for all of them by one small kernel before them:
// a block then has row, counts and fold from one access, not from two that wait for each other and
// a barrier.
#pragma once

#include "window.cuh"

namespace gdn {
namespace cuda {

// Four words: pool row in two, sequence, pending entries | fold << 8 | fresh << 9.
__device__ __forceinline__ uint4 pack_order(const WindowPlan& p, int64_t n) {
  const uint64_t row = static_cast<uint64_t>(p.row);
  return make_uint4(
      static_cast<uint32_t>(row), static_cast<uint32_t>(row >> 32), static_cast<uint32_t>(n),
      static_cast<uint32_t>(p.pending) | (p.fold ? 256u : 0u) | (p.fresh ? 512u : 0u));
}
__device__ __forceinline__ WindowPlan unpack_order(const uint4& x, int tokens, int64_t* n) {
  WindowPlan p;
  p.row = static_cast<int64_t>(uint64_t{x.y} << 32 | x.x);
  p.start = 0;
  p.tokens = tokens;
  p.pending = x.w & 255;
  p.head = 0;
  p.fold = x.w & 256;
  p.fresh = x.w & 512;
  *n = x.z;
  return p;
}

constexpr int kOrderGroup = 1024;  // sequences that a block orders
constexpr int kOrderTail = 64;     // the last of them, among which none folds if others can

// `order` [sequences] for sequences `first` and on, not packed, and the counts after the call, but
// for those that fold: the last block to have read what it folds writes them. A sequence that folds
// takes twice as long as another, so those are spread evenly over the ones before the tail: no long
// block starts when the others end. `early`: as in WindowCall, so that all but the end of this
// kernel runs beside the one before it.
cudaError_t order_windows(const RecurrentArgs& a, uint4* order, int64_t first, int64_t count,
                          bool early, cudaStream_t stream);

}  // namespace cuda
}  // namespace gdn
