"""Every invalid call raises before any byte is written or counted as written.

For each op a valid call is built, in batch form and packed, and then broken in one argument at a
time: dtype, rank, each size by one, device, expanded or overlapping memory, numbers and strings out
of range, indices, lengths and counts that the host can see. Each must raise an error that names the
op and an argument that does not fit, and leave every tensor of the call as it was.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from common import make_layer, make_pool, make_qkv
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import gdn_ops
from gdn_ops import reference, windows

H, HV, K, V, W, R, T, P = 2, 6, 8, 4, 4, 5, 3, 7
C = 2 * H * K + HV * V
WINDOW = ("win_k", "win_u", "win_g", "win_fill")


def window() -> dict[str, Tensor]:
    """Two entries each, both from the call before."""
    w = windows.allocate(P, H, HV, K, V, R)
    for x in w[:3]:
        x[:, :, :2] = -torch.rand(x[:, :, :2].shape)
    w.fill[:] = 2 | 1 << 8
    return dict(zip(WINDOW, w, strict=True))


def qkv(B: int, T: int) -> dict[str, Tensor]:
    return dict(zip(("q", "k", "v", "g", "beta"), make_qkv(B, T, H, HV, K, V), strict=True))


def sequences(packed: bool, rows: str = "state_indices") -> dict[str, Tensor]:
    """Three sequences; packed, of lengths 3, 0 and 2."""
    extra = {rows: torch.tensor([4, 0, 2]), "has_initial_state": torch.tensor([True, False, True])}
    return extra | ({"cu_seqlens": torch.tensor([0, 3, 3, 5])} if packed else {})


def layer(packed: bool, T: int = T) -> dict[str, Tensor]:
    return make_layer(*((1, 5) if packed else (3, T)), H, HV, K, V, W)


def conv_pool(extra: int = 0) -> Tensor:
    return torch.randn(P, C, W - 1 + extra)


def gates(B: int, T: int) -> dict[str, Tensor]:
    x = torch.randn(2, B, T, HV)
    return {"a": x[0], "b": x[1], "A_log": torch.rand(HV), "dt_bias": torch.randn(HV)}


def valid(op: str, packed: bool) -> dict:
    """Arguments by name of a call that works."""
    B, tokens = (1, 5) if packed else (3, T)
    state = {"state": make_pool(P, HV, V, K)}
    table = {"state_indices": torch.tensor([[4, 1, 3], [0, 5, -1], [-1, -1, -1]]),
             "num_accepted": torch.tensor([2, 1, 0, 9])}  # fmt: skip
    conv = {"weight": torch.randn(C, W), "bias": torch.randn(C)}
    x = {"x": torch.randn(B, tokens, C)}
    decode = layer(packed) | {"num_k_heads": H, "head_k_dim": K, "activation": "silu"}
    calls = {
        "recurrent": lambda: qkv(B, tokens) | state | sequences(packed) | table,
        "recurrent_gated": lambda: {
            **{n: x for n, x in qkv(B, tokens).items() if n in "qkv"},
            **gates(B, tokens), **state, **sequences(packed),
        },
        "recurrent_buffered": lambda: qkv(B, tokens) | state | window() | sequences(packed)
        | {"num_accepted": torch.tensor([2, 1, 0])},
        "recurrent_lowrank": lambda: qkv(B, tokens) | window() | sequences(packed)
        | {"num_accepted": torch.tensor([2, 1, 0])},
        "window_flush": lambda: state | window() | {"state_indices": torch.tensor([4, -1, 2])},
        "window_reset": lambda: {
            "win_fill": window()["win_fill"], "state_indices": torch.tensor([4, -1, 2])
        },
        "chunk": lambda: qkv(B, tokens)
        | {"initial_state": torch.randn(3, HV, V, K), "chunk_size": 16}
        | ({"cu_seqlens": torch.tensor([0, 3, 3, 5])} if packed else {}),
        "chunk_prefill": lambda: qkv(B, tokens) | state | sequences(packed, "read_indices")
        | {"write_indices": torch.tensor([1, 3, -1]), "edge_rows": torch.tensor([[5], [6], [-1]]),
           "chunk_size": 16},
        "chunk_lowrank": lambda: qkv(B, tokens) | window() | sequences(packed) | {"chunk_size": 16},
        "conv1d": lambda: x | conv | {"initial_state": torch.randn(3, C, W - 1)}
        | ({"cu_seqlens": torch.tensor([0, 3, 3, 5])} if packed else {}) | {"activation": "silu"},
        "short_conv": lambda: x | conv | {"conv_state": conv_pool(T - 1), "conv_leading": True}
        | sequences(packed) | {"num_accepted": torch.tensor([2, 1, 0]), "activation": "silu"},
        "gating": lambda: gates(B, tokens),
        "conv_gating": lambda: {
            "mixed_qkv": torch.randn(B, tokens, C), **gates(B, tokens),
            "conv_weight": torch.randn(C, W), "conv_bias": torch.randn(C),
            "conv_state": conv_pool(), "num_k_heads": H, "head_k_dim": K, "activation": "silu",
            **sequences(packed),
        },
        "linear": lambda: {
            "x": torch.randn(B, tokens, K).bfloat16(), "weight": torch.randn(V, K).bfloat16(),
        },
        "gated_rms_norm": lambda: {
            "x": torch.randn(B, tokens, V), "gate": torch.randn(B, tokens, V),
            "weight": torch.randn(V),
        },
        "decode": lambda: decode | {"conv_state": conv_pool()} | state | sequences(packed),
        "decode_buffered": lambda: decode | {"conv_state": conv_pool()} | state | window()
        | sequences(packed),
        "decode_lowrank": lambda: decode | {"conv_state": conv_pool()} | window()
        | sequences(packed),
    }  # fmt: skip
    return calls[op]()


OPS = ("recurrent", "recurrent_gated", "recurrent_buffered", "recurrent_lowrank", "window_flush",
       "window_reset", "chunk", "chunk_prefill", "chunk_lowrank", "conv1d", "short_conv", "gating",
       "conv_gating", "gated_rms_norm", "linear", "decode", "decode_buffered",
       "decode_lowrank")  # fmt: skip
AUTOGRAD = ("chunk", "conv1d", "gating", "gated_rms_norm", "linear")
INDICES = ("state_indices", "read_indices", "write_indices", "cu_seqlens", "num_accepted",
           "edge_rows", "has_initial_state", "win_fill")  # fmt: skip


def test_ops_that_write_refuse_what_they_cannot_take():
    """Gradients and negated views are seen above the backends, for every op that writes."""
    missing = [
        s.name
        for s in torch._C._jit_get_all_schemas()
        # paged_* are made of the others.
        if s.name.startswith("gdn::") and not s.name.startswith("gdn::paged_")
        if any(a.alias_info is not None and a.alias_info.is_write for a in s.arguments)
        if not torch._C._dispatch_has_kernel_for_dispatch_key(s.name, "Negative")
    ]
    assert not missing, f"not in kOps of csrc/in_place.cpp: {missing}"


def test_every_op_has_an_oracle_and_every_kernel_a_builder():
    """Steps of CONTRIBUTING.md that nothing else would miss: gdn_ops/reference.py, and the driver
    of the sanitizers, which calls each function of the CPU's table."""
    root = Path(__file__).resolve().parent.parent
    assert set(OPS) <= set(reference.__all__)
    table = (root / "csrc" / "cpu" / "table.h").read_text()
    kernels = set(re.findall(r"\(\*(\w+)\)\([^)]*const Parallel&\)", table))
    driver = (root / "tests" / "native" / "driver.cpp").read_text()
    builders = set(re.findall(r'^    \{"(\w+)", build_\w+\},$', driver, re.M))
    assert len(kernels) >= 14 and kernels == builders


