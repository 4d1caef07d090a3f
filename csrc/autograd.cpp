// Gradients of the functional ops, for every backend: an autograd node at the Autograd key whose
// forward calls the op below it. The backward ops here are compositions of ATen calls, so they run
// on any device, trace under torch.compile and can be differentiated again; that of `chunk` is an
// op of its own with kernels (csrc/<backend>/ops.cpp), differentiable once.
//
// No node materialises gradients: where the loss does not use an output, its gradient stays absent
// instead of becoming a plain tensor of zeros, which a sharded (DTensor) call could not take.
#include <algorithm>
#include <initializer_list>
#include <optional>
#include <string>

#include <ATen/ATen.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include "checks.h"
#include "linear_aten.h"
#include "typed_op.h"

namespace gdn {
namespace {

using at::Tensor;
using OptTensor = std::optional<Tensor>;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// Saved tensors and gradients are undefined where absent; arguments of ops are optional.
OptTensor optional(const Tensor& t) { return t.defined() ? OptTensor(t) : std::nullopt; }
Tensor undefined_or(const OptTensor& t) { return t.value_or(Tensor()); }
// A node asks its tensors for their device before any op could refuse an absent one.
void check_all_given(const char* op, std::initializer_list<Named> tensors) {
  for (const Named& n : tensors) check_given(op, n.name, *n.t);
}
bool all_absent(const variable_list& grads) {
  return std::none_of(grads.begin(), grads.end(), [](const Tensor& t) { return t.defined(); });
}

// The backward ops of this file are compositions of ATen calls. With create_graph they run above
// autograd, which differentiates each of those calls. Otherwise they run below it: there a tensor
// subclass sees the backward op itself, for which DTensor has a sharding rule, and not its parts.
struct Whole {
  std::optional<at::AutoDispatchBelowADInplaceOrView> below;
  Whole() {
    if (!at::GradMode::is_enabled()) below.emplace();
  }
};

// --- gating: dg/da = -exp(A_log) * sigmoid(a + dt_bias), dg/dA_log = g, dbeta/db = beta (1 - beta)

using GatingSchema = std::tuple<Tensor, Tensor>(const Tensor&, const Tensor&, const Tensor&,
                                                const Tensor&);
using GatingBackwardSchema = std::tuple<Tensor, Tensor, Tensor, Tensor>(
    const Tensor&, const Tensor&, const Tensor&, const Tensor&, const Tensor&, const Tensor&);

std::tuple<Tensor, Tensor, Tensor, Tensor> gating_backward(const Tensor& grad_g,
                                                           const Tensor& grad_beta, const Tensor& a,
                                                           const Tensor& b, const Tensor& A_log,
                                                           const Tensor& dt_bias) {
  const Tensor x = a.to(at::kFloat) + dt_bias.to(at::kFloat);
  const Tensor rate = A_log.to(at::kFloat).exp().neg();
  const Tensor da = grad_g * rate * x.sigmoid();
  const Tensor beta = b.to(at::kFloat).sigmoid();
  const Tensor db = grad_beta * beta * (1 - beta);
  const Tensor dA = grad_g * rate * at::softplus(x);
  const int64_t HV = a.size(-1);
  return {da.to(a.scalar_type()), db.to(b.scalar_type()),
          dA.reshape({-1, HV}).sum(0).to(A_log.scalar_type()),
          da.reshape({-1, HV}).sum(0).to(dt_bias.scalar_type())};
}

struct Gating : torch::autograd::Function<Gating> {
  static variable_list forward(AutogradContext* ctx, const Tensor& a, const Tensor& b,
                               const Tensor& A_log, const Tensor& dt_bias) {
    at::AutoDispatchBelowADInplaceOrView below;
    static auto call = typed_op<GatingSchema>("gdn::gating");
    ctx->save_for_backward({a, b, A_log, dt_bias});
    ctx->set_materialize_grads(false);
    auto [g, beta] = call.call(a, b, A_log, dt_bias);
    return {g, beta};
  }
  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    if (all_absent(grads)) return variable_list(4);
    const Whole whole;
    static auto call = typed_op<GatingBackwardSchema>("gdn::gating_backward");
    const auto s = ctx->get_saved_variables();
    const auto zeros = [&] { return at::zeros_like(s[0], s[0].options().dtype(at::kFloat)); };
    const Tensor grad_g = grads[0].defined() ? grads[0] : zeros();
    const Tensor grad_beta = grads[1].defined() ? grads[1] : zeros();
    auto [da, db, dA, ddt] = call.call(grad_g, grad_beta, s[0], s[1], s[2], s[3]);
    return {da, db, dA, ddt};
  }
};

std::tuple<Tensor, Tensor> gating(const Tensor& a, const Tensor& b, const Tensor& A_log,
                                  const Tensor& dt_bias) {
  check_all_given("gating", {{"a", &a}, {"b", &b}, {"A_log", &A_log}, {"dt_bias", &dt_bias}});
  const auto out = Gating::apply(a, b, A_log, dt_bias);
  return {out[0], out[1]};
}

// --- gated norm

using NormSchema = Tensor(const Tensor&, const Tensor&, const Tensor&, double);
using NormBackwardSchema = std::tuple<Tensor, Tensor, Tensor>(const Tensor&, const Tensor&,
                                                              const Tensor&, const Tensor&, double);

std::tuple<Tensor, Tensor, Tensor> gated_rms_norm_backward(const Tensor& grad_y, const Tensor& x,
                                                           const Tensor& gate, const Tensor& weight,
                                                           double eps) {
  const Tensor xf = x.to(at::kFloat), zf = gate.to(at::kFloat), wf = weight.to(at::kFloat);
  const Tensor dy = grad_y.to(at::kFloat);
  const Tensor r = at::rsqrt(xf.square().mean(-1, true) + eps);
  const Tensor normed = xf * r;
  const Tensor s = zf.sigmoid();
  const Tensor dweighted = dy * zf * s;
  const Tensor dgate = dy * wf * normed * s * (1 + zf * (1 - s));
  const Tensor dnormed = dweighted * wf;
  const Tensor dx = r * (dnormed - normed * (dnormed * normed).mean(-1, true));
  const Tensor dweight = (dweighted * normed).reshape({-1, x.size(-1)}).sum(0);
  return {dx.to(x.scalar_type()), dgate.to(gate.scalar_type()), dweight.to(weight.scalar_type())};
}

struct GatedRmsNorm : torch::autograd::Function<GatedRmsNorm> {
  static Tensor forward(AutogradContext* ctx, const Tensor& x, const Tensor& gate,
                        const Tensor& weight, double eps) {
    at::AutoDispatchBelowADInplaceOrView below;
    static auto call = typed_op<NormSchema>("gdn::gated_rms_norm");
    ctx->save_for_backward({x, gate, weight});
    ctx->set_materialize_grads(false);
    ctx->saved_data["eps"] = eps;
    return call.call(x, gate, weight, eps);
  }
  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    if (all_absent(grads)) return variable_list(4);
    const Whole whole;
    static auto call = typed_op<NormBackwardSchema>("gdn::gated_rms_norm_backward");
    const auto s = ctx->get_saved_variables();
    auto [dx, dgate, dweight] =
        call.call(grads[0], s[0], s[1], s[2], ctx->saved_data["eps"].toDouble());
    return {dx, dgate, dweight, Tensor()};
  }
};

