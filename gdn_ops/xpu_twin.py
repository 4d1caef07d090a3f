"""The host twin of a Kunlun XPU3 as a torch device, in builds made with ``GDN_BACKEND=xpu-twin``.

The twin runs the XPU kernels' own source on the host: their assembly text through an interpreter,
their transfers and fences against a model stricter than any public statement about the chip.
Nothing it says is about speed. ``docs/xpu.md``: what it checks, and what only hardware can tell.

Example:
    >>> from gdn_ops import xpu_twin
    >>> device = xpu_twin.device()              # torch.device("xpu_twin")
    >>> o = torch.ops.gdn.recurrent(*(x.to(device) for x in (q, k, v, g, beta, state)))
"""

from __future__ import annotations

import contextlib
import json
import types

import torch

NAME = "xpu_twin"

__all__ = [
    "available",
    "device",
    "forms",
    "host_copies",
    "reports",
    "set_mutation",
    "set_switch",
    "set_vmac",
    "sites",
]


def available() -> bool:
    """Whether the loaded library contains the twin."""
    return hasattr(torch.ops.gdn_xpu_twin, "report")


def device() -> torch.device:
    """The twin's device; the first call names torch's PrivateUse1 backend ``xpu_twin``.

    Raises:
        RuntimeError: the library was built without the twin, or another package has named the
            PrivateUse1 backend.
    """
    if not available():
        raise RuntimeError("gdn_ops: built without the XPU twin; rebuild with GDN_BACKEND=xpu-twin")
    if torch._C._get_privateuse1_backend_name() != NAME:
        torch.utils.rename_privateuse1_backend(NAME)
    if not hasattr(torch, NAME):
        module = types.ModuleType(f"torch.{NAME}")
        module.is_available = lambda: True
        module.is_initialized = lambda: True
        module.device_count = lambda: 1
        module.current_device = lambda: 0
        module.set_device = lambda index: None
        module.device = lambda index: contextlib.nullcontext()
        module.synchronize = lambda index=None: None
        module.manual_seed_all = lambda seed: None
        # Random numbers come from the CPU fallback, and so does their state.
        module.get_rng_state = lambda device=None: torch.get_rng_state()
        module.set_rng_state = lambda state, device=None: torch.set_rng_state(state)
        module.get_amp_supported_dtype = lambda: [torch.float16, torch.bfloat16]
        module._is_in_bad_fork = lambda: False
        torch._register_device_module(NAME, module)
    return torch.device(NAME)


def reports() -> list[dict]:
    """Counters of the launches since the last call: bytes, instructions, local memory, balance."""
    return json.loads(torch.ops.gdn_xpu_twin.report())


def forms() -> list[dict]:
    """The instruction forms the interpreter knows, each with its public evidence."""
    return json.loads(torch.ops.gdn_xpu_twin.forms())


def host_copies() -> int:
    """Copies between host and device so far, single values too, save what CPU operators did."""
    return torch.ops.gdn_xpu_twin.host_copies()


def sites() -> list[str]:
    """Places in the kernels run so far that :func:`set_mutation` can break, as ``"kind place"``."""
    return torch.ops.gdn_xpu_twin.sites()


def set_vmac(model: str) -> None:
    """``"fused"`` (one rounding) or ``"unfused"`` (two): which one the chip has is not public."""
    torch.ops.gdn_xpu_twin.configure("vmac", model)


def set_switch(name: str, on: bool) -> None:
    """Runs the kernels as a build with ``-D name`` would: ``GDN_XPU_SCALAR_MAC``, ``..NO_MERGE32``.

    See docs/xpu.md, "Switches".
    """
    torch.ops.gdn_xpu_twin.configure(name, "1" if on else "0")


def set_mutation(text: str) -> None:
    """Breaks the kernels in one place until called with ``""``; for tests of the tests."""
    torch.ops.gdn_xpu_twin.configure("mutate", text)
