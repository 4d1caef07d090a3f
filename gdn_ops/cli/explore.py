"""The whole question in one run: where the decode step of a layer stands, and what is left.

Runs the matrix of implementations, forms of the state (full, buffered, low rank), precision modes,
state dtypes and batch sizes. Numbers come first: each candidate is compared with the float64
reference, and one that is out of tolerance is not timed. Every table says whether its figures were
measured here or are projected from bytes and a bandwidth. The run ends with what bounds the layer
now and how far the goal in tokens a second is.

Model level: a model of --of layers, --layers of them Gated DeltaNet. A share counts the recurrence
alone; attention, experts and weights come on top.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from gdn_ops.cli import _arguments
from gdn_ops.cli._output import Output, UsageError

HELP = "the matrix of implementations, states, precisions and batches; what bounds the layer"
# Peers are compiled at these batch sizes only: each compile takes longer than all its timing.
COMPILED_AT = (1, 16)
QUALITY_TOKENS = 128


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--quick", action="store_true", help="two batch sizes, short sampling")
    parser.add_argument("--batch", help="batch sizes (default: 1,4,16,64)")
    parser.add_argument("--heads", default="16/48", help="key/value heads of the layer (16/48)")
    parser.add_argument("--state", help="state dtypes (default: f32,bf16,f16)")
    parser.add_argument("--precision", help=f"modes (default: {','.join(_arguments.MODES)})")
    parser.add_argument("--windows", help="R of buffered and low rank (default: 8,16,32)")
    parser.add_argument("--no-peers", action="store_true", help="only ours")
    parser.add_argument("--no-compile", action="store_true", help="skip peers under torch.compile")
    parser.add_argument(
        "--bandwidth", type=_arguments.rate, metavar="N",
        help="bytes a second of one device, for the projection (default: the sweep measured here)",
    )  # fmt: skip
    parser.add_argument(
        "--ranks", type=_arguments.whole(1), default=1, help="devices that share the heads (1)"
    )
    parser.add_argument("--goal", type=_arguments.rate, default=1e4, help="tokens a second (10000)")
    parser.add_argument(
        "--layers", type=_arguments.whole(1), default=48, help="Gated DeltaNet layers (48)"
    )
    parser.add_argument(
        "--of", type=_arguments.whole(1), default=64, help="layers of the model (64)"
    )
    parser.add_argument("--seed", type=_arguments.SEED, default=0, help="of the random inputs (0)")
    parser.add_argument(
        "--plot", type=_arguments.new_file, metavar="PNG",
        help="plot time over batch size (needs matplotlib)",
    )  # fmt: skip


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
        from gdn_ops.bench._timing import DTYPES

        read = _arguments.items
        batches = read(args.batch, "batch", _arguments.batch) or (
            (1, 16) if args.quick else (1, 4, 16, 64)
        )
        windows = read(args.windows, "windows", _arguments.number) or (
            (16,) if args.quick else (8, 16, 32)
        )
        precisions = read(args.precision, "precision", _arguments.mode) or _arguments.MODES
        if wrong := [r for r in windows if not 1 <= r <= 64]:
            raise UsageError(f"--windows: expected 1 to 64, got {wrong[0]}")
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


def _options(args: argparse.Namespace, plan: Plan):
    from gdn_ops.bench import Options

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
    from gdn_ops.bench import recurrent

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
    import gdn_ops
    from gdn_ops._tolerance import ROUNDED_FACTOR
    from gdn_ops.bench import windows

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
    import gdn_ops
    from gdn_ops import reference, windows
    from gdn_ops.bench.recurrent import K, V

    H, HV, T = 2, 6, QUALITY_TOKENS
    gen = torch.Generator().manual_seed(seed)
    q, k = reference.l2norm(torch.randn(2, 1, T, H, K, generator=gen))
    v = torch.randn(1, T, HV, V, generator=gen)
    beta = torch.rand(1, T, HV, generator=gen)
    rows = []
    for deepest in (3.0, 0.5):
        g = -deepest * torch.rand(1, T, HV, generator=gen)
        want, _ = reference.recurrent(q, k, v, g, beta, torch.zeros(1, HV, V, K))
        for R in plan.windows:
            got = gdn_ops.recurrent_lowrank(q, k, v, g, beta, *windows.allocate(1, H, HV, K, V, R))
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
    from gdn_ops.cli import demo

    own = argparse.Namespace(
        hidden=256, batch=plan.batches[0], seed=args.seed, no_compile=True, device="cpu"
    )
    H, HV = demo.HEADS
    out.console.print(f"measured: each part of a layer, {H}/{HV} heads, hidden {own.hidden}")
    return demo.layer_part(own, out, status, torch.bfloat16)["layer"]["eager"]


def sweeps(scaling: list[dict], matrix: list[dict]) -> dict[int, list[float]]:
    """Bytes a second of the in-place sweeps beside the full float32 state, by batch."""
    rates: dict[int, list[float]] = {}
    for row in scaling:
        if row["candidate"] == "gdn_ops" and row["ms"] is not None:
            rates.setdefault(row["batch"], []).append(row["gbps"] * row["ratio"] * 1e9)
    for row in matrix:
        if (row["candidate"], row["state"]) == ("recurrent", "f32") and row["ms"] is not None:
            rates.setdefault(row["batch"], []).append(row["gbps"] * row["ratio"] * 1e9)
    return rates


def disturbance(rates: dict[int, list[float]]) -> str | None:
    """A warning, if the same sweep ran at different speeds: then other times are no better."""
    for batch, found in rates.items():
        if max(found) > 1.5 * min(found):
            return (
                f"measured: the same sweep at batch {batch} ran at {min(found) / 1e9:.3g} and at "
                f"{max(found) / 1e9:.3g} GB/s in this run: something else used the machine, and "
                "some of the times above are too long."
            )
    return None


def projection_rows(
    args: argparse.Namespace, plan: Plan, measured: list[dict], bandwidth: float
) -> list[dict]:
    """Tokens a second that the state traffic alone allows, and what was reached here."""
    from gdn_ops.bench import recurrent, windows
    from gdn_ops.bench._timing import SHORT

    H, HV = plan.heads
    activations = recurrent.Inputs(1, H, HV, torch.bfloat16, args.seed).bytes
    f32 = torch.float32
    forms: list[tuple[str, str, float]] = []
    for dtype in plan.dtypes:
        full = 2 * HV * windows.K * windows.V * dtype.itemsize
        forms.append(("recurrent", SHORT[dtype], full))
        for R in plan.windows:
            moved = windows.bytes_per_token(H, HV, dtype, R, f32, f32)
            forms.append((f"recurrent_buffered R={R}", SHORT[dtype], moved))
    for R in plan.windows:
        moved = windows.bytes_per_token(H, HV, None, R, f32, f32)
        forms.append((f"recurrent_lowrank R={R}", "f32", moved))
    largest = plan.batches[-1]
    rows = []
    for name, state, moved in forms:
        total = args.layers * (moved + activations)
        bound = args.ranks * bandwidth / total
        here = [
            r
            for r in measured
            if (r["candidate"], r["state"], r["batch"]) == (name, state, largest)
            and r["precision"] == "exact"
            and not r["skipped"]
        ]
        reached = largest / (args.layers * here[0]["ms"] / 1e3) if here else None
        rows.append(
            {
                "form": name,
                "state": state,
                "mb_per_token": total / 1e6,
                "tokens_per_s_bound": bound,
                "of_goal": bound / args.goal,
                "tokens_per_s_here": reached,
                "batch_here": largest,
            }
        )
    return rows


def model_columns(row: dict, args: argparse.Namespace, base: float | None) -> dict:
    """What a layer's time means for the model; projected from the measured time."""
    ms = row["ms"]
    if ms is None:
        return dict.fromkeys(("layers_ms", "layers_tokens_per_s", "model_speedup"))
    part = args.layers / args.of
    return {
        "layers_ms": args.layers * ms,
        "layers_tokens_per_s": row["batch"] / (args.layers * ms) * 1e3,
        # Amdahl, for a model whose layers all cost what this one costs as transformers runs it.
        "model_speedup": None if base is None else 1 / (1 - part + part * ms / base),
    }


