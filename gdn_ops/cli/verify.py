"""Compare every op with its float64 oracle on random calls, by dtype and precision mode.

Each tensor that an op returns or writes is one comparison; a row shows the worst over the shapes:
the largest absolute error, the relative error in the 2-norm, and the largest error over its
tolerance (above 1.0 fails, and the status is 1). Where a mode rounds the operands of products, an
error is measured by the norms of what is summed (``reference.chunk_magnitudes``). Calls include a
padding row, a fresh row, and pool rows that no sequence names.

With ``--device`` the same calls run on another device, their results compared on the host. A call
that its kernels refuse by name (``docs/xpu.md``) is listed below the table. What a device rounds
more than the CPU, which keeps float32 in between, is judged by tolerances that allow for it:
operands of 16 bits in chunked products; q, k, v and o between the launches of a fused step; on CUDA
q and k beside a bfloat16 base of a window.

``--lowrank`` compares nothing with a tolerance: it says what windows of R = 8, 16, 32, 64 entries
would cost a model, as the relative error of each Gated DeltaNet layer's output on the activations
that the full-rank model gives that layer.
"""

from __future__ import annotations

import argparse
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

import gdn_ops
from gdn_ops import bench
from gdn_ops._on_device import OnDevice, refused
from gdn_ops._tolerance import ROUNDED_FACTOR, TOLERANCE, column_error, rounded_error, scaled_error
from gdn_ops.bench._timing import DTYPES
from gdn_ops.cli import _arguments, _drift
from gdn_ops.cli._cases import CASES, COLUMNS, FOLD, FUSED, ROUNDED, STATELESS, Setting
from gdn_ops.cli._output import Output, UsageError

HELP = "every op against float64, errors by dtype and precision"

# (H, HV, K, V): the model's heads in small, and sizes that leave tails in every vector width.
SHAPES = ((2, 6, 128, 128), (3, 3, 100, 81))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("ops", nargs="*", metavar="OP", help=f"default: all of {', '.join(CASES)}")
    parser.add_argument(
        "--device", choices=_arguments.DEVICES, default="cpu",
        help="where the ops run (cpu); the device of a Kunlun build is cuda, too",
    )  # fmt: skip
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
    return _arguments.items(text, what, _arguments.dtype) or tuple(DTYPES)


def compare(got: Tensor, want: Tensor, rtol: float, atol: float) -> dict[str, float]:
    """Errors of one tensor: largest, in the 2-norm, and the largest over its tolerance."""
    difference = (got.double() - want).abs()
    norm = float(want.norm())
    return {
        "max_abs": float(difference.max()) if difference.numel() else 0.0,
        "rel_l2": float(difference.norm()) / norm if norm else float(difference.norm()),
        "of_tolerance": scaled_error(got, want, rtol, atol),
    }


def _settings(args: argparse.Namespace, op: str):
    """``(activation, state, modes)`` of the rows of one op."""
    modes = _arguments.items(args.precision, "precision", _arguments.mode)
    if args.device != "cpu":
        modes = modes or ("exact",)  # the others change what the CPU does
    states = _dtypes(args.state, "state")
    for activation in _dtypes(args.dtype, "dtype"):
        rounded = op in ROUNDED and activation == "bf16"
        if op in STATELESS:
            yield activation, None, modes or _arguments.MODES if rounded else ("exact",)
            continue
        for state in states:
            one = state == "f32" and not rounded
            yield activation, state, modes or (("exact",) if one else _arguments.MODES)


def _moved(args: argparse.Namespace) -> AbstractContextManager:
    """What moves the calls of our ops to the device that was asked for."""
    device = _arguments.device(args.device)
    return nullcontext() if device.type == "cpu" else OnDevice(device)


def _where(machine: dict) -> str:
    device = machine.get("device", f"{machine['cpu']}, {machine['isa']}")
    return f"{device}, torch {machine['torch']}"


class Kind(NamedTuple):
    """What the comparisons of a row have in common."""

    op: str
    activation: str
    state: str | None
    mode: str
    device: str

    def errors(self, what: str, got: Tensor, want: Tensor, K: int, magnitude: Tensor | None):
        """Errors of one tensor, judged by what was rounded on the way to it."""
        rtol, atol = TOLERANCE[got.dtype]
        of_state = TOLERANCE[DTYPES[self.state or "f32"]]
        activation = DTYPES[self.activation]
        if what.endswith(FOLD):
            # A sum over K of rounded elements: the worst of thousands is 4 sigma.
            rtol, atol = rtol + 2 * of_state[0], atol + 2 * of_state[1]
        on_device, factor = self.device != "cpu", 1.0
        if self.mode != "exact" and self.state not in (None, "f32"):
            # Products may be in the dtype of the state, whatever the output is.
            factor, (rtol, atol) = ROUNDED_FACTOR, map(max, (rtol, atol), of_state)
        if on_device and self.op in FUSED:
            # The pools see q, k and v in the dtype of the activations; the norm scales errors of
            # small outputs up.
            factor = ROUNDED_FACTOR if self.activation == "f32" else ROUNDED_FACTOR**2
            rtol, atol = map(max, (rtol, atol), TOLERANCE[activation])
        if self.device == "cuda" and (self.op, what) == ("recurrent_buffered", "output"):
            # A bfloat16 base meets q and k in two parts of its dtype: 16 of their 24 bits.
            factor = ROUNDED_FACTOR if (self.activation, self.state) == ("f32", "bf16") else factor
        found = compare(got, want, factor * rtol, factor * atol)
        if magnitude is not None and self.activation != "f32":
            if on_device:
                found["of_tolerance"] = column_error(got, want, COLUMNS[what], activation)
            elif self.mode != "exact" and self.activation == "bf16":
                found["of_tolerance"] = rounded_error(got, want, magnitude, K)
        return found


