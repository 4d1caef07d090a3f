// The recurrence in registers: a warp owns RPW rows of one head for all tokens of the sequence.
#pragma once

#include "tile.cuh"

namespace gdn {
namespace cuda {

// blockIdx.x = head * row_blocks + row block, blockIdx.y = sequence.
// ONE: every sequence has one token, so the state stays in its storage type until it is updated.
template <class ST, class AT, int K, int RPW, int LANES, int WARPS, int MIN_BLOCKS, bool ONE>
__global__ void __launch_bounds__(WARPS * 32, MIN_BLOCKS)
    recurrent_rows(const __grid_constant__ RecurrentArgs a, const __grid_constant__ HeadGrid grid) {
  using RT = RowTile<ST, K, RPW, LANES>;
  constexpr int E = RT::E, LPR = RT::LPR, VPL = RT::VPL, G = RT::G, NL = RT::NL, C = RT::C;
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, group = lane / LPR, l = lane % LPR;
  const unsigned hv = grid.blocks(blockIdx.x);
  const unsigned block = blockIdx.x - hv * grid.blocks.divisor;
  const unsigned h = grid.ratio(hv);
  const int64_t n = grid.first + blockIdx.y;
  const int row0 = (block * WARPS + warp) * RPW;
  const int V = static_cast<int>(a.V);
  const int my_row = row0 + RT::own_row(l, group);
  const bool writer = RT::owner(l) && my_row < V;

  const unsigned number = blockIdx.y * gridDim.x + blockIdx.x;
  const bool ahead = ONE && !grid.early && number < grid.ahead;
  constexpr int LINE = 128 / sizeof(ST), LINES = K / LINE;
  if (ahead) {
    const int64_t row = guess_row(a.seqs, n);
    const ST* const from = static_cast<const ST*>(a.state.ptr) + row * a.state.s_p +
                           hv * a.state.s_h + row0 * a.state.s_v;
    for (int i = lane; row >= 0 && i < RPW * LINES; i += 32) {
      if (row0 + i / LINES < V) prefetch_line(from + i / LINES * a.state.s_v + i % LINES * LINE);
    }
  }
  if (!grid.early) wait_for_previous_kernel();
  const Sequence s = block_sequence<ONE>(a.seqs, n);
  AT* const out = static_cast<AT*>(a.out.ptr) + s.b * a.out.sb + hv * a.out.sh + my_row * a.out.sd;
  if (s.row < 0) {
    if (grid.early) wait_for_previous_kernel();
    let_next_kernel_start();
    for (int64_t t = s.start; writer && t < s.end; t++) out[t * a.out.st] = from_float<AT>(0.f);
    return;
  }
  const AT* const pk = static_cast<const AT*>(a.k.ptr) + s.b * a.k.sb + h * a.k.sh;
  const AT* const pq = static_cast<const AT*>(a.q.ptr) + s.b * a.q.sb + h * a.q.sh;
  const AT* const pv =
      static_cast<const AT*>(a.v.ptr) + s.b * a.v.sb + hv * a.v.sh + my_row * a.v.sd;
  RawRow<RT, AT> raw_k, raw_q;
  AT raw_v = from_float<AT>(0.f);
  RawGates raw_gates;
  const auto load_token = [&](int64_t t) {
    raw_k = load_row<RT, AT>(pk + t * a.k.st, l);
    raw_q = load_row<RT, AT>(pq + t * a.q.st, l);
    raw_gates = load_gates(a.gates, s.b, t, hv);
    if (my_row < V) raw_v = pv[t * a.v.st];
  };

  const bool spec = !ONE && a.seqs.S > 0;
  ST* const pool = static_cast<ST*>(a.state.ptr) + hv * a.state.s_h + l * E;
  ST* const home = pool + s.row * a.state.s_p;
  const int64_t s_v = a.state.s_v;
  uint4 raw[NL][VPL];
#pragma unroll
  for (int r = 0; r < NL; r++) {
    const int row = row0 + r * G + group;
    const bool live = !s.fresh && row < V;
#pragma unroll
    for (int j = 0; j < VPL; j++) {
      raw[r][j] = make_uint4(0, 0, 0, 0);
      if (live) raw[r][j] = load_state(home + row * s_v + j * LPR * E);
    }
  }
  if (grid.early) wait_for_previous_kernel();
  let_next_kernel_start();
  if (ONE || s.start < s.end) load_token(s.start);
  // Half of the next wave's rows on their way, where memory would wait for this one; not in a tile
  // that has no registers left for it (docs/tried/cuda.md).
  if constexpr (sizeof(ST) * RPW < 64) {
    const unsigned other = number + grid.ahead;
    if (ahead && other < gridDim.x * gridDim.y) {
      const unsigned y = other / gridDim.x, x = other - y * gridDim.x, head = grid.blocks(x);
      const int first = ((x - head * grid.blocks.divisor) * WARPS + warp) * RPW;
      const int64_t row = guess_row(a.seqs, grid.first + y);
      const ST* const from = static_cast<const ST*>(a.state.ptr) + row * a.state.s_p +
                             head * a.state.s_h + first * a.state.s_v;
      for (int i = lane; row >= 0 && i < RPW / 2 * LINES; i += 32) {
        if (first + i / LINES < V) prefetch_line(from + i / LINES * a.state.s_v + i % LINES * LINE);
      }
    }
  }
  float f[ONE ? 1 : NL][ONE ? 1 : C];
  if constexpr (!ONE) {
#pragma unroll
    for (int r = 0; r < NL; r++) {
#pragma unroll
      for (int j = 0; j < VPL; j++) Vec<ST>::unpack(raw[r][j], &f[r][j * E]);
    }
  }

  const int64_t steps = ONE ? 1 : s.end - s.start;
  for (int64_t i = 0; i < steps; i++) {
    const int64_t t = s.start + i;
    TokenStep<RT> x;
    float g;
    compute_gates(a.gates, raw_gates, &g, &x.beta);
    x.decay = expf(g);
    x.template prepare<AT>(raw_k, raw_q, a.l2norm);
    const float v = to_float(raw_v);
    if (!ONE && i + 1 < steps) load_token(t + 1);

    float sums[2 * NL];
#pragma unroll
    for (int r = 0; r < NL; r++) {
      float p = 0.f, o = 0.f;
#pragma unroll
      for (int j = 0; j < VPL; j++) {
        float y[E];
        if constexpr (ONE) Vec<ST>::unpack(raw[r][j], y);
#pragma unroll
        for (int e = 0; e < E; e++) {
          const int c = j * E + e;
          const float old = ONE ? y[e] : f[ONE ? 0 : r][ONE ? 0 : c];
          p = __fmaf_rn(old, x.k[c], p);
          o = __fmaf_rn(old, x.q[c], o);
        }
      }
      sums[r] = p;
      sums[NL + r] = o;
    }
    float urk, o;
    x.finish(transpose_sum<2 * NL, LPR>(sums, lane), l, v, a.scale, &urk, &o);
    if (writer) out[t * a.out.st] = from_float<AT>(o);

    ST* to = home;
    bool store = ONE || i + 1 == steps;
    if (spec) {
      const int64_t row = i < a.seqs.S ? at(a.seqs.state_indices, n, i) : -1;
      store = row >= 0 && row < a.state.P;
      to = pool + row * a.state.s_p;
    }
#pragma unroll
    for (int r = 0; r < NL; r++) {
      const float ur = __shfl_sync(kFullMask, urk, group * LPR + r * RT::LOW);
      const int row = row0 + r * G + group;
#pragma unroll
      for (int j = 0; j < VPL; j++) {
        float y[E];
        if constexpr (ONE) Vec<ST>::unpack(raw[r][j], y);
#pragma unroll
        for (int e = 0; e < E; e++) {
          const int c = j * E + e;
          y[e] = x.update(ONE ? y[e] : f[ONE ? 0 : r][ONE ? 0 : c], ur, c);
          if constexpr (!ONE) f[r][c] = y[e];
        }
        if (store && row < V) store_state(to + row * s_v + j * LPR * E, Vec<ST>::pack(y));
      }
    }
  }
}

}  // namespace cuda
}  // namespace gdn
