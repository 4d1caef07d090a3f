"""Puts the functions of this package in an engine's place, and takes them out again.

vLLM loads :func:`register` through its ``vllm.general_plugins`` entry points, sglang
:func:`register_sglang` through its ``sglang.srt.plugins``, each in every process and before any
model. They do nothing unless ``GDN_OPS_VLLM=1``, or ``GDN_OPS_SGLANG=1``.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
import sys
from collections.abc import Callable
from types import ModuleType

from gdn_ops.compat import sglang as ours_sglang
from gdn_ops.compat import vllm as ours
from gdn_ops.compat import vllm_cpu as ours_cpu
from gdn_ops.compat import vllm_kunlun as ours_kunlun

__all__ = [
    "ENVIRONMENT",
    "install",
    "install_sglang",
    "installed",
    "register",
    "register_sglang",
    "uninstall",
]

ENVIRONMENT = {"vllm": "GDN_OPS_VLLM", "sglang": "GDN_OPS_SGLANG"}

_FLA = (
    "chunk_gated_delta_rule",
    "fused_post_conv_prep",
    "fused_recurrent_gated_delta_rule",
    "fused_recurrent_gated_delta_rule_packed_decode",
    "fused_sigmoid_gating_delta_rule_update",
)
_CONV = ("causal_conv1d_fn", "causal_conv1d_update")


def _from(source: ModuleType, *names: str, suffix: str = "") -> dict[str, Callable]:
    """What an engine's module has at each path, and whose function of the last name replaces it."""
    return {name: getattr(source, name.split(".")[-1] + suffix) for name in names}


_LAYERS = "vllm.model_executor.layers"
# Where an engine defines (or exports) each function, and what replaces it. Modules and names that a
# version lacks are passed over.
_ANY_DEVICE = {
    "vllm.third_party.flash_linear_attention.ops": _from(ours, *_FLA),
    f"{_LAYERS}.fla.ops": _from(ours, *_FLA),
    f"{_LAYERS}.mamba.ops.causal_conv1d": _from(ours, *_CONV),
}
# Since 0.33 the CPU engine calls the functions of other devices for float16 activations.
_CPU = {"vllm._custom_ops": _from(ours_cpu, *ours_cpu.__all__), **_ANY_DEVICE}
_KUNLUN = {
    "vllm_kunlun.ops.fla": _from(ours_kunlun, *(n for n in _FLA if n in ours_kunlun.__all__)),
    "vllm_kunlun.ops.mamba.causal_conv1d": _from(ours_kunlun, *_CONV),
    "vllm_kunlun.ops._kunlun_ops": _from(ours_kunlun, "KunlunOps.fused_gdn_gating"),
}
_OPS = "sglang.kernels.ops"
_SGLANG = {
    f"{_OPS}.attention.fla.chunk": _from(ours_sglang, "chunk_gated_delta_rule"),
    f"{_OPS}.attention.fla.fused_recurrent": _from(
        ours_sglang, "fused_recurrent_gated_delta_rule_packed_decode"
    ),
    f"{_OPS}.attention.linear.fused_gdn_gating": _from(ours_sglang, "fused_gdn_gating"),
    f"{_OPS}.attention.linear.fused_sigmoid_gating_recurrent": _from(
        ours_sglang, "fused_sigmoid_gating_delta_rule_update"
    ),
    f"{_OPS}.mamba.causal_conv1d_triton": _from(ours_sglang, *_CONV),
    "sglang.srt.layers.attention.mamba.causal_conv1d": _from(ours_sglang, *_CONV, suffix="_cuda"),
}

# What was replaced: (module or class, attribute, original).
_replaced: list[tuple[object, str, object]] = []


def register() -> None:
    """vLLM's entry point: :func:`install` if ``GDN_OPS_VLLM=1``, nothing if unset, empty or 0.

    Raises:
        ValueError: another value.
    """
    if _asked("vllm"):
        install()


def register_sglang() -> None:
    """sglang's entry point: :func:`install_sglang` if ``GDN_OPS_SGLANG=1``.

    Raises:
        SystemExit: another value, or the functions do not fit. sglang logs what a plug-in raises
            and serves without it, which whoever set the variable would not see.
    """
    try:
        if _asked("sglang"):
            install_sglang()
    except Exception as error:
        raise SystemExit(f"{ENVIRONMENT['sglang']}: {error}") from error


def _asked(engine: str) -> bool:
    asked = os.environ.get(ENVIRONMENT[engine], "")
    if asked not in ("", "0", "1"):
        raise ValueError(f"{ENVIRONMENT[engine]}: expected 0 or 1, got {asked!r}")
    return asked == "1"


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
    plan = _plan("vLLM", _targets())
    if not _on_kunlun():
        _check_layout()
    return _carry_out(plan)


def install_sglang() -> list[str]:
    """Replaces sglang's Gated DeltaNet functions, those with Triton's call forms (0.5.23).

    As :func:`install`.

    Raises:
        ImportError: no sglang. RuntimeError: sglang runs on a CPU or an NPU, where it calls
            functions of other packages; or passes a keyword that ours does not know; nothing has
            been replaced then.
    """
    if _replaced:
        return installed()
    utils = importlib.import_module("sglang.srt.utils")
    if utils.is_cpu() or utils.is_npu():
        raise RuntimeError("gdn_ops: sglang's engines for CPUs and NPUs call none of ours")
    return _carry_out(_plan("sglang", _SGLANG))


def _plan(engine: str, targets: dict[str, dict[str, Callable]]) -> list[tuple]:
    plan: list[tuple[object, str, object, Callable]] = []
    for module_name, functions in targets.items():
        module = _import(module_name)
        for path, replacement in functions.items() if module is not None else ():
            *outer, attribute = path.split(".")
            owner: object = module
            for part in outer:
                owner = getattr(owner, part, None)
            original = getattr(owner, attribute, None)
            if original is None:
                continue
            _check_keywords(engine, f"{module_name}.{path}", original, replacement)
            plan.append((owner, attribute, original, replacement))
    if not plan:
        raise RuntimeError(f"gdn_ops: this {engine} has none of the functions that ours replace")
    return plan


def _carry_out(plan: list[tuple]) -> list[str]:
    for owner, attribute, original, replacement in plan:
        if isinstance(owner, ModuleType):
            for module in _engine_modules():
                for name in [n for n, value in vars(module).items() if value is original]:
                    _replace(module, name, original, replacement)
        else:
            _replace(owner, attribute, owner.__dict__[attribute], staticmethod(replacement))
    return installed()


def uninstall() -> None:
    """Puts the engine's functions back, and packs the weights of loaded models as it had them."""
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
        if name.split(".")[0] in ("vllm", "vllm_kunlun", "sglang")
        and isinstance(module, ModuleType)
    ]


def _check_keywords(engine: str, where: str, original: Callable, replacement: Callable) -> None:
    known = inspect.signature(replacement).parameters
    asked = inspect.signature(original).parameters.values()
    unknown = [p.name for p in asked if p.kind is not p.VAR_KEYWORD and p.name not in known]
    if unknown:
        raise RuntimeError(
            f"gdn_ops: {where} of this {engine} has keywords that ours does not know: "
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
