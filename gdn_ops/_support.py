"""What the loaded library has kernels for, by state mode and kind of device."""

from __future__ import annotations

import torch

from gdn_ops._compile import constant

STATE_MODES = ("full", "buffered", "lowrank")


def devices_with(op: str, *, autograd: bool = False) -> frozenset[str]:
    """Device types for which the library that is loaded has a kernel of ``op``, and "meta": every
    op has a fake."""
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    name = f"gdn::{op}"
    if autograd and not any(has(name, key) for key in ("Autograd", "AutogradCPU", "AutogradCUDA")):
        return frozenset()
    keys = {"CPU": "cpu", "CUDA": "cuda", "PrivateUse1": torch._C._get_privateuse1_backend_name()}
    return frozenset(device for key, device in keys.items() if has(name, key)) | {"meta"}


# The ops that a layer calls without gradients. For "full" chunk_prefill is not among them: where
# it has no kernel, a prefill runs token by token.
_NEEDS = {
    "full": ("conv_gating", "recurrent", "gated_rms_norm", "decode"),
    "buffered": ("conv_gating", "recurrent", "gated_rms_norm", "decode_buffered", "window_flush"),
    "lowrank": ("conv_gating", "gated_rms_norm", "decode_lowrank", "chunk_lowrank"),
}
# Looked up once, so that torch.compile sees constants.
_KERNELS = {
    op: devices_with(op)
    for op in {op for needed in _NEEDS.values() for op in needed} | {"chunk_prefill"}
}
_TRAINABLE = frozenset.intersection(
    *(devices_with(op, autograd=True) for op in ("conv1d", "gating", "chunk", "gated_rms_norm"))
)


def check_mode(state_mode: str) -> None:
    """Refuse a ``state_mode`` that does not exist."""
    if state_mode not in STATE_MODES:
        raise ValueError(f"state_mode: expected one of {STATE_MODES}, got {state_mode!r}")


@constant  # of one build
def missing(state_mode: str, device_type: str) -> str | None:
    """Why ``state_mode`` cannot run on this kind of device, or None."""
    check_mode(state_mode)
    absent = [op for op in _NEEDS[state_mode] if device_type not in _KERNELS[op]]
    if absent:
        return (
            f"state_mode {state_mode!r} needs gdn::{', gdn::'.join(absent)} on {device_type}, "
            "which this build does not have"
        )
    return None


def prefills_in_chunks(device_type: str) -> bool:
    """Whether ``chunk_prefill`` has a kernel on this kind of device."""
    return device_type in _KERNELS["chunk_prefill"]


def trainable(device_type: str) -> bool:
    """Whether every op of a layer that needs gradients has a backward on this kind of device."""
    return device_type in _TRAINABLE
