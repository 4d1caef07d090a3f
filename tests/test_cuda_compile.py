"""What only a CUDA device has: CUDA graphs of compiled and of eager steps, streams, autocast, and
transformers' own compiled decoding. Compilation as such: tests/traced_on_cuda.py."""

from __future__ import annotations

import copy

import pytest
import torch
from torch._dynamo.utils import counters

from gdn_ops import nn as layers
from gdn_ops.nn import GatedDeltaNet, States

if not torch.cuda.is_available():
    pytest.skip("needs an NVIDIA device", allow_module_level=True)

DEVICE = torch.device("cuda")
HIDDEN, P = 64, 6
FIRST = 4  # calls of a step: run as it is, warmed up, captured, replayed
GRAPHS = "reduce-overhead"

# Pairs of eager and compiled code run the same kernels of ours; what lies around them may round
# otherwise: a product that reads another layout, or a sum that Inductor fuses.
TOLERANCE = {
    torch.float32: {"rtol": 1e-5, "atol": 1e-6},
    torch.bfloat16: {"rtol": 2**-7, "atol": 2**-8},
}


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()
    counters.clear()
    torch.manual_seed(0)
    yield
    torch._dynamo.reset()


def make(state_mode="full", dtype=torch.float32) -> GatedDeltaNet:
    return GatedDeltaNet(
        HIDDEN, 2, 6, state_mode=state_mode, window=4, device=DEVICE, dtype=dtype
    ).eval()


def copy_of(states: States) -> States:
    return States(*(None if t is None else t.clone() for t in states))


def same(got, want, dtype=torch.float32) -> None:
    torch.testing.assert_close(got, want, **TOLERANCE[dtype])


def same_states(got: States, want: States, dtype=torch.float32) -> None:
    for name, a, b in zip(States._fields, got, want, strict=True):
        assert (a is None) == (b is None), name
        if a is not None:
            same(a, b, dtype if name == "conv" else torch.float32)


class Graphs:
    """Counts what Inductor does with CUDA graphs."""

    def __init__(self, monkeypatch) -> None:
        from torch._inductor.cudagraph_trees import CUDAGraphTreeManager as Manager

        self.recorded = self.replayed = 0

        def counting(method: str, field: str):
            original = getattr(Manager, method)

            def call(*args):
                setattr(self, field, getattr(self, field) + 1)
                return original(*args)

            monkeypatch.setattr(Manager, method, call)

        counting("record_function", "recorded")
        counting("execute_node", "replayed")

    def everything(self) -> bool:
        """Whether steps were replayed, and nothing was left uncaptured."""
        return self.replayed > 0 and counters["inductor"]["cudagraph_skips"] == 0


@pytest.fixture
def graphs(monkeypatch) -> Graphs:
    return Graphs(monkeypatch)


def steps(dtype=torch.float32, batch=3, count=8):
    return [torch.randn(batch, 1, HIDDEN, device=DEVICE, dtype=dtype) for _ in range(count)]


MODES = [(mode, torch.float32) for mode in layers.STATE_MODES] + [("full", torch.bfloat16)]


@pytest.mark.parametrize("mode,dtype", MODES, ids=str)
@torch.no_grad()
def test_decode_is_captured_with_pools_of_allocate(mode, dtype, graphs):
    """Pools are written inside of the graph; a replay goes on from the state of the one before."""
    layer = make(mode, dtype)
    rows = torch.tensor([4, 0, 2], device=DEVICE)
    states = layer.allocate(P)
    twin = copy_of(states)
    compiled = torch.compile(layer.decode, fullgraph=True, mode=GRAPHS)
    for x in steps(dtype):
        same(compiled(x, states, rows), layer.decode(x, twin, rows), dtype)
        same_states(states, twin, dtype)
    assert graphs.everything()
    # Other pools of the same code: recorded anew, right, and nothing compiled again.
    before, compilations = graphs.recorded, counters["stats"]["unique_graphs"]
    states = layer.allocate(P)
    twin = copy_of(states)
    for x in steps(dtype):
        same(compiled(x, states, rows), layer.decode(x, twin, rows), dtype)
    same_states(states, twin, dtype)
    assert graphs.everything() and graphs.recorded > before
    assert counters["stats"]["unique_graphs"] == compilations


@torch.no_grad()
def test_prefill_and_decode_are_captured(graphs):
    layer = make()
    rows = torch.tensor([4, 0, 2], device=DEVICE)
    states = layer.allocate(P)
    twin = copy_of(states)
    prefill, decode = (
        torch.compile(f, fullgraph=True, mode=GRAPHS) for f in (layer.prefill, layer.decode)
    )
    for _ in range(FIRST):
        x = torch.randn(3, 20, HIDDEN, device=DEVICE)
        same(prefill(x, states, rows), layer.prefill(x, twin, rows))
        for x in steps(count=2):
            same(decode(x, states, rows), layer.decode(x, twin, rows))
        same_states(states, twin)
    assert graphs.everything()