Tensor gated_rms_norm(const Tensor& x, const Tensor& gate, const Tensor& weight, double eps) {
  check_all_given("gated_rms_norm", {{"x", &x}, {"gate", &gate}, {"weight", &weight}});
  return GatedRmsNorm::apply(x, gate, weight, eps);
}

// --- convolution
//
// All sequences lie in one row of M = B*T tokens; `seq` and `position` say where a token stands.
// The entry `s` steps before a token is another token of its sequence, or a column of the initial
// state.

using ConvSchema = std::tuple<Tensor, Tensor>(const Tensor&, const Tensor&, const OptTensor&,
                                              const OptTensor&, const OptTensor&,
                                              const std::string&, std::optional<c10::SymInt>);
using ConvBackwardSchema = std::tuple<Tensor, Tensor, Tensor, Tensor>(
    const Tensor&, const OptTensor&, const Tensor&, const Tensor&, const OptTensor&,
    const OptTensor&, const OptTensor&, const std::string&, c10::SymInt);

std::tuple<Tensor, Tensor, Tensor, Tensor> conv1d_backward(
    const Tensor& grad_y, const OptTensor& grad_final, const Tensor& x, const Tensor& weight,
    const OptTensor& bias, const OptTensor& initial, const OptTensor& cu_seqlens,
    const std::string& activation, int64_t state_len) {
  const int64_t B = x.size(0), T = x.size(1), C = x.size(2), M = B * T, W = weight.size(1);
  // Autograd brings what the forward has checked; offsets themselves cannot be read while traced.
  TORCH_CHECK(
      !cu_seqlens || (cu_seqlens->dim() == 1 && cu_seqlens->size(0) >= 1 && B == 1),
      "conv1d_backward: cu_seqlens: expected [N+1] beside a packed batch, B = 1, got shape ",
      cu_seqlens ? cu_seqlens->sizes() : at::IntArrayRef(), " and B = ", B);
  const auto ints = x.options().dtype(at::kLong).requires_grad(false);
  const Tensor cu = cu_seqlens ? cu_seqlens->to(at::kLong) : at::arange(B + 1, ints) * T;
  const int64_t N = cu.size(0) - 1;
  const Tensor token = at::arange(M, ints);
  // Empty sequences share their start with the next one: the right end of the equal run is meant.
  const Tensor seq = at::searchsorted(cu, token, /*out_int32=*/false, /*right=*/true) - 1;
  const Tensor position = token - cu.index_select(0, seq);
  const Tensor xf = x.reshape({M, C}).to(at::kFloat), wf = weight.to(at::kFloat);
  const Tensor none = at::zeros({N, C, state_len}, xf.options());
  const Tensor init = (initial ? initial->to(at::kFloat) : none).transpose(1, 2).reshape({-1, C});
  // Row of [tokens; initial columns] that stands `s` before each token; a row of zeros otherwise.
  const Tensor rows = at::cat({xf, init, at::zeros({1, C}, xf.options())});
  const int64_t zero_row = M + N * state_len;
  const auto row_before = [&](int64_t s) {
    const Tensor column = state_len + position - s;
    const Tensor from_state =
        at::where(column >= 0, M + seq * state_len + column, at::full_like(column, zero_row));
    return at::where(position >= s, token - s, from_state);
  };
  Tensor pre = at::zeros({M, C}, xf.options());
  for (int64_t s = 0; s < W; ++s) {
    pre = pre + rows.index_select(0, row_before(s)) * wf.select(1, W - 1 - s);
  }
  if (bias) pre = pre + bias->to(at::kFloat);
  Tensor d = grad_y.reshape({M, C}).to(at::kFloat);
  if (activation == "silu") {
    const Tensor sig = pre.sigmoid();
    d = d * sig * (1 + pre * (1 - sig));
  }
  Tensor drows = at::zeros_like(rows);
  variable_list dtaps;
  for (int64_t s = W - 1; s >= 0; --s) {
    const Tensor row = row_before(s);
    drows = drows.index_add(0, row, d * wf.select(1, W - 1 - s));
    dtaps.push_back((d * rows.index_select(0, row)).sum(0));
  }
  if (grad_final && state_len > 0) {
    // final column w of sequence n is entry length + w of [its initial columns; its tokens].
    const Tensor w = at::arange(state_len, ints);
    const Tensor start = cu.slice(0, 0, N), length = cu.slice(0, 1) - start;
    const Tensor entry = length.unsqueeze(1) + w;
    const Tensor n = at::arange(N, ints).unsqueeze(1);
    const Tensor row = at::where(entry >= state_len, start.unsqueeze(1) + entry - state_len,
                                 M + n * state_len + entry);
    drows = drows.index_add(0, row.reshape({-1}),
                            grad_final->to(at::kFloat).transpose(1, 2).reshape({-1, C}));
  }
  const Tensor dx = drows.slice(0, 0, M).reshape({B, T, C}).to(x.scalar_type());
  const Tensor dinit = drows.slice(0, M, zero_row).reshape({N, state_len, C}).transpose(1, 2);
  return {dx, at::stack(dtaps, 1).to(weight.scalar_type()),
          d.sum(0).to(bias ? bias->scalar_type() : weight.scalar_type()),
          dinit.to(initial ? initial->scalar_type() : x.scalar_type())};
}

