"""Markdown tables of `gdn-ops bench --json` files, for README and docs.

    python scripts/bench_table.py bench.json [more.json ...]

One table for each op, head count, state dtype and mode; a cell is milliseconds (times the floor).
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import defaultdict


def tables(rows: list[dict]) -> str:
    cases: dict[tuple, dict[str, dict[int, dict]]] = defaultdict(lambda: defaultdict(dict))
    for row in rows:
        key = tuple(row.get(c) or "" for c in ("op", "heads", "dtype", "state", "mode"))
        name = row["candidate"] + (f", {row['layout']} pool" if row.get("layout") else "")
        size = row["batch"] if row.get("batch") is not None else row.get("tokens")
        if size is None:  # a family that could not run at all
            continue
        cases[key][name][size] = row
    text = []
    for (op, heads, dtype, state, mode), lines in cases.items():
        sizes = sorted({s for line in lines.values() for s in line})
        first = {s: next(line[s] for line in lines.values() if s in line) for s in sizes}
        head = ", ".join(x for x in (op, heads, dtype, state and f"{state} state", mode) if x)
        text.append(f"| {head}: ms (x floor) | " + " | ".join(str(s) for s in sizes) + " |")
        text.append("|---" * (len(sizes) + 1) + "|")
        floors = [r["floor_ms"] for r in first.values()]
        text.append(
            "| floor | " + " | ".join("-" if f is None else f"{f:.3g}" for f in floors) + " |"
        )
        for name, line in lines.items():
            cells = []
            for s in sizes:
                row = line.get(s)
                timed = row is not None and row["ms"] is not None
                cells.append(f"{row['ms']:.3g} ({row['ratio']:.2f})" if timed else "-")
            text.append(f"| {name} | " + " | ".join(cells) + " |")
        text.append("")
    return "\n".join(text)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("files", nargs="+", type=argparse.FileType(), metavar="FILE")
    rows: list[dict] = []
    for file in parser.parse_args().files:
        rows += json.load(file)["rows"]
    print(tables(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
