"""Random calls of every op against the float64 oracles: ``python scripts/random_calls.py``.

What a call is and what is checked: tests/calls.py. Each seed gives one call of each of ``--ops``,
the same one on every device. Seeds are shared out among ``--jobs`` processes, the j-th at the j-th
of ``--levels``, the instruction sets of the CPU kernels. A call that fails, or that takes its
process down, is printed with the command that repeats it.
"""

from __future__ import annotations

import argparse
import sys
import time
import traceback
from collections import Counter
from pathlib import Path

import torch
from jobs import Jobs, add_arguments, head, save

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

from calls import OPS, Call, Refused

import gdn_ops
from gdn_ops.cli._arguments import DEVICES, device
from gdn_ops.cli._output import UsageError

GRACE = 120  # seconds after its time that a process may take for its last seed


def run(op: str, seed: int, where: torch.device | None) -> dict:
    """One call, and how it went."""
    result = {"op": op, "seed": seed, "level": gdn_ops.backends()["cpu"]["active"]}
    try:
        result["worst"] = Call(op, seed).check(where)
    except Refused as why:
        result["refused"] = str(why)
    except Exception:
        result["error"] = traceback.format_exc(limit=-3)
    return result


def work(j: int, stop, results, args: argparse.Namespace) -> None:
    """A process: seeds until its time is over, at least one."""
    where = None if args.device == "cpu" else device(args.device)
    end = time.monotonic() + args.seconds
    for seed in range(args.seed + j, sys.maxsize, args.jobs):
        for op in args.ops:
            results.put({"begins": (op, seed)})
            results.put(result := run(op, seed, where))
            if "error" in result and args.device == "cuda":
                torch.cuda.synchronize()  # after a fault of memory nothing works: end here
        if stop.is_set() or time.monotonic() >= end:
            return


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=DEVICES, default="cpu", help="where they run (cpu)")
    parser.add_argument("--seconds", type=float, default=60, help="stop after these (60)")
    parser.add_argument("--ops", nargs="+", choices=OPS, default=list(OPS), metavar="OP")
    add_arguments(parser)
    args = parser.parse_args()
    try:
        device(args.device)
    except UsageError as error:
        parser.error(str(error))
    report = head(args) | {
        "device": args.device,
        "calls": Counter(),
        "refused": Counter(),
        "reasons": Counter(),
        "levels": Counter(),  # calls at each
        "worst": {},  # largest error in units of its limit
        "failures": [],
    }
    start = time.monotonic()

    def fail(op: str, seed: int, level: str, error: str) -> None:
        again = f"python scripts/random_calls.py --seconds 0 --seed {seed} --ops {op}"
        if args.device != "cpu":
            again += f" --device {args.device}"
        elif level != "best":
            again += f" --levels {level}"
        report["failures"].append({"command": again, "error": error})
        print(f"{error}\n{again}\n", flush=True)

    jobs = Jobs(work, args.jobs, args.levels, args)
    saved = start
    for level, result in jobs:
        now = time.monotonic()
        if now - saved > 5:
            save(args.json, report)
            saved = now
        if now - start > args.seconds + GRACE:
            for job in jobs.jobs:
                fail(*(job.begun or ("?", -1)), job.level, "the process does not come back")
                job.process.kill()
            break
        if result is None:
            continue
        if "died" in result:
            fail(*(result["begins"] or ("?", -1)), level, f"the process ended: {result['died']}")
            continue
        op = result["op"]
        if "refused" in result:
            report["refused"][op] += 1
            report["reasons"][result["refused"]] += 1
            continue
        report["calls"][op] += 1
        if args.device == "cpu":
            report["levels"][result["level"]] += 1
        if "error" in result:
            fail(op, result["seed"], result["level"], result["error"])
        else:
            report["worst"][op] = max(report["worst"].get(op, 0.0), round(result["worst"], 3))
    report["seconds"] = round(time.monotonic() - start, 1)
    save(args.json, report)
    print(f"{'op':<20} {'calls':>8} {'refused':>8} {'largest error, of its limit':>28}")
    for op in args.ops:
        worst = report["worst"].get(op, 0.0)
        print(f"{op:<20} {report['calls'][op]:>8} {report['refused'][op]:>8} {worst:>28.2f}")
    for reason, count in report["reasons"].most_common(12):
        print(f"refused {count} times: {reason}")
    levels = "".join(f", {level} {count}" for level, count in report["levels"].items())
    print(
        f"{report['calls'].total()} calls on {args.device}{levels}, "
        f"{len(report['failures'])} failures; {report['seconds']} s in {args.jobs} processes"
    )
    return 1 if report["failures"] else 0


if __name__ == "__main__":
    sys.exit(main())
