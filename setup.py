"""Build of the native library; everything else about the package is in pyproject.toml.

``GDN_BACKEND`` picks the accelerator beside the CPU backend: ``none``, ``cuda``, ``xpu`` (with
``XPU_TOOLKIT``), ``xpu-twin``; unset means CUDA where this torch has it and nvcc is found. A
backend that was asked for and cannot be built is an error.
"""

from __future__ import annotations

import os
import platform
import shutil
import sys
from pathlib import Path

import torch
from packaging.version import Version
from setuptools import setup
from torch.utils.cpp_extension import CUDA_HOME, BuildExtension, CppExtension, CUDAExtension

ROOT = Path(__file__).parent
sys.path.insert(0, str(ROOT))  # isolated builds do not put it there

import build_xpu  # noqa: E402


def sources(*patterns: str) -> list[str]:
    return sorted(str(p.relative_to(ROOT)) for pattern in patterns for p in ROOT.glob(pattern))


def build_info(backends: list[str]) -> str:
    """Recorded in the package, so that a load error can name both torch versions."""
    return (
        '"""Written by setup.py: what the native library was built with."""\n\n'
        f"TORCH_VERSION = {torch.__version__!r}\n"
        f"BACKENDS = {backends!r}\n"
    )


class Build(BuildExtension):
    """BuildExtension that records and prints what it made."""

    def finalize_options(self) -> None:
        super().finalize_options()
        # Without ninja, which follows headers and flags, distutils looks at sources alone: a header
        # that changed, or another GDN_BACKEND, left the library as it was and recorded the new one.
        self.force = True

    def run(self) -> None:
        super().run()
        # Beside the library, once it is there: the source tree may keep one of an earlier build.
        # The Python files of the build's own tree were collected before this command ran.
        package = (ROOT if self.inplace else Path(self.build_lib)) / "gdn_ops"
        package.mkdir(parents=True, exist_ok=True)
        (package / "_build_info.py").write_text(build_info(BACKENDS))
        print(
            f"gdn_ops: built for torch {torch.__version__}, {platform.machine()}, "
            f"backends: {', '.join(BACKENDS)}",
            file=sys.stderr,
        )


def with_cuda() -> bool:
    """Whether the CUDA backend is built: asked for, or possible and not ruled out."""
    asked = os.environ.get("GDN_BACKEND", "")
    nvcc = CUDA_HOME is not None and (Path(CUDA_HOME) / "bin" / "nvcc").exists()
    possible = torch.version.cuda is not None and nvcc
    if asked == "cuda" and not possible:
        raise RuntimeError(
            "GDN_BACKEND=cuda: expected a torch built with CUDA and its nvcc, got torch "
            f"{torch.__version__} (CUDA {torch.version.cuda}), CUDA_HOME = {CUDA_HOME}"
        )
    return asked == "cuda" or (asked == "" and possible)


def cuda_architectures() -> str:
    """Those of the devices at hand, or every generation the kernels are written for.

    9.0a rather than 9.0: the warpgroup products of Hopper exist in no other architecture's code.
    """
    if not torch.cuda.is_available():
        return "8.0;9.0a;10.0+PTX"
    found = {torch.cuda.get_device_capability(i) for i in range(torch.cuda.device_count())}
    return ";".join("9.0a" if x == (9, 0) else f"{x[0]}.{x[1]}" for x in sorted(found))


# The headers of torch 2.14 are C++20; those of 2.5 are not, and its compilers need not be.
STANDARD = "-std=c++20" if Version(torch.__version__).release >= (2, 14) else "-std=c++17"
BACKENDS = ["cpu"]
# -fopenmp: without it at::parallel_for is serial and says so nowhere.
# -g0: Python's own flags ask for debugging symbols, which make the library fifteen times larger.
# -ffp-contract=off: a fused multiply-add only where a kernel writes one, so that the same row gives
# the same bits in every code path.
FLAGS = [
    "-O3",
    STANDARD,
    "-fopenmp",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-Wall",
    "-g0",
    "-Wno-psabi",
    "-Wno-c++20-extensions",
]
if with_cuda():
    BACKENDS.append("cuda")
    os.environ.setdefault("TORCH_CUDA_ARCH_LIST", cuda_architectures())
    extension = CUDAExtension(
        "gdn_ops._C",
        sources("csrc/*.cpp", "csrc/cpu/*.cpp", "csrc/cuda/*.cpp", "csrc/cuda/kernels/*.cu"),
        extra_compile_args={"cxx": FLAGS, "nvcc": ["-O3", STANDARD]},
        extra_link_args=["-fopenmp"],
        py_limited_api=True,
    )
else:
    extension = CppExtension(
        "gdn_ops._C",
        sources("csrc/*.cpp", "csrc/cpu/*.cpp"),
        extra_compile_args=FLAGS,
        extra_link_args=["-fopenmp"],
        py_limited_api=True,
    )

BACKEND = os.environ.get("GDN_BACKEND", "")
if BACKEND not in ("", "none", "cuda", "xpu", "xpu-twin"):
    raise RuntimeError(f"GDN_BACKEND: expected none, cuda, xpu or xpu-twin, got {BACKEND!r}")
if BACKEND == "xpu-twin":
    build_xpu.add_twin(extension)
    BACKENDS.append("xpu-twin")
elif BACKEND == "xpu":
    build_xpu.add_vendor(extension, ROOT / "build" / "xpu", Path(torch.__file__).parent / "lib")
    BACKENDS.append("xpu")

setup(
    ext_modules=[extension],
    cmdclass={
        "build_ext": Build.with_options(
            use_ninja=shutil.which("ninja") is not None and os.environ.get("GDN_NINJA") != "0",
            no_python_abi_suffix=True,
        )
    },
)
