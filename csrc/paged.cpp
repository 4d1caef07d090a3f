// Call forms of serving engines, made of the ops of this library: block 0 of a paged pool is the
// engine's null block, so rows below 1 are padding, and index tensors may be longer than the batch.
// In C++ because the views cost more than the dispatch in Python.
#include <ATen/ATen.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/library.h>

#include "checks.h"

namespace gdn {
namespace {

using at::Tensor;

using RecurrentSignature = Tensor(const Tensor&, const Tensor&, const Tensor&, const Tensor&,
                                  const Tensor&, Tensor&, const OptTensor&, const OptTensor&,
                                  const OptTensor&, const OptTensor&, std::optional<double>, bool);
using GatedSignature = Tensor(const Tensor&, const Tensor&, const Tensor&, const Tensor&,
                              const Tensor&, const Tensor&, const Tensor&, Tensor&,
                              const OptTensor&, const OptTensor&, const OptTensor&,
                              const OptTensor&, std::optional<double>, bool);
using ConvSignature = Tensor(const Tensor&, const Tensor&, const OptTensor&, Tensor&,
                             const OptTensor&, const OptTensor&, const OptTensor&, const OptTensor&,
                             const std::string&, bool);

template <class Signature>
auto op(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<Signature>();
}

// Rows of the pool without its null block: 0 and everything below become negative, padding.
struct Paged {
  Tensor pool, rows;

