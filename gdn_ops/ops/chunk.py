"""``chunk``, ``chunk_prefill``, ``chunk_lowrank``: many tokens at once, in chunks."""

from __future__ import annotations

import torch
from torch import Tensor

from gdn_ops._limits import MAX_CHUNK, MIN_CHUNK
from gdn_ops.ops._common import check_dims, check_tokens, check_window, register_fake

_chunk = torch.ops.gdn.chunk.default
_chunk_prefill = torch.ops.gdn.chunk_prefill.default
_chunk_lowrank = torch.ops.gdn.chunk_lowrank.default


def chunk(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    scale: float | None = None,
    qk_l2norm: bool = False,
    chunk_size: int = 64,
) -> tuple[Tensor, Tensor]:
    """Gated delta rule over whole sequences, in chunks, with gradients.

    The same function as :func:`gdn_ops.recurrent` up to float32 rounding, whatever the chunk size:
    chunks start anew at each sequence, and cutting a sequence in two calls (the final state of the
    first as initial state of the second) changes rounding only. Inside a chunk the updates solve a
    triangular system (the WY form); between chunks the float32 state is passed on.

    Args:
        q, k: ``[B, T, H, K]`` float32, bfloat16 or float16, any strides. ``1 <= K, V <= 512``.
        v: ``[B, T, HV, V]``, the dtype of q; ``HV`` a multiple of ``H``.
        g: ``[B, T, HV]`` log decay (natural log, normally <= 0; ``-inf`` clears the state), float32
            or an activation dtype.
        beta: ``[B, T, HV]`` write strength, float32 or an activation dtype.
        initial_state: ``[N, HV, V, K]`` float32, K or V contiguous; zero if absent.
        cu_seqlens: ``[N+1]`` int32 or int64 offsets of packed sequences (then ``B == 1``); absent:
            each batch row is a sequence, ``N = B``. A sequence may have no tokens.
        scale: factor on the output; ``K**-0.5`` if absent.
        qk_l2norm: normalise q and k with ``x * rsqrt(sum(x^2) + 1e-6)`` in float32 first.
        chunk_size: tokens of a chunk, 16 to 128.

    On CPU and CUDA all of q, k, v, g, beta and initial_state may be float64 together: a plain form
    for checking gradients, not a fast one.

    Returns:
        ``(o, final_state)``: ``[B, T, HV, V]`` in the dtype of q, and ``[N, HV, V, K]`` float32,
        both contiguous and fresh. Differentiable once with respect to q, k, v, g, beta and
        initial_state; the backward pass recomputes the chunk states, ``4 * HV * K * V /
        chunk_size`` bytes a token each for the states and for their gradients.

    Raises:
        RuntimeError: a shape, dtype, device, stride or chunk_size is not as above; on CPU also
            offsets that do not ascend from 0 to T.

    Sources: Yang, Wang, Zhang, Shen, Kim, "Parallelizing Linear Transformers with the Delta Rule"
    (2024), for the chunk form; Yang, Kautz, Hatamizadeh, "Gated Delta Networks" (2025), for the
    gate.
    """
    return _chunk(q, k, v, g, beta, initial_state, cu_seqlens, scale, qk_l2norm, chunk_size)


def chunk_prefill(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    state: Tensor,
    read_indices: Tensor | None = None,
    write_indices: Tensor | None = None,
    has_initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    edge_rows: Tensor | None = None,
    scale: float | None = None,
    qk_l2norm: bool = False,
    chunk_size: int = 64,
) -> Tensor:
    """:func:`chunk` straight into a pool of states: read rows, write rows, and chunk edges.

    A pool that also has a window of pending updates needs it emptied for every written row
    (:func:`gdn_ops.window_reset`) before the next windowed step.

    Args:
        q, k, v, g, beta, cu_seqlens, scale, qk_l2norm, chunk_size: as in :func:`chunk`.
        state: ``[P, HV, V, K]`` float32, bfloat16 or float16, **written in place**; K contiguous,
            or the transposed view of a ``[P, HV, K, V]`` pool. Inside the call states are float32;
            each is rounded once when stored.
        read_indices: ``[N]`` int32 or int64, the row each sequence starts from; any negative value
            makes the sequence padding: nothing is read or written and its output is zero. Absent:
            row n. Several sequences may read one row (a shared prefix).
        write_indices: ``[N]``, the row that receives the final state, negative = not kept. Absent:
            the row that was read. A sequence without tokens writes its initial state. No row may
            be written twice, nor read by one sequence and written by another.
        has_initial_state: ``[N]`` bool; false starts from zero without reading the row.
        edge_rows: ``[N, E]`` int32 or int64; entry ``[n, i]`` is the row that receives the state
            after token ``chunk_size * (i + 1)`` *of sequence n*, counted from its own start;
            negative = not wanted. Edges beyond the last token are ignored.

    Returns:
        ``[B, T, HV, V]`` in the dtype of q, contiguous.

    Raises:
        RuntimeError: as :func:`chunk`, or an input requires grad in grad mode, or (on CPU) a row is
            not in the pool. Nothing has been written then.
    """
    return _chunk_prefill(
        q, k, v, g, beta, state, read_indices, write_indices, has_initial_state, cu_seqlens,
        edge_rows, scale, qk_l2norm, chunk_size,
    )  # fmt: skip


