"""Timing on a CUDA device: graph replays, medians, copy bandwidth; the frame of a table."""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Sequence

import torch


def copy_bandwidth(gib: int = 4, repeats: int = 9) -> float:
    """Bytes a second, read + written, of a plain device-to-device copy (median of ``repeats``).

    Not captured: the same copy inside a CUDA graph is a memcpy node and runs at two thirds of it.
    """
    a = torch.empty(gib << 28, dtype=torch.float32, device="cuda").normal_()
    b = torch.empty_like(a)
    times = []
    for i in range(repeats + 2):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        b.copy_(a)
        end.record()
        end.synchronize()
        if i >= 2:
            times.append(start.elapsed_time(end) / 1e3)
    return 2 * a.numel() * 4 / statistics.median(times)


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
    rounds = max(1, -(-least // len(calls)))
    for call in calls[:2]:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(rounds):
            for call in calls:
                call()
    times = []
    for i in range(repeats + 2):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        before()
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        if i >= 2:
            times.append(start.elapsed_time(end) / 1e3 / (rounds * len(calls)))
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