struct Conv1d : torch::autograd::Function<Conv1d> {
  static variable_list forward(AutogradContext* ctx, const Tensor& x, const Tensor& weight,
                               const OptTensor& bias, const OptTensor& initial, const OptTensor& cu,
                               const std::string& activation,
                               std::optional<c10::SymInt> state_len) {
    at::AutoDispatchBelowADInplaceOrView below;
    static auto call = typed_op<ConvSchema>("gdn::conv1d");
    ctx->save_for_backward(
        {x, weight, undefined_or(bias), undefined_or(initial), undefined_or(cu)});
    ctx->saved_data["activation"] = activation;
    ctx->set_materialize_grads(false);
    auto [y, final_state] = call.call(x, weight, bias, initial, cu, activation, state_len);
    ctx->saved_data["state_len"] = final_state.sym_size(2);
    return {y, final_state};
  }
  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    if (all_absent(grads)) return variable_list(7);
    const Whole whole;
    static auto call = typed_op<ConvBackwardSchema>("gdn::conv1d_backward");
    const auto s = ctx->get_saved_variables();
    const Tensor grad_y = grads[0].defined() ? grads[0] : at::zeros_like(s[0]);
    auto [dx, dw, db, di] = call.call(
        grad_y, optional(grads[1]), s[0], s[1], optional(s[2]), optional(s[3]), optional(s[4]),
        ctx->saved_data["activation"].toStringRef(), ctx->saved_data["state_len"].toSymInt());
    return {
        dx,       dw,      s[2].defined() ? db : Tensor(), s[3].defined() ? di : Tensor(), Tensor(),
        Tensor(), Tensor()};
  }
};

