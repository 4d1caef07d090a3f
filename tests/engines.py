"""What the tests of the serving engines' functions share: sizes, inputs, calls with a wrong
argument, and an engine's modules without the engine."""

import inspect
import json
import sys
import types
from pathlib import Path

import torch
from common import generator, make_qkv

SIGNATURES = json.loads((Path(__file__).parent / "data" / "signatures.json").read_text())
H, HV, K, V, W, P = 2, 6, 16, 24, 4, 7
C = 2 * H * K + HV * V
SLACK = 4.0  # outputs of chained tokens, as in the tests of the ops


def qkv(T, dtype=torch.float32, seed=0):
    return make_qkv(1, T, H, HV, K, V, dtype=dtype, seed=seed)


def layer(T, dtype=torch.float32, seed=0):
    gen = generator(seed)

    def randn(*shape):
        return torch.randn(*shape, generator=gen)

    return {
        "x": randn(T, C).to(dtype),
        "a": randn(T, HV).to(dtype),
        "b": randn(T, HV).to(dtype),
        "A_log": torch.rand(HV, generator=gen),
        "dt_bias": randn(HV),
        "weight": (randn(C, W) / 2).to(dtype),
        "bias": (0.1 * randn(C)).to(dtype),
    }


def conv_pool(L, dtype=torch.float32):
    """``[P, C, L]`` as vLLM has it by default: channels contiguous."""
    gen = generator(9)
    return torch.randn(P, L, C, generator=gen).to(dtype).transpose(1, 2)


WRONG = {
    "float64": lambda x: x.double(),
    "int16": lambda x: x.to(torch.int16),
    "a dimension more": lambda x: x[None],
    "a dimension less": lambda x: x[0].clone(),
    "one row more": lambda x: torch.cat([x, x[:1]]),
    "one column more": lambda x: torch.cat([x, x[..., :1]], -1),
    "one column less": lambda x: x[..., :-1].clone(),
    "another device": lambda x: x.to("meta"),
    "out of range": lambda x: x + 100 if x.dtype == torch.int64 else x[..., :0],
    "requires grad": lambda x: x.detach().clone().requires_grad_(),
    "negated": lambda x: torch._neg_view(x) if x.is_floating_point() else x[..., :0],
}


def refusals_that_write_nothing(calls) -> int:
    """How many of ``calls``, each tensor wrong in every way of :data:`WRONG`, are refused; none of
    those has written."""
    refused = 0
    for call, good in calls:
        call(**{n: x.clone() if isinstance(x, torch.Tensor) else x for n, x in good.items()})
        for name, x in good.items():
            for what, wrong in WRONG.items() if isinstance(x, torch.Tensor) else ():
                try:
                    bad = {**good, name: wrong(x)}
                except (IndexError, RuntimeError):
                    continue  # there is no such form of this tensor
                own = {
                    n: y.detach().clone() if y is not bad[name] else y
                    for n, y in bad.items() if isinstance(y, torch.Tensor)
                }  # fmt: skip
                before = {n: y.detach().clone() for n, y in own.items() if y.device.type == "cpu"}
                try:
                    call(**{**bad, **own})
                except (RuntimeError, ValueError, TypeError, IndexError):
                    refused += 1
                    for n, old in before.items():
                        assert torch.equal(own[n].detach(), old), (call.__name__, name, what, n)
    return refused


def functions_like(ours, extra=""):
    """Functions of the names and signatures of ``ours``, that raise when called."""
    space = {}
    for name, function in ours.items():
        parameters = ", ".join(inspect.signature(function).parameters)
        exec(f"def {name}({parameters}{extra}): raise AssertionError", space)
    return {name: space[name] for name in ours}


def put_modules(monkeypatch, modules):
    """Makes ``modules``, name to attributes, importable until the test is over."""
    for name, attributes in modules.items():
        module = types.ModuleType(name)
        module.__path__, module.__spec__ = [], types.SimpleNamespace(name=name)
        vars(module).update(attributes)
        monkeypatch.setitem(sys.modules, name, module)


def contents(package):
    """All that the modules of ``package`` hold."""
    return {
        (name, key): value
        for name, module in sys.modules.items()
        if name.split(".")[0] == package
        for key, value in vars(module).items()
    }
