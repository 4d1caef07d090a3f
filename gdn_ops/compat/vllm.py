"""vLLM's Gated DeltaNet functions on the ops of this package.

Names, order and keywords are those of vLLM 0.33 (``vllm.third_party.flash_linear_attention.ops``,
``mamba.ops.causal_conv1d``); keywords that only older versions have are keyword-only here. A
keyword is honoured or refused by name. What differs from vLLM's own kernels, always to the safe
side:

* any float dtype works, and any ``K, V <= 512``;
* the gates stay float32 throughout, and softplus is exact;
* outputs of padded rows are zero, not whatever the memory held;
* ``causal_conv1d_update`` without ``out`` returns a new tensor and leaves ``x`` as it was.

State pools are ``[blocks, HV, V, K]`` (vLLM 0.16 and later). Block 0 is vLLM's null block: rows
that point at it, and negative ones, are padding.
"""

from __future__ import annotations

from typing import NoReturn

import torch
from torch import Tensor

from gdn_ops.compat._common import (
    NULL_BLOCK_ID,
    PAD_SLOT_ID,
    activation_name,
    check_out,
    check_softplus,
    refuse,
    refuse_given,
    without,
)
from gdn_ops.ops.chunk import chunk
from gdn_ops.reference import L2_EPS

__all__ = [
    "NULL_BLOCK_ID",
    "PAD_SLOT_ID",
    "causal_conv1d_fn",
    "causal_conv1d_update",
    "chunk_gated_delta_rule",
    "fused_gdn_gating",
    "fused_post_conv_prep",
    "fused_recurrent_gated_delta_rule",
    "fused_recurrent_gated_delta_rule_packed_decode",
    "fused_sigmoid_gating_delta_rule_update",
]

_short_conv = torch.ops.gdn.short_conv.default
_gating = torch.ops.gdn.gating.default
_paged_decode_packed = torch.ops.gdn.paged_decode_packed.default
_paged_recurrent = torch.ops.gdn.paged_recurrent.default
_paged_recurrent_gated = torch.ops.gdn.paged_recurrent_gated.default
_paged_short_conv = torch.ops.gdn.paged_short_conv.default
_recurrent = torch.ops.gdn.recurrent.default
_recurrent_gated = torch.ops.gdn.recurrent_gated.default

_NO_BLOCK_ALIGNED_STATES = (
    "states at block boundaries inside a call are not kept (mamba_cache_mode 'all'); serve with "
    "mamba_cache_mode 'none' or 'align'"
)


def _refuse_no_pool(op: str) -> NoReturn:
    raise ValueError(
        f"{op}: initial_state: expected the pool to write into (inplace_final_state=True), got None"
    )


def fused_recurrent_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    inplace_final_state: bool = True,
    cu_seqlens: Tensor | None = None,
    ssm_state_indices: Tensor | None = None,
    num_accepted_tokens: Tensor | None = None,
    use_qk_l2norm_in_kernel: bool = False,
) -> tuple[Tensor, Tensor]:
    """:func:`gdn_ops.recurrent` on vLLM's pool: decode, speculative decode, short sequences.

    Args:
        q, k: ``[B, T, H, K]``; v: ``[B, T, HV, V]``; g: ``[B, T, HV]`` log decay.
        beta: ``[B, T, HV]``; ones if absent. scale: ``K**-0.5`` if absent.
        initial_state: ``[blocks, HV, V, K]`` float32, bfloat16 or float16.
        inplace_final_state: true writes the new states **into initial_state** and returns it.
            False leaves it alone and returns the state after *every* token,
            ``[B * T, HV, V, K]``, zeros for padded sequences.
        cu_seqlens: ``[N+1]`` offsets of packed sequences (then ``B == 1``).
        ssm_state_indices: ``[N]`` or, for speculative tokens, ``[N, S]``, or longer; absent: row n
            is sequence n. Of two dimensions, column ``num_accepted_tokens - 1`` is read and column
            j receives the state after token j.
        num_accepted_tokens: ``[N]`` or longer; below 1 makes the sequence padding.
        use_qk_l2norm_in_kernel: normalise q and k in float32.

    Returns:
        ``(o [B, T, HV, V], final_state)``.

    Raises:
        ValueError: no initial_state to write into. RuntimeError: as :func:`gdn_ops.recurrent`.
    """
    if beta is None:
        beta = torch.ones_like(g)
    if not inplace_final_state:
        return _states_of_every_token(
            q, k, v, g, beta, scale, initial_state, cu_seqlens, ssm_state_indices,
            num_accepted_tokens, use_qk_l2norm_in_kernel,
        )  # fmt: skip
    if initial_state is None:
        _refuse_no_pool("fused_recurrent_gated_delta_rule")
    if ssm_state_indices is None:
        o = _recurrent(
            q, k, v, g, beta, initial_state, None, None, cu_seqlens, num_accepted_tokens, scale,
            use_qk_l2norm_in_kernel,
        )  # fmt: skip
    else:
        o = _paged_recurrent(
            q, k, v, g, beta, initial_state, ssm_state_indices, cu_seqlens, num_accepted_tokens,
            scale, use_qk_l2norm_in_kernel,
        )  # fmt: skip
    return o, initial_state


