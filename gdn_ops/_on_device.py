"""Calls on CPU tensors that run on another device, for tests and ``gdn-ops verify``."""

from __future__ import annotations

import torch
from torch.utils._python_dispatch import TorchDispatchMode


def refused(error: RuntimeError) -> bool:
    """Whether ``error`` says that the device does not do what was asked: the XPU's words, as CUDA
    does all that the CPU does."""
    return "the XPU" in str(error)


class OnDevice(TorchDispatchMode):
    """Runs each op of ``gdn`` on ``device``, whatever else happens on the CPU.

    Arguments travel with their whole storage, so that strides, views of one pool and bytes beside a
    view are what the caller made them; what the kernels wrote comes back into the caller's memory.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.device = device

    def failed(self, error: RuntimeError) -> None:
        """What to do when a call raised."""
        raise error

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        given = [x for x in (*args, *kwargs.values()) if isinstance(x, torch.Tensor)]
        if func.namespace != "gdn" or not given or any(x.device.type != "cpu" for x in given):
            return func(*args, **kwargs)
        bytes_of = {}  # address of a storage: its bytes here and there

        def there(x):
            if not isinstance(x, torch.Tensor):
                return x
            storage = x.untyped_storage()
            if storage.data_ptr() not in bytes_of:
                here = torch.empty(0, dtype=torch.uint8).set_(storage)
                bytes_of[storage.data_ptr()] = here, here.to(self.device)
            moved = bytes_of[storage.data_ptr()][1].untyped_storage()
            out = torch.empty(0, dtype=x.dtype, device=self.device)
            return out.set_(moved, x.storage_offset(), x.size(), x.stride())

        try:
            out = func(*map(there, args), **{k: there(v) for k, v in kwargs.items()})
        except RuntimeError as error:
            self.failed(error)
        for here, moved in bytes_of.values():
            after = moved.cpu()
            if not torch.equal(after, here):
                here.copy_(after)
        if isinstance(out, torch.Tensor):
            return out.cpu()
        return out if out is None else tuple(t.cpu() for t in out)
