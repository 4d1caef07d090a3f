"""What the wrappers and fakes of several families share."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor, library

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


@functools.cache
def _keep_offsets() -> None:
    """Gives inductor the lowering of ``aten.sym_storage_offset`` where it lacks it.

    A pool that is written through a view, ``pool[layer]``, is described by the view's sizes,
    strides and offset. With sizes that vary the offset is a node of the graph, for which inductor
    (seen in torch 2.13 to 2.15) has no lowering, unlike for sizes and strides: it takes the offset
    for 0, and every layer silently writes the first one's states (pytorch/pytorch issue 198068).
    """
    from torch._inductor import lowering
    from torch._inductor.virtualized import V

    offset_of = torch.ops.aten.sym_storage_offset.default
    if offset_of in lowering.lowerings:
        return

    @lowering.register_lowering(offset_of)
    def _(tensor):
        value = V.graph.current_node.meta["val"]
        return value.node.expr if isinstance(value, torch.SymInt) else int(value)


def register_fake(op: str) -> Callable[[Callable], Callable]:
    """Torch's ``register_fake``, for every op here: before the fake runs, what compiled code needs
    so that a view of a pool stays the view it is (:func:`_keep_offsets`)."""

    def register(fake: Callable) -> Callable:
        @library.register_fake(op)
        @functools.wraps(fake)
        def run(*args, **kwargs):
            tensors = (x for x in (*args, *kwargs.values()) if isinstance(x, Tensor))
            if any(isinstance(t.storage_offset(), torch.SymInt) for t in tensors):
                _keep_offsets()
            return fake(*args, **kwargs)

        return fake

    return register


def check_same_device(op: str, like: Tensor, **tensors: Tensor | None) -> None:
    # Not torch._check: torch.compile cannot trace its message where a function of Python asks.
    for name, t in tensors.items():
        if t is not None and t.device != like.device:
            raise RuntimeError(f"{op}: {name}: expected device {like.device}, got {t.device}")


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