def _cell(value: object, form: str = "{:.4g}") -> str:
    return "-" if value is None else value if isinstance(value, str) else form.format(value)


TIMED = ("ms", "floor_ms", "ratio", "gbps", "error", "layers_ms", "layers_tokens_per_s")


def show_timed(out: Output, title: str, rows: list[dict], keys: tuple[str, ...]) -> None:
    names = {
        "floor_ms": "floor ms", "gbps": "GB/s", "error": "error/tol", "layers_ms": "all layers ms",
        "layers_tokens_per_s": "their tok/s", "model_speedup": "model x", "ratio": "x floor",
    }  # fmt: skip
    columns = (*keys, *TIMED, "model_speedup")
    if all(r["model_speedup"] is None for r in rows):
        columns = columns[:-1]
    out.table(
        title,
        [*(names.get(c, c) for c in columns), "note"],
        [[*(_cell(r.get(c)) for c in columns), r["skipped"] or r["note"]] for r in rows],
    )


def verdict(
    args: argparse.Namespace,
    plan: Plan,
    scaling: list[dict],
    parts: list[dict],
    projected: list[dict],
    bandwidth: float,
) -> dict:
    """What bounds the layer now, and the distance to the goal, as numbers and as text."""
    ours = [r for r in scaling if r["candidate"] == "gdn_ops" and r["ms"] is not None]
    lines = []
    data: dict[str, object] = {"bandwidth": bandwidth, "ranks": args.ranks, "goal": args.goal}
    if ours:
        last = ours[-1]
        sweep = last["gbps"] * last["ratio"]
        bound = "memory" if last["ratio"] <= 1.25 else "memory and work beside it"
        data |= {"bound_by": bound, "gbps": last["gbps"], "sweep_gbps": sweep}
        lines.append(
            f"measured: at batch {last['batch']} the recurrence moves {last['gbps']:.3g} GB/s, "
            f"{100 / last['ratio']:.0f}% of the {sweep:.3g} GB/s of an in-place sweep: bound by "
            f"{bound}."
        )
    if parts:
        inner = [r for r in parts if r["stage"] != "whole layer" and r["gdn_ops"] is not None]
        alone = {r["stage"]: r["gdn_ops"] for r in inner}
        fused = ("input projection", "conv to norm in one call", "output projection")
        most = max(fused, key=alone.__getitem__)
        share = alone[most] / sum(alone[s] for s in fused)
        data["largest_part"] = most
        lines.append(
            f"measured: at batch {plan.batches[0]} and hidden 256 the largest part of our layer is "
            f"'{most}', {share * 100:.0f}%."
        )
    best = max(projected, key=lambda r: r["tokens_per_s_bound"])
    exact = max(
        (r for r in projected if "lowrank" not in r["form"]), key=lambda r: r["tokens_per_s_bound"]
    )
    for what, row in (("exact", exact), ("any", best)):
        data[f"best_{what}"] = row
    where = "measured here" if args.bandwidth is None else "given"
    lines.append(
        f"projected: at {bandwidth / 1e9:.4g} GB/s ({where}) a device and {args.ranks} device(s), "
        f"the state traffic of {args.layers} layers allows "
        f"{exact['tokens_per_s_bound']:.4g} tokens/s "
        f"({exact['form']}, {exact['state']}): {exact['of_goal']:.3g} times the goal of "
        f"{args.goal:g}. With an approximation {best['tokens_per_s_bound']:.4g} "
        f"({best['form']}, {best['state']})."
    )
    reached = [r for r in projected if r["tokens_per_s_here"] is not None]
    for what, rows in (
        ("exact", [r for r in reached if "lowrank" not in r["form"]]),
        ("with an approximation", [r for r in reached if "lowrank" in r["form"]]),
    ):
        if not rows:
            continue
        top = max(rows, key=lambda r: r["tokens_per_s_here"])
        data[f"here_{what.split()[0]}"] = top
        speed = top["tokens_per_s_here"]
        lines.append(
            f"measured here, {what}: the recurrence of {args.layers} layers alone runs at "
            f"{speed:.4g} tokens/s at batch {top['batch_here']} ({top['form']}, {top['state']}), "
            f"{speed / args.goal:.3g} times the goal."
        )
    return {**data, "text": lines}


