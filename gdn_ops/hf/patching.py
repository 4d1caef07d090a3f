"""patch, unpatch, register_transformers and active: which class each layer of a model has."""

from __future__ import annotations

from typing import TypeVar

from torch import nn

from gdn_ops._limits import check_window_size
from gdn_ops._support import missing
from gdn_ops.hf.layers import CLASSES, PatchedGatedDeltaNet

Model = TypeVar("Model", bound=nn.Module)


def patch(model: Model, *, state_mode: str = "full", window: int = 16) -> Model:
    """Run the Gated DeltaNet layers of ``model`` on the ops of this package. Returns ``model``.

    Works on a whole model or a single layer, in place. Parameters, their names and the state dict
    stay; the input projections also exist packed in one buffer that is not saved. In Qwen3.5 the
    parameters become views of it, so it costs no memory; in Qwen3-Next, whose rows are grouped by
    head, it is a second copy of the input projections, refreshed when they change.

    Args:
        state_mode: "full", "buffered" (exact, the state is written once every ``window`` tokens)
            or "lowrank" (an approximation: only the last ``window`` updates are kept).
        window: R, 1 to 64.

    Raises:
        NotImplementedError: this build lacks an op that ``state_mode`` needs.
        ValueError: ``model`` has no layer that can be patched, or an argument is out of range.
    No layer has been switched then.
    """
    check_window_size(window)
    found = [
        m for m in model.modules() if type(m) in CLASSES or isinstance(m, PatchedGatedDeltaNet)
    ]
    if not found:
        raise ValueError(
            f"gdn_ops.patch: {type(model).__name__} has no layer of "
            f"{', '.join(c.__name__ for c in CLASSES)}"
        )
    for module in found:
        # Parameters on the meta device will be loaded somewhere; the layer looks again then.
        device = module.A_log.device.type
        if reason := missing(state_mode, "cpu" if device == "meta" else device):
            raise NotImplementedError(f"gdn_ops.patch: {reason}")
    for module in found:
        module.__class__ = CLASSES.get(type(module), type(module))
        module.gdn_state_mode = state_mode
        module.gdn_window = window
        module.gdn_setup()
    return model


def unpatch(model: Model) -> Model:
    """Give the layers of ``model`` their own classes back and drop the packed buffers. Returns it.

    Layers that ``register_transformers`` made go back to the class of transformers too.

    Raises:
        ValueError: a layer is sharded by heads (:class:`gdn_ops.distributed.HeadParallel`), which
            transformers' class cannot run. No layer has been switched then.
    """
    found = [m for m in model.modules() if isinstance(m, PatchedGatedDeltaNet)]
    for module in found:
        if module.num_v_heads != module.A_log.shape[0]:
            raise ValueError(
                f"gdn_ops.unpatch: a layer with {module.num_v_heads} of {module.A_log.shape[0]} "
                "value heads on this rank: only patched layers run sharded by heads"
            )
    for module in found:
        module.gdn_teardown()
        module.__class__ = module.gdn_base
    return model


def register_transformers() -> None:
    """Make ``from_pretrained`` and ``AutoModel...from_config`` build patched layers from now on.

    Uses the patch mapping of transformers; a direct ``Model(config)`` sees it only inside
    ``transformers.monkey_patching.apply_patches()``. Calling it again changes nothing.
    """
    from transformers.monkey_patching import register_patch_mapping

    register_patch_mapping({base.__name__: ours for base, ours in CLASSES.items()}, overwrite=True)


def unregister_transformers() -> None:
    """Undo :func:`register_transformers`; models already built keep their layers."""
    from transformers.monkey_patching import get_patch_mapping, unregister_patch_mapping

    mapping = get_patch_mapping()
    names = [b.__name__ for b, ours in CLASSES.items() if mapping.get(b.__name__) is ours]
    if names:
        unregister_patch_mapping(names)


def active(model: nn.Module) -> dict[str, str]:
    """Which implementation each Gated DeltaNet layer of ``model`` uses, by module name.

    Values: ``"gdn_ops (full)"``, ``"gdn_ops (buffered)"``, ``"gdn_ops (lowrank)"``, or
    ``"transformers"``, followed for a patched layer by the reason why it always falls back.
    """
    found = {}
    for name, module in model.named_modules():
        if isinstance(module, PatchedGatedDeltaNet):
            reason = module.gdn_unsupported()
            found[name] = (
                f"transformers ({reason})" if reason else f"gdn_ops ({module.gdn_state_mode})"
            )
        elif type(module) in CLASSES:
            found[name] = "transformers"
    return found
