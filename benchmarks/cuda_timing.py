"""Timing on a CUDA device: graph replays, medians, copy bandwidth; the frame of a table."""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch

Result = TypeVar("Result")


def timed(
    call: Callable[[], object], repeats: int, before: Callable[[], object] = lambda: None
) -> list[float]:
    """Seconds of ``repeats`` calls, after two that are not counted. ``before`` runs ahead of each
    and is not timed."""
    times = []
    for _ in range(repeats + 2):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        before()
        start.record()
        call()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return times[2:]


def copy_bandwidth(gib: int = 4, repeats: int = 9) -> float:
    """Bytes a second, read + written, of a plain device-to-device copy (median of ``repeats``).

    Not captured: the same copy inside a CUDA graph is a memcpy node and runs at two thirds of it.
    """
    a = torch.empty(gib << 28, dtype=torch.float32, device="cuda").normal_()
    b = torch.empty_like(a)
    return 2 * a.numel() * 4 / statistics.median(timed(lambda: b.copy_(a), repeats))


def captured(run: Callable[[], Result], warm: int = 2) -> tuple[torch.cuda.CUDAGraph, Result]:
    """A CUDA graph of ``run()``, and the tensors that a replay writes its results to. What the
    first calls build, load and look up is not for a graph: ``warm`` of them run before it."""
    for _ in range(warm):
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = run()
    return graph, result


def graph_time(
    calls: Sequence[Callable[[], object]],
    repeats: int = 9,
    least: int = 8,
    before: Callable[[], object] = lambda: None,
) -> tuple[float, float]:
    """Seconds a call (median, and half the spread) of ``calls`` replayed in turn from one graph.

    ``calls`` address different memory, more than the L2 cache holds, so that no call finds its data
    there. ``before`` runs ahead of each replay and is not timed.
    """
    walk = list(calls) * max(1, -(-least // len(calls)))

    def run() -> None:
        for call in walk:
            call()

    for call in calls[:2]:
        call()
    graph, _ = captured(run, warm=0)
    times = [t / len(walk) for t in timed(graph.replay, repeats, before)]
    return statistics.median(times), (max(times) - min(times)) / 2


def relative_error(got: torch.Tensor, want: torch.Tensor) -> float:
    """In the 2-norm. NaN counts as infinite: every comparison with a limit lets NaN pass."""
    got, want = got.double().cpu(), want.double().cpu()
    error = ((got - want).norm() / want.norm()).item()
    return error if error == error else float("inf")


def table_of(parser: argparse.ArgumentParser, fill: Callable) -> None:
    """Parses the command line, prints the device and its bandwidth, and lets ``fill(table,
    bandwidth, args)`` print and collect the rows, which ``--json`` keeps."""
    parser.add_argument("--json", help="write the table here as well")
    args = parser.parse_args()
    torch.manual_seed(0)
    bandwidth = copy_bandwidth()
    print(
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}, "
        f"copy {bandwidth / 1e9:.0f} GB/s read + written"
    )
    table: list[dict] = []
    fill(table, bandwidth, args)
    if args.json:
        with open(args.json, "w") as f:
            json.dump({"copy_GBps": bandwidth / 1e9, "rows": table}, f, indent=1)