def resized(x: Tensor, dim: int, by: int) -> Tensor:
    """The same values with one more or one less in a dimension."""
    if by < 0:
        return x.narrow(dim, 0, x.shape[dim] - 1).clone()
    return torch.cat([x, x.narrow(dim, x.shape[dim] - 1, 1)], dim)


def fits(op: str, args: dict, name: str, dim: int, by: int) -> bool:
    """Sizes that may differ by one and make another valid call."""
    if op == "linear":  # any leading sizes of x, any number of rows of weights
        return dim == 0 if name == "weight" else dim < args["x"].dim() - 1
    if name in ("state", "conv_state") and dim == 0:  # the rows in use are below P - 1
        return name == "conv_state" or "win_fill" not in args
    batch = "cu_seqlens" not in args
    unseen = not batch and args["cu_seqlens"].device.type != "cpu"
    return (
        # How many tokens there are, and how many a sequence has, only a device knows then.
        (unseen and (name, dim) in (("state_indices", 1), ("conv_state", 2), ("x", 1),
                                    ("projected", 1)))
        or (name == "conv_state" and dim == 2 and by > 0)
        or (name == "initial_state" and op == "conv1d" and dim == 2 and by > 0)
        or (name == "num_accepted" and (by > 0 or len(args[name]) > 3))
        or (name == "edge_rows" and dim == 1)
        or (name == "state_indices" and dim == 1 and by > 0)  # fewer columns than tokens do not
        or op == "window_reset"
        or (op == "window_flush" and name == "state_indices")
        or (op == "window_flush" and name == "win_k" and dim == 1)  # HV is a multiple of 1 and 3
        # A shorter filter has history to spare.
        or (name in ("weight", "conv_weight") and dim == 1 and (by < 0 or op == "short_conv"))
        # The tokens are one tensor, so another number of them is another call.
        or (batch and dim == 1 and name in ("x", "projected") and (by < 0 or op != "short_conv")
            and op != "gated_rms_norm")
    )  # fmt: skip


