"""Gated DeltaNet operators for PyTorch."""

from gdn_ops import _native

_native.load()

from gdn_ops.ops.recurrent import recurrent, recurrent_gated  # noqa: E402

__all__ = ["recurrent", "recurrent_gated"]
