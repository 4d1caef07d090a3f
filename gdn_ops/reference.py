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
    "chunk",
    "chunk_lowrank",
    "chunk_magnitudes",
    "chunk_prefill",
    "conv1d",
    "conv_gating",
    "decode",
    "decode_buffered",
    "decode_lowrank",
    "gated_rms_norm",
    "gating",
    "l2norm",
    "linear",
    "recurrent",
    "recurrent_buffered",
    "recurrent_gated",
    "recurrent_lowrank",
    "sequence_slices",
    "short_conv",
    "window_flush",
    "window_reset",
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
    """The pool row of sequence n, of ``[N, S]`` indices that in one column."""
    if state_indices is None:
        return n
    return int(state_indices[n] if state_indices.dim() == 1 else state_indices[n, column])


def _padding(
    B: int, T: int, state_indices: Tensor | None, cu_seqlens: Tensor | None,
    num_accepted: Tensor | None,
) -> list[tuple[int, slice]]:  # fmt: skip
    """``(batch row, tokens)`` of each sequence that is padding."""
    return [
        (b, slice(start, end))
        for n, (b, start, end) in enumerate(sequence_slices(B, T, cu_seqlens))
        if _row(state_indices, n) < 0 or (num_accepted is not None and int(num_accepted[n]) < 1)
    ]


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
    # Columns, so that a head's products are matrix products.
    qd, kd = (x.repeat_interleave(HV // H, dim=2)[..., None] for x in (scale * qd, kd))
    vd, bd, decay = vd[..., None], bd[..., None, None], gd.exp()[..., None, None]
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
            S = decay[b, t] * S
            u = bd[b, t] * (vd[b, t] - S @ kd[b, t])
            S = S + u * kd[b, t].mT
            out[b, t] = (S @ qd[b, t])[..., 0]
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
    HV = a.shape[-1]
    v = y[..., 2 * key_dim :].reshape(B, T, HV, (C - 2 * key_dim) // HV)
    if qk_l2norm:
        q, k = l2norm(q), l2norm(k)
    g, beta = gating(a, b, A_log, dt_bias, dtype=dtype)
    for row, tokens in _padding(B, T, state_indices, cu_seqlens, num_accepted):
        g[row, tokens] = 0
        beta[row, tokens] = 0
    return q, k, v, g, beta, pool


def linear(x: Tensor, weight: Tensor, *, dtype: torch.dtype = torch.float64) -> Tensor:
    """``x @ weight.T``."""
    return x.to(dtype) @ weight.to(dtype).T


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


def _decode_front(
    projected, conv_weight, conv_bias, A_log, dt_bias, conv_state, num_k_heads, head_k_dim, HV, V,
    state_indices, has_initial_state, cu_seqlens, num_accepted, qk_l2norm, activation,
    conv_leading, dtype,
):  # fmt: skip
    """What comes before the recurrence: ``((q, k, v, g, beta), z, new conv pool)``."""
    C = 2 * num_k_heads * head_k_dim + HV * V
    mixed, z, b, a = projected.split([C, HV * V, HV, HV], dim=-1)
    *tokens, conv_pool = conv_gating(
        mixed, a, b, conv_weight, conv_bias, A_log, dt_bias, conv_state, num_k_heads, head_k_dim,
        state_indices, has_initial_state, cu_seqlens, num_accepted, qk_l2norm, activation,
        conv_leading, dtype=dtype,
    )  # fmt: skip
    z = z.unflatten(-1, (HV, V)).clone()
    for row, padded in _padding(*z.shape[:2], state_indices, cu_seqlens, num_accepted):
        z[row, padded] = 0  # whatever its tokens hold
    return tokens, z, conv_pool


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
    tokens, z, conv_pool = _decode_front(
        projected, conv_weight, conv_bias, A_log, dt_bias, conv_state, num_k_heads, head_k_dim,
        *state.shape[1:3], state_indices, has_initial_state, cu_seqlens, num_accepted, qk_l2norm,
        activation, conv_leading, dtype,
    )  # fmt: skip
    o, pool = recurrent(
        *tokens, state, state_indices, has_initial_state, cu_seqlens, num_accepted, scale, False,
        dtype=dtype,
    )  # fmt: skip
    y = gated_rms_norm(o, z, norm_weight, eps, dtype=dtype)
    return y.flatten(-2), conv_pool, pool


class _WindowRow:
    """One row of a pool of windows as a list of entries ``(k [HV, K], u [HV, V], g [HV])``."""

    def __init__(self, window: tuple[Tensor, ...], row: int, dtype: torch.dtype) -> None:
        self.k, self.u, self.g, self.fill = window
        self.row, self.R = row, self.k.shape[2]
        packed = int(self.fill[row])
        self.drafts, self.head = packed >> 8 & 255, packed >> 16 & 255
        self.ratio = self.u.shape[1] // self.k.shape[1]
        self.entries = []
        for i in range(packed & 255):
            slot = (self.head + i) % self.R
            key = self.k[row, :, slot].to(dtype).repeat_interleave(self.ratio, dim=0)
            self.entries.append(
                (key, self.u[row, :, slot].to(dtype), self.g[row, :, slot].to(dtype))
            )

    def state(self, base: Tensor) -> Tensor:
        """The state that the entries make of ``base [HV, V, K]``."""
        S = base
        for key, u, g in self.entries:
            S = torch.where(g.exp()[:, None, None] == 0, 0, g.exp()[:, None, None] * S)
            S = S + u[:, :, None] * key[:, None, :]
        return S

    def append(self, key: Tensor, u: Tensor, g: Tensor) -> None:
        if len(self.entries) == self.R:
            self.entries.pop(0)
            self.head = (self.head + 1) % self.R
        self.entries.append((key, u, g))

    def store(self, window: tuple[Tensor, ...], drafts: int) -> None:
        for i, (key, u, g) in enumerate(self.entries):
            slot = (self.head + i) % self.R
            window[0][self.row, :, slot] = key[:: self.ratio]
            window[1][self.row, :, slot] = u
            window[2][self.row, :, slot] = g
        window[3][self.row] = len(self.entries) | drafts << 8 | self.head << 16


def _window_recurrence(
    q, k, v, g, beta, state, window, state_indices, has_initial_state, cu_seqlens, num_accepted,
    scale, qk_l2norm, dtype,
):  # fmt: skip
    B, T, H, K = q.shape
    HV, V = v.shape[2:]
    scale = K**-0.5 if scale is None else scale
    qd, kd, vd, gd, bd = (x.to(dtype) for x in (q, k, v, g, beta))
    if qk_l2norm:
        qd, kd = l2norm(qd), l2norm(kd)
    qd, kd = (x.repeat_interleave(HV // H, dim=2) for x in (qd, kd))
    pool = None if state is None else state.to(dtype).clone()
    new = (*(x.to(dtype).clone() for x in window[:3]), window[3].clone())
    out = torch.zeros(B, T, HV, V, dtype=dtype)
    for n, (b, start, end) in enumerate(sequence_slices(B, T, cu_seqlens)):
        accepted = 1 if num_accepted is None else int(num_accepted[n])
        row = _row(state_indices, n)
        if accepted < 1 or row < 0 or end == start:
            continue
        pending = _WindowRow(window, row, dtype)
        base = torch.zeros(HV, V, K, dtype=dtype)
        fresh = has_initial_state is not None and not bool(has_initial_state[n])
        if fresh:
            pending.entries, pending.head = [], 0
        elif num_accepted is not None:
            rejected = max(0, pending.drafts + 1 - accepted)
            pending.entries = pending.entries[: max(0, len(pending.entries) - rejected)]
        if state is not None and not fresh:
            base = pool[row]
            if pending.entries and len(pending.entries) + end - start > pending.R:
                pool[row] = base = pending.state(base)
                pending.entries = []
        for t in range(start, end):
            decay = gd[b, t].exp()[:, None, None]
            S = torch.where(decay == 0, 0, decay * pending.state(base))
            u = bd[b, t][:, None] * (vd[b, t] - torch.einsum("hvk,hk->hv", S, kd[b, t]))
            S = S + u[:, :, None] * kd[b, t][:, None, :]
            out[b, t] = scale * torch.einsum("hvk,hk->hv", S, qd[b, t])
            clears_base = state is not None and fresh and t == start
            kept = torch.full_like(gd[b, t], -torch.inf) if clears_base else gd[b, t]
            pending.append(kd[b, t], u, kept)
        pending.store(new, min(end - start, 256) - 1)
    return out, pool, new


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
    *,
    dtype: torch.dtype = torch.float64,
) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor, Tensor, Tensor]]:
    """The full state is rebuilt from base and window before every token.

    Returns ``(o, new state pool, new window)``.
    """
    return _window_recurrence(
        q, k, v, g, beta, state, (win_k, win_u, win_g, win_fill), state_indices, has_initial_state,
        cu_seqlens, num_accepted, scale, qk_l2norm, dtype,
    )  # fmt: skip


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
    *,
    dtype: torch.dtype = torch.float64,
) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor, Tensor]]:
    """The state before each token is what the last R updates make of zero.

    Returns ``(o, new window)``.
    """
    o, _, window = _window_recurrence(
        q, k, v, g, beta, None, (win_k, win_u, win_g, win_fill), state_indices, has_initial_state,
        cu_seqlens, num_accepted, scale, qk_l2norm, dtype,
    )  # fmt: skip
    return o, window


