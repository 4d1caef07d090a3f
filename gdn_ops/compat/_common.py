"""What the modules of this package share: padding rows, activations, and how keywords are refused.

vLLM keeps block 0 of every pool as its null block: no sequence ever owns it, and padded rows of a
batch point at it (older versions: at -1). For the other ops of this package any negative row is
padding and row 0 is a row like any other; the ``paged`` ones take indices as vLLM means them, and
index tensors longer than the batch.
"""

from __future__ import annotations

from typing import NoReturn

import torch
from torch import Tensor

from gdn_ops import causal_conv1d

NULL_BLOCK_ID = 0
PAD_SLOT_ID = -1


def without(indices: Tensor, N: int, *numbers: int | None) -> Tensor:
    """The first N indices, negative where they are one of the numbers (None: no number)."""
    if indices.shape[0] > N:
        indices = indices[:N]
    for number in numbers:
        if number is not None and number >= 0:
            indices = torch.where(indices == number, PAD_SLOT_ID, indices)
    return indices


def activation_name(op: str, activation: bool | str | None) -> str:
    """The activation argument of :func:`gdn_ops.short_conv` for vLLM's and causal-conv1d's."""
    if isinstance(activation, bool):
        return "silu" if activation else "none"
    return causal_conv1d.activation_name(op, activation)


def check_out(op: str, out: Tensor, like: Tensor, name: str = "out") -> None:
    """What the result will be copied into, before anything is written."""
    if out.shape != like.shape or out.device != like.device:
        raise ValueError(
            f"{op}: {name}: expected shape {tuple(like.shape)} on {like.device}, got "
            f"{tuple(out.shape)} on {out.device}"
        )
    if not out.is_floating_point():
        raise ValueError(f"{op}: {name}: expected a floating dtype, got {out.dtype}")
    if not out.is_contiguous() and any(
        n > 1 and s == 0 for n, s in zip(out.shape, out.stride(), strict=True)
    ):
        raise ValueError(
            f"{op}: {name}: is written, so no two elements may share memory, got strides "
            f"{out.stride()}"
        )
    if out.requires_grad and torch.is_grad_enabled():
        raise RuntimeError(f"{op}: {name}: is written, so it may not require grad")


def check_given(op: str, **tensors: Tensor | None) -> None:
    """Refuses, by name, the first tensor that is absent though its engine always passes it."""
    for name, value in tensors.items():
        if value is None:
            raise ValueError(f"{op}: {name}: expected a tensor, got None")


def refuse(op: str, name: str, value, advice: str) -> NoReturn:
    raise NotImplementedError(f"{op}: {name}={value!r} is not supported: {advice}")


def refuse_given(op: str, advice: str, **keywords) -> None:
    """Refuses, by name, the first keyword that is given."""
    for name, value in keywords.items():
        if value is not None:
            shown = f"a {type(value).__name__}" if isinstance(value, Tensor) else repr(value)
            raise NotImplementedError(f"{op}: {name} ({shown}) is not supported: {advice}")


def check_softplus(op: str, beta: float, threshold: float) -> None:
    """Our softplus is exact for every argument; vLLM's numbers are accepted as they are."""
    if beta != 1.0:
        refuse(op, "beta", beta, "softplus has slope 1 here")
    if threshold != 20.0:
        refuse(op, "threshold", threshold, "softplus is computed exactly; 20.0 asks for the same")
