"""Readable oracles for every op: sequential, slow, the truth of the tests and benchmarks.

Each function takes the arguments of the op of the same name and computes in ``dtype`` (float64
unless told otherwise), token by token, straight from the formulas. Inputs are never modified: an op
that writes a pool has an oracle that *returns* the new pool, with the rounding of the pool's dtype
left out, so that a test can see how far a kernel's single rounding is from the exact value.

Source of the recurrence: Yang, Kautz, Hatamizadeh, "Gated Delta Networks" (ICLR 2025); conventions
(gate, l2norm epsilon, order of decay and error) follow the Qwen3-Next model code of transformers.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = [
    "conv1d",
    "conv_gating",
    "decode",
    "gated_rms_norm",
    "gating",
    "l2norm",
    "recurrent",
    "recurrent_gated",
    "sequence_slices",
    "short_conv",
]

L2_EPS = 1e-6


def l2norm(x: Tensor) -> Tensor:
    """``x * rsqrt(sum(x^2) + 1e-6)`` over the last dimension."""
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + L2_EPS)


def sequence_slices(B: int, T: int, cu_seqlens: Tensor | None) -> list[tuple[int, int, int]]:
    """``(batch row, first token, end token)`` of each sequence."""
    if cu_seqlens is None:
        return [(b, 0, T) for b in range(B)]
    cu = cu_seqlens.tolist()
    return [(0, start, end) for start, end in zip(cu, cu[1:], strict=False)]


def gating(
    a: Tensor, b: Tensor, A_log: Tensor, dt_bias: Tensor, *, dtype: torch.dtype = torch.float64
) -> tuple[Tensor, Tensor]:
    """``g = -exp(A_log) * softplus(a + dt_bias)``, ``beta = sigmoid(b)``."""
    x = a.to(dtype) + dt_bias.to(dtype)
    softplus = torch.where(x > 0, x + torch.log1p(torch.exp(-x.abs())), torch.log1p(x.exp()))
    return -A_log.to(dtype).exp() * softplus, torch.sigmoid(b.to(dtype))


def _row(state_indices: Tensor | None, n: int, column: int = 0) -> int:
    if state_indices is None:
        return n
    return int(state_indices[n] if state_indices.dim() == 1 else state_indices[n, column])


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
    *,
    dtype: torch.dtype = torch.float64,
) -> tuple[Tensor, Tensor]:
    """Gated delta rule, token by token. Returns ``(o, new state pool)``, both in ``dtype``."""
    B, T, H, K = q.shape
    HV, V = v.shape[2:]
    scale = K**-0.5 if scale is None else scale
    qd, kd, vd, gd, bd = (x.to(dtype) for x in (q, k, v, g, beta))
    if qk_l2norm:
        qd, kd = l2norm(qd), l2norm(kd)
    qd, kd = (x.repeat_interleave(HV // H, dim=2) for x in (qd, kd))
    pool = state.to(dtype).clone()
    out = torch.zeros(B, T, HV, V, dtype=dtype)
    per_token = state_indices is not None and state_indices.dim() == 2
    for n, (b, start, end) in enumerate(sequence_slices(B, T, cu_seqlens)):
        accepted = 1 if num_accepted is None else int(num_accepted[n])
        if accepted < 1:
            continue
        row = _row(state_indices, n, accepted - 1)
        if row < 0:
            continue
        fresh = has_initial_state is not None and not bool(has_initial_state[n])
        S = torch.zeros(HV, V, K, dtype=dtype) if fresh else state[row].to(dtype)
        for j, t in enumerate(range(start, end)):
            decay = gd[b, t].exp()[:, None, None]
            kt, qt, vt = kd[b, t], qd[b, t], vd[b, t]
            S = decay * S
            u = bd[b, t][:, None] * (vt - torch.einsum("hvk,hk->hv", S, kt))
            S = S + u[:, :, None] * kt[:, None, :]
            out[b, t] = scale * torch.einsum("hvk,hk->hv", S, qt)
            if per_token and (target := _row(state_indices, n, j)) >= 0:
                pool[target] = S
        if not per_token and end > start:
            pool[row] = S
    return out, pool


def recurrent_gated(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    state: Tensor,
    *args,
    dtype: torch.dtype = torch.float64,
    **kwargs,
) -> tuple[Tensor, Tensor]:
    """:func:`recurrent` with the gates of :func:`gating`."""
    g, beta = gating(a, b, A_log, dt_bias, dtype=dtype)
    return recurrent(q, k, v, g, beta, state, *args, dtype=dtype, **kwargs)


def _activate(y: Tensor, activation: str) -> Tensor:
    if activation == "silu":
        return y * torch.sigmoid(y)
    if activation == "none":
        return y
    raise ValueError(f"activation: expected 'silu' or 'none', got {activation!r}")


def _convolve(history: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """history [W-1, C] then x [T, C], both in time order, against weight [C, W]; returns [T, C]."""
    W = weight.shape[1]
    window = torch.cat([history, x])
    y = torch.zeros_like(x)
    for w in range(W):
        y += weight[:, w] * window[w : w + x.shape[0]]
    return y if bias is None else y + bias


def conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    activation: str = "silu",
    state_len: int | None = None,
    *,
    dtype: torch.dtype = torch.float64,
) -> tuple[Tensor, Tensor]:
    """Depthwise causal convolution over ``x [B, T, C]``. Returns ``(y, final_state [N, C, L])``."""
    B, T, C = x.shape
    W = weight.shape[1]
    if state_len is None:
        state_len = W - 1 if initial_state is None else initial_state.shape[2]
    w, bd = weight.to(dtype), None if bias is None else bias.to(dtype)
    y = torch.zeros(B, T, C, dtype=dtype)
    slices = sequence_slices(B, T, cu_seqlens)
    final = torch.zeros(len(slices), C, state_len, dtype=dtype)
    for n, (b, start, end) in enumerate(slices):
        history = torch.zeros(state_len, C, dtype=dtype)
        if initial_state is not None:
            history = initial_state[n].to(dtype).T
        tokens = x[b, start:end].to(dtype)
        padded = torch.cat([torch.zeros(W, C, dtype=dtype), history])
        y[b, start:end] = _convolve(padded[len(padded) - (W - 1) :], tokens, w, bd)
        final[n] = torch.cat([history, tokens])[len(history) + len(tokens) - state_len :].T
    return _activate(y, activation), final


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
    *,
    dtype: torch.dtype = torch.float64,
) -> tuple[Tensor, Tensor]:
    """Causal convolution over a pool of histories. Returns ``(y, new conv pool)``."""
    B, T, C = x.shape
    W, L = weight.shape[1], conv_state.shape[2]
    w, bd = weight.to(dtype), None if bias is None else bias.to(dtype)
    pool = conv_state.to(dtype).clone()
    y = torch.zeros(B, T, C, dtype=dtype)
    for n, (b, start, end) in enumerate(sequence_slices(B, T, cu_seqlens)):
        accepted = 1 if num_accepted is None else int(num_accepted[n])
        row = _row(state_indices, n)
        if accepted < 1 or row < 0 or end == start:
            continue
        first = accepted - 1 if conv_leading else L - (W - 1)
        history = conv_state[row].to(dtype).T[first : first + W - 1]
        if has_initial_state is not None and not bool(has_initial_state[n]):
            history = torch.zeros(W - 1, C, dtype=dtype)
        tokens = x[b, start:end].to(dtype)
        y[b, start:end] = _activate(_convolve(history, tokens, w, bd), activation)
        if W == 1:
            continue
        joined = torch.cat([history, tokens])
        if not conv_leading:
            # A cache wider than W-1 keeps its older columns too: the whole row shifts by T.
            older = conv_state[row].to(dtype).T[: L - (W - 1)]
            if has_initial_state is not None and not bool(has_initial_state[n]):
                older = torch.zeros_like(older)
            joined = torch.cat([older, joined])
            pool[row] = joined[len(joined) - L :].T
        elif num_accepted is None:
            pool[row, :, : W - 1] = joined[len(joined) - (W - 1) :].T
        else:
            kept = joined[1:]
            pool[row, :, : len(kept)] = kept.T
    return y, pool


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
    *,
    dtype: torch.dtype = torch.float64,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Short conv, split and gates. Returns ``(q, k, v, g, beta, new conv pool)``."""
    y, pool = short_conv(
        mixed_qkv, conv_weight, conv_bias, conv_state, state_indices, has_initial_state,
        cu_seqlens, num_accepted, activation, conv_leading, dtype=dtype,
    )  # fmt: skip
    B, T, C = mixed_qkv.shape
    key_dim = num_k_heads * head_k_dim
    q = y[..., :key_dim].reshape(B, T, num_k_heads, head_k_dim)
    k = y[..., key_dim : 2 * key_dim].reshape(B, T, num_k_heads, head_k_dim)
    v = y[..., 2 * key_dim :].reshape(B, T, a.shape[-1], -1)
    if qk_l2norm:
        q, k = l2norm(q), l2norm(k)
    g, beta = gating(a, b, A_log, dt_bias, dtype=dtype)
    for n, (row, start, end) in enumerate(sequence_slices(B, T, cu_seqlens)):
        padded = _row(state_indices, n) < 0
        if padded or (num_accepted is not None and int(num_accepted[n]) < 1):
            g[row, start:end] = 0
            beta[row, start:end] = 0
    return q, k, v, g, beta, pool


