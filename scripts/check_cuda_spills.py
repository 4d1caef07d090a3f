#!/usr/bin/env python3
"""Compile the kernels whose registers decide their time, and fail where one of them spills.

    python scripts/check_cuda_spills.py [--arch sm_90a] [--jobs N]

A window of four tokens went from 124 to 138 us for 28 bytes that were spilled after a change three
headers away, and every test passed. No GPU and no torch are needed, nvcc and c++filt are.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

KERNELS = Path(__file__).resolve().parent.parent / "csrc/cuda/kernels"
# Sources, and which of their kernels must keep everything in registers: K = 128, the one-kernel
# form of a window and the tiles of `recurrent` whose rows are aligned.
WATCHED = {
    "buffered_usual_*.cu": re.compile(r"buffered_rows<[\w, ]*, 128, 128, \d, \d, true, \w+>"),
    "recurrent_[bf]*.cu": re.compile(r"recurrent_rows<\w+, \w+, 128, [\d, ]*, true>"),
}
ENTRY = re.compile(
    r"Compiling entry function '(?P<name>[^']*)'.*?(?P<stores>\d+) bytes spill stores"
    r".*?Used (?P<registers>\d+) registers",
    re.DOTALL,
)


def usage(source: Path, arch: str) -> list[tuple[str, int, int]]:
    """(kernel, registers, bytes of spill stores) of every kernel of a source."""
    command = ["nvcc", "-O3", "-std=c++17", f"-arch={arch}", "-cubin", "-Xptxas", "-v"]
    done = subprocess.run(
        [*command, source.name, "-o", os.devnull], cwd=KERNELS, capture_output=True, text=True
    )
    if done.returncode:
        sys.exit(f"{source.name}: nvcc failed\n{done.stderr}")
    names = subprocess.run(["c++filt"], input=done.stderr, capture_output=True, text=True).stdout
    return [(m["name"], int(m["registers"]), int(m["stores"])) for m in ENTRY.finditer(names)]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--arch", default="sm_90a", help="what to compile for (sm_90a)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="compilers at a time")
    args = parser.parse_args()
    for tool in ("nvcc", "c++filt"):
        if shutil.which(tool) is None:
            sys.exit(f"{tool}: expected on PATH, not found")
    sources = [(s, kernel) for glob, kernel in WATCHED.items() for s in sorted(KERNELS.glob(glob))]
    spilled = 0
    with ThreadPoolExecutor(args.jobs) as pool:
        for (source, watched), kernels in zip(
            sources, pool.map(lambda s: usage(s[0], args.arch), sources), strict=True
        ):
            found = [(m[0], r, b) for name, r, b in kernels if (m := watched.search(name))]
            if not found:
                sys.exit(f"{source.name}: expected a kernel like {watched.pattern}, got none")
            for kernel, registers, stores in found:
                spilled += stores > 0
                mark = "  SPILLS" if stores else ""
                print(f"{source.name:36} {registers:4} registers {stores:4} bytes  {kernel}{mark}")
    print(f"{spilled} of the watched kernels spill" if spilled else "no watched kernel spills")
    return 1 if spilled else 0


if __name__ == "__main__":
    sys.exit(main())
