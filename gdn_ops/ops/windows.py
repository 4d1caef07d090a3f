"""``recurrent_buffered``, ``recurrent_lowrank`` and their fused and house-keeping ops: windows of
pending rank-1 updates (docs/windows.md)."""

from __future__ import annotations

import torch
from torch import Tensor

from gdn_ops.ops._common import check_dims, check_same_device, check_window, register_fake
from gdn_ops.ops.decode import DECODE_ARGS, decode_tail
from gdn_ops.ops.decode import output_of as _decode_output
from gdn_ops.ops.recurrent import output_of as _recurrent_output

_recurrent_buffered = torch.ops.gdn.recurrent_buffered.default
_recurrent_lowrank = torch.ops.gdn.recurrent_lowrank.default
_window_flush = torch.ops.gdn.window_flush.default
_window_reset = torch.ops.gdn.window_reset.default
_decode_buffered = torch.ops.gdn.decode_buffered.default
_decode_lowrank = torch.ops.gdn.decode_lowrank.default

WINDOW_ARGS = """
        win_k: ``[P, H, R, K]`` float32, bfloat16 or float16, the keys of the entries (after
            l2norm), 1 <= R <= 64. **Written in place**, like the three below.
        win_u: ``[P, HV, R, V]`` float32, bfloat16 or float16, their ``u``. float16 holds up to
            65504.
        win_g: ``[P, HV, R]`` float32, the log decay of each entry's own token.
        win_fill: ``[P]`` int32, the packed counts ``fill + 256 * drafts + 65536 * head``: ``fill``
            live entries, the oldest in slot ``head``, the newest ``drafts + 1`` of them from the
            last call. 0 is an empty window; :mod:`gdn_ops.windows` allocates and reads windows."""

_SEQUENCE_ARGS = """
        state_indices: ``[N]`` int32 or int64, the pool row of each sequence; any negative value is
            padding: nothing is read or written and the output is zero. Absent: row n is sequence n.
            Of ``[N, S]`` column 0 counts: drafts need no rows of their own. Two live rows must not
            be equal.
        has_initial_state: ``[N]`` bool; false starts from zero with an empty window, reading
            nothing.
        cu_seqlens: ``[N+1]`` int32 or int64 offsets of packed sequences (then ``B == 1``).
        num_accepted: ``[N]`` or longer: how many of the tokens that the previous call brought to
            this row were accepted; the others are dropped before anything else. Absent: all of
            them. Below 1 makes the row padding."""


def recurrent_buffered(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    state: Tensor,
    win_k: Tensor,
    win_u: Tensor,
    win_g: Tensor,
    win_fill: Tensor,
    state_indices: Tensor | None = None,
    has_initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    num_accepted: Tensor | None = None,
    scale: float | None = None,
    qk_l2norm: bool = False,
) -> Tensor:
    return _recurrent_buffered(
        q, k, v, g, beta, state, win_k, win_u, win_g, win_fill, state_indices, has_initial_state,
        cu_seqlens, num_accepted, scale, qk_l2norm,
    )  # fmt: skip


recurrent_buffered.__doc__ = f"""Gated delta rule without a write of the state at every step. Exact.

    The state is a base plus the window's pending rank-1 updates, each with its own decay. A call

    1. drops what was rejected of the previous call (``num_accepted``),
    2. folds all pending updates into the base, rounding it once, if T more would not fit,
    3. reads the base once and appends T updates.

    With a float32 base and window the results are those of :func:`gdn_ops.recurrent` to float32
    rounding at every step; with a 16-bit base they are closer to exact, because the base is rounded
    R times less often. Speculative decoding needs no copies of the state: pass the drafts, then
    ``num_accepted`` with the next call.

    Args:
        q, k: ``[B, T, H, K]`` float32, bfloat16 or float16, any strides; at most R tokens a
            sequence.
        v: ``[B, T, HV, V]``, the dtype of q.
        g: ``[B, T, HV]`` log decay (``-inf`` clears the state), float32 or an activation dtype.
        beta: ``[B, T, HV]`` write strength, float32 or an activation dtype.
        state: ``[P, HV, V, K]`` float32, bfloat16 or float16, **written in place**, only when a
            window is folded; K contiguous, or the transposed view of a ``[P, HV, K, V]`` pool.
{WINDOW_ARGS[1:]}
{_SEQUENCE_ARGS[1:]}
        scale: factor on the output; ``K**-0.5`` if absent.
        qk_l2norm: normalise q and k with ``x * rsqrt(sum(x^2) + 1e-6)`` in float32 first.

    Returns:
        ``[B, T, HV, V]`` in the dtype of q, contiguous.

    Raises:
        RuntimeError: T > R, something else does not fit, or an input requires grad in grad mode.
            On CPU also rows, lengths, counts or accepted numbers out of range. Nothing has been
            written then.

    Source: own derivation, docs/windows.md; the idea of replaying recent inputs against a stale
    state is known for state-space models.
    """


