"""``gated_rms_norm``: the output norm of the layer."""

from __future__ import annotations

import torch
from torch import Tensor

from gdn_ops.ops._common import check_same_device, register_fake

_gated_rms_norm = torch.ops.gdn.gated_rms_norm.default


def gated_rms_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
    """``weight * rmsnorm(x) * silu(gate)`` over the last dimension.

    Float32 inside, with the two roundings of the model: ``rmsnorm(x)`` goes back to the dtype of x,
    the product with the weight to the promoted dtype of the two; ``silu(gate)`` stays float32.

    Args:
        x: ``[..., V]``, V up to 512, the last dimension contiguous and the others of one stride
            (what ``view(-1, V)`` takes), or heads that lie in one stride inside tokens of another,
            as a slice of a packed projection does.
        gate: the shape of x, its own dtype and, under the same conditions, strides.
        weight: ``[V]``. eps: added to the mean square.

    Returns:
        The shape and dtype of x, contiguous. Differentiable.

    Raises:
        RuntimeError: shapes, dtypes, strides or devices do not fit.

    Source: the gated norm of the Qwen3-Next model code (transformers).
    """
    return _gated_rms_norm(x, gate, weight, eps)


@register_fake("gdn::gated_rms_norm")
def _(x, gate, weight, eps=1e-6):
    torch._check(
        x.shape == gate.shape,
        lambda: (
            f"gated_rms_norm: gate: expected the shape of x, {tuple(x.shape)}, "
            f"got {tuple(gate.shape)}"
        ),
    )
    check_same_device("gated_rms_norm", x, gate=gate, weight=weight)
    return x.new_empty(x.shape)
