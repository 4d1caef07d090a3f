#include "checks.h"

#include <vector>

#include <ATen/ATen.h>

#include "check_parts.h"

namespace gdn {
namespace {

// How many tokens a step of a recurrence may bring. Without a window the state after each token
// has a row of its own, and the accepted count says in which column it stands; with a base and a
// window all of them are pending at once.
void check_step(const char* op, const RecurrentArgs& a, bool has_window, bool has_base) {
  const Sequences& s = a.seqs;
  if (has_window) {
    TORCH_CHECK(!has_base || s.cu_seqlens.ptr || s.T <= a.window.R, op,
                ": expected T <= R = ", a.window.R, " tokens a call, got T = ", s.T);
    return;
  }
  TORCH_CHECK(!s.num_accepted.ptr || s.S > 0, op,
              ": num_accepted: needs state_indices of shape [N, S], got ",
              s.state_indices.ptr ? "[N]" : "none");
  TORCH_CHECK(s.S == 0 || s.cu_seqlens.ptr || s.S >= s.T, op,
              ": state_indices: expected S >= T = ", s.T, " columns, got ", s.S);
}

// What an op calls the input and the filter of its convolution.
struct ConvNames {
  const char *x, *weight, *bias;
};
constexpr ConvNames kPlainConv{"x", "weight", "bias"};

void fill_conv(const char* op, const ConvNames& names, ConvArgs& c, const at::Tensor& x, int64_t C,
               const at::Tensor& weight, const OptTensor& bias, const std::string& activation) {
  TORCH_CHECK(C >= 1, op, ": ", names.x, ": expected C >= 1 channels, got shape ", x.sizes());
  check_dim(op, names.weight, weight, 2, "[C, W]");
  check_size(op, names.weight, weight, 0, C, "C");
  check_device(op, names.weight, weight, x);
  c.C = C;
  c.W = weight.size(1);
  TORCH_CHECK(c.W >= 1 && c.W <= kMaxConvWidth, op, ": ", names.weight,
              ": expected 1 <= W <= ", kMaxConvWidth, ", got W = ", c.W);
  c.x = activation_view(op, names.x, x);
  c.x.sd = x.size(2) > 1 ? x.stride(2) : 1;
  c.x.sh = 0;
  c.weight = param_of(op, names.weight, weight);
  if (bias) {
    check_dim(op, names.bias, *bias, 1, "[C]");
    check_size(op, names.bias, *bias, 0, C, "C");
    check_device(op, names.bias, *bias, x);
    c.bias = param_of(op, names.bias, *bias);
  }
  c.silu = silu_of(op, activation);
}

// A speculative call leaves its W - 1 + T - 1 newest columns, so that the next one can go back to
// any token that is accepted.
void check_conv_columns(const char* op, const ConvArgs& c) {
  TORCH_CHECK(!c.seqs.num_accepted.ptr || c.state.leading, op,
              ": num_accepted: needs conv_leading=True (the trailing layout keeps no drafts)");
  if (c.seqs.num_accepted.ptr && !c.seqs.cu_seqlens.ptr && c.seqs.T > 0) {
    const int64_t need = c.W - 1 + c.seqs.T - 1;
    TORCH_CHECK(c.W == 1 || c.state.L >= need, op,
                ": conv_state: expected L >= W - 1 + T - 1 = ", need,
                " columns in a speculative call, got ", c.state.L);
  }
}

// Rows of x and gate: all with one stride, or heads inside tokens with one stride each.
void norm_rows(const char* op, const at::Tensor& x, const at::Tensor& gate, NormArgs& n) {
  n.s_x = n.s_gate = n.V;
  if (x.numel() == 0) return;
  const int64_t last = x.dim() - 1;
  if (one_stride(x, last, &n.s_x) && one_stride(gate, last, &n.s_gate)) return;
  n.heads = x.size(last - 1);
  n.s_x_head = x.stride(last - 1);
  n.s_gate_head = gate.stride(last - 1);
  n.s_x = n.s_gate = 0;
  TORCH_CHECK(
      one_stride(x, last - 1, &n.s_x) && one_stride(gate, last - 1, &n.s_gate), op,
      ": x, gate: expected the dimensions before the last two to have one stride, got strides ",
      x.strides(), " and ", gate.strides());
}

}  // namespace

// Tokens, gates, pool, window and sequences. `read_only`: `state` is the initial state of a
// functional op. `rows`: what the op calls its state_indices.
static RecurrentArgs sequence_inputs(const char* op, const at::Tensor& q, const at::Tensor& k,
                                     const at::Tensor& v, const GateTensors& gates,
                                     const at::Tensor* state, bool read_only,
                                     const WindowTensors* window, const SeqTensors& seq,
                                     std::optional<double> scale, bool qk_l2norm,
                                     const char* rows = "state_indices") {
  check_dim(op, "q", q, 4, "[B, T, H, K]");
  check_dim(op, "k", k, 4, "[B, T, H, K]");
  check_dim(op, "v", v, 4, "[B, T, HV, V]");
  const int64_t B = q.size(0), T = q.size(1);
  RecurrentArgs a;
  a.H = q.size(2);
  a.K = q.size(3);
  a.HV = v.size(2);
  a.V = v.size(3);
  TORCH_CHECK(k.sizes() == q.sizes(), op, ": k: expected the shape of q, ", q.sizes(), ", got ",
              k.sizes());
  check_size(op, "v", v, 0, B, "B");
  check_size(op, "v", v, 1, T, "T");
  check_heads(op, a.H, a.HV, a.K, a.V);
  dtype_of(op, "q", q);
  TORCH_CHECK(k.scalar_type() == q.scalar_type() && v.scalar_type() == q.scalar_type(), op,
              ": k, v: expected the dtype of q, ", q.scalar_type(), ", got ", k.scalar_type(),
              " and ", v.scalar_type());
  check_device(op, "k", k, q);
  check_device(op, "v", v, q);
  int64_t P = 0;
  if (state) {
    const char* name = read_only ? "initial_state" : "state";
    check_device(op, name, *state, q);
    a.state = state_pool(op, name, *state, a.HV, a.V, a.K, read_only);
    P = a.state.P;
  }
  if (window) {
    a.window = window_of(op, *window, a.H, a.HV, a.K, a.V, q);
    if (state) check_window_against_state(op, *state, *window);
    P = a.window.P;
  }
  // A functional op without a state has a row for every sequence.
  if (!state && !window) P = seq.cu_seqlens ? seq.cu_seqlens->numel() : B;
  a.seqs = sequences_of(op, B, T, P, seq, q, rows);
  a.q = activation_view(op, "q", q);
  a.k = activation_view(op, "k", k);
  a.v = activation_view(op, "v", v);
  a.gates = gates_of(op, gates, B, T, a.HV, q);
  a.scale = scale_of(scale, a.K);
  a.l2norm = qk_l2norm;
  return a;
}

RecurrentArgs recurrent_args(const char* op, const at::Tensor& q, const at::Tensor& k,
                             const at::Tensor& v, const GateTensors& gates, const at::Tensor* state,
                             const WindowTensors* window, const SeqTensors& seq,
                             std::optional<double> scale, bool qk_l2norm) {
  RecurrentArgs a =
      sequence_inputs(op, q, k, v, gates, state, false, window, seq, scale, qk_l2norm);
  check_step(op, a, window, state);
  return a;
}

ChunkArgs chunk_args(const char* op, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                     const at::Tensor& g, const at::Tensor& beta, const ChunkTensors& t,
                     std::optional<double> scale, bool qk_l2norm, int64_t chunk_size) {
  TORCH_CHECK(chunk_size >= kMinChunk && chunk_size <= kMaxChunk, op, ": chunk_size: expected ",
              kMinChunk, " to ", kMaxChunk, ", got ", chunk_size);
  check_dim(op, "q", q, 4, "[B, T, H, K]");
  if (t.initial_state) {
    check_dim(op, "initial_state", *t.initial_state, 4, "[N, HV, V, K]");
    TORCH_CHECK(t.initial_state->scalar_type() == at::kFloat, op,
                ": initial_state: expected float32, got ", t.initial_state->scalar_type());
    check_size(op, "initial_state", *t.initial_state, 0,
               count_sequences(op, t.cu_seqlens, q.size(0)), "N");
  }
  const OptTensor none;
  const SeqTensors seq{t.read_indices, t.has_initial_state, t.cu_seqlens, none};
  const char* rows = t.window ? "state_indices" : "read_indices";
  const at::Tensor* pool = t.state ? t.state : t.initial_state ? &*t.initial_state : nullptr;
  const RecurrentArgs r = sequence_inputs(op, q, k, v, {g, beta}, pool, !t.state, t.window, seq,
                                          scale, qk_l2norm, rows);
  ChunkArgs a;
  a.seqs = r.seqs;
  TORCH_CHECK(a.seqs.S == 0, op, ": ", rows, ": expected shape [N], got [N, ", a.seqs.S, "]");
  a.H = r.H;
  a.HV = r.HV;
  a.K = r.K;
  a.V = r.V;
  a.C = chunk_size;
  a.q = r.q;
  a.k = r.k;
  a.v = r.v;
  a.gates = r.gates;
  a.read = r.state;
  if (t.state) a.write = r.state;
  a.window = r.window;
  a.scale = r.scale;
  a.l2norm = r.l2norm;
  if (t.write_indices) {
    check_dim(op, "write_indices", *t.write_indices, 1, "[N]");
    check_size(op, "write_indices", *t.write_indices, 0, a.seqs.N, "N");
    a.write_indices = index_of(op, "write_indices", *t.write_indices, q);
  }
  if (t.edge_rows) {
    check_dim(op, "edge_rows", *t.edge_rows, 2, "[N, E]");
    check_size(op, "edge_rows", *t.edge_rows, 0, a.seqs.N, "N");
    a.edge_rows = index_of(op, "edge_rows", *t.edge_rows, q);
    a.edges = t.edge_rows->size(1);
  }
  return a;
}

ChunkBackwardArgs chunk_backward_args(const char* op, const at::Tensor& grad_o,
                                      const OptTensor& grad_final_state, const at::Tensor& q,
                                      const at::Tensor& k, const at::Tensor& v, const at::Tensor& g,
                                      const at::Tensor& beta, const OptTensor& initial_state,
                                      const OptTensor& cu_seqlens, std::optional<double> scale,
                                      bool qk_l2norm, int64_t chunk_size) {
  const OptTensor none;
  ChunkBackwardArgs a;
  a.forward = chunk_args(op, q, k, v, g, beta,
                         {initial_state, nullptr, none, none, none, cu_seqlens, none, nullptr},
                         scale, qk_l2norm, chunk_size);
  check_chunk_gradients(op, grad_o, grad_final_state, q, v, a.forward.seqs.N);
  a.grad_out = activation_view(op, "grad_o", grad_o);
  if (grad_final_state) {
    TORCH_CHECK(grad_final_state->scalar_type() == at::kFloat, op,
                ": grad_final_state: expected float32, got ", grad_final_state->scalar_type());
    a.grad_state = states_of(*grad_final_state);  // only read, so it may be expanded
  }
  return a;
}

void check_chunk_gradients(const char* op, const at::Tensor& grad_o,
                           const OptTensor& grad_final_state, const at::Tensor& q,
                           const at::Tensor& v, int64_t N) {
  check_given(op, "grad_o", grad_o);
  TORCH_CHECK(grad_o.sizes() == v.sizes(), op, ": grad_o: expected the shape of v, ", v.sizes(),
              ", got ", grad_o.sizes());
  check_device(op, "grad_o", grad_o, q);
  if (!grad_final_state) return;
  const at::Tensor& t = *grad_final_state;
  const std::vector<int64_t> sizes{N, v.size(2), v.size(3), q.size(3)};
  TORCH_CHECK(t.sizes() == at::IntArrayRef(sizes), op, ": grad_final_state: expected shape ", sizes,
              ", got ", t.sizes());
  check_device(op, "grad_final_state", t, q);
}

RecurrentArgs window_args(const char* op, const at::Tensor* state, const WindowTensors* window,
                          const at::Tensor& fill, const OptTensor& state_indices) {
  RecurrentArgs a;
  check_dim(op, "win_fill", fill, 1, "[P]");
  TORCH_CHECK(fill.scalar_type() == at::kInt, op, ": win_fill: expected int32, got ",
              fill.scalar_type());
  check_writable(op, "win_fill", fill);
  if (window) {
    check_dim(op, "state", *state, 4, "[P, HV, V, K]");
    check_dim(op, "win_k", window->k, 4, "[P, H, R, K]");
    a.H = window->k.size(1);
    a.HV = state->size(1);
    a.V = state->size(2);
    a.K = state->size(3);
    check_heads(op, a.H, a.HV, a.K, a.V);
    a.state = state_pool(op, "state", *state, a.HV, a.V, a.K);
    a.window = window_of(op, *window, a.H, a.HV, a.K, a.V, *state);
    check_window_against_state(op, *state, *window);
  } else {
    a.window.fill = fill.data_ptr<int32_t>();
    a.window.P = fill.size(0);
    a.window.s_fill = fill.stride(0);
  }
  Sequences& s = a.seqs;
  s.P = fill.size(0);
  if (state_indices) check_dim(op, "state_indices", *state_indices, 1, "[N]");
  s.N = s.B = state_indices ? state_indices->size(0) : s.P;
  if (state_indices) {
    s.state_indices = index_of(op, "state_indices", *state_indices, fill);
  }
  return a;
}

GatingArgs gating_args(const char* op, const at::Tensor& a, const at::Tensor& b,
                       const at::Tensor& A_log, const at::Tensor& dt_bias) {
  check_given(op, "a", a);
  check_given(op, "b", b);
  TORCH_CHECK(a.dim() >= 1, op, ": a: expected shape [..., HV], got a scalar");
  TORCH_CHECK(a.sizes() == b.sizes(), op, ": b: expected the shape of a, ", a.sizes(), ", got ",
              b.sizes());
  check_device(op, "b", b, a);
  GatingArgs g;
  g.HV = a.size(-1);
  TORCH_CHECK(g.HV >= 1, op, ": a: expected HV >= 1, got shape ", a.sizes());
  g.A_log = head_param(op, "A_log", A_log, g.HV, a);
  g.dt_bias = head_param(op, "dt_bias", dt_bias, g.HV, a);
  auto rows = [&](const char* name, const at::Tensor& t) {
    View v;
    v.ptr = t.data_ptr();
    v.dtype = dtype_of(op, name, t);
    v.sh = t.dim() > 0 && t.size(-1) > 1 ? t.stride(-1) : 0;
    if (t.dim() >= 2) v.st = stride_of(t, t.dim() - 2);
    if (t.dim() == 3) v.sb = stride_of(t, 0);
    return v;
  };
  TORCH_CHECK(a.dim() <= 3, op, ": a: expected at most three dimensions, [B, T, HV], got ",
              a.sizes());
  g.rows_b = a.dim() == 3 ? a.size(0) : 1;
  g.rows_t = a.dim() >= 2 ? a.size(-2) : 1;
  g.a = rows("a", a);
  g.b = rows("b", b);
  return g;
}

static ConvArgs pool_conv(const char* op, const ConvNames& names, const at::Tensor& x,
                          const at::Tensor& weight, const OptTensor& bias,
                          const at::Tensor& conv_state, const SeqTensors& seq,
                          const std::string& activation, bool conv_leading) {
  check_dim(op, names.x, x, 3, "[B, T, C]");
  ConvArgs c;
  fill_conv(op, names, c, x, x.size(2), weight, bias, activation);
  check_device(op, "conv_state", conv_state, x);
  c.state = conv_pool(op, conv_state, "conv_state", c.C, c.W, conv_leading);
  c.seqs = sequences_of(op, x.size(0), x.size(1), c.state.P, seq, x);
  check_conv_columns(op, c);
  return c;
}

ConvArgs conv_args(const char* op, const at::Tensor& x, const at::Tensor& weight,
                   const OptTensor& bias, const at::Tensor& conv_state, const SeqTensors& seq,
                   const std::string& activation, bool conv_leading) {
  return pool_conv(op, kPlainConv, x, weight, bias, conv_state, seq, activation, conv_leading);
}

ConvArgs conv1d_args(const char* op, const at::Tensor& x, const at::Tensor& weight,
                     const OptTensor& bias, const OptTensor& initial_state,
                     const OptTensor& cu_seqlens, const std::string& activation,
                     std::optional<int64_t> state_len) {
  check_dim(op, "x", x, 3, "[B, T, C]");
  ConvArgs c;
  fill_conv(op, kPlainConv, c, x, x.size(2), weight, bias, activation);
  if (initial_state) check_dim(op, "initial_state", *initial_state, 3, "[N, C, L]");
  const OptTensor none;
  const int64_t N = count_sequences(op, cu_seqlens, x.size(0));
  c.seqs = sequences_of(op, x.size(0), x.size(1), N, {none, none, cu_seqlens, none}, x);
  c.state.L = state_len ? *state_len : initial_state ? initial_state->size(-1) : c.W - 1;
  const char* columns = state_len ? "state_len" : "initial_state";
  TORCH_CHECK(c.state.L >= c.W - 1, op, ": ", columns, ": expected at least W - 1 = ", c.W - 1,
              " columns, got ", c.state.L);
  TORCH_CHECK(c.W > 1 || c.state.L == 0, op, ": ", columns,
              ": a convolution of width 1 keeps no state, expected no columns, got ", c.state.L);
  if (initial_state) {
    check_size(op, "initial_state", *initial_state, 0, c.seqs.N, "N");
    check_size(op, "initial_state", *initial_state, 1, c.C, "C");
    check_size(op, "initial_state", *initial_state, 2, c.state.L, "L");
    check_device(op, "initial_state", *initial_state, x);
    dtype_of(op, "initial_state", *initial_state);
  }
  return c;
}

ConvGatingArgs conv_gating_args(const char* op, const at::Tensor& mixed_qkv, const at::Tensor& a,
                                const at::Tensor& b, const at::Tensor& conv_weight,
                                const OptTensor& conv_bias, const at::Tensor& A_log,
                                const at::Tensor& dt_bias, const at::Tensor& conv_state,
                                int64_t num_k_heads, int64_t head_k_dim, const SeqTensors& seq,
                                bool qk_l2norm, const std::string& activation, bool conv_leading) {
  check_dim(op, "a", a, 3, "[B, T, HV]");
  check_dim(op, "mixed_qkv", mixed_qkv, 3, "[B, T, C]");
  ConvGatingArgs f;
  f.H = num_k_heads;
  f.K = head_k_dim;
  f.HV = a.size(2);
  const int64_t v_channels = mixed_qkv.size(2) - 2 * f.H * f.K;
  TORCH_CHECK(f.H >= 1 && f.K >= 1 && f.HV >= 1 && v_channels > 0 && v_channels % f.HV == 0, op,
              ": mixed_qkv: expected C = 2*H*K + HV*V channels with H = ", f.H, ", K = ", f.K,
              ", HV = ", f.HV, ", got C = ", mixed_qkv.size(2));
  f.V = v_channels / f.HV;
  check_heads(op, f.H, f.HV, f.K, f.V);
  f.conv = pool_conv(op, {"mixed_qkv", "conv_weight", "conv_bias"}, mixed_qkv, conv_weight,
                     conv_bias, conv_state, seq, activation, conv_leading);
  f.gates =
      gates_of(op, {a, b, &A_log, &dt_bias}, mixed_qkv.size(0), mixed_qkv.size(1), f.HV, mixed_qkv);
  f.l2norm = qk_l2norm;
  return f;
}

NormArgs norm_args(const char* op, const at::Tensor& x, const at::Tensor& gate,
                   const at::Tensor& weight, double eps) {
  check_given(op, "x", x);
  check_given(op, "gate", gate);
  TORCH_CHECK(x.dim() >= 1, op, ": x: expected shape [..., V], got a scalar");
  TORCH_CHECK(x.sizes() == gate.sizes(), op, ": gate: expected the shape of x, ", x.sizes(),
              ", got ", gate.sizes());
  NormArgs n;
  n.V = x.size(-1);
  TORCH_CHECK(n.V >= 1 && n.V <= kMaxHeadDim, op, ": x: expected 1 <= V <= ", kMaxHeadDim,
              ", got V = ", n.V);
  n.rows = x.numel() / n.V;
  check_dim(op, "weight", weight, 1, "[V]");
  check_size(op, "weight", weight, 0, n.V, "V");
  check_device(op, "gate", gate, x);
  check_device(op, "weight", weight, x);
  TORCH_CHECK(unit_stride(x, x.dim() - 1) && unit_stride(gate, gate.dim() - 1), op,
              ": x, gate: expected a contiguous last dimension, got strides ", x.strides(), " and ",
              gate.strides());
  n.x = x.data_ptr();
  n.gate = gate.data_ptr();
  n.dtype = dtype_of(op, "x", x);
  n.gate_dtype = dtype_of(op, "gate", gate);
  norm_rows(op, x, gate, n);
  n.weight = param_of(op, "weight", weight);
  n.eps = static_cast<float>(eps);
  return n;
}

LinearArgs linear_args(const char* op, const at::Tensor& x, const at::Tensor& weight, bool* plain) {
  check_given(op, "x", x);
  TORCH_CHECK(x.dim() >= 1, op, ": x: expected shape [..., K], got a scalar");
  check_dim(op, "weight", weight, 2, "[N, K]");
  check_size(op, "weight", weight, 1, x.size(-1), "K");
  check_device(op, "weight", weight, x);
  TORCH_CHECK(weight.scalar_type() == x.scalar_type(), op, ": weight: expected the dtype of x, ",
              x.scalar_type(), ", got ", weight.scalar_type());
  LinearArgs a;
  a.K = x.size(-1);
  a.N = weight.size(0);
  a.M = a.K > 0 ? x.numel() / a.K : 0;
  a.s_x = a.K;
  a.s_w = weight.stride(0);
  const at::ScalarType t = x.scalar_type();
  *plain = (t == at::kFloat || t == at::kBFloat16 || t == at::kHalf) && a.M > 0 && a.N > 0 &&
           unit_stride(x, x.dim() - 1) && unit_stride(weight, 1) &&
           one_stride(x, x.dim() - 1, &a.s_x);
  if (!*plain) return a;
  a.dtype = dtype_of(op, "x", x);
  a.x = x.data_ptr();
  a.w = weight.data_ptr();
  return a;
}

DecodeArgs decode_args(const char* op, const DecodeTensors& t, int64_t num_k_heads,
                       int64_t head_k_dim, const SeqTensors& seq, std::optional<double> scale,
                       bool qk_l2norm, double eps, const std::string& activation,
                       bool conv_leading) {
  check_dim(op, "projected", t.projected, 3, "[B, T, D]");
  const at::Tensor& like = t.projected;
  DecodeArgs d;
  RecurrentArgs& r = d.recurrent;
  r.H = num_k_heads;
  r.K = head_k_dim;
  const at::Tensor& heads = t.state ? *t.state : t.window->u;  // both [P, HV, ...]
  check_dim(op, t.state ? "state" : "win_u", heads, 4, t.state ? "[P, HV, V, K]" : "[P, HV, R, V]");
  r.HV = heads.size(1);
  r.V = t.state ? heads.size(2) : heads.size(3);
  check_heads(op, r.H, r.HV, r.K, r.V);
  const int64_t C = 2 * r.H * r.K + r.HV * r.V;
  const int64_t D = C + r.HV * r.V + 2 * r.HV;
  TORCH_CHECK(like.size(2) == D, op, ": projected: expected D = C + HV*V + 2*HV = ", D,
              " columns (qkv | z | b | a) with H = ", r.H, ", K = ", r.K, ", HV = ", r.HV,
              ", V = ", r.V, ", got ", like.size(2));
  int64_t P = 0;
  if (t.state) {
    check_device(op, "state", *t.state, like);
    r.state = state_pool(op, "state", *t.state, r.HV, r.V, r.K);
    P = r.state.P;
  }
  if (t.window) {
    r.window = window_of(op, *t.window, r.H, r.HV, r.K, r.V, like);
    if (t.state) check_window_against_state(op, *t.state, *t.window);
    P = r.window.P;
  }
  r.seqs = sequences_of(op, like.size(0), like.size(1), P, seq, like);
  TORCH_CHECK(r.seqs.cu_seqlens.ptr || r.seqs.T <= kDecodeTokens, op, ": expected at most ",
              kDecodeTokens,
              " tokens a sequence (longer calls: short_conv, gating, chunk), got T = ", r.seqs.T);
  check_step(op, r, t.window, t.state);
  r.scale = scale_of(scale, r.K);
  r.l2norm = qk_l2norm;

  ConvGatingArgs& f = d.front;
  f.H = r.H;
  f.HV = r.HV;
  f.K = r.K;
  f.V = r.V;
  f.l2norm = qk_l2norm;
  fill_conv(op, {"projected", "conv_weight", "conv_bias"}, f.conv, like, C, t.conv_weight,
            t.conv_bias, activation);
  check_device(op, "conv_state", t.conv_state, like);
  f.conv.state = conv_pool(op, t.conv_state, "conv_state", C, f.conv.W, conv_leading);
  if (t.state) check_apart(op, "state", *t.state, "conv_state", t.conv_state);
  if (t.window) check_apart_from_window(op, "conv_state", t.conv_state, *t.window);
  f.conv.seqs = r.seqs;
  f.conv.seqs.P = f.conv.state.P;
  check_conv_columns(op, f.conv);

  const int64_t item = like.element_size();
  auto column = [&](int64_t first, int64_t head_dim) {
    View v = f.conv.x;
    v.ptr = static_cast<char*>(v.ptr) + first * v.sd * item;
    v.sh = head_dim * v.sd;
    return v;
  };
  d.z = column(C, r.V);
  f.gates.raw = true;
  f.gates.beta = column(C + r.HV * r.V, 1);
  f.gates.g = column(C + r.HV * r.V + r.HV, 1);
  f.gates.A_log = head_param(op, "A_log", t.A_log, r.HV, like);
  f.gates.dt_bias = head_param(op, "dt_bias", t.dt_bias, r.HV, like);
  r.gates = f.gates;
  check_dim(op, "norm_weight", t.norm_weight, 1, "[V]");
  check_size(op, "norm_weight", t.norm_weight, 0, r.V, "V");
  check_device(op, "norm_weight", t.norm_weight, like);
  d.norm_weight = param_of(op, "norm_weight", t.norm_weight);
  d.norm_eps = static_cast<float>(eps);
  return d;
}

}  // namespace gdn
