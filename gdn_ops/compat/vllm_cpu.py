"""The functions that vLLM's CPU engine calls for Gated DeltaNet (``vllm._custom_ops.*_cpu``).

Its C++ operators work on the pool as ``[blocks, HV, K, V]``, whatever shape vLLM gave it, and for
bfloat16 only; these take it in the same layout, so states written by either are read by the other.
Padding is any negative index.

vLLM packs the convolution's weights for its own kernel when it loads a model. Ours needs them as
they are: :func:`causal_conv1d_weight_pack` is put in its place and hands out the plain weights,
remembered, so that weights which some other packing made are refused and not misread.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from gdn_ops.compat._common import (
    check_given,
    check_softplus,
    refuse,
)
from gdn_ops.ops.chunk import chunk_prefill

__all__ = [
    "causal_conv1d_fwd_cpu",
    "causal_conv1d_update_cpu",
    "causal_conv1d_weight_pack",
    "chunk_gated_delta_rule_cpu",
    "fused_gdn_gating_cpu",
    "fused_sigmoid_gating_delta_rule_update_cpu",
    "fused_sigmoid_gating_delta_rule_update_spec_cpu",
]

_short_conv = torch.ops.gdn.short_conv.default
_gating = torch.ops.gdn.gating.default
_paged_recurrent_gated = torch.ops.gdn.paged_recurrent_gated.default
_paged_short_conv = torch.ops.gdn.paged_short_conv.default

# Weights that we "packed", by address. Held, so that no other tensor can get the address.
_plain: dict[int, Tensor] = {}


def chunk_gated_delta_rule_cpu(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor,
    output_final_state: bool,
    cu_seqlens: Tensor,
    head_first: bool,
    use_qk_l2norm_in_kernel: bool,
    initial_state_indices: Tensor,
    eps: float = 1e-6,
) -> tuple[Tensor, Tensor]:
    """:func:`gdn_ops.chunk_prefill` on vLLM's pool.

    Args:
        query, key: ``[1, T, H, K]``; value: ``[1, T, HV, V]``; g, beta: ``[1, T, HV]``.
        initial_state: ``[blocks, HV, K, V]``, **written in place** whatever output_final_state.
        cu_seqlens: ``[N+1]``; initial_state_indices: ``[N]``. head_first: only false.
        eps: of the l2norm. Only 1e-6, the model's and that of every other kernel (vLLM's own
            default for this function is 1e-5, and it never passes another).

    Returns:
        ``(o [1, T, HV, V], initial_state)``.
    """
    op = "chunk_gated_delta_rule_cpu"
    if head_first:
        refuse(op, "head_first", head_first, "pass [B, T, H, D]")
    if eps != 1e-6 and use_qk_l2norm_in_kernel:
        refuse(op, "eps", eps, "the l2norm of the model has 1e-6")
    o = chunk_prefill(
        query, key, value, g, beta, initial_state.transpose(2, 3), initial_state_indices,
        cu_seqlens=cu_seqlens, qk_l2norm=use_qk_l2norm_in_kernel,
    )  # fmt: skip
    return o, initial_state


def fused_sigmoid_gating_delta_rule_update_cpu(
    A_log: Tensor,
    dt_bias: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    initial_state_source: Tensor,
    initial_state_indices: Tensor,
    cu_seqlens: Tensor,
    use_qk_l2norm_in_kernel: bool,
    softplus_beta: float = 1.0,
    softplus_threshold: float = 20.0,
) -> Tensor:
    """:func:`gdn_ops.recurrent_gated` on vLLM's pool: one decoded token a sequence.

    Args:
        q, k: ``[1, N, H, K]``; v: ``[1, N, HV, V]``; a, b: ``[N, HV]``; A_log, dt_bias: ``[HV]``.
        initial_state_source: ``[blocks, HV, K, V]``, **written in place**.
        initial_state_indices: ``[N]``; cu_seqlens: ``[N+1]``.

    Returns:
        ``[N, 1, HV, V]``.
    """
    if softplus_beta != 1.0 or softplus_threshold != 20.0:
        check_softplus(
            "fused_sigmoid_gating_delta_rule_update_cpu", softplus_beta, softplus_threshold
        )
    o = _paged_recurrent_gated(
        q, k, v, a, b, A_log, dt_bias, initial_state_source, initial_state_indices, cu_seqlens,
        None, None, use_qk_l2norm_in_kernel, 0, True,
    )  # fmt: skip
    return o.transpose(0, 1)


def fused_sigmoid_gating_delta_rule_update_spec_cpu(
    A_log: Tensor,
    dt_bias: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    initial_state_source: Tensor,
    spec_state_indices: Tensor,
    num_accepted_tokens: Tensor,
    cu_seqlens: Tensor,
    use_qk_l2norm_in_kernel: bool,
    softplus_beta: float = 1.0,
    softplus_threshold: float = 20.0,
) -> Tensor:
    """The speculative form: ``q, k [T, H, K]``, ``v [T, HV, V]``, spec_state_indices ``[N, S]``.

    Column ``num_accepted_tokens - 1`` is read, column j receives the state after token j.

    Returns:
        ``[T, HV, V]``.
    """
    if softplus_beta != 1.0 or softplus_threshold != 20.0:
        check_softplus(
            "fused_sigmoid_gating_delta_rule_update_spec_cpu", softplus_beta, softplus_threshold
        )
    return _paged_recurrent_gated(
        q, k, v, a, b, A_log, dt_bias, initial_state_source, spec_state_indices, cu_seqlens,
        num_accepted_tokens, None, use_qk_l2norm_in_kernel, 0, True,
    )  # fmt: skip


def fused_gdn_gating_cpu(
    A_log: Tensor, a: Tensor, b: Tensor, dt_bias: Tensor
) -> tuple[Tensor, Tensor]:
    """``(g, sigmoid(b))``, both ``[1, T, HV]`` float32 (vLLM rounds the second to bfloat16)."""
    return _gating(a[None], b[None], A_log, dt_bias)


def causal_conv1d_weight_pack(weight: Tensor) -> Tensor:
    """The weights ``[C, W]`` as they are, contiguous, remembered as ours."""
    plain = weight.contiguous().clone()
    _plain[plain.data_ptr()] = plain
    return plain


def repack_weights(pack: Callable[[Tensor], Tensor]) -> None:
    """Packs every remembered weight in place with vLLM's own function, and forgets it."""
    for plain in _plain.values():
        plain.copy_(pack(plain).view_as(plain))
    _plain.clear()


