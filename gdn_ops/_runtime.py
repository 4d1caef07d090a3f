"""What the loaded library can do, and the switches that change how it computes."""

from __future__ import annotations

import torch

from gdn_ops import _build_info


def backends() -> dict[str, dict[str, object]]:
    """What was built and what is active, by device.

    ``{"cpu": {"active": "avx2", "available": ["avx2", "scalar"]}, ...}``. The CPU level is the best
    that the processor supports, or the one ``GDN_CPU_ISA`` names (an error if it cannot run here).
    """
    found: dict[str, dict[str, object]] = {
        "cpu": {"active": torch.ops.gdn.cpu_isa(), "available": torch.ops.gdn.cpu_isas()}
    }
    for name in _build_info.BACKENDS:
        if name != "cpu":
            found[name] = {"active": True}
    return found


def set_precision(mode: str) -> None:
    """Choose how products with a 16-bit state are formed, in this process.

    Args:
        mode: ``"exact"`` (the default, also ``GDN_PRECISION``): float32. ``"fast"``: in the dtype
            the state is stored in, where the processor multiplies it directly; elsewhere the same
            as exact. ``"auto"``: fast for the shapes where it was measured to be faster.

    Raises:
        RuntimeError: another mode.
    """
    torch.ops.gdn.set_precision(mode)


def get_precision() -> str:
    """The mode that :func:`set_precision` or ``GDN_PRECISION`` set."""
    return torch.ops.gdn.get_precision()