def _states_of_every_token(
    q, k, v, g, beta, scale, initial_state, cu_seqlens, indices, num_accepted, qk_l2norm
):
    """A pool with a row a token: the first token's row of a sequence holds its initial state, and
    the speculative form of ``recurrent`` leaves the state after token j in row j."""
    total, T = q.shape[0] * q.shape[1], q.shape[1]
    N = q.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    dtype = torch.float32 if initial_state is None else initial_state.dtype
    states = v.new_zeros((total, v.shape[2], v.shape[3], q.shape[3]), dtype=dtype)
    if cu_seqlens is None:
        starts = torch.arange(N, device=q.device) * T
        lengths = torch.full_like(starts, T)
    else:
        starts, lengths = cu_seqlens[:-1].long(), cu_seqlens.diff().long()
    live = lengths > 0
    if num_accepted is not None:
        live = live & (num_accepted[:N] >= 1)
    if indices is None:
        source = torch.arange(N, device=q.device)
        if initial_state is not None and initial_state.shape[0] < N:
            raise ValueError(
                f"fused_recurrent_gated_delta_rule: initial_state: expected {N} rows or more, got "
                f"shape {tuple(initial_state.shape)}"
            )
    else:
        if indices.shape[0] < N:
            raise ValueError(
                f"fused_recurrent_gated_delta_rule: ssm_state_indices: expected {N} rows or more, "
                f"got shape {tuple(indices.shape)}"
            )
        source = indices[:N].long()
        if source.dim() == 2:
            column = torch.zeros_like(starts)
            if num_accepted is not None:
                column = (num_accepted[:N].long() - 1).clamp(min=0)
            source = source.gather(1, column[:, None])[:, 0]
        live = live & (source > NULL_BLOCK_ID)
    if initial_state is not None:
        states[starts[live]] = initial_state[source[live]]
    token = torch.arange(max(T, 1), device=q.device)
    rows = starts[:, None] + token
    rows = torch.where((token < lengths[:, None]) & live[:, None], rows, PAD_SLOT_ID)
    o = _recurrent(q, k, v, g, beta, states, rows, None, cu_seqlens, None, scale, qk_l2norm)
    return o, states