def written(args: dict) -> list[str]:
    return [n for n in ("state", "conv_state", *WINDOW) if n in args]


def breaks(op: str, args: dict) -> Iterator[tuple[str, str, dict]]:
    """(argument, what is wrong, the arguments)."""
    tensors = {n: x for n, x in args.items() if isinstance(x, Tensor)}
    for argument in getattr(torch.ops.gdn, op).default._schema.arguments:
        if str(argument.type) == "Tensor":
            yield argument.name, "None", {**args, argument.name: None}
    for name, x in tensors.items():
        index = name in INDICES
        wrong = torch.float32 if index else torch.float64
        if not (op == "chunk" and name == "q"):  # float64 is its own path, judged by q
            yield name, f"dtype {wrong}", {**args, name: x.to(wrong)}
        yield name, "int16", {**args, name: x.to(torch.int16)}
        if name in ("win_g", "initial_state") and op != "conv1d":
            yield name, "bfloat16", {**args, name: x.bfloat16()}
        leading = op == "linear" and name == "x"
        if not leading:
            yield name, "one dimension more", {**args, name: x[None]}
        if x.dim() > 1 and not leading and not (name in ("state_indices",) and op == "recurrent"):
            yield name, "one dimension less", {**args, name: x[0].clone()}
        yield name, "no dimension", {**args, name: x.flatten()[0].clone()}
        yield name, "another device", {**args, name: x.to("meta")}
        if x.device.type != "cpu":
            yield name, "on the CPU", {**args, name: x.cpu()}
        for dim in range(x.dim()):
            for by in (1, -1):
                if not fits(op, args, name, dim, by):
                    yield name, f"size {by:+d} in {dim}", {**args, name: resized(x, dim, by)}
        if x.is_floating_point() and op not in AUTOGRAD:
            yield name, "requires grad", {**args, name: x.clone().requires_grad_()}
    for name in written(args):
        x = args[name]
        yield name, "expanded", {**args, name: x[:1].expand_as(x)}
        if x.dim() > 1:
            closer = (x.stride(0) // 2, *x.stride()[1:])
            halves = x.new_zeros(x.numel()).as_strided(x.shape, closer)
            yield name, "rows over each other", {**args, name: halves}
        if x.is_floating_point():
            yield name, "negated view", {**args, name: torch._neg_view(x)}
        for other in written(args):
            y = args[other]
            if other != name and x.dtype == y.dtype and x.numel() >= y.numel():
                shared = torch.as_strided(x, y.shape, y.stride())
                yield name, f"over {other}", {**args, other: shared}
    if "state" in args:
        spread = torch.empty(P, HV, V, 2 * K, device=args["state"].device)[..., ::2]
        yield "state", "neither K nor V contiguous", {**args, "state": spread.copy_(args["state"])}
    yield from broken_numbers(op, args)
    if next(iter(tensors.values())).device.type == "cpu":
        yield from broken_values(op, args)


def broken_values(op: str, args: dict) -> Iterator[tuple[str, str, dict]]:
    """What only a host that may read the tensors can see."""
    for name in ("state_indices", "read_indices", "write_indices", "edge_rows"):
        if name in args:
            x = args[name].clone()
            x[0] = P
            yield name, "row P", {**args, name: x}
            yield name, "row 2^40", {**args, name: x.where(x < P, 2**40)}
    if "cu_seqlens" in args:
        for bad in ([0, 3, 2, 5], [0, 3, 3, 4], [0, 3, 3, 6], [1, 3, 3, 5], [0, -1, 3, 5], [0, 5]):
            yield "cu_seqlens", str(bad), {**args, "cu_seqlens": torch.tensor(bad)}
    if "num_accepted" in args:
        x = args["num_accepted"].clone()
        x[0] = 6
        yield "num_accepted", "6", {**args, "num_accepted": x}
    if "win_k" in args:
        for packed in (R + 1, 1 << 24, -1, R << 16):
            fill = args["win_fill"].clone()
            fill[[4, 2]] = packed
            yield "win_fill", hex(packed), {**args, "win_fill": fill}


def broken_numbers(op: str, args: dict) -> Iterator[tuple[str, str, dict]]:
    for name in ("state_indices", "read_indices", "write_indices", "edge_rows"):
        if name in args and op.startswith("chunk_") and args[name].dim() == 1:
            yield name, "two columns", {**args, name: args[name][:, None].expand(-1, 2)}
    if "cu_seqlens" in args:
        first = next(iter(args.values()))
        if first.dim() > 2:
            batch = {n: x.expand(2, *x.shape[1:]).clone() if n in TOKENS else x
                     for n, x in args.items()}  # fmt: skip
            yield "cu_seqlens", "B = 2", batch
    if "num_accepted" in args and "state_indices" in args and args["state_indices"].dim() == 2:
        rows = args["state_indices"][:, 0].clone()
        yield "num_accepted", "no columns", {**args, "state_indices": rows}
    if "win_k" in args:
        many = windows.allocate(P, H, HV, K, V, 64, device=args["win_k"].device)
        wide = {n: torch.cat([x, x[:, :, :1]], 2) for n, x in zip(WINDOW[:3], many, strict=False)}
        yield "win_k", "R = 65", {**args, **wide}
        none = {n: args[n][:, :, :0] for n in WINDOW[:3]}
        yield "win_k", "R = 0", {**args, **none}
    for name, values in (
        ("chunk_size", (0, -1, 15, 129)),
        ("num_k_heads", (0, -1, H + 1, 4)),
        ("head_k_dim", (0, -1, K + 1, 513)),
        ("activation", ("gelu", "", "SiLU")),
    ):
        for value in values if name in args else ():
            yield name, repr(value), {**args, name: value}
    if op == "recurrent_buffered" and "cu_seqlens" not in args:
        yield "q", "T > R", args | on(args["q"].device, qkv(3, R + 1))
    if op.startswith("decode") and "cu_seqlens" not in args:
        many = layer(False, 17)["projected"].to(args["projected"].device)
        yield "projected", "17 tokens", {**args, "projected": many}
    if op in ("short_conv", "conv_gating", "decode"):
        if "conv_leading" in args:
            yield "num_accepted", "trailing", {**args, "conv_leading": False}
        narrow = args["conv_state"][..., : W - 2].clone()
        yield "conv_state", "too few columns", {**args, "conv_state": narrow}


TOKENS = ("q", "k", "v", "g", "beta", "a", "b", "x", "mixed_qkv", "projected")
# How a message names an argument, and what it may say instead: facts about sizes that come from
# several arguments.
NAMED = re.compile(r"\b(\w+)(?=:|, \w+:| and \w+ share| requires grad)")
OF_SEVERAL = re.compile(
    r": expected (HV to be a multiple of H|1 <= K, V <= \d+|T <= R = \d+|at most \d+ tokens)"
)


def bits(x: Tensor) -> Tensor:
    """All bytes that x is a view of."""
    whole = x.untyped_storage()
    none = torch.empty(0, dtype=torch.uint8, device=x.device)
    return x if x.is_meta else none.set_(whole)


def on(device: torch.device | str, args: dict) -> dict:
    return {n: x.to(device) if isinstance(x, Tensor) else x for n, x in args.items()}


def all_breaks(op: str, packed: bool, device: str = "cpu") -> list[tuple[str, str, dict]]:
    torch.manual_seed(0)
    return list(breaks(op, on(device, valid(op, packed))))


@pytest.mark.parametrize("packed", [False, True], ids=["batch", "packed"])
@pytest.mark.parametrize("op", OPS)
def test_the_call_to_break_is_valid(op, packed):
    getattr(gdn_ops, op)(**valid(op, packed))


@pytest.mark.parametrize("packed", [False, True], ids=["batch", "packed"])
@pytest.mark.parametrize("op", OPS)
def test_every_invalid_call_raises_before_any_write(op, packed):
    cases = all_breaks(op, packed)
    assert len(cases) >= 5 * sum(isinstance(x, Tensor) for x in valid(op, packed).values())
    assert not (wrong := wrongly_answered(op, cases)), "\n".join(wrong)


def test_nothing_to_work_on_is_refused():
    """A convolution of no channels divided by zero, which ended the process."""
    x, weight = torch.zeros(2, 3, 0), torch.zeros(0, W)
    for call in (
        lambda: gdn_ops.conv1d(x, weight),
        lambda: gdn_ops.short_conv(x, weight, None, torch.zeros(2, 0, W - 1)),
    ):
        with pytest.raises(RuntimeError, match="x: expected C >= 1 channels"):
            call()
    with pytest.raises(RuntimeError, match="gating: a: expected HV >= 1"):
        gdn_ops.gating(x, x, torch.zeros(0), torch.zeros(0))


@pytest.mark.parametrize("op", [op for op in OPS if "cu_seqlens" in valid(op, True)])
def test_no_offsets_at_all(op):
    """`chunk` then expected an initial state of -1 sequences."""
    call = valid(op, True)
    with pytest.raises(RuntimeError, match=f"{op}: cu_seqlens: expected at least one entry"):
        getattr(gdn_ops, op)(**call | {"cu_seqlens": call["cu_seqlens"][:0]})


def test_the_paged_convolution_names_its_pool():
    call, pool = torch.ops.gdn.paged_short_conv.default, conv_pool()
    args = (torch.randn(2, C), torch.randn(C, W), None)
    rows = torch.tensor([1, 2])
    for bad in (pool[:0], pool[0]):
        with pytest.raises(RuntimeError, match="paged_short_conv: conv_state: expected a pool"):
            call(*args, bad, rows)
    with pytest.raises(RuntimeError, match="paged_short_conv: first_row: expected at least 0"):
        call(*args, pool, rows, first_row=-1)


@pytest.mark.parametrize("inference", [False, True], ids=["grad", "inference"])
@pytest.mark.parametrize("op", OPS)
def test_none_for_a_tensor_is_named(op, inference):
    call = getattr(torch.ops.gdn, op).default
    if inference and sum(isinstance(x, Tensor) for x in valid(op, False).values()) == 1:
        pytest.skip("without its only tensor, and without autograd, torch finds no kernel of ours")
    for argument in call._schema.arguments:
        if str(argument.type) == "Tensor":
            args = {**valid(op, False), argument.name: None}
            with (
                torch.inference_mode(inference),
                pytest.raises(RuntimeError, match=f"^{op}: {argument.name}: expected a tensor"),
            ):
                call(**args)


def wrongly_answered(op: str, cases: list[tuple[str, str, dict]]) -> list[str]:
    call = getattr(gdn_ops, op)
    names = set(inspect.signature(call).parameters)
    problems = ((name, what, attempt(call, op, names, args)) for name, what, args in cases)
    return [f"{name}, {what}: {problem}" for name, what, problem in problems if problem]


def attempt(call: Callable, op: str, names: set[str], args: dict) -> str | None:
    """What is wrong with how the call failed, if anything."""
    before = {n: bits(x).clone() for n, x in args.items() if isinstance(x, Tensor)}
    versions = {n: args[n]._version for n in before}
    try:
        call(**args)
    except (RuntimeError, ValueError, TypeError) as error:
        message = str(error)
        problem = None
        if op not in message:
            problem = f"does not name the op: {message[:200]}"
        elif not names & set(NAMED.findall(message)) and not OF_SEVERAL.search(message):
            problem = f"names no argument: {message[:200]}"
    except Exception as error:
        problem = f"{type(error).__name__}: {error}"
    else:
        problem = "accepted"
    for name, old in before.items():
        if not old.is_meta and not torch.equal(old, bits(args[name])):
            return f"{problem}; {name} was written"
        if args[name]._version != versions[name]:
            return f"{problem}; {name} counts as written"
    return problem


def test_an_accepted_break_would_be_seen():
    """The harness itself: a call that works, and one that writes first, are both reported."""
    args = valid("recurrent", False)
    names = set(args)
    assert "accepted" in attempt(gdn_ops.recurrent, "recurrent", names, args)

    def writes_first(state, **_):
        state[0] += 1
        raise RuntimeError("recurrent: q: no")

    assert "was written" in attempt(
        functools.partial(writes_first), "recurrent", names, valid("recurrent", False)
    )


def outputs(result) -> list[Tensor]:
    return [] if result is None else [result] if isinstance(result, Tensor) else list(result)


@functools.cache
def expected(op: str, packed: bool) -> tuple[dict, list[Tensor], dict]:
    """Arguments, what the op returns for them, and the arguments after the call."""
    torch.manual_seed(0)
    args = valid(op, packed)
    after = copy.deepcopy(args)
    return args, outputs(getattr(gdn_ops, op)(**after)), after


def same(op: str, packed: bool, result, args: dict, what: str) -> None:
    _, results, after = expected(op, packed)
    for got, want in zip(outputs(result), results, strict=True):
        assert got.dtype == want.dtype and got.stride() == want.stride(), what
        assert torch.equal(got.as_subclass(Tensor), want), what
    for name in written(args):
        assert torch.equal(args[name].as_subclass(Tensor), after[name]), (what, name)


class Subclass(torch.Tensor):
    pass


class EveryOp(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def default(setter: Callable, value, before):
    setter(value)
    try:
        yield
    finally:
        setter(before)


AROUND = {
    "inference mode": torch.inference_mode,
    "no_grad": torch.no_grad,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "deterministic": lambda: default(torch.use_deterministic_algorithms, True, False),
    "default float64": lambda: default(torch.set_default_dtype, torch.float64, torch.float32),
    "default bfloat16": lambda: default(torch.set_default_dtype, torch.bfloat16, torch.float32),
    "default device": lambda: default(torch.set_default_device, "meta", None),
    "dispatch mode": EveryOp,
}
# Other tensors of the same values.
AS = {
    "subclass": lambda x: x.clone().as_subclass(Subclass),
    "parameter": lambda x: torch.nn.Parameter(x.clone(), requires_grad=False),
    "copy on write": torch._lazy_clone,
    "int32": lambda x: x.int() if x.dtype == torch.int64 else x.clone(),
    "every third row": lambda x: torch.empty(3 * x.shape[0], *x.shape[1:], dtype=x.dtype)[::3]
    .copy_(x),
}  # fmt: skip


@pytest.mark.parametrize("packed", [False, True], ids=["batch", "packed"])
@pytest.mark.parametrize("op", OPS)
def test_nothing_around_a_call_changes_it(op, packed):
    call = getattr(gdn_ops, op)
    args, _, _ = expected(op, packed)
    for what, context in AROUND.items():
        own = copy.deepcopy(args)
        with context():
            result = call(**own)
        same(op, packed, result, own, what)
    for what, form in AS.items():
        own = {n: form(x) if isinstance(x, Tensor) else x for n, x in args.items()}
        same(op, packed, call(**own), own, what)
    with torch.inference_mode():
        own = {n: x.clone() if isinstance(x, Tensor) else x for n, x in args.items()}
    with torch.no_grad():
        same(op, packed, call(**own), own, "inference tensors outside of their mode")
    for name, x in args.items():
        if isinstance(x, Tensor) and x.is_floating_point() and name not in written(args):
            own = copy.deepcopy(args) | {name: torch._neg_view(-x)}
            same(op, packed, call(**own), own, f"{name} a negated view")
    pristine = copy.deepcopy(args)
    assert all(torch.equal(args[n], x) for n, x in pristine.items() if isinstance(x, Tensor))


IN_PLACE = [op for op in OPS if op not in AUTOGRAD]


@pytest.mark.parametrize("op", IN_PLACE)
def test_transforms_of_an_op_that_writes_are_refused(op):
    """torch.func would otherwise give zeros for gradients, and write nothing."""
    call = getattr(gdn_ops, op)
    args = valid(op, False)
    before = copy.deepcopy(args)
    floats = [n for n, x in args.items() if isinstance(x, Tensor) and x.is_floating_point()]
    for name in floats:
        x = args[name]

        def run(x, name=name):
            out = outputs(call(**{**args, name: x}))
            return sum((o.float().sum() for o in out), torch.zeros(()))

        with pytest.raises(RuntimeError, match=rf"{op}: .*{name} requires grad"):
            torch.func.grad(run)(x)
        with pytest.raises(RuntimeError, match=rf"{op}: .*{name} has a tangent"):
            torch.func.jvp(run, (x,), (torch.ones_like(x),))
        with pytest.raises(RuntimeError, match=op):
            torch.func.vmap(run)(torch.stack([x, x]))
    for name, old in before.items():
        assert not isinstance(old, Tensor) or torch.equal(old, args[name]), name


@pytest.mark.parametrize("op", IN_PLACE)
def test_autograd_learns_of_every_write(op):
    """Or a backward that saved the tensor would use the new values."""
    args = valid(op, False)
    versions = {n: args[n]._version for n in written(args)}
    getattr(gdn_ops, op)(**args)
    for name, old in versions.items():
        assert args[name]._version > old, name
    name = written(args)[0]
    if args[name].is_floating_point():
        weight = torch.ones_like(args[name], requires_grad=True)
        product = (args[name] * weight).sum()
        with torch.no_grad():
            getattr(gdn_ops, op)(**args)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            product.backward()


def test_every_op_that_writes_has_the_kernels_above_its_backend():
    names = {name.split("::")[1] for name in torch._C._dispatch_get_all_op_names()
             if name.startswith("gdn::")}  # fmt: skip
    for name in names:
        schema = getattr(torch.ops.gdn, name).default._schema
        if schema.is_mutable and name != "sweep":
            assert name in IN_PLACE or name.startswith("paged_")
            for key in ("Autograd", "Negative"):
                has = torch._C._dispatch_has_kernel_for_dispatch_key
                assert has(f"gdn::{name}", key), (name, key)


def test_threads_that_call_at_once():
    """Eight of them, each op in turn, on one and two threads of their own."""
    jobs = [(op, packed) for op in OPS for packed in (False, True)]
    for job in jobs:
        expected(*job)
    wrong = []

    def work(first: int) -> None:
        torch.set_num_threads(1 + first % 2)
        for i in range(2 * len(jobs)):
            op, packed = jobs[(7 * i + 3 * first) % len(jobs)]
            args = copy.deepcopy(expected(op, packed)[0])
            try:
                same(op, packed, getattr(gdn_ops, op)(**args), args, op)
            except Exception as error:
                wrong.append(f"{op}: {error}")

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong, wrong[:3]


FORK = """
import os, sys
import torch, gdn_ops
from common import make_pool, make_qkv

torch.set_num_threads(2)
inputs, pool = make_qkv(4, 32, 4, 8, 64, 64), make_pool(4, 8, 64, 64)
before = gdn_ops.recurrent(*inputs, pool.clone())
child = os.fork()
if child == 0:
    torch.set_num_threads(1)  # threads of the parent are not the child's
    os._exit(not torch.equal(gdn_ops.recurrent(*inputs, pool.clone()), before))
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_forked_child_on_one_thread():
    path = os.pathsep.join([str(Path(gdn_ops.__file__).parent.parent), *sys.path])
    run = subprocess.run(
        [sys.executable, "-c", FORK], cwd=Path(__file__).parent, timeout=120,
        env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
