// Torch glue of the CUDA backend: check, allocate, launch on the current stream of the tensors'
// device (a guard takes no other kind of device, so it comes after the checks, which name what is
// elsewhere).
//
// An op that is not registered here has no CUDA kernel; the dispatcher refuses it by name.
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/library.h>

#include "../call_forms.h"
#include "../checks.h"
#include "../chunk_aten.h"
#include "kernels/kernels.h"

namespace gdn::cuda {
namespace {

using at::Tensor;

void launched(const char* op, cudaError_t error) {
  TORCH_CHECK(error == cudaSuccess, op, ": CUDA launch failed: ", cudaGetErrorString(error));
}

cudaStream_t stream() { return c10::cuda::getCurrentCUDAStream().stream(); }

Tensor run_recurrent(const char* op, const Tensor& q, const Tensor& k, const Tensor& v,
                     const GateTensors& gates, Tensor& state, const SeqTensors& seq,
                     std::optional<double> scale, bool qk_l2norm) {
  RecurrentArgs a = recurrent_args(op, q, k, v, gates, &state, nullptr, seq, scale, qk_l2norm);
  const c10::cuda::CUDAGuard guard(q.device());
  Tensor out = new_output(v, v.sizes());
  a.out = view_of(out, a.V);
  launched(op, recurrent(a, stream()));
  return out;
}

Tensor scratch(const Tensor& like, size_t bytes) {
  return at::empty({static_cast<int64_t>(bytes)}, like.options().dtype(at::kByte));
}

// `state` null: low-rank.
Tensor run_window(const char* op, const Tensor& q, const Tensor& k, const Tensor& v,
                  const GateTensors& gates, const Tensor* state, const WindowTensors& window,
                  const SeqTensors& seq, std::optional<double> scale, bool qk_l2norm) {
  RecurrentArgs a = recurrent_args(op, q, k, v, gates, state, &window, seq, scale, qk_l2norm);
  const c10::cuda::CUDAGuard guard(q.device());
  Tensor out = new_output(v, v.sizes());
  a.out = view_of(out, a.V);
  const Tensor memory = scratch(q, window_workspace(a));
  WindowCall call;
  call.workspace = memory.data_ptr();
  launched(op, recurrent_window(a, call, stream()));
  return out;
}

void window_flush_op(Tensor& state, Tensor& win_k, Tensor& win_u, Tensor& win_g, Tensor& win_fill,
                     const OptTensor& state_indices) {
  const char* op = "window_flush";
  const WindowTensors window{win_k, win_u, win_g, win_fill};
  const RecurrentArgs a = window_args(op, &state, &window, win_fill, state_indices);
  const c10::cuda::CUDAGuard guard(state.device());
  const Tensor memory = scratch(state, window_workspace(a));
  WindowCall call;
  call.flush = true;
  call.workspace = memory.data_ptr();
  launched(op, recurrent_window(a, call, stream()));
}

void window_reset_op(Tensor& win_fill, const OptTensor& state_indices) {
  const char* op = "window_reset";
  const RecurrentArgs a = window_args(op, nullptr, nullptr, win_fill, state_indices);
  const c10::cuda::CUDAGuard guard(win_fill.device());
  launched(op, window_reset(a, stream()));
}

void launch_chunk(const char* op, ChunkArgs& a, Tensor& out) {
  a.out = view_of(out, a.V);
  const Tensor memory = scratch(out, chunk_workspace(a));
  launched(op, chunk(a, memory.data_ptr(), stream()));
}

std::tuple<Tensor, Tensor> chunk_op(const Tensor& q, const Tensor& k, const Tensor& v,
                                    const Tensor& g, const Tensor& beta,
                                    const OptTensor& initial_state, const OptTensor& cu_seqlens,
                                    std::optional<double> scale, bool qk_l2norm,
                                    int64_t chunk_size) {
  if (q.scalar_type() == at::kDouble) {
    return chunk_forward_aten(q, k, v, g, beta, initial_state, cu_seqlens, scale, qk_l2norm,
                              chunk_size);
  }
  const OptTensor none;
  ChunkArgs a = chunk_args("chunk", q, k, v, g, beta,
                           {initial_state, nullptr, none, none, none, cu_seqlens, none, nullptr},
                           scale, qk_l2norm, chunk_size);
  const c10::cuda::CUDAGuard guard(q.device());
  Tensor out = new_output(v, v.sizes());
  Tensor final_state = at::empty({a.seqs.N, a.HV, a.V, a.K}, v.options().dtype(at::kFloat));
  a.write = states_of(final_state);
  launch_chunk("chunk", a, out);
  return {out, final_state};
}

Tensor run_chunk(const char* op, const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& g,
                 const Tensor& beta, const ChunkTensors& t, std::optional<double> scale,
                 bool qk_l2norm, int64_t chunk_size) {
  ChunkArgs a = chunk_args(op, q, k, v, g, beta, t, scale, qk_l2norm, chunk_size);
  const c10::cuda::CUDAGuard guard(q.device());
  Tensor out = new_output(v, v.sizes());
  launch_chunk(op, a, out);
  return out;
}

// The kernels where they can, else ATen operations.
std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> chunk_backward_op(
    const Tensor& grad_o, const OptTensor& grad_final_state, const Tensor& q, const Tensor& k,
    const Tensor& v, const Tensor& g, const Tensor& beta, const OptTensor& initial_state,
    const OptTensor& cu_seqlens, std::optional<double> scale, bool qk_l2norm, int64_t chunk_size) {
  const char* op = "chunk_backward";
  if (q.scalar_type() != at::kDouble && grad_o.scalar_type() == q.scalar_type()) {
    // Gradients of sums come expanded, states as they please.
    const auto plain = [](const OptTensor& t) {
      return t ? OptTensor(t->to(at::kFloat).contiguous()) : OptTensor();
    };
    const Tensor given = grad_o.contiguous();
    const OptTensor initial = plain(initial_state), grad_final = plain(grad_final_state);
    ChunkBackwardArgs a = chunk_backward_args(op, given, grad_final, q, k, v, g, beta, initial,
                                              cu_seqlens, scale, qk_l2norm, chunk_size);
    const c10::cuda::CUDAGuard guard(q.device());
    if (chunk_backward_can(a)) {
      const ChunkArgs& f = a.forward;
      Tensor dq = new_output(q, q.sizes()), dk = new_output(k, k.sizes());
      Tensor dv = new_output(v, v.sizes());
      Tensor dg = new_output(g, g.sizes()), dbeta = new_output(beta, beta.sizes());
      Tensor dstate = at::empty({f.seqs.N, f.HV, f.V, f.K}, v.options().dtype(at::kFloat));
      a.dq = view_of(dq, f.K);
      a.dk = view_of(dk, f.K);
      a.dv = view_of(dv, f.V);
      a.dg = view_of(dg, 1);
      a.dbeta = view_of(dbeta, 1);
      a.dstate = states_of(dstate);
      const Tensor memory = scratch(q, chunk_backward_workspace(a));
      launched(op, chunk_backward(a, memory.data_ptr(), stream()));
      return {dq, dk, dv, dg, dbeta, dstate};
    }
  }
  return chunk_backward_aten(grad_o, grad_final_state, q, k, v, g, beta, initial_state, cu_seqlens,
                             scale, qk_l2norm, chunk_size);
}

std::tuple<Tensor, Tensor> gating_op(const Tensor& a, const Tensor& b, const Tensor& A_log,
                                     const Tensor& dt_bias) {
  GatingArgs args = gating_args("gating", a, b, A_log, dt_bias);
  const c10::cuda::CUDAGuard guard(a.device());
  Tensor g = at::empty(a.sizes(), a.options().dtype(at::kFloat));
  Tensor beta = at::empty_like(g);
  args.g = g.data_ptr<float>();
  args.beta = beta.data_ptr<float>();
  launched("gating", gating(args, stream()));
  return {g, beta};
}

Tensor short_conv_op(const Tensor& x, const Tensor& weight, const OptTensor& bias,
                     Tensor& conv_state, const OptTensor& state_indices,
                     const OptTensor& has_initial_state, const OptTensor& cu_seqlens,
                     const OptTensor& num_accepted, const std::string& activation,
                     bool conv_leading) {
  ConvArgs a = conv_args("short_conv", x, weight, bias, conv_state,
                         {state_indices, has_initial_state, cu_seqlens, num_accepted}, activation,
                         conv_leading);
  const c10::cuda::CUDAGuard guard(x.device());
  Tensor y = new_output(x, x.sizes());
  a.y = view_of(y, 0);
  launched("short_conv", short_conv(a, stream()));
  return y;
}

// Outputs of the pass before the recurrence.
struct Front {
  Tensor q, k, v, g, beta;
  Front(ConvGatingArgs& f, const Tensor& like) {
    const int64_t B = f.conv.seqs.B, T = f.conv.seqs.T;
    q = at::empty({B, T, f.H, f.K}, like.options());
    k = at::empty({B, T, f.H, f.K}, like.options());
    v = at::empty({B, T, f.HV, f.V}, like.options());
    g = at::empty({B, T, f.HV}, like.options().dtype(at::kFloat));
    beta = at::empty({B, T, f.HV}, like.options().dtype(at::kFloat));
    f.q = view_of(q, f.K);
    f.k = view_of(k, f.K);
    f.v = view_of(v, f.V);
    f.g = g.data_ptr<float>();
    f.beta = beta.data_ptr<float>();
  }
};

std::tuple<Tensor, Tensor> conv1d_op(const Tensor& x, const Tensor& weight, const OptTensor& bias,
                                     const OptTensor& initial_state, const OptTensor& cu_seqlens,
                                     const std::string& activation,
                                     std::optional<int64_t> state_len) {
  ConvArgs a =
      conv1d_args("conv1d", x, weight, bias, initial_state, cu_seqlens, activation, state_len);
  const c10::cuda::CUDAGuard guard(x.device());
  const auto dtype = initial_state ? initial_state->scalar_type() : x.scalar_type();
  Tensor final_state = at::empty({a.seqs.N, a.C, a.state.L}, x.options().dtype(dtype));
  const ConvPool kept = histories_of("conv1d", "final_state", final_state);
  if (initial_state) a.state = histories_of("conv1d", "initial_state", *initial_state);
  Tensor y = new_output(x, x.sizes());
  a.y = view_of(y, 0);
  launched("conv1d", conv1d(a, kept, stream()));
  return {y, final_state};
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> conv_gating_op(
    const Tensor& mixed_qkv, const Tensor& a, const Tensor& b, const Tensor& conv_weight,
    const OptTensor& conv_bias, const Tensor& A_log, const Tensor& dt_bias, Tensor& conv_state,
    int64_t num_k_heads, int64_t head_k_dim, const OptTensor& state_indices,
    const OptTensor& has_initial_state, const OptTensor& cu_seqlens, const OptTensor& num_accepted,
    bool qk_l2norm, const std::string& activation, bool conv_leading) {
  ConvGatingArgs f = conv_gating_args("conv_gating", mixed_qkv, a, b, conv_weight, conv_bias, A_log,
                                      dt_bias, conv_state, num_k_heads, head_k_dim,
                                      {state_indices, has_initial_state, cu_seqlens, num_accepted},
                                      qk_l2norm, activation, conv_leading);
  const c10::cuda::CUDAGuard guard(mixed_qkv.device());
  const Front out(f, mixed_qkv);
  launched("conv_gating", conv_gating(f, stream()));
  return {out.q, out.k, out.v, out.g, out.beta};
}

Tensor gated_rms_norm_op(const Tensor& x, const Tensor& gate, const Tensor& weight, double eps) {
  NormArgs a = norm_args("gated_rms_norm", x, gate, weight, eps);
  const c10::cuda::CUDAGuard guard(x.device());
  Tensor y = new_output(x, x.sizes());
  a.y = y.data_ptr();
  launched("gated_rms_norm", gated_rms_norm(a, stream()));
  return y;
}

// conv + gates, the recurrence, the gated norm: three launches that overlap where the device has
// programmatic dependent launch. The value heads of a key head read the same conv columns of q and
// k, so the pass that rolls those columns has to be a launch of its own. A window's kernels may
// take the norm on.
Tensor run_decode(const char* op, const DecodeTensors& t, int64_t num_k_heads, int64_t head_k_dim,
                  const SeqTensors& seq, std::optional<double> scale, bool qk_l2norm, double eps,
                  const std::string& activation, bool conv_leading) {
  DecodeArgs d = decode_args(op, t, num_k_heads, head_k_dim, seq, scale, qk_l2norm, eps, activation,
                             conv_leading);
  const c10::cuda::CUDAGuard guard(t.projected.device());
  RecurrentArgs& r = d.recurrent;
  // The recurrence normalises q and k in float32, from what the model would round there.
  d.front.l2norm = false;
  const int64_t B = r.seqs.B, T = r.seqs.T;
  const cudaStream_t s = stream();
  Front front(d.front, t.projected);
  r.q = d.front.q;
  r.k = d.front.k;
  r.v = d.front.v;
  r.gates = Gates();
  r.gates.g = view_of(front.g, 1);
  r.gates.beta = view_of(front.beta, 1);
  launched(op, conv_gating(d.front, s));
  Tensor o = at::empty({B, T, r.HV, r.V}, t.projected.options());
  r.out = view_of(o, r.V);
  Tensor y = at::empty({B, T, r.HV * r.V}, t.projected.options());
  if (r.window.fill) {
    const Tensor memory = scratch(t.projected, window_workspace(r));
    WindowCall call;
    call.workspace = memory.data_ptr();
    call.early = true;
    call.norm.on = window_takes_norm(r);
    call.norm.z = d.z;
    call.norm.y = view_of(y, r.V);
    call.norm.weight = d.norm_weight;
    call.norm.eps = d.norm_eps;
    launched(op, recurrent_window(r, call, s));
    if (call.norm.on) return y;
  } else {
    launched(op, recurrent(r, s, /*early=*/true));
  }
  NormArgs n;
  n.rows = B * T * r.HV;
  n.V = r.V;
  n.x = o.data_ptr();
  n.y = y.data_ptr();
  n.dtype = n.gate_dtype = r.out.dtype;
  n.s_x = r.V;
  n.weight = d.norm_weight;
  n.eps = d.norm_eps;
  launched(op, gated_norm_heads(n, d.z, B, T, r.HV, s));
  return y;
}

}  // namespace

TORCH_LIBRARY_IMPL(gdn, CUDA, m) {
  forms::implement_recurrent<run_recurrent>(m);
  forms::implement_window<run_window>(m);
  forms::implement_chunk_pools<run_chunk>(m);
  forms::implement_decode<run_decode>(m);
  m.impl("window_flush", &window_flush_op);
  m.impl("window_reset", &window_reset_op);
  m.impl("chunk", &chunk_op);
  m.impl("chunk_backward", &chunk_backward_op);
  m.impl("gating", &gating_op);
  m.impl("short_conv", &short_conv_op);
  m.impl("conv1d", &conv1d_op);
  m.impl("conv_gating", &conv_gating_op);
  m.impl("gated_rms_norm", &gated_rms_norm_op);
}

}  // namespace gdn::cuda
