"""The oracle tests of the CPU backend, run again with the XPU kernels in place of the CPU's."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
TESTS = HERE.parent

MODULES = {
    "recurrent": 60, "gates": 45, "norm": 40, "conv": 100, "chunk": 150, "decode": 8,
    "causal_conv1d": 16, "windows": 20, "vllm_compat": 120, "sglang_compat": 45, "paged": 1,
    "fla": 7, "nn": 25,
}  # fmt: skip


@pytest.mark.parametrize("module", MODULES)
def test_on_twin(module):
    """At least so many tests of the module pass and none fails; limits of the XPU skip theirs."""
    given = os.environ.get("PYTHONPATH", "")
    path = os.pathsep.join([str(HERE), str(TESTS), str(TESTS.parent), given])
    command = [sys.executable, "-m", "pytest", "-q", "-p", "on_twin", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*command, str(TESTS / f"test_{module}.py")],
        capture_output=True, text=True, env=os.environ | {"PYTHONPATH": path},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-4000:]
    passed = int(re.search(r"(\d+) passed", done.stdout)[1])
    assert passed >= MODULES[module], done.stdout[-1000:]
