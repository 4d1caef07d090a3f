"""Windows of pending rank-1 updates as values: allocate, read, roll back, convert
(docs/windows.md).

Nothing here reads device data on the host, except :func:`from_uv`, which checks its keys.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from gdn_ops._limits import MAX_HEAD_DIM, MAX_WINDOW, check_dtype, check_range

__all__ = [
    "Counts",
    "Window",
    "accept",
    "allocate",
    "counts",
    "from_fla_state",
    "from_uv",
    "state_of",
    "to_fla_state",
    "to_uv",
]


class Window(NamedTuple):
    """The four tensors of a pool of windows, in the order in which every op takes them."""

    k: Tensor  # [P, H, R, K]
    u: Tensor  # [P, HV, R, V]
    g: Tensor  # [P, HV, R] float32
    fill: Tensor  # [P] int32, packed counts


class Counts(NamedTuple):
    """``win_fill`` unpacked, each ``[P]`` int32."""

    fill: Tensor  # live entries
    drafts: Tensor  # tokens of the last call beyond the first
    head: Tensor  # slot of the oldest entry


def allocate(
    P: int,
    H: int,
    HV: int,
    K: int,
    V: int,
    R: int,
    *,
    update_dtype: torch.dtype = torch.float32,
    key_dtype: torch.dtype = torch.float32,
    device: torch.device | str | None = None,
) -> Window:
    """A pool of P empty windows of R entries.

    Args:
        P: pool rows. H, HV: key and value heads. K, V: head sizes, 1 to 512. R: 1 to 64.
        update_dtype, key_dtype: float32, bfloat16 or float16; docs/windows.md has the measured
            cost of the 16-bit ones.

    Raises:
        ValueError: a size, HV / H or a dtype is not as above.
    """
    check_range("allocate: P", P, 0)
    check_range("allocate: R", R, 1, MAX_WINDOW)
    check_range("allocate: K", K, 1, MAX_HEAD_DIM)
    check_range("allocate: V", V, 1, MAX_HEAD_DIM)
    if H < 1 or HV < 1 or HV % H:
        raise ValueError(f"allocate: expected HV to be a multiple of H, got HV = {HV}, H = {H}")
    check_dtype("allocate: update_dtype", update_dtype)
    check_dtype("allocate: key_dtype", key_dtype)
    return Window(
        torch.zeros(P, H, R, K, dtype=key_dtype, device=device),
        torch.zeros(P, HV, R, V, dtype=update_dtype, device=device),
        torch.zeros(P, HV, R, dtype=torch.float32, device=device),
        torch.zeros(P, dtype=torch.int32, device=device),
    )


def counts(win_fill: Tensor) -> Counts:
    """The three counts packed into ``win_fill``."""
    return Counts(win_fill & 255, (win_fill >> 8) & 255, (win_fill >> 16) & 255)


def accept(win_fill: Tensor, num_accepted: Tensor, state_indices: Tensor | None = None) -> None:
    """Drops the rejected drafts of the last call now, as the next call would with ``num_accepted``.

    Needed only before something that takes no ``num_accepted``: :func:`gdn_ops.window_flush`,
    :func:`state_of`.

    Args:
        win_fill: ``[P]`` int32, **written in place**.
        num_accepted: ``[N]`` or longer, accepted tokens of the last call; rows below 1 are left
            alone.
        state_indices: ``[N]`` rows; negative ones are left alone. Absent: row n is sequence n, of
            as many as both have.

    Raises:
        ValueError: the indices have another shape, or ``num_accepted`` is shorter than they are.
    """
    if num_accepted.dim() != 1 or (state_indices is not None and state_indices.dim() != 1):
        raise ValueError("accept: expected num_accepted and state_indices of shape [N]")
    if state_indices is None:
        n = min(num_accepted.shape[0], win_fill.shape[0])
    else:
        n = state_indices.shape[0]
    if num_accepted.shape[0] < n:
        raise ValueError(
            f"accept: num_accepted: expected at least N = {n} entries, got {num_accepted.shape[0]}"
        )
    accepted = num_accepted[:n]
    rows = torch.arange(n, device=win_fill.device) if state_indices is None else state_indices
    live = (rows >= 0) & (accepted >= 1)
    old = win_fill[rows.clamp(min=0)]
    fill, drafts, head = counts(old)
    rejected = (drafts + 1 - accepted).clamp(min=0).to(torch.int32)
    new = (fill - rejected).clamp(min=0) | head << 16
    # Padding rows add zero to row 0, so that no live row is written twice with different values.
    change = torch.where(live, new - old, 0).to(torch.int32)
    win_fill.index_add_(0, rows.clamp(min=0), change)


def _ordered(win_fill: Tensor, R: int) -> tuple[Tensor, Tensor]:
    """Slots ``[N, R]`` from the oldest entry on, and which of them are live."""
    fill, _, head = counts(win_fill)
    place = torch.arange(R, device=win_fill.device)
    return (head[:, None] + place) % R, place < fill[:, None]


def _gather(x: Tensor, slots: Tensor) -> Tensor:
    """``x [N, heads, R, ...]`` with the entries in the order of ``slots [N, R]``."""
    index = slots.long()[:, None, :]
    if x.dim() == 4:
        index = index[..., None]
    return x.gather(2, index.expand(x.shape[0], x.shape[1], *index.shape[2:3], *x.shape[3:]))


def _entries(window: Window, rows, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Keys ``[N, HV, R, K]``, updates ``[N, HV, R, V]`` times their weight now, both zero where an
    entry is not live or weighs nothing, and the log weight ``[N, HV]`` of a base. Oldest first."""
    k, u, g = (x[rows].to(dtype) for x in window[:3])
    slots, live = _ordered(window.fill[rows], g.shape[2])
    k, u, g = _gather(k, slots), _gather(u, slots), _gather(g, slots)
    alive = live[:, None, :]
    g = torch.where(alive, g, 0)
    # From entry i on, summed from the newest back; what follows entry i is the sum one further on.
    total = torch.flip(torch.cumsum(torch.flip(g, [-1]), -1), [-1])
    after = torch.cat([total[..., 1:], torch.zeros_like(total[..., :1])], -1)
    weight = torch.where(alive, after.exp(), 0)[..., None]
    k = k.repeat_interleave(g.shape[1] // k.shape[1], dim=1)
    return (
        torch.where(weight != 0, k, 0),
        torch.where(weight != 0, u, 0) * weight,
        total[..., 0],
    )


def state_of(
    window: Window,
    state: Tensor | None = None,
    state_indices: Tensor | None = None,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """The full state that windows stand for.

    Args:
        window: the pool of windows.
        state: the base pool ``[P, HV, V, K]`` (buffered), or None (low-rank).
        state_indices: ``[N]`` rows, none negative; absent: all rows.
        dtype: of the computation and the result.

    Returns:
        ``[N, HV, V, K]``, new.
    """
    rows = slice(None) if state_indices is None else state_indices.long()
    keys, updates, base_decay = _entries(window, rows, dtype)
    out = updates.transpose(-1, -2) @ keys
    if state is not None:
        base = base_decay.exp()[..., None, None]
        out = out + torch.where(base != 0, state[rows].to(dtype), 0) * base
    return out


def to_uv(window: Window, state_indices: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The window in the layout of the Kunlun low-rank ops.

    Returns:
        ``(UV, slot)``: ``UV [N, HV, K+V, R]`` in the dtype of ``window.u``, column j the key
        (first K rows) and the update (last V rows) of one entry with the decay since then
        multiplied into the update; ``slot [N]`` int32, the running count of updates, so that the
        next one goes to column ``slot % R``.

    The layout follows the shapes in public callers of those ops; it has not been run against them.
    """
    rows = slice(None) if state_indices is None else state_indices.long()
    keys, updates, _ = _entries(window, rows, torch.float32)
    uv = torch.cat([keys, updates], -1).transpose(-1, -2)
    return uv.to(window.u.dtype).contiguous(), counts(window.fill[rows]).fill.to(torch.int32)


def from_uv(
    UV: Tensor,
    slot: Tensor,
    H: int,
    K: int,
    *,
    update_dtype: torch.dtype | None = None,
    key_dtype: torch.dtype | None = None,
) -> Window:
    """Windows from the layout that :func:`to_uv` describes.

    Args:
        UV: ``[N, HV, K+V, R]``, R from 1 to 64; columns that hold no update yet are not looked at.
        slot: ``[N]`` running count of updates, integers from 0 on.
        H, K: key heads and key size.
        update_dtype, key_dtype: those of UV if absent.

    Raises:
        ValueError: a shape, a dtype or a count is not as above, or value heads of one key head hold
            different keys (a state that was projected, not accumulated): such a state has no
            window.
    """
    if UV.dim() != 4 or not 1 <= UV.shape[-1] <= MAX_WINDOW or not 1 <= K < UV.shape[2]:
        raise ValueError(
            f"from_uv: UV: expected shape [N, HV, K + V, R] with K = {K}, V >= 1 and R from 1 to "
            f"{MAX_WINDOW}, got {[*UV.shape]}"
        )
    N, HV, _, R = UV.shape
    if H < 1 or HV % H:
        raise ValueError(f"from_uv: expected HV = {HV} to be a multiple of H, got H = {H}")
    if slot.shape != (N,) or slot.dtype not in (torch.int32, torch.int64):
        raise ValueError(
            f"from_uv: slot: expected int32 or int64 of shape [{N}], got {slot.dtype} of shape "
            f"{[*slot.shape]}"
        )
    if (slot < 0).any():
        raise ValueError(f"from_uv: slot: expected counts from 0 on, got {int(slot.min())}")
    key_dtype, update_dtype = key_dtype or UV.dtype, update_dtype or UV.dtype
    check_dtype("from_uv: key_dtype", key_dtype)
    check_dtype("from_uv: update_dtype", update_dtype)
    entries = UV.transpose(-1, -2)
    keys = entries[..., :K].reshape(N, H, HV // H, R, K)
    fill = slot.clamp(max=R)
    live = torch.arange(R, device=UV.device) < fill[:, None]
    seen = torch.where(live[:, None, None, :, None], keys, 0)
    if not torch.equal(seen, seen[:, :, :1].expand_as(seen)):
        raise ValueError("from_uv: value heads that share a key head hold different keys")
    head = torch.where(slot > R, slot % R, 0)
    return Window(
        keys[:, :, 0].to(key_dtype).contiguous(),
        entries[..., K:].to(update_dtype).contiguous(),
        torch.zeros(N, HV, R, dtype=torch.float32, device=UV.device),
        (fill | head << 16).to(torch.int32),
    )


def to_fla_state(state: Tensor) -> Tensor:
    """``[N, HV, V, K]`` to flash-linear-attention's ``[N, HV, K, V]``, a new contiguous tensor."""
    return state.transpose(-1, -2).contiguous()


def from_fla_state(state: Tensor) -> Tensor:
    """flash-linear-attention's ``[N, HV, K, V]`` as ``[N, HV, V, K]``: a view that every op takes
    as a pool."""
    return state.transpose(-1, -2)
