"""Paired timing against a floor measured in the same run.

All candidates of a case are timed in one loop, in turns, in an order drawn anew each round, beside
a *sweep*: in-place traffic (each byte read once and written once) over the same buffers with the
same threads. The floor of a call is the fewest bytes it must move at the sweep's rate, so a row's
ratio does not depend on which level the memory of a shared machine happens to run at.

A *rotated* case walks over at least 256 MB of buffers, as the layers of a model do; a *hot* case
repeats on one buffer. The position in the walk is shared by all candidates, so none finds its data
warm from the one before. A candidate is checked against the float64 oracle first; one that is out
of tolerance gets a row that says so and no time.

On a CUDA device a sample is the replay of a graph of the whole walk, between events, so that it
holds no launch from the host; a candidate that cannot be captured is launched call by call, and its
note says so.
"""

from __future__ import annotations

import ctypes
import itertools
import platform
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

Buffer = TypeVar("Buffer")  # a tensor, or what holds some
WALK_BYTES = 256 * 2**20
# A sample shorter than this is made of several calls: the clock and the loop then cost nothing.
MIN_SAMPLE_S = 1e-3
MIN_CALLS = 8  # of a graph: an event costs a few microseconds


@dataclass
class Options:
    """What ``gdn-ops bench`` was asked for; every family's ``run`` takes one."""

    quick: bool = False
    batches: tuple[int, ...] = ()
    heads: tuple[tuple[int, int], ...] = ()
    dtypes: tuple[torch.dtype, ...] = ()
    peers: bool = True
    compiled: bool = True
    seed: int = 0
    # Largest error that is still timed, in tolerances: a mode that rounds once more needs room.
    slack: float = 1.0
    emit: Callable[[dict], None] = lambda row: None
    status: Callable[[str], None] = lambda text: None

    @property
    def rounds(self) -> tuple[int, int]:
        """Fewest and most rounds of samples of one case; between the two, ``budget_s`` decides."""
        return (3, 40) if self.quick else (5, 150)

    @property
    def budget_s(self) -> float:
        return 0.5 if self.quick else 3.0


@dataclass
class Candidate:
    """One implementation of a case.

    ``call(i)`` runs it on buffer ``i``. ``check()`` runs it once on its real buffers and returns
    the largest error relative to the tolerance of its dtype (above 1 is refused). A candidate that
    cannot run here has ``skipped`` set to the reason instead.
    """

    name: str
    call: Callable[[int], Any] | None = None
    check: Callable[[], float] | None = None
    skipped: str = ""
    note: str = ""
    bytes: int | None = None
    fields: dict[str, Any] = field(default_factory=dict)


