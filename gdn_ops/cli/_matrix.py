"""What ``gdn-ops explore`` measures: which cases, and the rows of each table."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

import gdn_ops
from gdn_ops import reference
from gdn_ops._limits import MAX_WINDOW
from gdn_ops._tolerance import ROUNDED_FACTOR
from gdn_ops.bench import Options, recurrent, windows
from gdn_ops.bench._timing import DTYPES
from gdn_ops.cli import _arguments, demo
from gdn_ops.cli._output import Output, UsageError

# Peers are compiled at these batch sizes only: each compile takes longer than all its timing.
COMPILED_AT = (1, 16)
QUALITY_TOKENS = 128
PARTS_HIDDEN = 256  # of the layer whose parts are timed: small, so that the rest shows


@dataclass
class Plan:
    """What a run covers."""

    heads: tuple[int, int]
    batches: tuple[int, ...]
    dtypes: tuple[torch.dtype, ...]
    precisions: tuple[str, ...]
    windows: tuple[int, ...]

    @classmethod
    def of(cls, args: argparse.Namespace) -> Plan:
        read = _arguments.items
        batches = read(args.batch, "batch", _arguments.batch) or (
            (1, 16) if args.quick else (1, 4, 16, 64)
        )
        windows = read(args.windows, "windows", _arguments.number) or (
            (16,) if args.quick else (8, 16, 32)
        )
        precisions = read(args.precision, "precision", _arguments.mode) or _arguments.MODES
        if wrong := [r for r in windows if not 1 <= r <= MAX_WINDOW]:
            raise UsageError(f"--windows: expected 1 to {MAX_WINDOW}, got {wrong[0]}")
        if len(heads := read(args.heads, "heads", _arguments.heads)) != 1:
            raise UsageError(f"--heads: expected one pair, like 16/48, got {args.heads!r}")
        if args.layers > args.of:
            raise UsageError(f"--layers: expected at most --of {args.of}, got {args.layers}")
        if heads[0][0] % args.ranks:
            raise UsageError(f"--ranks: expected a divisor of {heads[0][0]} key heads")
        dtypes = tuple(DTYPES[n] for n in read(args.state, "state", _arguments.dtype) or DTYPES)
        return cls(heads[0], tuple(sorted(set(batches))), dtypes, precisions, windows)

    @property
    def middle(self) -> int:
        return self.windows[len(self.windows) // 2]

    def settings(self) -> Iterator[tuple[torch.dtype, str]]:
        """State dtypes and modes; a float32 state has one mode."""
        for dtype in self.dtypes:
            modes = ("exact",) if dtype == torch.float32 else self.precisions
            yield from ((dtype, mode) for mode in modes)

    def windows_beside(self, dtype: torch.dtype) -> tuple[int, ...]:
        """Every R beside a float32 state, one elsewhere, or a run takes too long."""
        return self.windows if dtype == torch.float32 else (self.middle,)

    @property
    def cases(self) -> int:
        forms = sum(len(self.windows_beside(dtype)) for dtype, _ in self.settings())
        return len(self.batches) * (1 + forms)


def options_for(args: argparse.Namespace, plan: Plan):
    """What the benchmarks take, with short samples, and a status that says how far the run is."""

    class Short(Options):
        """Short samples; what it shows begins with how far the whole run is."""

        show: Callable[[str], None]
        case = 0
        began = time.monotonic()

        @property
        def budget_s(self) -> float:
            return 0.2 if self.quick else 0.8

        def tell(self, text: str) -> None:
            passed = time.monotonic() - self.began
            self.show(f"case {self.case} of {plan.cases}, {passed:.0f} s: {text}")

    options = Short(
        quick=args.quick,
        peers=not args.no_peers,
        compiled=not args.no_compile,
        seed=args.seed,
    )
    options.status = options.tell
    return options


def scaling_rows(plan: Plan, options) -> list[dict]:
    """Our recurrence and its peers over the batch sizes; float32 state."""
    rows = []
    asked = options.compiled
    for batch in plan.batches:
        size = batch * plan.heads[1] * recurrent.K * recurrent.V * 4
        options.case += 1
        options.compiled = asked and batch in COMPILED_AT
        peers = options.peers and size <= recurrent.PEER_STATE_BYTES
        rows += recurrent.case_rows(plan.heads, batch, torch.float32, "VK", False, peers, options)
    options.compiled = asked
    return rows


def matrix_rows(plan: Plan, options) -> list[dict]:
    """Full, buffered and low-rank state over precision modes, state dtypes, batches and R."""
    rows = []
    before = gdn_ops.get_precision()
    try:
        for batch in plan.batches:
            for dtype, mode in plan.settings():
                gdn_ops.set_precision(mode)
                options.slack = 1.0 if mode == "exact" else ROUNDED_FACTOR
                among = plan.windows_beside(dtype)
                for R in among:
                    options.case += 1
                    found = windows.case_rows(plan.heads, batch, dtype, 1, options, R)
                    keep = found if among[0] == R else found[1:]
                    rows += [{**row, "precision": mode} for row in keep]
    finally:
        gdn_ops.set_precision(before)
        options.slack = 1.0
    return rows


def quality_rows(plan: Plan, seed: int) -> list[dict]:
    """Error of the low-rank output against the full one, by how fast the decay forgets."""
    H, HV, T = 2, 6, QUALITY_TOKENS
    K, V = recurrent.K, recurrent.V
    gen = torch.Generator().manual_seed(seed)
    q, k = reference.l2norm(torch.randn(2, 1, T, H, K, generator=gen))
    v = torch.randn(1, T, HV, V, generator=gen)
    beta = torch.rand(1, T, HV, generator=gen)
    rows = []
    for deepest in (3.0, 0.5):
        g = -deepest * torch.rand(1, T, HV, generator=gen)
        want, _ = reference.recurrent(q, k, v, g, beta, torch.zeros(1, HV, V, K))
        for R in plan.windows:
            got = gdn_ops.recurrent_lowrank(
                q, k, v, g, beta, *gdn_ops.windows.allocate(1, H, HV, K, V, R)
            )
            difference = got.double() - want
            rows.append(
                {
                    "R": R,
                    "g": f"uniform in (-{deepest:g}, 0)",
                    "tokens": T,
                    "max_abs": float(difference.abs().max()),
                    "rel_l2": float(difference.norm() / want.norm()),
                }
            )
    return rows


def part_rows(args: argparse.Namespace, plan: Plan, out: Output, status) -> list[dict]:
    """Each part of a layer, eager, in the dtype of the other tables' activations."""
    own = argparse.Namespace(
        hidden=PARTS_HIDDEN, batch=plan.batches[0], seed=args.seed, no_compile=True, device="cpu"
    )
    H, HV = demo.HEADS
    out.console.print(f"measured: each part of a layer, {H}/{HV} heads, hidden {own.hidden}")
    return demo.layer_part(own, out, status, torch.bfloat16)["layer"]["eager"]
