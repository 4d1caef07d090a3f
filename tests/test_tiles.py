"""The level amx without AMX: tiles in plain C++ (tests/native), chunks against the recurrence."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent / "native" / "tiles.cpp"
# The flags of setup.py that change what the kernels compute; -O1 builds in a tenth of the time.
FLAGS = ["-std=c++17", "-O1", "-ffp-contract=off", "-fno-math-errno", "-w"]


def test_chunks_in_emulated_tiles(tmp_path):
    compiler = shutil.which(os.environ.get("CXX") or "c++")
    if platform.machine() != "x86_64" or compiler is None:
        pytest.skip("needs an x86-64 processor and a C++ compiler")
    program = tmp_path / "tiles"
    subprocess.run([compiler, *FLAGS, str(SOURCE), "-o", str(program)], check=True)
    run = subprocess.run([str(program)], capture_output=True, text=True)
    if run.returncode == 77:
        pytest.skip(run.stdout.strip())
    assert (run.returncode, run.stdout) == (0, "ok\n"), run.stdout + run.stderr