def fused_sigmoid_gating_delta_rule_update(
    A_log: Tensor,
    a: Tensor,
    b: Tensor,
    dt_bias: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: float = 1.0,
    threshold: float = 20.0,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    inplace_final_state: bool = True,
    cu_seqlens: Tensor | None = None,
    ssm_state_indices: Tensor | None = None,
    num_accepted_tokens: Tensor | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    is_kda: bool = False,
) -> tuple[Tensor, Tensor]:
    """:func:`fused_recurrent_gated_delta_rule` with the gates computed inside.

    Args:
        A_log, dt_bias: ``[HV]``; a, b: one row of HV a token, ``[T, HV]`` or ``[B, T, HV]``.
        beta, threshold: of softplus; only vLLM's own 1.0 and 20.0. is_kda: refused, the decay of a
            KDA layer is another recurrence.
        Others, results and errors: :func:`fused_recurrent_gated_delta_rule`.
    """
    op = "fused_sigmoid_gating_delta_rule_update"
    if beta != 1.0 or threshold != 20.0:
        check_softplus(op, beta, threshold)
    if is_kda:
        refuse(op, "is_kda", is_kda, "per-channel decay is another recurrence")
    if not inplace_final_state:
        g, write = _gating(a.view(v.shape[:3]), b.view(v.shape[:3]), A_log, dt_bias)
        return fused_recurrent_gated_delta_rule(
            q, k, v, g, write, scale, initial_state, False, cu_seqlens, ssm_state_indices,
            num_accepted_tokens, use_qk_l2norm_in_kernel,
        )  # fmt: skip
    if initial_state is None:
        _refuse_no_pool(op)
    if ssm_state_indices is None:
        o = _recurrent_gated(
            q, k, v, a.view(v.shape[:3]), b.view(v.shape[:3]), A_log, dt_bias, initial_state, None,
            None, cu_seqlens, num_accepted_tokens, scale, use_qk_l2norm_in_kernel,
        )  # fmt: skip
    else:
        o = _paged_recurrent_gated(
            q, k, v, a, b, A_log, dt_bias, initial_state, ssm_state_indices, cu_seqlens,
            num_accepted_tokens, scale, use_qk_l2norm_in_kernel,
        )  # fmt: skip
    return o, initial_state


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
    """One decoded token a sequence, from the packed output of the convolution.

    Args:
        mixed_qkv: ``[B, 2*H*K + HV*V]``, all queries, all keys, all values; last dim contiguous.
        a, b: ``[B, HV]``; A_log, dt_bias: ``[HV]``. scale: factor on the output.
        initial_state: ``[blocks, HV, V, K]``, **written in place**.
        out: ``[B, 1, HV, V]``, **written**. ssm_state_indices: ``[B]``.

    Returns:
        ``(out, initial_state)``, the tensors that were passed.

    Raises:
        RuntimeError: mixed_qkv does not divide into heads of the pool's sizes; otherwise as
            :func:`gdn_ops.recurrent_gated`.
        ValueError: out has another shape or device.
    """
    _paged_decode_packed(
        mixed_qkv, a, b, A_log, dt_bias, initial_state, ssm_state_indices, out, scale,
        use_qk_l2norm_in_kernel,
    )  # fmt: skip
    return out, initial_state


def chunk_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    chunk_indices: Tensor | None = None,
    chunk_offsets: Tensor | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    core_attn_out: Tensor | None = None,
    *,
    head_first: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """:func:`gdn_ops.chunk` for gathered states: prefill.

    Args:
        q, k: ``[B, T, H, K]``; v: ``[B, T, HV, V]``; g, beta: ``[B, T, HV]``.
        initial_state: ``[N, HV, V, K]``, any float dtype, already zero where a sequence is new.
        cu_seqlens: ``[N+1]`` offsets of packed sequences (then ``B == 1``).
        chunk_indices, chunk_offsets: what cu_seqlens says, spelled out for a launch; not read.
        core_attn_out: a buffer whose first ``B*T*HV*V`` elements receive the output; what is
            returned is then a view of it.
        head_first: of older versions; only false.

    Returns:
        ``(o [B, T, HV, V], final_state [N, HV, V, K] float32 or None)``.

    Raises:
        NotImplementedError: head_first. ValueError: core_attn_out is too small or of another kind.
        RuntimeError: as :func:`gdn_ops.chunk`.
    """
    if head_first:
        refuse("chunk_gated_delta_rule", "head_first", head_first, "pass [B, T, H, D]")
    if core_attn_out is not None and (
        not core_attn_out.is_floating_point()
        or core_attn_out.numel() < v.numel()
        or core_attn_out.device != v.device
    ):
        raise ValueError(
            f"chunk_gated_delta_rule: core_attn_out: expected a floating dtype on {v.device} and "
            f"{v.numel()} elements or more, got {core_attn_out.dtype} of "
            f"{tuple(core_attn_out.shape)} on {core_attn_out.device}"
        )
    if initial_state is not None and initial_state.dtype != torch.float32:
        initial_state = initial_state.float()
    o, state = chunk(q, k, v, g, beta, initial_state, cu_seqlens, scale, use_qk_l2norm_in_kernel)
    if core_attn_out is not None:
        o = core_attn_out.view(-1)[: o.numel()].view(o.shape).copy_(o)
    return o, state if output_final_state else None


def fused_gdn_gating(
    A_log: Tensor,
    a: Tensor,
    b: Tensor,
    dt_bias: Tensor,
    beta: float = 1.0,
    threshold: float = 20.0,
) -> tuple[Tensor, Tensor]:
    """``(g, sigmoid(b))``, both ``[1, T, HV]`` float32, of a, b ``[T, HV]`` (vLLM up to 0.29)."""
    if beta != 1.0 or threshold != 20.0:
        check_softplus("fused_gdn_gating", beta, threshold)
    return _gating(a[None], b[None], A_log, dt_bias)


