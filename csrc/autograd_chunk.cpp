// Gradients of gdn::chunk: the forward op of the backend, saved inputs, and gdn::chunk_backward.
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include "checks.h"

namespace gdn {
namespace {

using at::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

using ChunkSignature = std::tuple<Tensor, Tensor>(const Tensor&, const Tensor&, const Tensor&,
                                                  const Tensor&, const Tensor&, const OptTensor&,
                                                  const OptTensor&, std::optional<double>, bool,
                                                  c10::SymInt);
using BackwardSignature = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>(
    const Tensor&, const OptTensor&, const Tensor&, const Tensor&, const Tensor&, const Tensor&,
    const Tensor&, const OptTensor&, const OptTensor&, std::optional<double>, bool, c10::SymInt);

auto& chunk_op() {
  static auto op =
      c10::Dispatcher::singleton().findSchemaOrThrow("gdn::chunk", "").typed<ChunkSignature>();
  return op;
}
auto& backward_op() {
  static auto op = c10::Dispatcher::singleton()
                       .findSchemaOrThrow("gdn::chunk_backward", "")
                       .typed<BackwardSignature>();
  return op;
}

OptTensor optional_of(const Tensor& t) { return t.defined() ? OptTensor(t) : OptTensor(); }

class Chunk : public torch::autograd::Function<Chunk> {
 public:
  static variable_list forward(AutogradContext* ctx, const Tensor& q, const Tensor& k,
                               const Tensor& v, const Tensor& g, const Tensor& beta,
                               const OptTensor& initial_state, const OptTensor& cu_seqlens,
                               std::optional<double> scale, bool qk_l2norm,
                               c10::SymInt chunk_size) {
    at::AutoDispatchBelowADInplaceOrView guard;
    auto [o, final_state] =
        chunk_op().call(q, k, v, g, beta, initial_state, cu_seqlens, scale, qk_l2norm, chunk_size);
    ctx->save_for_backward(
        {q, k, v, g, beta, initial_state.value_or(Tensor()), cu_seqlens.value_or(Tensor())});
    ctx->saved_data["scale"] = scale ? c10::IValue(*scale) : c10::IValue();
    ctx->saved_data["qk_l2norm"] = qk_l2norm;
    ctx->saved_data["chunk_size"] = chunk_size;
    // An output that the loss does not use has no gradient, not one of zeros.
    ctx->set_materialize_grads(false);
    return {o, final_state};
  }

  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    variable_list none(10);
    if (!grads[0].defined() && !grads[1].defined()) return none;
    const variable_list x = ctx->get_saved_variables();
    const Tensor grad_o = grads[0].defined() ? grads[0] : at::zeros_like(x[2]);
    const c10::IValue scale = ctx->saved_data["scale"];
    auto [dq, dk, dv, dg, dbeta, dstate] = backward_op().call(
        grad_o, optional_of(grads[1]), x[0], x[1], x[2], x[3], x[4], optional_of(x[5]),
        optional_of(x[6]), scale.isNone() ? std::optional<double>() : scale.toDouble(),
        ctx->saved_data["qk_l2norm"].toBool(), ctx->saved_data["chunk_size"].toSymInt());
    return {dq,       dk,       dv,       dg,      dbeta, x[5].defined() ? dstate : Tensor(),
            Tensor(), Tensor(), Tensor(), Tensor()};
  }
};

std::tuple<Tensor, Tensor> chunk(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& g,
                                 const Tensor& beta, const OptTensor& initial_state,
                                 const OptTensor& cu_seqlens, std::optional<double> scale,
                                 bool qk_l2norm, c10::SymInt chunk_size) {
  const variable_list out = Chunk::apply(q, k, v, g, beta, initial_state, cu_seqlens, scale,
                                         qk_l2norm, std::move(chunk_size));
  return {out[0], out[1]};
}

}  // namespace

TORCH_LIBRARY_IMPL(gdn, Autograd, m) { m.impl("chunk", &chunk); }

}  // namespace gdn
