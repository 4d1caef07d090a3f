"""Pytest plug-in: the tests of the CPU ops, with every call of ours moved to the XPU twin.

    python -m pytest -p on_twin tests/test_recurrent.py     (with tests/xpu on PYTHONPATH)

Arguments travel to the twin's device, strides and all; what the kernels wrote comes back into the
caller's tensors, so that the tests see what they would see of the CPU. A call that the XPU refuses
by name skips its test.
"""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from twin import to_device


class OnTwin(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        given = (*args, *kwargs.values())
        if func.namespace != "gdn" or not any(isinstance(x, torch.Tensor) for x in given):
            return func(*args, **kwargs)
        moved = {id(x): to_device(x) for x in given if isinstance(x, torch.Tensor)}

        def there(x):
            return moved.get(id(x), x)

        try:
            out = func(*map(there, args), **{k: there(v) for k, v in kwargs.items()})
        except RuntimeError as e:
            if "the XPU" in str(e):
                pytest.skip(str(e).splitlines()[0])
            raise
        for x in given:
            if isinstance(x, torch.Tensor) and x.numel():
                after = there(x).cpu()
                if not torch.equal(after.nan_to_num(7.0), x.nan_to_num(7.0)):
                    x.copy_(after)
        if isinstance(out, torch.Tensor):
            return out.cpu()
        return out if out is None else tuple(t.cpu() for t in out)


@pytest.fixture(autouse=True)
def on_twin():
    with OnTwin():
        yield
