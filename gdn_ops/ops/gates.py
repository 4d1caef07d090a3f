"""``gating``: log decay and write strength of a layer, in float32."""

from __future__ import annotations

import torch
from torch import Tensor

from gdn_ops.ops._common import check_same_device, register_fake

_gating = torch.ops.gdn.gating.default


def gating(a: Tensor, b: Tensor, A_log: Tensor, dt_bias: Tensor) -> tuple[Tensor, Tensor]:
    """``g = -exp(A_log) * softplus(a + dt_bias)`` and ``beta = sigmoid(b)``, both float32.

    Parameters in half precision are widened first: ``exp(12)`` would overflow in float16.

    Args:
        a, b: ``[..., HV]`` (at most three dimensions) float32, bfloat16 or float16, any strides.
        A_log, dt_bias: ``[HV]`` float32 or an activation dtype.

    Returns:
        ``(g, beta)``, float32, contiguous, the shape of a. Differentiable.

    Raises:
        RuntimeError: shapes, dtypes or devices do not fit.

    Source: the gate of Mamba2 (Dao, Gu, 2024) as Gated DeltaNet uses it.
    """
    return _gating(a, b, A_log, dt_bias)


@register_fake("gdn::gating")
def _(a, b, A_log, dt_bias):
    torch._check(
        a.shape == b.shape,
        lambda: f"gating: b: expected the shape of a, {tuple(a.shape)}, got {tuple(b.shape)}",
    )
    check_same_device("gating", a, b=b, A_log=A_log, dt_bias=dt_bias)
    return (a.new_empty(a.shape, dtype=torch.float32), a.new_empty(a.shape, dtype=torch.float32))
