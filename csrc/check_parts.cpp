#include "check_parts.h"

#include <cmath>

#include <ATen/ATen.h>

namespace gdn {

void check_given(const char* op, const char* name, const at::Tensor& t) {
  TORCH_CHECK(t.defined(), op, ": ", name, ": expected a tensor, got None");
}

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

float scale_of(std::optional<double> scale, int64_t K) {
  return static_cast<float>(scale ? *scale : 1.0 / std::sqrt(static_cast<double>(K)));
}

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

namespace {

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

}  // namespace

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

Sequences sequences_of(const char* op, int64_t B, int64_t T, int64_t P, const SeqTensors& t,
                       const at::Tensor& like, const char* rows) {
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

StatePool state_pool(const char* op, const char* name, const at::Tensor& t, int64_t HV, int64_t V,
                     int64_t K, bool read_only) {
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
