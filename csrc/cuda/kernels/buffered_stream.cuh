// buffered_rows for one token and many sequences: a persistent block streams tiles of the base, and
// everything else a step reads, through shared memory with bulk copies. What is in flight no longer
// depends on how many warps fit, which is what holds the register kernel back on a step that only
// reads. Sums and roundings are those of buffered_rows, in the same order.
#pragma once

#include "buffered.cuh"
#include "bulk.cuh"

namespace gdn {
namespace cuda {

// Byte offsets inside a stage.
struct StreamLayout {
  int q, k, v, u, key, record, g, gates;
  int bytes;
};
inline StreamLayout stream_layout(int rows, int K, int state_size, int size, int u_size,
                                  int k_size, int R, int record) {
  const auto up = [](int x) { return (x + 15) / 16 * 16; };
  StreamLayout s;
  s.q = rows * K * state_size;
  s.k = s.q + up(K * size);
  s.v = s.k + up(K * size);
  s.u = s.v + up(rows * size);
  s.key = s.u + R * rows * u_size;
  s.record = s.key + R * K * k_size;
  s.g = s.record + up(record * 4);
  s.gates = s.g + up(R * 4);
  s.bytes = (s.gates + 16 + 127) / 128 * 128;
  return s;
}

struct StreamGrid {
  int64_t tiles = 0;
  uint32_t parts = 1;  // tiles a head
  FastDiv ratio;
  int stages = 2;
  StreamLayout at;
};

constexpr int kMaxStages = 8;

// GROUPS teams of WARPS warps take the tiles in turn; one more warp fetches.
template <class ST, class AT, int K, int ROWS, int LANES, int WARPS, int GROUPS>
__global__ void __launch_bounds__((WARPS * GROUPS + 1) * 32, 1)
    buffered_stream(const __grid_constant__ RecurrentArgs a, const __grid_constant__ StreamGrid grid,
                    const __grid_constant__ WindowWorkspace ws) {
#if defined(GDN_BULK_COPY)
  constexpr int RPW = ROWS / WARPS;
  using RT = RowTile<ST, K, RPW, LANES>;
  constexpr int E = RT::E, LPR = RT::LPR, VPL = RT::VPL, G = RT::G, NL = RT::NL, C = RT::C,
                LOW = RT::LOW, REP = 2 * LOW;
  extern __shared__ __align__(128) unsigned char shared[];
  __shared__ __align__(8) uint64_t full[kMaxStages], empty[kMaxStages];
  __shared__ WindowPlan plans[kMaxStages];
  __shared__ float2 shared_weights[WARPS * GROUPS][32];
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  const uint32_t HV = static_cast<uint32_t>(a.HV);
  const Window& w = a.window;
  const int u_size = w.u_dtype == DType::f32 ? 4 : 2, k_size = w.k_dtype == DType::f32 ? 4 : 2;
  if (threadIdx.x == 0) {
    for (int i = 0; i < grid.stages; i++) {
      barrier_init(&full[i], 1);
      barrier_init(&empty[i], WARPS);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();
  wait_for_previous_kernel();
  let_next_kernel_start();
  const auto place = [&](int64_t tile, uint32_t* n, uint32_t* hv, uint32_t* part) {
    const uint32_t head = static_cast<uint32_t>(tile / grid.parts);
    *part = static_cast<uint32_t>(tile - static_cast<int64_t>(head) * grid.parts);
    *n = head / HV;
    *hv = head - *n * HV;
  };

  if (warp == WARPS * GROUPS) {
    // Two tiles ahead: the plan; one tile ahead: the small values that come through registers.
    WindowPlan plan = {}, next = {};
    float g = 0.f, gate = 0.f, beta = 0.f;
    uint32_t n, hv, part;
    const auto fetch_small = [&](int64_t tile, const WindowPlan& p) {
      place(tile, &n, &hv, &part);
      g = 0.f;
      if (p.row >= 0) {
        if (lane < p.pending) {
          g = w.g[p.row * w.sg_p + hv * w.sg_h + lane * w.sg_r];
        }
        compute_gates(a.gates, load_gates(a.gates, n, 0, hv), &gate, &beta);
      }
    };
    int64_t tile = blockIdx.x;
    if (tile < grid.tiles) {
      place(tile, &n, &hv, &part);
      plan = ws.plans[n];
      fetch_small(tile, plan);
    }
    if (tile + gridDim.x < grid.tiles) {
      place(tile + gridDim.x, &n, &hv, &part);
      next = ws.plans[n];
    }
    int stage = 0;
    uint32_t parity = 1;
    for (; tile < grid.tiles; tile += gridDim.x) {
      const float my_g = g, my_gate = gate, my_beta = beta;
      const WindowPlan p = plan;
      plan = next;
      if (tile + gridDim.x < grid.tiles) fetch_small(tile + gridDim.x, plan);
      if (tile + 2 * static_cast<int64_t>(gridDim.x) < grid.tiles) {
        place(tile + 2 * static_cast<int64_t>(gridDim.x), &n, &hv, &part);
        next = ws.plans[n];
      }
      place(tile, &n, &hv, &part);
      barrier_wait(&empty[stage], parity);
      unsigned char* const s = shared + stage * grid.at.bytes;
      if (p.row >= 0 && p.tokens > 0) {
        if (lane < p.pending) reinterpret_cast<float*>(s + grid.at.g)[lane] = my_g;
        if (lane == 0) {
          *reinterpret_cast<float2*>(s + grid.at.gates) = make_float2(my_gate, my_beta);
          plans[stage] = p;
        }
        const uint32_t h = grid.ratio(hv);
        const uint32_t u_bytes = ROWS * u_size, key_bytes = K * k_size;
        const uint32_t record_bytes = ws.record() * 4;
        __syncwarp();
        if (lane == 0) {
          barrier_expect(&full[stage],
                         (p.fresh ? 0u : uint32_t(ROWS * K * sizeof(ST))) +
                             (2 * K + ROWS) * uint32_t(sizeof(AT)) + record_bytes +
                             p.pending * (u_bytes + (p.fold ? key_bytes : 0u)));
          if (!p.fresh) {
            bulk_load(s,
                      static_cast<const ST*>(a.state.ptr) + p.row * a.state.s_p + hv * a.state.s_h +
                          static_cast<int64_t>(part) * ROWS * K,
                      ROWS * K * sizeof(ST), &full[stage]);
          }
          bulk_load(s + grid.at.q, static_cast<const AT*>(a.q.ptr) + n * a.q.sb + h * a.q.sh,
                    K * sizeof(AT), &full[stage]);
          bulk_load(s + grid.at.k, static_cast<const AT*>(a.k.ptr) + n * a.k.sb + h * a.k.sh,
                    K * sizeof(AT), &full[stage]);
          bulk_load(s + grid.at.v,
                    static_cast<const AT*>(a.v.ptr) + n * a.v.sb + hv * a.v.sh + part * ROWS,
                    ROWS * sizeof(AT), &full[stage]);
          bulk_load(s + grid.at.record, ws.at(n, static_cast<int>(a.H), h, 0), record_bytes,
                    &full[stage]);
        }
        __syncwarp();
        if (lane < p.pending) {
          bulk_load(s + grid.at.u + lane * u_bytes,
                    static_cast<const char*>(w.u) +
                        (p.row * w.su_p + hv * w.su_h + lane * w.su_r + part * ROWS) * u_size,
                    u_bytes, &full[stage]);
          if (p.fold) {
            bulk_load(s + grid.at.key + lane * key_bytes,
                      static_cast<const char*>(w.k) +
                          (p.row * w.sk_p + h * w.sk_h + lane * w.sk_r) * k_size,
                      key_bytes, &full[stage]);
          }
        }
      } else if (lane == 0) {
        plans[stage] = p;
        barrier_arrive(&full[stage]);
      }
      if (++stage == grid.stages) {
        stage = 0;
        parity ^= 1;
      }
    }
    return;
  }

  const int team = warp / WARPS, member = warp % WARPS;
  const int group = lane / LPR, l = lane % LPR;
  const int local = member * RPW + RT::own_row(l, group);
  const bool writer = RT::owner(l);
  const int rep = l % LOW + (l >= LPR / 2 ? LOW : 0);
  float2* const weights = shared_weights[warp];
  int stage = 0;
  uint32_t parity = 0;
  int turn = 0;
  for (int64_t tile = blockIdx.x; tile < grid.tiles; tile += gridDim.x) {
    const bool mine = turn == team;
    if (++turn == GROUPS) turn = 0;
    if (mine) {
      uint32_t n, hv, part;
      place(tile, &n, &hv, &part);
      const int my_row = part * ROWS + local;
      const int64_t out =
          offset_of(a.out, n, 0, hv) + static_cast<int64_t>(my_row) * a.out.sd;
      barrier_wait(&full[stage], parity);
      unsigned char* const s = shared + stage * grid.at.bytes;
      const WindowPlan plan = plans[stage];
      if (plan.row < 0 || plan.tokens == 0) {
        if (writer && plan.row < 0) store_as(a.out.ptr, a.out.dtype, out, 0.f);
      } else {
        ST* const base = reinterpret_cast<ST*>(s) + (member * RPW + group) * K + l * E;
        WarpWindow window;
        window.start(lane < plan.pending ? reinterpret_cast<const float*>(s + grid.at.g)[lane] : 0.f,
                     0.f, plan.pending, lane, false);
        const unsigned char* const us = s + grid.at.u;
        if (plan.fold) {
          window.fold_weights(weights, lane, false);
          const float whole = expf(window.base);
#pragma unroll
          for (int j = 0; j < VPL; j++) {
            float f[NL][E];
#pragma unroll
            for (int r = 0; r < NL; r++) {
              Vec<ST>::unpack(*reinterpret_cast<const uint4*>(base + r * G * K + j * LPR * E), f[r]);
#pragma unroll
              for (int e = 0; e < E; e++) f[r][e] = whole == 0.f ? 0.f : whole * f[r][e];
            }
            for (int i = 0; i < plan.pending; i++) {
              const float scaled = weights[i].x * load_as(us, w.u_dtype, i * ROWS + local);
              float k[E];
              if (w.k_dtype == DType::f32) {
                raw_to_float<float, E>(
                    load_raw<float, E>(reinterpret_cast<const float*>(s + grid.at.key) + i * K +
                                       RT::column(j, l)),
                    k);
              } else if (w.k_dtype == DType::bf16) {
                raw_to_float<bf16, E>(
                    load_raw<bf16, E>(reinterpret_cast<const bf16*>(s + grid.at.key) + i * K +
                                      RT::column(j, l)),
                    k);
              } else {
                raw_to_float<f16, E>(
                    load_raw<f16, E>(reinterpret_cast<const f16*>(s + grid.at.key) + i * K +
                                     RT::column(j, l)),
                    k);
              }
#pragma unroll
              for (int r = 0; r < NL; r++) {
                const float u = __shfl_sync(kFullMask, scaled, group * LPR + r * LOW);
#pragma unroll
                for (int e = 0; e < E; e++) f[r][e] = __fmaf_rn(u, k[e], f[r][e]);
              }
            }
#pragma unroll
            for (int r = 0; r < NL; r++) {
              *reinterpret_cast<uint4*>(base + r * G * K + j * LPR * E) = Vec<ST>::pack(f[r]);
            }
          }
          fence_for_bulk_copy();
          __syncwarp();
          if (lane == 0) {
            bulk_store(static_cast<ST*>(a.state.ptr) + plan.row * a.state.s_p + hv * a.state.s_h +
                           (static_cast<int64_t>(part) * ROWS + member * RPW) * K,
                       reinterpret_cast<const ST*>(s) + member * RPW * K, RPW * K * sizeof(ST));
          }
          window.clear();
          __syncwarp();
        }
        if (plan.fresh) window.base = -INFINITY;
        const float* const record = reinterpret_cast<const float*>(s + grid.at.record);
        const float4 norm = *reinterpret_cast<const float4*>(record);
        const float2 gates = *reinterpret_cast<const float2*>(s + grid.at.gates);
        float2 d = make_float2(0.f, 0.f);
        if (lane < window.count) d = *reinterpret_cast<const float2*>(record + 4 + 2 * lane);
        const float decay = window.advance(gates.x, d, d, weights, lane, false);
        float k[C], q[C];
#pragma unroll
        for (int j = 0; j < VPL; j++) {
          const int c = RT::column(j, l);
          raw_to_float<AT, E>(load_raw<AT, E>(reinterpret_cast<const AT*>(s + grid.at.k) + c),
                              k + j * E);
          raw_to_float<AT, E>(load_raw<AT, E>(reinterpret_cast<const AT*>(s + grid.at.q) + c),
                              q + j * E);
        }
        float sums[2 * NL];
#pragma unroll
        for (int r = 0; r < NL; r++) {
          float x = 0.f, y = 0.f;
#pragma unroll
          for (int j = 0; j < VPL; j++) {
            float f[E];
            Vec<ST>::unpack(*reinterpret_cast<const uint4*>(base + r * G * K + j * LPR * E), f);
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
        for (int i = rep; i < window.count; i += REP) {
          const float u = load_as(us, w.u_dtype, i * ROWS + local);
          const float2 c = weights[i];
          p = __fmaf_rn(c.x, u, p);
          o = __fmaf_rn(c.y, u, o);
        }
#pragma unroll
        for (int m = 1; m < LOW; m <<= 1) {
          p += __shfl_xor_sync(kFullMask, p, m);
          o += __shfl_xor_sync(kFullMask, o, m);
        }
        p += __shfl_xor_sync(kFullMask, p, LPR / 2);
        o += __shfl_xor_sync(kFullMask, o, LPR / 2);
        if (decay != 0.f) {
          p = __fmaf_rn(decay * norm.x, upper ? other : total, p);
          o = __fmaf_rn(decay * norm.y, upper ? total : other, o);
        }
        const float v = to_float(reinterpret_cast<const AT*>(s + grid.at.v)[local]);
        const float u = gates.y * (v - p);
        o = a.scale * __fmaf_rn(norm.z, u, o);
        if (writer) {
          store_as(w.u, w.u_dtype,
                   plan.row * w.su_p + hv * w.su_h + window.count * w.su_r + my_row, u);
          store_as(a.out.ptr, a.out.dtype, out, o);
        }
        if (plan.fold && lane == 0) bulk_commit_and_wait_read();
      }
      __syncwarp();
      if (lane == 0) barrier_arrive(&empty[stage]);
    }
    if (++stage == grid.stages) {
      stage = 0;
      parity ^= 1;
    }
  }
  if (lane == 0) bulk_wait_all();
#endif
}

}  // namespace cuda
}  // namespace gdn
