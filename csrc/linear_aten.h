// The product where no kernel of ours takes it.
#pragma once

#include <ATen/ops/linear.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

namespace gdn {

// In the dtype of its inputs under autocast too, as every op of this library.
inline at::Tensor torch_linear(const at::Tensor& x, const at::Tensor& weight) {
  // The rest torch checks; a vector of weights it would take.
  TORCH_CHECK(weight.dim() == 2, "linear: weight: expected shape [N, K], got ", weight.dim(),
              " dimensions");
  c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
  return at::linear(x, weight);
}

}  // namespace gdn
