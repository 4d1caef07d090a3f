"""The short convolution and the gates of a decode step, against torch and transformers.

The convolution of a layer has C = 2*16*128 + 48*128 = 10240 channels and 4 taps; its floor is the
input, the output, the weights, and the state read and written.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from gdn_ops import reference
from gdn_ops._tolerance import TOLERANCE, scaled_error
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

TITLE = "short convolution and gates of a decode step"
HEADS = (16, 48)
K = V = 128
W = 4
BATCHES = (1, 16, 64, 256)
TOKENS = (1, 16, 256, 4096)


def conv_rows(heads: tuple[int, int], batch: int, dtype: torch.dtype, options: Options):
    C = 2 * heads[0] * K + heads[1] * V
    gen = generator(options.seed)
    x = torch.randn(batch, 1, C, generator=gen).to(dtype)
    weight = torch.randn(C, W, generator=gen).to(dtype)
    rows = torch.arange(batch, dtype=torch.int32)
    first = torch.randn(batch, C, W - 1, generator=gen).to(dtype)
    pools = buffers(nbytes(first), lambda _: first.clone(), hot=False)
    wide = torch.cat([torch.zeros(batch, C, 1, dtype=dtype), first], -1)  # transformers keeps W

    def check(
        call: Callable[[], Tensor], before: Callable[[], Tensor], after: Callable[[], Tensor]
    ) -> Callable[[], float]:
        def run() -> float:
            want, want_state = reference.short_conv(x, weight, None, before().clone())
            y = call()
            return max(
                scaled_error(y, want, *TOLERANCE[dtype]),
                scaled_error(after(), want_state, *TOLERANCE[dtype]),
            )

        return run

    op = torch.ops.gdn.short_conv.default

    def ours(i: int) -> Tensor:
        return op(x, weight, None, pools[i], rows)

    candidates = [
        Candidate("gdn_ops", ours, check(lambda: ours(0), lambda: pools[0], lambda: pools[0]))
    ]
    if options.peers:
        candidates += _conv_peers(x, weight, wide, check, options.compiled)
    case = {
        "family": "conv", "op": "short_conv + silu", "heads": f"{heads[0]}/{heads[1]}",
        "batch": batch, "tokens": 1, "dtype": SHORT[dtype], "mode": "rotated",
    }  # fmt: skip
    moved = 2 * nbytes(pools[0]) + 2 * nbytes(x) + nbytes(weight, rows)
    with torch.no_grad():
        return measure(case, candidates, pools, moved, options)


def _conv_peers(x, weight, wide, check, compiled: bool) -> list[Candidate]:
    try:
        from transformers.models.qwen3_5.modeling_qwen3_5 import causal_conv1d_update
    except ImportError as error:
        return [Candidate("transformers", skipped=f"transformers is not usable: {error}")]
    found = []
    mixed = x.transpose(1, 2)
    for name in ("transformers eager", "transformers compiled")[: 1 + compiled]:
        step = causal_conv1d_update
        if name.endswith("compiled"):
            torch._dynamo.reset()
            step = torch.compile(step, dynamic=False)
        state = wide.clone()

        def call(_: int, step=step, state=state) -> Tensor:
            return step(mixed, state, weight, None, "silu").transpose(1, 2)

        def tail(state=state) -> Tensor:
            return state[:, :, 1:]

        found.append(
            Candidate(name, call, check(lambda call=call: call(0), tail, tail), note="hot state")
        )
    return found


def gating_rows(heads: tuple[int, int], tokens: int, dtype: torch.dtype, options: Options):
    HV = heads[1]
    gen = generator(options.seed)
    a, b = (torch.randn(1, tokens, HV, generator=gen).to(dtype) for _ in range(2))
    A_log, dt_bias = torch.rand(HV, generator=gen), torch.randn(HV, generator=gen)
    want = reference.gating(a, b, A_log, dt_bias)

    def torch_gates(a: Tensor, b: Tensor, A_log: Tensor, dt_bias: Tensor):
        return -A_log.exp() * F.softplus(a.float() + dt_bias), b.float().sigmoid()

    def candidate(name: str, step: Callable) -> Candidate:
        def check() -> float:
            got = step(a, b, A_log, dt_bias)
            limit = TOLERANCE[torch.float32]
            return max(scaled_error(x, y, *limit) for x, y in zip(got, want, strict=True))

        return Candidate(name, lambda _: step(a, b, A_log, dt_bias), check)

    candidates = [candidate("gdn_ops", torch.ops.gdn.gating.default)]
    if options.peers:
        candidates.append(candidate("torch eager", torch_gates))
        if options.compiled:
            torch._dynamo.reset()
            candidates.append(
                candidate("torch compiled", torch.compile(torch_gates, dynamic=False))
            )
    case = {
        "family": "conv", "op": "gating", "heads": f"{heads[0]}/{HV}", "tokens": tokens,
        "dtype": SHORT[dtype], "mode": "hot",
    }  # fmt: skip
    moved = nbytes(a, b, A_log, dt_bias) + 2 * 4 * a.numel()
    pools = [torch.zeros(max(moved // 8, 64))]
    return measure(case, candidates, pools, moved, options)


def run(options: Options) -> list[dict]:
    """The convolution over batch sizes, the gates over token counts."""
    keep_freed_memory()
    rows: list[dict] = []
    dtype = torch.bfloat16
    for heads in options.heads or (HEADS,):
        for batch in options.batches or (BATCHES[:2] if options.quick else BATCHES):
            rows += conv_rows(heads, batch, dtype, options)
        for tokens in TOKENS[:3] if options.quick else TOKENS:
            rows += gating_rows(heads, tokens, dtype, options)
    return rows
