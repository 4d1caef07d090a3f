"""Gated DeltaNet layers of transformers (Qwen3-Next, Qwen3.5 and their MoE forms) on these ops.

``patch(model)`` switches a live model, ``unpatch(model)`` switches it back;
``register_transformers()`` makes ``from_pretrained`` build patched layers. ``active(model)`` says
which implementation each layer uses.
"""

from gdn_ops.hf.compat import check_version

check_version()  # before an older transformers lacks a model below, without a word about why

from gdn_ops.hf.patching import (  # noqa: E402
    active,
    patch,
    register_transformers,
    unpatch,
    unregister_transformers,
)

__all__ = ["active", "patch", "register_transformers", "unpatch", "unregister_transformers"]
