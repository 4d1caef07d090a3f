"""``recurrent`` and ``recurrent_gated``: the gated delta rule token by token, state in place."""

from __future__ import annotations

import torch
from torch import Tensor

from gdn_ops.ops._common import SEQUENCE_ARGS, check_dims, check_tokens, register_fake

_recurrent = torch.ops.gdn.recurrent.default
_recurrent_gated = torch.ops.gdn.recurrent_gated.default


def recurrent(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    state: Tensor,
    state_indices: Tensor | None = None,
    has_initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    num_accepted: Tensor | None = None,
    scale: float | None = None,
    qk_l2norm: bool = False,
) -> Tensor:
    return _recurrent(
        q, k, v, g, beta, state, state_indices, has_initial_state, cu_seqlens, num_accepted, scale,
        qk_l2norm,
    )  # fmt: skip


recurrent.__doc__ = f"""Gated delta rule, one token after the other, on a pool of states.

    Per value head with state ``S [V, K]``::

        u = beta * (v - exp(g) * S k);  S = exp(g) * S + u k^T;  o = scale * S q

    All state arithmetic is float32; the state is rounded once when it is stored. Value head ``h``
    uses query/key head ``h // (HV / H)``.

    Args:
        q, k: ``[B, T, H, K]`` float32, bfloat16 or float16, any strides.
        v: ``[B, T, HV, V]``, the dtype of q.
        g: ``[B, T, HV]`` log decay (natural log, normally <= 0; ``-inf`` clears the state), float32
            or an activation dtype.
        beta: ``[B, T, HV]`` write strength, float32 or an activation dtype.
        state: ``[P, HV, V, K]`` float32, bfloat16 or float16, **written in place**; K contiguous,
            or the transposed view of a ``[P, HV, K, V]`` pool.
{SEQUENCE_ARGS[1:]}
        scale: factor on the output; ``K**-0.5`` if absent.
        qk_l2norm: normalise q and k with ``x * rsqrt(sum(x^2) + 1e-6)`` in float32 first.

    Returns:
        ``[B, T, HV, V]`` in the dtype of q, contiguous.

    Raises:
        RuntimeError: a shape, dtype, device or stride is not as above, or an input requires grad in
            grad mode (there is no backward; see ``chunk``). On CPU also rows, lengths or accepted
            counts out of range. Nothing has been written then.

    Source: Yang, Kautz, Hatamizadeh, "Gated Delta Networks: Improving Mamba2 with Delta Rule".
    """


def recurrent_gated(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    state: Tensor,
    state_indices: Tensor | None = None,
    has_initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    num_accepted: Tensor | None = None,
    scale: float | None = None,
    qk_l2norm: bool = False,
) -> Tensor:
    """:func:`recurrent` with the gates computed inside.

    ``g = -exp(A_log) * softplus(a + dt_bias)`` and ``beta = sigmoid(b)``, both in float32.

    Args:
        a, b: ``[B, T, HV]`` float32 or an activation dtype, any strides.
        A_log, dt_bias: ``[HV]`` float32 or an activation dtype.

    The other arguments, the result and the errors are those of :func:`recurrent`.
    """
    return _recurrent_gated(
        q, k, v, a, b, A_log, dt_bias, state, state_indices, has_initial_state, cu_seqlens,
        num_accepted, scale, qk_l2norm,
    )  # fmt: skip


@register_fake("gdn::recurrent")
def _(q, k, v, g, beta, state, state_indices=None, has_initial_state=None, cu_seqlens=None,
      num_accepted=None, scale=None, qk_l2norm=False):  # fmt: skip
    return output_of("recurrent", q, k, v, state, g=g, beta=beta, state_indices=state_indices,
                     has_initial_state=has_initial_state, cu_seqlens=cu_seqlens,
                     num_accepted=num_accepted)  # fmt: skip


@register_fake("gdn::recurrent_gated")
def _(q, k, v, a, b, A_log, dt_bias, state, state_indices=None, has_initial_state=None,
      cu_seqlens=None, num_accepted=None, scale=None, qk_l2norm=False):  # fmt: skip
    return output_of("recurrent_gated", q, k, v, state, a=a, b=b, A_log=A_log, dt_bias=dt_bias,
                     state_indices=state_indices, has_initial_state=has_initial_state,
                     cu_seqlens=cu_seqlens, num_accepted=num_accepted)  # fmt: skip


def output_of(op: str, q: Tensor, k: Tensor, v: Tensor, state: Tensor, **others) -> Tensor:
    """Fake output of a recurrence: the facts that the C++ checks, as far as shapes tell them."""
    check_tokens(op, q, k, v, state=state, **others)
    check_dims(op, state=(state, "[P, HV, V, K]"))
    return v.new_empty(v.shape)