def _plain_weight(op: str, weight: Tensor, is_weight_packed: bool) -> Tensor:
    if weight.dim() == 3:
        weight = weight.squeeze(1)
    if is_weight_packed and weight.data_ptr() not in _plain:
        raise ValueError(
            f"{op}: is_weight_packed=True: these weights were packed by vLLM before gdn_ops was "
            "put in place; load the plug-in before the model"
        )
    return weight


def causal_conv1d_fwd_cpu(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    conv_states: Tensor | None,
    query_start_loc: Tensor | None,
    cache_indices: Tensor | None,
    has_initial_state: Tensor | None,
    silu_activation: bool,
    is_weight_packed: bool,
) -> Tensor:
    """:func:`gdn_ops.short_conv` over packed sequences, channels first: prefill.

    Args:
        x: ``[C, T]``. weight: ``[C, W]`` of :func:`causal_conv1d_weight_pack`, or any with
            is_weight_packed false. conv_states: ``[blocks, C, L]``, **written in place**.
        query_start_loc: ``[N+1]``; cache_indices: ``[N]``.
        has_initial_state: ``[N]`` bool; absent: none has.

    Returns:
        ``[C, T]`` in the dtype of x.

    Raises:
        ValueError: conv_states or query_start_loc absent (use :func:`gdn_ops.conv1d`), or weights
            that something else packed.
    """
    op = "causal_conv1d_fwd_cpu"
    check_given(op, conv_states=conv_states, query_start_loc=query_start_loc)
    if has_initial_state is None:
        has_initial_state = torch.zeros_like(query_start_loc[1:], dtype=torch.bool)
    weight = _plain_weight(op, weight, is_weight_packed)
    activation = "silu" if silu_activation else "none"
    if cache_indices is not None:
        return _paged_short_conv(
            x, weight, bias, conv_states, cache_indices, has_initial_state, query_start_loc, None,
            activation, True, False, 0,
        )  # fmt: skip
    return _short_conv(
        x.t()[None], weight, bias, conv_states, None, has_initial_state, query_start_loc, None,
        activation, True,
    )[0].t()  # fmt: skip


def causal_conv1d_update_cpu(
    x: Tensor,
    conv_states: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    silu_activation: bool,
    conv_state_indices: Tensor | None,
    is_weight_packed: bool,
    num_accepted_tokens: Tensor | None = None,
) -> Tensor:
    """:func:`gdn_ops.short_conv` for ``x [B, C]`` or ``[B, T, C]``: decode and speculative decode.

    Args:
        conv_states: ``[blocks, C, L]``, **written in place**. conv_state_indices: ``[B]``.
        weight, is_weight_packed: as in :func:`causal_conv1d_fwd_cpu`. num_accepted_tokens: ``[B]``.

    Returns:
        The shape and dtype of x.
    """
    weight = _plain_weight("causal_conv1d_update_cpu", weight, is_weight_packed)
    activation = "silu" if silu_activation else "none"
    if conv_state_indices is not None:
        return _paged_short_conv(
            x, weight, bias, conv_states, conv_state_indices, None, None, num_accepted_tokens,
            activation, False, False, 0,
        )  # fmt: skip
    y = _short_conv(
        x if x.dim() == 3 else x.unsqueeze(1), weight, bias, conv_states, None, None, None,
        num_accepted_tokens, activation, True,
    )  # fmt: skip
    return y if x.dim() == 3 else y.squeeze(1)
