#include "host.h"

#include <string>

#include "../kernels/launch.h"

namespace gdn {
namespace xpu {
namespace {

constexpr int64_t kChipCores = kChipClusters * kClusterCores;
constexpr int64_t kMaxK = 256;  // rows and keys of a core's local memory

uint64_t address(const void* p) { return reinterpret_cast<uint64_t>(p); }

Tensor4 tensor4(const View& v, const char* name) {
  if (v.sd != 1)
    throw Unsupported(std::string(name) + ": the XPU needs contiguous channels, got stride " +
                      std::to_string(v.sd));
  return {address(v.ptr), v.sb, v.st, v.sh, static_cast<int32_t>(v.dtype), 0};
}

Gate gate(const View& v) {
  return {address(v.ptr), v.sb, v.st, v.sh, static_cast<int32_t>(v.dtype), 0};
}

GateParam gate_param(const Param& p) {
  return {address(p.ptr), p.s0, static_cast<int32_t>(p.dtype), 0};
}

IndexVector index_vector(const Index& x) { return {address(x.ptr), x.s0, x.s1, x.is64, 0}; }

void refuse_large_k(int64_t K) {
  if (K > kMaxK)
    throw Unsupported("K = " + std::to_string(K) + ": the XPU kernels take K up to " +
                      std::to_string(kMaxK) + " (local memory of a core)");
}

void refuse_transposed(const StatePool& s) {
  if (s.s_k != 1)
    throw Unsupported(
        "state: the XPU kernels take a [P, HV, V, K] pool with K contiguous; this is the "
        "transposed view of a [P, HV, K, V] pool");
}

}  // namespace

Cut cut_rows(int64_t heads, int64_t V) {
  Cut best{1, static_cast<int>(V), heads * V};
  double best_cost = 0;
  bool first = true;
  for (int unit : {64, 32, 16, 8, 4, 2, 1}) {
    int64_t per_head = (V + unit - 1) / unit;
    int64_t units = heads * per_head;
    int64_t busiest = (units + kChipCores - 1) / kChipCores;
    // Rows of the busiest core, plus the keys it prepares for each unit begun: about a row's work.
    double cost = static_cast<double>(busiest) * unit + 1.2;
    if (first || cost < best_cost * 0.98) {
      best = {unit, static_cast<int>(per_head), units};
      best_cost = cost;
      first = false;
    }
  }
  return best;
}

void recurrent(const RecurrentArgs& a, void* stream) {
  if (a.seqs.N == 0 || a.seqs.T == 0) return;
  refuse_large_k(a.K);
  refuse_transposed(a.state);
  RecurrentParams p{};
  p.q = tensor4(a.q, "q");
  p.k = tensor4(a.k, "k");
  p.v = tensor4(a.v, "v");
  p.out = tensor4(a.out, "out");
  p.g = gate(a.gates.g);
  p.beta = gate(a.gates.beta);
  p.raw_gates = a.gates.raw;
  if (a.gates.raw) {
    p.a_log = gate_param(a.gates.A_log);
    p.dt_bias = gate_param(a.gates.dt_bias);
  }
  p.state = address(a.state.ptr);
  p.s_p = a.state.s_p;
  p.s_h = a.state.s_h;
  p.s_v = a.state.s_v;
  p.rows = index_vector(a.seqs.state_indices);
  p.cu = index_vector(a.seqs.cu_seqlens);
  p.accepted = index_vector(a.seqs.num_accepted);
  p.has_init = address(a.seqs.has_initial_state);
  p.s_has = a.seqs.s_has;
  Cut cut = cut_rows(a.seqs.N * a.HV, a.V);
  p.units = cut.units;
  p.unit = cut.unit;
  p.units_per_head = cut.units_per_head;
  p.N = static_cast<int32_t>(a.seqs.N);
  p.T = static_cast<int32_t>(a.seqs.T);
  p.S = static_cast<int32_t>(a.seqs.S);
  p.P = static_cast<int32_t>(a.state.P);
  p.H = static_cast<int32_t>(a.H);
  p.HV = static_cast<int32_t>(a.HV);
  p.K = static_cast<int32_t>(a.K);
  p.V = static_cast<int32_t>(a.V);
  p.l2norm = a.l2norm;
  p.scale = a.scale;
  bool one_token = a.seqs.T == 1 && !a.seqs.cu_seqlens.ptr && a.seqs.S == 0;
  if (one_token)
    launch_recurrent(p, static_cast<int>(a.state.dtype), stream);
  else
    launch_recurrent_seq(p, static_cast<int>(a.state.dtype), stream);
}

}  // namespace xpu
}  // namespace gdn
