"""The XPU sources as text: evidence for every instruction, no torch, a language check."""

import importlib.util
import platform
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
    text = (XPU / "kernels" / "lang.h").read_text()
    kernels = "".join(p.read_text() for p in KERNELS if p.name != "lang.h")
    for switch in ("SCALAR_MAC", "NO_MERGE32"):
        assert f"defined(GDN_XPU_{switch})" in text and f"XPU_IF_{switch}(" in kernels
    # The scalar factor is written in functions that nothing but the switch calls.
    for name in ("multiply_add_scalar", "update_store_scalar", "decay_add_scalar"):
        uses = re.findall(rf"\S*.{{0,20}}{name}\(", kernels)
        assert all("void " in u or "XPU_IF_SCALAR_MAC(" in u for u in uses), uses


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

    A launch (`<<<`) is the one thing a host compiler cannot take; it is replaced (not so in
    test_device_source_parses_as_cuda). Assembly text is not assembled.
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


def clang_errors(path: Path, defines=(), text: str | None = None, cuda: str = "") -> list[str]:
    """What clang says about the device branch of a kernel, warnings too; `text` replaces the file.

    Unlike g++ it checks assembly blocks as the vendor's clang will: operand names in the text, and
    constraints against types. `cuda`, "host" or "device", reads the file as that half of a CUDA
    source, the nearest language that this clang knows: it checks launches and who may call whom.
    """
    cindex = pytest.importorskip("clang.cindex", reason="needs libclang (extra `test`)")
    if platform.machine() not in ("x86_64", "AMD64"):
        pytest.skip("the constraint v holds 64 bytes on x86 alone")
    # The wheel has no headers of its own; those of GCC serve.
    compiler = shutil.which("g++")
    if not compiler:
        pytest.skip("needs the headers of g++")
    found = subprocess.run(
        [compiler, "-print-file-name=include"], capture_output=True, text=True, check=True
    )
    stubs = Path(__file__).parent / "stubs"
    args = ["-std=c++17", f"-I{stubs}", "-isystem", found.stdout.strip(), "-Wall"]
    args += ["-Wno-unused-function"]
    if cuda:
        args += ["-x", "cuda", "-nocudainc", "-nocudalib", "-Wno-unknown-cuda-version"]
        args += [f"--cuda-{cuda}-only"]
    else:
        args += ["-x", "c++", "-include", str(stubs / "launch.h")]
    if cuda == "device":
        # Its target knows neither the constraint v nor half floats: no assembly, no variables that
        # only assembly sets or reads.
        args += ["-D__asm__=", "-D__volatile__(...)=", "-D_Float16=short", "-Wno-unused"]
        args += ["-Wno-uninitialized", "-Wno-sometimes-uninitialized", "--cuda-gpu-arch=sm_70"]
    else:
        args += ["-mavx512f"]
    args += [f"-D{d}" for d in defines]
    unsaved = [(str(path), text)] if text else None
    unit = cindex.Index.create().parse(str(path), args=args, unsaved_files=unsaved)
    return [f"{d.location.file}:{d.location.line}: {d.spelling}" for d in unit.diagnostics]


@pytest.mark.parametrize("defines", [[], ["GDN_XPU_SCALAR_MAC", "GDN_XPU_NO_MERGE32"]], ids=str)
@pytest.mark.parametrize("path", sorted(XPU.glob("kernels/*.xpu")), ids=lambda p: p.name)
def test_device_source_parses_with_clang(path, defines):
    assert clang_errors(path, defines) == []


