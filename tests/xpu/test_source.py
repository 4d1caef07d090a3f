"""The XPU sources as text: evidence for every instruction, no torch, a language check."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
XPU = ROOT / "csrc" / "xpu"
KERNELS = sorted([*XPU.glob("kernels/*.xpu"), *XPU.glob("kernels/*.h")])
pytestmark = pytest.mark.needs_no_twin

INSTRUCTION = re.compile(r'"([a-z][\w.]*) [^"]*\\n"')


def instructions():
    found = {}
    for path in KERNELS:
        for m in INSTRUCTION.finditer(path.read_text()):
            found.setdefault(m[1], path.name)
    return found


def table():
    text = (XPU / "twin" / "isa.cpp").read_text()
    rows = re.findall(r'\{"([\w.]+)", "([^"]+)", Op::\w+, (\w+),\s*"((?:[^"]|"\s*")+)"\}', text)
    return [
        (m, operands, proof == "kSeen", re.sub(r'"\s*"', "", why))
        for m, operands, proof, why in rows
    ]


def test_every_mnemonic_has_evidence():
    known = {m for m, *_ in table()}
    assert len(instructions()) >= 15, "the pattern no longer finds the instructions"
    missing = {m: f for m, f in instructions().items() if m not in known}
    assert not missing, f"instructions without an entry in csrc/xpu/twin/isa.cpp: {missing}"


def test_every_form_is_used_or_said_to_be_a_check():
    used = set(instructions())
    unused = {m for m, *_ in table()} - used
    assert not unused, f"forms in the table that no kernel uses: {unused}"


def test_inferred_forms_are_behind_a_switch():
    inferred = [row for row in table() if not row[2]]
    assert [row[:2] for row in inferred] == [("vmac.f.mz.rn", "V*,F,V")]
    assert "GDN_XPU_SCALAR_MAC" in (XPU / "kernels" / "vector.h").read_text()


def test_document_lists_every_form():
    text = (ROOT / "docs" / "xpu.md").read_text()
    missing = {m for m, *_ in table() if f"`{m}" not in text}
    assert not missing, f"docs/xpu.md does not name: {missing}"


@pytest.mark.parametrize("path", KERNELS, ids=lambda p: p.name)
def test_kernels_know_nothing_of_torch(path):
    includes = re.findall(r"#include\s+[<\"]([^>\"]+)", path.read_text())
    assert not [i for i in includes if re.match(r"(torch|ATen|c10)/", i)]


@pytest.mark.parametrize("defines", [[], ["GDN_XPU_SCALAR_MAC"], ["GDN_XPU_NO_MERGE32"]], ids=str)
@pytest.mark.parametrize("path", sorted(XPU.glob("kernels/*.xpu")), ids=lambda p: p.name)
def test_device_source_parses(path, defines):
    """The device branch of every kernel on a host compiler, the vendor's declarations stubbed.

    A launch (`<<<`) is the one thing a host compiler cannot take; it is replaced. Assembly text is
    not assembled.
    """
    compiler = shutil.which("clang++") or shutil.which("g++")
    if not compiler:
        pytest.skip("no C++ compiler")
    stubs = Path(__file__).parent / "stubs"
    command = [
        compiler,
        "-std=c++17",
        "-fsyntax-only",
        "-x",
        "c++",
        f"-I{stubs}",
        "-Wno-attributes",
    ]
    command += ["-Wno-psabi", "-include", str(stubs / "launch.h"), *[f"-D{d}" for d in defines]]
    done = subprocess.run([*command, str(path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]


def test_missing_toolchain_is_an_error_with_a_reason(monkeypatch, tmp_path):
    import importlib.util

    spec = importlib.util.spec_from_file_location("build_xpu", ROOT / "build_xpu.py")
    build_xpu = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(build_xpu)
    for name in ("XPU_TOOLKIT", "CLANG_PATH", "KUNLUN_HOME"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(RuntimeError, match="neither XPU_TOOLKIT nor KUNLUN_HOME is set"):
        build_xpu.toolchain()
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "clang++").touch()
    monkeypatch.setenv("XPU_TOOLKIT", str(tmp_path))
    with pytest.raises(RuntimeError, match=re.escape("xpu/runtime.h not found")):
        build_xpu.toolchain()
