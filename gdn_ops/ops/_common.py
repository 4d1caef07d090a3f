"""What the wrappers and fakes of several families share."""

from __future__ import annotations

import torch
from torch import Tensor

ACTIVATION_DTYPES = (torch.float32, torch.bfloat16, torch.float16)

# Documentation of the arguments that every op over sequences takes, spliced into docstrings.
SEQUENCE_ARGS = """
        state_indices: ``[N]`` int32 or int64, the pool row of each sequence; any negative value is
            padding: nothing is read or written and the output is zero. Absent: row n is sequence n.
            ``[N, S]`` (``S >= T``) for speculative tokens: the state is read from column
            ``num_accepted - 1`` (column 0 without it) and the state after token j goes to column j;
            a negative column inside a live row is not written. Two live rows must not be equal.
        has_initial_state: ``[N]`` bool; false starts from zero without reading the row.
        cu_seqlens: ``[N+1]`` int32 or int64 offsets of packed sequences (then ``B == 1``).
        num_accepted: ``[N]`` or longer; below 1 makes the row padding."""


def check_same_device(op: str, like: Tensor, **tensors: Tensor | None) -> None:
    for name, t in tensors.items():
        if t is not None:
            torch._check(
                t.device == like.device,
                lambda name=name, t=t: (
                    f"{op}: {name}: expected device {like.device}, got {t.device}"
                ),
            )