@pytest.mark.parametrize(
    ("right", "wrong", "said"),
    [
        ('vstores.mz %[lo]{mr1}', 'vstores.mz %[low]{mr1}', "unknown symbolic operand name"),
        ('XPU_OP(lo, "=&v", lo)', 'XPU_OP(lo, "&v", lo)', "invalid output constraint"),
        ("XPU_SYNC_CLUSTER();", "XPU_SYNC_CLUSTER(3);", "too many arguments"),
        ("sm_put(sm + at.gates(j), 2 * i,", "sm_put(sm + at.gates(j), 2 * nothing,",
         "undeclared identifier"),
    ],
)  # fmt: skip
def test_clang_notices(right, wrong, said):
    path = XPU / "kernels" / "decode.xpu"
    text = path.read_text()
    assert right in text
    found = clang_errors(path, text=text.replace(right, wrong, 1))
    assert any(said in e for e in found), found


@pytest.mark.parametrize("side", ["host", "device"])
@pytest.mark.parametrize("path", sorted(XPU.glob("kernels/*.xpu")), ids=lambda p: p.name)
def test_device_source_parses_as_cuda(path, side):
    assert clang_errors(path, cuda=side) == []


@pytest.mark.parametrize(
    ("side", "right", "wrong", "said"),
    [
        ("host", "(decode_kernel<2, ST>)", "launch_decode", "non-global function"),
        ("host", "stream, true, p);", "stream, true, p, p);", "no matching function"),
        ("device", "XPU_INLINE void load_", "inline void load_", "reference to __host__ function"),
        ("device", "Decoder<NG, ST> d", "check_launch(0, 0); Decoder<NG, ST> d",
         "no matching function"),
    ],
)  # fmt: skip
def test_cuda_notices(side, right, wrong, said):
    path = XPU / "kernels" / "decode.xpu"
    text = path.read_text()
    assert right in text
    found = clang_errors(path, text=text.replace(right, wrong, 1), cuda=side)
    assert any(said in e for e in found), found