std::tuple<Tensor, Tensor> conv1d(const Tensor& x, const Tensor& weight, const OptTensor& bias,
                                  const OptTensor& initial, const OptTensor& cu,
                                  const std::string& activation,
                                  std::optional<c10::SymInt> state_len) {
  check_all_given("conv1d", {{"x", &x}, {"weight", &weight}});
  const auto out = Conv1d::apply(x, weight, bias, initial, cu, activation, state_len);
  return {out[0], out[1]};
}

// --- chunk

using ChunkSchema = std::tuple<Tensor, Tensor>(const Tensor&, const Tensor&, const Tensor&,
                                               const Tensor&, const Tensor&, const OptTensor&,
                                               const OptTensor&, std::optional<double>, bool,
                                               c10::SymInt);
using ChunkBackwardSchema = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>(
    const Tensor&, const OptTensor&, const Tensor&, const Tensor&, const Tensor&, const Tensor&,
    const Tensor&, const OptTensor&, const OptTensor&, std::optional<double>, bool, c10::SymInt);

// The backward as a node of its own, so that what create_graph leaves behind says, when it is
// differentiated, that it cannot be; torch would take its gradients for zero.
struct ChunkBackward : torch::autograd::Function<ChunkBackward> {
  static variable_list forward(AutogradContext*, const Tensor& grad_o,
                               const OptTensor& grad_final_state, const Tensor& q, const Tensor& k,
                               const Tensor& v, const Tensor& g, const Tensor& beta,
                               const OptTensor& initial_state, const OptTensor& cu_seqlens,
                               std::optional<double> scale, bool qk_l2norm,
                               c10::SymInt chunk_size) {
    at::AutoDispatchBelowADInplaceOrView below;
    static auto call = typed_op<ChunkBackwardSchema>("gdn::chunk_backward");
    auto [dq, dk, dv, dg, dbeta, dstate] =
        call.call(grad_o, grad_final_state, q, k, v, g, beta, initial_state, cu_seqlens, scale,
                  qk_l2norm, chunk_size);
    return {dq, dk, dv, dg, dbeta, dstate};
  }
  static variable_list backward(AutogradContext*, const variable_list&) {
    TORCH_CHECK(false, "chunk: has no second derivative (its backward is differentiable once)");
  }
};

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> chunk_backward(
    const Tensor& grad_o, const OptTensor& grad_final_state, const Tensor& q, const Tensor& k,
    const Tensor& v, const Tensor& g, const Tensor& beta, const OptTensor& initial_state,
    const OptTensor& cu_seqlens, std::optional<double> scale, bool qk_l2norm,
    c10::SymInt chunk_size) {
  check_all_given(
      "chunk_backward",
      {{"grad_o", &grad_o}, {"q", &q}, {"k", &k}, {"v", &v}, {"g", &g}, {"beta", &beta}});
  const auto out = ChunkBackward::apply(grad_o, grad_final_state, q, k, v, g, beta, initial_state,
                                        cu_seqlens, scale, qk_l2norm, std::move(chunk_size));
  return {out[0], out[1], out[2], out[3], out[4], out[5]};
}

