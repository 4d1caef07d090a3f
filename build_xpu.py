"""What setup.py adds to the extension for GDN_BACKEND=xpu-twin and GDN_BACKEND=xpu."""

from __future__ import annotations

import os
import platform
import shlex
import subprocess
from pathlib import Path

ROOT = Path(__file__).parent
XPU = ROOT / "csrc" / "xpu"

# The flags of public XPU C++ projects; see docs/xpu.md, "Building on a Kunlun machine". One is
# ours: products and sums of scalars round apart, as on the twin.
DEVICE_FLAGS = [
    "--sysroot=/",
    f"--target={platform.machine()}-linux-gnu",
    "-fPIC",
    "--xpu-arch=xpu3",
    "-std=c++17",
    "-O2",
    "-fno-builtin",
    "-ffp-contract=off",
]
# Taken where the compiler knows them: launches return their error; more local memory than a core
# has is an error of the compiler, where it would otherwise be overwritten on the device.
OPTIONAL_FLAGS = [["-fxpu-launch-return"], ["-mllvm", "--xpu-error-lm-size=8000"]]


def _relative(paths) -> list[str]:
    return sorted(str(p.relative_to(ROOT)) for p in paths)


def add_twin(extension) -> None:
    """The kernels run by the host twin, registered under PrivateUse1."""
    extension.sources += _relative(
        [*XPU.glob("*.cpp"), *XPU.glob("twin/*.cpp"), XPU / "runtime/host.cpp"]
    )
    extension.define_macros.append(("GDN_XPU_TWIN", "1"))
    extension.define_macros += [(name, "1") for name in _switches()]


def _switches() -> list[str]:
    """Names in GDN_XPU_DEFINES: forms of docs/xpu.md, "Evidence", taken or replaced."""
    return [name for name in os.environ.get("GDN_XPU_DEFINES", "").split(",") if name]


def _first(what: str, candidates: list[Path]) -> Path:
    for path in candidates:
        if path.exists():
            return path
    tried = ", ".join(map(str, candidates)) or "nothing: neither XPU_TOOLKIT nor KUNLUN_HOME is set"
    raise RuntimeError(
        f"GDN_BACKEND=xpu: {what} not found (tried {tried}). Set XPU_TOOLKIT to the XTDK "
        "folder and KUNLUN_HOME to the folder that holds xre, or build GDN_BACKEND=xpu-twin to run "
        "the kernels on the host."
    )


def toolchain() -> tuple[Path, Path, Path]:
    """``(clang++, include folder, library folder)``, or an error that says what is missing."""
    home = os.environ.get("KUNLUN_HOME")
    toolkit = os.environ.get("XPU_TOOLKIT") or os.environ.get("CLANG_PATH")
    tool_roots = [Path(p) for p in (toolkit, home and f"{home}/xtdk") if p]
    xre_roots = [Path(p) for p in (home and f"{home}/xre", toolkit) if p]
    clang = _first("the XPU compiler clang++", [r / "bin" / "clang++" for r in tool_roots])
    header = _first("xpu/runtime.h", [r / "include" / "xpu" / "runtime.h" for r in xre_roots])
    library = _first(
        "libxpurt.so",
        [r / folder / "libxpurt.so" for r in xre_roots for folder in ("so", "lib64", "lib")],
    )
    return clang, header.parent.parent, library.parent


def _compile(clang: Path, flags: list[str], source: Path, folder: Path) -> tuple[Path, Path, bool]:
    """``(object, log, whether it compiled)``; the log has the command and what came of it."""
    target, log = folder / f"{source.stem}.o", folder / f"{source.stem}.log"
    command = [str(clang), *flags, "-c", str(source), "-o", str(target)]
    try:
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        said, status = done.stdout.decode(errors="replace"), done.returncode
    except OSError as error:
        said, status = str(error), 1
    log.write_text(f"{shlex.join(command)}\n{said}")
    return target, log, status == 0


def compile_kernels(clang: Path, include: Path, folder: Path) -> list[str]:
    """Objects of all kernels. What the compiler says of each stands beside its object, in a log."""
    folder.mkdir(parents=True, exist_ok=True)
    flags = [*DEVICE_FLAGS, f"-I{include}"]
    empty = folder / "probe.xpu"
    empty.write_text("int gdn_probe;\n")
    for optional in OPTIONAL_FLAGS:
        if _compile(clang, [*flags, *optional], empty, folder)[2]:
            flags += optional
        else:
            print(f"gdn_ops: this XPU compiler does not take {shlex.join(optional)}")
    flags += [f"-D{name}" for name in _switches()]
    flags += shlex.split(os.environ.get("GDN_XPU_FLAGS", ""))
    objects, failed = [], []
    for source in sorted(XPU.glob("kernels/*.xpu")):
        target, log, compiled = _compile(clang, flags, source, folder)
        objects.append(str(target))
        if not compiled:
            failed.append(log)
    if failed:
        names = ", ".join(log.stem for log in failed)
        raise RuntimeError(
            f"GDN_BACKEND=xpu: {len(failed)} of {len(objects)} kernels do not compile: {names}. "
            f"Every kernel has a log in {folder}; that of {failed[0].stem} begins:\n"
            f"{failed[0].read_text()[:4000]}"
        )
    return objects


def add_vendor(extension, build_folder: Path, torch_lib: Path) -> None:
    """The kernels compiled for xpu3, registered under the key CUDA of Kunlun's torch."""
    clang, include, library = toolchain()
    extension.extra_objects += compile_kernels(clang, include, build_folder)
    extension.sources += _relative([XPU / "ops.cpp", XPU / "chunk.cpp", XPU / "runtime/host.cpp"])
    extension.include_dirs.append(str(include))
    cuda = [os.environ.get("CUDA_HOME"), "/usr/local/cuda"]
    extension.include_dirs += [f"{c}/include" for c in cuda if c and Path(c, "include").exists()]
    extension.library_dirs.append(str(library))
    extension.runtime_library_dirs.append(str(library))
    extension.libraries.append("xpurt")
    # A newer XRE has the launches in a cudart of its own; the current stream is c10_cuda's, whose
    # folder a C++ extension knows.
    for name, folder in (("cudart", library), ("c10_cuda", torch_lib)):
        if (folder / f"lib{name}.so").exists():
            extension.libraries.append(name)
