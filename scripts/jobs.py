"""Processes that make random cases, for soak.py and random_calls.py."""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import queue
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime, timezone
from multiprocessing.process import BaseProcess
from pathlib import Path

import torch


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Those that both scripts have."""
    parser.add_argument("--seed", type=int, default=0, help="the first (0)")
    parser.add_argument("--jobs", type=int, default=1, help="processes (1)")
    parser.add_argument("--levels", nargs="*", default=[], help="instruction sets (the best)")
    parser.add_argument("--json", type=Path, help="where to keep the result")


def head(args: argparse.Namespace) -> dict:
    """What a report begins with: what ran, where, and since when."""
    return {
        "torch": torch.__version__,
        "machine": platform.machine(),
        "begun": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "seed": args.seed,
        "jobs": args.jobs,
    }


@dataclass
class Job:
    process: BaseProcess
    results: multiprocessing.Queue
    level: str
    begun: object = None


class Jobs:
    """``count`` processes of ``work(j, stop, results, *args)``, the j-th at the j-th of ``levels``,
    the instruction sets of the CPU kernels.

    ``work`` puts ``{"begins": case}`` before each case, should it not come back, and a dict after
    it. Iterating gives ``(level, dict)``, and ``(level, None)`` where nothing came for a while; a
    process that died gives ``{"begins": case, "died": exit code}``.
    """

    def __init__(self, work: Callable, count: int, levels: list[str], *args) -> None:
        # Cases on two threads shall wait asleep: the cores are for other processes.
        os.environ.setdefault("OMP_WAIT_POLICY", "passive")
        context = multiprocessing.get_context("spawn")  # its level is read when it loads ours
        self.stop = context.Event()
        self.jobs = []
        for j in range(count):
            level = levels[j % len(levels)] if levels else ""
            if level:
                os.environ["GDN_CPU_ISA"] = level
            results = context.Queue()
            process = context.Process(target=work, args=(j, self.stop, results, *args), daemon=True)
            process.start()
            self.jobs.append(Job(process, results, level or "best"))

    def __iter__(self) -> Iterator[tuple[str, dict | None]]:
        while self.jobs:
            for job in list(self.jobs):
                alive = job.process.is_alive()  # asked before the queue, which it may still fill
                try:
                    result = job.results.get(timeout=0.02)
                except queue.Empty:
                    if not alive:
                        self.jobs.remove(job)
                        if code := job.process.exitcode:
                            yield job.level, {"begins": job.begun, "died": code}
                    else:
                        yield job.level, None
                    continue
                if "begins" in result:
                    job.begun = result["begins"]
                else:
                    yield job.level, result


def save(path: Path | None, report: dict) -> None:
    """Writes the report, if a path was given: whole or not at all, as cut short it is no JSON."""
    if path:
        part = path.with_name(f".{path.name}.part")
        part.write_text(json.dumps(report, indent=2, sort_keys=True) + "\n")
        part.replace(path)
