"""Report what was built, what is active and what is missing, with the command that adds it.

The status is 1 if something that the package cannot work without is wrong, and 0 otherwise.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import platform
import shutil
import sys
import time

import torch
from packaging.version import Version

from gdn_ops import _build_info, _native, bench
from gdn_ops.cli._output import Output

HELP = "what was built, what is active, what is missing"

# Package, lowest version, what it serves.
PACKAGES = (
    ("torch", "2.5.1", "everything"),
    ("transformers", "5.17", "demo, patch, the fallback as a peer"),
    ("rich", "13", "this command line"),
    ("matplotlib", "3.8", "bench --plot"),
    ("numpy", "1.21", "onnxruntime as a peer"),
    ("onnx", "1.22", "onnxruntime as a peer; an oracle in the tests"),
    ("onnxruntime", "1.30", "a peer in bench"),
    ("ninja", "1.10", "faster builds"),
    ("pytest", "8", "the tests"),
)
INSTALL = "pip install --no-build-isolation ."
ENVIRONMENT = (
    "GDN_CPU_ISA",
    "GDN_PRECISION",
    "GDN_BACKEND",
    "XPU_TOOLKIT",
    "KUNLUN_HOME",
    "GDN_OPS_VLLM",
    "GDN_OPS_SGLANG",
    "OMP_NUM_THREADS",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    del parser  # it takes only what every command takes


def _packages() -> list[dict]:
    found = []
    for name, lowest, use in PACKAGES:
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            version = None
        good = version is not None and Version(version) >= Version(lowest)
        found.append(
            {
                "name": name,
                "version": version,
                "needs": lowest,
                "serves": use,
                "ok": good,
                "get": "" if good else f"pip install '{name}>={lowest}'",
            }
        )
    return found


def _cores_busy() -> float:
    """Processor time over wall time while our recurrence runs: about 1 if it runs on one thread."""
    state = torch.zeros(16, 16, 128, 128)
    q, v = torch.ones(16, 1, 16, 128), torch.ones(16, 1, 16, 128)
    g = torch.zeros(16, 1, 16)
    step = torch.ops.gdn.recurrent.default
    step(q, q, v, g, g, state)
    wall, busy = time.perf_counter(), time.process_time()
    for _ in range(20):
        step(q, q, v, g, g, state)
    return round((time.process_time() - busy) / (time.perf_counter() - wall), 2)


def _library() -> dict:
    libraries = _native.libraries()
    schemas = [s for s in torch._C._jit_get_all_schemas() if s.name.startswith("gdn::")]
    return {
        "library": str(libraries[0]) if libraries else None,
        "built_for_torch": _build_info.TORCH_VERSION,
        "built_backends": _build_info.BACKENDS,
        "cpu_isa": torch.ops.gdn.cpu_isa(),
        "cpu_isas_usable": list(torch.ops.gdn.cpu_isas()),
        "precision": torch.ops.gdn.get_precision(),
        "ops": {
            s.name.split("::")[1]: [
                key
                for key in (
                    "CPU",
                    "CUDA",
                    "PrivateUse1",
                    "CompositeExplicitAutograd",
                    "CompositeImplicitAutograd",
                )
                if torch._C._dispatch_has_kernel_for_dispatch_key(s.name, key)
            ]
            for s in sorted(schemas, key=lambda s: s.name)
        },
    }


def _backend_notes(native: dict) -> list[dict]:
    """What a backend that is not there would need."""
    notes = []
    if "xpu" in native["built_backends"]:
        # Kunlun's torch presents the chip as cuda; NVIDIA's backend is nothing to add there.
        if not torch.cuda.is_available():
            why = "built, but torch sees no device (a Kunlun device shows as cuda)"
            notes.append({"backend": "xpu (Kunlun)", "why": why, "get": ""})
        return notes
    if "cuda" not in native["built_backends"]:
        if shutil.which("nvcc") is None:
            why = "nvcc is not on PATH: install the CUDA toolkit of this torch's CUDA version"
        elif not torch.version.cuda:
            why = "this torch has no CUDA: install a CUDA build of torch"
        else:
            why = "built without it"
        notes.append({"backend": "cuda", "why": why, "get": f"GDN_BACKEND=cuda {INSTALL}"})
    elif not torch.cuda.is_available():
        notes.append({"backend": "cuda", "why": "built, but torch sees no device", "get": ""})
    if not any(b.startswith("xpu") for b in native["built_backends"]):
        notes.append(
            {
                "backend": "xpu (Kunlun)",
                "why": "built without it",
                "get": "GDN_BACKEND=xpu XPU_TOOLKIT=/path/to/xtdk KUNLUN_HOME=/path/with/xre "
                f"{INSTALL} (or GDN_BACKEND=xpu-twin for the host twin)",
            }
        )
    return notes


def _problems(native: dict, packages: list[dict]) -> list[str]:
    problems = []
    if native["built_for_torch"] != torch.__version__:
        problems.append(
            f"built for torch {native['built_for_torch']}, running on {torch.__version__}: rebuild "
            f"with {_native.REBUILD}"
        )
    if native["cpu_isa"] == "scalar" and platform.machine() in ("x86_64", "aarch64"):
        problems.append("the scalar kernels are active: slow; is GDN_CPU_ISA=scalar set?")
    problems += [
        f"{p['name']} {p['version'] or 'is missing'}: {p['get']}"
        for p in packages
        if p["name"] == "torch" and not p["ok"]
    ]
    missing = [op for op, keys in native["ops"].items() if not keys]
    if missing:
        problems.append(f"no kernel in this build for: {', '.join(missing)}")
    return problems


def run(args: argparse.Namespace, out: Output) -> tuple[int, dict]:
    native, packages = _library(), _packages()
    system = {
        "python": sys.version.split()[0],
        "platform": platform.platform(),
        "cores": os.cpu_count(),
        "torch_threads": torch.get_num_threads(),
        "cores_busy_in_recurrent": _cores_busy(),
        "torch_cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "cuda_devices": torch.cuda.device_count(),
        **{k: bench.machine()[k] for k in ("cpu", "torch")},
    }
    environment = {name: os.environ.get(name) for name in ENVIRONMENT}
    notes, problems = _backend_notes(native), _problems(native, packages)

    out.table("machine", ["what", "value"], [[k, str(v)] for k, v in system.items()])
    rows = [[k, ", ".join(v) if isinstance(v, list) else str(v)] for k, v in native.items()]
    out.table("native library", ["what", "value"], [r for r in rows if r[0] != "ops"])
    out.table(
        "ops and the dispatch keys that have a kernel",
        ["op", "keys"],
        [[op, ", ".join(keys) or "none in this build"] for op, keys in native["ops"].items()],
    )
    out.table(
        "environment", ["variable", "value"], [[k, v or "not set"] for k, v in environment.items()]
    )
    out.table(
        "packages",
        ["package", "version", "serves", "how to get it"],
        [[p["name"], p["version"] or "missing", p["serves"], p["get"]] for p in packages],
    )
    if notes:
        out.table(
            "backends not active here",
            ["backend", "why", "how to get it"],
            [[n["backend"], n["why"], n["get"]] for n in notes],
        )
    for problem in problems:
        out.console.print(f"problem: {problem}", markup=False)
    if not problems:
        out.console.print("no problem found")
    data = {
        "machine": system,
        "native": native,
        "environment": environment,
        "packages": packages,
        "backends_not_active": notes,
        "problems": problems,
    }
    return int(bool(problems)), data
