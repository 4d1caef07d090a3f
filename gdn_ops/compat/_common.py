"""What the modules of this package share: padding rows, activations, and how keywords are refused.

vLLM keeps block 0 of every pool as its null block: no sequence ever owns it, and padded rows of a
batch point at it (older versions: at -1). For the ops of this package any negative row is padding
and row 0 is a row like any other, so the functions here pass the pool from row 1 on and the indices
less one: 0 and every negative number become padding, and the two views cost no kernel.
"""

from __future__ import annotations

import torch
from torch import Tensor

NULL_BLOCK_ID = 0
PAD_SLOT_ID = -1

# 0-dimensional, so it combines with indices of any dtype and device, and several times cheaper than
# a Python number, which is made a tensor in every call.
_ONE = torch.ones((), dtype=torch.int32)


def live_rows(pool: Tensor, indices: Tensor, N: int) -> tuple[Tensor, Tensor]:
    """``(pool, indices)`` in which vLLM's null block and its negative rows are padding.

    Args:
        pool: ``[P, ...]``. indices: ``[>= N]`` or ``[>= N, S]``; entries beyond the N sequences of
            the call (padding of a captured batch) are dropped.
    """
    if indices.shape[0] > N:
        indices = indices[:N]
    return pool[1:], torch.sub(indices, _ONE)


def rows_without(
    pool: Tensor, indices: Tensor | None, N: int, null_block_id: int | None, pad_slot_id: int | None
) -> tuple[Tensor, Tensor | None]:
    """:func:`live_rows` for functions that take the two padding numbers as arguments."""
    if indices is None:
        return pool, None
    if null_block_id == NULL_BLOCK_ID and (pad_slot_id is None or pad_slot_id < 0):
        return live_rows(pool, indices, N)
    indices = indices[:N]
    for number in (null_block_id, pad_slot_id):
        if number is not None and number >= 0:
            indices = torch.where(indices == number, PAD_SLOT_ID, indices)
    return pool, indices


def activation_name(op: str, activation: bool | str | None) -> str:
    """The activation argument of :func:`gdn_ops.short_conv` for vLLM's and causal-conv1d's."""
    if activation == "silu" or activation == "swish" or activation is True:
        return "silu"
    if activation is None or activation is False:
        return "none"
    raise ValueError(f"{op}: activation: expected None, 'silu' or 'swish', got {activation!r}")


def refuse(op: str, name: str, value, advice: str):
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