@torch.no_grad()
# What torch keeps on disk does not tell marked inputs from others.
@torch._inductor.config.patch(force_disable_caches=True)
def test_other_pools_are_captured_once_marked(graphs):
    """torch leaves a graph that writes any other input uncaptured, and right."""
    layer = make()
    pools = copy_of(layer.allocate(3))
    twin = copy_of(pools)
    compiled = torch.compile(layer.decode, fullgraph=True, mode=GRAPHS)
    for x in steps(count=FIRST):
        same(compiled(x, pools), layer.decode(x, twin))
    assert counters["inductor"]["cudagraph_skips"] > 0
    torch._dynamo.reset()
    counters.clear()
    for pool in (pools.conv, pools.state):
        torch._dynamo.mark_static_address(pool, guard=False)
    compiled = torch.compile(layer.decode, fullgraph=True, mode=GRAPHS)
    for x in steps(count=FIRST):
        same(compiled(x, pools), layer.decode(x, twin))
    same_states(pools, twin)
    assert graphs.everything()


@torch.no_grad()
def test_every_batch_is_captured_without_compiling_again(graphs):
    layer = make()
    states = layer.allocate(12)
    twin = copy_of(states)
    compiled = torch.compile(layer.decode, fullgraph=True, dynamic=True, mode=GRAPHS)
    compilations = set()
    for batch in (2, 3, 5, 12):
        rows = torch.randperm(12, device=DEVICE)[:batch]
        for x in steps(batch=batch, count=FIRST):
            same(compiled(x, states, rows), layer.decode(x, twin, rows))
        compilations.add(counters["stats"]["unique_graphs"])
    same_states(states, twin)
    assert graphs.everything()
    assert len(compilations) == 1


@pytest.mark.parametrize("compile", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("mode", layers.STATE_MODES)
@torch.no_grad()
def test_a_step_inside_a_graph_of_the_callers(mode, compile):
    """torch.cuda.graph around the step; inputs and rows change between replays."""
    layer = make(mode)
    step = torch.compile(layer.decode, fullgraph=True) if compile else layer.decode
    states = layer.allocate(P)
    twin = copy_of(states)
    x, rows = torch.zeros(3, 1, HIDDEN, device=DEVICE), torch.tensor([4, 0, 2], device=DEVICE)
    empty = copy_of(states)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            step(x, states, rows)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = step(x, states, rows)
    for pool, start in zip(states, empty, strict=True):
        if pool is not None:
            pool.copy_(start)
    for i, value in enumerate(steps()):
        x.copy_(value)
        rows.copy_(torch.tensor([(i + 1) % 6, -1, 5 if i % 6 == 0 else i % 6], device=DEVICE))
        graph.replay()
        same(y, layer.decode(value, twin, rows))
    same_states(states, twin)


@pytest.mark.parametrize("mode", ["default", GRAPHS])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_training(dtype, mode, graphs):
    """Outputs and gradients of the functional form, compiled and captured."""
    layer = make(dtype=dtype).train()
    twin = copy.deepcopy(layer)
    compiled = torch.compile(layer, fullgraph=True, mode=mode)
    for _ in range(FIRST):
        x = torch.randn(2, 70, HIDDEN, device=DEVICE, dtype=dtype, requires_grad=True)
        z = x.detach().clone().requires_grad_()
        layer.zero_grad(), twin.zero_grad()
        got, want = compiled(x), twin(z)
        same(got, want, dtype)
        for out in (got, want):
            out.square().sum().backward()
        grads = [(x.grad, z.grad)]
        grads += [
            (a.grad, b.grad) for a, b in zip(layer.parameters(), twin.parameters(), strict=True)
        ]
        for a, b in grads:
            assert (a - b).norm() <= {torch.float32: 1e-5}.get(dtype, 1e-2) * b.norm()
    if mode == GRAPHS:
        assert graphs.everything()


@torch.no_grad()
@pytest.mark.parametrize("mode", ["eager", "default", GRAPHS])
def test_autocast(mode):
    """A float32 layer whose projections autocast makes bfloat16."""
    layer = make()
    step = layer.decode if mode == "eager" else torch.compile(layer.decode, mode=mode)
    states = layer.allocate(3)
    twin, exact = copy_of(states), copy_of(states)
    for x in steps(count=FIRST):
        with torch.autocast("cuda", torch.bfloat16):
            got, want = step(x, states), layer.decode(x, twin)
        assert got.dtype == want.dtype == torch.bfloat16
        same(got, want, torch.bfloat16)
        near = layer.decode(x, exact)
        assert (got.float() - near).norm() <= 3e-2 * near.norm()
    same_states(states, twin, torch.bfloat16)


@pytest.mark.parametrize("mode", ["eager", "default", GRAPHS])
@torch.no_grad()
def test_a_stream_of_the_callers(mode):
    """Kernels wait for what their own stream did before, and run beside the default one."""
    layer = make()
    run = {"prefill": layer.prefill, "decode": layer.decode}
    if mode != "eager":
        run = {name: torch.compile(f, fullgraph=True, mode=mode) for name, f in run.items()}
    states = layer.allocate(3)
    twin = copy_of(states)
    xs = [("prefill", torch.randn(3, 20, HIDDEN, device=DEVICE))]
    xs += [("decode", x) for x in steps(count=FIRST)]
    buffers = {name: torch.zeros_like(x) for name, x in xs}
    want = [getattr(layer, name)(x, twin) for name, x in xs]
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        for (name, x), y in zip(xs, want, strict=True):
            torch.cuda._sleep(20_000_000)  # about 10 ms: longer than the launches that follow
            buffers[name].copy_(x)
            same(run[name](buffers[name], states), y)
    stream.synchronize()
    same_states(states, twin)


def test_backward_on_a_stream_of_the_callers():
    layer = make().train()
    x = torch.randn(2, 70, HIDDEN, device=DEVICE)
    layer(x).square().sum().backward()
    want = [p.grad.clone() for p in layer.parameters()]
    layer.zero_grad()
    late = torch.zeros_like(x)
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)
        late.copy_(x)
        layer(late).square().sum().backward()
    stream.synchronize()
    for p, grad in zip(layer.parameters(), want, strict=True):
        assert torch.equal(p.grad, grad)


