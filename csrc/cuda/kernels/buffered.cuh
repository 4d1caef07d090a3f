// Exact decode that does not write the state each step: base + window of pending updates.
//
// With G_i the sum of the log decays after entry i, the state before token t is
//   S = exp(G) S0 + sum_i exp(G_i) u_i k_i^T,
// so both products need S0 once and, for each entry, two inner products of keys that every row and
// every value head of the key head share. Three kernels make a call: prepare_window takes those
// inner products and settles where each sequence stands, buffered_rows does the work on S0 and on
// the rows of u, append_window writes the new keys, decays and fill counts, which the others only
// read.
#pragma once

#include "window.cuh"

namespace gdn {
namespace cuda {

// Workspace of a call: [N] plans, then f32 [N, H, tokens, record] with {1/|k|, 1/|q|, k.q, unused}
// and, for each entry before the token, {k_i.k, k_i.q}, all of normalised vectors.
struct WindowWorkspace {
  WindowPlan* plans = nullptr;
  float* data = nullptr;
  int tokens = 1;  // most tokens of a sequence
  int R = 0;
  __host__ __device__ int record() const { return 4 + (2 * R + 3) / 4 * 4; }
  __device__ __forceinline__ float* at(int64_t n, int H, int h, int t) const {
    return data + ((n * H + h) * tokens + t) * static_cast<int64_t>(record());
  }
};

// blockIdx.x = key head, blockIdx.y = sequence.
template <class AT>
__global__ void __launch_bounds__(128)
    prepare_window(const __grid_constant__ RecurrentArgs a,
                   const __grid_constant__ WindowWorkspace ws, int64_t first, bool flush) {
  const int64_t n = first + blockIdx.y;
  const int h = blockIdx.x, warp = threadIdx.x >> 5, lane = threadIdx.x & 31, warps = 4;
  wait_for_previous_kernel();
  const WindowPlan plan = plan_window(a, n, flush);
  let_next_kernel_start();
  const int T = plan.tokens, K = static_cast<int>(a.K), slot = plan.slot();
  if (h == 0 && threadIdx.x == 0) ws.plans[n] = plan;
  if (plan.row < 0 || T == 0) return;
  const int64_t b = a.seqs.cu_seqlens.ptr ? 0 : n;
  const AT* const pk = static_cast<const AT*>(a.k.ptr) + offset_of(a.k, b, plan.start, h);
  const AT* const pq = static_cast<const AT*>(a.q.ptr) + offset_of(a.q, b, plan.start, h);
  const Window& w = a.window;
  const int64_t key_base = plan.row * w.sk_p + h * w.sk_h;
  for (int t = 0; t < T; t++) {
    const AT *const kt = pk + t * a.k.st, *const qt = pq + t * a.q.st;
    float* const to = ws.at(n, static_cast<int>(a.H), h, t);
    // Every warp takes the norms itself: there are few tokens, and it saves a barrier.
    float kk = 0.f, qq = 0.f, kq = 0.f;
    for (int c = lane; c < K; c += 32) {
      const float k = to_float(kt[c * a.k.sd]), q = to_float(qt[c * a.q.sd]);
      kk = __fmaf_rn(k, k, kk);
      qq = __fmaf_rn(q, q, qq);
      kq = __fmaf_rn(k, q, kq);
    }
    float rk = 1.f, rq = 1.f;
    kq = lane_sum(kq);
    if (a.l2norm) {
      rk = rsqrtf(lane_sum(kk) + kL2Eps);
      rq = rsqrtf(lane_sum(qq) + kL2Eps);
      kq *= rk * rq;
    }
    if (threadIdx.x == 0) *reinterpret_cast<float4*>(to) = make_float4(rk, rq, kq, 0.f);
    for (int i = warp; i < slot + t; i += warps) {
      float dk = 0.f, dq = 0.f;
      if (i < slot) {
        const int64_t key = key_base + i * w.sk_r;
        for (int c = lane; c < K; c += 32) {
          const float y = load_as(w.k, w.k_dtype, key + c);
          dk = __fmaf_rn(y, to_float(kt[c * a.k.sd]), dk);
          dq = __fmaf_rn(y, to_float(qt[c * a.q.sd]), dq);
        }
      } else {
        // An entry of this call, as the window will store it: cutting the call changes nothing.
        const AT* const key = pk + (i - slot) * a.k.st;
        float ry = 1.f;
        if (a.l2norm) {
          float yy = 0.f;
          for (int c = lane; c < K; c += 32) {
            const float y = to_float(key[c * a.k.sd]);
            yy = __fmaf_rn(y, y, yy);
          }
          ry = rsqrtf(lane_sum(yy) + kL2Eps);
        }
        for (int c = lane; c < K; c += 32) {
          const float y = round_as(w.k_dtype, to_float(key[c * a.k.sd]) * ry);
          dk = __fmaf_rn(y, to_float(kt[c * a.k.sd]), dk);
          dq = __fmaf_rn(y, to_float(qt[c * a.q.sd]), dq);
        }
      }
      dk = lane_sum(dk) * rk;
      dq = lane_sum(dq) * rq;
      if (lane == 0) *reinterpret_cast<float2*>(to + 4 + 2 * i) = make_float2(dk, dq);
    }
  }
}

// The entries of the window as one warp sees them: lane i keeps the log decay from entry i (and
// i + 32) to the current token; the weights of a token lie in shared memory of the warp.
struct WarpWindow {
  float s0, s1, base;  // log decays: entry lane, entry lane + 32, the base state
  int count;           // entries now

