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

import torch

from gdn_ops import bench
from gdn_ops.bench._timing import keep_freed_memory
from gdn_ops.cli import _arguments, _plot
from gdn_ops.cli._matrix import (
    QUALITY_TOKENS,
    Plan,
    matrix_rows,
    options_for,
    part_rows,
    quality_rows,
    scaling_rows,
)
from gdn_ops.cli._output import Output, UsageError
from gdn_ops.cli._projection import (
    disturbance,
    model_columns,
    projection_rows,
    sweeps,
    verdict,
)

HELP = "the matrix of implementations, states, precisions and batches; what bounds the layer"


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


def show_scaling(out: Output, what: str, rows: list[dict], layer: int) -> None:
    """The implementations beside each other at batch ``layer``, then each over all batches."""
    show_timed(
        out,
        f"measured: implementations, batch {layer}, f32 state; {what} (last columns projected)",
        [r for r in rows if r["batch"] == layer],
        ("candidate",),
    )
    show_timed(
        out,
        f"measured: batch scaling, f32 state; {what} (last columns projected)",
        sorted(rows, key=lambda r: (r["candidate"], r["batch"])),
        ("candidate", "batch"),
    )


def show_quality(out: Output, rows: list[dict]) -> None:
    out.table(
        f"measured: low rank against the full state, {QUALITY_TOKENS} tokens, unit keys, float32",
        ["R", "log decay g", "largest difference", "relative L2"],
        [[str(r["R"]), r["g"], f"{r['max_abs']:.2e}", f"{r['rel_l2']:.2e}"] for r in rows],
    )


def show_projection(
    out: Output, args: argparse.Namespace, rows: list[dict], bandwidth: float
) -> None:
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
            for r in rows
        ],
    )


def measured_parts(args: argparse.Namespace, plan: Plan, out: Output) -> list[dict]:
    if args.no_peers:
        return []
    try:
        with torch.no_grad(), out.progress("explore", lines=True) as status:
            return part_rows(args, plan, out, status)
    except ImportError as error:
        out.console.print(f"parts of a layer: skipped, {error}", markup=False)
        return []


def conclude(
    args: argparse.Namespace,
    plan: Plan,
    out: Output,
    scaling: list[dict],
    matrix: list[dict],
    parts: list[dict],
) -> tuple[list[dict], dict]:
    """The projection and the verdict, shown and returned."""
    rates = sweeps(scaling, matrix)
    sweep = max((max(r) for r in rates.values()), default=0.0)
    if not (bandwidth := args.bandwidth or sweep):
        raise UsageError("nothing was timed: give --bandwidth for the projection")
    projected = projection_rows(args, plan, matrix, bandwidth)
    show_projection(out, args, projected, bandwidth)
    end = verdict(args, plan, scaling, parts, projected, bandwidth)
    if line := disturbance(rates):
        end["text"].append(line)
    for line in end["text"]:
        out.console.print(line, markup=False)
    return projected, end


def run(args: argparse.Namespace, out: Output) -> tuple[int, dict]:
    plan = Plan.of(args)
    if args.plot:
        _plot.require(args.plot, plan.batches)
    keep_freed_memory()
    machine = bench.machine()
    out.console.print(", ".join(f"{k}: {v}" for k, v in machine.items()), markup=False)

    # Each table as soon as it is known: whoever stops the run keeps what it found.
    options = options_for(args, plan)
    with torch.no_grad(), out.progress("explore", lines=True) as options.show:
        scaling = scaling_rows(plan, options)
    base = {
        r["batch"]: r["ms"]
        for r in scaling
        if r["candidate"] == "transformers eager" and r["ms"] is not None
    }
    for row in scaling:
        row |= model_columns(row, args, base.get(row["batch"]))
    H, HV = plan.heads
    what = f"one decode step of the recurrence, {H}/{HV} heads of 128, bf16 activations"
    layer = max((b for b in plan.batches if b <= 16), default=plan.batches[0])
    show_scaling(out, what, scaling, layer)
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
    parts = measured_parts(args, plan, out)
    with torch.no_grad(), out.progress("explore", lines=True) as status:
        status("error of the low-rank forms")
        quality = quality_rows(plan, args.seed)
    show_quality(out, quality)
    projected, end = conclude(args, plan, out, scaling, matrix, parts)
    drawn = 0
    if args.plot:
        exact = (r for r in matrix if r["precision"] == "exact")
        drawn = _plot.draw(out, [*scaling, *exact], machine, args.plot)
    refused = any(r["skipped"].startswith("not timed") for r in (*scaling, *matrix))
    alike = {"batch": layer, "rows": [r for r in scaling if r["batch"] == layer]}
    return drawn or int(refused), {
        "machine": machine,
        "heads": f"{H}/{HV}",
        "layers": args.layers,
        "of": args.of,
        "implementations": {"kind": "measured", **alike},
        "scaling": {"kind": "measured", "rows": scaling},
        "matrix": {"kind": "measured", "rows": matrix},
        "parts": {"kind": "measured", "rows": parts},
        "lowrank": {"kind": "measured", "rows": quality},
        "throughput": {"kind": "projected", "rows": projected},
        "verdict": end,
    }
