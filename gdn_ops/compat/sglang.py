"""sglang's Gated DeltaNet functions on the ops of this package.

Names, order and keywords are those of sglang 0.5.23 (``sglang.kernels.ops.attention`` and
``sglang.kernels.ops.mamba``; ``*_cuda``: ``sglang.srt.layers.attention.mamba.causal_conv1d``). A
keyword is honoured or refused by name. They differ from vLLM's in three ways: slot 0 is a slot like
any other and negative ones are padding, verification of drafts leaves the pool alone and writes the
state after every token into a buffer of its own, and prefill hands back the states between chunks.

State pools are ``[slots, HV, V, K]``, convolution pools ``[slots, C, L]``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gdn_ops.compat import vllm
from gdn_ops.compat._common import (
    PAD_SLOT_ID,
    activation_name,
    check_given,
    check_out,
    check_softplus,
    refuse,
    refuse_given,
    without,
)
from gdn_ops.compat.vllm import fused_gdn_gating
from gdn_ops.ops._common import check_same_device

__all__ = [
    "CHUNK_SIZE",
    "PAD_SLOT_ID",
    "ChunkStates",
    "causal_conv1d_fn",
    "causal_conv1d_fn_cuda",
    "causal_conv1d_update",
    "causal_conv1d_update_cuda",
    "chunk_gated_delta_rule",
    "fused_gdn_gating",
    "fused_recurrent_gated_delta_rule_packed_decode",
    "fused_sigmoid_gating_delta_rule_update",
]

_chunk_prefill = torch.ops.gdn.chunk_prefill.default
_short_conv = torch.ops.gdn.short_conv.default
_paged_decode_packed = torch.ops.gdn.paged_decode_packed.default
_paged_recurrent_gated = torch.ops.gdn.paged_recurrent_gated.default
_paged_short_conv = torch.ops.gdn.paged_short_conv.default
_recurrent_gated = torch.ops.gdn.recurrent_gated.default

CHUNK_SIZE = 64

_NO_TREES = "drafts are chains here, a token's parent is the token before it (topk 1)"
_NO_REPLAY = "serve without ReplaySSM (--enable-linear-replayssm, --enable-linear-replayssm-spec)"


def fused_recurrent_gated_delta_rule_packed_decode(
    mixed_qkv: Tensor,
    a: Tensor,
    b: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    scale: float,
    initial_state: Tensor,
    out: Tensor,
    ssm_state_indices: Tensor,
    use_qk_l2norm_in_kernel: bool = False,
) -> tuple[Tensor, Tensor]:
    """:func:`gdn_ops.compat.vllm.fused_recurrent_gated_delta_rule_packed_decode`, slot 0 alive."""
    _paged_decode_packed(
        mixed_qkv, a, b, A_log, dt_bias, initial_state, ssm_state_indices, out, scale,
        use_qk_l2norm_in_kernel, 0,
    )  # fmt: skip
    return out, initial_state


def fused_sigmoid_gating_delta_rule_update(
    A_log: Tensor,
    a: Tensor,
    dt_bias: Tensor,
    softplus_beta: float,
    softplus_threshold: float,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    b: Tensor,
    initial_state_source: Tensor,
    initial_state_indices: Tensor,
    scale: float | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
    is_kda: bool = False,
    lower_bound: float | None = None,
    disable_state_update: bool = False,
    intermediate_states_buffer: Tensor | None = None,
    intermediate_state_indices: Tensor | None = None,
    cache_steps: int | None = None,
    retrieve_parent_token: Tensor | None = None,
    cache_ring: bool = False,
    replayssm_rawv: Tensor | None = None,
    replayssm_rawk: Tensor | None = None,
    replayssm_g: Tensor | None = None,
    replayssm_beta: Tensor | None = None,
    match_cutedsl_decode: bool = False,
) -> Tensor:
    """:func:`gdn_ops.recurrent_gated` on sglang's pool: decode, and verification of drafts.

    Args:
        A_log, dt_bias: ``[HV]``; a, b: one row of HV a token, ``[T, HV]`` or ``[B, T, HV]``.
        softplus_beta, softplus_threshold: only 1.0 and 20.0.
        q, k: ``[B, T, H, K]``; v: ``[B, T, HV, V]``. scale: ``K**-0.5`` if absent.
        initial_state_source: ``[slots, HV, V, K]``, **written in place**, in decode.
        initial_state_indices: ``[N]`` or longer; negative is padding.
        cu_seqlens: ``[N+1]`` offsets of packed sequences (then ``B == 1``).
        disable_state_update: verification; initial_state_source is only read then.
        intermediate_states_buffer: ``[rows, steps, HV, V, K]`` in the dtype of
            initial_state_source, **written in place**: ``[intermediate_state_indices[n], t]``
            receives the state of sequence n after its token t, of at most ``steps``.
        intermediate_state_indices: ``[N]`` or longer, no two alike of sequences that are not
            padding.
        cache_steps: the buffer says it; not read.
        is_kda, lower_bound, match_cutedsl_decode: refused, they are of KDA's recurrence.
        retrieve_parent_token: refused. cache_ring, ``replayssm_*``: refused.

    Returns:
        The shape of v; zero for padding.

    Raises:
        NotImplementedError: a refused keyword, or verification without a buffer, or a buffer
            without verification. ValueError: the buffer does not fit the pool.
        RuntimeError: as :func:`gdn_ops.recurrent_gated`.
    """
    op = "fused_sigmoid_gating_delta_rule_update"
    if softplus_beta != 1.0 or softplus_threshold != 20.0:
        check_softplus(op, softplus_beta, softplus_threshold)
    if is_kda or match_cutedsl_decode or lower_bound is not None:
        advice = "per-channel decay is another recurrence"
        refuse_given(op, advice, is_kda=is_kda or None, lower_bound=lower_bound,
                     match_cutedsl_decode=match_cutedsl_decode or None)  # fmt: skip
    if (
        cache_ring
        or retrieve_parent_token is not None
        or replayssm_rawv is not None
        or replayssm_rawk is not None
        or replayssm_g is not None
        or replayssm_beta is not None
    ):
        refuse_given(op, _NO_TREES, retrieve_parent_token=retrieve_parent_token)
        refuse_given(
            op, _NO_REPLAY, cache_ring=cache_ring or None, replayssm_rawv=replayssm_rawv,
            replayssm_rawk=replayssm_rawk, replayssm_g=replayssm_g, replayssm_beta=replayssm_beta,
        )  # fmt: skip
    N = q.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    indices = initial_state_indices
    if indices.shape[0] > N:
        indices = indices[:N]
    if not disable_state_update:
        refuse_given(
            op, "only verification keeps the state after every token (disable_state_update=True)",
            intermediate_states_buffer=intermediate_states_buffer,
        )  # fmt: skip
        return _paged_recurrent_gated(
            q, k, v, a, b, A_log, dt_bias, initial_state_source, indices, cu_seqlens, None, scale,
            use_qk_l2norm_in_kernel, 0,
        )  # fmt: skip
    if intermediate_states_buffer is None or intermediate_state_indices is None:
        refuse(op, "disable_state_update", True, "the states after each token need a buffer")
    tokens = (q, k, v, a.view(v.shape[:3]), b.view(v.shape[:3]), A_log, dt_bias)
    return _verify(
        op, tokens, initial_state_source, indices, cu_seqlens, scale, use_qk_l2norm_in_kernel,
        intermediate_states_buffer, intermediate_state_indices[:N],
    )  # fmt: skip


def _verify(
    op: str,
    tokens: tuple[Tensor, ...],
    pool: Tensor,
    indices: Tensor,
    cu_seqlens: Tensor | None,
    scale: float | None,
    qk_l2norm: bool,
    buffer: Tensor,
    buffer_indices: Tensor,
) -> Tensor:
    """:func:`gdn_ops.recurrent_gated` that only reads the pool: the buffer is the pool of the call,
    in which each sequence has a row a token."""
    states, pitch = _rows_of(op, buffer, pool)
    first = buffer_indices.long() * pitch
    live = indices >= 0
    columns = torch.arange(buffer.shape[1], device=first.device)
    rows = torch.where(live[:, None], first[:, None] + columns, PAD_SLOT_ID)
    # The row that receives the state after the first token holds the initial one until then.
    starts = _Rows(states, first, live)
    starts.write(pool.index_select(0, indices.clamp(min=0)))
    try:
        return _recurrent_gated(*tokens, states, rows, None, cu_seqlens, None, scale, qk_l2norm)
    except RuntimeError:
        starts.restore()
        raise


def _rows_of(op: str, buffer: Tensor, pool: Tensor) -> tuple[Tensor, int]:
    """The buffer as a pool, a row a state, and how many rows lie between two of its first."""
    if buffer.dim() != 5 or buffer.shape[2:] != pool.shape[1:] or buffer.dtype != pool.dtype:
        raise ValueError(
            f"{op}: intermediate_states_buffer: expected [rows, steps, HV, V, K] of {pool.dtype} "
            f"with HV, V, K = {tuple(pool.shape[1:])}, got {tuple(buffer.shape)} of {buffer.dtype}"
        )
    check_out(op, buffer, buffer, "intermediate_states_buffer")
    check_same_device(op, pool, intermediate_states_buffer=buffer)
    count, steps = buffer.shape[:2]
    outer, inner, *strides = buffer.stride()
    if count == 0 or steps == 0 or outer % inner or outer < steps * inner:
        raise ValueError(
            f"{op}: intermediate_states_buffer: expected steps one behind another, got shape "
            f"{tuple(buffer.shape)} with strides {buffer.stride()}"
        )
    pitch = outer // inner
    rows = (count - 1) * pitch + steps
    return buffer.as_strided((rows, *buffer.shape[2:]), (inner, *strides)), pitch


class _Rows:
    """The rows of a pool that the live sequences of a batch write, found without asking the device
    which those are: the others repeat what the first live one writes, and if there is none, all
    write what is there."""

    def __init__(self, pool: Tensor, rows: Tensor, live: Tensor):
        position = torch.arange(rows.shape[0], device=rows.device)
        first = live.int().argmax() if rows.shape[0] > 0 else position
        self.source = torch.where(live, position, first)
        self.at = rows[self.source].clamp(min=0)
        self.pool, self.any, self.before = pool, live.any(), pool[self.at]

    def write(self, values: Tensor) -> None:
        values = values[self.source].to(self.pool.dtype)
        self.pool[self.at] = torch.where(self.any, values, self.before)

    def restore(self) -> None:
        self.pool[self.at] = self.before


class ChunkStates:
    """The states at the start of every chunk, ``[1, chunks, HV, V, K]`` in sglang.

    Chunks are 64 tokens of one sequence, those of the next sequence follow. sglang's prefix cache
    takes a few of them, most calls none; so they are computed when they are asked for, by another
    prefill without its output. Until then this holds the call's keys, values, gates and initial
    states.
    """

    def __init__(self, k, v, g, beta, initial, slots, cu_seqlens, qk_l2norm):
        self._call = k, v, g, beta, initial, slots, cu_seqlens, qk_l2norm

    def squeeze(self, dim: int) -> ChunkStates:
        """Itself: there is one batch, and the other dimensions are not."""
        if dim != 0:
            raise IndexError(f"ChunkStates.squeeze: expected dimension 0, got {dim}")
        return self

    def __getitem__(self, chunks: Tensor) -> Tensor:
        """``[M, HV, V, K]`` in the dtype of the pool, for chunks ``[M]`` counted over the batch."""
        k, v, g, beta, initial, slots, cu_seqlens, qk_l2norm = self._call
        if not isinstance(chunks, Tensor) or chunks.dim() != 1 or chunks.is_floating_point():
            raise TypeError(f"ChunkStates: expected a tensor of chunk numbers, got {chunks!r}")
        N, M, T = initial.shape[0], chunks.shape[0], k.shape[1]
        position = torch.arange(max(N, M), device=k.device)
        if cu_seqlens is None:
            counts = torch.full((N,), -(-T // CHUNK_SIZE), device=k.device)
        else:
            counts = (cu_seqlens.diff().long() + CHUNK_SIZE - 1) // CHUNK_SIZE
        ends = counts.cumsum(0)
        chunks = chunks.to(k.device).long()
        n = torch.searchsorted(ends, chunks, right=True)
        before = chunks - (ends - counts)[n]  # chunks of this sequence that lie before
        # Rows: the initial states, then one for each number. One that is the sequence's first chunk
        # goes to a last column, an edge beyond the tokens, which leaves its row as it was.
        last = T // CHUNK_SIZE + 1
        edges = torch.full((N, last + 1), PAD_SLOT_ID, device=k.device)
        column = torch.where(before > 0, before - 1, last)
        edges[n, column] = N + position[:M]
        pool = torch.cat([initial, initial[n]])
        read = torch.where(slots < 0, PAD_SLOT_ID, position[:N])
        nowhere = torch.full_like(read, PAD_SLOT_ID)
        _chunk_prefill(
            k, k, v, g, beta, pool, read, nowhere, None, cu_seqlens, edges, None, qk_l2norm,
            CHUNK_SIZE,
        )  # fmt: skip
        return pool[edges[n, column]]  # of a number that came twice there is one row


def chunk_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    initial_state_indices: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    head_first: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    inplace_update: bool = True,
) -> tuple[Tensor, None, ChunkStates]:
    """:func:`gdn_ops.chunk_prefill` on sglang's pool: prefill.

    Args:
        q, k: ``[B, T, H, K]``; v: ``[B, T, HV, V]``; g, beta: ``[B, T, HV]``.
        initial_state: ``[slots, HV, V, K]``, **written in place** with inplace_update.
        initial_state_indices: ``[N]``; negative is padding; absent: slot n is sequence n. Without
            inplace_update several sequences may start from one slot.
        cu_seqlens: ``[N+1]`` offsets of packed sequences (then ``B == 1``). head_first: only false.

    Returns:
        ``(o [B, T, HV, V], None, states)``, the last a :class:`ChunkStates`.

    Raises:
        NotImplementedError: head_first. ValueError: no initial_state.
        RuntimeError: as :func:`gdn_ops.chunk_prefill`; there are no gradients.
    """
    op = "chunk_gated_delta_rule"
    if head_first:
        refuse(op, "head_first", head_first, "pass [B, T, H, D]")
    if initial_state is None:
        raise ValueError(f"{op}: initial_state: expected the pool of states, got None")
    N = q.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    rows = initial_state_indices
    if rows is None:
        rows = torch.arange(N, device=q.device)
    keep = None if inplace_update else torch.full_like(rows, PAD_SLOT_ID)
    initial = initial_state.index_select(0, rows.clamp(min=0))
    o = _chunk_prefill(
        q, k, v, g, beta, initial_state, rows, keep, None, cu_seqlens, None, scale,
        use_qk_l2norm_in_kernel, CHUNK_SIZE,
    )  # fmt: skip
    return o, None, ChunkStates(k, v, g, beta, initial, rows, cu_seqlens, use_qk_l2norm_in_kernel)


def causal_conv1d_fn(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    conv_states: Tensor,
    query_start_loc: Tensor,
    seq_lens_cpu: list[int] | None = None,
    cache_indices: Tensor | None = None,
    has_initial_state: Tensor | None = None,
    activation: bool | str | None = "silu",
    pad_slot_id: int | None = PAD_SLOT_ID,
    validate_data: bool = False,
    block_table: Tensor | None = None,
) -> Tensor:
    """:func:`gdn_ops.compat.vllm.causal_conv1d_fn` without a null block: prefill.

    seq_lens_cpu and block_table repeat, for a launch, what query_start_loc says; they are not read.
    """
    op = "causal_conv1d_fn"
    check_given(op, conv_states=conv_states, query_start_loc=query_start_loc)
    if cache_indices is None:
        return vllm.causal_conv1d_fn(
            x, weight, bias, conv_states, query_start_loc, None, has_initial_state, activation
        )
    if has_initial_state is None:
        has_initial_state = torch.zeros_like(query_start_loc[1:], dtype=torch.bool)
    return _paged_short_conv(
        x, weight, bias, conv_states,
        without(cache_indices, query_start_loc.shape[0] - 1, pad_slot_id), has_initial_state,
        query_start_loc, None, activation_name(op, activation), True, False, 0,
    )  # fmt: skip


def causal_conv1d_fn_cuda(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    query_start_loc: Tensor | None = None,
    cache_indices: Tensor | None = None,
    has_initial_state: Tensor | None = None,
    conv_states: Tensor | None = None,
    activation: bool | str | None = "silu",
    pad_slot_id: int | None = PAD_SLOT_ID,
    *,
    seq_lens_cpu: list[int] | None = None,
    block_table: Tensor | None = None,
) -> Tensor:
    """:func:`causal_conv1d_fn` in the order of sglang's CUDA form; x is left as it was."""
    return causal_conv1d_fn(
        x, weight, bias, conv_states, query_start_loc, seq_lens_cpu, cache_indices,
        has_initial_state, activation, pad_slot_id,
    )  # fmt: skip


