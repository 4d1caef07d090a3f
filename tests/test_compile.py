"""torch.compile: no graph break, no copy of a pool, results of eager, two GEMMs a layer."""

from __future__ import annotations

import copy
import re

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch._inductor.utils import run_and_get_code
from torch.nn import functional as F

from gdn_ops import _modules, _support
from gdn_ops.nn import GatedDeltaNet, States

DEVICE = torch.get_default_device().type  # tests/traced_on_cuda.py
CPU = DEVICE == "cpu"
# Windows and chunks on CUDA have kernels for few head sizes.
H, HV, K, V, W = (2, 6, 16, 24, 4) if CPU else (2, 6, 64, 128, 4)
C, D = 2 * H * K + HV * V, 2 * H * K + 2 * HV * V + 2 * HV
N, P = 3, 12  # a pool four times the batch, so that a copy of it cannot pass for one of the batch
ops = torch.ops.gdn


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()
    torch.manual_seed(0)
    # Off in torch 2.5, where a written view of a pool is then a copy of it (README, limits).
    views = torch._inductor.config.patch(enable_auto_functionalized_v2=True)
    with torch.no_grad(), views:
        yield
    torch._dynamo.reset()


def numbers(text: str) -> int:
    product = 1
    for n in re.findall(r"\d+", text):
        product *= int(n)
    return product


def allocations(code: str) -> set[int]:
    """Sizes, in elements, of the buffers that the generated code allocates."""
    return {numbers(shape) for shape in re.findall(r"empty_strided\w*\(\(([^)]*)\)", code)}


def gemms(code: str) -> int:
    torchs = r"extern_kernels\.(?:mm|addmm|bmm|baddbmm)\(|\w*mkl\w*linear\w*\("
    return len(re.findall(torchs, code)) + code.count("torch.ops.gdn.linear.default(")


def copied(code: str, pools) -> list[tuple[int, ...]]:
    """Pools of which the code makes a copy: one needs a buffer of just the pool's size.

    The tests choose sizes so that nothing else has as many elements as a pool.
    """
    assert "torch.ops.gdn." in code
    return [tuple(p.shape) for p in pools if p.numel() in allocations(code)]