struct Chunk : torch::autograd::Function<Chunk> {
  static variable_list forward(AutogradContext* ctx, const Tensor& q, const Tensor& k,
                               const Tensor& v, const Tensor& g, const Tensor& beta,
                               const OptTensor& initial_state, const OptTensor& cu_seqlens,
                               std::optional<double> scale, bool qk_l2norm,
                               c10::SymInt chunk_size) {
    at::AutoDispatchBelowADInplaceOrView below;
    static auto call = typed_op<ChunkSchema>("gdn::chunk");
    ctx->save_for_backward(
        {q, k, v, g, beta, undefined_or(initial_state), undefined_or(cu_seqlens)});
    ctx->saved_data["scale"] = scale;
    ctx->saved_data["qk_l2norm"] = qk_l2norm;
    ctx->saved_data["chunk_size"] = chunk_size;
    ctx->set_materialize_grads(false);
    auto [o, final_state] =
        call.call(q, k, v, g, beta, initial_state, cu_seqlens, scale, qk_l2norm, chunk_size);
    return {o, final_state};
  }
  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    if (all_absent(grads)) return variable_list(10);
    static auto call = typed_op<ChunkBackwardSchema>("gdn::chunk_backward");
    const auto s = ctx->get_saved_variables();
    const Tensor grad_o = grads[0].defined() ? grads[0] : at::zeros_like(s[2]);
    auto [dq, dk, dv, dg, dbeta, dstate] =
        call.call(grad_o, optional(grads[1]), s[0], s[1], s[2], s[3], s[4], optional(s[5]),
                  optional(s[6]), ctx->saved_data["scale"].toOptional<double>(),
                  ctx->saved_data["qk_l2norm"].toBool(), ctx->saved_data["chunk_size"].toSymInt());
    return {dq,       dk,       dv,       dg,      dbeta, s[5].defined() ? dstate : Tensor(),
            Tensor(), Tensor(), Tensor(), Tensor()};
  }
};

