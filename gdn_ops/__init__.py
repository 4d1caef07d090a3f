"""Gated DeltaNet operators for PyTorch: ``torch.ops.gdn.*`` with documented wrappers."""

from gdn_ops import _native

_native.load()

from gdn_ops._runtime import backends, get_precision, set_precision  # noqa: E402
from gdn_ops.ops.conv import conv1d, conv_gating, short_conv  # noqa: E402
from gdn_ops.ops.decode import decode  # noqa: E402
from gdn_ops.ops.gates import gating  # noqa: E402
from gdn_ops.ops.norm import gated_rms_norm  # noqa: E402
from gdn_ops.ops.recurrent import recurrent, recurrent_gated  # noqa: E402

__version__ = "0.1.0"

__all__ = [
    "backends",
    "conv1d",
    "conv_gating",
    "decode",
    "gated_rms_norm",
    "gating",
    "get_precision",
    "recurrent",
    "recurrent_gated",
    "set_precision",
    "short_conv",
]
