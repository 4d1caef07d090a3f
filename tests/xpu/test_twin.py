"""The twin itself: every rule it enforces, broken once by a small kernel, and what it says."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

HERE = Path(__file__).parent
TWIN = HERE.parent.parent / "csrc" / "xpu" / "twin"
pytestmark = pytest.mark.needs_no_twin

EXPECTED = {
    "correct": "ok",
    "load before fence": "target of a transfer that no fence has covered",
    "scalar read before fence": "target of a transfer that no fence has covered",
    "fence of the wrong space": "target of a transfer that no fence has covered",
    "store of unfenced vector": "written by a vector store and not fenced",
    "refill while storing": "source of a transfer that no fence has covered",
    "write while storing": "source of a transfer that no fence has covered",
    "two loads, one target": "target of a transfer that no fence has covered",
    "reload what is being stored": "overlap a transfer issued at line",
    "scalar read of vector store": "written by a vector store and not fenced",
    "vector read of scalar store": "written by a scalar store and not fenced",
    "read of nothing": "were never written",
    "reused memory": "were never written",
    "write over unfenced vector": "written by a vector store and not fenced",
    "read of another phase": "were never written",
    "phase while storing": "source of a transfer that no fence has covered",
    "phase beyond its arena": "need 64 bytes more than it has",
    "scalar never set": "is NaN",
    "unaligned scalar": "scalar access of 4 bytes at local address 0x2",
    "past the array": "outside the 64 bytes in use",
    "unaligned vector": "vector load at local address 16",
    "unaligned transfer": "local address 0x10, which is not a multiple of 64",
    "empty transfer": "transfer of 0 bytes",
    "outside global memory": "leaves every allocation",
    "too much local memory": "local memory exhausted",
    "end before fence": "ends before this transfer has been fenced",
    "two cores, one address": "at least one writes, unordered",
    "barrier left out by one": "barrier mismatch: core 1 has left the kernel",
    "two different barriers": "barrier mismatch",
    "barrier without asking": "launched without barriers",
    "shared read without barrier": "no barrier has passed",
    "shared write after read": "read by another core, no barrier since",
    "beyond the shared array": "beyond the 64 bytes of the kernel's array",
    "unaligned shared vector": "shared access of 64 bytes at 0x20",
    "too much shared memory": "shared memory exhausted",
    "two shared arrays": "a second array of shared memory",
    "shared memory without asking": "launched without barriers",
    "shared memory across a barrier": "ok",
    "shared read of nothing": "were never written",
    "unknown instruction": "unknown instruction vdot.f.mz.rn",
    "scalar where a vector belongs": "has no form with operands V*,V,F",
    "mask left out": "has no form with operands V,V,V",
    "mask never set": "mask {mr0} is not set in this block",
    "register read before set": "reads %[w] before it is set",
    "input never set": "holds a register never set",
    "half an output": "is not fully written",
    "early clobber left out": "has no early clobber",
    "write to an input": "which is an input",
    "operand never used": "is never used",
    "memory not declared": "touches memory without saying so",
    "integer where a float belongs": "has no form with operands V*,I,V",
    "zeroing with two registers": "has no evidence",
}


@pytest.fixture(scope="module")
def messages(tmp_path_factory):
    compiler = shutil.which("g++") or shutil.which("c++")
    if not compiler:
        pytest.skip("no C++ compiler")
    program = tmp_path_factory.mktemp("hazards") / "hazards"
    sources = [HERE / "hazards.cpp", TWIN / "machine.cpp", TWIN / "isa.cpp"]
    flags = ["-std=c++17", "-O1", "-ffp-contract=off"]
    subprocess.run([compiler, *flags, *map(str, sources), "-o", str(program)], check=True)
    lines = subprocess.run([str(program)], capture_output=True, text=True, check=True).stdout
    return dict(line.split(": ", 1) for line in lines.splitlines())


@pytest.mark.parametrize("name", EXPECTED)
def test_rule(messages, name):
    assert EXPECTED[name] in messages[name]
    if EXPECTED[name] != "ok" and name not in ("two cores, one address", "scalar never set"):
        # Where: kernel, core, source line.
        assert re.match(rf"kernel {name}, cluster \d+ core \d+, (\w+\.\w+)?:\d+: ", messages[name])


def test_every_case_is_expected(messages):
    assert set(messages) == set(EXPECTED)
