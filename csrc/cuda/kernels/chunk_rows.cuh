// Chunked prefill by tokens, for every shape, stride and dtype that the tensor-core kernels do not
// take: the recurrence in float32, a few rows of V in the registers of a warp, nothing shared
// between warps. Lane l holds columns l, l + 32, ... of K.
#pragma once

#include "chunk_plan.cuh"

namespace gdn {
namespace cuda {

constexpr int kRowsWarps = 4;

// COLUMNS a lane, ROWS a warp.
template <int COLUMNS, int ROWS, bool LOWRANK>
__global__ void __launch_bounds__(kRowsWarps * 32)
    chunk_rows(const __grid_constant__ ChunkArgs a, const __grid_constant__ ChunkLayout layout) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const int K = static_cast<int>(a.K), V = static_cast<int>(a.V);
  constexpr int kBlockRows = ROWS * kRowsWarps;
  const int blocks = (V + kBlockRows - 1) / kBlockRows;
  const int hv = blockIdx.x / blocks;
  const int v0 = (blockIdx.x - hv * blocks) * kBlockRows + warp * ROWS;
  const int hk = layout.ratio(hv);
  const int64_t n = layout.first + blockIdx.y;
  wait_for_previous_kernel();
  let_next_kernel_start();
  if (v0 >= V) return;
  const int rows = V - v0 < ROWS ? V - v0 : ROWS;
  const Sequence seq = device_sequence(a.seqs, n);
  const auto out_at = [&](int64_t t, int r) {
    return offset_of(a.out, seq.b, t, hv) + (v0 + r) * a.out.sd;
  };
  if (seq.row < 0) {
    for (int64_t t = seq.start; t < seq.end; t++) {
      if (lane < rows) store_as(a.out.ptr, a.out.dtype, out_at(t, lane), 0.f);
    }
    return;
  }

