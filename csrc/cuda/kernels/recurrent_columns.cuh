// The recurrence on a pool whose elements lie together along V, [P, HV, K, V]: the layout of the
// caches of transformers. A block owns 64 columns of all K rows of one head, for all tokens of the
// sequence. Its threads share the rows, so S k and S q are sums over threads.
#pragma once

#include "tile.cuh"

namespace gdn {
namespace cuda {

// A thread holds kRows rows of kVector columns, two half warps side by side the same columns. One
// shape for every dtype and batch, so that a sequence has the same bits in each of them.
struct Columns {
  static constexpr int kVector = 4, kRows = 16, kLanes = 16, kWidth = kLanes * kVector;
  static constexpr int kGroups = 32 / kLanes;    // threads of a warp that share columns
  static constexpr int kPitch = 2 * kWidth + 4;  // sums of a warp: S k, S q, three products
  static __host__ __device__ constexpr int warps(int K) { return K / (kRows * kGroups); }
};

// Four elements of the state.
template <class T>
__device__ __forceinline__ RawVec<T, 4> load_state_vector(const T* p) {
  if constexpr (sizeof(T) == 4) {
    const uint4 x = load_state(p);
    return {x.x, x.y, x.z, x.w};
  } else {
    const uint2 x = load_state_half(p);
    return {x.x, x.y};
  }
}
template <class T>
__device__ __forceinline__ void store_state_vector(T* p, const float* f) {
  if constexpr (sizeof(T) == 4) {
    store_state(p, Vec<T>::pack(f));
  } else {
    store_floats<T, 4>(p, f);
  }
}

// blockIdx.x = head * column_blocks + column block, blockIdx.y = sequence.
// ONE: every sequence has one token, so the state stays in its storage type until it is updated.
template <class ST, class AT, int K, int MIN_BLOCKS, bool ONE>
__global__ void __launch_bounds__(Columns::warps(K) * 32, MIN_BLOCKS)
    recurrent_columns(const __grid_constant__ RecurrentArgs a,
                      const __grid_constant__ HeadGrid grid) {
  constexpr int E = Columns::kVector, NK = Columns::kRows, G = Columns::kGroups;
  constexpr int WIDTH = Columns::kWidth, PITCH = Columns::kPitch, WARPS = Columns::warps(K);
  // Two sets: a token's sums are read while those of the next are written.
  __shared__ __align__(16) float shared[ONE ? 1 : 2][WARPS][PITCH];
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, group = lane % G, l = lane / G;
  const unsigned hv = grid.blocks(blockIdx.x);
  const unsigned block = blockIdx.x - hv * grid.blocks.divisor;
  const unsigned h = grid.ratio(hv);
  const int64_t n = grid.first + blockIdx.y;
  const int column = block * WIDTH + l * E, k0 = (warp * G + group) * NK;
  const bool live = column < a.V, writer = warp == 0 && group == 0 && live;
  const int64_t s_k = a.state.s_k;
  ST* const pool = static_cast<ST*>(a.state.ptr) + hv * a.state.s_h + k0 * s_k + column;

  if (ONE && !grid.early && blockIdx.y * gridDim.x + blockIdx.x < grid.ahead) {
    const int64_t row = guess_row(a.seqs, n);
    if (row >= 0 && l % (128 / (E * sizeof(ST))) == 0 && live) {
#pragma unroll
      for (int i = 0; i < NK; i++) prefetch_line(pool + row * a.state.s_p + i * s_k);
    }
  }
  if (!grid.early) wait_for_previous_kernel();
  const Sequence s = block_sequence<ONE>(a.seqs, n);
  AT* const out = static_cast<AT*>(a.out.ptr) + s.b * a.out.sb + hv * a.out.sh + column;
  if (s.row < 0) {
    if (grid.early) wait_for_previous_kernel();
    let_next_kernel_start();
    const float zero[E] = {};
    for (int64_t t = s.start; writer && t < s.end; t++) {
      store_floats<AT, E>(out + t * a.out.st, zero);
    }
    return;
  }
  const AT* const pk = static_cast<const AT*>(a.k.ptr) + s.b * a.k.sb + h * a.k.sh + k0;
  const AT* const pq = static_cast<const AT*>(a.q.ptr) + s.b * a.q.sb + h * a.q.sh + k0;
  const AT* const pv = static_cast<const AT*>(a.v.ptr) + s.b * a.v.sb + hv * a.v.sh + column;
  RawVec<AT, NK> raw_k, raw_q;
  RawVec<AT, E> raw_v = {};
  RawGates raw_gates;
  const auto load_token = [&](int64_t t) {
    raw_k = load_raw<AT, NK>(pk + t * a.k.st);
    raw_q = load_raw<AT, NK>(pq + t * a.q.st);
    raw_gates = load_gates(a.gates, s.b, t, hv);
    if (live) raw_v = load_raw<AT, E>(pv + t * a.v.st);
  };

  const bool spec = !ONE && a.seqs.S > 0;
  ST* const home = pool + s.row * a.state.s_p;
  RawVec<ST, E> raw[NK] = {};
#pragma unroll
  for (int i = 0; i < NK; i++) {
    if (live && !s.fresh) raw[i] = load_state_vector(home + i * s_k);
  }
  if (grid.early) wait_for_previous_kernel();
  let_next_kernel_start();
  if (ONE || s.start < s.end) load_token(s.start);
  float f[ONE ? 1 : NK][E];
  if constexpr (!ONE) {
#pragma unroll
    for (int i = 0; i < NK; i++) raw_to_float<ST, E>(raw[i], f[i]);
  }

  const int64_t steps = ONE ? 1 : s.end - s.start;
  for (int64_t step = 0; step < steps; step++) {
    const int64_t t = s.start + step;
    float (*const parts)[PITCH] = shared[ONE ? 0 : step & 1];
    float k[NK], q[NK], v[E];
    raw_to_float<AT, NK>(raw_k, k);
    raw_to_float<AT, NK>(raw_q, q);
    raw_to_float<AT, E>(raw_v, v);
    float g, beta;
    compute_gates(a.gates, raw_gates, &g, &beta);
    const float decay = expf(g);
    if (!ONE && step + 1 < steps) load_token(t + 1);

    float sums[2 * E] = {}, kk = 0.f, qq = 0.f, kq = 0.f;
#pragma unroll
    for (int i = 0; i < NK; i++) {
      kq = __fmaf_rn(k[i], q[i], kq);
      kk = __fmaf_rn(k[i], k[i], kk);
      qq = __fmaf_rn(q[i], q[i], qq);
      float y[E];
      if constexpr (ONE) raw_to_float<ST, E>(raw[i], y);
#pragma unroll
      for (int e = 0; e < E; e++) {
        const float old = ONE ? y[e] : f[ONE ? 0 : i][e];
        sums[e] = __fmaf_rn(old, k[i], sums[e]);
        sums[E + e] = __fmaf_rn(old, q[i], sums[E + e]);
      }
    }
    kq = lane_sum<G>(kq);
    kk = lane_sum<G>(kk);
    qq = lane_sum<G>(qq);
    // Of the two threads of a column one goes on with S k and the other with S q.
    float own[E];
    scatter_sum<2 * E, G>(sums, lane, own);
    *reinterpret_cast<float4*>(parts[warp] + group * WIDTH + l * E) =
        make_float4(own[0], own[1], own[2], own[3]);
    if (lane == 0) {
      *reinterpret_cast<float4*>(parts[warp] + 2 * WIDTH) = make_float4(kk, qq, kq, 0.f);
    }
    __syncthreads();
    kk = qq = kq = 0.f;
#pragma unroll
    for (int e = 0; e < 2 * E; e++) sums[e] = 0.f;
#pragma unroll
    for (int w = 0; w < WARPS; w++) {
#pragma unroll
      for (int i = 0; i < 2; i++) {
        const float4 x = *reinterpret_cast<const float4*>(parts[w] + i * WIDTH + l * E);
        sums[i * E] += x.x;
        sums[i * E + 1] += x.y;
        sums[i * E + 2] += x.z;
        sums[i * E + 3] += x.w;
      }
      const float4 x = *reinterpret_cast<const float4*>(parts[w] + 2 * WIDTH);
      kk += x.x;
      qq += x.y;
      kq += x.z;
    }
    float rk = 1.f, rq = 1.f;
    if (a.l2norm) {
      rk = rsqrtf(kk + kL2Eps);
      rq = rsqrtf(qq + kL2Eps);
      kq = __fmul_rn(kq, __fmul_rn(rk, rq));
    }
    float urk[E], o[E];
#pragma unroll
    for (int e = 0; e < E; e++) {
      row_step(decay, beta, rk, rq, kq, a.scale, sums[e], sums[E + e], v[e], &urk[e], &o[e]);
    }
    if (writer) store_floats<AT, E>(out + t * a.out.st, o);

    ST* to = home;
    bool store = ONE || step + 1 == steps;
    if (spec) {
      const int64_t row = step < a.seqs.S ? at(a.seqs.state_indices, n, step) : -1;
      store = row >= 0 && row < a.state.P;
      to = pool + row * a.state.s_p;
    }
#pragma unroll
    for (int i = 0; i < NK; i++) {
      float y[E];
      if constexpr (ONE) raw_to_float<ST, E>(raw[i], y);
#pragma unroll
      for (int e = 0; e < E; e++) {
        y[e] = updated(ONE ? y[e] : f[ONE ? 0 : i][e], decay, urk[e], k[i]);
        if constexpr (!ONE) f[i][e] = y[e];
      }
      if (store && live) store_state_vector(to + i * s_k, y);
    }
  }
}

}  // namespace cuda
}  // namespace gdn
