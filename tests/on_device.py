"""The tests of the CPU ops, with every call of ours moved to another device.

Arguments travel with their whole storage, so that strides, views of one pool and bytes beside a
view are what the test made them; what the kernels wrote comes back into the caller's memory. A call
that the device refuses by name skips its test, where the device has such refusals.
"""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode


class OnDevice(TorchDispatchMode):
    """Runs ops of ``gdn`` on ``device``; ``refusal``: words of the errors that skip a test."""

    def __init__(self, device: torch.device, refusal: str | None = None) -> None:
        super().__init__()
        self.device, self.refusal = device, refusal

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
        except RuntimeError as e:
            if self.refusal and self.refusal in str(e):
                pytest.skip(str(e).splitlines()[0])
            raise
        for here, moved in bytes_of.values():
            after = moved.cpu()
            if not torch.equal(after, here):
                here.copy_(after)
        if isinstance(out, torch.Tensor):
            return out.cpu()
        return out if out is None else tuple(t.cpu() for t in out)


def skip(items, not_here: dict[str, tuple[str, ...]]) -> None:
    """Skip the tests whose name has one of the words of a reason in it."""
    for item in items:
        for reason, words in not_here.items():
            if any(word in item.nodeid for word in words):
                item.add_marker(pytest.mark.skip(reason=reason))
                break
