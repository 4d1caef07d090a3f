"""Decode with windows of pending updates beside ``recurrent``: time, floor, and bytes a token.

Windows start at every fill level in turn, so a sample holds steps that fold and steps that do not
in the proportion of a long run.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gdn_ops import reference, windows
from gdn_ops._tolerance import TOLERANCE, scaled_error
from gdn_ops.bench._timing import (
    DTYPES,
    SHORT,
    Candidate,
    Options,
    buffers,
    generator,
    keep_freed_memory,
    measure,
)
from gdn_ops.bench.recurrent import HEADS, Inputs, K, V, fill_pool

TITLE = "decode with windows: buffered, low rank, speculative"
R = 16
DRAFTS = 4
BATCHES = (1, 16, 64, 256)


def bytes_per_token(
    H: int,
    HV: int,
    state: torch.dtype | None,
    R: int,
    update: torch.dtype,
    key: torch.dtype,
    T: int = 1,
) -> float:
    """Bytes of state and window that one call of T tokens moves, averaged over a long run.

    ``state`` None is the low-rank form with a full window. Buffered: the base is read once a call
    and written once a fold, every R // T calls; the call that folds reads the entries it folds.
    Activations are not counted.
    """
    entry = H * K * key.itemsize + HV * V * update.itemsize + HV * 4
    if state is None:
        return entry * (R + T)
    calls = R // T
    base = HV * V * K * state.itemsize
    read = sum(T * i for i in range(1, calls + 1))
    return base * (1 + 1 / calls) + entry * (read / calls + T)


def make_windows(
    B: int,
    H: int,
    HV: int,
    dtype: torch.dtype,
    count: int,
    full: bool,
    T: int,
    seed: int,
    R: int = R,
):
    gen = generator(seed)
    result = []
    for i in range(count):
        w = windows.allocate(B, H, HV, K, V, R, update_dtype=dtype, key_dtype=dtype)
        w.k.copy_(reference.l2norm(torch.randn(w.k.shape, generator=gen)))
        w.u.copy_(torch.randn(w.u.shape, generator=gen) * 0.3)
        w.g.fill_(-0.3)
        calls = (torch.arange(B) + i) % (R // T)
        w.fill.copy_(torch.full((B,), R) if full else calls * T | (T - 1) << 8)
        result.append(w)
    return result


def check_rows(got: Tensor, want: Tensor) -> float:
    return scaled_error(got, want, *TOLERANCE[got.dtype])


def case_rows(
    heads, B: int, dtype: torch.dtype, T: int, options: Options, R: int = R
) -> list[dict]:
    H, HV = heads
    x = Inputs(B, H, HV, torch.bfloat16, options.seed, T)
    size = B * HV * V * K * dtype.itemsize
    states = T if T > 1 else 1  # the plain op keeps one state a draft
    pools = buffers(
        size * states, lambda i: fill_pool((B * states, HV, V, K), dtype, options.seed + i), False
    )
    n = len(pools)
    buffered = make_windows(B, H, HV, dtype, n, False, T, options.seed, R)
    rows = x.rows
    table = torch.arange(B * T, dtype=torch.int32).view(B, T) if T > 1 else rows
    accepted = torch.full((B,), T, dtype=torch.int32) if T > 1 else None
    plain = torch.ops.gdn.recurrent.default
    exact = torch.ops.gdn.recurrent_buffered.default
    low = torch.ops.gdn.recurrent_lowrank.default
    inputs = (x.q, x.k, x.v, x.g, x.beta)
    some = sorted({0, B // 2, B - 1})

    def call_plain(i):
        return plain(*inputs, pools[i], table, None, None, accepted, None, True)

    def call_buffered(i):
        return exact(*inputs, pools[i][:B], *buffered[i], rows, None, None, accepted, None, True)

    def check_plain():
        source = [r * T + T - 1 for r in some] if T > 1 else some
        want, _ = reference.recurrent(*(y[some] for y in inputs), pools[0][source], qk_l2norm=True)
        return check_rows(call_plain(0)[some], want)

    def check_buffered():
        window = [y[some] for y in buffered[0]]
        want, *_ = reference.recurrent_buffered(
            *(y[some] for y in inputs), pools[0][some], *window, qk_l2norm=True
        )
        return check_rows(call_buffered(0)[some], want)

    f32 = torch.float32
    buffered_bytes = round(B * bytes_per_token(H, HV, dtype, R, dtype, dtype, T))
    plain_bytes = size * (1 + states)
    candidates = [
        Candidate("recurrent", call_plain, check_plain, fields={"state_bytes": plain_bytes}),
        Candidate(
            f"recurrent_buffered R={R}",
            call_buffered,
            check_buffered,
            bytes=buffered_bytes + x.bytes,
            fields={"state_bytes": buffered_bytes},
        ),
    ]
    if T == 1 and dtype == f32:
        ring = make_windows(B, H, HV, f32, n, True, 1, options.seed, R)

        def call_low(i):
            return low(*inputs, *ring[i], rows, None, None, None, None, True)

        def check_low():
            window = [y[some] for y in ring[0]]
            want, _ = reference.recurrent_lowrank(
                *(y[some] for y in inputs), *window, qk_l2norm=True
            )
            return check_rows(call_low(0)[some], want)

        low_bytes = round(B * bytes_per_token(H, HV, None, R, f32, f32))
        candidates.append(
            Candidate(
                f"recurrent_lowrank R={R}",
                call_low,
                check_low,
                bytes=low_bytes + x.bytes,
                fields={"state_bytes": low_bytes},
            )
        )
    case = {
        "family": "windows", "op": "decode" if T == 1 else "speculative", "heads": f"{H}/{HV}",
        "batch": B, "tokens": T, "dtype": "bf16", "state": SHORT[dtype], "mode": "rotated",
    }  # fmt: skip
    return measure(case, candidates, pools, plain_bytes + x.bytes, options)


def run(options: Options) -> list[dict]:
    """One token a call at every batch and base dtype; four drafts a call up to batch 64."""
    keep_freed_memory()
    heads = options.heads or HEADS[:1]
    batches = options.batches or ((1, 16) if options.quick else BATCHES)
    dtypes = options.dtypes or tuple(DTYPES.values())
    rows: list[dict] = []
    for pair in heads:
        for B in batches:
            for dtype in dtypes:
                rows += case_rows(pair, B, dtype, 1, options)
                if B <= 64 and dtype == torch.float32:
                    rows += case_rows(pair, B, dtype, DRAFTS, options)
    return rows