def window_flush(
    state: Tensor,
    win_k: Tensor,
    win_u: Tensor,
    win_g: Tensor,
    win_fill: Tensor,
    state_indices: Tensor | None = None,
    *,
    dtype: torch.dtype = torch.float64,
) -> tuple[Tensor, Tensor]:
    """Folds the windows of the named rows. Returns ``(new state pool, new win_fill)``."""
    pool, fill = state.to(dtype).clone(), win_fill.clone()
    rows = range(len(fill)) if state_indices is None else state_indices.tolist()
    for row in rows:
        if row >= 0:
            pool[row] = _WindowRow((win_k, win_u, win_g, win_fill), row, dtype).state(pool[row])
            fill[row] = 0
    return pool, fill


def window_reset(win_fill: Tensor, state_indices: Tensor | None = None) -> Tensor:
    """Returns win_fill with the named rows emptied."""
    fill = win_fill.clone()
    for row in range(len(fill)) if state_indices is None else state_indices.tolist():
        if row >= 0:
            fill[row] = 0
    return fill


def _decode_window(projected, conv_weight, conv_bias, A_log, dt_bias, norm_weight, conv_state,
                   state, window, num_k_heads, head_k_dim, state_indices=None,
                   has_initial_state=None, cu_seqlens=None, num_accepted=None, scale=None,
                   qk_l2norm=True, eps=1e-6, activation="silu", conv_leading=False,
                   dtype=torch.float64):  # fmt: skip
    tokens, z, conv_pool = _decode_front(
        projected, conv_weight, conv_bias, A_log, dt_bias, conv_state, num_k_heads, head_k_dim,
        window[1].shape[1], window[1].shape[3], state_indices, has_initial_state, cu_seqlens,
        num_accepted, qk_l2norm, activation, conv_leading, dtype,
    )  # fmt: skip
    o, pool, new = _window_recurrence(
        *tokens, state, window, state_indices, has_initial_state, cu_seqlens, num_accepted, scale,
        False, dtype,
    )  # fmt: skip
    y = gated_rms_norm(o, z, norm_weight, eps, dtype=dtype)
    return y.flatten(-2), conv_pool, pool, new


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
    *args,
    **kwargs,
) -> tuple[Tensor, Tensor, Tensor, tuple[Tensor, Tensor, Tensor, Tensor]]:
    """:func:`decode` on base and window. Returns ``(y, conv pool, state pool, window)``."""
    return _decode_window(
        projected, conv_weight, conv_bias, A_log, dt_bias, norm_weight, conv_state, state,
        (win_k, win_u, win_g, win_fill), *args, **kwargs,
    )  # fmt: skip


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
    *args,
    **kwargs,
) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor, Tensor, Tensor]]:
    """:func:`decode` on the last R updates. Returns ``(y, conv pool, window)``."""
    y, conv_pool, _, window = _decode_window(
        projected, conv_weight, conv_bias, A_log, dt_bias, norm_weight, conv_state, None,
        (win_k, win_u, win_g, win_fill), *args, **kwargs,
    )  # fmt: skip
    return y, conv_pool, window


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
    *,
    dtype: torch.dtype = torch.float64,
) -> tuple[Tensor, Tensor]:
    """:func:`recurrent` from a given state; chunk size changes nothing. ``(o, final)``."""
    N = q.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    if initial_state is None:
        initial_state = torch.zeros(N, v.shape[2], v.shape[3], q.shape[3], dtype=dtype)
    return recurrent(
        q, k, v, g, beta, initial_state, None, None, cu_seqlens, None, scale, qk_l2norm, dtype=dtype
    )


