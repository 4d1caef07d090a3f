"""``short_conv``, ``conv1d``, ``conv_gating``: the depthwise causal convolution of the layer."""

from __future__ import annotations

import torch
from torch import Tensor

from gdn_ops.ops._common import SEQUENCE_ARGS, check_dims, check_same_device, register_fake

_short_conv = torch.ops.gdn.short_conv.default
_conv1d = torch.ops.gdn.conv1d.default
_conv_gating = torch.ops.gdn.conv_gating.default

# Documentation of a pool of histories, spliced into docstrings here and in decode.py.
CONV_POOL_ARGS = """
        conv_state: ``[P, C, L]``, ``L >= W - 1``, float32 or an activation dtype, any strides,
            **written in place**. With ``conv_leading=False`` (Hugging Face, causal-conv1d) the live
            columns are the last W-1, newest last, and a wider row shifts as a whole. With
            ``conv_leading=True`` (vLLM) they are the first W-1; in a speculative call
            (``num_accepted`` given) those from ``num_accepted - 1`` on, and the call leaves
            [shifted history, the T new tokens] in the first ``W - 1 + T - 1`` columns."""


def short_conv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    conv_state: Tensor,
    state_indices: Tensor | None = None,
    has_initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    num_accepted: Tensor | None = None,
    activation: str = "silu",
    conv_leading: bool = False,
) -> Tensor:
    return _short_conv(
        x, weight, bias, conv_state, state_indices, has_initial_state, cu_seqlens, num_accepted,
        activation, conv_leading,
    )  # fmt: skip


short_conv.__doc__ = f"""Depthwise causal convolution over a pool of histories: prefill and update.

    Args:
        x: ``[B, T, C]`` float32, bfloat16 or float16, any strides.
        weight: ``[C, W]``, oldest tap first, ``1 <= W <= 8``.
        bias: ``[C]`` or None.
{CONV_POOL_ARGS[1:]}
{SEQUENCE_ARGS[1:]}
        activation: ``"silu"`` or ``"none"``.

    Returns:
        ``[B, T, C]`` in the dtype of x, contiguous; zero for padding rows. Sums are float32.

    Raises:
        RuntimeError: something does not fit, or an input requires grad in grad mode (see
            :func:`conv1d`). Nothing has been written then.

    Source: causal-conv1d (Dao-AILab) for the two call forms, vLLM for the leading layout.
    """


def conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    activation: str = "silu",
    state_len: int | None = None,
) -> tuple[Tensor, Tensor]:
    """The convolution as a function, with gradients: training, and calls that have no pool.

    Args:
        x: ``[B, T, C]`` float32, bfloat16 or float16, any strides.
        weight: ``[C, W]``, oldest tap first. bias: ``[C]`` or None.
        initial_state: ``[N, C, L]`` columns before each sequence, newest last; zeros if absent.
        cu_seqlens: ``[N+1]`` offsets of packed sequences (then ``B == 1``).
        activation: ``"silu"`` or ``"none"``.
        state_len: L of the final state; that of ``initial_state``, else ``W - 1``.

    Returns:
        ``(y [B, T, C], final_state [N, C, L])``: the last L columns of initial state and tokens.

    Raises:
        RuntimeError: shapes, dtypes, devices or (on CPU) lengths do not fit.
    """
    return _conv1d(x, weight, bias, initial_state, cu_seqlens, activation, state_len)


