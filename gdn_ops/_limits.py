"""What the kernels take: the numbers of ``csrc/args.h`` and the dtypes, and their checks in Python.

The ops check all of it themselves (``csrc/checks.cpp``). This is for code that has to know before
an op runs: what allocates pools, what falls back, what traces shapes.
"""

from __future__ import annotations

import torch

MAX_HEAD_DIM = 512  # largest K or V
MAX_WINDOW = 64  # largest R
MAX_CONV_WIDTH = 8  # largest W
MIN_CHUNK, MAX_CHUNK = 16, 128  # tokens of a chunk
DECODE_TOKENS = 16  # most tokens a sequence may bring to the fused decode step

DTYPES = (torch.float32, torch.bfloat16, torch.float16)  # of activations, states and windows


def check_range(name: str, value: int, least: int, most: int | None = None) -> None:
    """Refuse a ``value`` outside ``least`` to ``most`` (None: no upper end)."""
    if value < least or (most is not None and value > most):
        wanted = f"at least {least}" if most is None else f"{least} to {most}"
        raise ValueError(f"{name}: expected {wanted}, got {value}")


def check_window_size(window: int) -> None:
    """Refuse a window of more or fewer entries than the kernels take."""
    if not 1 <= window <= MAX_WINDOW:
        raise ValueError(f"window: expected 1 to {MAX_WINDOW} entries, got {window}")


def check_dtype(name: str, dtype: torch.dtype) -> None:
    """Refuse a ``dtype`` that no op takes."""
    if dtype not in DTYPES:
        raise ValueError(f"{name}: expected float32, bfloat16 or float16, got {dtype}")
