"""Readers of arguments: what does not fit is an error of usage before anything runs.

The factories make the ``type`` of an ``argparse`` argument; :func:`items` reads a list.
"""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from gdn_ops import xpu_twin
from gdn_ops.bench._timing import DTYPES
from gdn_ops.cli._output import UsageError

LARGEST = 2**31 - 1  # of sizes: torch has no words for one that needs more than 64 bits


def whole(least: int, most: int = LARGEST) -> Callable[[str], int]:
    """A whole number in a range."""

    def read(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = None
        if value is None or not least <= value <= most:
            wanted = f"a whole number of at least {least}"
            if most < LARGEST or (value is not None and value > most):
                wanted += f", at most {most}"
            raise argparse.ArgumentTypeError(f"expected {wanted}, got {text!r}")
        return value

    return read


def rate(text: str) -> float:
    """A number above zero that is not infinite."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"expected a number above 0, got {text!r}")
    return value


def new_file(text: str) -> str:
    """A path that can be written when the command is done, as far as one can tell before."""
    path = Path(text)
    there = path if path.exists() else path.parent
    if not text or path.is_dir():
        raise argparse.ArgumentTypeError(f"expected a path to write to, got {text!r}")
    if not there.exists():
        raise argparse.ArgumentTypeError(f"no directory {str(there)!r}")
    if not os.access(there, os.W_OK):
        raise argparse.ArgumentTypeError(f"{str(there)!r} cannot be written")
    return text


SEED = whole(0, 2**62)
MODES = ("exact", "fast", "auto")
DEVICES = ("cpu", "cuda", "xpu-twin")


def device(name: str) -> torch.device:
    """The device behind a name of :data:`DEVICES`.

    Raises:
        UsageError: this build or this machine does not have it.
    """
    if name == "xpu-twin":
        if not xpu_twin.available():
            raise UsageError(
                "--device xpu-twin: built without it; rebuild with GDN_BACKEND=xpu-twin"
            )
        return xpu_twin.device()
    if name == "cuda":
        if not torch._C._dispatch_has_kernel_for_dispatch_key("gdn::recurrent", "CUDA"):
            raise UsageError(
                "--device cuda: this build has no kernels for it; rebuild with GDN_BACKEND=cuda "
                "(NVIDIA) or GDN_BACKEND=xpu (Kunlun, whose torch calls its device cuda)"
            )
        if not torch.cuda.is_available():
            raise UsageError("--device cuda: torch sees no such device")
    return torch.device(name)


def items(text: str | None, what: str, convert: Callable[[str], Any]) -> tuple:
    """The items of a list with commas; none where no list was given."""
    if text is None:
        return ()
    try:
        return tuple(convert(item.strip()) for item in text.split(","))
    except ValueError as error:
        raise UsageError(f"--{what}: cannot read {text!r}: {error}") from error


def number(text: str) -> int:
    try:
        value = int(text)
    except ValueError:
        raise ValueError(f"expected whole numbers, got {text!r}") from None
    if value > LARGEST:
        raise ValueError(f"expected at most {LARGEST}, got {text}")
    return value


def batch(text: str) -> int:
    value = number(text)
    if value < 1:
        raise ValueError(f"expected at least 1, got {text}")
    return value


def heads(text: str) -> tuple[int, int]:
    pair = [number(x) for x in text.split("/")]
    if len(pair) != 2:
        raise ValueError(f"expected key/value heads, like 16/48, got {text!r}")
    keys, values = pair
    if keys < 1 or values < 1 or values % keys:
        raise ValueError(f"{text}: value heads must be a multiple of key heads")
    return keys, values


def mode(text: str) -> str:
    """A mode of :func:`gdn_ops.set_precision`."""
    if text not in MODES:
        raise ValueError(f"expected some of {', '.join(MODES)}, got {text!r}")
    return text


def dtype(text: str) -> str:
    """A name of :data:`gdn_ops.bench._timing.DTYPES`."""
    if text not in DTYPES:
        raise ValueError(f"expected some of {', '.join(DTYPES)}, got {text!r}")
    return text


def need_transformers(what: str) -> None:
    """Refuse, and say in a line why, where there is none that gdn_ops.hf takes."""
    try:
        import gdn_ops.hf  # noqa: F401
    except ModuleNotFoundError as error:
        raise UsageError(f"{what} needs transformers: pip install 'transformers>=5.17'") from error
    except ImportError as error:
        raise UsageError(str(error)) from error