def causal_conv1d_update(
    x: Tensor,
    conv_state: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: bool | str | None = None,
    cache_seqlens: Tensor | None = None,
    conv_state_indices: Tensor | None = None,
    num_accept_tokens: Tensor | None = None,
    intermediate_conv_window: Tensor | None = None,
    intermediate_state_indices: Tensor | None = None,
    retrieve_next_token: Tensor | None = None,
    retrieve_next_sibling: Tensor | None = None,
    retrieve_parent_token: Tensor | None = None,
    pad_slot_id: int | None = PAD_SLOT_ID,
    metadata=None,
    validate_data: bool = False,
) -> Tensor:
    """:func:`gdn_ops.short_conv` for a few tokens a sequence: decode, and verification of drafts.

    Args:
        x: ``[B, C]``, one token a sequence, or ``[B, C, T]``.
        conv_state: ``[slots, C, L]``, ``L >= W - 1``, **written in place**: the first W-1 columns
            are the history; with num_accept_tokens those from ``num_accept_tokens - 1`` on.
        weight: ``[C, W]``; bias: ``[C]`` or None.
        conv_state_indices: ``[B]``; absent: row n. pad_slot_id and negative entries are padding.
        intermediate_conv_window: ``[rows, steps, C, W - 1]``, **written in place**:
            ``[intermediate_state_indices[n], t]`` receives the history of sequence n after its
            token t. intermediate_state_indices: ``[B]`` or longer.
        cache_seqlens, ``retrieve_*``: refused. metadata: not read. validate_data: always done.

    Returns:
        The shape and dtype of x, which is left as it was; zero for padding.

    Raises:
        NotImplementedError: a refused keyword, or num_accept_tokens with a buffer of histories.
        ValueError: another activation, or a buffer that does not fit.
        RuntimeError: as :func:`gdn_ops.short_conv`.
    """
    op = "causal_conv1d_update"
    if cache_seqlens is not None:
        refuse_given(op, "the state is no ring buffer", cache_seqlens=cache_seqlens)
    if (
        retrieve_next_token is not None
        or retrieve_next_sibling is not None
        or retrieve_parent_token is not None
    ):
        refuse_given(
            op, _NO_TREES, retrieve_next_token=retrieve_next_token,
            retrieve_next_sibling=retrieve_next_sibling,
            retrieve_parent_token=retrieve_parent_token,
        )  # fmt: skip
    activation = activation_name(op, activation)
    rows = conv_state_indices
    if rows is not None:
        rows = without(rows, x.shape[0], pad_slot_id)
    wide = x.mT if x.dim() == 3 else x.unsqueeze(1)  # [B, T, C]
    keep = None
    if intermediate_conv_window is not None:
        if num_accept_tokens is not None:
            refuse_given(
                op, "histories of each token are kept from a pool without drafts",
                num_accept_tokens=num_accept_tokens,
            )  # fmt: skip
        windows = _windows(op, wide, conv_state, weight, rows, intermediate_conv_window)
        if intermediate_state_indices is None:
            at = torch.arange(x.shape[0], device=x.device)
        else:
            at = intermediate_state_indices[: x.shape[0]].long()
        live = torch.ones_like(at, dtype=torch.bool) if rows is None else rows >= 0
        keep = _Rows(intermediate_conv_window[:, : wide.shape[1]], at, live)
    if rows is None:
        y = _short_conv(
            wide, weight, bias, conv_state, None, None, None, num_accept_tokens, activation, True
        )
        y = y.mT if x.dim() == 3 else y[:, 0]
    else:
        y = _paged_short_conv(
            x, weight, bias, conv_state, rows, None, None, num_accept_tokens, activation, True,
            False, 0,
        )  # fmt: skip
    if keep is not None:
        keep.write(windows)
    return y