  Paged(const char* name, const Tensor& paged, const Tensor& indices, const c10::SymInt& N) {
    TORCH_CHECK(paged.dim() > 0 && paged.sym_size(0) > 0, name,
                ": state: expected a pool with a null block, got ", paged.sym_sizes());
    TORCH_CHECK(indices.dim() == 1 || indices.dim() == 2, name,
                ": state_indices: expected shape [N] or [N, S], got ", indices.sym_sizes());
    pool = paged.slice_symint(0, 1);
    rows = (indices.sym_size(0) > N ? indices.slice_symint(0, 0, N) : indices).sub(1);
  }
};

c10::SymInt sequences(const Tensor& batched, const OptTensor& cu_seqlens) {
  return cu_seqlens ? cu_seqlens->sym_size(0) - 1 : batched.sym_size(0);
}

// Gates of one row a token, [tokens, HV], as [B, T, HV].
Tensor per_token(const Tensor& gate, const Tensor& v) {
  if (gate.dim() != 2) return gate;
  if (v.sym_size(0) == 1) return gate.unsqueeze(0);
  return gate.view_symint({v.sym_size(0), v.sym_size(1), gate.sym_size(1)});
}

Tensor paged_recurrent(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& g,
                       const Tensor& beta, Tensor& state, const Tensor& state_indices,
                       const OptTensor& cu_seqlens, const OptTensor& num_accepted,
                       std::optional<double> scale, bool qk_l2norm) {
  static auto recurrent = op<RecurrentSignature>("gdn::recurrent");
  Paged p("paged_recurrent", state, state_indices, sequences(q, cu_seqlens));
  return recurrent.call(q, k, v, g, beta, p.pool, p.rows, std::nullopt, cu_seqlens, num_accepted,
                        scale, qk_l2norm);
}

Tensor paged_recurrent_gated(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& a,
                             const Tensor& b, const Tensor& A_log, const Tensor& dt_bias,
                             Tensor& state, const Tensor& state_indices,
                             const OptTensor& cu_seqlens, const OptTensor& num_accepted,
                             std::optional<double> scale, bool qk_l2norm) {
  static auto recurrent = op<GatedSignature>("gdn::recurrent_gated");
  TORCH_CHECK(v.dim() == 4, "paged_recurrent_gated: v: expected [B, T, HV, V], got ",
              v.sym_sizes());
  Paged p("paged_recurrent_gated", state, state_indices, sequences(q, cu_seqlens));
  return recurrent.call(q, k, v, per_token(a, v), per_token(b, v), A_log, dt_bias, p.pool, p.rows,
                        std::nullopt, cu_seqlens, num_accepted, scale, qk_l2norm);
}

Tensor paged_decode_packed(const Tensor& mixed_qkv, const Tensor& a, const Tensor& b,
                           const Tensor& A_log, const Tensor& dt_bias, Tensor& state,
                           const Tensor& state_indices, std::optional<double> scale,
                           bool qk_l2norm) {
  static auto recurrent = op<GatedSignature>("gdn::recurrent_gated");
  constexpr auto name = "paged_decode_packed";
  TORCH_CHECK(
      mixed_qkv.dim() == 2 && a.dim() == 2 && b.dim() == 2 && state.dim() == 4, name,
      ": mixed_qkv, a, b, state: expected [B, C], [B, HV], [B, HV], [blocks, HV, V, K], got ",
      mixed_qkv.sym_sizes(), ", ", a.sym_sizes(), ", ", b.sym_sizes(), ", ", state.sym_sizes());
  const auto C = mixed_qkv.sym_size(1), HV = state.sym_size(1), V = state.sym_size(2),
             K = state.sym_size(3);
  TORCH_CHECK(K > 0, name, ": state: expected [blocks, HV, V, K] with K >= 1, got ",
              state.sym_sizes());
  const auto H = (C - HV * V) / (K * 2);
  TORCH_CHECK(H > 0 && H * K * 2 + HV * V == C, name,
              ": mixed_qkv: expected 2*H*K + HV*V columns with HV, V, K = ", HV, ", ", V, ", ", K,
              ", got ", C);
  // [B, heads * size] -> [B, 1, heads, size]
  const auto heads = [&](const c10::SymInt& start, const c10::SymInt& n, const c10::SymInt& size) {
    return mixed_qkv.slice_symint(1, start, start + n * size)
        .unflatten_symint(1, {c10::SymInt(1), n, size});
  };
  Paged p(name, state, state_indices, mixed_qkv.sym_size(0));
  return recurrent.call(heads(0, H, K), heads(H * K, H, K), heads(H * K * 2, HV, V), a.unsqueeze(1),
                        b.unsqueeze(1), A_log, dt_bias, p.pool, p.rows, std::nullopt, std::nullopt,
                        std::nullopt, scale, qk_l2norm);
}

Tensor paged_short_conv(const Tensor& x, const Tensor& weight, const OptTensor& bias,
                        Tensor& conv_state, const Tensor& state_indices,
                        const OptTensor& has_initial_state, const OptTensor& cu_seqlens,
                        const OptTensor& num_accepted, const std::string& activation,
                        bool channels_first) {
  static auto short_conv = op<ConvSignature>("gdn::short_conv");
  constexpr auto name = "paged_short_conv";
  TORCH_CHECK(x.dim() == 3 || x.dim() == 2, name, ": x: expected two or three dimensions, got ",
              x.sym_sizes());
  TORCH_CHECK(x.dim() == 2 || !cu_seqlens, name,
              ": x: expected two dimensions with cu_seqlens, got ", x.sym_sizes());
  const bool one_token = x.dim() == 2 && !cu_seqlens, packed = x.dim() == 2 && !one_token;
  const bool turned = channels_first && !one_token;
  const Tensor tokens = turned ? x.transpose(-2, -1) : x;  // [.., T, C]
  const Tensor wide = one_token ? tokens.unsqueeze(1) : packed ? tokens.unsqueeze(0) : tokens;
  Paged p(name, conv_state, state_indices.dim() == 2 ? state_indices.select(1, 0) : state_indices,
          sequences(wide, cu_seqlens));
  const Tensor y = short_conv.call(wide, weight, bias, p.pool, p.rows, has_initial_state,
                                   cu_seqlens, num_accepted, activation, true);
  const Tensor narrow = one_token ? y.squeeze(1) : packed ? y.squeeze(0) : y;
  return turned ? narrow.transpose(-2, -1) : narrow;
}

}  // namespace

// Implicit: tracing, fakes and functionalization see the ops inside.
TORCH_LIBRARY_IMPL(gdn, CompositeImplicitAutograd, m) {
  m.impl("paged_recurrent", &paged_recurrent);
  m.impl("paged_recurrent_gated", &paged_recurrent_gated);
  m.impl("paged_decode_packed", &paged_decode_packed);
  m.impl("paged_short_conv", &paged_short_conv);
}

}  // namespace gdn