def fused_post_conv_prep(
    conv_output: Tensor,
    a: Tensor,
    b: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    num_k_heads: int,
    head_k_dim: int,
    head_v_dim: int,
    apply_l2norm: bool = True,
    output_g_exp: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Splits the convolution's output ``[L, 2*H*K + HV*V]`` into heads and computes the gates.

    Returns:
        ``q, k [L, H, K]`` (normalised in float32 and rounded once with apply_l2norm),
        ``v [L, HV, V]`` in the dtype of conv_output, ``g`` (``exp(g)`` with output_g_exp) and
        ``beta [L, HV]`` float32.

    Raises:
        ValueError: conv_output does not have the columns that the head sizes say.
    """
    L, C = conv_output.shape
    HV = A_log.shape[0]
    sizes = [num_k_heads * head_k_dim, num_k_heads * head_k_dim, HV * head_v_dim]
    if sum(sizes) != C:
        raise ValueError(
            f"fused_post_conv_prep: conv_output: expected {sum(sizes)} columns, got {C}"
        )
    q, k, v = conv_output.split(sizes, dim=1)
    q, k = (x.reshape(L, num_k_heads, head_k_dim) for x in (q, k))
    if apply_l2norm:
        q, k = (_l2norm(x) for x in (q, k))
    g, beta = _gating(a, b, A_log, dt_bias)
    if output_g_exp:
        g = g.exp()
    return q.contiguous(), k.contiguous(), v.reshape(L, HV, head_v_dim).contiguous(), g, beta


def _l2norm(x: Tensor) -> Tensor:
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().sum(-1, keepdim=True) + L2_EPS)).to(x.dtype)


def causal_conv1d_fn(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    conv_states: Tensor,
    query_start_loc: Tensor,
    cache_indices: Tensor | None = None,
    has_initial_state: Tensor | None = None,
    activation: bool | str | None = "silu",
    pad_slot_id: int | None = PAD_SLOT_ID,
    null_block_id: int | None = NULL_BLOCK_ID,
    metadata=None,
    validate_data: bool = False,
    *,
    block_idx_first_scheduled_token: Tensor | None = None,
    block_idx_last_scheduled_token: Tensor | None = None,
    initial_state_idx: Tensor | None = None,
    num_computed_tokens: Tensor | None = None,
    block_size_to_align: int = 0,
) -> Tensor:
    """:func:`gdn_ops.short_conv` over packed sequences, channels first: prefill.

    Args:
        x: ``[C, T]``, any strides. weight: ``[C, W]``; bias: ``[C]`` or None.
        conv_states: ``[blocks, C, L]``, ``L >= W - 1``, **written in place**: the first W-1 columns
            are the history.
        query_start_loc: ``[N+1]``. cache_indices: ``[N]`` or longer; absent: row n.
        has_initial_state: ``[N]`` bool; absent means **no** sequence has a history (as in vLLM).
        pad_slot_id, null_block_id: the entries of cache_indices that are padding.
        block_idx_first_scheduled_token, block_idx_last_scheduled_token, initial_state_idx,
            num_computed_tokens, block_size_to_align: refused; they keep states at block boundaries
            inside a call.
        metadata: the launch shape of vLLM's kernel; not read. validate_data: shapes are always
            checked.

    Returns:
        ``[C, T]`` in the dtype of x, channels contiguous.

    Raises:
        NotImplementedError: a refused keyword. ValueError: another activation.
        RuntimeError: as :func:`gdn_ops.short_conv`.
    """
    op = "causal_conv1d_fn"
    if (
        block_idx_first_scheduled_token is not None
        or block_idx_last_scheduled_token is not None
        or initial_state_idx is not None
        or num_computed_tokens is not None
        or block_size_to_align
    ):
        refuse_given(
            op,
            _NO_BLOCK_ALIGNED_STATES,
            block_idx_first_scheduled_token=block_idx_first_scheduled_token,
            block_idx_last_scheduled_token=block_idx_last_scheduled_token,
            initial_state_idx=initial_state_idx,
            num_computed_tokens=num_computed_tokens,
            block_size_to_align=block_size_to_align or None,
        )
    if has_initial_state is None:
        has_initial_state = torch.zeros_like(query_start_loc[1:], dtype=torch.bool)
    activation = activation_name(op, activation)
    if (
        cache_indices is not None
        and null_block_id == NULL_BLOCK_ID
        and pad_slot_id in (PAD_SLOT_ID, None)
    ):
        return _paged_short_conv(
            x, weight, bias, conv_states, cache_indices, has_initial_state, query_start_loc, None,
            activation, True,
        )  # fmt: skip
    rows = cache_indices
    if rows is not None:
        rows = without(rows, query_start_loc.shape[0] - 1, null_block_id, pad_slot_id)
    y = _short_conv(
        x.t()[None], weight, bias, conv_states, rows, has_initial_state, query_start_loc, None,
        activation, True,
    )  # fmt: skip
    return y[0].t()


def causal_conv1d_update(
    x: Tensor,
    conv_state: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: bool | str | None = None,
    conv_state_indices: Tensor | None = None,
    num_accepted_tokens: Tensor | None = None,
    query_start_loc: Tensor | None = None,
    max_query_len: int = -1,
    null_block_id: int | None = NULL_BLOCK_ID,
    validate_data: bool = False,
    out: Tensor | None = None,
    *,
    block_idx_last_scheduled_token: Tensor | None = None,
    initial_state_idx: Tensor | None = None,
    pad_slot_id: int | None = PAD_SLOT_ID,
    cache_seqlens: Tensor | None = None,
) -> Tensor:
    """:func:`gdn_ops.short_conv` for a few tokens a sequence: decode and speculative decode.

    Args:
        x: ``[B, C]``, one token a sequence; ``[B, C, T]``; or ``[tokens, C]`` with query_start_loc.
        conv_state: ``[blocks, C, L]``, ``L >= W - 1``, **written in place**: the first W-1 columns
            are the history; with num_accepted_tokens those from ``num_accepted_tokens - 1`` on.
        weight: ``[C, W]``; bias: ``[C]`` or None.
        conv_state_indices: ``[N]`` or longer (of ``[N, S]`` column 0); absent: row n.
        num_accepted_tokens: ``[N]`` or longer; below 1 makes the sequence padding.
        query_start_loc: ``[N+1]``. max_query_len: a launch bound of vLLM's kernel; not read.
        null_block_id, pad_slot_id (older versions): the entries of conv_state_indices that are
            padding.
        block_idx_last_scheduled_token, initial_state_idx, cache_seqlens: refused.
        validate_data: shapes are always checked.
        out: receives the result and is returned; absent: a new tensor, x is left as it was.

    Returns:
        The shape and dtype of x; zero for padded sequences.

    Raises:
        NotImplementedError: a refused keyword. ValueError: another activation, or an out of another
            shape or device.
        RuntimeError: as :func:`gdn_ops.short_conv`.
    """
    op = "causal_conv1d_update"
    if block_idx_last_scheduled_token is not None or initial_state_idx is not None:
        refuse_given(
            op,
            _NO_BLOCK_ALIGNED_STATES,
            block_idx_last_scheduled_token=block_idx_last_scheduled_token,
            initial_state_idx=initial_state_idx,
        )
    if cache_seqlens is not None:
        refuse_given(op, "the state is no ring buffer", cache_seqlens=cache_seqlens)
    activation = activation_name(op, activation)
    if out is not None:
        check_out(op, out, x)
    if query_start_loc is not None and conv_state_indices is not None:
        N = conv_state_indices.shape[0]
        if query_start_loc.shape[0] - 1 > N:
            # vLLM's kernel runs one program an index: further offsets are of no sequence.
            query_start_loc = query_start_loc[: N + 1]
    if (
        conv_state_indices is not None
        and null_block_id == NULL_BLOCK_ID
        and pad_slot_id in (PAD_SLOT_ID, None)
    ):
        y = _paged_short_conv(
            x, weight, bias, conv_state, conv_state_indices, None, query_start_loc,
            num_accepted_tokens, activation, query_start_loc is None,
        )  # fmt: skip
        return y if out is None else out.copy_(y)
    rows = conv_state_indices
    packed = query_start_loc is not None
    wide = x[None] if packed else x.mT if x.dim() == 3 else x[:, None]  # [B, T, C]
    if rows is not None:
        N = query_start_loc.shape[0] - 1 if packed else x.shape[0]
        rows = without(rows if rows.dim() == 1 else rows[:, 0], N, null_block_id, pad_slot_id)
    y = _short_conv(
        wide, weight, bias, conv_state, rows, None, query_start_loc, num_accepted_tokens,
        activation, True,
    )  # fmt: skip
    y = y[0] if packed else y.mT if x.dim() == 3 else y[:, 0]
    return y if out is None else out.copy_(y)
