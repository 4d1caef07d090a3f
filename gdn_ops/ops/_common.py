"""What the wrappers and fakes of several families share."""

from __future__ import annotations

import torch
from torch import Tensor

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


def check_dims(op: str, **tensors: tuple[Tensor, str]) -> None:
    """Each tensor has as many dimensions as its shape, like ``"[B, T, H, K]"``, has letters."""
    for name, (t, shape) in tensors.items():
        torch._check(
            t.dim() == shape.count(",") + 1,
            lambda name=name, t=t, shape=shape: (
                f"{op}: {name}: expected {shape}, got {tuple(t.shape)}"
            ),
        )


def check_tokens(op: str, q: Tensor, k: Tensor, v: Tensor, **others: Tensor | None) -> None:
    """The token tensors of a recurrence, and the device of everything that comes with them."""
    check_dims(op, q=(q, "[B, T, H, K]"), k=(k, "[B, T, H, K]"), v=(v, "[B, T, HV, V]"))
    torch._check(
        q.dtype == k.dtype == v.dtype,
        lambda: f"{op}: k, v: expected the dtype of q, {q.dtype}, got {k.dtype} and {v.dtype}",
    )
    check_same_device(op, q, k=k, v=v, **others)


def check_window(
    op: str, like: Tensor, win_k: Tensor, win_u: Tensor, win_g: Tensor, win_fill: Tensor
) -> None:
    """The four tensors of a pool of windows."""
    check_dims(
        op, win_k=(win_k, "[P, H, R, K]"), win_u=(win_u, "[P, HV, R, V]"),
        win_g=(win_g, "[P, HV, R]"), win_fill=(win_fill, "[P]"),
    )  # fmt: skip
    for name, t, dtype in (("win_fill", win_fill, "int32"), ("win_g", win_g, "float32")):
        torch._check(
            t.dtype == getattr(torch, dtype),
            lambda name=name, t=t, dtype=dtype: f"{op}: {name}: expected {dtype}, got {t.dtype}",
        )
    check_same_device(op, like, win_k=win_k, win_u=win_u, win_g=win_g, win_fill=win_fill)
