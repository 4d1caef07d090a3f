"""The programs of tests/native: the level amx without AMX, tiles in plain C++, chunks against the
recurrence; and that the driver of scripts/check_sanitizers.sh is still C++."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from pathlib import Path

import pytest

NATIVE = Path(__file__).parent / "native"
# The flags of setup.py that change what the kernels compute; -O1 builds in a tenth of the time.
FLAGS = ["-std=c++17", "-O1", "-ffp-contract=off", "-fno-math-errno", "-w"]


@pytest.fixture
def compiler():
    found = shutil.which(os.environ.get("CXX") or "c++")
    if found is None:
        pytest.skip("needs a C++ compiler")
    return found


def test_the_driver_compiles(compiler):
    """It is built by a script that takes a quarter of an hour, so rarely."""
    driver = NATIVE / "driver.cpp"
    subprocess.run([compiler, "-std=c++17", "-fsyntax-only", str(driver)], check=True)


def test_chunks_in_emulated_tiles(compiler, tmp_path):
    if platform.machine() != "x86_64":
        pytest.skip("needs an x86-64 processor")
    program = tmp_path / "tiles"
    subprocess.run([compiler, *FLAGS, str(NATIVE / "tiles.cpp"), "-o", str(program)], check=True)
    run = subprocess.run([str(program)], capture_output=True, text=True)
    if run.returncode == 77:
        pytest.skip(run.stdout.strip())
    assert (run.returncode, run.stdout) == (0, "ok\n"), run.stdout + run.stderr