def conv_gating(
    mixed_qkv: Tensor,
    a: Tensor,
    b: Tensor,
    conv_weight: Tensor,
    conv_bias: Tensor | None,
    A_log: Tensor,
    dt_bias: Tensor,
    conv_state: Tensor,
    num_k_heads: int,
    head_k_dim: int,
    state_indices: Tensor | None = None,
    has_initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    num_accepted: Tensor | None = None,
    qk_l2norm: bool = False,
    activation: str = "silu",
    conv_leading: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    return _conv_gating(
        mixed_qkv, a, b, conv_weight, conv_bias, A_log, dt_bias, conv_state, num_k_heads,
        head_k_dim, state_indices, has_initial_state, cu_seqlens, num_accepted, qk_l2norm,
        activation, conv_leading,
    )  # fmt: skip


conv_gating.__doc__ = f"""Short convolution, split into heads, gates, optional l2norm: one pass.

    Args:
        mixed_qkv: ``[B, T, C]``, ``C = 2*H*K + HV*V``: all queries, all keys, all values.
        a, b: ``[B, T, HV]``, A_log, dt_bias: ``[HV]``, as in ``gating``.
        conv_weight: ``[C, W]``; conv_bias: ``[C]`` or None.
        num_k_heads, head_k_dim: H and K.
        qk_l2norm: write q and k normalised (in float32, before their one rounding).
{CONV_POOL_ARGS[1:]}
{SEQUENCE_ARGS[1:]}
        activation: ``"silu"`` or ``"none"``.

    Returns:
        ``q, k [B, T, H, K]``, ``v [B, T, HV, V]`` in the dtype of mixed_qkv, ``g, beta [B, T, HV]``
        float32, all contiguous; zero for padding rows.

    Raises:
        RuntimeError: as :func:`short_conv`.
    """


@register_fake("gdn::short_conv")
def _(x, weight, bias, conv_state, state_indices=None, has_initial_state=None, cu_seqlens=None,
      num_accepted=None, activation="silu", conv_leading=False):  # fmt: skip
    check_dims("short_conv", x=(x, "[B, T, C]"))
    check_same_device("short_conv", x, weight=weight, bias=bias, conv_state=conv_state,
                      state_indices=state_indices, has_initial_state=has_initial_state,
                      cu_seqlens=cu_seqlens, num_accepted=num_accepted)  # fmt: skip
    return x.new_empty(x.shape)


@register_fake("gdn::conv1d")
def _(x, weight, bias=None, initial_state=None, cu_seqlens=None, activation="silu", state_len=None):
    check_dims("conv1d", x=(x, "[B, T, C]"))
    check_same_device("conv1d", x, weight=weight, bias=bias, initial_state=initial_state,
                      cu_seqlens=cu_seqlens)  # fmt: skip
    N = x.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    if state_len is None:
        state_len = weight.shape[1] - 1 if initial_state is None else initial_state.shape[2]
    like = x if initial_state is None else initial_state
    return x.new_empty(x.shape), like.new_empty((N, x.shape[2], state_len))


@register_fake("gdn::conv_gating")
def _(mixed_qkv, a, b, conv_weight, conv_bias, A_log, dt_bias, conv_state, num_k_heads, head_k_dim,
      state_indices=None, has_initial_state=None, cu_seqlens=None, num_accepted=None,
      qk_l2norm=False, activation="silu", conv_leading=False):  # fmt: skip
    op = "conv_gating"
    check_dims(op, mixed_qkv=(mixed_qkv, "[B, T, C]"), a=(a, "[B, T, HV]"))
    check_same_device(op, mixed_qkv, a=a, b=b, conv_weight=conv_weight, conv_bias=conv_bias,
                      A_log=A_log, dt_bias=dt_bias, conv_state=conv_state,
                      state_indices=state_indices, has_initial_state=has_initial_state,
                      cu_seqlens=cu_seqlens, num_accepted=num_accepted)  # fmt: skip
    B, T, C = mixed_qkv.shape
    HV = a.shape[2]
    V = (C - 2 * num_k_heads * head_k_dim) // HV
    qk = (B, T, num_k_heads, head_k_dim)
    gates = mixed_qkv.new_empty((B, T, HV), dtype=torch.float32)
    return (
        mixed_qkv.new_empty(qk),
        mixed_qkv.new_empty(qk),
        mixed_qkv.new_empty((B, T, HV, V)),
        gates,
        torch.empty_like(gates),
    )
