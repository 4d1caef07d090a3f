"""The state machine of tests/lifecycle.py for a long time: ``python scripts/soak.py [STEPS]``.

Every life has its own seed, shapes, dtypes, mode and thread count, and ``--life`` steps. Lives are
shared out among ``--jobs`` processes; process j takes every jobs-th seed from ``--seed`` on, at the
j-th of ``--levels``, the instruction sets of the CPU kernels. The seed and level of a life that
fails, or that takes its process down, are printed and repeat it: ``GDN_CPU_ISA=LEVEL python
scripts/soak.py 1 --seed SEED``. ``--json PATH`` keeps the result up to date, so that a run which
is cut short leaves an honest number.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import sys
import time
import traceback
from collections import Counter
from pathlib import Path

import torch
from jobs import Jobs, add_arguments, head, save
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

from lifecycle import Config, Lifecycle

import gdn_ops


def run(seed: int, steps: int) -> dict:
    """One life, and how it went."""
    rng = random.Random(seed)
    config = Config.sample(rng)
    # More threads than cores is where barriers hurt and races show; most of the run needs neither.
    torch.set_num_threads(rng.choice([1] * 15 + [2]))
    result = {"seed": seed, "steps": Counter(), "level": gdn_ops.backends()["cpu"]["active"]}
    life = Lifecycle(config, rng)
    try:
        for _ in range(steps):
            result["steps"][life.step()] += 1
    except Exception:
        result["error"] = traceback.format_exc(limit=-3)
    result |= {"calls": life.calls, "worst": life.worst}
    result["kind"] = f"{config.mode}, {str(config.state_dtype)[6:]}"
    return result


def work(j: int, stop, results, args: argparse.Namespace) -> None:
    """A process: lives until told to stop."""
    with torch.no_grad():
        for seed in range(args.seed + j, sys.maxsize, args.jobs):
            if stop.is_set():
                return
            results.put({"begins": seed})
            results.put(run(seed, args.life))


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("steps", type=int, nargs="?", default=1_000_000)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop after these")
    parser.add_argument("--life", type=int, default=200, help="steps of one life (200)")
    add_arguments(parser)
    args = parser.parse_args()
    report = head(args) | {
        "python": platform.python_version(),
        "lives": 0,
        "calls": 0,
        "total": 0,
        "steps": Counter(),
        "levels": Counter(),  # steps at each
        "worst": {},  # largest error in units of its limit
        "failures": [],
    }
    start = time.monotonic()

    def keep() -> None:
        report["seconds"] = round(time.monotonic() - start, 1)
        report["steps per second"] = round(report["total"] / report["seconds"], 1)
        save(args.json, report)

    def fail(seed: int, level: str, error: str) -> None:
        report["failures"].append({"seed": seed, "level": level, "error": error})
        progress.print(f"seed {seed}, {level}:\n{error}")

    jobs = Jobs(work, args.jobs, args.levels, args)
    columns = (TextColumn("soak"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, refresh_per_second=1) as progress:
        bar = progress.add_task("soak", total=args.steps)
        saved = start
        for level, result in jobs:
            if result and "died" in result:
                fail(result["begins"], level, f"the process ended with {result['died']}")
            elif result:
                taken = sum(result["steps"].values())
                report["lives"] += 1
                report["total"] += taken
                report["calls"] += result["calls"]
                report["steps"] += result["steps"]
                report["levels"][result["level"]] += taken
                kind = result["kind"]
                worst = max(report["worst"].get(kind, 0.0), round(result["worst"], 4))
                report["worst"][kind] = worst
                if "error" in result:
                    fail(result["seed"], result["level"], result["error"])
                progress.update(bar, completed=report["total"])
            now = time.monotonic()
            if report["total"] >= args.steps or now - start >= args.seconds:
                jobs.stop.set()
            if now - saved > 5:
                keep()
                saved = now
    keep()
    print(json.dumps(report, indent=2, sort_keys=True))
    print(
        f"{report['total']} steps in {report['lives']} lives, {report['calls']} calls checked, "
        f"{len(report['failures'])} failures; {report['seconds']} s, "
        f"{report['steps per second']} steps/s in {args.jobs} processes"
    )
    return 1 if report["failures"] else 0


if __name__ == "__main__":
    sys.exit(main())
