"""The oracle tests of the CPU backend, run again with the XPU kernels in place of the CPU's."""

import os
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

HERE = Path(__file__).parent
TESTS = HERE.parent

# How many tests of a module pass at least; limits of the XPU skip theirs.
MODULES = {
    "recurrent": 60, "gates": 45, "norm": 40, "conv": 100, "chunk": 150, "decode": 8,
    "causal_conv1d": 16, "windows": 20, "vllm_compat": 120, "sglang_compat": 45, "paged": 1,
    "fla": 7, "nn": 25,
}  # fmt: skip


@pytest.fixture(scope="module")
def on_twin(request, tmp_path_factory):
    """Module -> how many of its tests passed, and which did not: those of this run, in one process
    of their own."""
    asked = [
        item.callspec.params["module"]
        for item in request.session.items
        if item.path == Path(__file__) and "module" in item.callspec.params
    ]
    report = tmp_path_factory.mktemp("on_twin") / "report.xml"
    given = os.environ.get("PYTHONPATH", "")
    path = os.pathsep.join([str(HERE), str(TESTS), str(TESTS.parent), given])
    command = [sys.executable, "-m", "pytest", "-q", "-p", "on_twin", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*command, f"--junitxml={report}", *(str(TESTS / f"test_{m}.py") for m in asked)],
        capture_output=True, text=True, env=os.environ | {"PYTHONPATH": path},
    )  # fmt: skip
    assert done.returncode in (0, 1), done.stdout[-4000:] + done.stderr[-4000:]
    found = {m: (0, []) for m in asked}
    for case in ElementTree.parse(report).iter("testcase"):
        (module,) = (m for m in asked if f"test_{m}" in case.get("classname").split("."))
        passed, broken = found[module]
        wrong = [x.text or x.get("message") for x in case if x.tag in ("failure", "error")]
        broken += [f"{case.get('name')}\n{text[-2000:]}" for text in wrong]
        found[module] = passed + (case.find("skipped") is None and not wrong), broken
    return found


@pytest.mark.parametrize("module", MODULES)
def test_on_twin(on_twin, module):
    passed, broken = on_twin[module]
    assert not broken, "\n\n".join(broken)[:8000]
    assert passed >= MODULES[module]
