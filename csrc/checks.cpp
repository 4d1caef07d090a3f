#include "checks.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <vector>

#include <ATen/ATen.h>

#include "index.h"

namespace gdn {

void check_given(const char* op, const char* name, const at::Tensor& t) {
  TORCH_CHECK(t.defined(), op, ": ", name, ": expected a tensor, got None");
}

namespace {

void check_dim(const char* op, const char* name, const at::Tensor& t, int64_t dim,
               const char* shape) {
  check_given(op, name, t);
  TORCH_CHECK(t.dim() == dim, op, ": ", name, ": expected shape ", shape, ", got ", t.sizes());
}

void check_size(const char* op, const char* name, const at::Tensor& t, int64_t d, int64_t want,
                const char* letter) {
  TORCH_CHECK(t.size(d) == want, op, ": ", name, ": expected ", letter, " = ", want,
              " in dimension ", d, ", got ", t.size(d), " (shape ", t.sizes(), ")");
}

void check_device(const char* op, const char* name, const at::Tensor& t, const at::Tensor& like) {
  check_given(op, name, t);
  TORCH_CHECK(t.device() == like.device(), op, ": ", name, ": expected device ", like.device(),
              ", got ", t.device());
}

// The stride of a dimension of one element means nothing; 0 lets kernels see that it does not move.
int64_t stride_of(const at::Tensor& t, int64_t d) { return t.size(d) > 1 ? t.stride(d) : 0; }

// Whether neighbours in dimension d are neighbours in memory.
bool unit_stride(const at::Tensor& t, int64_t d) { return t.size(d) <= 1 || t.stride(d) == 1; }

float scale_of(std::optional<double> scale, int64_t K) {
  return static_cast<float>(scale ? *scale : 1.0 / std::sqrt(static_cast<double>(K)));
}

// How many sequences a call brings, before the rest of it is checked.
int64_t count_sequences(const char* op, const OptTensor& cu_seqlens, int64_t B) {
  if (!cu_seqlens) return B;
  check_dim(op, "cu_seqlens", *cu_seqlens, 1, "[N+1]");
  TORCH_CHECK(cu_seqlens->size(0) >= 1, op, ": cu_seqlens: expected at least one entry, got none");
  return cu_seqlens->size(0) - 1;
}

View activation_view(const char* op, const char* name, const at::Tensor& t) {
  View v;
  v.ptr = t.data_ptr();
  v.dtype = dtype_of(op, name, t);
  v.sb = stride_of(t, 0);
  v.st = stride_of(t, 1);
  v.sh = stride_of(t, 2);
  v.sd = t.dim() > 3 && t.size(3) > 1 ? t.stride(3) : 1;
  return v;
}

Param param_of(const char* op, const char* name, const at::Tensor& t) {
  Param p;
  p.ptr = t.data_ptr();
  p.dtype = dtype_of(op, name, t);
  p.s0 = t.dim() > 0 ? stride_of(t, 0) : 0;
  p.s1 = t.dim() > 1 ? stride_of(t, 1) : 0;
  return p;
}

Param head_param(const char* op, const char* name, const at::Tensor& t, int64_t HV,
                 const at::Tensor& like) {
  check_dim(op, name, t, 1, "[HV]");
  check_size(op, name, t, 0, HV, "HV");
  check_device(op, name, t, like);
  return param_of(op, name, t);
}

Index index_of(const char* op, const char* name, const at::Tensor& t, const at::Tensor& like) {
  TORCH_CHECK(t.scalar_type() == at::kInt || t.scalar_type() == at::kLong, op, ": ", name,
              ": expected int32 or int64, got ", t.scalar_type());
  check_device(op, name, t, like);
  Index x;
  x.ptr = t.data_ptr();
  x.is64 = t.scalar_type() == at::kLong;
  x.s0 = stride_of(t, 0);
  x.s1 = t.dim() > 1 ? stride_of(t, 1) : 0;
  return x;
}

// A tensor that is about to be written: no two of its elements may be one. Strides that nest, each
// beyond what the smaller ones reach, are the layouts that pools have; others are refused.
void check_writable(const char* op, const char* name, const at::Tensor& t) {
  TORCH_INTERNAL_ASSERT(t.dim() <= 4);
  int64_t order[4];
  int dims = 0;
  for (int64_t d = 0; d < t.dim(); ++d) {
    if (t.size(d) <= 1) continue;
    TORCH_CHECK(t.stride(d) != 0, op, ": ", name,
                ": is written, so no dimension may be expanded (stride 0 in dimension ", d, ")");
    int at = dims++;
    for (; at > 0 && t.stride(order[at - 1]) > t.stride(d); --at) order[at] = order[at - 1];
    order[at] = d;
  }
  int64_t reach = 0;
  for (int i = 0; i < dims && t.numel() > 0; ++i) {
    TORCH_CHECK(t.stride(order[i]) > reach, op, ": ", name,
                ": is written, so its elements may not overlap, got shape ", t.sizes(),
                " and strides ", t.strides());
    reach += (t.size(order[i]) - 1) * t.stride(order[i]);
  }
}

struct Extent {
  const char* begin;
  const char* end;    // of one row
  int64_t row_bytes;  // distance between rows
  int64_t rows;
};

Extent extent_of(const at::Tensor& t) {
  int64_t last = 0;
  for (int64_t d = 1; d < t.dim(); ++d) last += (t.size(d) - 1) * t.stride(d);
  const char* p = static_cast<const char*>(t.data_ptr());
  return {p, p + (last + 1) * t.element_size(), t.size(0) > 1 ? t.stride(0) * t.element_size() : 0,
          t.size(0)};
}

// Two pools may be interleaved in one page (row strides equal, extents apart), never overlap.
void check_apart(const char* op, const char* name_a, const at::Tensor& a, const char* name_b,
                 const at::Tensor& b) {
  if (a.numel() == 0 || b.numel() == 0 || !a.is_alias_of(b)) return;
  const Extent x = extent_of(a), y = extent_of(b);
  const char* x_end = x.end + (x.rows - 1) * x.row_bytes;
  const char* y_end = y.end + (y.rows - 1) * y.row_bytes;
  if (x_end <= y.begin || y_end <= x.begin) return;
  bool apart = x.row_bytes == y.row_bytes && x.row_bytes > 0;
  if (apart) {
    const int64_t page = x.row_bytes;
    const int64_t shift = ((y.begin - x.begin) % page + page) % page;
    apart = shift >= x.end - x.begin && page - shift >= y.end - y.begin;
  }
  TORCH_CHECK(apart, op, ": ", name_a, " and ", name_b,
              " share memory; both are written, so they must not overlap");
}

// Shapes of the token tensors and the sequence metadata. B, T as the token tensors have them.
Sequences sequences_of(const char* op, int64_t B, int64_t T, int64_t P, const SeqTensors& t,
                       const at::Tensor& like, const char* rows = "state_indices") {
  Sequences s;
  s.B = B;
  s.T = T;
  s.P = P;
  s.N = B;
  if (t.cu_seqlens) {
    s.N = count_sequences(op, t.cu_seqlens, B);
    TORCH_CHECK(B == 1, op, ": cu_seqlens: expected a packed batch, B = 1, got B = ", B);
    s.cu_seqlens = index_of(op, "cu_seqlens", *t.cu_seqlens, like);
  }
  if (t.state_indices) {
    const at::Tensor& idx = *t.state_indices;
    TORCH_CHECK(idx.dim() == 1 || idx.dim() == 2, op, ": ", rows,
                ": expected shape [N] or [N, S], got ", idx.sizes());
    TORCH_CHECK(idx.size(0) == s.N, op, ": ", rows, ": expected one entry a sequence, N = ", s.N,
                ", got ", idx.size(0));
    s.state_indices = index_of(op, rows, idx, like);
    s.S = idx.dim() == 2 ? idx.size(1) : 0;
    TORCH_CHECK(idx.dim() == 1 || s.S > 0, op, ": ", rows, ": expected S >= 1, got 0");
  } else {
    TORCH_CHECK(s.N <= P, op, ": state: expected a row for each of N = ", s.N, " sequences (no ",
                rows, " given), got P = ", P);
  }
  if (t.has_initial_state) {
    const at::Tensor& has = *t.has_initial_state;
    check_dim(op, "has_initial_state", has, 1, "[N]");
    check_size(op, "has_initial_state", has, 0, s.N, "N");
    check_device(op, "has_initial_state", has, like);
    TORCH_CHECK(has.scalar_type() == at::kBool, op, ": has_initial_state: expected bool, got ",
                has.scalar_type());
    s.has_initial_state = has.data_ptr<bool>();
    s.s_has = stride_of(has, 0);
  }
  if (t.num_accepted) {
    const at::Tensor& acc = *t.num_accepted;
    check_dim(op, "num_accepted", acc, 1, "[N]");
    TORCH_CHECK(acc.size(0) >= s.N, op, ": num_accepted: expected at least N = ", s.N,
                " entries, got ", acc.size(0));
    s.num_accepted = index_of(op, "num_accepted", acc, like);
  }
  return s;
}

// `initial_state` of the functional op is only read, and may be expanded.
StatePool state_pool(const char* op, const char* name, const at::Tensor& t, int64_t HV, int64_t V,
                     int64_t K, bool read_only = false) {
  check_dim(op, name, t, 4, read_only ? "[N, HV, V, K]" : "[P, HV, V, K]");
  check_size(op, name, t, 1, HV, "HV");
  check_size(op, name, t, 2, V, "V");
  check_size(op, name, t, 3, K, "K");
  if (!read_only) check_writable(op, name, t);
  TORCH_CHECK(
      unit_stride(t, 3) || unit_stride(t, 2), op, ": ", name,
      ": expected K contiguous, or V as in the transposed view of a [P, HV, K, V] pool, got "
      "strides ",
      t.strides());
  StatePool s = states_of(t);
  s.dtype = dtype_of(op, name, t);
  // A dimension of one element gets the stride that it has in a dense pool.
  if (K == 1) s.s_k = 1;
  if (V == 1) s.s_v = unit_stride(t, 3) ? K : 1;
  return s;
}

ConvPool conv_pool(const char* op, const at::Tensor& t, const char* name, int64_t C, int64_t W,
                   bool leading) {
  check_dim(op, name, t, 3, "[P, C, L]");
  check_size(op, name, t, 1, C, "C");
  TORCH_CHECK(t.size(2) >= W - 1, op, ": ", name, ": expected L >= W - 1 = ", W - 1,
              " columns, got ", t.size(2));
  check_writable(op, name, t);
  ConvPool p = histories_of(op, name, t);
  p.leading = leading;
  return p;
}

Window window_of(const char* op, const WindowTensors& w, int64_t H, int64_t HV, int64_t K,
                 int64_t V, const at::Tensor& like) {
  check_dim(op, "win_k", w.k, 4, "[P, H, R, K]");
  check_dim(op, "win_u", w.u, 4, "[P, HV, R, V]");
  check_dim(op, "win_g", w.g, 3, "[P, HV, R]");
  check_dim(op, "win_fill", w.fill, 1, "[P]");
  const int64_t P = w.fill.size(0), R = w.k.size(2);
  TORCH_CHECK(R >= 1 && R <= kMaxWindow, op, ": win_k: expected 1 <= R <= ", kMaxWindow,
              ", got R = ", R);
  check_size(op, "win_k", w.k, 0, P, "P");
  check_size(op, "win_k", w.k, 1, H, "H");
  check_size(op, "win_k", w.k, 3, K, "K");
  check_size(op, "win_u", w.u, 0, P, "P");
  check_size(op, "win_u", w.u, 1, HV, "HV");
  check_size(op, "win_u", w.u, 2, R, "R");
  check_size(op, "win_u", w.u, 3, V, "V");
  check_size(op, "win_g", w.g, 0, P, "P");
  check_size(op, "win_g", w.g, 1, HV, "HV");
  check_size(op, "win_g", w.g, 2, R, "R");
  TORCH_CHECK(w.g.scalar_type() == at::kFloat, op, ": win_g: expected float32, got ",
              w.g.scalar_type());
  TORCH_CHECK(w.fill.scalar_type() == at::kInt, op, ": win_fill: expected int32, got ",
              w.fill.scalar_type());
  TORCH_CHECK(unit_stride(w.k, 3), op,
              ": win_k: expected a contiguous last dimension, got strides ", w.k.strides());
  TORCH_CHECK(unit_stride(w.u, 3), op,
              ": win_u: expected a contiguous last dimension, got strides ", w.u.strides());
  const Named all[] = {{"win_k", &w.k}, {"win_u", &w.u}, {"win_g", &w.g}, {"win_fill", &w.fill}};
  for (const Named& n : all) {
    check_writable(op, n.name, *n.t);
    check_device(op, n.name, *n.t, like);
  }
  for (int i = 0; i < 4; ++i) {
    for (int j = i + 1; j < 4; ++j) check_apart(op, all[i].name, *all[i].t, all[j].name, *all[j].t);
  }
  Window win;
  win.k = w.k.data_ptr();
  win.u = w.u.data_ptr();
  win.g = w.g.data_ptr<float>();
  win.fill = w.fill.data_ptr<int32_t>();
  win.k_dtype = dtype_of(op, "win_k", w.k);
  win.u_dtype = dtype_of(op, "win_u", w.u);
  win.P = P;
  win.R = R;
  win.sk_p = w.k.stride(0);
  win.sk_h = w.k.stride(1);
  win.sk_r = w.k.stride(2);
  win.su_p = w.u.stride(0);
  win.su_h = w.u.stride(1);
  win.su_r = w.u.stride(2);
  win.sg_p = w.g.stride(0);
  win.sg_h = w.g.stride(1);
  win.sg_r = w.g.stride(2);
  win.s_fill = w.fill.stride(0);
  return win;
}

void check_heads(const char* op, int64_t H, int64_t HV, int64_t K, int64_t V) {
  TORCH_CHECK(H >= 1 && HV >= 1 && HV % H == 0, op,
              ": expected HV to be a multiple of H, got HV = ", HV, " and H = ", H);
  TORCH_CHECK(K >= 1 && K <= kMaxHeadDim && V >= 1 && V <= kMaxHeadDim, op,
              ": expected 1 <= K, V <= ", kMaxHeadDim, ", got K = ", K, " and V = ", V);
}

void check_apart_from_window(const char* op, const char* name, const at::Tensor& pool,
                             const WindowTensors& w) {
  check_apart(op, name, pool, "win_k", w.k);
  check_apart(op, name, pool, "win_u", w.u);
  check_apart(op, name, pool, "win_g", w.g);
  check_apart(op, name, pool, "win_fill", w.fill);
}

void check_window_against_state(const char* op, const at::Tensor& state, const WindowTensors& w) {
  check_size(op, "win_fill", w.fill, 0, state.size(0), "P");
  check_apart_from_window(op, "state", state, w);
}

bool silu_of(const char* op, const std::string& activation) {
  TORCH_CHECK(activation == "silu" || activation == "none", op,
              ": activation: expected 'silu' or 'none', got '", activation, "'");
  return activation == "silu";
}

Gates gates_of(const char* op, const GateTensors& t, int64_t B, int64_t T, int64_t HV,
               const at::Tensor& like) {
  const bool raw = t.A_log != nullptr;
  const char* first = raw ? "a" : "g";
  const char* second = raw ? "b" : "beta";
  for (const Named& n : {Named{first, &t.g}, Named{second, &t.beta}}) {
    check_dim(op, n.name, *n.t, 3, "[B, T, HV]");
    check_size(op, n.name, *n.t, 0, B, "B");
    check_size(op, n.name, *n.t, 1, T, "T");
    check_size(op, n.name, *n.t, 2, HV, "HV");
    check_device(op, n.name, *n.t, like);
  }
  Gates gates;
  gates.raw = raw;
  gates.g = activation_view(op, first, t.g);
  gates.beta = activation_view(op, second, t.beta);
  if (raw) {
    gates.A_log = head_param(op, "A_log", *t.A_log, HV, like);
    gates.dt_bias = head_param(op, "dt_bias", *t.dt_bias, HV, like);
  }
  return gates;
}

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

// Whether the dimensions [0, last) of t walk with one stride, and which.
bool one_stride(const at::Tensor& t, int64_t last, int64_t* stride) {
  int64_t expected = -1;
  for (int64_t d = last - 1; d >= 0; --d) {
    if (t.size(d) == 1) continue;
    if (expected >= 0 && t.stride(d) != expected) return false;
    if (expected < 0) *stride = t.stride(d);
    expected = t.stride(d) * t.size(d);
  }
  return true;
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

DType dtype_of(const char* op, const char* name, const at::Tensor& t) {
  switch (t.scalar_type()) {
    case at::kFloat:
      return DType::f32;
    case at::kBFloat16:
      return DType::bf16;
    case at::kHalf:
      return DType::f16;
    default:
      TORCH_CHECK(false, op, ": ", name, ": expected float32, bfloat16 or float16, got ",
                  t.scalar_type());
  }
}

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

void check_chunk_values(const char* op, const ChunkArgs& c) {
  for (int64_t n = 0; n < c.seqs.N; ++n) {
    if (c.write_indices.ptr) {
      const int64_t row = at(c.write_indices, n);
      TORCH_CHECK(row < c.write.P, op, ": write_indices: expected rows below P = ", c.write.P,
                  ", got ", row, " for sequence ", n);
    }
    for (int64_t i = 0; i < c.edges; ++i) {
      const int64_t row = at(c.edge_rows, n, i);
      TORCH_CHECK(row < c.write.P, op, ": edge_rows: expected rows below P = ", c.write.P, ", got ",
                  row, " for sequence ", n);
    }
  }
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
    check_apart(op, "state", *t.state, "conv_state", t.conv_state);
    P = r.state.P;
  }
  if (t.window) {
    r.window = window_of(op, *t.window, r.H, r.HV, r.K, r.V, like);
    check_apart_from_window(op, "conv_state", t.conv_state, *t.window);
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

void check_values(const char* op, const Sequences& s, int64_t most_tokens, const char* rows) {
  if (s.cu_seqlens.ptr) {
    int64_t previous = at(s.cu_seqlens, 0);
    TORCH_CHECK(previous == 0, op, ": cu_seqlens: expected to start at 0, got ", previous);
    for (int64_t n = 1; n <= s.N; ++n) {
      const int64_t next = at(s.cu_seqlens, n);
      TORCH_CHECK(next >= previous, op, ": cu_seqlens: expected ascending offsets, got ", previous,
                  " then ", next, " at sequence ", n - 1);
      TORCH_CHECK(next - previous <= most_tokens, op, ": expected at most ", most_tokens,
                  " tokens a sequence, got ", next - previous, " for sequence ", n - 1);
      TORCH_CHECK(s.S == 0 || next - previous <= s.S, op,
                  ": state_indices: expected S >= ", next - previous, " columns for sequence ",
                  n - 1, ", got ", s.S);
      previous = next;
    }
    TORCH_CHECK(previous == s.T, op, ": cu_seqlens: expected to end at T = ", s.T, ", got ",
                previous);
  }
  for (int64_t n = 0; n < s.N; ++n) {
    if (s.state_indices.ptr) {
      for (int64_t j = 0; j < (s.S > 0 ? s.S : 1); ++j) {
        const int64_t row = at(s.state_indices, n, j);
        TORCH_CHECK(row < s.P, op, ": ", rows, ": expected rows below P = ", s.P, ", got ", row,
                    " for sequence ", n);
      }
    }
    // Without columns the count speaks of the call before; its pool's checks know the limit.
    if (s.num_accepted.ptr && s.S > 0) {
      const int64_t accepted = at(s.num_accepted, n);
      TORCH_CHECK(accepted <= s.S, op, ": num_accepted: expected at most ", s.S, ", got ", accepted,
                  " for sequence ", n);
    }
  }
}

void check_window_values(const char* op, const Sequences& s, const Window& w, bool has_base,
                         int64_t most_tokens) {
  Sequences rows = s;
  rows.num_accepted = {};  // counts tokens of the call before, not columns of this one
  rows.S = 0;              // only the first column is read, however many tokens there are
  check_values(op, rows, most_tokens);
  for (int64_t n = 0; n < s.N; ++n) {
    const Sequence seq = sequence_of(s, n, 0);
    if (seq.row < 0 || seq.fresh) continue;
    const int32_t packed = w.fill[seq.row * w.s_fill];
    const WindowCounts c = unpack_fill(packed);
    TORCH_CHECK(packed >= 0 && packed < 1 << 24 && c.fill <= w.R && (c.head == 0 || c.head < w.R) &&
                    (c.head == 0 || !has_base),
                op, ": win_fill: expected counts that a window of R = ", w.R, " can hold, got ",
                packed, " in row ", seq.row);
    TORCH_CHECK(!s.num_accepted.ptr || c.fill == 0 || seq.accepted <= c.drafts + 1, op,
                ": num_accepted: expected at most the ", c.drafts + 1,
                " tokens of the call before, got ", seq.accepted, " for sequence ", n);
  }
}

void check_conv_values(const char* op, const ConvArgs& c) {
  for (int64_t n = 0; n < c.seqs.N; ++n) {
    const Sequence seq = sequence_of(c.seqs, n, 0);
    if (seq.row < 0) continue;
    TORCH_CHECK(seq.row < c.state.P, op, ": state_indices: expected rows below P = ", c.state.P,
                " of conv_state, got ", seq.row, " for sequence ", n);
    const int64_t tokens = seq.end - seq.start;
    if (!c.seqs.num_accepted.ptr || c.W == 1 || tokens == 0) continue;
    const int64_t need = c.W - 2 + std::max(tokens, seq.accepted);
    TORCH_CHECK(c.state.L >= need, op, ": conv_state: expected L >= ", need, " columns for ",
                tokens, " tokens and ", seq.accepted, " accepted ones in sequence ", n, ", got ",
                c.state.L);
  }
}

at::Tensor new_output(const at::Tensor& like, at::IntArrayRef sizes) {
  return at::empty(sizes, like.options());
}

View view_of(at::Tensor& t, int64_t head_dim) {
  View v;
  v.ptr = t.data_ptr();
  v.dtype = dtype_of("gdn", "output", t);
  v.sb = t.stride(0);
  v.st = t.stride(1);
  v.sh = head_dim;
  v.sd = 1;
  return v;
}

StatePool states_of(const at::Tensor& t) {
  StatePool s;
  s.ptr = t.data_ptr();
  s.P = t.size(0);
  s.s_p = t.stride(0);
  s.s_h = t.stride(1);
  s.s_v = t.stride(2);
  s.s_k = t.stride(3);
  return s;
}

ConvPool histories_of(const char* op, const char* name, const at::Tensor& t) {
  ConvPool p;
  p.ptr = t.data_ptr();
  p.dtype = dtype_of(op, name, t);
  p.P = t.size(0);
  p.L = t.size(2);
  p.s_p = t.stride(0);
  p.s_c = t.stride(1);
  p.s_l = t.stride(2);
  return p;
}

}  // namespace gdn
