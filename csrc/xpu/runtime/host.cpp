#include "host.h"

#include <cstdint>
#include <initializer_list>
#include <limits>
#include <string>

#include "../kernels/launch.h"

namespace gdn {
namespace xpu {
namespace {

constexpr int64_t kChipCores = kChipClusters * kClusterCores;
constexpr int64_t kMaxNorm = 256;
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

constexpr int64_t kMaxConvTaps = 4;       // W
constexpr int64_t kMaxHistoryBytes = 16;  // of one channel whose columns are contiguous
constexpr int64_t kConvBlockWidth = 128;
constexpr int64_t kConvTile = 64;  // tokens a core convolves of a long prompt

void set_sequences(const Sequences& s, IndexVector* rows, IndexVector* cu, IndexVector* accepted,
                   uint64_t* has_init, int64_t* s_has) {
  *rows = index_vector(s.state_indices);
  *cu = index_vector(s.cu_seqlens);
  *accepted = index_vector(s.num_accepted);
  *has_init = address(s.has_initial_state);
  *s_has = s.s_has;
}

// Everything but heads and outputs.
ConvParams conv_params(const ConvArgs& a) {
  if (a.W > kMaxConvTaps)
    throw Unsupported("conv_weight: the XPU convolution takes W up to " +
                      std::to_string(kMaxConvTaps) + ", got " + std::to_string(a.W));
  bool by_channel = (a.weight.s0 == a.W || a.C == 1) && (a.weight.s1 == 1 || a.W == 1);
  if (!by_channel && a.weight.s0 != 1)
    throw Unsupported(
        "conv_weight: the XPU convolution needs [C, W] contiguous or transposed, got "
        "strides (" +
        std::to_string(a.weight.s0) + ", " + std::to_string(a.weight.s1) + ")");
  if (a.bias.ptr && a.bias.s0 != 1 && a.C > 1)
    throw Unsupported("conv_bias: the XPU convolution needs a contiguous bias");
  if (a.state.ptr && a.W > 1) {
    int64_t bytes = a.state.L * size_of(a.state.dtype);
    if (a.state.s_c != 1 && a.state.s_l != 1 && a.state.L > 1)
      throw Unsupported(
          "conv_state: the XPU convolution needs contiguous channels or contiguous "
          "columns");
    if (a.state.s_c != 1 && bytes > kMaxHistoryBytes)
      throw Unsupported("conv_state: the XPU convolution takes at most " +
                        std::to_string(kMaxHistoryBytes) +
                        " bytes a channel where columns are "
                        "contiguous, got L = " +
                        std::to_string(a.state.L) + "; keep the pool channels-last");
  }
  ConvParams p{};
  p.x = tensor4(a.x, "x");
  p.weight = gate_param(a.weight);
  p.weight_s1 = a.weight.s1;
  p.bias = gate_param(a.bias);
  p.pool = address(a.state.ptr);
  p.s_p = a.state.s_p;
  p.s_c = a.state.s_c;
  p.s_l = a.state.s_l;
  p.pool_dtype = static_cast<int32_t>(a.state.dtype);
  p.P = static_cast<int32_t>(a.state.P);
  p.L = static_cast<int32_t>(a.state.L);
  p.leading = a.state.leading;
  p.silu = a.silu;
  set_sequences(a.seqs, &p.rows, &p.cu, &p.accepted, &p.has_init, &p.s_has);
  p.N = static_cast<int32_t>(a.seqs.N);
  p.T = static_cast<int32_t>(a.seqs.T);
  p.C = static_cast<int32_t>(a.C);
  p.W = static_cast<int32_t>(a.W);
  bool cut = !a.seqs.cu_seqlens.ptr && !a.seqs.num_accepted.ptr && a.seqs.T > kConvTile;
  p.tile = static_cast<int32_t>(cut ? kConvTile : a.seqs.T);
  p.tiles = static_cast<int32_t>(cut ? (a.seqs.T + kConvTile - 1) / kConvTile : 1);
  return p;
}

int32_t pieces(int64_t n, int64_t size) { return static_cast<int32_t>((n + size - 1) / size); }

}  // namespace

void check_launch(const char* kernel, int error) {
  if (error)
    throw std::runtime_error(std::string("launch of the XPU kernel ") + kernel +
                             ": the runtime says " + std::to_string(error));
}

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

namespace {

RecurrentParams recurrent_params(const RecurrentArgs& a) {
  refuse_large_k(a.K);
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
  set_sequences(a.seqs, &p.rows, &p.cu, &p.accepted, &p.has_init, &p.s_has);
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
  return p;
}

}  // namespace

void check_recurrent(const RecurrentArgs& a) { recurrent_params(a); }

void recurrent(const RecurrentArgs& a, void* stream, bool guarded) {
  if (a.seqs.N == 0 || a.seqs.T == 0) return;
  RecurrentParams p = recurrent_params(a);
  p.guarded = guarded;
  bool one_token = a.seqs.T == 1 && !a.seqs.cu_seqlens.ptr && a.seqs.S == 0;
  if (one_token)
    launch_recurrent(p, static_cast<int>(a.state.dtype), stream);
  else
    launch_recurrent_seq(p, static_cast<int>(a.state.dtype), stream);
}

namespace {

// The pools, the sequences and the cut; not the tokens.
WindowParams window_params(const RecurrentArgs& a) {
  if (a.K != 64 && a.K != 128 && a.K != 256)
    throw Unsupported("K = " + std::to_string(a.K) + ": the XPU windows take K = 64, 128 or 256");
  if (a.V % 32 != 0 || a.V > INT16_MAX)
    throw Unsupported("V = " + std::to_string(a.V) +
                      ": the XPU windows take multiples of 32 below 2^15");
  WindowParams p{};
  if (a.state.ptr) {
    p.state = address(a.state.ptr);
    p.s_p = a.state.s_p;
    p.s_h = a.state.s_h;
    p.s_v = a.state.s_v;
    p.state_dtype = static_cast<int8_t>(a.state.dtype);
  }
  const Window& w = a.window;
  for (int64_t stride :
       {w.sk_p, w.sk_h, w.sk_r, w.su_p, w.su_h, w.su_r, w.sg_p, w.sg_h, w.sg_r, w.s_fill})
    if (stride > INT32_MAX) throw Unsupported("window: a stride exceeds 2^31 elements");
  p.win_k = address(w.k);
  p.win_u = address(w.u);
  p.win_g = address(w.g);
  p.fill = address(w.fill);
  p.sk_p = static_cast<int32_t>(w.sk_p);
  p.sk_h = static_cast<int32_t>(w.sk_h);
  p.sk_r = static_cast<int32_t>(w.sk_r);
  p.su_p = static_cast<int32_t>(w.su_p);
  p.su_h = static_cast<int32_t>(w.su_h);
  p.su_r = static_cast<int32_t>(w.su_r);
  p.sg_p = static_cast<int32_t>(w.sg_p);
  p.sg_h = static_cast<int32_t>(w.sg_h);
  p.sg_r = static_cast<int32_t>(w.sg_r);
  p.s_fill = static_cast<int32_t>(w.s_fill);
  p.k_dtype = static_cast<int8_t>(w.k_dtype);
  p.u_dtype = static_cast<int8_t>(w.u_dtype);
  p.R = static_cast<int16_t>(w.R);
  p.P = static_cast<int32_t>(a.seqs.P);
  int64_t s_has = 0;
  set_sequences(a.seqs, &p.rows, &p.cu, &p.accepted, &p.has_init, &s_has);
  p.s_has = static_cast<int32_t>(s_has);
  p.N = static_cast<int32_t>(a.seqs.N);
  p.T = static_cast<int32_t>(a.seqs.T);
  p.H = static_cast<int32_t>(a.H);
  p.HV = static_cast<int32_t>(a.HV);
  p.K = static_cast<int16_t>(a.K);
  p.V = static_cast<int16_t>(a.V);
  // Whole heads where they fill the chip, so that a core reads the keys of a window once a key
  // head; pieces where they do not. Its products with the keys cost a core about as much as 16
  // rows.
  p.unit = static_cast<int16_t>(a.V);
  int64_t best = std::numeric_limits<int64_t>::max();
  for (int64_t unit : {a.V, int64_t{128}, int64_t{64}, int64_t{32}, int64_t{16}, int64_t{8}}) {
    if (unit > a.V || a.V % unit != 0) continue;
    const int64_t units = a.seqs.N * a.HV * (a.V / unit);
    const int64_t cost = (units + kChipCores - 1) / kChipCores * (unit + 16);
    if (cost >= best) continue;
    best = cost;
    p.unit = static_cast<int16_t>(unit);
  }
  p.units_per_head = static_cast<int16_t>(pieces(a.V, p.unit));
  return p;
}

// Launches of a call, a token each: lengths are on the device, and a packed sequence with a base
// has at most R tokens.
int64_t window_tokens(const RecurrentArgs& a) {
  const bool fewer = a.seqs.cu_seqlens.ptr && a.state.ptr && a.seqs.T > a.window.R;
  const int64_t tokens = fewer ? a.window.R : a.seqs.T;
  if (tokens > INT16_MAX)
    throw Unsupported("T = " + std::to_string(tokens) +
                      ": the XPU windows take up to 32767 tokens a call");
  return tokens;
}

WindowParams window_step_params(const RecurrentArgs& a) {
  WindowParams p = window_params(a);
  p.q = tensor4(a.q, "q");
  p.k = tensor4(a.k, "k");
  p.v = tensor4(a.v, "v");
  p.out = tensor4(a.out, "out");
  p.g = gate(a.gates.g);
  p.beta = gate(a.gates.beta);
  p.l2norm = a.l2norm;
  p.scale = a.scale;
  return p;
}

}  // namespace

void check_recurrent_window(const RecurrentArgs& a) {
  window_step_params(a);
  window_tokens(a);
}

void recurrent_window(const RecurrentArgs& a, void* stream) {
  if (a.seqs.N == 0 || a.seqs.T == 0) return;
  WindowParams p = window_step_params(a);
  const int64_t tokens = window_tokens(a);
  for (int64_t t = 0; t < tokens; ++t) {
    p.token = static_cast<int16_t>(t);
    launch_window_step(p, stream);
    launch_window_append(p, stream);
  }
}

void window_flush(const RecurrentArgs& a, void* stream) {
  if (a.seqs.N == 0) return;
  WindowParams p = window_params(a);
  p.T = 1;
  p.flush = 1;
  launch_window_step(p, stream);
  launch_window_append(p, stream);
}

void window_reset(const RecurrentArgs& a, void* stream) {
  if (a.seqs.N == 0) return;
  WindowParams p{};
  p.fill = address(a.window.fill);
  p.s_fill = static_cast<int32_t>(a.window.s_fill);
  p.P = static_cast<int32_t>(a.seqs.P);
  p.rows = index_vector(a.seqs.state_indices);
  p.N = static_cast<int32_t>(a.seqs.N);
  p.T = 1;
  p.K = 64;
  p.flush = 2;
  launch_window_append(p, stream);
}

void short_conv(const ConvArgs& a, void* stream) {
  if (a.seqs.N == 0 || a.seqs.T == 0) return;
  ConvParams p = conv_params(a);
  p.y = address(a.y.ptr);
  p.blocks = pieces(a.C, kConvBlockWidth);
  launch_conv(p, stream);
}

void conv_gating(const ConvGatingArgs& a, void* stream) {
  if (a.conv.seqs.N == 0 || a.conv.seqs.T == 0) return;
  ConvParams p = conv_params(a.conv);
  if (a.l2norm && a.K > kConvNormMax)
    throw Unsupported("K = " + std::to_string(a.K) + ": conv_gating with qk_l2norm takes K up to " +
                      std::to_string(kConvNormMax) + " on the XPU");
  p.y = address(a.q.ptr);
  p.k = address(a.k.ptr);
  p.v = address(a.v.ptr);
  p.g = address(a.g);
  p.beta = address(a.beta);
  p.H = static_cast<int32_t>(a.H);
  p.HV = static_cast<int32_t>(a.HV);
  p.K = static_cast<int32_t>(a.K);
  p.V = static_cast<int32_t>(a.V);
  p.l2norm = a.l2norm;
  p.a = gate(a.gates.g);
  p.b = gate(a.gates.beta);
  p.a_log = gate_param(a.gates.A_log);
  p.dt_bias = gate_param(a.gates.dt_bias);
  p.blocks = 2 * (a.l2norm ? static_cast<int32_t>(a.H) : pieces(a.H * a.K, kConvBlockWidth)) +
             pieces(a.HV * a.V, kConvBlockWidth);
  p.gate_units = 1;
  launch_conv(p, stream);
}

void gating(const GatingArgs& a, void* stream) {
  if (a.rows_b == 0 || a.rows_t == 0) return;
  ConvParams p{};
  p.g = address(a.g);
  p.beta = address(a.beta);
  p.a = gate(a.a);
  p.b = gate(a.b);
  p.a_log = gate_param(a.A_log);
  p.dt_bias = gate_param(a.dt_bias);
  p.N = static_cast<int32_t>(a.rows_b);
  p.P = p.N;
  p.T = static_cast<int32_t>(a.rows_t);
  p.HV = static_cast<int32_t>(a.HV);
  p.tile = 16;
  p.tiles = pieces(a.rows_t, p.tile);
  p.gate_units = 1;
  launch_conv(p, stream);
}

void check_gated_rms_norm(const NormArgs& a) {
  if (a.V > kMaxNorm)
    throw Unsupported("V = " + std::to_string(a.V) + ": the XPU norm takes V up to " +
                      std::to_string(kMaxNorm));
  if (a.weight.s0 != 1 && a.V > 1)
    throw Unsupported("weight: the XPU norm needs a contiguous weight, got stride " +
                      std::to_string(a.weight.s0));
}

void gated_rms_norm(const NormArgs& a, void* stream, bool quiet) {
  if (a.rows == 0) return;
  check_gated_rms_norm(a);
  NormParams p{};
  p.x = address(a.x);
  p.gate = address(a.gate);
  p.y = address(a.y);
  p.s_x = a.heads > 1 ? a.s_x_head : a.s_x;
  p.s_gate = a.s_gate;
  p.heads = static_cast<int32_t>(a.heads);
  p.s_gate_head = a.s_gate_head;
  p.quiet = quiet;
  p.rows = a.rows;
  p.weight = gate_param(a.weight);
  p.V = static_cast<int32_t>(a.V);
  p.dtype = static_cast<int32_t>(a.dtype);
  p.gate_dtype = static_cast<int32_t>(a.gate_dtype);
  p.eps = a.eps;
  p.inv_v = 1.0f / static_cast<float>(a.V);
  launch_gated_rms_norm(p, stream);
}

bool decode_fits(const DecodeArgs& a) {
  const RecurrentArgs& r = a.recurrent;
  return r.seqs.T == 1 && !r.seqs.cu_seqlens.ptr && r.seqs.S == 0 && !r.seqs.num_accepted.ptr &&
         (r.K == 64 || r.K == 128) && r.V % 32 == 0 && r.V <= kMaxNorm && r.state.s_k == 1 &&
         !r.window.fill && 2 * (r.K + r.HV / r.H * r.V) * 4 + 256 <= 128 * 1024;
}

void decode(const DecodeArgs& a, void* out, void* stream) {
  const RecurrentArgs& r = a.recurrent;
  if (r.seqs.N == 0) return;
  const ConvParams c = conv_params(a.front.conv);
  if (a.norm_weight.s0 != 1 && r.V > 1)
    throw Unsupported("norm_weight: the XPU norm needs a contiguous weight");
  DecodeParams p{};
  p.x = c.x;
  p.out = address(out);
  p.weight = c.weight;
  p.weight_s1 = c.weight_s1;
  p.bias = c.bias;
  p.pool = c.pool;
  p.s_p = c.s_p;
  p.s_c = c.s_c;
  p.s_l = c.s_l;
  p.state = address(r.state.ptr);
  p.state_sp = r.state.s_p;
  p.state_sh = r.state.s_h;
  p.state_sv = r.state.s_v;
  p.rows = c.rows;
  p.has_init = c.has_init;
  p.s_has = c.s_has;
  p.a_log = gate_param(a.front.gates.A_log);
  p.dt_bias = gate_param(a.front.gates.dt_bias);
  p.norm_weight = gate_param(a.norm_weight);
  p.pool_dtype = static_cast<int16_t>(c.pool_dtype);
  p.leading = static_cast<int16_t>(c.leading);
  p.silu = static_cast<int16_t>(c.silu);
  p.l2norm = a.front.l2norm;
  p.P = static_cast<int32_t>(r.state.P < a.front.conv.state.P ? r.state.P : a.front.conv.state.P);
  p.L = c.L;
  p.N = c.N;
  p.C = c.C;
  p.H = static_cast<int32_t>(r.H);
  p.HV = static_cast<int32_t>(r.HV);
  p.K = static_cast<int32_t>(r.K);
  p.V = static_cast<int32_t>(r.V);
  p.W = static_cast<int16_t>(c.W);
  p.scale = r.scale;
  p.eps = a.norm_eps;
  p.inv_v = 1.0f / static_cast<float>(r.V);
  launch_decode(p, static_cast<int>(r.state.dtype), stream);
}

}  // namespace xpu
}  // namespace gdn
