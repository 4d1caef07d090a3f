"""The gated delta rule under the names and keywords of flash-linear-attention.

States here have FLA's layout ``[N, HV, K, V]`` and calls have FLA's meaning; the work is done by
:func:`gdn_ops.chunk` and :func:`gdn_ops.recurrent`. A keyword that changes the result is honoured
or refused by name, never ignored. Unlike FLA's kernels these take float32 and any ``K, V <= 512``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gdn_ops.ops.chunk import chunk
from gdn_ops.ops.gates import gating
from gdn_ops.ops.recurrent import recurrent

__all__ = ["chunk_gated_delta_rule", "fused_recurrent_gated_delta_rule"]

# Keywords that only repeat, for the host or for attention layers, what cu_seqlens says.
_RESTATED = {
    "cu_seqlens_cpu", "chunk_indices", "cu_seq_lens_k", "max_length_q", "max_length_k",
}  # fmt: skip
# Keywords that change what is computed; accepted only at the value that changes nothing.
_REFUSED = {
    "head_first": (False, "pass tensors as [B, T, H, D]"),
    "gk": (None, "per-channel decay of keys is another recurrence"),
    "gv": (None, "per-channel decay of values is another recurrence"),
    "use_beta_sigmoid_in_kernel": (False, "pass beta = sigmoid(b), or use gdn_ops.recurrent_gated"),
    "allow_neg_eigval": (False, "pass beta = 2 * sigmoid(b)"),
    "cp_context": (None, "context parallelism is not implemented"),
    "use_exp2": (False, "pass g in natural logarithms"),
    "return_intermediate_states": (False, "use gdn_ops.chunk_prefill with edge_rows"),
}


def _check_keywords(op: str, keywords: dict) -> None:
    for name, value in keywords.items():
        if name in _RESTATED:
            continue
        if name not in _REFUSED:
            raise TypeError(f"{op}: unexpected keyword {name!r}")
        neutral, advice = _REFUSED[name]
        if isinstance(value, Tensor):
            raise NotImplementedError(f"{op}: {name} (a Tensor) is not supported: {advice}")
        if value is not neutral and value != neutral:
            raise NotImplementedError(f"{op}: {name}={value!r} is not supported: {advice}")


def _computed_in(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def _gates(op, v, g, beta, use_gate_in_kernel, A_log, dt_bias):
    if use_gate_in_kernel:
        if g is None or A_log is None:
            raise ValueError(f"{op}: use_gate_in_kernel=True needs g (the raw gate) and A_log")
        bias = torch.zeros_like(A_log) if dt_bias is None else dt_bias
        g = gating(g, g, A_log.flatten(), bias.flatten())[0]
    elif A_log is not None or dt_bias is not None:
        raise ValueError(f"{op}: A_log and dt_bias are only used with use_gate_in_kernel=True")
    if g is None:
        g = v.new_zeros(v.shape[:3], dtype=_computed_in(v))
    if beta is None:
        beta = v.new_ones(v.shape[:3], dtype=_computed_in(v))
    return g, beta


def _check_state(op: str, initial_state: Tensor | None) -> None:
    if initial_state is not None and initial_state.dim() != 4:
        raise ValueError(
            f"{op}: initial_state: expected four dimensions, got {tuple(initial_state.shape)}"
        )


def chunk_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    beta: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
    *,
    chunk_size: int = 64,
    use_gate_in_kernel: bool = False,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    transpose_state_layout: bool = False,
    state_v_first: bool = False,
    **keywords,
) -> tuple[Tensor, Tensor | None]:
    """:func:`gdn_ops.chunk` with FLA's arguments. Differentiable.

    Args:
        q, k: ``[B, T, H, K]``; v: ``[B, T, HV, V]``; beta (ones if None): ``[B, T, HV]``.
        g: ``[B, T, HV]`` log decay, 0 if None; with ``use_gate_in_kernel`` the raw gate ``a``, and
            the decay is ``-exp(A_log) * softplus(a + dt_bias)`` with ``A_log, dt_bias [HV]``.
        scale: ``K**-0.5`` if None.
        initial_state: ``[N, HV, K, V]``, any float dtype; ``[N, HV, V, K]`` with
            ``transpose_state_layout`` or its newer name ``state_v_first``.
        output_final_state: return the final state too. use_qk_l2norm_in_kernel: normalise q and k.
        cu_seqlens: ``[N+1]`` offsets of packed sequences (then ``B == 1``).
        chunk_size: 16 to 128.

    ``cu_seqlens_cpu``, ``chunk_indices`` and the lengths that attention layers pass along repeat
    what cu_seqlens says and are not read.

    Returns:
        ``(o, final_state)``: ``[B, T, HV, V]`` in the dtype of q, and the float32 state in the
        layout of initial_state, or None.

    Raises:
        NotImplementedError: a keyword of FLA that changes the result and is not supported, by name.
        TypeError: an unknown keyword. ValueError: gate arguments that do not go together.
        RuntimeError: as :func:`gdn_ops.chunk`.
    """
    op = "chunk_gated_delta_rule"
    _check_keywords(op, keywords)
    _check_state(op, initial_state)
    g, beta = _gates(op, v, g, beta, use_gate_in_kernel, A_log, dt_bias)
    v_first = transpose_state_layout or state_v_first
    if initial_state is not None:
        initial_state = initial_state.to(_computed_in(q))
        if not v_first:
            initial_state = initial_state.transpose(2, 3)
        if 1 not in initial_state.stride()[2:]:  # FLA copies what its kernels cannot read
            initial_state = initial_state.contiguous()
    o, state = chunk(
        q, k, v, g, beta, initial_state, cu_seqlens, scale, use_qk_l2norm_in_kernel, chunk_size
    )
    if not output_final_state:
        return o, None
    return o, state if v_first else state.transpose(2, 3).contiguous()


def fused_recurrent_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    gk: Tensor | None = None,
    gv: Tensor | None = None,
    beta: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
    *,
    use_gate_in_kernel: bool = False,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    transpose_state_layout: bool = False,
    state_v_first: bool = False,
    **keywords,
) -> tuple[Tensor, Tensor | None]:
    """:func:`gdn_ops.recurrent` with FLA's arguments: token by token, no gradient, nothing mutated.

    Arguments, results and errors are those of :func:`chunk_gated_delta_rule` (in FLA's order for
    this function); ``gk`` and ``gv`` are refused.
    """
    op = "fused_recurrent_gated_delta_rule"
    _check_keywords(op, {"gk": gk, "gv": gv, **keywords})
    _check_state(op, initial_state)
    g, beta = _gates(op, v, g, beta, use_gate_in_kernel, A_log, dt_bias)
    N = q.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    v_first = transpose_state_layout or state_v_first
    HV, V, K = v.shape[2], v.shape[3], q.shape[3]
    if initial_state is None:
        shape = (N, HV, V, K) if v_first else (N, HV, K, V)
        pool = v.new_zeros(shape, dtype=torch.float32)
    elif initial_state.shape[0] != N:
        raise ValueError(
            f"{op}: initial_state: expected {N} states, got shape {tuple(initial_state.shape)}"
        )
    else:
        pool = initial_state.to(torch.float32, copy=True, memory_format=torch.contiguous_format)
    view = pool if v_first else pool.transpose(2, 3)
    o = recurrent(
        q,
        k,
        v,
        g,
        beta,
        view,
        cu_seqlens=cu_seqlens,
        scale=scale,
        qk_l2norm=use_qk_l2norm_in_kernel,
    )
    return o, pool if output_final_state else None
