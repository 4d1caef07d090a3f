"""Loads the native library, or says why it cannot be loaded and what to do about it."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

REBUILD = "pip install --no-build-isolation --force-reinstall --no-deps ."


def libraries() -> list[Path]:
    """The native libraries beside this file; :func:`load` takes the first."""
    here = Path(__file__).resolve().parent
    return sorted(here.glob("_C*.so")) + sorted(here.glob("_C*.pyd"))


def load() -> Path:
    """Load ``gdn_ops/_C*.so`` into torch's dispatcher and return its path.

    Raises:
        ImportError: the library is missing, or was built for another torch; the message names both
            versions and the command that rebuilds it, or the package with a library that this one
            hides.
    """
    here = Path(__file__).resolve().parent
    candidates = libraries()
    try:
        from gdn_ops._build_info import TORCH_VERSION as built_for
    except ImportError:
        built_for = "unknown"
    if not candidates:
        # Python looks into the directory it runs in first: a source tree there hides the package
        # that was installed from it.
        others = [p for p in (Path(x).resolve() / "gdn_ops" for x in sys.path) if p != here]
        hidden = next((p for p in others if any(p.glob("_C*.so"))), None)
        get = (
            f"Build it with: {REBUILD}"
            if hidden is None
            else f"That of {hidden} is not used, because this directory comes first in sys.path: "
            "run Python elsewhere, or install this tree with --editable"
        )
        raise ImportError(f"gdn_ops: the native library is missing from {here}. {get}")
    try:
        torch.ops.load_library(str(candidates[0]))
    except OSError as error:
        raise ImportError(
            f"gdn_ops: the native library was built for torch {built_for} and does not load into "
            f"torch {torch.__version__}. Rebuild it with: {REBUILD}\nThe loader said: {error}"
        ) from error
    return candidates[0]
