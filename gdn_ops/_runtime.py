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
    """Choose how products are formed, in this process.

    Args:
        mode: ``"exact"`` (the default, also ``GDN_PRECISION``): from float32 operands. ``"fast"``:
            where the processor multiplies them directly, from operands rounded once, to the dtype
            that a 16-bit state is stored in or to the bfloat16 of the inputs of a chunk, with sums
            in float32; elsewhere the same as exact. ``"auto"``: fast where it was measured to be
            faster.

    Raises:
        RuntimeError: another mode.
    """
    torch.ops.gdn.set_precision(mode)


def get_precision() -> str:
    """The mode that :func:`set_precision` or ``GDN_PRECISION`` set."""
    return torch.ops.gdn.get_precision()
