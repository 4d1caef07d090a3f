"""The state machine of tests/lifecycle.py for a long time: ``python scripts/soak.py [STEPS]``.

Every life has its own seed, shapes, dtypes, mode and thread count, and ``--life`` steps; the seed
of one that fails is printed and repeats it (``--seed``). ``--json PATH`` keeps the result up to
date while it runs, so that a run that is cut short leaves an honest number.
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
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

from lifecycle import Config, Lifecycle

import gdn_ops


def run(seed: int, steps: int, done, report: dict) -> None:
    """One life."""
    rng = random.Random(seed)
    config = Config.sample(rng)
    # More threads than cores is where barriers hurt and races show; most of the run needs neither.
    torch.set_num_threads(rng.choice([1] * 15 + [2]))
    life = Lifecycle(config, rng)
    for _ in range(steps):
        report["steps"][life.step()] += 1
        done(1)
    report["calls"] += life.calls
    report["lives"] += 1
    key = f"{config.mode}, {str(config.state_dtype)[6:]}"
    report["worst"][key] = max(report["worst"].get(key, 0.0), round(life.worst, 4))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("steps", type=int, nargs="?", default=1_000_000)
    parser.add_argument("--life", type=int, default=200, help="steps of one life (200)")
    parser.add_argument("--seed", type=int, default=0, help="of the first life (0)")
    parser.add_argument("--json", type=Path, help="where to keep the result")
    args = parser.parse_args()
    report = {
        "torch": torch.__version__,
        "isa": gdn_ops.backends()["cpu"]["active"],
        "machine": platform.machine(),
        "lives": 0,
        "calls": 0,
        "steps": Counter(),
        "worst": {},  # largest error in units of its limit
        "failures": [],
    }
    start = time.monotonic()

    def save() -> None:
        report["total"] = sum(report["steps"].values())
        report["seconds"] = round(time.monotonic() - start)
        if args.json:
            args.json.write_text(json.dumps(report, indent=2, sort_keys=True) + "\n")

    columns = (TextColumn("soak"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with torch.no_grad(), Progress(*columns, refresh_per_second=1) as progress:
        bar = progress.add_task("soak", total=args.steps)
        seed = args.seed
        while sum(report["steps"].values()) < args.steps:
            left = args.steps - sum(report["steps"].values())
            try:
                run(seed, min(args.life, left), lambda n: progress.advance(bar, n), report)
            except Exception:
                report["failures"].append({"seed": seed, "error": traceback.format_exc(limit=-3)})
                progress.print(f"seed {seed}:\n{traceback.format_exc(limit=-3)}")
            seed += 1
            if seed % 20 == 0:
                save()
    save()
    print(json.dumps(report, indent=2, sort_keys=True))
    return 1 if report["failures"] else 0


if __name__ == "__main__":
    sys.exit(main())