  // g0, g1: log decays of entries lane and lane + 32, zero past the pending ones.
  __device__ __forceinline__ void start(float g0, float g1, int pending, int lane, bool wide) {
    // Sums over the entries after this one: never a difference, g may be -inf.
    float lower = g0, upper = g1, upper_total = 0.f;
#pragma unroll
    for (int m = 1; m < 32; m <<= 1) {
      const float x = __shfl_down_sync(kFullMask, lower, m);
      if (lane + m < 32) lower += x;
    }
    s1 = 0.f;
    if (wide) {
#pragma unroll
      for (int m = 1; m < 32; m <<= 1) {
        const float x = __shfl_down_sync(kFullMask, upper, m);
        if (lane + m < 32) upper += x;
      }
      upper_total = __shfl_sync(kFullMask, upper, 0);
      s1 = __shfl_down_sync(kFullMask, upper, 1);
      if (lane == 31) s1 = 0.f;
    }
    s0 = __shfl_down_sync(kFullMask, lower, 1);
    s0 = (lane == 31 ? 0.f : s0) + upper_total;
    base = __shfl_sync(kFullMask, lower, 0) + upper_total;
    count = pending;
  }
  // Weights exp(G_i) alone, for a fold.
  __device__ __forceinline__ void fold_weights(float2* weights, int lane, bool wide) const {
    if (lane < count) weights[lane].x = expf(s0);
    if (wide && lane + 32 < count) weights[lane + 32].x = expf(s1);
    __syncwarp();
  }
  __device__ __forceinline__ void clear() {
    s0 = s1 = base = 0.f;
    count = 0;
  }
  // Moves to the next token, whose log decay is g. d0, d1: the inner products of entries lane and
  // lane + 32. Returns the decay of the base.
  __device__ __forceinline__ float advance(float g, float2 d0, float2 d1, float2* weights, int lane,
                                           bool wide) {
    if (lane < count) {
      s0 += g;
      const float x = expf(s0);
      weights[lane] = make_float2(x * d0.x, x * d0.y);
    }
    if (wide && lane + 32 < count) {
      s1 += g;
      const float x = expf(s1);
      weights[lane + 32] = make_float2(x * d1.x, x * d1.y);
    }
    base += g;
    __syncwarp();
    return expf(base);
  }
};

struct BufferedGrid {
  int64_t first = 0;  // sequence of blockIdx.y == 0
  FastDiv row_blocks, ratio;
};

// Layout of the rows as in recurrent_rows.
template <class ST, class AT, int K, int RPW, int LANES, int WARPS, int MIN_BLOCKS>
__global__ void __launch_bounds__(WARPS * 32, MIN_BLOCKS)
    buffered_rows(const __grid_constant__ RecurrentArgs a,
                  const __grid_constant__ BufferedGrid grid,
                  const __grid_constant__ WindowWorkspace ws) {
  using RT = RowTile<ST, K, RPW, LANES>;
  constexpr int E = RT::E, LPR = RT::LPR, VPL = RT::VPL, G = RT::G, NL = RT::NL, C = RT::C,
                LOW = RT::LOW;
  constexpr int REP = 2 * LOW;  // lanes that own the same row and share out the entries
  constexpr int PRE = 4;        // entries of u a lane has in flight
  __shared__ float2 shared_weights[WARPS][kMaxWindow];
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, group = lane / LPR, l = lane % LPR;
  const unsigned hv = grid.row_blocks(blockIdx.x);
  const unsigned block = blockIdx.x - hv * grid.row_blocks.divisor;
  const unsigned h = grid.ratio(hv);
  const int64_t n = grid.first + blockIdx.y;
  const int row0 = (block * WARPS + warp) * RPW;
  const int V = static_cast<int>(a.V);
  const int my_row = row0 + RT::own_row(l, group);
  const bool writer = RT::owner(l) && my_row < V;
  const int rep = l % LOW + (l >= LPR / 2 ? LOW : 0);
  float2* const weights = shared_weights[warp];
  const Window& w = a.window;
  const int R = static_cast<int>(w.R);
  const bool wide = R > 32;

  wait_for_previous_kernel();
  const WindowPlan plan = ws.plans[n];
  let_next_kernel_start();
  const int T = plan.tokens;
  const int64_t b = a.seqs.cu_seqlens.ptr ? 0 : n;
  if (plan.row < 0) {
    const Sequence s = device_sequence(a.seqs, n, 0);
    for (int64_t t = s.start; writer && t < s.end; t++) {
      store_as(a.out.ptr, a.out.dtype, offset_of(a.out, b, t, hv) + my_row * a.out.sd, 0.f);
    }
    return;
  }
  if (T == 0 && !plan.fold) return;

  // Everything a step reads is asked for before anything is waited for.
  ST* const home =
      static_cast<ST*>(a.state.ptr) + plan.row * a.state.s_p + hv * a.state.s_h + l * E;
  const int64_t s_v = a.state.s_v;
  uint4 raw[NL][VPL];
#pragma unroll
  for (int r = 0; r < NL; r++) {
    const int row = row0 + r * G + group;
    const bool live = !plan.fresh && row < V;
#pragma unroll
    for (int j = 0; j < VPL; j++) {
      raw[r][j] = make_uint4(0, 0, 0, 0);
      if (live) raw[r][j] = load_state(home + row * s_v + j * LPR * E);
    }
  }
  const AT* const pk = static_cast<const AT*>(a.k.ptr) + offset_of(a.k, b, plan.start, h);
  const AT* const pq = static_cast<const AT*>(a.q.ptr) + offset_of(a.q, b, plan.start, h);
  const AT* const pv = static_cast<const AT*>(a.v.ptr) + offset_of(a.v, b, plan.start, hv) +
                       static_cast<int64_t>(my_row) * a.v.sd;
  RawRow<RT, AT> raw_k, raw_q;
  AT raw_v = from_float<AT>(0.f);
  RawGates raw_gates = {};
  float4 norms = make_float4(0.f, 0.f, 0.f, 0.f);
  float2 d0 = make_float2(0.f, 0.f), d1 = d0;
  const auto load_token = [&](int t) {
    raw_k = load_row<RT, AT>(pk + t * a.k.st, l);
    raw_q = load_row<RT, AT>(pq + t * a.q.st, l);
    if (my_row < V) raw_v = pv[t * a.v.st];
    raw_gates = load_gates(a.gates, b, plan.start + t, hv);
    const float* const record = ws.at(n, static_cast<int>(a.H), h, t);
    norms = *reinterpret_cast<const float4*>(record);
    const int before = plan.slot() + t;
    if (lane < before) d0 = *reinterpret_cast<const float2*>(record + 4 + 2 * lane);
    if (lane + 32 < before) d1 = *reinterpret_cast<const float2*>(record + 4 + 2 * (lane + 32));
  };
  if (T > 0) load_token(0);
  const float* const pg = w.g + plan.row * w.sg_p + hv * w.sg_h;
  const float g0 = lane < plan.pending ? pg[lane * w.sg_r] : 0.f;
  const float g1 = lane + 32 < plan.pending ? pg[(lane + 32) * w.sg_r] : 0.f;
  const int64_t u_row = plan.row * w.su_p + hv * w.su_h + my_row;
  const auto load_u = [&](int i, int count) {
    return i < count && my_row < V ? load_bits(w.u, w.u_dtype, u_row + i * w.su_r) : 0u;
  };
  uint32_t bits[PRE];
#pragma unroll
  for (int j = 0; j < PRE; j++) bits[j] = load_u(plan.fold ? j : rep + j * REP, plan.pending);

  WarpWindow window;
  window.start(g0, g1, plan.pending, lane, wide);
  if (plan.fold) {
    window.fold_weights(weights, lane, wide);
    const float whole = expf(window.base);
    float f[NL][C];
#pragma unroll
    for (int r = 0; r < NL; r++) {
#pragma unroll
      for (int j = 0; j < VPL; j++) Vec<ST>::unpack(raw[r][j], &f[r][j * E]);
#pragma unroll
      for (int c = 0; c < C; c++) f[r][c] = whole == 0.f ? 0.f : whole * f[r][c];
    }
    const int64_t key = plan.row * w.sk_p + h * w.sk_h;
    RawVec<float, E> next[VPL];
#pragma unroll
    for (int j = 0; j < VPL; j++) next[j] = load_key<E>(w, key + RT::column(j, l));
    for (int i0 = 0; i0 < plan.pending; i0 += PRE) {
      uint32_t after[PRE];
#pragma unroll
      for (int j = 0; j < PRE; j++) after[j] = load_u(i0 + PRE + j, plan.pending);
#pragma unroll
      for (int m = 0; m < PRE; m++) {
        const int i = i0 + m;
        if (i < plan.pending) {
          const float mine = weights[i].x * bits_to_float(bits[m], w.u_dtype);
          float u[NL];
#pragma unroll
          for (int r = 0; r < NL; r++) u[r] = __shfl_sync(kFullMask, mine, group * LPR + r * LOW);
#pragma unroll
          for (int j = 0; j < VPL; j++) {
            float k[E];
            key_to_float<E>(next[j], w.k_dtype, k);
            if (i + 1 < plan.pending) {
              next[j] = load_key<E>(w, key + (i + 1) * w.sk_r + RT::column(j, l));
            }
#pragma unroll
            for (int r = 0; r < NL; r++) {
#pragma unroll
              for (int e = 0; e < E; e++) f[r][j * E + e] = __fmaf_rn(u[r], k[e], f[r][j * E + e]);
            }
          }
        }
      }
#pragma unroll
      for (int j = 0; j < PRE; j++) bits[j] = after[j];
    }
#pragma unroll
    for (int r = 0; r < NL; r++) {
#pragma unroll
      for (int j = 0; j < VPL; j++) raw[r][j] = Vec<ST>::pack(&f[r][j * E]);
    }
    window.clear();
    __syncwarp();
  }
  if (plan.fold) {
#pragma unroll
    for (int r = 0; r < NL; r++) {
      const int row = row0 + r * G + group;
#pragma unroll
      for (int j = 0; j < VPL; j++) {
        if (row < V) store_state(home + row * s_v + j * LPR * E, raw[r][j]);
      }
    }
  }
  // A fresh sequence has no base; its first entry says so in the window (append_window).
  if (plan.fresh) window.base = -INFINITY;

  for (int t = 0; t < T; t++) {
    float k[C], q[C];
#pragma unroll
    for (int j = 0; j < VPL; j++) {
      raw_to_float<AT, E>(raw_k.v[j], k + j * E);
      raw_to_float<AT, E>(raw_q.v[j], q + j * E);
    }
    const float v = to_float(raw_v);
    const float4 norm = norms;
    float g, beta;
    compute_gates(a.gates, raw_gates, &g, &beta);
    const float decay = window.advance(g, d0, d1, weights, lane, wide);
    if (t + 1 < T) load_token(t + 1);

    float sums[2 * NL];
#pragma unroll
    for (int r = 0; r < NL; r++) {
      float x = 0.f, y = 0.f;
#pragma unroll
      for (int j = 0; j < VPL; j++) {
        float f[E];
        Vec<ST>::unpack(raw[r][j], f);
#pragma unroll
        for (int e = 0; e < E; e++) {
          x = __fmaf_rn(f[e], k[j * E + e], x);
          y = __fmaf_rn(f[e], q[j * E + e], y);
        }
      }
      sums[r] = x;
      sums[NL + r] = y;
    }
    const float total = transpose_sum<2 * NL, LPR>(sums, lane);
    const float other = __shfl_xor_sync(kFullMask, total, LPR / 2);
    const bool upper = l >= LPR / 2;

    float p = 0.f, o = 0.f;
    for (int i = rep; i < window.count; i += PRE * REP) {
      if (t > 0 || i > rep) {
#pragma unroll
        for (int j = 0; j < PRE; j++) bits[j] = load_u(i + j * REP, window.count);
      }
#pragma unroll
      for (int j = 0; j < PRE; j++) {
        const int e = i + j * REP;
        if (e < window.count) {
          const float u = bits_to_float(bits[j], w.u_dtype);
          const float2 c = weights[e];
          p = __fmaf_rn(c.x, u, p);
          o = __fmaf_rn(c.y, u, o);
        }
      }
    }
#pragma unroll
    for (int m = 1; m < LOW; m <<= 1) {
      p += __shfl_xor_sync(kFullMask, p, m);
      o += __shfl_xor_sync(kFullMask, o, m);
    }
    p += __shfl_xor_sync(kFullMask, p, LPR / 2);
    o += __shfl_xor_sync(kFullMask, o, LPR / 2);
    if (decay != 0.f) {  // a base of weight zero is skipped, whatever it holds
      p = __fmaf_rn(decay * norm.x, upper ? other : total, p);
      o = __fmaf_rn(decay * norm.y, upper ? total : other, o);
    }
    const float u = beta * (v - p);
    o = a.scale * __fmaf_rn(norm.z, u, o);
    if (writer) {
      store_as(w.u, w.u_dtype, u_row + window.count * w.su_r, u);
      store_as(a.out.ptr, a.out.dtype, offset_of(a.out, b, plan.start + t, hv) + my_row * a.out.sd,
               o);
    }
    window.count++;
    // The entry just written is read by the other lanes of its row at the next token.
    __syncwarp();
  }
}

// After the kernels above, which only read them: keys, log decays and fill counts.
// blockIdx.x = sequence.
template <class AT>
__global__ void __launch_bounds__(256)
    append_window(const __grid_constant__ RecurrentArgs a,
                  const __grid_constant__ WindowWorkspace ws, int64_t first) {
  const int64_t n = first + blockIdx.x;
  wait_for_previous_kernel();
  const WindowPlan plan = ws.plans[n];
  let_next_kernel_start();
  if (plan.row < 0 || (plan.tokens == 0 && !plan.fold)) return;
  const Window& w = a.window;
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, warps = blockDim.x >> 5;
  const int slot = plan.slot(), K = static_cast<int>(a.K), H = static_cast<int>(a.H);
  const int64_t b = a.seqs.cu_seqlens.ptr ? 0 : n;
  if (threadIdx.x == 0) {
    const int drafts = plan.tokens > 0 ? plan.tokens - 1 : 0;
    w.fill[plan.row * w.s_fill] = pack_fill({slot + plan.tokens, drafts, 0});
  }
  for (int i = warp; i < plan.tokens * H; i += warps) {
    const int t = i / H, h = i - t * H;
    const AT* const pk = static_cast<const AT*>(a.k.ptr) + offset_of(a.k, b, plan.start + t, h);
    const float r = *ws.at(n, H, h, t);
    const int64_t to = plan.row * w.sk_p + h * w.sk_h + (slot + t) * w.sk_r;
    for (int c = lane; c < K; c += 32) {
      store_as(w.k, w.k_dtype, to + c, to_float(pk[c * a.k.sd]) * r);
    }
  }
  const int HV = static_cast<int>(a.HV);
  for (int i = threadIdx.x; i < plan.tokens * HV; i += blockDim.x) {
    const int t = i / HV, hv = i - t * HV;
    float g, beta;
    compute_gates(a.gates, load_gates(a.gates, b, plan.start + t, hv), &g, &beta);
    w.g[plan.row * w.sg_p + hv * w.sg_h + (slot + t) * w.sg_r] =
        plan.fresh && t == 0 ? -INFINITY : g;
  }
}

}  // namespace cuda
}  // namespace gdn
