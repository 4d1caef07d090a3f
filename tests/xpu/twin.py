"""The twin as a torch device, its counters, and a comparison with one bound per element."""

from __future__ import annotations

import json
import os
import types

import torch

DEVICE = "xpu_twin"
EPS = {torch.float32: 2.0**-24, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}
SUBNORMAL = {torch.float32: 0.0, torch.float16: 2.0**-25, torch.bfloat16: 0.0}


def load() -> bool:
    """Loads the library and names the device; False where the twin was not built."""
    library = os.environ.get("GDN_XPU_TWIN_LIBRARY")
    if library:
        torch.ops.load_library(library)
    else:
        import gdn_ops  # noqa: F401
    if not hasattr(torch.ops.gdn_xpu_twin, "report"):
        return False
    if torch._C._get_privateuse1_backend_name() != DEVICE:
        torch.utils.rename_privateuse1_backend(DEVICE)
    if not hasattr(torch, DEVICE):
        module = types.ModuleType(f"torch.{DEVICE}")
        module.is_available = lambda: True
        module.is_initialized = lambda: True
        module.device_count = lambda: 1
        module.current_device = lambda: 0
        module.manual_seed_all = lambda seed: None
        module._is_in_bad_fork = lambda: False
        torch._register_device_module(DEVICE, module)
    return True


def to_device(x):
    """Moves a tensor, strides and all; anything else passes."""
    if not isinstance(x, torch.Tensor):
        return x
    out = torch.empty_strided(x.size(), x.stride(), dtype=x.dtype, device=DEVICE)
    out.copy_(x)
    return out


def reports() -> list[dict]:
    """Counters of the launches since the last call."""
    return json.loads(torch.ops.gdn_xpu_twin.report())


def set_vmac(model: str) -> None:
    torch.ops.gdn_xpu_twin.configure("vmac", model)


def assert_close(name: str, got: torch.Tensor, want: torch.Tensor, roundings: float = 1.0, noise: float = 8.0):
    """`got` within `roundings` roundings of its dtype plus float32 noise relative to the largest value."""
    host = got.cpu().double()
    assert torch.isfinite(host).all(), f"{name}: not finite"
    bound = (roundings * 1.001 * EPS[got.dtype]) * want.abs() + SUBNORMAL[got.dtype]
    bound = bound + noise * 2.0**-22 * want.abs().max().clamp(min=1e-3)
    excess = (host - want).abs() - bound
    worst = int(excess.argmax()) if excess.numel() else 0
    assert excess.numel() == 0 or excess.max() <= 0, (
        f"{name}: {host.flatten()[worst]:.8g} against {want.flatten()[worst]:.8g}, "
        f"{(host - want).abs().flatten()[worst] / bound.flatten()[worst]:.3g} times the bound"
    )
