// Windows of any K, V, strides and dtypes (docs/windows.md): a block owns rows of V of one value
// head and goes token by token. Lanes are rows; the warps share out the columns of the base and the
// entries of the window, which are read from memory as they are needed. 32 rows of the base wait in
// shared memory, as in recurrent_any.cuh, where a fold rewrites them too.
//
// Every block of a sequence reads its keys, log decays and counts, so what a call adds to them is
// written by a launch of its own, append_any. Until then the key of an entry of this call is made
// again from its token, as the window will store it.
#pragma once

#include "window.cuh"

namespace gdn {
namespace cuda {

constexpr int kAnyWindowWarps = 4;

// Rows of a block, and floats of its shared memory.
__host__ __device__ constexpr int any_window_rows(bool base) {
  return base ? 32 : 32 * kAnyWindowWarps;
}
__host__ __device__ constexpr int any_window_floats(int K, bool base) {
  return 2 * kAnyWindowWarps * any_window_rows(base) + 2 * kMaxWindow + 2 * K +
         (base ? 32 * (K | 1) : 0);
}

struct AnyWindowGrid {
  int64_t first = 0;  // sequence of blockIdx.y == 0
  FastDiv row_blocks, ratio;
  bool flush = false;
};

// What brings a token's key or query to unit length, given its squares at columns lane + 32 i.
__device__ __forceinline__ float unit_factor(const RecurrentArgs& a, float squares) {
  return a.l2norm ? rsqrtf(lane_sum(squares) + kL2Eps) : 1.f;
}

// blockIdx.x = head * row blocks + row block, blockIdx.y = sequence. BASE: buffered, else low-rank.
template <bool BASE>
__global__ void __launch_bounds__(kAnyWindowWarps * 32, BASE ? 8 : 6)
    window_any(const __grid_constant__ RecurrentArgs a,
               const __grid_constant__ AnyWindowGrid grid) {
  constexpr int WARPS = kAnyWindowWarps, THREADS = WARPS * 32, STEPS = 32 / WARPS;
  constexpr int ROWS = any_window_rows(BASE), PER = ROWS / 32;  // rows of the block, of a lane
  constexpr int GROUP = 4, FOLD = 8;  // entries that a warp, or a fold, has in hand
  static_assert(ROWS * WARPS * 2 >= 32 * FOLD, "a fold's factors take the place of the sums");
  extern __shared__ __align__(128) unsigned char shared[];
  const int K = static_cast<int>(a.K), V = static_cast<int>(a.V), pitch = K | 1;
  float2* const parts = reinterpret_cast<float2*>(shared);  // [warp][row]: for key and for query
  float* const decays = reinterpret_cast<float*>(parts + WARPS * ROWS);  // of entries, by slot
  float* const factors = decays + kMaxWindow;  // of the keys of this call, by slot
  float2* const token = reinterpret_cast<float2*>(factors + kMaxWindow);  // {key, query} [column]
  float* const S = reinterpret_cast<float*>(token + K);                   // [row][pitch]
  const int tid = threadIdx.x, warp = tid >> 5, lane = tid & 31;
  const unsigned hv = grid.row_blocks(blockIdx.x), h = grid.ratio(hv);
  const int row0 = static_cast<int>(blockIdx.x - hv * grid.row_blocks.divisor) * ROWS;
  const int rows = V - row0 < ROWS ? V - row0 : ROWS;
  const int64_t n = grid.first + blockIdx.y, b = a.seqs.cu_seqlens.ptr ? 0 : n;
  const Window& w = a.window;
  const int R = static_cast<int>(w.R);

  wait_for_previous_kernel();
  const WindowPlan plan = plan_window<false>(a, n, grid.flush);
  let_next_kernel_start();
  const auto put_output = [&](int64_t t, float x) {
    store_as(a.out.ptr, a.out.dtype, offset_of(a.out, b, t, hv) + (row0 + tid) * a.out.sd, x);
  };
  if (plan.row < 0) {
    const Sequence s = device_sequence(a.seqs, n, 0);
    for (int64_t t = s.start; tid < rows && t < s.end; t++) put_output(t, 0.f);
    return;
  }
  if (plan.tokens == 0 && !plan.fold) return;

  const int64_t keys = plan.row * w.sk_p + h * w.sk_h;
  const int64_t updates = plan.row * w.su_p + hv * w.su_h + row0;
  int count = plan.pending, head = plan.head;
  // Of entry e from the oldest on. What is added goes to slot_of(count), a full ring's oldest.
  const auto slot_of = [&](int e) { return head + e < R ? head + e : head + e - R; };
  if (tid < count) {
    const int slot = slot_of(tid);
    decays[slot] = w.g[plan.row * w.sg_p + hv * w.sg_h + slot * w.sg_r];
  }
  // Sums of the log decays after entries `lane` and `lane + 32`, and of all.
  const auto sum_decays = [&](float* s0, float* s1, float* all) {
    suffix_sums(lane < count ? decays[slot_of(lane)] : 0.f,
                lane + 32 < count ? decays[slot_of(lane + 32)] : 0.f, lane, R > 32, s0, s1, all);
  };
  const auto of_entry = [](float w0, float w1, int e) {
    return __shfl_sync(kFullMask, e < 32 ? w0 : w1, e & 31);
  };

  // Element j of a thread in 32 columns of the block's rows: lanes follow the axis that lies
  // together. False where there is none.
  const bool along_rows = a.state.s_k != 1;
  const int64_t home = plan.row * a.state.s_p + hv * a.state.s_h + row0 * a.state.s_v;
  const auto element = [&](int c0, int j, int* in_tile, int64_t* in_pool) {
    const int across = warp + WARPS * j;
    const int r = along_rows ? lane : across, c = c0 + (along_rows ? across : lane);
    *in_tile = r * pitch + c;
    *in_pool = home + r * a.state.s_v + c * a.state.s_k;
    return r < rows && c < K;
  };
  if (BASE && !plan.fresh) {
    for (int c0 = 0; c0 < K; c0 += 32) {
      uint32_t raw[STEPS];
      int to;
      int64_t from;
#pragma unroll
      for (int j = 0; j < STEPS; j++) {
        raw[j] = element(c0, j, &to, &from) ? load_bits(a.state.ptr, a.state.dtype, from) : 0;
      }
#pragma unroll
      for (int j = 0; j < STEPS; j++) {
        if (element(c0, j, &to, &from)) S[to] = bits_to_float(raw[j], a.state.dtype);
      }
    }
  }
  __syncthreads();

  if (BASE && plan.fold) {
    float s0, s1, all;
    sum_decays(&s0, &s1, &all);
    const float w0 = expf(s0), w1 = expf(s1), whole = expf(all);
    float* const weighted =
        reinterpret_cast<float*>(shared);  // [row][FOLD]: updates times their weights
    for (int e0 = 0; e0 < count; e0 += FOLD) {
      float weight[FOLD];
#pragma unroll
      for (int j = 0; j < FOLD; j++) weight[j] = e0 + j < count ? of_entry(w0, w1, e0 + j) : 0.f;
#pragma unroll
      for (int j = 0; j < FOLD; j++) {
        if (j % WARPS == warp) {
          weighted[lane * FOLD + j] =
              weight[j] == 0.f || lane >= rows
                  ? 0.f
                  : weight[j] * load_as(w.u, w.u_dtype, updates + slot_of(e0 + j) * w.su_r + lane);
        }
      }
      __syncthreads();
      for (int c = tid; c < K; c += THREADS) {
        float key[FOLD];
#pragma unroll
        for (int j = 0; j < FOLD; j++) {
          key[j] =
              weight[j] == 0.f ? 0.f : load_as(w.k, w.k_dtype, keys + slot_of(e0 + j) * w.sk_r + c);
        }
        for (int r = 0; r < rows; r++) {
          const float4 u0 = *reinterpret_cast<const float4*>(weighted + r * FOLD);
          const float4 u1 = *reinterpret_cast<const float4*>(weighted + r * FOLD + 4);
          float x = S[r * pitch + c];
          if (e0 == 0) x = whole == 0.f ? 0.f : whole * x;
          x = __fmaf_rn(u0.x, key[0], x);
          x = __fmaf_rn(u0.y, key[1], x);
          x = __fmaf_rn(u0.z, key[2], x);
          x = __fmaf_rn(u0.w, key[3], x);
          x = __fmaf_rn(u1.x, key[4], x);
          x = __fmaf_rn(u1.y, key[5], x);
          x = __fmaf_rn(u1.z, key[6], x);
          x = __fmaf_rn(u1.w, key[7], x);
          // What follows reads the base as it is stored.
          S[r * pitch + c] = e0 + FOLD < count ? x : round_as(a.state.dtype, x);
        }
      }
      __syncthreads();
    }
    for (int c0 = 0; c0 < K; c0 += 32) {
#pragma unroll
      for (int j = 0; j < STEPS; j++) {
        int from;
        int64_t to;
        if (element(c0, j, &from, &to)) store_as(a.state.ptr, a.state.dtype, to, S[from]);
      }
    }
    count = head = 0;
  }

  const int first_column = K * warp / WARPS, end_column = K * (warp + 1) / WARPS;
  for (int t = 0; t < plan.tokens; t++) {
    const int64_t k0 = offset_of(a.k, b, plan.start + t, h);
    const int64_t q0 = offset_of(a.q, b, plan.start + t, h);
    for (int c = tid; c < K; c += THREADS) {
      token[c] = make_float2(load_as(a.k.ptr, a.k.dtype, k0 + c * a.k.sd),
                             load_as(a.q.ptr, a.q.dtype, q0 + c * a.q.sd));
    }
    const float v = tid < rows
                        ? load_as(a.v.ptr, a.v.dtype,
                                  offset_of(a.v, b, plan.start + t, hv) + (row0 + tid) * a.v.sd)
                        : 0.f;
    float g, beta;
    compute_gates(a.gates, load_gates(a.gates, b, plan.start + t, hv), &g, &beta);
    __syncthreads();

    float kk = 0.f, qq = 0.f, kq = 0.f;
    for (int c = lane; c < K; c += 32) {
      const float2 x = token[c];
      kk = __fmaf_rn(x.x, x.x, kk);
      qq = __fmaf_rn(x.y, x.y, qq);
      kq = __fmaf_rn(x.x, x.y, kq);
    }
    const float rk = unit_factor(a, kk), rq = unit_factor(a, qq);
    kq = lane_sum(kq) * (rk * rq);
    float s0, s1, all;
    sum_decays(&s0, &s1, &all);
    const float w0 = expf(s0 + g), w1 = expf(s1 + g);
    const float base = BASE && !plan.fresh ? expf(all + g) : 0.f;

    // What this warp adds to S k and S q: its columns of the base, and its entries. What weighs
    // nothing is skipped, whatever it holds.
    float p[PER], o[PER];
#pragma unroll
    for (int i = 0; i < PER; i++) p[i] = o[i] = 0.f;
    if (BASE && base != 0.f && lane < rows) {
      const float* const row = S + lane * pitch;
      for (int c = first_column; c < end_column; c++) {
        const float2 x = token[c];
        p[0] = __fmaf_rn(row[c], x.x, p[0]);
        o[0] = __fmaf_rn(row[c], x.y, o[0]);
      }
      p[0] *= base * rk;
      o[0] *= base * rq;
    }
    const int stored = count > t ? count - t : 0;  // entries that were there before the call
    for (int e0 = warp * GROUP; e0 < count; e0 += WARPS * GROUP) {
      // Entries past the last are read as the last and not used.
      const auto entry = [&](int j) { return e0 + j < count ? e0 + j : count - 1; };
      uint32_t raw_u[GROUP][PER];
#pragma unroll
      for (int j = 0; j < GROUP; j++) {
        const int64_t from = updates + slot_of(entry(j)) * w.su_r;
#pragma unroll
        for (int i = 0; i < PER; i++) {
          const int r = lane + 32 * i;
          raw_u[j][i] = r < rows ? load_bits(w.u, w.u_dtype, from + r) : 0;
        }
      }
      float dots[2 * GROUP];
#pragma unroll
      for (int j = 0; j < 2 * GROUP; j++) dots[j] = 0.f;
      for (int c = lane; c < K; c += 32) {
        uint32_t raw[GROUP];
#pragma unroll
        for (int j = 0; j < GROUP; j++) {
          const int e = entry(j);
          raw[j] = e < stored
                       ? load_bits(w.k, w.k_dtype, keys + slot_of(e) * w.sk_r + c)
                       : load_bits(a.k.ptr, a.k.dtype, k0 + (e - count) * a.k.st + c * a.k.sd);
        }
        const float2 x = token[c];
#pragma unroll
        for (int j = 0; j < GROUP; j++) {
          const int e = entry(j);
          const float y =
              e < stored
                  ? bits_to_float(raw[j], w.k_dtype)
                  : round_as(w.k_dtype, bits_to_float(raw[j], a.k.dtype) * factors[slot_of(e)]);
          dots[2 * j] = __fmaf_rn(y, x.x, dots[2 * j]);
          dots[2 * j + 1] = __fmaf_rn(y, x.y, dots[2 * j + 1]);
        }
      }
      const float total = transpose_sum<2 * GROUP, 32>(dots, lane);
#pragma unroll
      for (int j = 0; j < GROUP; j++) {
        const float weight = of_entry(w0, w1, entry(j));
        constexpr int LANES = 32 / (2 * GROUP);  // that hold a sum
        const float c = weight * (__shfl_sync(kFullMask, total, 2 * j * LANES) * rk);
        const float d = weight * (__shfl_sync(kFullMask, total, (2 * j + 1) * LANES) * rq);
        if (e0 + j < count && weight != 0.f) {
#pragma unroll
          for (int i = 0; i < PER; i++) {
            const float u = bits_to_float(raw_u[j][i], w.u_dtype);
            p[i] = __fmaf_rn(c, u, p[i]);
            o[i] = __fmaf_rn(d, u, o[i]);
          }
        }
      }
    }
#pragma unroll
    for (int i = 0; i < PER; i++) parts[warp * ROWS + lane + 32 * i] = make_float2(p[i], o[i]);
    __syncthreads();

    const int slot = slot_of(count);
    if (tid < rows) {
      float2 sum = parts[tid];
#pragma unroll
      for (int i = 1; i < WARPS; i++) {
        const float2 x = parts[i * ROWS + tid];
        sum.x += x.x;
        sum.y += x.y;
      }
      const float u = beta * (v - sum.x);
      put_output(plan.start + t, a.scale * __fmaf_rn(kq, u, sum.y));
      store_as(w.u, w.u_dtype, updates + slot * w.su_r + tid, u);
    }
    if (tid == 0) {
      // The first entry of a fresh sequence removes the base from every later weight.
      decays[slot] = BASE && plan.fresh && t == 0 ? -INFINITY : g;
      factors[slot] = rk;
    }
    if (count < R) {
      count++;
    } else {
      head = head + 1 < R ? head + 1 : 0;
    }
  }
}

// New keys, log decays and counts, once no block of window_any reads the old ones. blockIdx.x =
// sequence.
__global__ void __launch_bounds__(256)
    append_any(const __grid_constant__ RecurrentArgs a, int64_t first, bool flush) {
  const int64_t n = first + blockIdx.x, b = a.seqs.cu_seqlens.ptr ? 0 : n;
  const Window& w = a.window;
  const int K = static_cast<int>(a.K), H = static_cast<int>(a.H), HV = static_cast<int>(a.HV);
  const int R = static_cast<int>(w.R), lane = threadIdx.x & 31, warps = blockDim.x >> 5;
  wait_for_previous_kernel();
  WindowPlan plan = plan_window<false>(a, n, flush);
  let_next_kernel_start();
  if (plan.row < 0 || (plan.tokens == 0 && !flush)) return;
  if (plan.fold || flush) plan.pending = plan.head = 0;
  const int skip = plan.tokens > R ? plan.tokens - R : 0;  // overwritten within the call
  const int kept = plan.tokens - skip;
  const auto slot_of = [&](int t) { return (plan.head + plan.pending + t) % R; };
  for (int i = threadIdx.x >> 5; i < kept * H; i += warps) {
    const int t = skip + i / H, h = i % H;
    const int64_t from = offset_of(a.k, b, plan.start + t, h);
    const auto key = [&](int c) { return load_as(a.k.ptr, a.k.dtype, from + c * a.k.sd); };
    float squares = 0.f;
    for (int c = lane; c < K; c += 32) squares = __fmaf_rn(key(c), key(c), squares);
    const float factor = unit_factor(a, squares);
    const int64_t to = plan.row * w.sk_p + h * w.sk_h + slot_of(t) * w.sk_r;
    for (int c = lane; c < K; c += 32) store_as(w.k, w.k_dtype, to + c, key(c) * factor);
  }
  for (int i = threadIdx.x; i < kept * HV; i += blockDim.x) {
    const int t = skip + i / HV, hv = i % HV;
    float g, beta;
    compute_gates(a.gates, load_gates(a.gates, b, plan.start + t, hv), &g, &beta);
    if (a.state.ptr && plan.fresh && t == 0) g = -INFINITY;
    w.g[plan.row * w.sg_p + hv * w.sg_h + slot_of(t) * w.sg_r] = g;
  }
  __syncthreads();  // every warp has made its plan from the old counts
  if (threadIdx.x == 0) w.fill[plan.row * w.s_fill] = pack_fill(counts_after(plan, R));
}

}  // namespace cuda
}  // namespace gdn
