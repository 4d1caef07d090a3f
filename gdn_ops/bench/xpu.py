"""What the XPU twin can say about cost: bytes, instructions, balance, local memory. No times.

``model_seconds`` turns the counts into a **model** of time from a bandwidth and an instruction
rate that the caller assumes; nothing here was measured on a chip.
"""

from __future__ import annotations

import torch

from gdn_ops import xpu_twin

TITLE = "XPU twin: bytes, instructions, balance, local memory (counts, no times)"
OPS = ("recurrent", "recurrent_buffered", "recurrent_lowrank", "decode")
MODEL_BANDWIDTH = 2.4e12  # bytes/s of a P800 card, as claimed by a third party; never measured here

# Value heads of the model and of one of eight tensor-parallel ranks, with their key heads.
SHAPES = {6: 2, 12: 4, 48: 16}
K = V = 128
W = 4  # taps of the convolution

_DTYPES = {"float16": torch.float16, "float32": torch.float32, "bfloat16": torch.bfloat16}


def _empty(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.zeros(*shape, dtype=dtype, device=xpu_twin.device())


def _random(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(*shape).to(dtype).to(xpu_twin.device())


def _bytes(*tensors: torch.Tensor) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)


def _run(op: str, batch: int, heads: int, value_heads: int, dtype: torch.dtype, R: int):
    """Runs the op; returns the launches' reports, the floor in bytes and the number of calls."""
    B, H, HV = batch, heads, value_heads
    act = torch.float16
    calls = 1
    state = _empty(B, HV, V, K, dtype=dtype)
    index = torch.arange(B, dtype=torch.int32).to(xpu_twin.device())
    xpu_twin.reports()
    if op == "decode":
        C = 2 * H * K + HV * V
        x = _random(B, 1, C + HV * V + 2 * HV, dtype=act)
        weight, norm = _random(C, W, dtype=act), _random(V, dtype=act)
        A_log, dt_bias = _random(HV, dtype=torch.float32), _random(HV, dtype=torch.float32)
        conv = _empty(B, W - 1, C, dtype=act).transpose(1, 2)
        y = torch.ops.gdn.decode(
            x, weight, None, A_log, dt_bias, norm, conv, state, H, K, index, None, None, None, None,
            True, 1e-6, "silu", True,
        )  # fmt: skip
        floor = 2 * _bytes(state, conv) + _bytes(x, y, weight, norm, A_log, dt_bias, index)
        return xpu_twin.reports(), floor, calls
    q, k = _random(B, 1, H, K, dtype=act), _random(B, 1, H, K, dtype=act)
    v = _random(B, 1, HV, V, dtype=act)
    g = -torch.rand(B, 1, HV).to(xpu_twin.device())
    beta = torch.rand(B, 1, HV).to(xpu_twin.device())
    tail = (index, None, None, None, None, True)
    if op == "recurrent":
        o = torch.ops.gdn.recurrent(q, k, v, g, beta, state, *tail)
        floor = 2 * _bytes(state) + _bytes(q, k, v, g, beta, o, index)
        return xpu_twin.reports(), floor, calls
    win = [
        _empty(B, H, R, K, dtype=dtype),
        _empty(B, HV, R, V, dtype=dtype),
        _empty(B, HV, R, dtype=torch.float32),
        torch.zeros(B, dtype=torch.int32).to(xpu_twin.device()),
    ]
    entries = win[:3]
    if op == "recurrent_lowrank":
        win[3].fill_(R)
        o = torch.ops.gdn.recurrent_lowrank(q, k, v, g, beta, *win, *tail)
        floor = (
            _bytes(q, k, v, g, beta, o, index)
            + _bytes(*entries) * (R + 1) // R
            + 2 * _bytes(win[3])
        )
        return xpu_twin.reports(), floor, calls
    # One fold cycle: the window holds 1 .. R entries before the call, and R folds.
    floor = 0
    for fill in range(1, R + 1):
        win[3].fill_(fill)
        o = torch.ops.gdn.recurrent_buffered(q, k, v, g, beta, state, *win, *tail)
        floor += _bytes(q, k, v, g, beta, o, index, state) + 2 * _bytes(win[3])
        floor += _bytes(*entries) * (fill + 1) // R + (_bytes(state) if fill == R else 0)
    return xpu_twin.reports(), floor, R


def record(
    op: str,
    batch: int,
    value_heads: int = 48,
    *,
    heads: int | None = None,
    state_dtype: str = "float16",
    window: int = 16,
) -> dict:
    """Counts of one call (``recurrent_buffered``: the mean over a fold cycle), float16 activations.

    ``core_work_*`` are vector instructions; ``floor_bytes`` is the fewest bytes the call must move.
    """
    heads = SHAPES[value_heads] if heads is None else heads
    with torch.no_grad():
        reports, floor, calls = _run(op, batch, heads, value_heads, _DTYPES[state_dtype], window)
    main = max(reports, key=lambda r: r["vector"])

    def total(key):
        return sum(r[key] for r in reports) / calls

    return {
        "op": op,
        "state_dtype": state_dtype,
        "batch": batch,
        "heads": heads,
        "value_heads": value_heads,
        "dma_bytes": round(total("load_bytes") + total("store_bytes")),
        "floor_bytes": round(floor / calls),
        "vector_instructions": round(total("vector")),
        "state_elements": batch * value_heads * V * K,
        "core_work_max": round(total("core_work_max")),
        "core_work_mean": total("core_work_mean"),
        "cores_active": main["cores_active"],
        "lm_high_water": max(r["lm_high_water"] for r in reports),
    }


def records(
    ops: tuple[str, ...] = OPS,
    batches: tuple[int, ...] = (1, 256),
    value_heads: tuple[int, ...] = (6, 48),
    state_dtype: str = "float16",
    window: int = 16,
) -> list[dict]:
    """One :func:`record` for every op, batch and number of value heads."""
    return [
        record(op, batch, hv, state_dtype=state_dtype, window=window)
        for op in ops
        for hv in value_heads
        for batch in batches
    ]


def model_seconds(
    record: dict, vector_rate: float, bandwidth: float = MODEL_BANDWIDTH
) -> dict[str, float]:
    """A model, not a measurement: seconds for the bytes, for the busiest core, and the larger.

    Args:
        record: a result of :func:`record`.
        vector_rate: vector instructions a second and core that are **assumed**.
        bandwidth: bytes a second of global memory that are **assumed**.
    """
    memory = record["dma_bytes"] / bandwidth
    compute = record["core_work_max"] / vector_rate
    return {
        "model_memory_s": memory,
        "model_compute_s": compute,
        "model_s": max(memory, compute),
    }
