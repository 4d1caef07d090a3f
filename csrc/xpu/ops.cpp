// Torch glue of the XPU backend: outputs, argument blocks, launches, registration.
#include <torch/library.h>

#include "../call_forms.h"
#include "glue.h"

#if defined(GDN_XPU_TWIN)
#include "twin/report.h"
#endif

namespace gdn {
namespace xpu {
namespace {

using at::Tensor;

Tensor run_recurrent(const char* op, const Tensor& q_in, const Tensor& k_in, const Tensor& v_in,
                     const GateTensors& gates, Tensor& state, const SeqTensors& seq,
                     std::optional<double> scale, bool qk_l2norm) {
  const Tensor q = dense_channels(q_in), k = dense_channels(k_in), v = dense_channels(v_in);
  RecurrentArgs a = recurrent_args(op, q, k, v, gates, &state, nullptr, seq, scale, qk_l2norm);
  Tensor o = token_output(q, {q.size(0), q.size(1), a.HV, a.V}, seq.cu_seqlens);
  a.out = view_of(o, a.V);
  RowPool pool(&state, a.state);
  launch(op, q, [&](void* stream) { recurrent(a, stream); });
  pool.put_back();
  return o;
}

Tensor run_window(const char* op, const Tensor& q_in, const Tensor& k_in, const Tensor& v_in,
                  const GateTensors& gates, const Tensor* state, const WindowTensors& window,
                  const SeqTensors& seq, std::optional<double> scale, bool qk_l2norm) {
  const Tensor q = dense_channels(q_in), k = dense_channels(k_in), v = dense_channels(v_in);
  RecurrentArgs a = recurrent_args(op, q, k, v, gates, state, &window, seq, scale, qk_l2norm);
  Tensor o = token_output(q, {q.size(0), q.size(1), a.HV, a.V}, seq.cu_seqlens);
  a.out = view_of(o, a.V);
  RowPool pool(state, a.state);
  launch(op, q, [&](void* stream) { recurrent_window(a, stream); });
  pool.put_back();
  return o;
}

void window_flush_op(Tensor& state, Tensor& win_k, Tensor& win_u, Tensor& win_g, Tensor& win_fill,
                     const OptTensor& state_indices) {
  const WindowTensors window{win_k, win_u, win_g, win_fill};
  RecurrentArgs a = window_args("window_flush", &state, &window, win_fill, state_indices);
  RowPool pool(&state, a.state);
  launch("window_flush", win_fill, [&](void* stream) { window_flush(a, stream); });
  pool.put_back();
}

void window_reset_op(Tensor& win_fill, const OptTensor& state_indices) {
  RecurrentArgs a = window_args("window_reset", nullptr, nullptr, win_fill, state_indices);
  launch("window_reset", win_fill, [&](void* stream) { window_reset(a, stream); });
}

std::tuple<Tensor, Tensor> gating_op(const Tensor& a, const Tensor& b, const Tensor& A_log,
                                     const Tensor& dt_bias) {
  GatingArgs args = gating_args("gating", a, b, A_log, dt_bias);
  Tensor g = at::empty(a.sizes(), a.options().dtype(at::kFloat));
  Tensor beta = at::empty(a.sizes(), a.options().dtype(at::kFloat));
  args.g = g.data_ptr<float>();
  args.beta = beta.data_ptr<float>();
  launch("gating", a, [&](void* stream) { gating(args, stream); });
  return {g, beta};
}

Tensor short_conv_op(const Tensor& x_in, const Tensor& weight_in, const OptTensor& bias_in,
                     Tensor& conv_state, const OptTensor& state_indices,
                     const OptTensor& has_initial_state, const OptTensor& cu_seqlens,
                     const OptTensor& num_accepted, const std::string& activation,
                     bool conv_leading) {
  const Tensor x = dense_channels(x_in), weight = dense_weight(weight_in);
  const OptTensor bias = dense_channels(bias_in);
  ConvArgs a = conv_args("short_conv", x, weight, bias, conv_state,
                         {state_indices, has_initial_state, cu_seqlens, num_accepted}, activation,
                         conv_leading);
  Tensor y = token_output(x, x.sizes(), cu_seqlens);
  a.y = view_of(y, 0);
  launch("short_conv", x, [&](void* stream) { short_conv(a, stream); });
  return y;
}

struct Front {
  Tensor q, k, v, g, beta;
};

// Allocates the outputs of a conv_gating call and points its block at them.
Front front_outputs(ConvGatingArgs& f, const Tensor& x, const OptTensor& cu_seqlens) {
  const int64_t B = x.size(0), T = x.size(1);
  Front out;
  out.q = token_output(x, {B, T, f.H, f.K}, cu_seqlens);
  out.k = token_output(x, {B, T, f.H, f.K}, cu_seqlens);
  out.v = token_output(x, {B, T, f.HV, f.V}, cu_seqlens);
  const Tensor like = at::empty({0}, x.options().dtype(at::kFloat));
  out.g = token_output(like, {B, T, f.HV}, cu_seqlens);
  out.beta = token_output(like, {B, T, f.HV}, cu_seqlens);
  f.q = view_of(out.q, f.K);
  f.k = view_of(out.k, f.K);
  f.v = view_of(out.v, f.V);
  f.g = out.g.data_ptr<float>();
  f.beta = out.beta.data_ptr<float>();
  return out;
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> conv_gating_op(
    const Tensor& mixed_qkv_in, const Tensor& a, const Tensor& b, const Tensor& conv_weight_in,
    const OptTensor& conv_bias_in, const Tensor& A_log, const Tensor& dt_bias, Tensor& conv_state,
    int64_t num_k_heads, int64_t head_k_dim, const OptTensor& state_indices,
    const OptTensor& has_initial_state, const OptTensor& cu_seqlens, const OptTensor& num_accepted,
    bool qk_l2norm, const std::string& activation, bool conv_leading) {
  const Tensor mixed_qkv = dense_channels(mixed_qkv_in);
  const Tensor conv_weight = dense_weight(conv_weight_in);
  const OptTensor conv_bias = dense_channels(conv_bias_in);
  ConvGatingArgs f = conv_gating_args("conv_gating", mixed_qkv, a, b, conv_weight, conv_bias, A_log,
                                      dt_bias, conv_state, num_k_heads, head_k_dim,
                                      {state_indices, has_initial_state, cu_seqlens, num_accepted},
                                      qk_l2norm, activation, conv_leading);
  Front out = front_outputs(f, mixed_qkv, cu_seqlens);
  launch("conv_gating", mixed_qkv, [&](void* stream) { conv_gating(f, stream); });
  return {out.q, out.k, out.v, out.g, out.beta};
}

Tensor gated_rms_norm_op(const Tensor& x, const Tensor& gate, const Tensor& weight_in, double eps) {
  const Tensor weight = dense_channels(weight_in);
  NormArgs n = norm_args("gated_rms_norm", x, gate, weight, eps);
  // The kernel takes rows of x one stride apart.
  if (n.heads > 1 && n.s_x != n.heads * n.s_x_head)
    return gated_rms_norm_op(x.contiguous(), gate, weight, eps);
  Tensor y = at::empty(x.sizes(), x.options());
  n.y = y.data_ptr();
  launch("gated_rms_norm", x, [&](void* stream) { gated_rms_norm(n, stream); });
  return y;
}

// The norm takes its rows from the packed projection one stride apart.
Tensor even_tokens(const Tensor& t) {
  const bool even =
      t.dim() != 3 || t.size(0) <= 1 || t.size(1) <= 1 || t.stride(0) == t.size(1) * t.stride(1);
  return even ? t : t.contiguous();
}

// Where the layer does not fit one launch: convolution and gates, then the recurrence or a window,
// then the norm, through scratch of torch's own allocator.
Tensor run_decode(const char* op, const DecodeTensors& given, int64_t num_k_heads,
                  int64_t head_k_dim, const SeqTensors& seq, std::optional<double> scale,
                  bool qk_l2norm, double eps, const std::string& activation, bool conv_leading) {
  const Tensor x = even_tokens(dense_channels(given.projected)),
               weight = dense_weight(given.conv_weight);
  const Tensor norm_weight = dense_channels(given.norm_weight);
  const OptTensor bias = dense_channels(given.conv_bias);
  const DecodeTensors t{x,           weight,           bias,        given.A_log, given.dt_bias,
                        norm_weight, given.conv_state, given.state, given.window};
  DecodeArgs d = decode_args(op, t, num_k_heads, head_k_dim, seq, scale, qk_l2norm, eps, activation,
                             conv_leading);
  RecurrentArgs& r = d.recurrent;
  RowPool pool(given.state, r.state);
  const int64_t B = x.size(0), T = x.size(1);
  if (decode_fits(d)) {
    Tensor y = new_output(x, {B, T, r.HV * r.V});
    launch(op, x, [&](void* stream) { decode(d, y.data_ptr(), stream); });
    pool.put_back();
    return y;
  }
  // The recurrence normalises instead where a head is wider than the convolution's block.
  r.l2norm = d.front.l2norm && r.K > kConvNormMax;
  d.front.l2norm = d.front.l2norm && !r.l2norm;
  Front front = front_outputs(d.front, x, seq.cu_seqlens);
  Tensor o = token_output(x, {B, T, r.HV, r.V}, seq.cu_seqlens);
  Tensor y = new_output(x, {B, T, r.HV * r.V});
  r.q = d.front.q;
  r.k = d.front.k;
  r.v = d.front.v;
  r.out = view_of(o, r.V);
  r.gates = Gates{};
  r.gates.g = view_of(front.g, 1);
  r.gates.beta = view_of(front.beta, 1);
  NormArgs n;
  n.rows = B * T * r.HV;
  n.V = r.V;
  n.x = o.data_ptr();
  n.gate = d.z.ptr;
  n.y = y.data_ptr();
  n.dtype = r.out.dtype;
  n.gate_dtype = d.z.dtype;
  n.heads = r.HV;
  n.s_x = r.HV * r.V;
  n.s_x_head = n.s_gate_head = r.V;
  n.weight = d.norm_weight;
  n.eps = d.norm_eps;
  n.s_gate = T > 1 ? d.z.st : d.z.sb;
  launch(op, x, [&](void* stream) {
    if (r.window.fill)
      check_recurrent_window(r);
    else
      check_recurrent(r);
    check_gated_rms_norm(n);
    conv_gating(d.front, stream);
    if (r.window.fill)
      recurrent_window(r, stream);
    else
      recurrent(r, stream, /*guarded=*/true);
    gated_rms_norm(n, stream, /*quiet=*/true);
  });
  pool.put_back();
  return y;
}

#if defined(GDN_XPU_TWIN)
std::string twin_report_op() { return twin::report_json(); }
void twin_configure_op(std::string key, std::string value) { twin::configure(key, value); }
std::string twin_forms_op() { return twin::forms_json(); }
int64_t twin_host_copies_op() { return twin::host_copies(); }
std::vector<std::string> twin_sites_op() { return twin::mutation_sites(); }
#endif

}  // namespace
}  // namespace xpu
}  // namespace gdn

TORCH_LIBRARY_IMPL(gdn, GDN_XPU_KEY, m) {
  using namespace gdn::xpu;
  gdn::forms::implement_recurrent<run_recurrent>(m);
  gdn::forms::implement_window<run_window>(m);
  gdn::forms::implement_decode<run_decode>(m);
  m.impl("window_flush", &window_flush_op);
  m.impl("window_reset", &window_reset_op);
  m.impl("gating", &gating_op);
  m.impl("short_conv", &short_conv_op);
  m.impl("conv_gating", &conv_gating_op);
  m.impl("gated_rms_norm", &gated_rms_norm_op);
}

#if defined(GDN_XPU_TWIN)
// What tests and the benchmark ask the twin; no part of the product's interface.
TORCH_LIBRARY(gdn_xpu_twin, m) {
  using namespace gdn::xpu;
  m.def("report() -> str", &twin_report_op);
  m.def("configure(str key, str value) -> ()", &twin_configure_op);
  m.def("forms() -> str", &twin_forms_op);
  m.def("host_copies() -> int", &twin_host_copies_op);
  m.def("sites() -> str[]", &twin_sites_op);
}
#endif