def recurrent_lowrank(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    win_k: Tensor,
    win_u: Tensor,
    win_g: Tensor,
    win_fill: Tensor,
    state_indices: Tensor | None = None,
    has_initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    num_accepted: Tensor | None = None,
    scale: float | None = None,
    qk_l2norm: bool = False,
) -> Tensor:
    return _recurrent_lowrank(
        q, k, v, g, beta, win_k, win_u, win_g, win_fill, state_indices, has_initial_state,
        cu_seqlens, num_accepted, scale, qk_l2norm,
    )  # fmt: skip


recurrent_lowrank.__doc__ = f"""Low-rank approximation: the state is the last R rank-1 updates.

    There is no base. Each token sees the R updates before it, then replaces the oldest by its own.
    For sequences of at most R tokens this is exact; beyond, the error is what the dropped updates
    would still weigh, small where the decay is strong. Rejected drafts leave a window with fewer
    than R entries: what they displaced is gone.

    Args:
        q, k: ``[B, T, H, K]`` float32, bfloat16 or float16, any strides, any T.
        v: ``[B, T, HV, V]``, the dtype of q.
        g: ``[B, T, HV]`` log decay (``-inf`` clears the state), float32 or an activation dtype.
        beta: ``[B, T, HV]`` write strength, float32 or an activation dtype.
{WINDOW_ARGS[1:]}
{_SEQUENCE_ARGS[1:]}
        scale: factor on the output; ``K**-0.5`` if absent.
        qk_l2norm: normalise q and k in float32 first.

    Returns:
        ``[B, T, HV, V]`` in the dtype of q, contiguous.

    Raises:
        RuntimeError: something does not fit, or an input requires grad in grad mode. Nothing has
            been written then.
    """


def window_flush(
    state: Tensor,
    win_k: Tensor,
    win_u: Tensor,
    win_g: Tensor,
    win_fill: Tensor,
    state_indices: Tensor | None = None,
) -> None:
    _window_flush(state, win_k, win_u, win_g, win_fill, state_indices)


window_flush.__doc__ = f"""Folds pending updates into the base state now and empties the windows.

    For a snapshot, a prefix cache, or a change to ops that know no window. Everything pending
    counts as accepted: drop rejected drafts first (:func:`gdn_ops.windows.accept`).

    Args:
        state: ``[P, HV, V, K]``, **written in place**, either layout of :func:`recurrent_buffered`.
{WINDOW_ARGS[1:]}
        state_indices: ``[N]`` int32 or int64, the rows; negative ones are skipped. Absent: all
            rows.

    Raises:
        RuntimeError: something does not fit. Nothing has been written then.
    """


def window_reset(win_fill: Tensor, state_indices: Tensor | None = None) -> None:
    """Empties windows and drops what is pending, for a row that is given to a new sequence.

    Args:
        win_fill: ``[P]`` int32, **written in place**.
        state_indices: ``[N]`` int32 or int64, the rows; negative ones are skipped. Absent: all
            rows.

    Raises:
        RuntimeError: a shape or dtype does not fit, or (CPU) a row does not exist.
    """
    _window_reset(win_fill, state_indices)


def decode_buffered(
    projected: Tensor,
    conv_weight: Tensor,
    conv_bias: Tensor | None,
    A_log: Tensor,
    dt_bias: Tensor,
    norm_weight: Tensor,
    conv_state: Tensor,
    state: Tensor,
    win_k: Tensor,
    win_u: Tensor,
    win_g: Tensor,
    win_fill: Tensor,
    num_k_heads: int,
    head_k_dim: int,
    state_indices: Tensor | None = None,
    has_initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    num_accepted: Tensor | None = None,
    scale: float | None = None,
    qk_l2norm: bool = True,
    eps: float = 1e-6,
    activation: str = "silu",
    conv_leading: bool = False,
) -> Tensor:
    return _decode_buffered(
        projected, conv_weight, conv_bias, A_log, dt_bias, norm_weight, conv_state, state, win_k,
        win_u, win_g, win_fill, num_k_heads, head_k_dim, state_indices, has_initial_state,
        cu_seqlens, num_accepted, scale, qk_l2norm, eps, activation, conv_leading,
    )  # fmt: skip


_TAIL = decode_tail(_SEQUENCE_ARGS)

decode_buffered.__doc__ = f""":func:`gdn_ops.decode` with :func:`recurrent_buffered` inside.

    Args:
{DECODE_ARGS[1:]}
        state: ``[P, HV, V, K]`` float32, bfloat16 or float16, **written in place** when a window is
            folded; either layout.
{WINDOW_ARGS[1:]}
{_TAIL[1:]}

    Returns:
        ``[B, T, HV*V]`` in the dtype of projected, contiguous.

    Raises:
        RuntimeError: more than R tokens a sequence, something else does not fit, or an input
            requires grad in grad mode. Nothing has been written then.
    """


