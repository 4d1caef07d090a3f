// Torch glue of the CPU backend: check, allocate, call the kernel of the active instruction set.
#include <ATen/EmptyTensor.h>
#include <ATen/Parallel.h>
#include <torch/library.h>

#include <cstring>

#include "../call_forms.h"
#include "../checks.h"
#include "../chunk_aten.h"
#include "../index.h"
#include "../linear_aten.h"
#include "table.h"

namespace gdn::cpu {
namespace {

using at::Tensor;

const Parallel& threads() {
  thread_local Parallel p;
  p.threads = at::in_parallel_region() ? 1 : at::get_num_threads();
  p.run = [](int64_t n, void (*body)(void*, int64_t, int64_t), void* data) {
    at::parallel_for(0, n, 1, [&](int64_t begin, int64_t end) { body(data, begin, end); });
  };
  return p;
}

// at::empty without its trip through the dispatcher, half a microsecond a tensor.
Tensor fresh(at::IntArrayRef sizes, at::ScalarType dtype) {
  return at::detail::empty_cpu(sizes, dtype);
}
Tensor fresh(at::IntArrayRef sizes, const Tensor& like) { return fresh(sizes, like.scalar_type()); }

// Products of a 16-bit state were nowhere measured to pay (docs/cpu.md), so `auto` is exact.
bool fast_products() { return precision() == Precision::fast; }
// Products of a chunk from operands rounded to bf16 paid in AMX tiles, and as dot products on AMD's
// processors; on Intel's the dot products take longer than f32 ones (docs/chunk.md).
bool fast_chunks() {
#if defined(__x86_64__)
  static const bool pays =
      std::strcmp(kernels().name, "avx512bf16") != 0 || __builtin_cpu_is("amd");
#else
  constexpr bool pays = true;
#endif
  const Precision p = precision();
  return p == Precision::fast || (p == Precision::automatic && pays);
}

Tensor run_recurrent(const char* op, const Tensor& q, const Tensor& k, const Tensor& v,
                     const GateTensors& gates, Tensor& state, const SeqTensors& seq,
                     std::optional<double> scale, bool qk_l2norm) {
  RecurrentArgs a = recurrent_args(op, q, k, v, gates, &state, nullptr, seq, scale, qk_l2norm);
  check_values(op, a.seqs);
  Tensor out = fresh(v.sizes(), v);
  a.out = view_of(out, a.V);
  a.fast = fast_products();
  kernels().recurrent(a, threads());
  return out;
}

std::tuple<Tensor, Tensor> gating(const Tensor& a, const Tensor& b, const Tensor& A_log,
                                  const Tensor& dt_bias) {
  GatingArgs x = gating_args("gating", a, b, A_log, dt_bias);
  Tensor g = fresh(a.sizes(), at::kFloat);
  Tensor beta = fresh(a.sizes(), at::kFloat);
  x.g = g.data_ptr<float>();
  x.beta = beta.data_ptr<float>();
  kernels().gating(x, threads());
  return {g, beta};
}

Tensor short_conv(const Tensor& x, const Tensor& weight, const OptTensor& bias, Tensor& conv_state,
                  const OptTensor& state_indices, const OptTensor& has_initial_state,
                  const OptTensor& cu_seqlens, const OptTensor& num_accepted,
                  const std::string& activation, bool conv_leading) {
  ConvArgs a = conv_args("short_conv", x, weight, bias, conv_state,
                         {state_indices, has_initial_state, cu_seqlens, num_accepted}, activation,
                         conv_leading);
  check_values("short_conv", a.seqs);
  check_conv_values("short_conv", a);
  Tensor y = fresh(x.sizes(), x);
  a.y = view_of(y, 0);
  kernels().short_conv(a, threads());
  return y;
}

std::tuple<Tensor, Tensor> conv1d(const Tensor& x, const Tensor& weight, const OptTensor& bias,
                                  const OptTensor& initial_state, const OptTensor& cu_seqlens,
                                  const std::string& activation, std::optional<int64_t> state_len) {
  ConvArgs a =
      conv1d_args("conv1d", x, weight, bias, initial_state, cu_seqlens, activation, state_len);
  check_values("conv1d", a.seqs);
  // The final state is a pool of its own, one row a sequence, that starts as the initial state.
  const auto dtype = initial_state ? initial_state->scalar_type() : x.scalar_type();
  Tensor final_state = fresh({a.seqs.N, a.C, a.state.L}, dtype);
  if (initial_state) {
    final_state.copy_(*initial_state);
  } else {
    final_state.zero_();
  }
  a.state = histories_of("conv1d", "final_state", final_state);
  Tensor y = fresh(x.sizes(), x);
  a.y = view_of(y, 0);
  kernels().short_conv(a, threads());
  return {y, final_state};
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> conv_gating(
    const Tensor& mixed_qkv, const Tensor& a, const Tensor& b, const Tensor& conv_weight,
    const OptTensor& conv_bias, const Tensor& A_log, const Tensor& dt_bias, Tensor& conv_state,
    int64_t num_k_heads, int64_t head_k_dim, const OptTensor& state_indices,
    const OptTensor& has_initial_state, const OptTensor& cu_seqlens, const OptTensor& num_accepted,
    bool qk_l2norm, const std::string& activation, bool conv_leading) {
  ConvGatingArgs f = conv_gating_args("conv_gating", mixed_qkv, a, b, conv_weight, conv_bias, A_log,
                                      dt_bias, conv_state, num_k_heads, head_k_dim,
                                      {state_indices, has_initial_state, cu_seqlens, num_accepted},
                                      qk_l2norm, activation, conv_leading);
  check_values("conv_gating", f.conv.seqs);
  check_conv_values("conv_gating", f.conv);
  const int64_t B = mixed_qkv.size(0), T = mixed_qkv.size(1);
  Tensor q = fresh({B, T, f.H, f.K}, mixed_qkv), k = fresh({B, T, f.H, f.K}, mixed_qkv);
  Tensor v = fresh({B, T, f.HV, f.V}, mixed_qkv);
  Tensor g = fresh({B, T, f.HV}, at::kFloat);
  Tensor beta = fresh({B, T, f.HV}, at::kFloat);
  f.q = view_of(q, f.K);
  f.k = view_of(k, f.K);
  f.v = view_of(v, f.V);
  f.g = g.data_ptr<float>();
  f.beta = beta.data_ptr<float>();
  kernels().conv_gating(f, threads());
  return {q, k, v, g, beta};
}

Tensor gated_rms_norm(const Tensor& x, const Tensor& gate, const Tensor& weight, double eps) {
  NormArgs n = norm_args("gated_rms_norm", x, gate, weight, eps);
  Tensor y = fresh(x.sizes(), x);
  n.y = y.data_ptr();
  kernels().gated_rms_norm(n, threads());
  return y;
}

Tensor linear(const Tensor& x, const Tensor& weight) {
  bool plain;
  LinearArgs a = linear_args("linear", x, weight, &plain);
  if (!plain || a.M > kernels().linear_limit[static_cast<int>(a.dtype)]) {
    return torch_linear(x, weight);
  }
  at::DimVector sizes(x.sizes());
  sizes.back() = a.N;
  Tensor y = fresh(sizes, x);
  a.y = y.data_ptr();
  kernels().linear(a, threads());
  return y;
}

void sweep(Tensor& x) {
  TORCH_CHECK(x.is_contiguous(), "sweep: x: expected a contiguous tensor, got strides ",
              x.strides());
  // Volatile, so that the compiler cannot know that writing x ^ zero back changes nothing.
  static volatile uint32_t zero = 0;
  const int64_t bytes = static_cast<int64_t>(x.nbytes());
  kernels().sweep(static_cast<char*>(x.data_ptr()), bytes, zero, threads());
}

Tensor run_window(const char* op, const Tensor& q, const Tensor& k, const Tensor& v,
                  const GateTensors& gates, const Tensor* state, const WindowTensors& window,
                  const SeqTensors& seq, std::optional<double> scale, bool qk_l2norm) {
  RecurrentArgs a = recurrent_args(op, q, k, v, gates, state, &window, seq, scale, qk_l2norm);
  check_window_values(op, a.seqs, a.window, state != nullptr, state ? a.window.R : INT64_MAX);
  Tensor out = fresh(v.sizes(), v);
  a.out = view_of(out, a.V);
  kernels().recurrent_window(a, threads());
  return out;
}

void empty_windows(const RecurrentArgs& a) {
  for (int64_t n = 0; n < a.seqs.N; ++n) {
    const Sequence seq = sequence_of(a.seqs, n);
    if (seq.row >= 0) a.window.fill[seq.row * a.window.s_fill] = 0;
  }
}

void window_flush(Tensor& state, Tensor& win_k, Tensor& win_u, Tensor& win_g, Tensor& win_fill,
                  const OptTensor& state_indices) {
  const WindowTensors window{win_k, win_u, win_g, win_fill};
  const RecurrentArgs a = window_args("window_flush", &state, &window, win_fill, state_indices);
  check_window_values("window_flush", a.seqs, a.window, true);
  kernels().window_flush(a, threads());
  empty_windows(a);
}

void window_reset(Tensor& win_fill, const OptTensor& state_indices) {
  const RecurrentArgs a = window_args("window_reset", nullptr, nullptr, win_fill, state_indices);
  check_values("window_reset", a.seqs);
  empty_windows(a);
}

Tensor run_decode(const char* op, const DecodeTensors& t, int64_t num_k_heads, int64_t head_k_dim,
                  const SeqTensors& seq, std::optional<double> scale, bool qk_l2norm, double eps,
                  const std::string& activation, bool conv_leading) {
  DecodeArgs d = decode_args(op, t, num_k_heads, head_k_dim, seq, scale, qk_l2norm, eps, activation,
                             conv_leading);
  RecurrentArgs& r = d.recurrent;
  if (t.window) {
    check_window_values(op, r.seqs, r.window, t.state != nullptr,
                        t.state ? std::min<int64_t>(r.window.R, kDecodeTokens) : kDecodeTokens);
  } else {
    check_values(op, r.seqs, kDecodeTokens);
  }
  check_conv_values(op, d.front.conv);
  Tensor y = fresh({t.projected.size(0), t.projected.size(1), r.HV * r.V}, t.projected);
  r.out = view_of(y, r.V);
  if (t.window) {
    kernels().decode_window(d, threads());
  } else {
    r.fast = fast_products();
    kernels().decode(d, threads());
  }
  return y;
}

std::tuple<Tensor, Tensor> chunk(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& g,
                                 const Tensor& beta, const OptTensor& initial_state,
                                 const OptTensor& cu_seqlens, std::optional<double> scale,
                                 bool qk_l2norm, int64_t chunk_size) {
  if (q.scalar_type() == at::kDouble) {
    return chunk_forward_aten(q, k, v, g, beta, initial_state, cu_seqlens, scale, qk_l2norm,
                              chunk_size);
  }
  const OptTensor none;
  ChunkArgs a = chunk_args("chunk", q, k, v, g, beta,
                           {initial_state, nullptr, none, none, none, cu_seqlens, none, nullptr},
                           scale, qk_l2norm, chunk_size);
  check_values("chunk", a.seqs);
  Tensor out = fresh(v.sizes(), v);
  Tensor final_state = fresh({a.seqs.N, a.HV, a.V, a.K}, at::kFloat);
  a.out = view_of(out, a.V);
  a.write = states_of(final_state);
  a.fast = fast_chunks();
  kernels().chunk(a, threads());
  return {out, final_state};
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> chunk_backward(
    const Tensor& grad_o, const OptTensor& grad_final_state, const Tensor& q, const Tensor& k,
    const Tensor& v, const Tensor& g, const Tensor& beta, const OptTensor& initial_state,
    const OptTensor& cu_seqlens, std::optional<double> scale, bool qk_l2norm, int64_t chunk_size) {
  if (q.scalar_type() == at::kDouble) {
    return chunk_backward_aten(grad_o, grad_final_state, q, k, v, g, beta, initial_state,
                               cu_seqlens, scale, qk_l2norm, chunk_size);
  }
  ChunkBackwardArgs a =
      chunk_backward_args("chunk_backward", grad_o, grad_final_state, q, k, v, g, beta,
                          initial_state, cu_seqlens, scale, qk_l2norm, chunk_size);
  const ChunkArgs& x = a.forward;
  check_values("chunk_backward", x.seqs);
  Tensor dq = fresh(q.sizes(), q), dk = fresh(k.sizes(), k), dv = fresh(v.sizes(), v);
  Tensor dg = fresh(g.sizes(), g), dbeta = fresh(beta.sizes(), beta);
  Tensor dstate = fresh({x.seqs.N, x.HV, x.V, x.K}, at::kFloat);
  a.dq = view_of(dq, x.K);
  a.dk = view_of(dk, x.K);
  a.dv = view_of(dv, x.V);
  a.dg = view_of(dg, 1);
  a.dbeta = view_of(dbeta, 1);
  a.dstate = states_of(dstate);
  // Not the threads' own scratch, which they keep: this much depends on T.
  Tensor work = fresh({kernels().chunk_backward(a, threads())}, at::kFloat);
  a.work = work.data_ptr<float>();
  kernels().chunk_backward(a, threads());
  return {dq, dk, dv, dg, dbeta, dstate};
}

Tensor run_chunk(const char* op, const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& g,
                 const Tensor& beta, const ChunkTensors& t, std::optional<double> scale,
                 bool qk_l2norm, int64_t chunk_size) {
  ChunkArgs a = chunk_args(op, q, k, v, g, beta, t, scale, qk_l2norm, chunk_size);
  if (t.window) {
    check_window_values(op, a.seqs, a.window, false);
  } else {
    check_values(op, a.seqs, INT64_MAX, "read_indices");
    check_chunk_values(op, a);
  }
  Tensor out = fresh(v.sizes(), v);
  a.out = view_of(out, a.V);
  a.fast = fast_chunks();
  (t.window ? kernels().chunk_lowrank : kernels().chunk)(a, threads());
  return out;
}

void set_precision_op(const std::string& mode) {
  TORCH_CHECK(mode == "exact" || mode == "fast" || mode == "auto",
              "set_precision: expected 'exact', 'fast' or 'auto', got '", mode, "'");
  set_precision(mode == "exact"  ? Precision::exact
                : mode == "fast" ? Precision::fast
                                 : Precision::automatic);
}
std::string get_precision_op() {
  const Precision p = precision();
  return p == Precision::exact ? "exact" : p == Precision::fast ? "fast" : "auto";
}
std::string cpu_isa() { return kernels().name; }
std::vector<std::string> cpu_isas() {
  std::vector<std::string> names;
  for (const Kernels* k : compiled()) {
    if (k->supported()) names.emplace_back(k->name);
  }
  return names;
}

}  // namespace

TORCH_LIBRARY_IMPL(gdn, CPU, m) {
  forms::implement_recurrent<run_recurrent>(m);
  forms::implement_window<run_window>(m);
  forms::implement_chunk_pools<run_chunk>(m);
  forms::implement_decode<run_decode>(m);
  m.impl("gating", &gating);
  m.impl("short_conv", &short_conv);
  m.impl("conv1d", &conv1d);
  m.impl("conv_gating", &conv_gating);
  m.impl("gated_rms_norm", &gated_rms_norm);
  m.impl("linear", &linear);
  m.impl("sweep", &sweep);
  m.impl("window_flush", &window_flush);
  m.impl("window_reset", &window_reset);
  m.impl("chunk", &chunk);
  m.impl("chunk_backward", &chunk_backward);
}

// These take no tensor, so no key selects them.
TORCH_LIBRARY_IMPL(gdn, CompositeExplicitAutograd, m) {
  m.impl("set_precision", &set_precision_op);
  m.impl("get_precision", &get_precision_op);
  m.impl("cpu_isa", &cpu_isa);
  m.impl("cpu_isas", &cpu_isas);
}

}  // namespace gdn::cpu
