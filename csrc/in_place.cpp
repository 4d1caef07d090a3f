// What holds for every op that writes a pool, whatever the backend: it has no gradient, the version
// counters of what it writes go up, and nothing is written through a negated view.
//
// One boxed kernel for each of these, registered for every such op at one dispatch key: it looks at
// the arguments by their schema and passes the call on to the next key. Without them torch's own
// fallbacks would stand at these keys; they cost as much and do the wrong thing with arguments that
// are written and not returned.
#include <ATen/ATen.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/AutogradState.h>
#include <torch/library.h>

namespace gdn {
namespace {

std::string plain_name(const c10::OperatorHandle& op) {
  return op.schema().name().substr(op.schema().name().find("::") + 2);
}

// visit(argument, its value on the stack) for each tensor that was given.
template <class Visit>
void for_each_tensor(const c10::OperatorHandle& op, torch::jit::Stack& stack, Visit visit) {
  const auto& arguments = op.schema().arguments();
  c10::IValue* values = stack.data() + (stack.size() - arguments.size());
  for (size_t i = 0; i < arguments.size(); ++i) {
    if (values[i].isTensor()) visit(arguments[i], values[i]);
  }
}

// At the key Autograd, above the kernels: the tensors that torch.func wraps, and forward tangents,
// are still to be seen here.
void refuse_grad(const c10::OperatorHandle& op, c10::DispatchKeySet keys,
                 torch::jit::Stack* stack) {
  const auto& mode = c10::AutogradState::get_tls_state();
  if (mode.get_grad_mode() || mode.get_fw_grad_mode()) {
    for_each_tensor(op, *stack, [&](const c10::Argument& argument, const c10::IValue& value) {
      const at::Tensor& t = value.toTensor();
      TORCH_CHECK(!mode.get_grad_mode() || !t.requires_grad(), plain_name(op),
                  ": has no gradient (it writes its state in place), but ", argument.name(),
                  " requires grad; call it under torch.no_grad() or inference_mode()");
      TORCH_CHECK(!mode.get_fw_grad_mode() || !t._fw_grad(0).defined(), plain_name(op),
                  ": has no forward gradient (it writes its state in place), but ", argument.name(),
                  " has a tangent");
    });
  }
  op.redispatchBoxed(keys & c10::after_autograd_keyset, stack);
}

// At ADInplaceOrView, where torch's own in-place ops do it: autograd then notices, when it needs a
// tensor it saved, that it has been overwritten. Counted after the call, so that one that is
// refused, having written nothing, counts nothing. Inference tensors have no counter.
void count_writes(const c10::OperatorHandle& op, c10::DispatchKeySet keys,
                  torch::jit::Stack* stack) {
  c10::SmallVector<at::Tensor, 8> written;
  for_each_tensor(op, *stack, [&](const c10::Argument& argument, const c10::IValue& value) {
    if (argument.alias_info() && argument.alias_info()->isWrite() &&
        !value.toTensor().is_inference()) {
      written.push_back(value.toTensor());
    }
  });
  op.redispatchBoxed(keys & c10::after_ADInplaceOrView_keyset, stack);
  for (const at::Tensor& t : written) t.unsafeGetTensorImpl()->bump_version();
}

// At Negative: inputs that are negated views are computed, written ones refused. torch's fallback
// would have the op write a negated copy and look for it among the outputs to copy it back, where a
// pool never is.
void resolve_negated(const c10::OperatorHandle& op, c10::DispatchKeySet keys,
                     torch::jit::Stack* stack) {
  for_each_tensor(op, *stack, [&](const c10::Argument& argument, c10::IValue& value) {
    if (!value.toTensor().is_neg()) return;
    TORCH_CHECK(!argument.alias_info() || !argument.alias_info()->isWrite(), plain_name(op), ": ",
                argument.name(), ": is written, so it may not be a negated view");
    value = value.toTensor().resolve_neg();
  });
  const c10::DispatchKeySet below(c10::DispatchKeySet::FULL_AFTER, c10::DispatchKey::Negative);
  op.redispatchBoxed(keys & below, stack);
}

constexpr const char* kOps[] = {
    "recurrent",
    "recurrent_gated",
    "recurrent_buffered",
    "recurrent_lowrank",
    "window_flush",
    "window_reset",
    "chunk_prefill",
    "chunk_lowrank",
    "short_conv",
    "conv_gating",
    "decode",
    "decode_buffered",
    "decode_lowrank",
    "sweep",
    "paged_recurrent",
    "paged_recurrent_gated",
    "paged_decode_packed",
    "paged_short_conv",
};

}  // namespace

TORCH_LIBRARY_IMPL(gdn, Autograd, m) {
  for (const char* op : kOps) {
    m.impl(op, torch::CppFunction::makeFromBoxedFunction<&refuse_grad>());
  }
}

TORCH_LIBRARY_IMPL(gdn, ADInplaceOrView, m) {
  for (const char* op : kOps) {
    m.impl(op, torch::CppFunction::makeFromBoxedFunction<&count_writes>());
  }
}

TORCH_LIBRARY_IMPL(gdn, Negative, m) {
  for (const char* op : kOps) {
    m.impl(op, torch::CppFunction::makeFromBoxedFunction<&resolve_negated>());
  }
}

}  // namespace gdn
