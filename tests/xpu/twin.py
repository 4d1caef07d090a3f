"""Tensors on the twin or on a Kunlun device, and a comparison with one bound per element."""

from __future__ import annotations

import torch

import gdn_ops  # noqa: F401  (loads the library)
from gdn_ops import _build_info, xpu_twin

EPS = {torch.float32: 2.0**-24, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}
SUBNORMAL = {torch.float32: 0.0, torch.float16: 2.0**-25, torch.bfloat16: 0.0}


def on_kunlun() -> bool:
    """Whether the library was built for Kunlun devices (``GDN_BACKEND=xpu``) and torch sees one."""
    return "xpu" in _build_info.BACKENDS and torch.cuda.is_available()


def device() -> torch.device:
    return torch.device("cuda") if on_kunlun() else xpu_twin.device()


class Ops:
    """``torch.ops.gdn``; on the twin a call that copies between device and host is an error.

    That the host reads device memory without a copy needs no check: its addresses fault there.
    """

    def __getattr__(self, name):
        op = getattr(torch.ops.gdn, name)
        if not xpu_twin.available():
            return op

        def call(*args):
            before = xpu_twin.host_copies()
            out = op(*args)
            copies = xpu_twin.host_copies() - before
            assert copies == 0, f"{name}: {copies} copies between device and host in a launch"
            return out

        return call


def to_device(x):
    """Moves a tensor, strides and all; anything else passes."""
    if not isinstance(x, torch.Tensor):
        return x
    out = torch.empty_strided(x.size(), x.stride(), dtype=x.dtype, device=device())
    out.copy_(x)
    return out


def assert_close(
    name: str, got: torch.Tensor, want: torch.Tensor, roundings: float = 1.0, noise: float = 8.0
):
    """`got` within `roundings` roundings of its dtype plus `noise` * 2^-22 of the largest value."""
    host = got.cpu().double()
    assert torch.isfinite(host).all(), f"{name}: not finite"
    bound = (roundings * 1.001 * EPS[got.dtype]) * want.abs() + SUBNORMAL[got.dtype]
    if want.numel():
        bound = bound + noise * 2.0**-22 * want.abs().max().clamp(min=1e-3)
    excess = ((host - want).abs() - bound).flatten()
    if excess.numel() and excess.max() > 0:
        at = int(excess.argmax())
        raise AssertionError(
            f"{name}: {host.flatten()[at]:.8g} against {want.flatten()[at]:.8g}, "
            f"{(host - want).abs().flatten()[at] / bound.flatten()[at]:.3g} times the bound"
        )