def _windows(
    op: str, x: Tensor, conv_state: Tensor, weight: Tensor, rows: Tensor | None, buffer: Tensor
) -> Tensor:
    """The last W-1 columns after each token, ``[B, T, C, W - 1]``."""
    B, T, C = x.shape
    W = weight.shape[1]
    if buffer.dim() != 4 or buffer.shape[1] < T or buffer.shape[2:] != (C, W - 1):
        raise ValueError(
            f"{op}: intermediate_conv_window: expected [rows, {T} steps or more, {C}, {W - 1}], "
            f"got {tuple(buffer.shape)}"
        )
    check_out(op, buffer, buffer, "intermediate_conv_window")
    check_same_device(op, x, intermediate_conv_window=buffer, conv_state=conv_state)
    history = conv_state[:B] if rows is None else conv_state[rows.clamp(min=0).long()]
    columns = torch.cat([history[:, :, : W - 1].to(x.dtype), x.mT], -1)
    return columns.unfold(2, W - 1, 1)[:, :, 1:].transpose(1, 2)


def causal_conv1d_update_cuda(
    x: Tensor,
    conv_state: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: bool | str | None = None,
    cache_seqlens: Tensor | None = None,
    conv_state_indices: Tensor | None = None,
    pad_slot_id: int | None = PAD_SLOT_ID,
) -> Tensor:
    """:func:`causal_conv1d_update` in the order of sglang's CUDA form; x is left as it was."""
    return causal_conv1d_update(
        x, conv_state, weight, bias, activation, cache_seqlens, conv_state_indices,
        pad_slot_id=pad_slot_id,
    )  # fmt: skip
