"""Gated DeltaNet operators for PyTorch: ``torch.ops.gdn.*`` with documented wrappers."""

from typing import TYPE_CHECKING

try:
    from gdn_ops import _native

    _native.load()
except (ImportError, KeyboardInterrupt) as error:  # torch takes seconds to import
    from gdn_ops.cli import _unloaded

    _unloaded.end_command(error)
    raise

from gdn_ops import xpu_twin

if xpu_twin.available():
    # Named before anything looks kernels up by the name of their device.
    xpu_twin.device()

from gdn_ops._runtime import backends, get_precision, set_precision
from gdn_ops.causal_conv1d import causal_conv1d_fn, causal_conv1d_update
from gdn_ops.fla import (
    chunk_gated_delta_rule,
    fused_recurrent_gated_delta_rule,
)
from gdn_ops.ops import paged  # noqa: F401
from gdn_ops.ops.chunk import chunk, chunk_lowrank, chunk_prefill
from gdn_ops.ops.conv import conv1d, conv_gating, short_conv
from gdn_ops.ops.decode import decode
from gdn_ops.ops.gates import gating
from gdn_ops.ops.linear import linear
from gdn_ops.ops.norm import gated_rms_norm
from gdn_ops.ops.recurrent import recurrent, recurrent_gated
from gdn_ops.ops.windows import (
    decode_buffered,
    decode_lowrank,
    recurrent_buffered,
    recurrent_lowrank,
    window_flush,
    window_reset,
)

__version__ = "0.1.0"

if TYPE_CHECKING:  # what __getattr__ brings, for editors and type checkers
    from gdn_ops import compat as compat
    from gdn_ops import distributed as distributed
    from gdn_ops import hf as hf
    from gdn_ops import nn as nn
    from gdn_ops import reference as reference
    from gdn_ops import windows as windows
    from gdn_ops.hf import active as active
    from gdn_ops.hf import patch as patch
    from gdn_ops.hf import register_transformers as register_transformers
    from gdn_ops.hf import unpatch as unpatch
    from gdn_ops.hf import unregister_transformers as unregister_transformers

# Importing these needs transformers, which the ops do not.
_FROM_HF = ("active", "patch", "register_transformers", "unpatch", "unregister_transformers")
# Imported when they are asked for: most programs need few of them.
_MODULES = ("compat", "distributed", "hf", "nn", "reference", "windows")


def __getattr__(name: str):
    from importlib import import_module

    if name in _FROM_HF:
        return getattr(import_module("gdn_ops.hf"), name)
    if name in _MODULES:
        return import_module(f"gdn_ops.{name}")
    raise AttributeError(f"module 'gdn_ops' has no attribute {name!r}")


def __dir__() -> list[str]:
    from importlib.util import find_spec

    # Not what getattr would refuse: help() and inspect.getmembers ask for every name.
    refused = () if find_spec("transformers") else (*_FROM_HF, "hf")
    return sorted({*globals(), *_FROM_HF, *_MODULES}.difference(refused))


__all__ = [
    "backends",
    "causal_conv1d_fn",
    "causal_conv1d_update",
    "chunk",
    "chunk_gated_delta_rule",
    "chunk_lowrank",
    "chunk_prefill",
    "conv1d",
    "conv_gating",
    "decode",
    "decode_buffered",
    "decode_lowrank",
    "fused_recurrent_gated_delta_rule",
    "gated_rms_norm",
    "gating",
    "get_precision",
    "linear",
    "recurrent",
    "recurrent_buffered",
    "recurrent_gated",
    "recurrent_lowrank",
    "set_precision",
    "short_conv",
    "window_flush",
    "window_reset",
]