def chunk_magnitudes(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    scale: float | None = None,
    qk_l2norm: bool = False,
    *,
    dtype: torch.dtype = torch.float64,
) -> tuple[Tensor, Tensor]:
    """What the errors of products with rounded operands are relative to.

    A row of the state is a sum of the row it started from and of one update for each token. Its
    magnitude is the root of the sum of their squared norms, decayed with them: what the row would
    measure if nothing cancelled. That of an output is its row's, times ``|scale| |q|``. Returns
    ``(of o, of the rows of the state after each token)``, both ``[B, T, HV, V]``.
    """
    B, T, H, K = q.shape
    HV, V = v.shape[2:]
    scale = K**-0.5 if scale is None else scale
    qd, kd, vd, gd, bd = (x.to(dtype) for x in (q, k, v, g, beta))
    if qk_l2norm:
        qd, kd = l2norm(qd), l2norm(kd)
    qd, kd = (x.repeat_interleave(HV // H, dim=2)[..., None] for x in (qd, kd))
    q_norm, k_norm = qd.norm(dim=3), kd.norm(dim=3)
    decay = gd.exp()[..., None]
    rows = torch.zeros(B, T, HV, V, dtype=dtype)
    for n, (b, start, end) in enumerate(sequence_slices(B, T, cu_seqlens)):
        S = torch.zeros(HV, V, K, dtype=dtype)
        if initial_state is not None:
            S = initial_state[n].to(dtype)
        energy = S.square().sum(-1)
        for t in range(start, end):
            S = decay[b, t][..., None] * S
            u = bd[b, t][:, None, None] * (vd[b, t][..., None] - S @ kd[b, t])
            S = S + u * kd[b, t].mT
            energy = decay[b, t].square() * energy + (u[..., 0] * k_norm[b, t]).square()
            rows[b, t] = energy.sqrt()
    return abs(scale) * q_norm * rows, rows


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
    *,
    dtype: torch.dtype = torch.float64,
) -> tuple[Tensor, Tensor]:
    """Prefill from read rows to write rows and edge rows. Returns ``(o, new state pool)``."""
    B, T = q.shape[:2]
    pool = state.to(dtype).clone()
    out = torch.zeros(B, T, *v.shape[2:], dtype=dtype)
    for n, (b, start, end) in enumerate(sequence_slices(B, T, cu_seqlens)):
        row = _row(read_indices, n)
        if row < 0:
            continue
        S = state[row : row + 1].to(dtype)
        if has_initial_state is not None and not bool(has_initial_state[n]):
            S = torch.zeros_like(S)
        for i, t in enumerate(range(start, end, chunk_size)):
            stop = min(t + chunk_size, end)
            part = [x[b : b + 1, t:stop] for x in (q, k, v, g, beta)]
            o, S = chunk(*part, S, None, scale, qk_l2norm, dtype=dtype)
            out[b, t:stop] = o[0]
            full = stop - t == chunk_size
            if full and edge_rows is not None and i < edge_rows.shape[1] and edge_rows[n, i] >= 0:
                pool[int(edge_rows[n, i])] = S[0]
        target = row if write_indices is None else int(write_indices[n])
        if target >= 0:
            pool[target] = S[0]
    return out, pool


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
    *,
    dtype: torch.dtype = torch.float64,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Chunks start from the window's R updates. ``(o, win_k, win_u, win_g, win_fill)``."""
    B, T, H, K = q.shape
    HV, V = v.shape[2:]
    scale = K**-0.5 if scale is None else scale
    qd, kd, vd, gd, bd = (x.to(dtype) for x in (q, k, v, g, beta))
    if qk_l2norm:
        qd, kd = l2norm(qd), l2norm(kd)
    qd, kd = (x.repeat_interleave(HV // H, dim=2) for x in (qd, kd))
    window = (win_k, win_u, win_g, win_fill)
    new = (*(x.to(dtype).clone() for x in window[:3]), win_fill.clone())
    out = torch.zeros(B, T, HV, V, dtype=dtype)
    for n, (b, start, end) in enumerate(sequence_slices(B, T, cu_seqlens)):
        row = _row(state_indices, n)
        if row < 0 or end == start:
            continue
        pending = _WindowRow(window, row, dtype)
        if has_initial_state is not None and not bool(has_initial_state[n]):
            pending.entries = []
        for t0 in range(start, end, chunk_size):
            S = pending.state(torch.zeros(HV, V, K, dtype=dtype))
            for t in range(t0, min(t0 + chunk_size, end)):
                S = gd[b, t].exp()[:, None, None] * S
                u = bd[b, t][:, None] * (vd[b, t] - torch.einsum("hvk,hk->hv", S, kd[b, t]))
                S = S + u[:, :, None] * kd[b, t][:, None, :]
                out[b, t] = scale * torch.einsum("hvk,hk->hv", S, qd[b, t])
                pending.append(kd[b, t], u, gd[b, t])
            # What later chunks see is what the window stores.
            pending.entries = [
                (key.to(win_k.dtype).to(dtype), u.to(win_u.dtype).to(dtype), own)
                for key, u, own in pending.entries
            ]
        pending.head = 0
        pending.store(new, drafts=0)
    return (out, *new)
