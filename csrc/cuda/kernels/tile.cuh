// One step of the recurrence on a tile of state rows held by a warp. Every tile takes every sum in
// the same order with the same roundings, so a sequence gives the same bits whichever tile a batch
// size selects.
//
// Both products read the old state, so one pass over it is enough:
//   u = beta * (v - a * S k),   o = scale * (a * S q + (k.q) u),   S = a * S + u k^T.
#pragma once

#include "common.cuh"

namespace gdn {
namespace cuda {

// RPW rows of a K-wide state of type ST: a row lies across LANES lanes, 16 bytes a lane and access.
template <class ST, int K, int RPW, int LANES>
struct RowTile {
  static constexpr int E = Vec<ST>::E;        // elements in 16 bytes
  static constexpr int LPR = LANES;           // lanes a row
  static constexpr int VPL = K / (LPR * E);   // vectors a lane and row
  static constexpr int G = 32 / LPR;          // rows a warp-wide access
  static constexpr int NL = RPW / G;          // accesses a warp
  static constexpr int C = VPL * E;           // columns a lane owns
  static constexpr int LOW = LPR / (2 * NL);  // lanes that hold the same sum
  static_assert(K % (LPR * E) == 0 && RPW % G == 0 && 2 * NL <= LPR,
                "the sums of a tile must fit the lanes of a row");

  // First column of vector j of lane l.
  static __device__ __forceinline__ int column(int j, int l) { return (j * LPR + l) * E; }
  // Row (inside the tile) whose sums lane l of `group` ends up with.
  static __device__ __forceinline__ int own_row(int l, int group) {
    return l / LOW % NL * G + group;
  }
  // One lane a row writes its output.
  static __device__ __forceinline__ bool owner(int l) { return l < LPR / 2 && l % LOW == 0; }
};

template <class RT, class AT>
struct RawRow {
  RawVec<AT, RT::E> v[RT::VPL];
};
// The columns that lane `l` owns of a [K] vector.
template <class RT, class AT>
__device__ __forceinline__ RawRow<RT, AT> load_row(const AT* p, int l) {
  RawRow<RT, AT> r;
#pragma unroll
  for (int j = 0; j < RT::VPL; j++) r.v[j] = load_raw<AT, RT::E>(p + RT::column(j, l));
  return r;
}

// A row of a token, from its S k and S q: what multiplies the raw key, and the output.
__device__ __forceinline__ void row_step(float decay, float beta, float rk, float rq, float kq,
                                         float scale, float sk, float sq, float v, float* urk,
                                         float* o) {
  const float u = __fmul_rn(beta, __fmaf_rn(-__fmul_rn(decay, rk), sk, v));
  *o = __fmul_rn(scale, __fmaf_rn(__fmul_rn(decay, rq), sq, __fmul_rn(kq, u)));
  *urk = __fmul_rn(u, rk);
}
// An element of the state behind the token.
__device__ __forceinline__ float updated(float old, float decay, float urk, float k) {
  return __fmaf_rn(urk, k, __fmul_rn(decay, old));
}

// What one token does to a head, apart from its values.
template <class RT>
struct TokenStep {
  float k[RT::C], q[RT::C];
  float decay, beta, rk, rq, kq;

  template <class AT>
  __device__ __forceinline__ void prepare(const RawRow<RT, AT>& raw_k, const RawRow<RT, AT>& raw_q,
                                          bool l2norm) {
#pragma unroll
    for (int j = 0; j < RT::VPL; j++) {
      raw_to_float<AT, RT::E>(raw_k.v[j], k + j * RT::E);
      raw_to_float<AT, RT::E>(raw_q.v[j], q + j * RT::E);
    }
    kq = 0.f;
    float kk = 0.f, qq = 0.f;
#pragma unroll
    for (int c = 0; c < RT::C; c++) {
      kq = __fmaf_rn(k[c], q[c], kq);
      kk = __fmaf_rn(k[c], k[c], kk);
      qq = __fmaf_rn(q[c], q[c], qq);
    }
    kq = lane_sum<RT::LPR>(kq);
    rk = rq = 1.f;
    if (l2norm) {
      rk = rsqrtf(lane_sum<RT::LPR>(kk) + kL2Eps);
      rq = rsqrtf(lane_sum<RT::LPR>(qq) + kL2Eps);
      kq = __fmul_rn(kq, __fmul_rn(rk, rq));
    }
  }

  // From this lane's total (S k of its row in the lower half of the lanes, S q in the upper half):
  // the update u * rk that multiplies the raw key, and the output of the row.
  __device__ __forceinline__ void finish(float total, int l, float v, float scale, float* urk,
                                         float* o) const {
    const float other = __shfl_xor_sync(kFullMask, total, RT::LPR / 2);
    const bool upper = l >= RT::LPR / 2;
    const float sk = upper ? other : total, sq = upper ? total : other;
    row_step(decay, beta, rk, rq, kq, scale, sk, sq, v, urk, o);
  }

  __device__ __forceinline__ float update(float old, float ur, int c) const {
    return updated(old, decay, ur, k[c]);
  }
};

}  // namespace cuda
}  // namespace gdn
