// The low-rank recurrence (no base state, only the last R rank-1 updates) of calls that
// lowrank_heads.cuh does not take: other dtypes and sizes. The window is a ring once it is full. A
// block owns rows of a value head, a thread each; it takes the inner products of keys itself, as
// nothing larger hides the launch that could share them.
#pragma once

#include "window.cuh"

namespace gdn {
namespace cuda {

struct LowrankGrid {
  int64_t first = 0;  // sequence of blockIdx.y == 0
  FastDiv row_blocks, ratio;
  int blocks = 0;  // of a sequence, at most 255; 0: append_window is a launch of its own
  NormTail norm;
};

// blockIdx.x = head * row_blocks + row block, blockIdx.y = sequence. VB rows, a thread each; TG
// tokens are taken together.
template <int K, int VB, int TG>
__global__ void __launch_bounds__(VB) lowrank_rows(const __grid_constant__ RecurrentArgs a,
                                                   const __grid_constant__ LowrankGrid grid) {
  using AT = Any;
  using KT = Any;
  using UT = Any;
  constexpr int WARPS = VB / 32, PER = K / 32, NV = 2 * TG;
  constexpr int PRE = 16;                 // entries of u a thread has in flight
  constexpr int AHEAD = TG == 1 ? 4 : 2;  // keys a warp has in flight
  __shared__ __align__(16) float coefficients[(kMaxWindow + TG) * NV];
  __shared__ float parts[TG][WARPS];
  __shared__ bool last_block;
  bool last = false;
  const int tid = threadIdx.x, warp = tid >> 5, lane = tid & 31;
  const unsigned hv = grid.row_blocks(blockIdx.x);
  const int row0 = static_cast<int>(blockIdx.x - hv * grid.row_blocks.divisor) * VB;
  const unsigned h = grid.ratio(hv);
  const int64_t n = grid.first + blockIdx.y;
  const int V = static_cast<int>(a.V), my_row = row0 + static_cast<int>(threadIdx.x);
  const bool live = my_row < V;
  const Window& w = a.window;
  const int R = static_cast<int>(w.R);
  const bool wide = R > 32;

  wait_for_previous_kernel();
  const WindowPlan plan = plan_window<TG == 1>(a, n, false);
  let_next_kernel_start();
  const int T = plan.tokens;
  const int64_t b = TG == 1 ? n : a.seqs.cu_seqlens.ptr ? 0 : n;
  const View& result = grid.norm.on ? grid.norm.y : a.out;
  if (plan.row < 0) {
    const Sequence s = device_sequence(a.seqs, n, 0);
    for (int64_t t = s.start; live && t < s.end; t++) {
      store_as(result.ptr, result.dtype, offset_of(result, b, t, hv) + my_row * result.sd, 0.f);
    }
    return;
  }
  if (T == 0) return;

  // Pointers once; inside a row offsets fit 32 bits (window_refusal).
  const DType at = a.q.dtype;
  char* const pu =
      const_cast<char*>(element_of(w.u, w.u_dtype, plan.row * w.su_p + hv * w.su_h + row0));
  const char* const pw = element_of(w.k, w.k_dtype, plan.row * w.sk_p + h * w.sk_h);
  const float* const pg = w.g + plan.row * w.sg_p + hv * w.sg_h;
  const char* const pk = element_of(a.k.ptr, at, offset_of(a.k, b, plan.start, h));
  const char* const pq = element_of(a.q.ptr, at, offset_of(a.q, b, plan.start, h));
  const char* const pv = element_of(a.v.ptr, at, offset_of(a.v, b, plan.start, hv) + row0 * a.v.sd);
  char* const po = const_cast<char*>(
      element_of(a.out.ptr, at, offset_of(a.out, b, plan.start, hv) + row0 * a.out.sd));
  const int su = static_cast<int>(w.su_r), sk = static_cast<int>(w.sk_r);
  const int sg = static_cast<int>(w.sg_r);
  const int k_st = static_cast<int>(a.k.st), q_st = static_cast<int>(a.q.st);
  const int v_st = static_cast<int>(a.v.st), v_sd = static_cast<int>(a.v.sd);
  const int o_st = static_cast<int>(a.out.st), o_sd = static_cast<int>(a.out.sd);
  int count = plan.pending, head = plan.head;
  const auto slot_of = [&](int e) {
    const int s = head + e;
    return s >= R ? s - R : s;
  };

  for (int t0 = 0; t0 < (TG == 1 ? (T > 0 ? 1 : 0) : T); t0 += TG) {
    const int tokens = TG == 1 ? 1 : T - t0 < TG ? T - t0 : TG;
    // Everything that this group reads is asked for before anything is waited for.
    Some<PER> raw_k[TG], raw_q[TG], raw_key[AHEAD];
    uint32_t raw_v[TG], raw_u[PRE];
    RawGates raw_gates[TG];
    // Live entries that this call brought: none where a call is one token (TG = 1).
    const int from_call = TG == 1 ? 0 : t0 < count ? t0 : count;
    const int old = count - from_call;
    const int entries = count + tokens - 1;  // of which the tokens of the group but the last
#pragma unroll
    for (int t = 0; t < TG; t++) {
      const int token = t0 + (t < tokens ? t : 0);
      raw_k[t] = load_some<AT, PER>(pk, at, token * k_st + lane * PER);
      raw_q[t] = load_some<AT, PER>(pq, at, token * q_st + lane * PER);
      raw_v[t] = live ? load_one<AT>(pv, at, token * v_st + tid * v_sd) : 0;
      raw_gates[t] = load_gates(a.gates, b, plan.start + token, hv);
    }
    // Entries past the last are read as the last: never used, and no predicate a load.
    const auto load_four = [&](int e0, uint32_t* to) {
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const int e = e0 + i < count ? e0 + i : count - 1;
        to[i] = load_one<UT>(pu, w.u_dtype, slot_of(e) * su + (live ? tid : 0));
      }
    };
    const auto load_key = [&](int e) {
      return TG == 1 || e < old
                 ? load_some<KT, PER>(pw, w.k_dtype, slot_of(e) * sk + lane * PER)
                 : load_some<AT, PER>(pk, at, (t0 - from_call + e - old) * k_st + lane * PER);
    };
    const auto load_decay = [&](int e) {
      if (e >= count) return 0.f;
      if (TG == 1 || e < old) return pg[slot_of(e) * sg];
      const int64_t token = t0 - from_call + (e - old);
      float g, beta;
      compute_gates(a.gates, load_gates(a.gates, b, plan.start + token, hv), &g, &beta);
      return g;
    };
    const float g0 = load_decay(lane), g1 = wide ? load_decay(lane + 32) : 0.f;
#pragma unroll
    for (int i = 0; i < AHEAD; i++) {
      if (warp + i * WARPS < entries) raw_key[i] = load_key(warp + i * WARPS);
    }
#pragma unroll
    for (int e = 0; e < PRE; e += 4) {
      if (e < count) load_four(e, raw_u + e);
    }

    WarpToken<PER> token[TG];
    float g[TG], beta[TG];
#pragma unroll
    for (int t = 0; t < TG; t++) {
      token[t].template prepare<AT>(raw_k[t], raw_q[t], at, a.l2norm, lane);
      compute_gates(a.gates, raw_gates[t], &g[t], &beta[t]);
    }
    float s0, s1, all;
    suffix_sums(g0, g1, lane, wide, &s0, &s1, &all);
    // The value of the sums below that this lane ends up with: token `due`, key or query.
    const int value = lane / (32 / NV), due = value / 2;
    float until = 0.f;  // log decay up to and including token `due`
#pragma unroll
    for (int t = 0; t < TG; t++) until += t <= due ? g[t] : 0.f;
#pragma unroll 1
    for (int i0 = 0; warp + i0 * WARPS < entries; i0 += AHEAD) {
#pragma unroll
      for (int i = 0; i < AHEAD; i++) {
        const int e = warp + (i0 + i) * WARPS;
        if (e < entries) {
          if (i0 > 0) raw_key[i] = load_key(e);
          float y[PER];
          entry_key<AT, KT, PER>(raw_key[i], TG == 1 || e < old, a, y);
          const float dot = entry_dots<TG, PER>(y, token, lane);
          const float after =
              e < 32 ? __shfl_sync(kFullMask, s0, e & 31) : __shfl_sync(kFullMask, s1, e & 31);
          float exponent = after + until;
          bool used = e >= count + due - R;  // a full low-rank window drops its oldest
          if (TG > 1 && e >= count) {        // token e - count of the group
            const int j = e - count;
            exponent = 0.f;
#pragma unroll
            for (int t = 1; t < TG; t++) exponent += t > j && t <= due ? g[t] : 0.f;
            used = used && j < due;
          }
          if (lane % (32 / NV) == 0) {
            coefficients[e * NV + value] = used ? expf(exponent) * dot : 0.f;
          }
        }
      }
    }
    __syncthreads();
    // From here on this block reads no key, decay or count of the window. The answer is needed at
    // the end only, so its way to memory and back costs nothing.
    if (grid.blocks > 0 && tid == 0 && t0 + TG >= T) last = arrive_last(a, plan, grid.blocks);

    float p[TG], o[TG];
#pragma unroll
    for (int t = 0; t < TG; t++) p[t] = o[t] = 0.f;
    const auto add_entry = [&](int e, float u, int from, float (&p)[TG], float (&o)[TG]) {
#pragma unroll
      for (int t = 0; t < TG; t++) {
        if (t >= from) {
          const float2 c = *reinterpret_cast<const float2*>(&coefficients[e * NV + 2 * t]);
          if (c.x != 0.f) p[t] = __fmaf_rn(c.x, u, p[t]);
          if (c.y != 0.f) o[t] = __fmaf_rn(c.y, u, o[t]);
        }
      }
    };
#pragma unroll 1
    for (int e0 = 0; e0 < count; e0 += PRE) {
      if (e0 > 0) {
#pragma unroll
        for (int i = 0; i < PRE; i += 4) {
          if (e0 + i < count) load_four(e0 + i, raw_u + i);
        }
      }
#pragma unroll
      for (int i = 0; i < PRE; i++) {
        if (e0 + i < count) add_entry(e0 + i, one_to_float<UT>(raw_u[i], w.u_dtype), 0, p, o);
      }
    }

    float out[TG];
#pragma unroll
    for (int t = 0; t < TG; t++) {
      out[t] = 0.f;
      if (t < tokens) {
        const float u = beta[t] * (one_to_float<AT>(raw_v[t], at) - p[t]);
        out[t] = a.scale * __fmaf_rn(token[t].kq, u, o[t]);
        if (live) {
          int to = head + count + t;
          while (to >= R) to -= R;
          store_one<UT>(pu, w.u_dtype, to * su + tid, u);
          if (!grid.norm.on) store_one<AT>(po, at, (t0 + t) * o_st + tid * o_sd, out[t]);
        }
        if (t + 1 < TG && t + 1 < tokens) {
          add_entry(count + t, round_one<UT>(w.u_dtype, u), t + 1, p, o);
        }
      }
    }
    if (grid.norm.on) {
      const int64_t token = plan.start + t0;
      NormInputs<TG> in;
      if (live) in.load(grid.norm, tokens, b, token, static_cast<int>(hv), tid);
      norm_tail<TG, WARPS>(grid.norm, out, in, tokens, b, token, static_cast<int>(hv), tid, live, V,
                           a.out.dtype, parts);
    }
    if (t0 + TG < T) __syncthreads();  // the next group writes what this one reads
    const int total = count + tokens;
    if (total > R) head = (head + total - R) % R;
    count = total > R ? R : total;
  }

  if (grid.blocks > 0) {
    if (tid == 0) last_block = last;
    __syncthreads();
    if (last_block) append_entries<K>(a, plan, n);
  }
}

}  // namespace cuda
}  // namespace gdn
