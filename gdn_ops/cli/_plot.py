"""``gdn-ops bench --plot``: time of a call over the batch size, on logarithmic axes."""

from __future__ import annotations

import io
from collections import defaultdict
from pathlib import Path

from gdn_ops.cli import say_why
from gdn_ops.cli._output import Output, UsageError, write_file

FLOOR = "floor of "


def require(path: str, batches: tuple[int, ...]) -> None:
    """Fail before a long run, not after it. ``batches``: those asked for; none: the default."""
    try:
        from matplotlib.backend_bases import FigureCanvasBase
    except ImportError as error:
        raise UsageError("--plot needs matplotlib: pip install matplotlib") from error
    kinds = FigureCanvasBase.get_supported_filetypes()
    if Path(path).suffix[1:].lower() not in kinds:
        raise UsageError(f"--plot: expected a name that ends in one of {', '.join(kinds)}")
    if len(set(batches)) == 1:
        raise UsageError(f"--plot: expected two batch sizes or more, got --batch {batches[0]}")


def draw(out: Output, rows: list[dict], machine: dict, path: str) -> int:
    """:func:`scaling` at the end of a run, whose figures are kept if there is no picture of them:
    the exit status."""
    try:
        scaling(rows, machine, path)
    except UsageError as error:
        say_why(f"gdn-ops: {error}")
        return 2
    out.console.print(f"wrote {path}", markup=False)
    return 0


def scaling(rows: list[dict], machine: dict, path: str) -> None:
    """One panel for each op, head count and state dtype that was timed at two batch sizes or more.

    The floor is that of a panel's first candidate: others may have to move fewer bytes.

    Raises:
        UsageError: no case was timed at two batch sizes, or the picture cannot be written.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    panels: dict[tuple, dict[str, dict[int, float]]] = defaultdict(lambda: defaultdict(dict))
    for row in rows:
        if row["skipped"] or row.get("mode") == "hot" or row.get("batch") is None:
            continue
        panel = panels[row["op"], row.get("heads"), row.get("state")]
        name = row["candidate"] + (f" ({row['layout']})" if row.get("layout") else "")
        first = next((n for n in panel if not n.startswith(FLOOR)), name)
        panel[name][row["batch"]] = row["ms"]
        if name == first:
            panel[FLOOR + name][row["batch"]] = row["floor_ms"]
    panels = {k: p for k, p in panels.items() if max(map(len, p.values())) > 1}
    if not panels:
        raise UsageError("--plot: nothing was timed at two batch sizes; see --batch")
    columns = min(3, len(panels))
    lines = -(-len(panels) // columns)
    figure, axes = plt.subplots(
        lines, columns, figsize=(5.5 * columns, 4 * lines), squeeze=False, layout="constrained"
    )
    for axis in axes.flat[len(panels) :]:
        axis.axis("off")
    for axis, ((op, heads, state), series) in zip(axes.flat, panels.items(), strict=False):
        for name, points in series.items():
            batches = sorted(points)
            floor = {"color": "black", "linestyle": "--"}
            style = floor if name.startswith(FLOOR) else {"marker": "o"}
            axis.loglog(batches, [points[b] for b in batches], label=name, base=2, **style)
        axis.set_title(" ".join(str(x) for x in (op, heads, state) if x))
        axis.set_xlabel("batch")
        axis.set_ylabel("ms a call")
        axis.set_yscale("log", base=10)
        axis.grid(True, which="major", alpha=0.3)
        axis.legend(fontsize="small")
    figure.suptitle(
        f"{machine['cpu']}, {machine['isa']}, {machine['threads']} threads, torch "
        f"{machine['torch']}, {machine['date']}",
        fontsize="small",
    )
    picture = io.BytesIO()
    figure.savefig(picture, dpi=110, format=Path(path).suffix[1:].lower())
    plt.close(figure)
    try:
        write_file(path, picture.getvalue())
    except OSError as error:
        raise UsageError(f"--plot: {error}") from error