def run(args: argparse.Namespace, out: Output) -> tuple[int, dict]:
    from gdn_ops import bench
    from gdn_ops.bench._timing import keep_freed_memory

    plan = Plan.of(args)
    if args.plot:
        from gdn_ops.cli import _plot

        _plot.require(args.plot, plan.batches)
    keep_freed_memory()
    machine = bench.machine()
    out.console.print(", ".join(f"{k}: {v}" for k, v in machine.items()), markup=False)

    options = _options(args, plan)
    with torch.no_grad(), out.progress("explore", lines=True) as options.show:
        scaling = scaling_rows(plan, options)
    base = {
        r["batch"]: r["ms"]
        for r in scaling
        if r["candidate"] == "transformers eager" and r["ms"] is not None
    }
    for row in scaling:
        row |= model_columns(row, args, base.get(row["batch"]))
    # Each table as soon as it is known: whoever stops the run keeps what it found.
    layer = max((b for b in plan.batches if b <= 16), default=plan.batches[0])
    H, HV = plan.heads
    what = f"one decode step of the recurrence, {H}/{HV} heads of 128, bf16 activations"
    show_timed(
        out,
        f"measured: implementations, batch {layer}, f32 state; {what} (last columns projected)",
        [r for r in scaling if r["batch"] == layer],
        ("candidate",),
    )
    show_timed(
        out,
        f"measured: batch scaling, f32 state; {what} (last columns projected)",
        sorted(scaling, key=lambda r: (r["candidate"], r["batch"])),
        ("candidate", "batch"),
    )
    with torch.no_grad(), out.progress("explore", lines=True) as options.show:
        matrix = matrix_rows(plan, options)
    for row in matrix:
        row |= model_columns(row, args, base.get(row["batch"]))
    show_timed(
        out,
        f"measured: full, buffered and low-rank state; {what} (last columns projected)",
        matrix,
        ("candidate", "state", "precision", "batch"),
    )
    parts: list[dict] = []
    if not args.no_peers:
        try:
            with torch.no_grad(), out.progress("explore", lines=True) as status:
                parts = part_rows(args, plan, out, status)
        except ImportError as error:
            out.console.print(f"parts of a layer: skipped, {error}", markup=False)
    with torch.no_grad(), out.progress("explore", lines=True) as status:
        status("error of the low-rank forms")
        quality = quality_rows(plan, args.seed)
    out.table(
        f"measured: low rank against the full state, {QUALITY_TOKENS} tokens, unit keys, float32",
        ["R", "log decay g", "largest difference", "relative L2"],
        [[str(r["R"]), r["g"], f"{r['max_abs']:.2e}", f"{r['rel_l2']:.2e}"] for r in quality],
    )
    rates = sweeps(scaling, matrix)
    sweep = max((max(r) for r in rates.values()), default=0.0)
    if not (bandwidth := args.bandwidth or sweep):
        raise UsageError("nothing was timed: give --bandwidth for the projection")
    projected = projection_rows(args, plan, matrix, bandwidth)
    out.table(
        f"projected: throughput of the recurrence of {args.layers} of {args.of} layers at "
        f"{bandwidth / 1e9:.4g} GB/s x {args.ranks} (last column measured here)",
        ["form", "state", "MB a token", "tokens/s bound", "of the goal", "measured tokens/s"],
        [
            [
                r["form"],
                r["state"],
                f"{r['mb_per_token']:.1f}",
                f"{r['tokens_per_s_bound']:.4g}",
                f"{r['of_goal']:.3g}x",
                _cell(r["tokens_per_s_here"]),
            ]
            for r in projected
        ],
    )
    end = verdict(args, plan, scaling, parts, projected, bandwidth)
    if line := disturbance(rates):
        end["text"].append(line)
    for line in end["text"]:
        out.console.print(line, markup=False)
    drawn = 0
    if args.plot:
        exact = (r for r in matrix if r["precision"] == "exact")
        drawn = _plot.draw(out, [*scaling, *exact], machine, args.plot)
    refused = [r for r in (*scaling, *matrix) if r["skipped"].startswith("not timed")]
    return drawn or int(bool(refused)), {
        "machine": machine,
        "heads": f"{H}/{HV}",
        "layers": args.layers,
        "of": args.of,
        "implementations": {
            "kind": "measured",
            "batch": layer,
            "rows": [r for r in scaling if r["batch"] == layer],
        },
        "scaling": {"kind": "measured", "rows": scaling},
        "matrix": {"kind": "measured", "rows": matrix},
        "parts": {"kind": "measured", "rows": parts},
        "lowrank": {"kind": "measured", "rows": quality},
        "throughput": {"kind": "projected", "rows": projected},
        "verdict": end,
    }
