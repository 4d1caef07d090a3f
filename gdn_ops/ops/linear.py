"""``linear``: the projections around the layer, for the few tokens of a decode step."""

from __future__ import annotations

import torch
from torch import Tensor

from gdn_ops.ops._common import check_same_device, register_fake

_linear = torch.ops.gdn.linear.default


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """``x @ weight.T``: :func:`torch.nn.functional.linear` without bias.

    On the CPU a kernel of this package runs few rows of x (as many as were measured to pay,
    docs/cpu.md): it reads each weight once, as it lies, and sums in float32. A row's result then
    does not depend on the other rows. Everything else, and every other device, is torch's own
    product.

    Args:
        x: ``[..., K]``, any strides; the kernel takes float32, bfloat16 and float16.
        weight: ``[N, K]`` in the dtype of x.

    Returns:
        ``[..., N]`` in the dtype of x, contiguous. Differentiable; nothing is written.

    Source: none beyond the definition; the limits in rows were measured (docs/cpu.md).

    Raises:
        RuntimeError: shapes, dtypes or devices do not fit.
    """
    return _linear(x, weight)


@register_fake("gdn::linear")
def _(x, weight):
    torch._check(
        weight.dim() == 2 and x.dim() >= 1,
        lambda: (
            f"linear: expected [..., K] and [N, K], got {x.dim()} and {weight.dim()} dimensions"
        ),
    )
    torch._check(
        weight.shape[1] == x.shape[-1],
        lambda: f"linear: weight: expected K = {x.shape[-1]} columns, got {weight.shape[1]}",
    )
    torch._check(
        weight.dtype == x.dtype,
        lambda: f"linear: weight: expected the dtype of x, {x.dtype}, got {weight.dtype}",
    )
    check_same_device("linear", x, weight=weight)
    return x.new_empty((*x.shape[:-1], weight.shape[0]))
