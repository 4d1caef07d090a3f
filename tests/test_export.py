"""torch.export with dynamic batch and length, and AOTInductor packages, against the eager layer."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.export import Dim

from gdn_ops.nn import STATE_MODES, GatedDeltaNet, States

if not hasattr(torch._inductor, "aoti_compile_and_package"):
    pytest.skip("this torch has no AOTInductor packages", allow_module_level=True)

DEVICE = torch.get_default_device()  # tests/traced_on_cuda.py
HIDDEN, ROWS = 24, 6
K, V = (16, 20) if DEVICE.type == "cpu" else (64, 64)  # windows on CUDA take few head sizes
LINEAR = {"cpu": "gdn.linear.default", "cuda": "aten.linear.default"}
FIRST, MOST = 16, 512  # tokens of a prefill: from 16 on it is chunked


class Owner(nn.Module):
    """The layer with its pools as buffers: a package then owns them."""

    def __init__(self, layer: GatedDeltaNet, step: str) -> None:
        super().__init__()
        self.layer, self.step = layer, step
        for name, pool in layer.allocate(ROWS)._asdict().items():
            self.register_buffer(name, pool)

    def forward(self, x, rows):
        pools = States(*(getattr(self, name) for name in States._fields))
        return getattr(self.layer, self.step)(x, pools, rows)


class Borrower(nn.Module):
    """The layer with the caller's pools as arguments."""

    def __init__(self, layer: GatedDeltaNet, step: str) -> None:
        super().__init__()
        self.layer, self.step = layer, step

    def forward(self, x, rows, conv, state):
        return getattr(self.layer, self.step)(x, States(conv, state), rows)


def make(state_mode="full") -> GatedDeltaNet:
    torch.manual_seed(1)
    return GatedDeltaNet(HIDDEN, 2, 6, K, V, state_mode=state_mode, window=4).eval()


def inputs(step: str, batch: int, tokens: int) -> tuple:
    gen = torch.Generator(DEVICE).manual_seed(batch)
    x = torch.randn(batch, 1 if step == "decode" else tokens, HIDDEN, generator=gen)
    return x, torch.randperm(ROWS, generator=gen)[:batch].int()


def export(module: nn.Module, step: str, *pools: torch.Tensor):
    batch = Dim("batch", min=1, max=ROWS)
    x = {0: batch} if step == "decode" else {0: batch, 1: Dim("tokens", min=FIRST, max=MOST)}
    shapes = (x, {0: batch}, *({} for _ in pools))
    with torch.no_grad():
        return torch.export.export(module, (*inputs(step, 3, 20), *pools), dynamic_shapes=shapes)


CALLS = ((3, 20), (5, 37), (1, 16), (6, 130))


@pytest.mark.parametrize("step", ["prefill", "decode"])
@pytest.mark.parametrize("mode", STATE_MODES)
@torch.no_grad()
def test_exported_program(mode, step):
    """One program for every batch and length; its pools move as the layer's do."""
    layer = make(mode)
    eager, program = Owner(layer, step), export(Owner(layer, step), step)
    calls = [str(n.target) for n in program.graph.nodes if n.op == "call_function"]
    here = LINEAR[DEVICE.type]
    assert calls.count(here) == 2 and not (set(LINEAR.values()) - {here}).intersection(calls)
    assert len([c for c in calls if c.startswith("gdn.") and c != here]) > 0
    run = program.module()
    for batch, tokens in CALLS:
        args = inputs(step, batch, tokens)
        assert torch.equal(run(*args), eager(*args))
    for name, pool in eager.named_buffers():
        assert torch.equal(dict(run.named_buffers())[name], pool), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@torch.no_grad()
def test_one_layer_has_one_result(dtype):
    """Trained, frozen, compiled or exported: the same bits of a decode step."""
    layer = make().to(dtype)
    args = inputs("decode", 5, 1)
    args = args[0].to(dtype), args[1]
    program = torch.export.export(Owner(layer, "decode"), args)
    expected = Owner(copy.deepcopy(layer).requires_grad_(False), "decode")(*args)
    torch._dynamo.reset()
    forms = {
        "train": Owner(copy.deepcopy(layer).train(), "decode"),
        "eval": Owner(layer, "decode"),
        "compiled": torch.compile(Owner(layer, "decode"), fullgraph=True),
        "exported": program.module(),
    }
    for name, form in forms.items():
        assert torch.equal(form(*args), expected), name


@torch.no_grad()
def test_functional_program():
    """The functional form names what it writes: pools go in and come out as outputs."""
    layer = make()
    program = export(Owner(layer, "decode"), "decode").run_decompositions()
    written = program.graph_signature.buffers_to_mutate.values()
    assert sorted(written) == ["conv", "state"]
    args = inputs("decode", 4, 1)
    eager = Owner(layer, "decode")
    run = program.module()
    for _ in range(2):
        assert torch.equal(run(*args), eager(*args))
    assert torch.equal(run.state, eager.state)


@torch.no_grad()
def test_saved_program(tmp_path):
    layer = make()
    path = tmp_path / "decode.pt2"
    torch.export.save(export(Owner(layer, "decode"), "decode"), path)
    args = inputs("decode", 2, 1)
    got = torch.export.load(path).module()(*args)
    assert torch.equal(got, Owner(layer, "decode")(*args))


def package(program, path) -> object:
    # Nothing here is about the speed of the wrapper, and -O0 builds it in half the time.
    options = {"aot_inductor.compile_wrapper_opt_level": "O0"}
    built = torch._inductor.aoti_compile_and_package(
        program, package_path=str(path), inductor_configs=options
    )
    return torch._inductor.aoti_load_package(built)


@torch.no_grad()
def test_package_that_owns_its_pools(tmp_path):
    layer = make()
    eager = Owner(layer, "prefill")
    run = package(export(Owner(layer, "prefill"), "prefill"), tmp_path / "prefill.pt2")
    for batch, tokens in CALLS:  # a row that comes twice continues, so a lost state shows
        args = inputs("prefill", batch, tokens)
        torch.testing.assert_close(run(*args), eager(*args), rtol=1e-5, atol=1e-6)


@torch.no_grad()
def test_package_that_writes_the_callers_pools(tmp_path):
    layer = make()
    start = layer.allocate(ROWS)
    program = export(Borrower(layer, "decode"), "decode", start.conv, start.state)
    run = package(program, tmp_path / "decode.pt2")
    mine, want = layer.allocate(ROWS), layer.allocate(ROWS)
    eager = Borrower(layer, "decode")
    for batch, tokens in CALLS:
        args = inputs("decode", batch, tokens)
        got = run(*args, mine.conv, mine.state)
        torch.testing.assert_close(got, eager(*args, want.conv, want.state), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(mine.state, want.state, rtol=1e-5, atol=1e-6)
    assert mine.state.abs().max() > 0
