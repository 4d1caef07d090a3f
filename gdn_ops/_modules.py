"""What calling a module of torch would run, and what may run in its place."""

from __future__ import annotations

from typing import TypeVar

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensor
from torch.nn import functional as F

from gdn_ops._compile import constant
from gdn_ops._limits import DTYPES

_linear = torch.ops.gdn.linear.default
Parameter = TypeVar("Parameter", bound="Tensor | None")


@constant  # torch.compile does not guard hooks
def has_global_hooks() -> bool:
    """Whether calling any module runs something beside its ``forward``."""
    every = nn.modules.module  # torch's own `_has_any_global_hook` came after 2.5
    hooks = (
        every._global_forward_hooks, every._global_forward_pre_hooks,
        every._global_backward_hooks, every._global_backward_pre_hooks,
    )  # fmt: skip
    return any(hooks)


def has_own_hooks(module: nn.Module) -> bool:
    """Whether ``module`` has hooks, those of every module (:func:`has_global_hooks`) aside."""
    # Not bool() of them: older torch.compile cannot trace that of a dictionary.
    if (  # noqa: SIM103
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
    ):
        return True
    return False


def has_hooks(module: nn.Module) -> bool:
    """Whether calling ``module`` runs anything beside its ``forward``."""
    return has_own_hooks(module) or has_global_hooks()


def has_own_forward(module: nn.Module) -> bool:
    """Whether the ``forward`` of ``module`` is another than that of its class."""
    if "forward" not in module.__dict__:
        return False
    # A wrapper that was taken off again leaves the class's own behind.
    return getattr(module.forward, "__func__", None) is not type(module).forward


def is_plain(linear: nn.Module) -> bool:
    """Whether calling ``linear`` is nothing but a product with its weight."""
    if type(linear) is not nn.Linear or has_own_forward(linear) or has_hooks(linear):
        return False
    # torch.export traces with a parameter's fake.
    return linear.bias is None and type(linear.weight) in (nn.Parameter, Tensor, FakeTensor)


def product(x: Tensor, weight: Tensor) -> Tensor:
    """``x @ weight.T``, by :func:`gdn_ops.linear` where that has a kernel of its own."""
    if not (x.is_cpu and x.dtype in DTYPES and weight.dtype == x.dtype):
        return F.linear(x, weight)
    if torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu") != x.dtype:
        return F.linear(x, weight)  # after a conversion
    return _linear(x, weight)


def project(linear: nn.Module, x: Tensor) -> Tensor:
    """``linear(x)``, as a :func:`product` where it is nothing else."""
    return product(x, linear.weight) if x.is_cpu and is_plain(linear) else linear(x)


def local(parameter: Parameter) -> Parameter:
    """This rank's part of a parameter that is a DTensor (:mod:`gdn_ops.distributed`).

    Ranks hold different heads, so the gradient of a replicated parameter is the sum over them.
    """
    if type(parameter) is nn.Parameter or not hasattr(parameter, "to_local"):
        return parameter
    from torch.distributed.tensor import Partial, Replicate

    placements = parameter.placements
    grads = [Partial() if isinstance(p, Replicate) else p for p in placements]
    # Going from a placement to itself moves nothing; going back, it reduces the gradient.
    return parameter.redistribute(placements=placements).to_local(grad_placements=grads)
