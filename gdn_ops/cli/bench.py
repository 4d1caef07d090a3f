"""Time the ops beside their peers and beside the floor of the memory, all in one run.

Every row gives the time of a call, the floor (the fewest bytes the call must move, at the rate of
an in-place sweep measured between the same samples on the same buffers) and their ratio. A
candidate is first compared with a float64 reference; one that is out of tolerance is not timed.

With --device cuda the buffers are on the device, and times are those of CUDA graphs, without
launches. With --device xpu-twin nothing is timed: the Kunlun kernels run on their host twin, which
counts bytes, vector instructions, balance and local memory. The seconds beside them are a model,
from a bandwidth and an instruction rate that nobody here has measured.
"""

from __future__ import annotations

import argparse
from contextlib import nullcontext

from gdn_ops import bench
from gdn_ops.bench import Options, xpu
from gdn_ops.bench._timing import DTYPES, label
from gdn_ops.cli import _arguments, _plot
from gdn_ops.cli._output import Output, UsageError

HELP = "time the ops against peers and the memory floor"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "families", nargs="*", metavar="FAMILY", help="default: all that are timed; see --list"
    )
    parser.add_argument(
        "--device", choices=_arguments.DEVICES, default="cpu",
        help="where the ops run (cpu). xpu-twin: counts of the Kunlun kernels; families are then "
        "ops, like recurrent",
    )  # fmt: skip
    parser.add_argument(
        "--rate", type=_arguments.rate, metavar="N",
        help="xpu-twin: vector instructions a second and core that the model assumes (1e9)",
    )  # fmt: skip
    parser.add_argument(
        "--bandwidth", type=_arguments.rate, metavar="N",
        help="xpu-twin: bytes a second that the model assumes (2.4e12)",
    )  # fmt: skip
    parser.add_argument("--list", action="store_true", help="list the families and stop")
    parser.add_argument("--quick", action="store_true", help="few shapes and short sampling")
    parser.add_argument("--batch", help="batch sizes, like 1,16,256 (default: the family's)")
    parser.add_argument("--heads", help="key/value heads, like 16/48,4/12 (default: the family's)")
    parser.add_argument("--state", help="state dtypes, like f32,bf16 (default: the family's)")
    parser.add_argument("--no-peers", action="store_true", help="only ours")
    parser.add_argument("--no-compile", action="store_true", help="skip peers under torch.compile")
    parser.add_argument("--seed", type=_arguments.SEED, default=0, help="of the random inputs (0)")
    parser.add_argument(
        "--plot", type=_arguments.new_file, metavar="PNG",
        help="plot time over batch size (needs matplotlib)",
    )  # fmt: skip


def options_from(args: argparse.Namespace):
    return Options(
        quick=args.quick,
        batches=_arguments.items(args.batch, "batch", _arguments.batch),
        heads=_arguments.items(args.heads, "heads", _arguments.heads),
        dtypes=tuple(DTYPES[n] for n in _arguments.items(args.state, "state", _arguments.dtype)),
        peers=not args.no_peers,
        compiled=not args.no_compile,
        seed=args.seed,
    )


SHOWN = ("op", "heads", "batch", "tokens", "dtype", "state", "layout", "mode", "candidate")


def row_text(row: dict, columns: tuple[str, ...], rates: bool = False) -> list[str]:
    cells = ["" if row.get(c) is None else str(row[c]) for c in columns]
    if row["skipped"]:
        return [*cells, *["-"] * (5 + rates), row["skipped"]]
    return [
        *cells,
        f"{row['ms']:.4g}",
        *([f"{row['gflops']:.0f}"] if rates else []),
        f"{row['floor_ms']:.4g}",
        f"{row['ratio']:.2f}x",
        f"{row['spread'] * 100:.0f}%",
        "-" if row["error"] is None else f"{row['error']:.2g}",
        row["note"],
    ]


def show(out: Output, title: str, rows: list[dict]) -> None:
    columns = tuple(c for c in SHOWN if any(r.get(c) not in (None, "") for r in rows))
    rates = any("gflops" in r for r in rows)
    names = [*columns, "ms", *(["GFLOP/s"] if rates else []), "floor ms", "ratio", "spread",
             "error/tol", "note"]  # fmt: skip
    texts = [row_text(r, columns, rates) for r in rows]
    if not any(r["note"] or r["skipped"] for r in rows):
        names, texts = names[:-1], [t[:-1] for t in texts]
    out.table(title, names, texts)