def decode_lowrank(
    projected: Tensor,
    conv_weight: Tensor,
    conv_bias: Tensor | None,
    A_log: Tensor,
    dt_bias: Tensor,
    norm_weight: Tensor,
    conv_state: Tensor,
    win_k: Tensor,
    win_u: Tensor,
    win_g: Tensor,
    win_fill: Tensor,
    num_k_heads: int,
    head_k_dim: int,
    state_indices: Tensor | None = None,
    has_initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    num_accepted: Tensor | None = None,
    scale: float | None = None,
    qk_l2norm: bool = True,
    eps: float = 1e-6,
    activation: str = "silu",
    conv_leading: bool = False,
) -> Tensor:
    return _decode_lowrank(
        projected, conv_weight, conv_bias, A_log, dt_bias, norm_weight, conv_state, win_k, win_u,
        win_g, win_fill, num_k_heads, head_k_dim, state_indices, has_initial_state, cu_seqlens,
        num_accepted, scale, qk_l2norm, eps, activation, conv_leading,
    )  # fmt: skip


decode_lowrank.__doc__ = f""":func:`gdn_ops.decode` with :func:`recurrent_lowrank` inside.

    Args:
{DECODE_ARGS[1:]}
{WINDOW_ARGS[1:]}
{_TAIL[1:]}

    Returns:
        ``[B, T, HV*V]`` in the dtype of projected, contiguous.

    Raises:
        RuntimeError: something does not fit, or an input requires grad in grad mode. Nothing has
            been written then.
    """


@register_fake("gdn::recurrent_buffered")
def _(q, k, v, g, beta, state, win_k, win_u, win_g, win_fill, state_indices=None,
      has_initial_state=None, cu_seqlens=None, num_accepted=None, scale=None,
      qk_l2norm=False):  # fmt: skip
    op = "recurrent_buffered"
    check_window(op, q, win_k, win_u, win_g, win_fill)
    return _recurrent_output(op, q, k, v, state, g=g, beta=beta, state_indices=state_indices,
                             has_initial_state=has_initial_state, cu_seqlens=cu_seqlens,
                             num_accepted=num_accepted)  # fmt: skip


@register_fake("gdn::recurrent_lowrank")
def _(q, k, v, g, beta, win_k, win_u, win_g, win_fill, state_indices=None,
      has_initial_state=None, cu_seqlens=None, num_accepted=None, scale=None,
      qk_l2norm=False):  # fmt: skip
    op = "recurrent_lowrank"
    check_window(op, q, win_k, win_u, win_g, win_fill)
    return _recurrent_output(op, q, k, v, win_u, g=g, beta=beta, state_indices=state_indices,
                             has_initial_state=has_initial_state, cu_seqlens=cu_seqlens,
                             num_accepted=num_accepted)  # fmt: skip


@register_fake("gdn::window_flush")
def _(state, win_k, win_u, win_g, win_fill, state_indices=None):
    check_window("window_flush", state, win_k, win_u, win_g, win_fill)
    check_same_device("window_flush", state, state_indices=state_indices)


@register_fake("gdn::window_reset")
def _(win_fill, state_indices=None):
    check_dims("window_reset", win_fill=(win_fill, "[P]"))
    check_same_device("window_reset", win_fill, state_indices=state_indices)


@register_fake("gdn::decode_buffered")
def _(projected, conv_weight, conv_bias, A_log, dt_bias, norm_weight, conv_state, state, win_k,
      win_u, win_g, win_fill, num_k_heads, head_k_dim, state_indices=None, has_initial_state=None,
      cu_seqlens=None, num_accepted=None, scale=None, qk_l2norm=True, eps=1e-6,
      activation="silu", conv_leading=False):  # fmt: skip
    op = "decode_buffered"
    check_window(op, projected, win_k, win_u, win_g, win_fill)
    check_dims(op, state=(state, "[P, HV, V, K]"))
    return _decode_output(op, projected, conv_state, state.shape[1], state.shape[2], state=state,
                          conv_weight=conv_weight, conv_bias=conv_bias, A_log=A_log,
                          dt_bias=dt_bias, norm_weight=norm_weight, state_indices=state_indices,
                          has_initial_state=has_initial_state, cu_seqlens=cu_seqlens,
                          num_accepted=num_accepted)  # fmt: skip


@register_fake("gdn::decode_lowrank")
def _(projected, conv_weight, conv_bias, A_log, dt_bias, norm_weight, conv_state, win_k, win_u,
      win_g, win_fill, num_k_heads, head_k_dim, state_indices=None, has_initial_state=None,
      cu_seqlens=None, num_accepted=None, scale=None, qk_l2norm=True, eps=1e-6,
      activation="silu", conv_leading=False):  # fmt: skip
    op = "decode_lowrank"
    check_window(op, projected, win_k, win_u, win_g, win_fill)
    return _decode_output(op, projected, conv_state, win_u.shape[1], win_u.shape[3],
                          conv_weight=conv_weight, conv_bias=conv_bias, A_log=A_log,
                          dt_bias=dt_bias, norm_weight=norm_weight, state_indices=state_indices,
                          has_initial_state=has_initial_state, cu_seqlens=cu_seqlens,
                          num_accepted=num_accepted)  # fmt: skip