def _rows(kind: Kind, seed: int, moved: AbstractContextManager) -> tuple[list[dict], list[dict]]:
    """The rows of one kind, ``moved`` around the calls, and the calls that a device refused."""
    worst: dict[str, dict] = {}
    left_out = []
    before = gdn_ops.get_precision()
    gdn_ops.set_precision(kind.mode)
    state = DTYPES[kind.state or "f32"]
    try:
        for shape in SHAPES:
            setting = Setting(*shape, DTYPES[kind.activation], state, seed)
            for case in CASES[kind.op]:
                try:
                    with moved:
                        for what, got, want, *magnitude in case(setting):
                            errors = kind.errors(what, got, want, setting.K, *(magnitude or [None]))
                            kept = worst.setdefault(what, errors)
                            worst[what] = {k: max(kept[k], errors[k]) for k in errors}
                except RuntimeError as error:
                    if not refused(error):
                        raise
                    why = str(error).splitlines()[0]
                    left_out.append({**kind._asdict(), "shape": shape, "why": why})
    finally:
        gdn_ops.set_precision(before)
    common = {"op": kind.op, "dtype": kind.activation, "state": kind.state}
    common |= {"precision": kind.mode}
    return [
        {**common, "tensor": what, **errors, "ok": errors["of_tolerance"] <= 1}
        for what, errors in worst.items()
    ], left_out


# What the last tenth of a run may be off by, in roundings to the coarsest dtype in it.
DRIFT_ROUNDINGS = 16.0


def run_drift(args: argparse.Namespace, out: Output) -> tuple[int, dict]:
    activations = {n: DTYPES[n] for n in _dtypes(args.dtype, "dtype")}
    states = {n: DTYPES[n] for n in _dtypes(args.state, "state")}
    with out.progress("drift") as status, torch.no_grad(), _moved(args):
        found = _drift.rows(args.drift, activations, states, args.seed, status)
    for r in found:
        unit = max(torch.finfo(DTYPES[d]).eps for d in (r["dtype"], r["state"]))
        r["roundings"] = r["last"] / unit
        r["ok"] = r["roundings"] <= DRIFT_ROUNDINGS
    machine = bench.machine(args.device)
    out.table(
        f"drift over {args.drift} steps against float64, RMS relative to the output's, "
        f"{_where(machine)}",
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


def run_lowrank(args: argparse.Namespace, out: Output) -> tuple[int, dict]:
    # Not for every command: the layers of gdn_ops.nn bring the compiler, a second of imports.
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
    "--drift": ("device", "dtype", "state"),
    "--lowrank": ("model", "text", "tokens"),
    COMPARISON: ("ops", "device", "dtype", "state", "precision"),
}


def _no_idle_options(args: argparse.Namespace) -> None:
    """Refuse what the run that was asked for would not read."""
    if args.drift is not None and args.lowrank:
        raise UsageError("--drift and --lowrank are two runs: give one of them")
    kind = "--drift" if args.drift is not None else "--lowrank" if args.lowrank else COMPARISON
    for name in sorted({n for names in TAKES.values() for n in names} - set(TAKES[kind])):
        if getattr(args, name) not in (None, [], "cpu"):
            raise UsageError(f"{'OP' if name == 'ops' else f'--{name}'} has no use in {kind}")


def run(args: argparse.Namespace, out: Output) -> tuple[int, dict]:
    _no_idle_options(args)
    if args.drift is not None:
        return run_drift(args, out)
    if args.lowrank:
        return run_lowrank(args, out)

    unknown = [op for op in args.ops if op not in CASES]
    if unknown:
        raise UsageError(f"no op {unknown[0]!r} to verify; there are: {', '.join(CASES)}")
    kinds = [
        Kind(op, activation, state, mode, args.device)
        for op in args.ops or CASES
        for activation, state, modes in _settings(args, op)
        for mode in modes
    ]
    moved = _moved(args)
    rows: list[dict] = []
    left_out: list[dict] = []
    with out.progress("verify", total=len(kinds)) as status, torch.no_grad():
        for kind in kinds:
            status(f"{kind.op} {kind.activation} state {kind.state or '-'} {kind.mode}")
            found, not_done = _rows(kind, args.seed, moved)
            rows, left_out = rows + found, left_out + not_done
    machine = bench.machine(args.device)
    out.table(
        f"errors against float64, {_where(machine)}",
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
    for op, shape, why in sorted({(r["op"], r["shape"], r["why"]) for r in left_out}):
        out.console.print(f"refused: {op}, H, HV, K, V = {shape}: {why}", markup=False)
    failed = [r for r in rows if not r["ok"]]
    out.console.print(f"{len(rows) - len(failed)} of {len(rows)} comparisons within tolerance")
    return int(bool(failed)), {"machine": machine, "rows": rows, "refused": left_out}