def machine(device: str = "cpu") -> dict[str, Any]:
    """What a figure must be read with; ``device`` where the ops did not run on the CPU."""
    name = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        names = [x for x in cpuinfo.read_text().splitlines() if x.startswith("model name")]
        name = names[0].split(":", 1)[1].strip() if names else name
    return {
        "cpu": name,
        "isa": torch.ops.gdn.cpu_isa(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "precision": torch.ops.gdn.get_precision(),
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
    } | ({} if device == "cpu" else {"device": _device_name(device)})


def _device_name(device: str) -> str:
    return torch.cuda.get_device_name() if device == "cuda" else f"{device}, on the host"


def in_mode(mode: str, call: Callable) -> Callable:
    """``call`` under ``set_precision(mode)``, which costs less than a microsecond."""
    get, put = torch.ops.gdn.get_precision.default, torch.ops.gdn.set_precision.default

    def run(*args):
        before = get()
        put(mode)
        try:
            return call(*args)
        finally:
            put(before)

    return run


def keep_freed_memory() -> None:
    """Tell glibc to keep freed blocks: peers that return fresh tensors then pay no page faults."""
    if platform.libc_ver()[0] == "glibc":
        libc = ctypes.CDLL(None)
        M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4
        libc.mallopt(M_MMAP_MAX, 0)
        libc.mallopt(M_TRIM_THRESHOLD, 2**31 - 1)


def generator(seed: int) -> torch.Generator:
    """Of the default device, which is where a family makes its buffers."""
    # Not get_default_device: torch 2.5 cannot say it after a `with torch.device`.
    return torch.Generator(torch.empty(0).device).manual_seed(seed)


def buffers(count_bytes: int, make: Callable[[int], Buffer], hot: bool) -> list[Buffer]:
    """Buffers to walk over: one if hot, else enough for ``WALK_BYTES``."""
    return [make(i) for i in range(1 if hot else max(2, -(-WALK_BYTES // count_bytes)))]


def sweeps(pools: Sequence[Tensor]) -> list[Candidate]:
    """In-place traffic over each pool's bytes, whatever its dtype; the fastest one is the floor."""
    sweep = torch.ops.gdn.sweep.default
    words = [p.view(-1).view(torch.int32) for p in pools]
    found = [Candidate("sweep, torch", lambda i: words[i].bitwise_xor_(0))]
    if pools[0].is_cpu:
        found.insert(0, Candidate("sweep", lambda i: sweep(words[i])))
    return found


def _rounds(candidates: Sequence[Candidate], options: Options) -> Iterator[Candidate]:
    """The candidates in turns, in an order drawn anew each round, for as many as there is time."""
    rng = random.Random(options.seed)
    order = list(candidates)
    begin = time.perf_counter()
    fewest, most = options.rounds
    for done in range(most):
        if done >= fewest and time.perf_counter() - begin > options.budget_s:
            return
        rng.shuffle(order)
        yield from order


def _samples(
    candidates: Sequence[Candidate], n_buffers: int, options: Options
) -> dict[str, list[float]]:
    """Seconds a call, on the CPU."""
    walk = itertools.cycle(range(n_buffers))
    reps = {}
    for c in candidates:
        c.call(next(walk))
        start = time.perf_counter()
        c.call(next(walk))
        once = time.perf_counter() - start
        reps[c.name] = max(1, int(MIN_SAMPLE_S / max(once, 1e-7)))
    times: dict[str, list[float]] = {c.name: [] for c in candidates}
    for c in _rounds(candidates, options):
        n = reps[c.name]
        where = [next(walk) for _ in range(n)]
        call = c.call
        start = time.perf_counter()
        for i in where:
            call(i)
        times[c.name].append((time.perf_counter() - start) / n)
    return times


def _replays(
    candidates: Sequence[Candidate], n_buffers: int, options: Options
) -> dict[str, list[float]]:
    """Seconds a call, on a CUDA device."""
    walk = [i for _ in range(-(-MIN_CALLS // n_buffers)) for i in range(n_buffers)]
    replay = {c.name: _captured(c, walk) for c in candidates}
    times: dict[str, list[float]] = {c.name: [] for c in candidates}
    for c in _rounds(candidates, options):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        replay[c.name]()
        end.record()
        end.synchronize()
        times[c.name].append(start.elapsed_time(end) / 1e3 / len(walk))
    return times


def _captured(c: Candidate, walk: Sequence[int]) -> Callable[[], object]:
    """One graph of the calls of a walk, or the calls."""

    def calls() -> None:
        for i in walk:
            c.call(i)

    for i in walk[:2]:
        c.call(i)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            calls()
    except RuntimeError as error:
        c.note = "; ".join(filter(None, (c.note, f"not captured: {str(error).splitlines()[0]}")))
        return calls
    graph.replay()
    return graph.replay


def measure(
    case: dict[str, Any],
    candidates: Sequence[Candidate],
    pools: Sequence[Tensor],
    must_move: int,
    options: Options,
) -> list[dict]:
    """Check, time and report one case.

    Args:
        case: the columns common to its rows (``family``, ``op``, shape, dtypes, ``mode``).
        candidates: the implementations, ours first.
        pools: the buffers walked over; the sweep runs on them between the candidates' turns.
        must_move: the fewest bytes one call has to read plus write; a candidate with its own
            ``bytes`` (another dtype, say) is judged against those.

    Returns:
        One row a candidate: the case plus ``candidate``, ``ms``, ``spread`` (the middle half of the
        samples over the median), ``floor_ms``, ``ratio``, ``gbps``, ``error`` (in tolerances),
        ``skipped`` (reason or empty), ``note``.
    """
    rows, timed = [], []
    for c in candidates:
        row = {**case, "candidate": c.name, "note": c.note, "skipped": c.skipped, **c.fields}
        row.update(dict.fromkeys(("ms", "spread", "floor_ms", "ratio", "gbps", "error")))
        rows.append(row)
        if c.skipped:
            continue
        options.status(f"{case['family']} {label(case)}: checking {c.name}")
        if c.check is not None:
            row["error"] = c.check()
            if not row["error"] <= options.slack:
                row["skipped"] = f"not timed: error is {row['error']:.3g} times the tolerance"
                continue
        timed.append((c, row))
    if timed:
        options.status(f"{case['family']} {label(case)}: timing")
        floor = sweeps(pools)
        sample = _samples if pools[0].is_cpu else _replays
        times = sample([c for c, _ in timed] + floor, len(pools), options)
        swept = 2 * pools[0].numel() * pools[0].element_size()
        best = min(statistics.median(times[c.name]) for c in floor)
        for c, row in timed:
            samples = sorted(times[c.name])
            seconds = statistics.median(samples)
            moved = c.bytes or must_move
            row["ms"] = seconds * 1e3
            n = len(samples)
            row["spread"] = (samples[(3 * n) // 4] - samples[n // 4]) / seconds
            row["floor_ms"] = moved / swept * best * 1e3
            row["ratio"] = row["ms"] / row["floor_ms"]
            row["gbps"] = moved / seconds / 1e9
            row["note"] = c.note
    for row in rows:
        options.emit(row)
    return rows


def nbytes(*tensors: Tensor) -> int:
    """Bytes of the elements of all tensors."""
    return sum(t.numel() * t.element_size() for t in tensors)


def label(case: dict[str, Any]) -> str:
    """The case in a few words."""
    parts = [str(case["op"])]
    parts += [f"{k}={case[k]}" for k in ("heads", "batch", "tokens") if case.get(k) is not None]
    parts += [str(case[k]) for k in ("state", "dtype", "layout", "mode") if case.get(k)]
    return " ".join(parts)


DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}
SHORT = {dtype: name for name, dtype in DTYPES.items()}
