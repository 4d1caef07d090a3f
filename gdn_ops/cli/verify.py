"""Compare every op with its float64 oracle on random calls, by dtype and precision mode.

Each tensor that an op returns or writes is one comparison; a row shows the worst over the shapes:
the largest absolute error, the relative error in the 2-norm, and the largest error over its
tolerance (above 1.0 fails, and the status is 1). Where a mode rounds the operands of products, an
error is measured by the norms of what is summed (``reference.chunk_magnitudes``). Calls include a
padding row, a fresh row, and pool rows that no sequence names.

``--lowrank`` compares nothing with a tolerance: it says what windows of R = 8, 16, 32, 64 entries
would cost a model, as the relative error of each Gated DeltaNet layer's output on the activations
that the full-rank model gives that layer.
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor

from gdn_ops.cli import _arguments
from gdn_ops.cli._output import Output, UsageError

HELP = "every op against float64, errors by dtype and precision"

# (H, HV, K, V): the model's heads in small, and sizes that leave tails in every vector width.
SHAPES = ((2, 6, 128, 128), (3, 3, 100, 81))
# A mode other than exact may round a 16-bit state's products once more.
FAST_FACTOR = 4.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    from gdn_ops.cli._cases import CASES

    parser.add_argument("ops", nargs="*", metavar="OP", help=f"default: all of {', '.join(CASES)}")
    parser.add_argument("--dtype", help="activation dtypes, like f32,bf16 (default: all three)")
    parser.add_argument("--state", help="state dtypes, like f32,bf16 (default: all three)")
    parser.add_argument(
        "--precision",
        help="modes, like exact,fast (default: exact; all for 16-bit state)",
    )
    parser.add_argument(
        "--drift",
        type=_arguments.whole(1),
        nargs="?",
        const=2000,
        metavar="STEPS",
        help="instead: the error after a long run, by state mode and dtype (2000)",
    )
    parser.add_argument("--seed", type=_arguments.SEED, default=0, help="of the random inputs (0)")
    low = parser.add_argument_group("low rank")
    low.add_argument("--lowrank", action="store_true", help="errors of low-rank windows, by R")
    low.add_argument("--model", metavar="DIR", help="of which model (default: a small random one)")
    low.add_argument("--text", metavar="FILE", help="what it reads (default: random token ids)")
    low.add_argument(
        "--tokens", type=_arguments.whole(1), metavar="N", help="how much of it (default 512)"
    )


def _dtypes(text: str | None, what: str) -> tuple[str, ...]:
    from gdn_ops.bench._timing import DTYPES

    return _arguments.items(text, what, _arguments.dtype) or tuple(DTYPES)


def compare(got: Tensor, want: Tensor, rtol: float, atol: float) -> dict[str, float]:
    """Errors of one tensor: largest, in the 2-norm, and the largest over its tolerance."""
    from gdn_ops.bench._timing import scaled_error

    difference = (got.double() - want).abs()
    norm = float(want.norm())
    return {
        "max_abs": float(difference.max()) if difference.numel() else 0.0,
        "rel_l2": float(difference.norm()) / norm if norm else float(difference.norm()),
        "of_tolerance": scaled_error(got, want, rtol, atol),
    }


def _settings(args: argparse.Namespace, op: str):
    """``(activation, state, modes)`` of the rows of one op."""
    from gdn_ops.cli._cases import ROUNDED, STATELESS

    modes = _arguments.items(args.precision, "precision", _arguments.mode)
    states = _dtypes(args.state, "state")
    for activation in _dtypes(args.dtype, "dtype"):
        rounded = op in ROUNDED and activation == "bf16"
        if op in STATELESS:
            yield activation, None, modes or _arguments.MODES if rounded else ("exact",)
            continue
        for state in states:
            one = state == "f32" and not rounded
            yield activation, state, modes or (("exact",) if one else _arguments.MODES)


def _row(op: str, activation: str, state: str | None, mode: str, seed: int) -> list[dict]:
    import gdn_ops
    from gdn_ops.bench._timing import DTYPES, TOLERANCE, rounded_error
    from gdn_ops.cli._cases import CASES, FOLD, Setting

    worst: dict[str, dict] = {}
    before = gdn_ops.get_precision()
    gdn_ops.set_precision(mode)
    try:
        for H, HV, K, V in SHAPES:
            state_dtype = DTYPES[state or "f32"]
            setting = Setting(H, HV, K, V, DTYPES[activation], state_dtype, seed)
            for case in CASES[op]:
                for what, got, want, *magnitude in case(setting):
                    rtol, atol = TOLERANCE[got.dtype]
                    if what.endswith(FOLD):
                        # A sum over K of rounded elements: the worst of thousands is 4 sigma.
                        rtol, atol = (
                            own + 2 * more
                            for own, more in zip((rtol, atol), TOLERANCE[state_dtype], strict=True)
                        )
                    factor = 1.0
                    if mode != "exact" and state not in (None, "f32"):
                        # Products may be in the dtype of the state, whatever the output is.
                        factor = FAST_FACTOR
                        rtol, atol = map(max, (rtol, atol), TOLERANCE[state_dtype])
                    errors = compare(got, want, factor * rtol, factor * atol)
                    if mode != "exact" and activation == "bf16" and magnitude:
                        errors["of_tolerance"] = rounded_error(got, want, *magnitude, K)
                    kept = worst.setdefault(what, errors)
                    worst[what] = {k: max(kept[k], errors[k]) for k in errors}
    finally:
        gdn_ops.set_precision(before)
    common = {"op": op, "dtype": activation, "state": state, "precision": mode}
    return [
        {**common, "tensor": what, **errors, "ok": errors["of_tolerance"] <= 1}
        for what, errors in worst.items()
    ]


# What the last tenth of a run may be off by, in roundings to the coarsest dtype in it.
DRIFT_ROUNDINGS = 16.0


def _drift(args: argparse.Namespace, out: Output) -> tuple[int, dict]:
    from gdn_ops import bench
    from gdn_ops.bench._timing import DTYPES
    from gdn_ops.cli._drift import rows

    activations = {n: DTYPES[n] for n in _dtypes(args.dtype, "dtype")}
    states = {n: DTYPES[n] for n in _dtypes(args.state, "state")}
    with out.progress("drift") as status, torch.no_grad():
        found = rows(args.drift, activations, states, args.seed, status)
    for r in found:
        unit = max(torch.finfo(DTYPES[d]).eps for d in (r["dtype"], r["state"]))
        r["roundings"] = r["last"] / unit
        r["ok"] = r["roundings"] <= DRIFT_ROUNDINGS
    machine = bench.machine()
    out.table(
        f"drift over {args.drift} steps against float64, RMS relative to the output's, "
        f"{machine['cpu']}, {machine['isa']}, torch {machine['torch']}",
        ["mode", "dtype", "state", "first tenth", "last tenth", "largest", "verdict"],
        [
            [
                *(r[c] for c in ("mode", "dtype", "state")),
                *(f"{r[c]:.1e}" for c in ("first", "last", "max")),
                "ok" if r["ok"] else "DRIFTS",
            ]
            for r in found
        ],
    )
    return int(not all(r["ok"] for r in found)), {"machine": machine, "drift": found}


def _lowrank(args: argparse.Namespace, out: Output) -> tuple[int, dict]:
    from pathlib import Path

    from gdn_ops import bench
    from gdn_ops.cli import _lowrank

    if args.text is not None and not Path(args.text).is_file():
        raise UsageError(f"--text: no file {args.text!r}")
    try:
        text = None if args.text is None else Path(args.text).read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--text: {args.text!r}: {error}") from error
    with out.progress("verify --lowrank"):
        rows = _lowrank.measure(args.model, text, args.tokens or 512, args.seed)
    name = args.model or "a small random model, whose gates are not a trained one's"
    out.table(
        f"error of the output with windows of R entries, {rows[0]['tokens']} tokens, {name}",
        ["layer", *(f"R = {R}" for R in _lowrank.RANKS), *(f"worst, {R}" for R in _lowrank.RANKS)],
        [
            [str(layer), *(f"{r[what]:.1e}" for what in ("rel_l2", "worst_head") for r in of_layer)]
            for layer in sorted({r["layer"] for r in rows})
            for of_layer in [[r for r in rows if r["layer"] == layer]]
        ],
    )
    out.console.print("mean over value heads, then the worst head; relative, in the 2-norm")
    return 0, {"machine": bench.machine(), "rows": rows}


# Options that one kind of run takes, beside those of all.
COMPARISON = "a comparison of ops"
TAKES = {
    "--drift": ("dtype", "state"),
    "--lowrank": ("model", "text", "tokens"),
    COMPARISON: ("ops", "dtype", "state", "precision"),
}


def _no_idle_options(args: argparse.Namespace) -> None:
    """Refuse what the run that was asked for would not read."""
    if args.drift is not None and args.lowrank:
        raise UsageError("--drift and --lowrank are two runs: give one of them")
    kind = "--drift" if args.drift is not None else "--lowrank" if args.lowrank else COMPARISON
    for name in sorted({n for names in TAKES.values() for n in names} - set(TAKES[kind])):
        if getattr(args, name):
            raise UsageError(f"{'OP' if name == 'ops' else f'--{name}'} has no use in {kind}")


def run(args: argparse.Namespace, out: Output) -> tuple[int, dict]:
    from gdn_ops import bench
    from gdn_ops.cli._cases import CASES

    _no_idle_options(args)
    if args.drift is not None:
        return _drift(args, out)
    if args.lowrank:
        return _lowrank(args, out)

    unknown = [op for op in args.ops if op not in CASES]
    if unknown:
        raise UsageError(f"no op {unknown[0]!r} to verify; there are: {', '.join(CASES)}")
    plan = {op: list(_settings(args, op)) for op in args.ops or CASES}
    rows: list[dict] = []
    with out.progress("verify") as status, torch.no_grad():
        for op, settings in plan.items():
            for activation, state, modes in settings:
                for mode in modes:
                    status(f"{op} {activation} state {state or '-'} {mode}")
                    rows += _row(op, activation, state, mode, args.seed)
    machine = bench.machine()
    out.table(
        f"errors against float64, {machine['cpu']}, {machine['isa']}, torch {machine['torch']}",
        ["op", "tensor", "dtype", "state", "precision", "max abs", "rel L2", "of tol.", "verdict"],
        [
            [
                *(str(r[c] or "-") for c in ("op", "tensor", "dtype", "state", "precision")),
                f"{r['max_abs']:.2e}",
                f"{r['rel_l2']:.2e}",
                f"{r['of_tolerance']:.2f}",
                "ok" if r["ok"] else "OUT OF TOLERANCE",
            ]
            for r in rows
        ],
    )
    failed = [r for r in rows if not r["ok"]]
    out.console.print(f"{len(rows) - len(failed)} of {len(rows)} comparisons within tolerance")
    return int(bool(failed)), {"machine": machine, "rows": rows}
