"""What the XPU twin can say about cost: bytes, instructions, balance, local memory. No times.

``model_seconds`` turns the counts into a **model** of time from a bandwidth and an instruction
rate that the caller assumes; nothing here was measured on a chip.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from gdn_ops import xpu_twin
from gdn_ops.bench._timing import SHORT, nbytes

TITLE = "XPU twin: bytes, instructions, balance, local memory (counts, no times)"
OPS = ("recurrent", "recurrent_buffered", "recurrent_lowrank", "decode")
MODEL_BANDWIDTH = 2.4e12  # bytes/s of a P800 card, as claimed by a third party; never measured here
MODEL_RATE = 1e9  # vector instructions a second and core: an assumption, the clock is not public

# Key and value heads of the model and of one of eight tensor-parallel ranks.
HEADS = ((16, 48), (2, 6))
K = V = 128
W = 4  # taps of the convolution


def _empty(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.zeros(*shape, dtype=dtype, device=xpu_twin.device())


def _random(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(*shape).to(dtype).to(xpu_twin.device())


def _cycle(R: int) -> dict[int, float]:
    """Fill counts to run a window at, and how many calls of a fold cycle each stands for.

    A cycle is one call at each fill 1 .. R; the last one folds. Between folds every count grows by
    the same amount from call to call (asserted by the tests), so two calls stand for all of them.
    """
    if R < 4:
        return dict.fromkeys(range(1, R + 1), 1.0)
    return {1: (R - 1) / 2, R - 1: (R - 1) / 2, R: 1.0}


def _run(
    op: str, batch: int, heads: int, value_heads: int, dtype: torch.dtype, R: int
) -> list[tuple[float, list[dict], float]]:
    """Runs the op; a list of (weight, launch reports, floor in bytes); weights sum to 1."""
    B, H, HV = batch, heads, value_heads
    act = torch.float16
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
        floor = 2 * nbytes(state, conv) + nbytes(x, y, weight, norm, A_log, dt_bias, index)
        return [(1.0, xpu_twin.reports(), floor)]
    q, k = _random(B, 1, H, K, dtype=act), _random(B, 1, H, K, dtype=act)
    v = _random(B, 1, HV, V, dtype=act)
    g = -torch.rand(B, 1, HV).to(xpu_twin.device())
    beta = torch.rand(B, 1, HV).to(xpu_twin.device())
    tail = (index, None, None, None, None, True)
    if op == "recurrent":
        o = torch.ops.gdn.recurrent(q, k, v, g, beta, state, *tail)
        floor = 2 * nbytes(state) + nbytes(q, k, v, g, beta, o, index)
        return [(1.0, xpu_twin.reports(), floor)]
    win = [
        _empty(B, H, R, K, dtype=dtype),
        _empty(B, HV, R, V, dtype=dtype),
        _empty(B, HV, R, dtype=torch.float32),
        torch.zeros(B, dtype=torch.int32).to(xpu_twin.device()),
    ]
    entries, fill = win[:3], win[3]
    if op == "recurrent_lowrank":
        fill.fill_(R)
        o = torch.ops.gdn.recurrent_lowrank(q, k, v, g, beta, *win, *tail)
        floor = nbytes(q, k, v, g, beta, o, index) + 2 * nbytes(fill)
        return [(1.0, xpu_twin.reports(), floor + nbytes(*entries) * (R + 1) // R)]
    found = []
    for count, calls in _cycle(R).items():
        fill.fill_(count)
        o = torch.ops.gdn.recurrent_buffered(q, k, v, g, beta, state, *win, *tail)
        floor = nbytes(q, k, v, g, beta, o, index, state) + 2 * nbytes(fill)
        floor += nbytes(*entries) * (count + 1) // R + (nbytes(state) if count == R else 0)
        found.append((calls / R, xpu_twin.reports(), floor))
    return found


def record(
    op: str,
    batch: int,
    heads: int = 16,
    value_heads: int = 48,
    *,
    state_dtype: torch.dtype = torch.float16,
    window: int = 16,
) -> dict:
    """Counts of one call (``recurrent_buffered``: the mean over a fold cycle), float16 activations.

    ``core_work_*`` are vector instructions; ``floor_bytes`` is the fewest bytes the call must move;
    ``waits`` are fences of a core that end transfers.
    ``bytes_over_floor``, ``instructions_per_element`` and ``balance`` (busiest core over the mean)
    are their ratios.
    """
    with torch.no_grad():
        runs = _run(op, batch, heads, value_heads, state_dtype, window)

    def total(key: str) -> float:
        return sum(weight * sum(r[key] for r in reports) for weight, reports, _ in runs)

    launches = [r for _, reports, _ in runs for r in reports]
    counts = {
        "op": op,
        "state_dtype": str(state_dtype).removeprefix("torch."),
        "batch": batch,
        "heads": heads,
        "value_heads": value_heads,
        "dma_bytes": round(total("load_bytes") + total("store_bytes")),
        "floor_bytes": round(sum(weight * floor for weight, _, floor in runs)),
        "vector_instructions": round(total("vector")),
        "state_elements": batch * value_heads * V * K,
        "core_work_max": round(total("core_work_max")),
        "core_work_mean": total("core_work_mean"),
        "cores_active": max(launches, key=lambda r: r["vector"])["cores_active"],
        "lm_high_water": max(r["lm_high_water"] for r in launches),
        "vectors_alive": max(r["vectors_alive"] for r in launches),
        "waits": round(total("core_waits_max")),
    }
    return counts | {
        "bytes_over_floor": counts["dma_bytes"] / counts["floor_bytes"],
        "instructions_per_element": counts["vector_instructions"] / counts["state_elements"],
        "balance": counts["core_work_max"] / counts["core_work_mean"],
    }


def records(
    ops: tuple[str, ...] = OPS,
    batches: tuple[int, ...] = (1, 256),
    heads: tuple[tuple[int, int], ...] = HEADS,
    state_dtypes: tuple[torch.dtype, ...] = (torch.float16,),
    *,
    window: int = 16,
    rate: float = MODEL_RATE,
    bandwidth: float = MODEL_BANDWIDTH,
    status: Callable[[str], None] = lambda text: None,
) -> list[dict]:
    """One :func:`record` with its :func:`model_seconds` for every op, heads, batch and dtype.

    ``status`` hears of each case before it runs: ``len(ops) * len(batches) * len(heads) *
    len(state_dtypes)`` of them.

    Raises:
        ValueError: an op that is not one of :data:`OPS`.
        RuntimeError: this build has no twin.
    """
    if unknown := [op for op in ops if op not in OPS]:
        raise ValueError(f"no counts of {', '.join(unknown)}; there are: {', '.join(OPS)}")
    found = []
    for op in ops:
        for dtype in state_dtypes:
            for H, HV in heads:
                for batch in batches:
                    status(f"{op} {SHORT[dtype]} {H}/{HV}, batch {batch}")
                    counts = record(op, batch, H, HV, state_dtype=dtype, window=window)
                    found.append(counts | model_seconds(counts, rate, bandwidth))
    return found


def model_seconds(
    record: dict, rate: float = MODEL_RATE, bandwidth: float = MODEL_BANDWIDTH
) -> dict[str, float]:
    """A model, not a measurement: seconds for the bytes, for the busiest core, and the larger.

    Args:
        record: a result of :func:`record`.
        rate: vector instructions a second and core that are **assumed**.
        bandwidth: bytes a second of global memory that are **assumed**.
    """
    memory = record["dma_bytes"] / bandwidth
    compute = record["core_work_max"] / rate
    return {
        "model_memory_s": memory,
        "model_compute_s": compute,
        "model_s": max(memory, compute),
    }
