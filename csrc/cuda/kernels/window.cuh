// The window of pending rank-1 updates: where a call's entries go, and how they are read.
#pragma once

#include "tile.cuh"

namespace gdn {
namespace cuda {

constexpr int kMaxWindow = 64;  // entries a warp can hold, two a lane

// Where a sequence stands at the start of a call. prepare_window writes one for each sequence, so
// that the kernels after it need a single load to know all of this, and see the same fill count.
struct alignas(16) WindowPlan {
  int64_t row;    // pool row, negative = padding
  int64_t start;  // first token
  int tokens;     // of this call
  int pending;    // entries that hold before it, after dropping what was rejected
  int fold;       // they go into the base first
  int fresh;      // starts from zero: no entries, and the base is not read
  __device__ __forceinline__ int slot() const { return fold ? 0 : pending; }
};

// Drops what the caller rejected of the last call (docs/windows.md).
__device__ __forceinline__ WindowPlan plan_window(const RecurrentArgs& a, int64_t n, bool flush) {
  WindowPlan p;
  const Sequence s = device_sequence(a.seqs, n, 0);
  p.row = s.row;
  p.start = s.start;
  p.tokens = s.end > s.start && !flush ? static_cast<int>(s.end - s.start) : 0;
  p.pending = p.fold = 0;
  p.fresh = s.fresh;
  if (p.row < 0) return p;
  const int R = static_cast<int>(a.window.R);
  if (p.tokens > R) {  // more than the window holds: the host refuses it where it can know
    p.row = -1;
    return p;
  }
  if (s.fresh) return p;
  const int32_t packed = a.window.fill[p.row * a.window.s_fill];
  const int fill = kept_entries(packed, a.seqs.num_accepted.ptr ? s.accepted : -1).fill;
  p.pending = fill > R ? R : fill;
  p.fold = p.pending > 0 && (flush || p.pending + p.tokens > R);
  return p;
}

// Four or eight elements of a key of the window as stored, and as floats.
template <int N>
__device__ __forceinline__ RawVec<float, N> load_key(const Window& w, int64_t offset) {
  RawVec<float, N> r;
  if (w.k_dtype == DType::f32) {
    r = load_raw<float, N>(static_cast<const float*>(w.k) + offset);
  } else {
    const RawVec<bf16, N> x = load_raw<bf16, N>(static_cast<const bf16*>(w.k) + offset);
#pragma unroll
    for (int j = 0; j < RawVec<bf16, N>::W; j++) r.w[j] = x.w[j];
  }
  return r;
}
template <int N>
__device__ __forceinline__ void key_to_float(const RawVec<float, N>& r, DType d, float* f) {
  if (d == DType::f32) {
    raw_to_float<float, N>(r, f);
    return;
  }
  RawVec<bf16, N> x;
  RawVec<f16, N> y;
#pragma unroll
  for (int j = 0; j < RawVec<bf16, N>::W; j++) x.w[j] = y.w[j] = r.w[j];
  if (d == DType::bf16) {
    raw_to_float<bf16, N>(x, f);
  } else {
    raw_to_float<f16, N>(y, f);
  }
}

}  // namespace cuda
}  // namespace gdn