def check(fn, pools: dict[str, torch.Tensor], *inputs) -> str:
    """Compile ``fn(pools, *inputs)``, compare outputs and pools with eager, return the code."""
    eager_pools = {n: p.clone() for n, p in pools.items()}
    expected = fn(eager_pools, *inputs)
    got, code = run_and_get_code(torch.compile(fn, fullgraph=True), pools, *inputs)
    as_tuple = lambda o: o if isinstance(o, tuple) else (o,)  # noqa: E731
    for a, b in zip(as_tuple(got), as_tuple(expected), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
    for name, pool in pools.items():
        torch.testing.assert_close(pool, eager_pools[name], rtol=1e-5, atol=1e-6)
    assert len(code) == 1
    assert copied(code[0], pools.values()) == []
    return code[0]


def rows() -> torch.Tensor:
    return torch.tensor([7, 0, 11])


def heads_inputs(T: int = 1):
    # Longer keys than one would grow the state with each token, at once for large K.
    q, k = torch.randn(N, T, H, K), F.normalize(torch.randn(N, T, H, K), dim=-1)
    v, g = torch.randn(N, T, HV, V), -torch.rand(N, T, HV)
    return q, k, v, g, torch.rand(N, T, HV)


def window_pools(R: int = 4):
    return {
        "win_k": torch.randn(P, H, R, K), "win_u": torch.randn(P, HV, R, V),
        "win_g": -torch.rand(P, HV, R), "win_fill": torch.randint(0, R, (P,), dtype=torch.int32),
    }  # fmt: skip


def decode_parameters():
    return (
        torch.randn(C, W), None, torch.randn(HV), torch.randn(HV), torch.randn(V)
    )  # fmt: skip


def has(op: str):
    absent = DEVICE not in _support.devices_with(op)
    return pytest.mark.skipif(absent, reason=f"this build has no gdn::{op} on {DEVICE}")


def recurrent_case():
    def fn(pools, q, k, v, g, beta, index):
        o = ops.recurrent(
            q * 1.5, k, v, g, beta, pools["state"], index, None, None, None, None, True
        )
        return o + 1

    return fn, {"state": torch.randn(P, HV, V, K)}, (*heads_inputs(), rows())


def recurrent_transposed_case():
    def fn(pools, q, k, v, g, beta, index):
        state = pools["state"].transpose(-1, -2)
        return ops.recurrent(q, k, v, g, beta, state, index) * 2

    return fn, {"state": torch.randn(P, HV, K, V)}, (*heads_inputs(5), rows())


def recurrent_layers_case():
    """Views of one pool, a layer each."""

    def fn(pools, q, k, v, g, beta, index):
        total = 0
        for layer in range(3):
            total = total + ops.recurrent(q, k, v, g, beta, pools["state"][layer], index)
        return total

    return fn, {"state": torch.randn(3, P, HV, V, K)}, (*heads_inputs(), rows())


def recurrent_gated_case():
    def fn(pools, q, k, v, a, b, A_log, dt_bias, index):
        return ops.recurrent_gated(q, k, v, a, b, A_log, dt_bias, pools["state"], index)

    return (
        fn,
        {"state": torch.randn(P, HV, V, K)},
        (*heads_inputs(), torch.randn(HV), torch.randn(HV), rows()),
    )


def short_conv_case():
    def fn(pools, x, weight, index):
        return ops.short_conv(x + 1, weight, None, pools["conv"], index)

    return fn, {"conv": torch.randn(P, C, W)}, (torch.randn(N, 2, C), torch.randn(C, W), rows())


def conv_gating_case():
    def fn(pools, x, a, b, weight, A_log, dt_bias, index):
        return ops.conv_gating(
            x, a, b, weight, None, A_log, dt_bias, pools["conv"], H, K, index
        )  # fmt: skip

    gates = (torch.randn(N, 1, HV), torch.randn(N, 1, HV))
    vectors = (torch.randn(C, W), torch.randn(HV), torch.randn(HV))
    return fn, {"conv": torch.randn(P, C, W)}, (torch.randn(N, 1, C), *gates, *vectors, rows())


def decode_case():
    def fn(pools, projected, parameters, index):
        return ops.decode(projected, *parameters, pools["conv"], pools["state"], H, K, index) * 2

    pools = {"conv": torch.randn(P, C, W), "state": torch.randn(P, HV, V, K)}
    return fn, pools, (torch.randn(N, 1, D), decode_parameters(), rows())


def chunk_prefill_case():
    def fn(pools, q, k, v, g, beta, index):
        return ops.chunk_prefill(q, k, v, g, beta, pools["state"], index, index) * 2

    return fn, {"state": torch.randn(P, HV, V, K)}, (*heads_inputs(20), rows())


def recurrent_buffered_case():
    def fn(pools, q, k, v, g, beta, index):
        return ops.recurrent_buffered(q, k, v, g, beta, *pools.values(), index) * 2

    pools = {"state": torch.randn(P, HV, V, K)} | window_pools()
    return fn, pools, (*heads_inputs(), rows())


def recurrent_lowrank_case():
    def fn(pools, q, k, v, g, beta, index):
        return ops.recurrent_lowrank(q, k, v, g, beta, *pools.values(), index) * 2

    return fn, window_pools(), (*heads_inputs(), rows())


def chunk_lowrank_case():
    def fn(pools, q, k, v, g, beta, index):
        return ops.chunk_lowrank(q, k, v, g, beta, *pools.values(), index) * 2

    return fn, window_pools(), (*heads_inputs(20), rows())


def window_flush_case():
    def fn(pools, index):
        ops.window_flush(*pools.values(), index)
        return index + 1

    return fn, {"state": torch.randn(P, HV, V, K)} | window_pools(), (rows(),)


def decode_buffered_case():
    def fn(pools, projected, parameters, index):
        return ops.decode_buffered(projected, *parameters, *pools.values(), H, K, index) * 2

    pools = {"conv": torch.randn(P, C, W), "state": torch.randn(P, HV, V, K)} | window_pools()
    return fn, pools, (torch.randn(N, 1, D), decode_parameters(), rows())


def decode_lowrank_case():
    def fn(pools, projected, parameters, index):
        return ops.decode_lowrank(projected, *parameters, *pools.values(), H, K, index) * 2

    pools = {"conv": torch.randn(P, C, W)} | window_pools()
    return fn, pools, (torch.randn(N, 1, D), decode_parameters(), rows())


CASES = {
    "recurrent": recurrent_case,
    "recurrent-transposed": recurrent_transposed_case,
    "recurrent-layers": recurrent_layers_case,
    "recurrent_gated": recurrent_gated_case,
    "short_conv": short_conv_case,
    "conv_gating": conv_gating_case,
    "decode": decode_case,
    "chunk_prefill": chunk_prefill_case,
    "recurrent_buffered": recurrent_buffered_case,
    "recurrent_lowrank": recurrent_lowrank_case,
    "chunk_lowrank": chunk_lowrank_case,
    "window_flush": window_flush_case,
    "decode_buffered": decode_buffered_case,
    "decode_lowrank": decode_lowrank_case,
}


@pytest.mark.parametrize("name", [pytest.param(n, marks=has(n.split("-")[0])) for n in CASES])
def test_mutating_op(name):
    """No copy of the pool; outputs and the whole pool as in eager."""
    fn, pools, inputs = CASES[name]()
    check(fn, pools, *inputs)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_layers_of_a_pool_whose_size_varies(mode):
    """From the second size on, inductor wrote every layer's states into the first one's."""

    def step(states, convs, projected, parameters, index):
        total = 0
        for layer in range(3):
            pools = (convs[layer], states[layer].transpose(-1, -2))
            total = total + ops.decode(projected, *parameters, *pools, H, K, index)
        return total

    parameters = decode_parameters()
    with mode(), torch._inductor.config.patch(force_disable_caches=True):
        compiled = torch.compile(step, fullgraph=True)
        for rows_of_pool in (P, P + 3, P + 8):
            pools = [torch.randn(3, rows_of_pool, HV, K, V), torch.randn(3, rows_of_pool, C, W)]
            copies = [pool.clone() for pool in pools]
            inputs = (torch.randn(N, 1, D), parameters, rows())
            want, got = step(*copies, *inputs), compiled(*pools, *inputs)
            torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
            for pool, copy in zip(pools, copies, strict=True):
                torch.testing.assert_close(pool, copy, rtol=1e-5, atol=1e-6)


def test_the_guard_sees_a_copy():
    """State read before the op and used after it is copied, and the guard must say so."""

    def bad(pools, q, k, v, g, beta, index):
        before = pools["state"].sum()
        o = ops.recurrent(q, k, v, g, beta, pools["state"], index)
        return o + before

    pools = {"state": torch.randn(P, HV, V, K)}
    _, code = run_and_get_code(torch.compile(bad, fullgraph=True), pools, *heads_inputs(), rows())
    assert copied(code[0], pools.values()) == [(P, HV, V, K)]


@pytest.mark.parametrize("name", ["gating", "gated_rms_norm", "conv1d", "chunk"])
def test_functional_op(name):
    if DEVICE not in _support.devices_with(name):
        pytest.skip(f"this build has no gdn::{name} on {DEVICE}")
    q, k, v, g, beta = heads_inputs(9)
    calls = {
        "gating": lambda: ops.gating(g * 2, beta, torch.ones(HV), torch.ones(HV)),
        "gated_rms_norm": lambda: ops.gated_rms_norm(v + 1, v * 2, torch.ones(V)),
        "conv1d": lambda: ops.conv1d(v.flatten(2) + 1, torch.ones(HV * V, W)),
        "chunk": lambda: ops.chunk(q, k / 2, v * 2, g, beta),
    }
    expected = calls[name]()
    got, code = run_and_get_code(torch.compile(calls[name], fullgraph=True))
    assert f"torch.ops.gdn.{name}" in code[0]
    for a, b in zip(*((x if isinstance(x, tuple) else (x,)) for x in (got, expected)), strict=True):
        torch.testing.assert_close(a, b)


# --- the layer


def make_layer(**options) -> GatedDeltaNet:
    return GatedDeltaNet(32, H, HV, K, V, W, **options)


def test_layer_decode_one_gemm_in_one_out():
    layer = make_layer()
    states = layer.allocate(P)
    states.state.normal_(), states.conv.normal_()

    def fn(pools, x, index):
        return layer.decode(x, States(pools["conv"], pools["state"]), index)

    pools = {"conv": states.conv, "state": states.state}
    code = check(fn, pools, torch.randn(N, 1, 32), rows())
    assert gemms(code) == 2
    # Elsewhere the products are torch's, which the generated code calls by themselves.
    ours = ["linear", "decode", "linear"] if CPU else ["decode"]
    assert re.findall(r"= torch\.ops\.gdn\.(\w+)", code) == ours


def test_layer_prefill():
    layer = make_layer()
    states = layer.allocate(P)

    def fn(pools, x, index, has):
        return layer.prefill(x, States(pools["conv"], pools["state"]), index, has)

    pools = {"conv": states.conv.normal_(), "state": states.state.normal_()}
    has_state = torch.tensor([True, False, True])
    code = check(fn, pools, torch.randn(N, 20, 32), rows(), has_state)
    assert gemms(code) == 2


def test_layer_under_a_default_device():
    """Tensor.unflatten cannot be traced there: it reaches the method behind super()."""
    layer = make_layer()
    states = [layer.allocate(N) for _ in range(2)]
    x = torch.randn(N, 20, 32)
    with torch.device(DEVICE):
        got = torch.compile(layer.prefill, fullgraph=True, backend="eager")(x, states[0])
    assert torch.equal(got, layer.prefill(x, states[1]))


def test_layer_dynamic_batch_compiles_once():
    layer = make_layer()
    states = layer.allocate(P)
    counter = CompileCounterWithBackend("inductor")
    compiled = torch.compile(layer.decode, fullgraph=True, dynamic=True, backend=counter)
    # Tracing the first call may start over and count twice; later sizes must add nothing.
    compilations = []
    for batch in (2, 3, 5, 12):
        x, index = torch.randn(batch, 1, 32), torch.randperm(P)[:batch]
        twin = States(states.conv.clone(), states.state.clone())
        expected = layer.decode(x, twin, index)
        torch.testing.assert_close(compiled(x, states, index), expected, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(states.state, twin.state, rtol=1e-5, atol=1e-6)
        compilations.append(counter.frame_count)
    assert set(compilations) == {compilations[0]}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_projection_compiles_once_for_every_number_of_rows(dtype):
    """How many rows take the kernel is decided inside of it: no guard, and eager's bits."""
    linear = torch.nn.Linear(32, 48, bias=False, dtype=dtype)
    counter = CompileCounterWithBackend("inductor")
    compiled = torch.compile(
        lambda x: _modules.project(linear, x), fullgraph=True, dynamic=True, backend=counter
    )
    for rows in (2, 4, 8, 9, 32, 33, 64, 65, 200):
        x = torch.randn(rows, 1, 32).to(dtype)
        assert torch.equal(compiled(x), _modules.project(linear, x))
        assert counter.frame_count == 1


@pytest.mark.parametrize("mode", ["buffered", "lowrank"])
def test_layer_window_decode(mode):
    if reason := _support.missing(mode, DEVICE):
        pytest.skip(reason)
    layer = make_layer(state_mode=mode, window=4)
    states = layer.allocate(N)
    twin = States(*(None if t is None else t.clone() for t in states))
    compiled = torch.compile(layer.decode, fullgraph=True)
    for _ in range(6):
        x = torch.randn(N, 1, 32)
        torch.testing.assert_close(compiled(x, states), layer.decode(x, twin), rtol=1e-5, atol=1e-6)
    assert torch.equal(states.win_fill, twin.win_fill)


# --- patched transformers layers and models

STORAGES = ("qwen3_next", "qwen3_5")


@pytest.fixture(scope="module", params=STORAGES)
def model(request):
    pytest.importorskip("transformers", reason="patched layers need transformers")
    import gdn_ops
    from gdn_ops.hf.tiny import tiny_model

    # One layer of each kind: Inductor takes half a minute for a model of four.
    kinds = ["linear_attention", "full_attention"]
    return gdn_ops.patch(tiny_model(request.param, head_dim=16, layers=2, layer_types=kinds))


def prefilled(model, batch: int):
    import transformers

    layer = model.model.layers[0].linear_attn
    cache = transformers.DynamicCache(config=model.config)
    layer(torch.randn(batch, 5, 64), **{layer.gdn_cache_argument: cache})
    return layer, cache


def test_patched_layer_decode(model):
    """One GEMM in, decode, one GEMM out; the cache's tensors go to the op themselves."""
    layer, cache = prefilled(model, 4)
    name = layer.gdn_cache_argument
    twin = copy.deepcopy(cache)
    x = torch.randn(4, 1, 64)
    compiled = torch.compile(lambda x, cache: layer(x, **{name: cache}), fullgraph=True)
    got, code = run_and_get_code(compiled, x, cache)
    torch.testing.assert_close(got, layer(x, **{name: twin}), rtol=1e-5, atol=1e-6)
    ours, theirs = cache.layers[0], twin.layers[0]
    torch.testing.assert_close(ours.conv_states[0], theirs.conv_states[0], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(
        ours.recurrent_states[0], theirs.recurrent_states[0], rtol=1e-5, atol=1e-6
    )
    assert len(code) == 1 and gemms(code[0]) == 2
    assert copied(code[0], [ours.recurrent_states[0], ours.conv_states[0]]) == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_patched_layer_decode_has_the_bits_of_eager(model, dtype):
    """Both products are one op of ours or of torch, the cache's pools still their own."""
    import transformers

    layer = copy.deepcopy(model.model.layers[0].linear_attn).to(dtype)
    name = layer.gdn_cache_argument
    cache = transformers.DynamicCache(config=model.config)
    layer(torch.randn(4, 5, 64).to(dtype), **{name: cache})
    twin = copy.deepcopy(cache)
    x = torch.randn(4, 1, 64).to(dtype)
    compiled = torch.compile(lambda x, cache: layer(x, **{name: cache}), fullgraph=True)
    got, code = run_and_get_code(compiled, x, cache)
    assert torch.equal(got, layer(x, **{name: twin}))
    ours = cache.layers[0]
    assert torch.equal(ours.recurrent_states[0], twin.layers[0].recurrent_states[0])
    product = "torch.ops.gdn.linear.default(" if CPU else "extern_kernels.mm("
    assert len(code) == 1 and gemms(code[0]) == code[0].count(product) == 2
    assert copied(code[0], [ours.recurrent_states[0], ours.conv_states[0]]) == []


def test_patched_layer_dynamic_batch(model):
    counter = CompileCounterWithBackend("inductor")
    layer, _ = prefilled(model, 2)
    name = layer.gdn_cache_argument
    compiled = torch.compile(
        lambda x, cache: layer(x, **{name: cache}), fullgraph=True, dynamic=True, backend=counter
    )
    # Tracing the first call may start over and count twice; later sizes must add nothing.
    compilations = []
    for batch in (2, 3, 5):
        _, cache = prefilled(model, batch)
        twin = copy.deepcopy(cache)
        x = torch.randn(batch, 1, 64)
        expected = layer(x, **{name: twin})
        torch.testing.assert_close(compiled(x, cache), expected, rtol=1e-5, atol=1e-6)
        compilations.append(counter.frame_count)
    assert set(compilations) == {compilations[0]}


def test_patched_model_generates_the_same_compiled(model):
    """Prefill and decode of the whole model in fullgraph, tokens as in eager."""
    import transformers

    newer = model.model.layers[0].linear_attn.gdn_cache_argument == "cache"
    name = "cache" if newer else "past_key_values"
    counter = CompileCounterWithBackend("inductor")
    step = torch.compile(
        lambda ids, cache: model(ids, **{name: cache}).logits[:, -1],
        fullgraph=True,
        backend=counter,
    )
    ids = torch.randint(1, 256, (2, 7))
    expected = model.generate(ids, max_new_tokens=12, do_sample=False, pad_token_id=0)
    cache = transformers.StaticCache(config=model.config, max_cache_len=32)
    out, token = ids, step(ids, cache).argmax(-1, keepdim=True)
    for _ in range(12):
        out = torch.cat([out, token], 1)
        token = step(token, cache).argmax(-1, keepdim=True)
    assert torch.equal(out, expected)
    assert counter.frame_count <= 3, "prefill, first decode and at most one more"


def test_falling_back_is_traced_too(model):
    """The code of transformers runs inside the graph, and the warning comes while tracing."""
    from gdn_ops.hf import layers as hf_layers

    layer = copy.deepcopy(model.model.layers[0].linear_attn).double()
    compiled = torch.compile(lambda x: layer(x), fullgraph=True, backend="eager")
    x = torch.randn(1, 3, 64, dtype=torch.float64)
    hf_layers._announced.clear()
    with pytest.warns(UserWarning, match="runs the code of transformers: parameters are"):
        got = compiled(x)
    if CPU:
        assert torch.equal(got, layer(x))
    else:  # torch's float64 operations: one run of several was not equal to the bit
        torch.testing.assert_close(got, layer(x))
