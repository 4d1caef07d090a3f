"""vLLM-Kunlun's Gated DeltaNet functions on the ops of this package.

Names, order and keywords are those of the plug-in's ``ops.fla``, ``ops.mamba.causal_conv1d`` and
``KunlunOps``. The decode function is vLLM's (:mod:`gdn_ops.compat.vllm`), and so are the meaning of
block 0 and of negative rows; the others differ in layout: tokens come first, convolution states are
``[blocks, L, C]``, and the chunked function has its states as ``[N, HV, K, V]``.

Unlike the plug-in's, these read every keyword that changes the result: ``activation``, and
``use_qk_l2norm_in_kernel`` and ``output_final_state`` of the chunked function, which the plug-in
takes as given. Copies of metadata on the host (``*_cpu``) are not needed and not read.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gdn_ops.compat import vllm
from gdn_ops.compat._common import (
    PAD_SLOT_ID,
    activation_name,
    check_given,
    check_softplus,
    refuse,
    refuse_given,
)
from gdn_ops.compat.vllm import fused_recurrent_gated_delta_rule

__all__ = [
    "causal_conv1d_fn",
    "causal_conv1d_update",
    "chunk_gated_delta_rule",
    "fused_gdn_gating",
    "fused_recurrent_gated_delta_rule",
]

_chunk_prefill = torch.ops.gdn.chunk_prefill.default
_gating = torch.ops.gdn.gating.default
_paged_short_conv = torch.ops.gdn.paged_short_conv.default


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
    head_first: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """:func:`gdn_ops.chunk_prefill` for gathered states: prefill.

    Args:
        q, k: ``[B, T, H, K]``; v: ``[B, T, HV, V]``; g, beta: ``[B, T, HV]``.
        initial_state: ``[N, HV, K, V]`` float32, bfloat16 or float16; float32 zeros if absent.
        cu_seqlens: ``[N+1]`` offsets of packed sequences (then ``B == 1``). head_first: only false.

    Returns:
        ``(o [B, T, HV, V], final_state [N, HV, K, V] or None)``, the state in the dtype of
        initial_state, which is left as it was.

    Raises:
        NotImplementedError: head_first. ValueError: initial_state has not N states.
        RuntimeError: as :func:`gdn_ops.chunk_prefill`; there are no gradients.
    """
    op = "chunk_gated_delta_rule"
    if head_first:
        refuse(op, "head_first", head_first, "pass [B, T, H, D]")
    N = q.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    # A pool of its own for the call: the op writes the final states in this layout, where a copy
    # that turns what it returns costs more than one that does not.
    if initial_state is None:
        state = v.new_zeros((N, v.shape[2], q.shape[3], v.shape[3]), dtype=torch.float32)
    elif initial_state.shape[0] == N:
        state = initial_state.clone(memory_format=torch.contiguous_format)
    else:
        raise ValueError(
            f"{op}: initial_state: expected {N} states, got shape {tuple(initial_state.shape)}"
        )
    o = _chunk_prefill(
        q, k, v, g, beta, state.mT, None, None, None, cu_seqlens, None, scale,
        use_qk_l2norm_in_kernel,
    )  # fmt: skip
    return o, state if output_final_state else None


def fused_gdn_gating(
    A_log: Tensor, a: Tensor, dt_bias: Tensor, beta: float = 1.0, threshold: float = 20.0
) -> Tensor:
    """The log decay alone, float32, in the shape of a (``[T, HV]``)."""
    if beta != 1.0 or threshold != 20.0:
        check_softplus("fused_gdn_gating", beta, threshold)
    return _gating(a, a, A_log, dt_bias)[0]


def causal_conv1d_fn(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    query_start_loc: Tensor | None = None,
    query_start_loc_cpu: Tensor | None = None,
    cache_indices: Tensor | None = None,
    cache_indices_cpu: Tensor | None = None,
    has_initial_state: Tensor | None = None,
    has_initial_state_cpu: Tensor | None = None,
    conv_states: Tensor | None = None,
    activation: bool | str | None = "silu",
    pad_slot_id: int | None = PAD_SLOT_ID,
    metadata=None,
    validate_data: bool = False,
) -> Tensor:
    """:func:`gdn_ops.compat.vllm.causal_conv1d_fn` with tokens first.

    Args:
        x: ``[T, C]``. weight: ``[C, W]``; bias: ``[C]`` or None.
        query_start_loc: ``[N+1]``. conv_states: ``[blocks, L, C]``, **written in place**.
        cache_indices, has_initial_state, activation, pad_slot_id: as there. The ``*_cpu`` copies,
            metadata and validate_data are not read.

    Returns:
        ``[T, C]`` in the dtype of x, contiguous.

    Raises:
        ValueError: no query_start_loc or no conv_states; another activation.
    """
    op = "causal_conv1d_fn"
    check_given(op, query_start_loc=query_start_loc, conv_states=conv_states)
    if (
        cache_indices is not None
        and has_initial_state is not None
        and pad_slot_id in (PAD_SLOT_ID, None)
    ):
        return _paged_short_conv(
            x, weight, bias, conv_states, cache_indices, has_initial_state, query_start_loc, None,
            activation_name(op, activation), False, True,
        )  # fmt: skip
    return vllm.causal_conv1d_fn(
        x.t(), weight, bias, conv_states.transpose(1, 2), query_start_loc, cache_indices,
        has_initial_state, activation, pad_slot_id,
    ).t()  # fmt: skip


def causal_conv1d_update(
    x: Tensor,
    conv_state: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: bool | str | None = None,
    cache_seqlens: Tensor | None = None,
    conv_state_indices: Tensor | None = None,
    conv_state_indices_cpu: Tensor | None = None,
    num_accepted_tokens: Tensor | None = None,
    num_accepted_tokens_cpu: Tensor | None = None,
    query_start_loc: Tensor | None = None,
    max_query_len: int = -1,
    pad_slot_id: int | None = PAD_SLOT_ID,
    metadata=None,
    validate_data: bool = False,
) -> Tensor:
    """:func:`gdn_ops.compat.vllm.causal_conv1d_update` with tokens first.

    Args:
        x: ``[B, C]``; or ``[tokens, C]`` with query_start_loc, or with num_accepted_tokens and
            max_query_len, then ``max_query_len`` tokens a sequence.
        conv_state: ``[blocks, L, C]``, **written in place**.
        cache_seqlens: refused. The ``*_cpu`` copies, metadata and validate_data are not read.
        Others: as there.

    Returns:
        The shape and dtype of x, contiguous; x is left as it was.

    Raises:
        NotImplementedError: cache_seqlens. ValueError: another activation, or speculative tokens
            that are not max_query_len for each sequence and have no query_start_loc.
    """
    op = "causal_conv1d_update"
    if cache_seqlens is not None:
        refuse_given(op, "the state is no ring buffer", cache_seqlens=cache_seqlens)
    one_token = num_accepted_tokens is None and query_start_loc is None
    if one_token and conv_state_indices is not None and pad_slot_id in (PAD_SLOT_ID, None):
        return _paged_short_conv(
            x, weight, bias, conv_state, conv_state_indices, None, None, None,
            activation_name(op, activation), False, True,
        )  # fmt: skip
    state = conv_state.transpose(1, 2)
    if num_accepted_tokens is None or query_start_loc is not None:
        return vllm.causal_conv1d_update(
            x, state, weight, bias, activation, conv_state_indices, num_accepted_tokens,
            query_start_loc, pad_slot_id=pad_slot_id,
        )  # fmt: skip
    if max_query_len < 1 or x.shape[0] % max_query_len:
        raise ValueError(
            f"{op}: max_query_len: expected a divisor of the {x.shape[0]} tokens (or "
            f"query_start_loc), got {max_query_len}"
        )
    tokens = x.unflatten(0, (-1, max_query_len)).transpose(1, 2)
    y = vllm.causal_conv1d_update(
        tokens, state, weight, bias, activation, conv_state_indices, num_accepted_tokens,
        pad_slot_id=pad_slot_id,
    )  # fmt: skip
    return y.transpose(1, 2).flatten(0, 1)
