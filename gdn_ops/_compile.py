"""What torch.compile has to be told about code of this package."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor

Function = TypeVar("Function", bound=Callable)


def constant(function: Function) -> Function:
    """``torch.compiler.assume_constant_result``: compiled code has the result of the first call.

    Older torch (seen in 2.5.1) keeps the result as a global of the function that it compiles, under
    the name in the code of this one: there it would replace the function itself, for every later
    call. So that name is one that nothing else has.
    """
    code = function.__code__
    function.__code__ = code.replace(co_name=f"_gdn_constant_{code.co_name}")
    return torch.compiler.assume_constant_result(function)


def keep_address(*tensors: Tensor | None) -> None:
    """Tell torch.compile that these tensors stay where they are.

    With ``mode="reduce-overhead"`` CUDA graphs are made only of code that writes no other inputs.
    One that is replaced nevertheless costs a capture anew, nothing else.
    """
    for tensor in tensors:
        if tensor is not None and tensor.is_cuda and not torch.compiler.is_compiling():
            torch._dynamo.mark_static_address(tensor, guard=False)
