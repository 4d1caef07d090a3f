"""The command line: ``gdn-ops`` and ``python -m gdn_ops``.

Each command is a module with ``HELP``, ``add_arguments(parser)`` and ``run(args, out) -> (code,
data)``; ``data`` is what ``--json`` writes: a dict with the command and its status added, a list as
it is.
"""

from __future__ import annotations

import argparse
import sys
from contextlib import suppress
from importlib.util import find_spec

# OpenMP ends the process where the system gives it fewer threads than it was told to start.
MOST_THREADS = 1024
COMMANDS = ("demo", "doctor", "verify", "bench", "explore")
EPILOG = """examples:
  gdn-ops demo                          a tiny Qwen3.5 model decodes with our ops and without
  gdn-ops doctor --json -               what was built, what is active, what is missing, as JSON
  gdn-ops verify recurrent decode       errors of two op families against float64, by dtype
  gdn-ops bench recurrent --plot scaling.png
  gdn-ops bench --device xpu-twin --json -   bytes, instructions, balance of the Kunlun kernels
  gdn-ops explore --bandwidth 2.4e12 --ranks 8   the whole matrix, and how far 10K tokens/s is
"""


def say_why(text: str) -> None:
    """Why there is no result: never among the results, wherever those go."""
    if sys.stderr is not None:  # print() would take stdout then
        with suppress(OSError):
            print(text, file=sys.stderr, flush=True)


def build_parser() -> argparse.ArgumentParser:
    from importlib import import_module

    import gdn_ops
    from gdn_ops.cli._arguments import new_file, whole

    parser = argparse.ArgumentParser(
        prog="gdn-ops",
        description="Gated DeltaNet operators for PyTorch: show, check and time them here.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"gdn-ops {gdn_ops.__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name in COMMANDS:
        module = import_module(f"gdn_ops.cli.{name}")
        sub = commands.add_parser(
            name,
            help=module.HELP,
            description=module.__doc__,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        module.add_arguments(sub)
        sub.add_argument(
            "--threads",
            type=whole(1, MOST_THREADS),
            metavar="N",
            help="threads (default: torch's own)",
        )
        sub.add_argument(
            "--json",
            nargs="?",
            const="-",
            type=lambda text: text if text == "-" else new_file(text),
            metavar="PATH",
            help="also write the result as JSON to PATH; with '-' or nothing it goes to stdout and "
            "the text to stderr",
        )
        sub.set_defaults(run=module.run)
    return parser


def main(argv: list[str] | None = None) -> int:
    """Run one command; returns the exit status.

    0: good. 1: a check failed. 2: wrong usage, too little memory, or output that cannot be written.
    130: interrupted. 141: nobody reads the output any more (``gdn-ops verify | head -1``).
    """
    try:
        return _main(argv)
    except KeyboardInterrupt:
        say_why("interrupted")
        return 130


def _main(argv: list[str] | None) -> int:
    for package in ("rich", "packaging"):
        if find_spec(package) is None:
            say_why(f"gdn-ops needs the package {package}: pip install {package}")
            return 2
    from gdn_ops.cli._output import Output, Unwritable, UsageError

    parser = build_parser()
    args = parser.parse_args(argv)
    out = Output(args.json)
    import torch

    import gdn_ops

    if args.threads:
        torch.set_num_threads(args.threads)
    try:
        # Wrong values of GDN_CPU_ISA and GDN_PRECISION are errors of the first op that runs.
        gdn_ops.backends(), gdn_ops.get_precision()
    except RuntimeError as error:
        say_why(f"gdn-ops {args.command}: {error}")
        return 2
    try:
        code, data = args.run(args, out)
        named = {"command": args.command, "status": code}
        out.write_json(data if isinstance(data, list) else named | data)
    except UsageError as error:
        say_why(f"gdn-ops {args.command}: {error}")
        return 2
    except Unwritable as error:
        if error.unread:
            return 141
        say_why(f"gdn-ops {args.command}: {error}")
        return 2
    except (MemoryError, RuntimeError) as error:
        # torch has no error of its own for the host's memory.
        said = ("t allocate memory", "out of memory", "size calculation overflowed")
        if not isinstance(error, MemoryError) and not any(s in str(error) for s in said):
            raise
        say_why(f"gdn-ops {args.command}: not enough memory: {str(error).partition(chr(10))[0]}")
        return 2
    return code