def test_arguments_have_no_padding():
    """A device that aligns 64 bits to 4 bytes must find every member where the host put it."""
    compiler = shutil.which("g++")
    if not compiler:
        pytest.skip("no g++")
    text = '#include "params.h"\n'
    done = subprocess.run(
        [compiler, "-std=c++17", "-fsyntax-only", "-Wpadded", "-Werror", "-x", "c++"]
        + [f"-I{XPU / 'kernels'}", "-"],
        input=text,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr


LAUNCHES = """
#include "launch.h"
#include "lang.h"
#include <cstdio>
#include <exception>
using namespace gdn::xpu;
int main() {
  const int codes[] = {(714, Launched{0}).error, (0, Launched{0}).error,
                       (static_cast<void>(0), Launched{0}).error};
  for (int code : codes) try {
    check_launch("recurrent", code);
    std::puts("ok");
  } catch (const std::exception& e) {
    std::puts(e.what());
  }
}
"""


def test_the_error_of_a_launch_is_raised(tmp_path):
    """A launch as an error code, as success, and as nothing, which a compiler may make of it."""
    compiler = shutil.which("g++")
    if not compiler:
        pytest.skip("no g++")
    source, program = tmp_path / "launches.cpp", tmp_path / "launches"
    declared = re.findall(r"^(void launch_.*\));$", (XPU / "kernels/launch.h").read_text(), re.M)
    nothing = "".join(f"{d} {{}}\n" for d in declared)
    source.write_text(f"{LAUNCHES}namespace gdn {{ namespace xpu {{\n{nothing}}} }}\n")
    flags = [f"-I{XPU / 'kernels'}", f"-I{Path(__file__).parent / 'stubs'}", "-Wno-psabi"]
    flags += ["-std=c++17", str(XPU / "runtime/host.cpp")]
    subprocess.run([compiler, str(source), *flags, "-o", str(program)], check=True)
    said = subprocess.run([str(program)], capture_output=True, text=True, check=True).stdout
    refused = "launch of the XPU kernel recurrent: the runtime says 714"
    assert said.splitlines() == [refused, "ok", "ok"]


@pytest.fixture(scope="module")
def build_xpu():
    spec = importlib.util.spec_from_file_location("build_xpu", ROOT / "build_xpu.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


COMPILER = """#!/bin/sh
# A compiler that knows no -fxpu-launch-return and cannot take decode.xpu.
for word in "$@"; do
  case "$word" in
    -fxpu-launch-return) echo "error: unknown argument: '$word'"; exit 1 ;;
    */decode.xpu) echo "decode.xpu:3: error: no matching intrinsic"; exit 1 ;;
  esac
  last=$word
done
echo "$@" > "$last"
"""


@pytest.fixture
def toolchain(tmp_path, monkeypatch):
    """Folders as a Kunlun machine has them, with a compiler that writes its arguments."""
    files = {
        "xtdk/bin/clang++": COMPILER,
        "xre/include/xpu/runtime.h": "",
        "xre/so/libxpurt.so": "",
        "xre/so/libcudart.so": "",
        "torch/libc10_cuda.so": "",
    }
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        path.chmod(0o755)
    monkeypatch.delenv("XPU_TOOLKIT", raising=False)
    monkeypatch.delenv("CLANG_PATH", raising=False)
    monkeypatch.setenv("KUNLUN_HOME", str(tmp_path))
    return tmp_path


def add_vendor(build_xpu, toolchain):
    from setuptools import Extension

    extension = Extension("gdn_ops._C", [])
    build_xpu.add_vendor(extension, toolchain / "build", toolchain / "torch")
    return extension


def test_a_kernel_that_does_not_compile_is_named_with_its_log(build_xpu, toolchain):
    with pytest.raises(RuntimeError, match="1 of 10 kernels do not compile: decode") as error:
        add_vendor(build_xpu, toolchain)
    assert "no matching intrinsic" in str(error.value)
    # The others were compiled, and every one has a log.
    logs = {p.stem for p in (toolchain / "build").glob("*.log")}
    assert logs == {p.stem for p in XPU.glob("kernels/*.xpu")} | {"probe"}
    (toolchain / "xtdk/bin/clang++").write_text("not a program")
    with pytest.raises(RuntimeError, match="10 of 10 kernels do not compile: chunk, "):
        add_vendor(build_xpu, toolchain)


def test_flags_and_libraries_of_a_vendor_build(build_xpu, toolchain, monkeypatch, capsys):
    (toolchain / "xtdk/bin/clang++").write_text(COMPILER.replace("*/decode.xpu", "*/none.xpu"))
    monkeypatch.setenv("GDN_XPU_DEFINES", "GDN_XPU_NO_MERGE32")
    monkeypatch.setenv("GDN_XPU_FLAGS", "-mllvm '-fix-mfence=all'")
    extension = add_vendor(build_xpu, toolchain)
    assert "does not take -fxpu-launch-return" in capsys.readouterr().out
    assert len(extension.extra_objects) == 10
    for path in extension.extra_objects:
        words = Path(path).read_text().split()
        assert "-fxpu-launch-return" not in words
        assert f"--target={platform.machine()}-linux-gnu" in words
        assert words[words.index("-mllvm") + 1] == "--xpu-error-lm-size=8000"
        assert "-DGDN_XPU_NO_MERGE32" in words and "-fix-mfence=all" in words
    # The launches of a newer XRE are in its cudart, the current stream in c10_cuda.
    assert extension.libraries == ["xpurt", "cudart", "c10_cuda"]
    assert extension.runtime_library_dirs == [str(toolchain / "xre/so")]


def test_missing_toolchain_is_an_error_with_a_reason(build_xpu, monkeypatch, tmp_path):
    for name in ("XPU_TOOLKIT", "CLANG_PATH", "KUNLUN_HOME"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(RuntimeError, match="neither XPU_TOOLKIT nor KUNLUN_HOME is set"):
        build_xpu.toolchain()
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "clang++").touch()
    monkeypatch.setenv("XPU_TOOLKIT", str(tmp_path))
    with pytest.raises(RuntimeError, match=re.escape("xpu/runtime.h not found")):
        build_xpu.toolchain()
