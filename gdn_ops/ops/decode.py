"""``decode``: everything of the layer between its two projections, in one call."""

from __future__ import annotations

import torch
from torch import Tensor

from gdn_ops.ops._common import SEQUENCE_ARGS, check_dims, check_same_device, register_fake
from gdn_ops.ops.conv import CONV_POOL_ARGS

_decode = torch.ops.gdn.decode.default

# Shared by decode, decode_buffered and decode_lowrank.
DECODE_ARGS = f"""
        projected: ``[B, T, D]``, at most 16 tokens a sequence, ``D = C + HV*V + 2*HV`` columns
            ``qkv | z | b | a`` with ``C = 2*H*K + HV*V``, any strides: the output of one packed
            input projection.
        conv_weight: ``[C, W]``; conv_bias: ``[C]`` or None; A_log, dt_bias: ``[HV]``;
            norm_weight: ``[V]``; each float32 or an activation dtype.
{CONV_POOL_ARGS[1:]}"""


def decode_tail(sequence_args: str) -> str:
    """The same for what follows the pools, around what the op says of its sequences."""
    return f"""
        num_k_heads, head_k_dim: H and K.
{sequence_args[1:]}
            A 2-D ``state_indices`` names the row of ``conv_state`` in column 0.
        scale: factor on the output; ``K**-0.5`` if absent.
        qk_l2norm: normalise q and k in float32.
        eps: of the gated norm. activation: of the convolution, ``"silu"`` or ``"none"``."""


def decode(
    projected: Tensor,
    conv_weight: Tensor,
    conv_bias: Tensor | None,
    A_log: Tensor,
    dt_bias: Tensor,
    norm_weight: Tensor,
    conv_state: Tensor,
    state: Tensor,
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
    return _decode(
        projected, conv_weight, conv_bias, A_log, dt_bias, norm_weight, conv_state, state,
        num_k_heads, head_k_dim, state_indices, has_initial_state, cu_seqlens, num_accepted, scale,
        qk_l2norm, eps, activation, conv_leading,
    )  # fmt: skip


decode.__doc__ = f"""Short conv, gates, l2norm, recurrence and gated norm of a layer, in one call.

    Nothing between the projections is stored: what the separate ops would round to the activation
    dtype in between stays float32 here.

    Args:
{DECODE_ARGS[1:]}
        state: ``[P, HV, V, K]`` float32, bfloat16 or float16, **written in place**; K contiguous,
            or the transposed view of a ``[P, HV, K, V]`` pool.
{decode_tail(SEQUENCE_ARGS)[1:]}

    Returns:
        ``[B, T, HV*V]`` in the dtype of projected, contiguous: the input of the output projection.

    Raises:
        RuntimeError: something does not fit, or an input requires grad in grad mode. Nothing has
            been written then.
    """


def output_of(op: str, projected: Tensor, conv_state: Tensor, HV: int, V: int, **others) -> Tensor:
    """Fake output of a decode op."""
    check_dims(op, projected=(projected, "[B, T, D]"))
    check_same_device(op, projected, conv_state=conv_state, **others)
    B, T, _ = projected.shape
    return projected.new_empty((B, T, HV * V))


@register_fake("gdn::decode")
def _(projected, conv_weight, conv_bias, A_log, dt_bias, norm_weight, conv_state, state,
      num_k_heads, head_k_dim, state_indices=None, has_initial_state=None, cu_seqlens=None,
      num_accepted=None, scale=None, qk_l2norm=True, eps=1e-6, activation="silu",
      conv_leading=False):  # fmt: skip
    check_dims("decode", state=(state, "[P, HV, V, K]"))
    return output_of("decode", projected, conv_state, state.shape[1], state.shape[2], state=state,
                     conv_weight=conv_weight, conv_bias=conv_bias, A_log=A_log, dt_bias=dt_bias,
                     norm_weight=norm_weight, state_indices=state_indices,
                     has_initial_state=has_initial_state, cu_seqlens=cu_seqlens,
                     num_accepted=num_accepted)  # fmt: skip