  float S[ROWS][COLUMNS];
  const auto clear = [&] {
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
#pragma unroll
      for (int c = 0; c < COLUMNS; c++) S[r][c] = 0.f;
    }
  };
  const auto keep = [&](int64_t row) {
    const int64_t home = row * a.write.s_p + hv * a.write.s_h + v0 * a.write.s_v;
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
#pragma unroll
      for (int c = 0; c < COLUMNS; c++) {
        const int column = lane + 32 * c;
        if (r < rows && column < K) {
          store_as(a.write.ptr, a.write.dtype, home + r * a.write.s_v + column * a.write.s_k,
                   S[r][c]);
        }
      }
    }
  };
  // S = decay S + u k^T; a decay of zero drops what S holds, whatever it is.
  const auto step = [&](float decay, const float (&u)[ROWS], const float (&k)[COLUMNS]) {
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
#pragma unroll
      for (int c = 0; c < COLUMNS; c++) {
        S[r][c] = __fmaf_rn(u[r], k[c], decay == 0.f ? 0.f : __fmul_rn(decay, S[r][c]));
      }
    }
  };
  struct Token {  // as stored: a conversion would wait for its load
    uint32_t k[COLUMNS], q[COLUMNS], v;
    RawGates gates;
  };
  const auto load_token = [&](Token& x, int64_t t) {
    const int64_t k0 = offset_of(a.k, seq.b, t, hk), q0 = offset_of(a.q, seq.b, t, hk);
#pragma unroll
    for (int c = 0; c < COLUMNS; c++) {
      const int column = lane + 32 * c;
      x.k[c] = column < K ? load_bits(a.k.ptr, a.k.dtype, k0 + column * a.k.sd) : 0;
      x.q[c] = column < K ? load_bits(a.q.ptr, a.q.dtype, q0 + column * a.q.sd) : 0;
    }
    x.v = lane < rows
              ? load_bits(a.v.ptr, a.v.dtype, offset_of(a.v, seq.b, t, hv) + (v0 + lane) * a.v.sd)
              : 0;
    x.gates = load_gates(a.gates, seq.b, t, hv);
  };
  const auto inverse_norm = [&](const float (&x)[COLUMNS]) {
    float sum = 0.f;
#pragma unroll
    for (int c = 0; c < COLUMNS; c++) sum = __fmaf_rn(x[c], x[c], sum);
    return rsqrtf(lane_sum(sum) + kL2Eps);
  };

  clear();
  const int R = LOWRANK ? static_cast<int>(a.window.R) : 1;
  float* const updates =
      LOWRANK ? layout.updates + (n * a.HV + hv) * R * a.V + v0 : nullptr;  // [R][V]
  int oldest = 0, fill = 0;
  if (!LOWRANK && a.read.ptr && !seq.fresh) {
    const int64_t home = seq.row * a.read.s_p + hv * a.read.s_h + v0 * a.read.s_v;
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
#pragma unroll
      for (int c = 0; c < COLUMNS; c++) {
        const int column = lane + 32 * c;
        if (r < rows && column < K) {
          S[r][c] = load_as(a.read.ptr, a.read.dtype, home + r * a.read.s_v + column * a.read.s_k);
        }
      }
    }
  }
  if (LOWRANK && !seq.fresh) {
    const WindowCounts counts = unpack_fill(a.window.fill[seq.row * a.window.s_fill]);
    oldest = counts.head;
    fill = counts.fill < R ? counts.fill : R;
  }

  Token now, next;
  if (seq.start < seq.end) load_token(now, seq.start);
  const int edges_every = static_cast<int>(a.C);
  for (int64_t t = seq.start; t < seq.end; t++) {
    const int64_t done = t - seq.start;
    if (LOWRANK && done % a.C == 0) {
      // The chunk starts from the newest R entries: what the window held, then tokens, as stored.
      clear();
      const int64_t first = fill + done > R ? fill + done - R : 0;
      for (int64_t e = first; e < fill + done; e++) {
        float k[COLUMNS], u[ROWS], g;
        if (e < fill) {
          const Window& w = a.window;
          const int slot = static_cast<int>((oldest + e) % R);
#pragma unroll
          for (int c = 0; c < COLUMNS; c++) {
            const int column = lane + 32 * c;
            k[c] = column < K ? load_as(w.k, w.k_dtype,
                                        seq.row * w.sk_p + hk * w.sk_h + slot * w.sk_r + column)
                              : 0.f;
          }
#pragma unroll
          for (int r = 0; r < ROWS; r++) {
            u[r] = r < rows ? load_as(w.u, w.u_dtype,
                                      seq.row * w.su_p + hv * w.su_h + slot * w.su_r + v0 + r)
                            : 0.f;
          }
          g = w.g[seq.row * w.sg_p + hv * w.sg_h + slot * w.sg_r];
        } else {
          const int64_t token = e - fill;
          const int64_t k0 = offset_of(a.k, seq.b, seq.start + token, hk);
#pragma unroll
          for (int c = 0; c < COLUMNS; c++) {
            const int column = lane + 32 * c;
            k[c] = column < K ? load_as(a.k.ptr, a.k.dtype, k0 + column * a.k.sd) : 0.f;
          }
          const float rk = a.l2norm ? inverse_norm(k) : 1.f;
#pragma unroll
          for (int c = 0; c < COLUMNS; c++) k[c] = round_as(a.window.k_dtype, rk * k[c]);
#pragma unroll
          for (int r = 0; r < ROWS; r++) {
            u[r] = r < rows ? round_as(a.window.u_dtype, updates[token % R * a.V + r]) : 0.f;
          }
          float beta;
          compute_gates(a.gates, load_gates(a.gates, seq.b, seq.start + token, hv), &g, &beta);
        }
        step(expf(g), u, k);
      }
      __syncwarp();
    }
    if (t + 1 < seq.end) load_token(next, t + 1);
    float g, beta;
    compute_gates(a.gates, now.gates, &g, &beta);
    const float decay = expf(g);
    float k[COLUMNS], q[COLUMNS];
#pragma unroll
    for (int c = 0; c < COLUMNS; c++) {
      k[c] = bits_to_float(now.k[c], a.k.dtype);
      q[c] = bits_to_float(now.q[c], a.q.dtype);
    }
    const float value = bits_to_float(now.v, a.v.dtype);
    if (a.l2norm) {
      const float rk = inverse_norm(k), rq = inverse_norm(q);
#pragma unroll
      for (int c = 0; c < COLUMNS; c++) {
        k[c] *= rk;
        q[c] *= rq;
      }
    }
    float kq = 0.f, sums[2 * ROWS];
#pragma unroll
    for (int c = 0; c < COLUMNS; c++) kq = __fmaf_rn(k[c], q[c], kq);
    kq = lane_sum(kq);
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
      sums[r] = sums[ROWS + r] = 0.f;
#pragma unroll
      for (int c = 0; c < COLUMNS; c++) {
        sums[r] = __fmaf_rn(S[r][c], k[c], sums[r]);
        sums[ROWS + r] = __fmaf_rn(S[r][c], q[c], sums[ROWS + r]);
      }
    }
    // Sum i ends in the lanes of group i.
    constexpr int kGroup = 32 / (2 * ROWS);
    const float sum = transpose_sum<2 * ROWS, 32>(sums, lane);
    float u[ROWS];
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
      const float p = __shfl_sync(kFullMask, sum, r * kGroup);
      const float v = __shfl_sync(kFullMask, value, r);
      u[r] = beta * (decay == 0.f ? v : v - decay * p);
      const float o = __shfl_sync(kFullMask, sum, (ROWS + r) * kGroup);
      if (lane == r && r < rows) {
        store_as(a.out.ptr, a.out.dtype, out_at(t, r),
                 a.scale * ((decay == 0.f ? 0.f : decay * o) + kq * u[r]));
        if (LOWRANK) updates[done % R * a.V + r] = u[r];
      }
    }
    if (LOWRANK) __syncwarp();
    step(decay, u, k);
    if (!LOWRANK && a.edges > 0 && (done + 1) % edges_every == 0) {
      const int64_t edge = (done + 1) / edges_every - 1;
      if (edge < a.edges) {
        const int64_t row = at(a.edge_rows, n, edge);
        if (row >= 0 && row < a.write.P) keep(row);
      }
    }
    now = next;
  }
  if (!LOWRANK) {
    const int64_t row = a.write_indices.ptr ? at(a.write_indices, n) : seq.row;
    if (row >= 0 && row < a.write.P) keep(row);
  } else if (lane < rows) {
    // The updates of the window as the sequence leaves it.
    const Window& w = a.window;
    const int64_t length = seq.end > seq.start ? seq.end - seq.start : 0;
    const int fresh = length < R ? static_cast<int>(length) : R;
    const int kept = fill < R - fresh ? fill : R - fresh;
    const int64_t home = seq.row * w.su_p + hv * w.su_h + v0 + lane;
    if (fresh > 0 && kept > 0) {
      move_entries(w.u, w.u_dtype, home, w.su_r, oldest + fill - kept, R, kept);
    }
    for (int e = 0; e < fresh; e++) {
      store_as(w.u, w.u_dtype, home + (kept + e) * w.su_r,
               updates[(length - fresh + e) % R * a.V + lane]);
    }
  }
}

