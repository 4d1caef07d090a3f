// The recurrence for any K, V, strides and dtypes: 32 rows of a head in shared memory, one row a
// lane, the columns shared out over the four warps. Serves the [P, HV, K, V] layout too: there the
// rows are neighbours in memory, and the loads follow them.
#pragma once

#include "common.cuh"

namespace gdn {
namespace cuda {

constexpr int kAnyRows = 32, kAnyWarps = 4;

__host__ __device__ inline int any_shared_floats(int K) {
  return kAnyRows * (K + 1) + 2 * K + kAnyWarps * kAnyRows * 2;
}

__global__ void __launch_bounds__(kAnyWarps * 32)
    recurrent_any(const __grid_constant__ RecurrentArgs a, const __grid_constant__ HeadGrid grid) {
  extern __shared__ float shared[];
  const int K = static_cast<int>(a.K), V = static_cast<int>(a.V), pitch = K + 1;
  float* const S = shared;
  float* const sk = S + kAnyRows * pitch;
  float* const sq = sk + K;
  float* const parts = sq + K;  // [warp][row][2]
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, threads = kAnyWarps * 32;
  const unsigned hv = grid.blocks(blockIdx.x);
  const unsigned block = blockIdx.x - hv * grid.blocks.divisor;
  const unsigned h = grid.ratio(hv);
  const int64_t n = grid.first + blockIdx.y;
  const int row0 = block * kAnyRows, rows = V - row0 < kAnyRows ? V - row0 : kAnyRows;
  const bool live = lane < rows;

  wait_for_previous_kernel();
  const Sequence s = device_sequence(a.seqs, n);
  let_next_kernel_start();
  if (s.row < 0) {
    for (int64_t t = s.start; warp == 0 && live && t < s.end; t++) {
      store_as(a.out.ptr, a.out.dtype,
               offset_of(a.out, s.b, t, hv) + static_cast<int64_t>(row0 + lane) * a.out.sd, 0.f);
    }
    return;
  }
  const bool along_rows = a.state.s_v == 1 && a.state.s_k != 1;
  const int64_t head = hv * a.state.s_h + row0 * a.state.s_v;
  const auto each = [&](auto&& body) {
    for (int i = threadIdx.x; i < rows * K; i += threads) {
      const int r = along_rows ? i % rows : i / K, c = along_rows ? i / rows : i % K;
      body(r * pitch + c, r * a.state.s_v + c * a.state.s_k);
    }
  };
  const int64_t home = s.row * a.state.s_p + head;
  each([&](int at_shared, int64_t at_state) {
    S[at_shared] = s.fresh ? 0.f : load_as(a.state.ptr, a.state.dtype, home + at_state);
  });
  const bool spec = a.seqs.S > 0;
  const int c0 = K * warp / kAnyWarps, c1 = K * (warp + 1) / kAnyWarps;
  for (int64_t t = s.start; t < s.end; t++) {
    const int64_t k0 = offset_of(a.k, s.b, t, h), q0 = offset_of(a.q, s.b, t, h);
    for (int c = threadIdx.x; c < K; c += threads) {
      sk[c] = load_as(a.k.ptr, a.k.dtype, k0 + c * a.k.sd);
      sq[c] = load_as(a.q.ptr, a.q.dtype, q0 + c * a.q.sd);
    }
    const float v =
        live ? load_as(a.v.ptr, a.v.dtype, offset_of(a.v, s.b, t, hv) + (row0 + lane) * a.v.sd)
             : 0.f;
    float g, beta;
    compute_gates(a.gates, load_gates(a.gates, s.b, t, hv), &g, &beta);
    const float decay = expf(g);
    __syncthreads();
    float kk = 0.f, qq = 0.f, kq = 0.f;
    for (int c = lane; c < K; c += 32) {
      kk = __fmaf_rn(sk[c], sk[c], kk);
      qq = __fmaf_rn(sq[c], sq[c], qq);
      kq = __fmaf_rn(sk[c], sq[c], kq);
    }
    kq = lane_sum(kq);
    float rk = 1.f, rq = 1.f;
    if (a.l2norm) {
      rk = rsqrtf(lane_sum(kk) + kL2Eps);
      rq = rsqrtf(lane_sum(qq) + kL2Eps);
      kq *= rk * rq;
    }
    float p = 0.f, o = 0.f;
    if (live) {
      const float* const row = S + lane * pitch;
      for (int c = c0; c < c1; c++) {
        p = __fmaf_rn(row[c], sk[c], p);
        o = __fmaf_rn(row[c], sq[c], o);
      }
    }
    reinterpret_cast<float2*>(parts)[warp * kAnyRows + lane] = make_float2(p, o);
    __syncthreads();
    p = o = 0.f;
#pragma unroll
    for (int w = 0; w < kAnyWarps; w++) {
      const float2 x = reinterpret_cast<const float2*>(parts)[w * kAnyRows + lane];
      p += x.x;
      o += x.y;
    }
    const float u = beta * (v - decay * rk * p);
    o = a.scale * (decay * rq * o + kq * u);
    if (warp == 0 && live) {
      store_as(a.out.ptr, a.out.dtype,
               offset_of(a.out, s.b, t, hv) + static_cast<int64_t>(row0 + lane) * a.out.sd, o);
    }
    if (live) {
      float* const row = S + lane * pitch;
      const float ur = u * rk;
      for (int c = c0; c < c1; c++) row[c] = __fmaf_rn(ur, sk[c], __fmul_rn(decay, row[c]));
    }
    __syncthreads();
    if (spec) {
      const int64_t j = t - s.start;
      const int64_t row = j < a.seqs.S ? at(a.seqs.state_indices, n, j) : -1;
      if (row >= 0 && row < a.state.P) {
        const int64_t to = row * a.state.s_p + head;
        each([&](int at_shared, int64_t at_state) {
          store_as(a.state.ptr, a.state.dtype, to + at_state, S[at_shared]);
        });
      }
    }
  }
  if (!spec && s.end > s.start) {
    each([&](int at_shared, int64_t at_state) {
      store_as(a.state.ptr, a.state.dtype, home + at_state, S[at_shared]);
    });
  }
}

}  // namespace cuda
}  // namespace gdn
