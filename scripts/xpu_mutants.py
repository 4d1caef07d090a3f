"""Mutation test of the XPU kernels: one defect at a time, and the numerics cases must notice it.

The twin applies a defect where the kernel runs, so nothing is recompiled: an instruction of an
assembly block is deleted, repeated, given another mask, swapped operands or a sibling mnemonic; a
fence or a barrier is left out; a transfer is dropped, shortened by 4 bytes or lengthened by 64.
Every place in the kernels that the cases reach is a candidate. A mutant that no case notices is
printed; the ones known to change nothing are listed below with the reason, and any other makes the
script fail.

    python scripts/xpu_mutants.py [--only SUBSTRING] [--switch NAME ...] [--list]
"""

from __future__ import annotations

import argparse
import itertools
import re
import sys
import time
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "tests" / "xpu"), str(ROOT)]

import gdn_ops  # noqa: E402, F401
from gdn_ops import xpu_twin  # noqa: E402

KINDS = {
    "fence": ["fence-drop"],
    "barrier": ["barrier-drop"],
    "dma": ["dma-drop", "dma-short", "dma-long"],
}

# Mutants that change nothing: pattern over "kind file:code line" -> why.
EQUIVALENT = [
    (r"^asm-swap .*vmac\.f", "the two factors of a product commute"),
    (r"^asm-other .*vadd\.f\.mz\.rn %\[v\]\{mr1\}, %\[s\], %\[v\]", "s - 0 is s + 0"),
    (
        r"^dma-short chunk\.xpu: XPU_(STORE\(A |LOAD\(p\.A )",
        "the last element of rows of -A lies on or above the diagonal, where nobody reads",
    ),
]


def source_line(site: str) -> str:
    """The instruction or the line at a site, so that explanations survive renumbering."""
    place, _, index = site.partition("#")
    name, line = place.split(":")
    path = next(ROOT.glob(f"csrc/xpu/kernels/{name}"))
    text = path.read_text()
    for name, body in re.findall(r"^#define (XPU_\w+) +\\\n((?: +\".*\n)+)", text, re.MULTILINE):
        instructions = " ".join(re.findall(r'"[^"]*"', body))
        text = re.sub(rf"(?<!#define ){name}\b", lambda m, i=instructions: i, text)
    lines = text.splitlines()[int(line) - 1 :]
    if not index:
        return lines[0].strip()
    instructions = (m[1] for text in lines for m in re.finditer(r'"([^"]*)\\n"', text))
    return next(itertools.islice(instructions, int(index), None))


def mutants() -> list[tuple[str, str]]:
    out = []
    for entry in xpu_twin.sites():
        kind, site = entry.split(" ")
        out += [(k, site) for k in KINDS.get(kind, [kind])]
    return out


def noticed(names: list[str], cases) -> str | None:
    """The first case that fails under the current defect."""
    for name in names:
        try:
            cases[name]()
        except (RuntimeError, AssertionError):
            return name
    return None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="mutants whose kind or site contains this")
    parser.add_argument(
        "--switch", action="append", default=[], help="mutants that only exist with this switch on"
    )
    parser.add_argument("--list", action="store_true", help="print the mutants and stop")
    args = parser.parse_args()
    if not xpu_twin.available():
        print("built without the XPU twin; rebuild with GDN_BACKEND=xpu-twin", file=sys.stderr)
        return 2
    from cases import CASES

    seen: dict[str, list[str]] = {}
    with torch.no_grad():
        for name, run in CASES.items():
            run()
            for entry in xpu_twin.sites():
                seen.setdefault(entry.split(" ")[1], []).append(name)
        without = set(seen) if args.switch else set()
        for switch in args.switch:
            xpu_twin.set_switch(switch, True)
        for name, run in CASES.items() if args.switch else ():
            run()
            for entry in xpu_twin.sites():
                seen.setdefault(entry.split(" ")[1], []).append(name)
        chosen = [m for m in mutants() if args.only in " ".join(m) and m[1] not in without]
        if args.list:
            print("\n".join(" ".join(m) for m in chosen))
            return 0
        start = time.time()
        survivors, explained = [], {}
        favourite: dict[str, str] = {}
        for kind, site in chosen:
            xpu_twin.set_mutation(f"{kind} {site}")
            # The case that caught this line's last mutant, then the first that reached the line.
            order = list(CASES)
            first = seen[site][0]
            order.sort(key=lambda n: (n != favourite.get(site.split(":")[0]), n != first))
            hit = noticed(order, CASES)
            xpu_twin.set_mutation("")
            if hit:
                favourite[site.split(":")[0]] = hit
                continue
            text = f"{kind} {site.split(':')[0]}: {source_line(site)}"
            reason = next((why for pattern, why in EQUIVALENT if re.search(pattern, text)), None)
            if reason:
                explained.setdefault(reason, []).append((kind, site))
            else:
                survivors.append((kind, site))
                print(f"survived: {kind} {site}: {source_line(site)}", flush=True)
    count = sum(len(v) for v in explained.values())
    for reason, which in explained.items():
        print(f"{len(which)} equivalent: {reason}")
        for kind, site in which:
            print(f"    {kind} {site}: {source_line(site)}")
    print(
        f"{len(chosen)} mutants, {len(chosen) - len(survivors) - count} caught, "
        f"{count} equivalent, "
        f"{len(survivors)} survived, {time.time() - start:.0f} s"
    )
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