// Low rank: keys and decays of the window as the sequence leaves it, oldest entry first. The
// updates are written by the blocks that own their rows. A block for each sequence and key head;
// the fill counts follow in a launch of their own, when everyone has read them.
constexpr int kWindowWarps = 8;
__global__ void __launch_bounds__(kWindowWarps * 32)
    chunk_window(const __grid_constant__ ChunkArgs a, const __grid_constant__ ChunkLayout layout) {
  const Window& w = a.window;
  const int64_t hk = blockIdx.x, n = layout.first + blockIdx.y;
  // Beside the scan, which lets it in when the first kernel has ended, and reads no key or decay of
  // the window: then it waits at its end only, for the kernel after it.
  if (!layout.window_beside) wait_for_previous_kernel();
  let_next_kernel_start();
  const Sequence seq = device_sequence(a.seqs, n);
  const int64_t length = seq.end - seq.start;
  if (seq.row >= 0 && length > 0) {
    const int R = static_cast<int>(w.R), K = static_cast<int>(a.K);
    const int ratio = layout.ratio.divisor, lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    const int fresh = length < R ? static_cast<int>(length) : R;
    const int64_t keys = seq.row * w.sk_p + hk * w.sk_h;
    int kept = 0;  // of the entries before
    if (fresh < R && !seq.fresh) {
      const WindowCounts counts = unpack_fill(w.fill[seq.row * w.s_fill]);
      const int fill = counts.fill < R ? counts.fill : R;
      kept = fill < R - fresh ? fill : R - fresh;
      for (int i = threadIdx.x; kept > 0 && i < K + ratio; i += kWindowWarps * 32) {
        const int oldest = counts.head + fill - kept;
        if (i < K) {
          move_entries(w.k, w.k_dtype, keys + i, w.sk_r, oldest, R, kept);
        } else {
          const int64_t home = seq.row * w.sg_p + (hk * ratio + i - K) * w.sg_h;
          move_entries(w.g, DType::f32, home, w.sg_r, oldest, R, kept);
        }
      }
      __syncthreads();
    }
    const int64_t first = seq.start + length - fresh;
    constexpr int ROWS = 2, COLUMNS = 4;  // of a warp and of a lane at once
    for (int e0 = warp; e0 < fresh; e0 += ROWS * kWindowWarps) {
      float x[ROWS][COLUMNS], norm[ROWS];
      const auto load = [&](int c0) {
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
          const int e = e0 + r * kWindowWarps;
          const int64_t from = offset_of(a.k, seq.b, first + (e < fresh ? e : e0), hk);
#pragma unroll
          for (int i = 0; i < COLUMNS; i++) {
            const int c = c0 + 32 * i + lane;
            x[r][i] = c < K ? load_as(a.k.ptr, a.k.dtype, from + c * a.k.sd) : 0.f;
          }
        }
      };
#pragma unroll
      for (int r = 0; r < ROWS; r++) norm[r] = 0.f;
      load(0);
      for (int c0 = 0; a.l2norm && c0 < K; c0 += 32 * COLUMNS) {
        if (c0 > 0) load(c0);
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
#pragma unroll
          for (int i = 0; i < COLUMNS; i++) norm[r] = __fmaf_rn(x[r][i], x[r][i], norm[r]);
        }
      }
#pragma unroll
      for (int r = 0; r < ROWS; r++) {
        norm[r] = a.l2norm ? rsqrtf(lane_sum(norm[r]) + kL2Eps) : 1.f;
      }
      for (int c0 = 0; c0 < K; c0 += 32 * COLUMNS) {
        if (K > 32 * COLUMNS) load(c0);
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
          const int e = e0 + r * kWindowWarps;
#pragma unroll
          for (int i = 0; i < COLUMNS; i++) {
            const int c = c0 + 32 * i + lane;
            if (e < fresh && c < K) {
              store_as(w.k, w.k_dtype, keys + (kept + e) * w.sk_r + c, norm[r] * x[r][i]);
            }
          }
        }
      }
    }
    for (int i = threadIdx.x; i < ratio * fresh; i += kWindowWarps * 32) {
      const int h = i / fresh, e = i % fresh;
      float g, beta;
      compute_gates(a.gates, load_gates(a.gates, seq.b, first + e, hk * ratio + h), &g, &beta);
      w.g[seq.row * w.sg_p + (hk * ratio + h) * w.sg_h + (kept + e) * w.sg_r] = g;
    }
  }
  if (layout.window_beside) wait_for_previous_kernel();
}

__global__ void __launch_bounds__(128) chunk_fill(const __grid_constant__ ChunkArgs a) {
  wait_for_previous_kernel();
  let_next_kernel_start();
  const int64_t n = static_cast<int64_t>(blockIdx.x) * 128 + threadIdx.x;
  if (n >= a.seqs.N) return;
  const Sequence seq = device_sequence(a.seqs, n);
  const int64_t length = seq.end - seq.start, R = a.window.R;
  if (seq.row < 0 || length <= 0) return;
  int32_t* const fill = a.window.fill + seq.row * a.window.s_fill;
  const int64_t total = (seq.fresh ? 0 : unpack_fill(*fill).fill) + length;
  *fill = static_cast<int32_t>(total < R ? total : R);
}

}  // namespace cuda
}  // namespace gdn