COUNTED = {
    "op": "op",
    "heads": lambda r: f"{r['heads']}/{r['value_heads']}",
    "batch": "batch",
    "state": "state_dtype",
    "bytes/floor": lambda r: f"{r['bytes_over_floor']:.4f}",
    "instr/element": lambda r: f"{r['instructions_per_element']:.3f}",
    "balance": lambda r: f"{r['balance']:.3f}",
    "cores": "cores_active",
    "LM bytes": "lm_high_water",
    "waits": "waits",
    "model ms": lambda r: f"{1e3 * r['model_s']:.4g}",
    "model: of bytes": lambda r: f"{1e3 * r['model_memory_s']:.4g}",
    "of instructions": lambda r: f"{1e3 * r['model_compute_s']:.4g}",
}


def run_twin(args: argparse.Namespace, out: Output) -> tuple[int, list]:
    """Counts of the Kunlun kernels on their host twin: a list of records."""
    if args.plot:
        raise UsageError("--plot: counts of the twin are no times and are not plotted")
    _arguments.device(args.device)
    chosen = options_from(args)
    ops = tuple(args.families) or xpu.OPS
    batches = chosen.batches or ((1,) if args.quick else (1, 256))
    heads = chosen.heads or xpu.HEADS
    dtypes = chosen.dtypes or (xpu.torch.float16,)
    rate, bandwidth = args.rate or xpu.MODEL_RATE, args.bandwidth or xpu.MODEL_BANDWIDTH
    cases = len(ops) * len(batches) * len(heads) * len(dtypes)
    try:
        with out.progress(xpu.TITLE, total=cases) as status:
            found = xpu.records(
                ops, batches, heads, dtypes, rate=rate, bandwidth=bandwidth, status=status
            )
    except ValueError as error:
        raise UsageError(str(error)) from error
    cells = [[str(r[c] if isinstance(c, str) else c(r)) for c in COUNTED.values()] for r in found]
    out.table(xpu.TITLE, list(COUNTED), cells)
    out.console.print(
        "The model is no measurement: it takes the larger of the bytes at an assumed "
        f"{bandwidth:.3g} bytes/s and\nthe busiest core's vector instructions at an assumed "
        f"{rate:.3g} a second.",
        markup=False,
    )
    return 0, found


def run(args: argparse.Namespace, out: Output) -> tuple[int, dict | list]:
    if args.device == "xpu-twin" and not args.list:
        return run_twin(args, out)
    if args.rate or args.bandwidth:
        raise UsageError("--rate, --bandwidth: of the model that --device xpu-twin prints")
    if args.list:
        titles = {name: _title(bench.family(name)) for name in bench.families()}
        out.table("benchmark families", ["family", "what"], [[n, t] for n, t in titles.items()])
        return 0, {"families": titles}
    try:
        modules = [bench.family(name) for name in args.families or bench.families()]
    except ValueError as error:
        raise UsageError(str(error)) from error
    counted = [m.__name__.rpartition(".")[2] for m in modules if not hasattr(m, "run")]
    if args.families and counted:
        raise UsageError(f"{', '.join(counted)}: counted, not timed; use --device xpu-twin")
    modules = [m for m in modules if hasattr(m, "run")]
    device = _arguments.device(args.device)
    if device.type != "cpu":
        on_cpu = [m for m in modules if not getattr(m, "ON_DEVICE", True)]
        if args.families and on_cpu:
            raise UsageError(f"{on_cpu[0].__name__.rpartition('.')[2]}: timed on the CPU only")
        modules = [m for m in modules if m not in on_cpu]
    options = options_from(args)
    if args.plot:
        _plot.require(args.plot, options.batches)
    machine = bench.machine(args.device)
    out.console.print(", ".join(f"{k}: {v}" for k, v in machine.items()), markup=False)
    rows: list[dict] = []
    for module in modules:
        # As a context, a default device costs every call of torch some time: not on the CPU.
        where = nullcontext() if device.type == "cpu" else device
        with out.progress(module.TITLE) as status, where:
            options.status = status
            options.emit = _line(out)
            found = module.run(options)
        show(out, module.TITLE, found)
        rows += found
    drawn = _plot.draw(out, rows, machine, args.plot) if args.plot else 0
    refused = [r for r in rows if r["skipped"].startswith("not timed")]
    if refused:
        out.console.print(f"{len(refused)} candidates were out of tolerance and not timed")
    return drawn or int(bool(refused)), {"machine": machine, "rows": rows}


def _title(module) -> str:
    return getattr(module, "TITLE", module.__doc__.splitlines()[0])


def _line(out: Output):
    """Prints a row as soon as it is there, when nobody sees the spinner."""

    def emit(row: dict) -> None:
        if out.console.is_terminal:
            return
        text = row["skipped"] or f"{row['ms']:.4g} ms, {row['ratio']:.2f} times the floor"
        out.console.print(f"{label(row)}: {row['candidate']}: {text}", markup=False)

    return emit
