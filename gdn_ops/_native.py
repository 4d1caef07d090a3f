"""Loads the native library, or says why it cannot be loaded and what to do about it."""

from __future__ import annotations

from pathlib import Path

import torch

REBUILD = "pip install --no-build-isolation --force-reinstall --no-deps ."


def load() -> Path:
    """Load ``gdn_ops/_C*.so`` into torch's dispatcher and return its path.

    Raises:
        ImportError: the library is missing, or was built for another torch; the message names both
            versions and the command that rebuilds it.
    """
    here = Path(__file__).parent
    candidates = sorted(here.glob("_C*.so")) + sorted(here.glob("_C*.pyd"))
    try:
        from gdn_ops._build_info import TORCH_VERSION as built_for
    except ImportError:
        built_for = "unknown"
    if not candidates:
        raise ImportError(
            f"gdn_ops: the native library is missing from {here}. Build it with: {REBUILD}"
        )
    try:
        torch.ops.load_library(str(candidates[0]))
    except OSError as error:
        raise ImportError(
            f"gdn_ops: the native library was built for torch {built_for} and does not load into "
            f"torch {torch.__version__}. Rebuild it with: {REBUILD}\nThe loader said: {error}"
        ) from error
    return candidates[0]
