"""Decode with windows of pending updates beside ``recurrent``: time, floor, and bytes a token.

Windows start at every fill level in turn, so a sample holds steps that fold and steps that do not
in the proportion of a long run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

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
    nbytes,
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


class Windowed(NamedTuple):
    """One case: what its candidates share."""

    x: Inputs
    pools: list[Tensor]  # B * T states each where the plain op keeps one a draft, else B
    R: int
    T: int
    rows_checked: list[int]

    @property
    def tokens(self) -> tuple[Tensor, ...]:
        x = self.x
        return x.q, x.k, x.v, x.g, x.beta

    @property
    def accepted(self) -> Tensor | None:
        """Speculative calls: every draft of the call before."""
        B = self.x.rows.shape[0]
        return torch.full((B,), self.T, dtype=torch.int32) if self.T > 1 else None

    def some(self, tensors: Iterable[Tensor]) -> list[Tensor]:
        return [t[self.rows_checked] for t in tensors]

    def error(self, o: Tensor, want: Tensor) -> float:
        return scaled_error(o[self.rows_checked], want, *TOLERANCE[o.dtype])

    def make_windows(self, full: bool, seed: int) -> list[windows.Window]:
        """One for each pool, of its dtype; they start at every fill level in turn, or full."""
        B, R, T, dtype = self.x.rows.shape[0], self.R, self.T, self.pools[0].dtype
        H, HV = self.x.q.shape[2], self.x.v.shape[2]
        gen = generator(seed)
        result = []
        for i in range(len(self.pools)):
            w = windows.allocate(B, H, HV, K, V, R, update_dtype=dtype, key_dtype=dtype)
            w.k.copy_(reference.l2norm(torch.randn(w.k.shape, generator=gen)))
            w.u.copy_(torch.randn(w.u.shape, generator=gen) * 0.3)
            w.g.fill_(-0.3)
            calls = (torch.arange(B) + i) % (R // T)
            w.fill.copy_(torch.full((B,), R) if full else calls * T | (T - 1) << 8)
            result.append(w)
        return result


def full_state(c: Windowed) -> Candidate:
    """The op without windows: the state is written with every token."""
    op = torch.ops.gdn.recurrent.default
    tokens, accepted, T = c.tokens, c.accepted, c.T
    B = c.x.rows.shape[0]
    table = torch.arange(B * T, dtype=torch.int32).view(B, T) if T > 1 else c.x.rows

    def call(i: int) -> Tensor:
        return op(*tokens, c.pools[i], table, None, None, accepted, None, True)

    def check() -> float:
        state = c.pools[0][[row * T + T - 1 for row in c.rows_checked]]
        want, _ = reference.recurrent(*c.some(tokens), state, qk_l2norm=True)
        return c.error(call(0), want)

    moved = nbytes(c.pools[0]) // T * (1 + T)
    return Candidate("recurrent", call, check, fields={"state_bytes": moved})


def buffered(c: Windowed, seed: int) -> Candidate:
    op = torch.ops.gdn.recurrent_buffered.default
    tokens, accepted, rows = c.tokens, c.accepted, c.x.rows
    B = rows.shape[0]
    pending = c.make_windows(False, seed)

    def call(i: int) -> Tensor:
        base = c.pools[i][:B]
        return op(*tokens, base, *pending[i], rows, None, None, accepted, None, True)

    def check() -> float:
        base = c.pools[0][c.rows_checked]
        window = c.some(pending[0])
        want, *_ = reference.recurrent_buffered(*c.some(tokens), base, *window, qk_l2norm=True)
        return c.error(call(0), want)

    return _candidate(f"recurrent_buffered R={c.R}", call, check, c, c.pools[0].dtype)


def lowrank(c: Windowed, seed: int) -> Candidate:
    op = torch.ops.gdn.recurrent_lowrank.default
    tokens, rows = c.tokens, c.x.rows
    ring = c.make_windows(True, seed)

    def call(i: int) -> Tensor:
        return op(*tokens, *ring[i], rows, None, None, None, None, True)

    def check() -> float:
        want, _ = reference.recurrent_lowrank(*c.some(tokens), *c.some(ring[0]), qk_l2norm=True)
        return c.error(call(0), want)

    return _candidate(f"recurrent_lowrank R={c.R}", call, check, c, None)


def _candidate(
    name: str,
    call: Callable[[int], Tensor],
    check: Callable[[], float],
    c: Windowed,
    state: torch.dtype | None,
) -> Candidate:
    """With the bytes of its own form: a base of dtype `state`, or none."""
    B, H, HV = c.x.rows.shape[0], c.x.q.shape[2], c.x.v.shape[2]
    entry = c.pools[0].dtype
    moved = round(B * bytes_per_token(H, HV, state, c.R, entry, entry, c.T))
    fields = {"state_bytes": moved}
    return Candidate(name, call, check, bytes=moved + c.x.bytes, fields=fields)


def case_rows(
    heads: tuple[int, int], B: int, dtype: torch.dtype, T: int, options: Options, R: int = R
) -> list[dict]:
    H, HV = heads
    shape = (B * T, HV, V, K)  # the plain op keeps one state a draft
    pools = buffers(
        B * T * HV * V * K * dtype.itemsize,
        lambda i: fill_pool(shape, dtype, options.seed + i),
        False,
    )
    x = Inputs(B, H, HV, torch.bfloat16, options.seed, T)
    c = Windowed(x, pools, R, T, sorted({0, B // 2, B - 1}))
    candidates = [full_state(c), buffered(c, options.seed)]
    if T == 1:
        candidates.append(lowrank(c, options.seed))
    case = {
        "family": "windows", "op": "decode" if T == 1 else "speculative", "heads": f"{H}/{HV}",
        "batch": B, "tokens": T, "dtype": "bf16", "state": SHORT[dtype], "mode": "rotated",
    }  # fmt: skip
    must_move = candidates[0].fields["state_bytes"] + x.bytes
    return measure(case, candidates, pools, must_move, options)


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
