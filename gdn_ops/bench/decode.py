"""The fused decode step against the ops it replaces, and what a call costs before it does anything.

``decode`` runs beside ``recurrent`` alone and beside the four ops one after the other, on the same
pools. The dispatch rows call each op with a batch of zero; their floor is an in-place torch op on
an empty tensor, measured in the same turns.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor

from gdn_ops import reference
from gdn_ops._tolerance import ROUNDED_FACTOR, TOLERANCE, scaled_error
from gdn_ops.bench._timing import (
    SHORT,
    Candidate,
    Options,
    buffers,
    generator,
    keep_freed_memory,
    measure,
    nbytes,
)

TITLE = "the fused decode step, and the cost of a call"
HEADS = ((16, 48),)
K = V = 128
W = 4
BATCHES = (1, 4, 16)
ops = torch.ops.gdn


class Step:
    """Inputs of a decode step: the packed projection and the parameters of a layer."""

    def __init__(self, B: int, H: int, HV: int, dtype: torch.dtype, seed: int):
        gen = generator(seed)

        def randn(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=gen)

        self.H, self.HV = H, HV
        self.C = 2 * H * K + HV * V
        self.projected = randn(B, 1, self.C + HV * V + 2 * HV).to(dtype)
        self.conv_weight = randn(self.C, W).to(dtype)
        self.A_log, self.dt_bias = torch.rand(HV, generator=gen), randn(HV)
        self.norm_weight = 1 + 0.1 * randn(V)
        self.conv_state = randn(B, self.C, W - 1).to(dtype)
        self.rows = torch.arange(B, dtype=torch.int32)

    def decode(self, op: Callable, conv_state: Tensor, state: Tensor, **kwargs):
        return op(
            self.projected, self.conv_weight, None, self.A_log, self.dt_bias, self.norm_weight,
            conv_state, state, self.H, K, self.rows, **kwargs,
        )  # fmt: skip

    @property
    def front(self) -> tuple[Tensor | None, ...]:
        """What conv_gating takes before the pool."""
        mixed, _, b, a = self.projected.split([self.C, self.HV * V, self.HV, self.HV], -1)
        return mixed, a, b, self.conv_weight, None, self.A_log, self.dt_bias

    @property
    def z(self) -> Tensor:
        """The gate of the norm, where it lies in the projection."""
        return self.projected[..., self.C : self.C + self.HV * V]

    @property
    def bytes(self) -> int:
        tensors = (
            self.projected, self.conv_weight, self.A_log, self.dt_bias, self.norm_weight,
            self.conv_state, self.conv_state, self.rows,
        )  # fmt: skip
        out = self.projected.shape[0] * self.HV * V * self.projected.element_size()
        return out + nbytes(*tensors)


def fused(x: Step, pools: list[Tensor]) -> Candidate:
    """The one call."""

    def call(i: int) -> Tensor:
        return x.decode(ops.decode.default, x.conv_state, pools[i])

    def check() -> float:
        want, want_conv, want_state = x.decode(
            reference.decode, x.conv_state.clone(), pools[0].clone()
        )
        y = call(0)
        of_y, of_state = TOLERANCE[y.dtype], TOLERANCE[pools[0].dtype]
        if not y.is_cpu:  # its launches hand each other q, k, v and o rounded
            of_y = of_state = tuple(ROUNDED_FACTOR**2 * t for t in of_y)
        return max(
            scaled_error(y, want, *of_y),
            scaled_error(x.conv_state, want_conv, *TOLERANCE[x.conv_state.dtype]),
            scaled_error(pools[0], want_state, *of_state),
        )

    return Candidate("decode", call, check)


def alone(x: Step, pools: list[Tensor]) -> Candidate:
    """The recurrence, on what the convolution and the gates would give it."""
    *parts, _ = reference.conv_gating(*x.front, x.conv_state, x.H, K, x.rows)
    q, k, v = (t.to(x.projected.dtype) for t in parts[:3])
    inputs = (q, k, v, *(t.float() for t in parts[3:]))

    def call(i: int) -> Tensor:
        return ops.recurrent.default(*inputs, pools[i], x.rows, None, None, None, None, True)

    def check() -> float:
        want, want_state = reference.recurrent(*inputs, pools[0].clone(), x.rows, qk_l2norm=True)
        o = call(0)
        return max(
            scaled_error(o, want, *TOLERANCE[o.dtype]),
            scaled_error(pools[0], want_state, *TOLERANCE[pools[0].dtype]),
        )

    return Candidate("recurrent alone", call, check, note="q, k, v and gates ready")


def chain(x: Step, pools: list[Tensor]) -> Candidate:
    """The ops that the one call replaces."""
    front, z = x.front, x.z

    def call(i: int) -> Tensor:
        parts = ops.conv_gating.default(*front, x.conv_state, x.H, K, x.rows)
        o = ops.recurrent.default(*parts, pools[i], x.rows, None, None, None, None, True)
        gate = z.contiguous().unflatten(-1, (x.HV, V))
        return ops.gated_rms_norm.default(o, gate, x.norm_weight).flatten(-2)

    def check() -> float:
        # Separate ops round q, k, v and o to bfloat16, and the state sees that: each is judged by
        # what it was given. (Against the fused oracle the largest of B * HV * V errors would grow
        # with the batch, whatever the tolerance.)
        before = x.conv_state.clone()
        parts = ops.conv_gating.default(*front, before.clone(), x.H, K, x.rows)
        *want_parts, want_conv = reference.conv_gating(*front, before, x.H, K, x.rows)
        want_o, want_state = reference.recurrent(*parts, pools[0].clone(), x.rows, qk_l2norm=True)
        gate = z.unflatten(-1, (x.HV, V))
        want = reference.gated_rms_norm(want_o.to(gate.dtype), gate, x.norm_weight).flatten(-2)
        y = call(0)
        pairs = (
            *zip(parts, want_parts, strict=True),
            (x.conv_state, want_conv), (pools[0], want_state), (y, want),
        )  # fmt: skip
        return max(scaled_error(got, expected, *TOLERANCE[got.dtype]) for got, expected in pairs)

    return Candidate("conv_gating, recurrent, norm", call, check)


def case_rows(
    heads: tuple[int, int], B: int, state_dtype: torch.dtype, options: Options
) -> list[dict]:
    H, HV = heads
    x = Step(B, H, HV, torch.bfloat16, options.seed)
    size = B * HV * V * K * state_dtype.itemsize
    gen = generator(options.seed)
    first = (0.05 * torch.randn(B, HV, V, K, generator=gen)).to(state_dtype)
    pools = buffers(size, lambda _: first.clone(), hot=False)
    candidates = [fused(x, pools), alone(x, pools), chain(x, pools)]
    case = {
        "family": "decode", "op": "decode", "heads": f"{H}/{HV}", "batch": B, "tokens": 1,
        "dtype": "bf16", "state": SHORT[state_dtype], "mode": "rotated",
    }  # fmt: skip
    with torch.no_grad():
        return measure(case, candidates, pools, 2 * size + x.bytes, options)


def dispatch_rows(options: Options) -> list[dict]:
    """Each op on nothing: what the dispatcher, the checks and the output cost."""
    H, HV = 2, 6
    x = Step(0, H, HV, torch.float32, options.seed)
    state = torch.zeros(1, HV, V, K)
    conv_state = torch.zeros(1, x.C, W - 1)
    q, v = torch.zeros(0, 1, H, K), torch.zeros(0, 1, HV, V)
    g = torch.zeros(0, 1, HV)
    mixed = x.projected[..., : x.C]
    empty = torch.zeros(0)
    calls: dict[str, Callable] = {
        "torch add_": lambda: torch.ops.aten.add_.Scalar(empty, 1),
        "recurrent": lambda: ops.recurrent.default(q, q, v, g, g, state),
        "recurrent_gated": lambda: ops.recurrent_gated.default(
            q, q, v, g, g, x.A_log, x.dt_bias, state
        ),
        "gating": lambda: ops.gating.default(g, g, x.A_log, x.dt_bias),
        "short_conv": lambda: ops.short_conv.default(mixed, x.conv_weight, None, conv_state),
        "conv_gating": lambda: ops.conv_gating.default(
            mixed, g, g, x.conv_weight, None, x.A_log, x.dt_bias, conv_state, H, K
        ),
        "gated_rms_norm": lambda: ops.gated_rms_norm.default(v, v, x.norm_weight),
        "decode": lambda: x.decode(ops.decode.default, conv_state, state),
    }
    options.status("decode: dispatch")
    times: dict[str, list[float]] = {name: [] for name in calls}
    n = 2000
    with torch.inference_mode():
        for _ in range(9):
            for name, call in calls.items():
                start = time.perf_counter()
                for _ in range(n):
                    call()
                times[name].append((time.perf_counter() - start) / n)
    medians = {name: statistics.median(found) * 1e3 for name, found in times.items()}
    floor = medians.pop("torch add_")
    rows = []
    for name, ms in medians.items():
        samples = sorted(times[name])
        row = {
            "family": "decode", "op": f"{name}, batch 0", "heads": f"{H}/{HV}", "batch": 0,
            "dtype": "f32", "mode": "dispatch", "candidate": "gdn_ops", "ms": ms,
            "spread": (samples[6] - samples[2]) * 1e3 / ms, "floor_ms": floor, "ratio": ms / floor,
            "gbps": None, "error": None, "skipped": "", "note": "floor: torch's add_ on nothing",
        }  # fmt: skip
        rows.append(row)
        options.emit(row)
    return rows


def run(options: Options) -> list[dict]:
    """The fused step over batch sizes, then the dispatch of every op."""
    keep_freed_memory()
    rows: list[dict] = []
    for heads in options.heads or HEADS:
        for batch in options.batches or (BATCHES[:1] if options.quick else BATCHES):
            for dtype in options.dtypes or (torch.float32,):
                rows += case_rows(heads, batch, dtype, options)
    return rows + dispatch_rows(options)