std::tuple<Tensor, Tensor> chunk(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& g,
                                 const Tensor& beta, const OptTensor& initial_state,
                                 const OptTensor& cu_seqlens, std::optional<double> scale,
                                 bool qk_l2norm, c10::SymInt chunk_size) {
  check_all_given("chunk", {{"q", &q}, {"k", &k}, {"v", &v}, {"g", &g}, {"beta", &beta}});
  const auto out = Chunk::apply(q, k, v, g, beta, initial_state, cu_seqlens, scale, qk_l2norm,
                                std::move(chunk_size));
  return {out[0], out[1]};
}

// --- linear: what a call without gradients computes, bit for bit; backwards torch's two products

using LinearSchema = Tensor(const Tensor&, const Tensor&);

Tensor linear_below(const Tensor& x, const Tensor& weight) {
  at::AutoDispatchBelowADInplaceOrView below;
  static auto call = typed_op<LinearSchema>("gdn::linear");
  return call.call(x, weight);
}

// Rows of x, whatever its leading dimensions.
Tensor rows(const Tensor& x) { return x.dim() == 1 ? x.unsqueeze(0) : x.flatten(0, -2); }

struct Linear : torch::autograd::Function<Linear> {
  static Tensor forward(AutogradContext* ctx, const Tensor& x, const Tensor& weight) {
    // As torch's product does: with frozen weights no activation is kept.
    const bool dx = x.requires_grad(), dw = weight.requires_grad();
    ctx->save_for_backward({dw ? x : Tensor(), dx ? weight : Tensor()});
    ctx->set_materialize_grads(false);
    return linear_below(x, weight);
  }
  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    if (all_absent(grads)) return variable_list(2);
    c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
    const auto s = ctx->get_saved_variables();
    Tensor dx, dw;
    if (ctx->needs_input_grad(0)) dx = at::matmul(grads[0], s[1].conj());
    if (ctx->needs_input_grad(1)) dw = at::mm(rows(grads[0]).t(), rows(s[0]).conj());
    return {dx, dw};
  }
};

// What a node in C++ can't be part of: forward derivatives and the transforms of torch.func.
bool transformed(const Tensor& t) {
  return t._fw_grad(0).defined() || t.key_set().has(c10::DispatchKey::FuncTorchGradWrapper);
}

Tensor linear(const Tensor& x, const Tensor& weight) {
  check_all_given("linear", {{"x", &x}, {"weight", &weight}});
  if (transformed(x) || transformed(weight)) return torch_linear(x, weight);
  const bool grad = at::GradMode::is_enabled() && (x.requires_grad() || weight.requires_grad());
  return grad ? Linear::apply(x, weight) : linear_below(x, weight);
}

}  // namespace

TORCH_LIBRARY_IMPL(gdn, Autograd, m) {
  m.impl("linear", &linear);
  m.impl("gating", &gating);
  m.impl("gated_rms_norm", &gated_rms_norm);
  m.impl("conv1d", &conv1d);
  m.impl("chunk", &chunk);
  m.impl("chunk_backward", &chunk_backward);
}

// Where a backend has no kernel of its own.
TORCH_LIBRARY_IMPL(gdn, CompositeExplicitAutograd, m) { m.impl("linear", &torch_linear); }
// One batched product under torch.func.vmap, which would otherwise call the op slice by slice.
TORCH_LIBRARY_IMPL(gdn, FuncTorchBatched, m) { m.impl("linear", &torch_linear); }

TORCH_LIBRARY_IMPL(gdn, CompositeImplicitAutograd, m) {
  m.impl("gating_backward", &gating_backward);
  m.impl("gated_rms_norm_backward", &gated_rms_norm_backward);
  m.impl("conv1d_backward", &conv1d_backward);
}

}  // namespace gdn