def gated_rms_norm(
    x: Tensor,
    gate: Tensor,
    weight: Tensor,
    eps: float = 1e-6,
    *,
    dtype: torch.dtype = torch.float64,
) -> Tensor:
    """``weight * rmsnorm(x) * silu(gate)`` over the last dimension, rounded where the model rounds.

    The model casts ``rmsnorm(x)`` back to the activation dtype, multiplies by the weight in the
    promoted dtype of the two, and only then by ``silu(gate)``. Both roundings are repeated here.
    """
    xd = x.to(dtype)
    normed = xd * torch.rsqrt((xd * xd).mean(-1, keepdim=True) + eps)
    if x.dtype in (torch.bfloat16, torch.float16):
        normed = normed.to(x.dtype).to(dtype)
    weighted = weight.to(dtype) * normed
    if torch.promote_types(x.dtype, weight.dtype) in (torch.bfloat16, torch.float16):
        weighted = weighted.to(x.dtype).to(dtype)
    gd = gate.to(dtype)
    return weighted * gd * torch.sigmoid(gd)


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
    *,
    dtype: torch.dtype = torch.float64,
) -> tuple[Tensor, Tensor, Tensor]:
    """The layer between its projections. Returns ``(y, new conv pool, new state pool)``."""
    HV, V = state.shape[1:3]
    C = 2 * num_k_heads * head_k_dim + HV * V
    mixed, z, b, a = projected.split([C, HV * V, HV, HV], dim=-1)
    conv_rows = state_indices
    if state_indices is not None and state_indices.dim() == 2:
        conv_rows = state_indices[:, 0]
    q, k, v, g, beta, conv_pool = conv_gating(
        mixed, a, b, conv_weight, conv_bias, A_log, dt_bias, conv_state, num_k_heads, head_k_dim,
        conv_rows, has_initial_state, cu_seqlens, num_accepted, qk_l2norm, activation, conv_leading,
        dtype=dtype,
    )  # fmt: skip
    o, pool = recurrent(
        q, k, v, g, beta, state, state_indices, has_initial_state, cu_seqlens, num_accepted, scale,
        False, dtype=dtype,
    )  # fmt: skip
    y = gated_rms_norm(o, z.unflatten(-1, (HV, V)), norm_weight, eps, dtype=dtype)
    return y.flatten(-2), conv_pool, pool
