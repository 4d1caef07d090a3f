"""Puts the functions of this package in vLLM's place, and takes them out again.

vLLM loads :func:`register` through its ``vllm.general_plugins`` entry points, in every process and
before any model. It does nothing unless ``GDN_OPS_VLLM=1``.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
import sys
from collections.abc import Callable
from types import ModuleType

from gdn_ops.compat import vllm as ours
from gdn_ops.compat import vllm_cpu as ours_cpu
from gdn_ops.compat import vllm_kunlun as ours_kunlun

__all__ = ["ENVIRONMENT", "install", "installed", "register", "uninstall"]

ENVIRONMENT = "GDN_OPS_VLLM"

_FLA = (
    "chunk_gated_delta_rule",
    "fused_post_conv_prep",
    "fused_recurrent_gated_delta_rule",
    "fused_recurrent_gated_delta_rule_packed_decode",
    "fused_sigmoid_gating_delta_rule_update",
)
_CONV = ("causal_conv1d_fn", "causal_conv1d_update")
_LAYERS = "vllm.model_executor.layers"
# Where vLLM defines (or exports) each function, and whose function replaces it. Modules and names
# that a version lacks are passed over.
_ANY_DEVICE = (
    ("vllm.third_party.flash_linear_attention.ops", ours, _FLA),
    (f"{_LAYERS}.fla.ops", ours, _FLA),
    (f"{_LAYERS}.mamba.ops.causal_conv1d", ours, _CONV),
)
# Since 0.33 the CPU engine calls the functions of other devices for float16 activations.
_CPU = (("vllm._custom_ops", ours_cpu, tuple(ours_cpu.__all__)), *_ANY_DEVICE)
_KUNLUN = (
    ("vllm_kunlun.ops.fla", ours_kunlun, _FLA),
    ("vllm_kunlun.ops.mamba.causal_conv1d", ours_kunlun, _CONV),
    ("vllm_kunlun.ops._kunlun_ops", ours_kunlun, ("KunlunOps.fused_gdn_gating",)),
)

# What was replaced: (module or class, attribute, original).
_replaced: list[tuple[object, str, object]] = []


def register() -> None:
    """The entry point: :func:`install` if ``GDN_OPS_VLLM=1``, nothing if it is unset, empty or 0.

    Raises:
        ValueError: another value.
    """
    asked = os.environ.get(ENVIRONMENT, "")
    if asked not in ("", "0", "1"):
        raise ValueError(f"{ENVIRONMENT}: expected 0 or 1, got {asked!r}")
    if asked == "1":
        install()


def installed() -> list[str]:
    """``module.function`` of everything that is replaced now."""
    return [f"{_name(owner)}.{attribute}" for owner, attribute, _ in _replaced]


def install() -> list[str]:
    """Replaces vLLM's Gated DeltaNet functions (and vLLM-Kunlun's, where it is installed).

    Each function is replaced where it is defined and in every module that has already imported it
    by name, so it matters only that models are loaded afterwards: vLLM packs weights then. A second
    call does nothing.

    Returns:
        :func:`installed`.

    Raises:
        ImportError: no vLLM. RuntimeError: this vLLM has its state pool as ``[HV, K, V]`` (before
            0.16), or passes a keyword that ours does not know; nothing has been replaced then.
    """
    if _replaced:
        return installed()
    plan: list[tuple[object, str, object, Callable]] = []
    for module_name, source, names in _targets():
        module = _import(module_name)
        for path in names if module is not None else ():
            *outer, attribute = path.split(".")
            owner: object = module
            for part in outer:
                owner = getattr(owner, part, None)
            original = getattr(owner, attribute, None)
            if original is None:
                continue
            replacement = getattr(source, attribute)
            _check_keywords(f"{module_name}.{path}", original, replacement)
            plan.append((owner, attribute, original, replacement))
    if not plan:
        raise RuntimeError("gdn_ops: this vLLM has none of the functions that ours replace")
    if not _on_kunlun():
        _check_layout()
    for owner, attribute, original, replacement in plan:
        if isinstance(owner, ModuleType):
            for module in _engine_modules():
                for name in [n for n, value in vars(module).items() if value is original]:
                    _replace(module, name, original, replacement)
        else:
            _replace(owner, attribute, owner.__dict__[attribute], staticmethod(replacement))
    return installed()


def uninstall() -> None:
    """Puts vLLM's functions back, and packs the weights of loaded models as it expects them."""
    pack = None
    for owner, attribute, original in reversed(_replaced):
        setattr(owner, attribute, original)
        if attribute == "causal_conv1d_weight_pack":
            pack = original
    _replaced.clear()
    if pack is not None:
        ours_cpu.repack_weights(pack)


def _replace(owner: object, attribute: str, original: object, replacement: object) -> None:
    _replaced.append((owner, attribute, original))
    setattr(owner, attribute, replacement)


def _name(owner: object) -> str:
    if isinstance(owner, ModuleType):
        return owner.__name__
    return f"{owner.__module__}.{owner.__qualname__}"


def _on_kunlun() -> bool:
    return importlib.util.find_spec("vllm_kunlun") is not None


def _targets():
    if _on_kunlun():  # it has models of its own, which call nothing of vLLM's
        return _KUNLUN
    from vllm.platforms import current_platform

    return _CPU if current_platform.is_cpu() else _ANY_DEVICE


def _import(name: str) -> ModuleType | None:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and (name == error.name or name.startswith(error.name + ".")):
            return None  # this version, or this installation, has no such module
        raise


def _engine_modules() -> list[ModuleType]:
    return [
        module
        for name, module in list(sys.modules.items())
        if name.split(".")[0] in ("vllm", "vllm_kunlun") and isinstance(module, ModuleType)
    ]


def _check_keywords(where: str, original: Callable, replacement: Callable) -> None:
    known = inspect.signature(replacement).parameters
    asked = inspect.signature(original).parameters.values()
    unknown = [p.name for p in asked if p.kind is not p.VAR_KEYWORD and p.name not in known]
    if unknown:
        raise RuntimeError(
            f"gdn_ops: {where} of this vLLM has keywords that ours does not know: "
            f"{', '.join(unknown)}"
        )


def _check_layout() -> None:
    """The pool's shape is the only thing that tells the older layout from ours."""
    utils = _import(f"{_LAYERS}.mamba.mamba_utils")
    shape = utils.MambaStateShapeCalculator.gated_delta_net_state_shape(1, 1, 1, 2, 3, 4)[1]
    if tuple(shape) != (1, 3, 2):
        raise RuntimeError(
            f"gdn_ops: expected a state pool [HV, V, K], got {tuple(shape)} for HV, V, K = 1, 3, 2:"
            " vLLM before 0.16 is not supported"
        )
