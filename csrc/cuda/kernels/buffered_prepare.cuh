// The kernel before the rows of a window (buffered.cuh): what every row and every value head of a
// key head share.
#pragma once

#include "inner.cuh"
#include "mma.cuh"
#include "window.cuh"

namespace gdn {
namespace cuda {

// What prepare_window leaves, for groups of TG tokens. Lengths in floats.
struct WindowWorkspace {
  WindowPlan* plans = nullptr;  // [N]
  float* columns = nullptr;  // [N, H, groups, column]: as buffered_rows has them in shared memory
  float* records = nullptr;  // [N, HV, groups, record]: a float4 for each token {weight of the
                             // base for k, for q, k.q, beta}, then [entry, token] float2 weights
  float* folds = nullptr;    // [N, HV, fold]: exp(s_i) of each entry, exp(s) at R
  char* keys = nullptr;      // [N, H, R, K] of win_k's dtype: what a fold reads
  int key_bytes = 0;         // at most, of [R, K]
  int R = 0, H = 0, HV = 0, groups = 1, column = 0, record = 0, fold = 0;

  __host__ __device__ int64_t floats_a_sequence() const {
    return int64_t{groups} * (int64_t{H} * column + int64_t{HV} * record) + int64_t{HV} * fold +
           int64_t{H} * (key_bytes / 4);
  }
  __device__ __forceinline__ float* column_of(int64_t n, int h, int group) const {
    return columns + ((n * H + h) * groups + group) * column;
  }
  __device__ __forceinline__ float* record_of(int64_t n, int hv, int group) const {
    return records + ((n * HV + hv) * groups + group) * record;
  }
  __device__ __forceinline__ float* fold_of(int64_t n, int hv) const {
    return folds + (n * HV + hv) * fold;
  }
  __device__ __forceinline__ char* keys_of(int64_t n, int h) const {
    return keys + (n * H + h) * key_bytes;
  }
};

__host__ __device__ constexpr int record_floats(int R, int TG) {
  return (4 * TG + (R + TG) * TG * 2 + 3) / 4 * 4;
}

// blockIdx.x = key head, blockIdx.y = sequence; one warp.
template <class ST, class AT, class KT, int K, int TG>
__global__ void __launch_bounds__(32, TG == 1 && K <= 128 ? 32 : 16)
    prepare_window(const __grid_constant__ RecurrentArgs a,
                   const __grid_constant__ WindowWorkspace ws, int64_t first, bool flush,
                   bool early) {
  using Columns = WindowColumns<ST, K, TG>;
  constexpr int PER = K / 32, NV = 2 * TG, AHEAD = TG == 1 ? 8 : 4;
  __shared__ float dots[(kMaxWindow + TG) * NV];
  const int64_t n = first + blockIdx.y;
  const int h = blockIdx.x, lane = threadIdx.x, ratio = ws.HV / ws.H;
  // `early`: the kernel before this one leaves base and indices alone, and all kernels before it
  // are done, so buffered_rows may ask for the base already.
  if (early) let_next_kernel_start();
  wait_for_previous_kernel();
  if (!early) let_next_kernel_start();
  const WindowPlan plan = plan_window<TG == 1>(a, n, flush);
  if (h == 0 && lane == 0) ws.plans[n] = plan;
  const int T = TG == 1 && plan.tokens > 1 ? 1 : plan.tokens;
  if (plan.row < 0 || (T == 0 && !plan.fold)) return;
  const Window& w = a.window;
  const int R = ws.R, pending = plan.pending;
  const bool wide = R > 32;
  const int64_t b = TG == 1 ? n : a.seqs.cu_seqlens.ptr ? 0 : n;
  float* const pg = w.g + plan.row * w.sg_p;
  const int sg = static_cast<int>(w.sg_r);
  if (plan.fold) {
    for (int r = 0; r < ratio; r++) {
      const int hv = h * ratio + r;
      const float* const g = pg + hv * w.sg_h;
      const float g0 = lane < pending ? g[lane * sg] : 0.f;
      const float g1 = lane + 32 < pending ? g[(lane + 32) * sg] : 0.f;
      float s0, s1, all;
      suffix_sums(g0, g1, lane, wide, &s0, &s1, &all);
      float* const to = ws.fold_of(n, hv);
      if (lane < pending) to[lane] = expf(s0);
      if (lane + 32 < pending) to[lane + 32] = expf(s1);
      if (lane == 0) to[R] = expf(all);
    }
  }
  // Log decays of the first value heads, asked for before anything is waited for.
  constexpr int kEarly = TG == 1 ? 3 : 0;
  float early_g[kEarly + 1][2];
#pragma unroll
  for (int r = 0; r < kEarly; r++) {
    const int live = plan.fold || r >= ratio ? 0 : pending;
    const float* const g = pg + (h * ratio + r) * w.sg_h;
    early_g[r][0] = lane < live ? g[lane * sg] : 0.f;
    early_g[r][1] = wide && lane + 32 < live ? g[(lane + 32) * sg] : 0.f;
  }
  const DType at = a.q.dtype;
  char* const pw = const_cast<char*>(element_of(w.k, w.k_dtype, plan.row * w.sk_p + h * w.sk_h));
  const char* const pk = element_of(a.k.ptr, at, offset_of(a.k, b, plan.start, h));
  const char* const pq = element_of(a.q.ptr, at, offset_of(a.q, b, plan.start, h));
  const int sk = static_cast<int>(w.sk_r);
  const int k_st = static_cast<int>(a.k.st), q_st = static_cast<int>(a.q.st);
  const int old = plan.fold ? 0 : pending;  // entries that the call found
  if (plan.fold) {
    char* const to = ws.keys_of(n, h);
    for (int e0 = 0; e0 < pending; e0 += AHEAD) {
      Some<PER> raw[AHEAD];
#pragma unroll
      for (int i = 0; i < AHEAD; i++) {
        if (e0 + i < pending) {
          raw[i] = load_some<KT, PER>(pw, w.k_dtype, (e0 + i) * sk + lane * PER);
        }
      }
#pragma unroll
      for (int i = 0; i < AHEAD; i++) {
        if (e0 + i < pending) {
          store_some<KT, PER>(to, w.k_dtype, (e0 + i) * K + lane * PER, raw[i]);
        }
      }
    }
  }

  for (int t0 = 0; t0 < T; t0 += TG) {
    const int tokens = TG == 1 ? 1 : T - t0 < TG ? T - t0 : TG;
    const int count = old + t0, entries = count + tokens - 1;
    // Everything that this group reads is asked for before anything is waited for.
    Some<PER> raw_k[TG], raw_q[TG], raw_key[AHEAD];
#pragma unroll
    for (int t = 0; t < TG; t++) {
      const int token = t0 + (t < tokens ? t : 0);
      raw_k[t] = load_some<AT, PER>(pk, at, token * k_st + lane * PER);
      raw_q[t] = load_some<AT, PER>(pq, at, token * q_st + lane * PER);
    }
    const auto load_key = [&](int e) {
      return TG == 1 || e < old ? load_some<KT, PER>(pw, w.k_dtype, e * sk + lane * PER)
                                : load_some<AT, PER>(pk, at, (e - old) * k_st + lane * PER);
    };
#pragma unroll
    for (int i = 0; i < AHEAD; i++) {
      if (i < entries) raw_key[i] = load_key(i);
    }
    // Gates of (value head, token) in lane head * TG + t; ratio * TG lanes at most 32 at a time.
    const auto gates_of = [&](int r0, float* g, float* beta) {
      const int r = r0 + lane / TG, t = lane % TG;
      *g = *beta = 0.f;
      if (r < ratio && t < tokens) {
        compute_gates(a.gates, load_gates(a.gates, b, plan.start + t0 + t, h * ratio + r), g, beta);
      }
    };
    float gate_g, gate_beta;
    gates_of(0, &gate_g, &gate_beta);

    WarpToken<PER> token[TG];
    float back_k[TG], back_q[TG];
#pragma unroll
    for (int t = 0; t < TG; t++) {
      token[t].template prepare<AT>(raw_k[t], raw_q[t], at, a.l2norm, lane);
      const float (&k)[PER] = token[t].k, (&q)[PER] = token[t].q;
      back_k[t] = back_q[t] = 1.f;
      if (!a.l2norm && Columns::k16Bit) {  // unit columns stay in the range of any 16-bit type
        back_k[t] = sqrtf(token[t].kk);
        back_q[t] = sqrtf(token[t].qq);
      }
      if constexpr (Columns::k16Bit) {
        ST* const to = reinterpret_cast<ST*>(ws.column_of(n, h, t0 / TG)) +
                       2 * t * Columns::kPitch + lane * PER;
        const float fk = back_k[t] > 0.f ? 1.f / back_k[t] : 0.f;
        const float fq = back_q[t] > 0.f ? 1.f / back_q[t] : 0.f;
#pragma unroll
        for (int j = 0; j < PER; j += 2) {
          const float k0 = k[j] * fk, k1 = k[j + 1] * fk;
          const float q0 = q[j] * fq, q1 = q[j + 1] * fq;
          constexpr int low = NV * Columns::kPitch;
          *reinterpret_cast<uint32_t*>(to + j) = pack_pair<ST>(k0, k1);
          *reinterpret_cast<uint32_t*>(to + Columns::kPitch + j) = pack_pair<ST>(q0, q1);
          *reinterpret_cast<uint32_t*>(to + low + j) =
              pack_pair<ST>(low_part<ST>(k0), low_part<ST>(k1));
          *reinterpret_cast<uint32_t*>(to + low + Columns::kPitch + j) =
              pack_pair<ST>(low_part<ST>(q0), low_part<ST>(q1));
        }
      } else {
        float* const to = ws.column_of(n, h, t0 / TG);
#pragma unroll
        for (int j = 0; j < PER; j += 2) {
          const int c = lane * PER + j;
          float* const k_at =
              Columns::kMma ? to + 2 * t * Columns::kPitch + c : to + c / 4 * 8 + c % 4;
          float* const q_at = k_at + (Columns::kMma ? Columns::kPitch : 4);
          *reinterpret_cast<float2*>(k_at) = make_float2(k[j], k[j + 1]);
          *reinterpret_cast<float2*>(q_at) = make_float2(q[j], q[j + 1]);
        }
      }
    }

#pragma unroll
    for (int t = 0; t < TG; t++) {
      if (t < tokens) {
#pragma unroll
        for (int j = 0; j < PER; j++) {
          store_one<KT>(pw, w.k_dtype, (count + t) * sk + lane * PER + j, token[t].k[j]);
        }
      }
    }
    __syncwarp();  // the group before has read the inner products
#pragma unroll 1
    for (int e0 = 0; e0 < entries; e0 += AHEAD) {
      if (e0 > 0) {
#pragma unroll
        for (int i = 0; i < AHEAD; i++) {
          if (e0 + i < entries) raw_key[i] = load_key(e0 + i);
        }
      }
#pragma unroll
      for (int i = 0; i < AHEAD; i++) {
        const int e = e0 + i;
        if (e < entries) {
          float y[PER];
          entry_key<AT, KT, PER>(raw_key[i], TG == 1 || e < old, a, y);
          const float dot = entry_dots<TG, PER>(y, token, lane);
          if (lane % (32 / NV) == 0) dots[e * NV + lane / (32 / NV)] = dot;
        }
      }
    }
    __syncwarp();

    for (int r = 0; r < ratio; r++) {
      constexpr int kHeads = 32 / TG;  // whose gates the lanes hold
      if (r > 0 && r % kHeads == 0) gates_of(r, &gate_g, &gate_beta);
      const int hv = h * ratio + r;
      float g[TG], beta[TG];
#pragma unroll
      for (int t = 0; t < TG; t++) {
        g[t] = __shfl_sync(kFullMask, gate_g, r % kHeads * TG + t);
        beta[t] = __shfl_sync(kFullMask, gate_beta, r % kHeads * TG + t);
      }
      const auto decay_of = [&](int e) {
        if (e >= count) return 0.f;
        if (TG == 1 || e < old) return pg[hv * w.sg_h + e * sg];
        float x, y;
        compute_gates(a.gates, load_gates(a.gates, b, plan.start + e - old, hv), &x, &y);
        return plan.fresh && e == 0 ? -INFINITY : x;
      };
      float g0 = 0.f, g1 = 0.f, s[2], all;
#pragma unroll
      for (int i = 0; i < kEarly; i++) {
        if (i == r) {
          g0 = early_g[i][0];
          g1 = early_g[i][1];
        }
      }
      if (r >= kEarly) {
        g0 = decay_of(lane);
        g1 = wide ? decay_of(lane + 32) : 0.f;
      }
      suffix_sums(g0, g1, lane, wide, &s[0], &s[1], &all);
      if (lane < tokens) {
        float own = g[0];
#pragma unroll
        for (int t = 1; t < TG; t++) own = t == lane ? g[t] : own;
        // The first entry of a fresh sequence removes the base from every later weight.
        if (plan.fresh && t0 + lane == 0) own = -INFINITY;
        pg[hv * w.sg_h + (count + lane) * sg] = own;
      }
      float* const to = ws.record_of(n, hv, t0 / TG);
#pragma unroll
      for (int half = 0; half < 2; half++) {
        const int e = lane + 32 * half;
        if (e < count) {
          float log = s[half];
#pragma unroll
          for (int t = 0; t < TG; t++) {
            log += g[t];
            const float weight = expf(log);
            *reinterpret_cast<float2*>(to + 4 * TG + (e * TG + t) * 2) =
                make_float2(weight == 0.f ? 0.f : weight * dots[e * NV + 2 * t],
                            weight == 0.f ? 0.f : weight * dots[e * NV + 2 * t + 1]);
          }
        }
      }
      // The group's own tokens, each an entry for those after it.
      if (TG > 1 && lane < tokens - 1) {
        float log = 0.f;
#pragma unroll
        for (int t = 1; t < TG; t++) {
          if (t > lane) {
            log += g[t];
            const float weight = expf(log);
            const int e = count + lane;
            *reinterpret_cast<float2*>(to + 4 * TG + (e * TG + t) * 2) =
                make_float2(weight == 0.f ? 0.f : weight * dots[e * NV + 2 * t],
                            weight == 0.f ? 0.f : weight * dots[e * NV + 2 * t + 1]);
          }
        }
      }
      float log = plan.fresh ? -INFINITY : all;
#pragma unroll
      for (int t = 0; t < TG; t++) {
        log += g[t];
        const float weight = expf(log);
        if (lane == 0) {
          reinterpret_cast<float4*>(to)[t] =
              make_float4(weight * back_k[t], weight * back_q[t], token[t].kq, beta[t]);
        }
      }
    }
  }
}

}  // namespace cuda
}  // namespace gdn
