"""What setup.py adds to the extension for GDN_BACKEND=xpu-twin and GDN_BACKEND=xpu."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

ROOT = Path(__file__).parent
XPU = ROOT / "csrc" / "xpu"

# The flags of public XPU C++ projects; see docs/xpu.md, "Building on a Kunlun machine".
DEVICE_FLAGS = [
    "--sysroot=/",
    "--target=x86_64-linux-gnu",
    "-fPIC",
    "--xpu-arch=xpu3",
    "-std=c++17",
    "-O2",
    "-fno-builtin",
]


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


def add_vendor(extension, build_folder: Path) -> None:
    """The kernels compiled for xpu3, registered under the key CUDA of Kunlun's torch."""
    clang, include, library = toolchain()
    build_folder.mkdir(parents=True, exist_ok=True)
    for source in sorted(XPU.glob("kernels/*.xpu")):
        target = build_folder / f"{source.stem}.o"
        command = [str(clang), *DEVICE_FLAGS, f"-I{include}", "-c", str(source), "-o", str(target)]
        command += [f"-D{name}" for name in _switches()]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"GDN_BACKEND=xpu: {' '.join(command)} failed:\n{done.stderr}")
        extension.extra_objects.append(str(target))
    extension.sources += _relative([XPU / "ops.cpp", XPU / "chunk.cpp", XPU / "runtime/host.cpp"])
    extension.include_dirs.append(str(include))
    if Path("/usr/local/cuda/include").exists():
        extension.include_dirs.append("/usr/local/cuda/include")
    extension.library_dirs.append(str(library))
    extension.libraries.append("xpurt")
