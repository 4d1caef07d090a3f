"""The oracle tests of the CPU backend, run again with the XPU kernels in place of the CPU's."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent

# Words in the names of tests that ask what a device cannot answer, or what docs/xpu.md says the XPU
# does not do.
NOT_HERE = {
    "raises_before_writing": "no kernel can raise: values are checked where the host can read them",
    "fast": "the XPU has one precision",
    "threads": "threads of the CPU",
    "opcheck": "asks torch, not the kernels; so do the next four",
    "fake": "",
    "compile": "",
    "gradcheck": "",
    "gradient": "",
    "scratch_does_not_grow": "memory of the process, which is the twin's",
    "later_token": "zero times NaN in a product reaches the tokens of a chunk",
    "minus_inf_clears_even": "zero times infinity, as above",
    "silu_at_its_ends": "sigmoid is bounded by 2^-120",
}
MODULES = {"recurrent": 60, "gates": 45, "norm": 40, "conv": 100, "chunk": 150}


@pytest.mark.parametrize("module", MODULES)
def test_on_twin(module):
    """At least so many tests of the module pass and none fails; limits of the XPU skip theirs."""
    path = os.pathsep.join([str(HERE), str(HERE.parent.parent), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", "pytest", "-q", "-p", "on_twin", "-p", "no:cacheprovider"]
    command += ["-k", " and ".join(f"not {name}" for name in NOT_HERE)]
    done = subprocess.run(
        [*command, str(HERE.parent / f"test_{module}.py")],
        capture_output=True, text=True, env=os.environ | {"PYTHONPATH": path},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-4000:]
    passed = int(re.search(r"(\d+) passed", done.stdout)[1])
    assert passed >= MODULES[module], done.stdout[-1000:]
