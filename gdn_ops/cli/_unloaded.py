"""What the command says where the package is not imported: words instead of a traceback.

``gdn_ops/__init__.py`` calls it, so nothing of the package is there yet, and torch or rich may be
what is missing.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import sys
from contextlib import suppress
from pathlib import Path

from gdn_ops.cli import say_why


def is_command() -> bool:
    """Whether this process is ``gdn-ops`` or ``python -m gdn_ops``."""
    # While `-m` imports the package, argv[0] does not name it yet.
    started = sys.orig_argv[: len(sys.orig_argv) - len(sys.argv) + 1]
    return bool(started) and Path(started[-1]).name in ("gdn-ops", "gdn_ops")


def _state() -> dict[str, dict]:
    """What `doctor` can see: of its keys, those that need no library."""
    package = Path(__file__).parent.parent
    try:
        from gdn_ops._build_info import TORCH_VERSION as built_for
    except ImportError:
        built_for = None
    # Some builds have their "+cu124" in torch itself only, which may be what did not load.
    torch = getattr(sys.modules.get("torch"), "__version__", None)
    if torch is None:
        with suppress(importlib.metadata.PackageNotFoundError):
            torch = importlib.metadata.version("torch")
    library = next(iter(sorted(package.glob("_C*.so"))), None)
    return {
        "machine": {
            "python": f"{platform.python_version()} ({sys.executable})",
            "platform": platform.platform(),
            "torch": torch,
        },
        "native": {"library": library and str(library), "built_for_torch": built_for},
    }


def end_command(error: ImportError | KeyboardInterrupt) -> None:
    """Ends the process with a status if it is the command; otherwise nothing.

    `doctor` reports the problem, with status 1; others cannot do what was asked, status 2. An
    interrupt is 130, as later.
    """
    if not is_command():
        return
    if isinstance(error, KeyboardInterrupt):
        say_why("interrupted")
        raise SystemExit(130)
    problem = str(error)
    if error.name == "torch":
        problem = "torch is missing: pip install 'torch>=2.5.1'"
    parser = argparse.ArgumentParser(prog="gdn-ops", add_help=False, allow_abbrev=False)
    parser.add_argument("command", nargs="?")
    parser.add_argument("--json", nargs="?", const="-")
    args, _ = parser.parse_known_args(sys.argv[1:])
    try:
        status = _doctor(problem, args.json) if args.command == "doctor" else 2
        if status == 2:
            say_why(f"gdn-ops: {problem}")
    except OSError as unwritable:
        # Of the exit too: what is left in the buffers has nowhere to go either.
        with suppress(OSError, AttributeError), open(os.devnull, "w") as null:
            os.dup2(null.fileno(), sys.stdout.fileno())
        if isinstance(unwritable, BrokenPipeError):
            status = 141
        else:
            status = 2
            say_why(f"gdn-ops doctor: cannot write its output: {unwritable}")
    raise SystemExit(status)


def _doctor(problem: str, json_path: str | None) -> int:
    state = _state()
    facts = [(name, value) for part in state.values() for name, value in part.items()]
    text = "".join(f"{n}: {'missing' if x is None else x}\n" for n, x in facts)
    text += f"problem: {problem}"
    say_why(text) if json_path == "-" else print(text, flush=True)
    if json_path:
        data = {"command": "doctor", "status": 1, **state, "problems": [problem]}
        said = json.dumps(data, indent=2) + "\n"
        if json_path == "-":
            print(said, end="", flush=True)
        else:
            Path(json_path).write_text(said)
    return 1