def chunk_lowrank(
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
    scale: float | None = None,
    qk_l2norm: bool = False,
    chunk_size: int = 64,
) -> Tensor:
    """Low-rank prefill: exact inside a chunk; between chunks only the last R updates survive.

    An approximation of :func:`chunk` that keeps no state matrix: what a chunk starts from is the
    sum of the window's rank-1 updates, ``S = sum_i exp(sum of later g) u_i k_i^T``. **Results
    depend on where chunks are cut**, so on chunk_size and on how a prompt is split over calls.
    With ``R >= T`` nothing is dropped and the result is that of :func:`chunk`, up to the rounding
    of the window's dtypes. The window is left ready for :func:`gdn_ops.recurrent_lowrank`: the
    newest ``min(R, entries kept + tokens)`` updates, oldest first from slot 0.

    Args:
        q, k, v, g, beta, cu_seqlens, scale, qk_l2norm, chunk_size: as in :func:`chunk`.
        win_k: ``[P, H, R, K]`` keys as the recurrence uses them, **written in place**, as are win_u
            ``[P, HV, R, V]``, win_g ``[P, HV, R]`` float32 (each entry's own log decay) and
            win_fill ``[P]`` int32. R from 1 to 64. Later chunks use k and u as stored, rounded to
            the dtypes of the window.
        state_indices: ``[N]`` int32 or int64, the window row of each sequence; negative = padding.
        has_initial_state: ``[N]`` bool; false starts from an empty window without reading the row.

    Returns:
        ``[B, T, HV, V]`` in the dtype of q, contiguous.

    Raises:
        RuntimeError: as :func:`chunk_prefill`. Nothing has been written then.

    Source of the idea: the low-rank state of the Kunlun inference stack; the window form is ours.
    """
    return _chunk_lowrank(
        q, k, v, g, beta, win_k, win_u, win_g, win_fill, state_indices, has_initial_state,
        cu_seqlens, scale, qk_l2norm, chunk_size,
    )  # fmt: skip


def _check(op: str, q: Tensor, k: Tensor, v: Tensor, chunk_size: int, **others) -> None:
    check_tokens(op, q, k, v, **others)
    torch._check(
        MIN_CHUNK <= chunk_size <= MAX_CHUNK,
        lambda: f"{op}: chunk_size: expected {MIN_CHUNK} to {MAX_CHUNK}, got {chunk_size}",
    )


def _states(q: Tensor, v: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    """One state a sequence, ``[N, HV, V, K]``."""
    N = q.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    return v.new_empty((N, v.shape[2], v.shape[3], q.shape[3]), dtype=dtype)


@register_fake("gdn::chunk")
def _(q, k, v, g, beta, initial_state=None, cu_seqlens=None, scale=None, qk_l2norm=False,
      chunk_size=64):  # fmt: skip
    _check("chunk", q, k, v, chunk_size, g=g, beta=beta, initial_state=initial_state,
           cu_seqlens=cu_seqlens)  # fmt: skip
    return v.new_empty(v.shape), _states(q, v, cu_seqlens)


@register_fake("gdn::chunk_backward")
def _(grad_o, grad_final_state, q, k, v, g, beta, initial_state, cu_seqlens, scale, qk_l2norm,
      chunk_size):  # fmt: skip
    grads = (x.new_empty(x.shape) for x in (q, k, v, g, beta))
    return (*grads, _states(q, v, cu_seqlens))


@register_fake("gdn::chunk_prefill")
def _(q, k, v, g, beta, state, read_indices=None, write_indices=None, has_initial_state=None,
      cu_seqlens=None, edge_rows=None, scale=None, qk_l2norm=False, chunk_size=64):  # fmt: skip
    check_dims("chunk_prefill", state=(state, "[P, HV, V, K]"))
    _check("chunk_prefill", q, k, v, chunk_size, g=g, beta=beta, state=state,
           read_indices=read_indices, write_indices=write_indices,
           has_initial_state=has_initial_state, cu_seqlens=cu_seqlens,
           edge_rows=edge_rows)  # fmt: skip
    return v.new_empty(v.shape)


@register_fake("gdn::chunk_lowrank")
def _(q, k, v, g, beta, win_k, win_u, win_g, win_fill, state_indices=None, has_initial_state=None,
      cu_seqlens=None, scale=None, qk_l2norm=False, chunk_size=64):  # fmt: skip
    _check("chunk_lowrank", q, k, v, chunk_size, g=g, beta=beta, state_indices=state_indices,
           has_initial_state=has_initial_state, cu_seqlens=cu_seqlens)  # fmt: skip
    check_window("chunk_lowrank", q, win_k, win_u, win_g, win_fill)
    return v.new_empty(v.shape)