# --- transformers


def tiny(family: str):
    pytest.importorskip("transformers", reason="patched layers need transformers")
    from gdn_ops.hf.tiny import tiny_model

    # One layer of each kind: Inductor takes long for a model of four.
    kinds = ["linear_attention", "full_attention"]
    model = tiny_model(family, layers=2, layer_types=kinds).to(DEVICE)
    return model, copy.deepcopy(model)


@pytest.mark.parametrize("state_mode", layers.STATE_MODES)
@pytest.mark.parametrize("kind", ["DynamicCache", "StaticCache"])
@torch.no_grad()
def test_patched_layer_is_captured(kind, state_mode, graphs):
    """The cache that an eager prompt filled is written inside of the graph."""
    import transformers

    import gdn_ops

    model = gdn_ops.patch(tiny("qwen3_5")[1], state_mode=state_mode, window=4)
    layer = model.model.layers[0].linear_attn
    name = layer.gdn_cache_argument
    options = {"max_cache_len": 32} if kind == "StaticCache" else {}
    cache = getattr(transformers, kind)(config=model.config, **options)
    layer(torch.randn(4, 5, HIDDEN, device=DEVICE), **{name: cache})
    twin = copy.deepcopy(cache)
    compiled = torch.compile(
        lambda x, cache: layer(x, **{name: cache}), fullgraph=True, mode=GRAPHS
    )
    for x in steps(batch=4, count=10):
        same(compiled(x, cache), layer(x, **{name: twin}))
    ours, theirs = cache.layers[0], twin.layers[0]
    same(ours.conv_states[0], theirs.conv_states[0])
    for slot in range(ours.number_of_states):
        if ours.recurrent_states[slot] is not None:
            same(ours.recurrent_states[slot], theirs.recurrent_states[slot])
    assert graphs.everything()


MODELS = [
    ("qwen3_next", "full"), ("qwen3_5", "full"), ("qwen3_5_moe", "full"),
    ("qwen3_5", "buffered"), ("qwen3_5", "lowrank"),
]  # fmt: skip


@pytest.mark.parametrize("family,state_mode", MODELS)
def test_generate_compiles_and_captures_the_step(family, state_mode, graphs):
    """transformers compiles the decode step by itself where the cache is static."""
    import gdn_ops

    plain, patched = tiny(family)
    # Low rank is exact as long as the window holds every token.
    window = 64 if state_mode == "lowrank" else 4
    gdn_ops.patch(patched, state_mode=state_mode, window=window)
    gen = torch.Generator(DEVICE).manual_seed(0)
    options = {"do_sample": False, "pad_token_id": 0, "max_new_tokens": 24}
    # The second call finds the cache of the first one; the third has another batch.
    for batch in (2, 2, 3):
        ids = torch.randint(1, 256, (batch, 20), device=DEVICE, generator=gen)
        want = plain.generate(ids, **options)
        assert torch.equal(patched.generate(ids, cache_implementation="static", **options), want)
        assert hasattr(patched, "_compiled_call") and not hasattr(plain, "_compiled_call")
        assert graphs.everything()


def test_training_of_a_patched_layer():
    import gdn_ops

    plain, patched = (model.model.layers[0].linear_attn.train() for model in tiny("qwen3_5"))
    compiled = torch.compile(gdn_ops.patch(patched), fullgraph=True)
    x = torch.randn(2, 70, HIDDEN, device=DEVICE)
    for layer in (plain, compiled):
        layer(x).square().sum().backward()
    for (name, a), b in zip(patched.named_parameters(), plain.parameters(), strict=True):
        assert (a.grad - b.grad).norm() <= 1e-4 * b.grad.norm(), name
