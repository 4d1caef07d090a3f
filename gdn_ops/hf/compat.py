"""The differences between transformers versions that the patched layers must know.

Tested: see ``TESTED``. The oldest is the first whose caches keep their states in dictionaries with
``has_previous_state`` a layer attribute; older ones are refused. From 5.24 the layers call their
cache ``cache``; before, ``cache_params``.
"""

from __future__ import annotations

import inspect
import warnings

import torch
import transformers
from packaging.version import Version

OLDEST = "5.17.0"
TESTED = ("5.17.0", "5.24.0")


def check_version() -> None:
    """Refuse a transformers that is too old, or too new for this torch; say so once if it is newer
    than any tested one."""
    found = Version(transformers.__version__)
    if found < Version(OLDEST):
        raise ImportError(
            f"gdn_ops.hf: expected transformers >= {OLDEST}, got {transformers.__version__}. "
            f"Install it with: pip install 'transformers>={OLDEST}'"
        )
    if not transformers.utils.is_torch_available():  # it goes on without, and lacks its models
        raise ImportError(
            f"gdn_ops.hf: transformers {transformers.__version__} does not take torch "
            f"{torch.__version__}. With torch 2.5: pip install 'transformers=={OLDEST}'"
        )
    if (found.major, found.minor) > (Version(TESTED[-1]).major, Version(TESTED[-1]).minor):
        warnings.warn(
            f"gdn_ops.hf: transformers {transformers.__version__} is newer than the newest tested "
            f"version, {TESTED[-1]}",
            stacklevel=3,
        )


def cache_argument(layer_class: type) -> str:
    """The name under which ``layer_class.forward`` takes its cache."""
    names = inspect.signature(inspect.unwrap(layer_class.forward)).parameters
    for name in ("cache", "cache_params"):
        if name in names:
            return name
    raise ImportError(
        f"gdn_ops.hf: {layer_class.__name__}.forward of transformers {transformers.__version__} "
        f"takes no cache; its parameters are {', '.join(names)}"
    )
