"""GatedDeltaNet, the layer, against the float64 oracles."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch

import gdn_ops
from gdn_ops import _limits, _modules, _support, reference
from gdn_ops import nn as layers
from gdn_ops.nn import GatedDeltaNet

# hidden, H, HV, K, V, W: the ratio of the large models, K != V, one head, ratio 1 and odd sizes.
SHAPES = [(32, 2, 6, 16, 16, 4), (24, 1, 2, 8, 20, 4), (16, 3, 3, 5, 7, 2), (8, 1, 1, 1, 1, 1)]
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 3e-2}


def make(shape=SHAPES[0], dtype=torch.float32, seed=0, **options) -> GatedDeltaNet:
    torch.manual_seed(seed)
    *sizes, width = shape
    layer = GatedDeltaNet(*sizes, width, dtype=dtype, **options)
    with torch.no_grad():
        layer.norm_weight.add_(0.1 * torch.randn_like(layer.norm_weight))
        layer.A_log.copy_(torch.linspace(-3, 1, layer.A_log.numel()))
    return layer


def oracle(layer: GatedDeltaNet, x, conv, state, **sequences):
    """The whole layer in float64: ``(y, conv pool, state pool)``."""
    p = {name: t.detach().double() for name, t in layer.named_parameters()}
    projected = x.double() @ p["in_proj.weight"].T
    y, conv, state = reference.decode(
        projected, p["conv_weight"], None, p["A_log"], p["dt_bias"], p["norm_weight"], conv, state,
        layer.heads.num_k_heads, layer.heads.head_k_dim, eps=layer.eps, **sequences,
    )  # fmt: skip
    return y @ p["out_proj.weight"].T, conv, state


def inputs(layer, *shape, dtype=torch.float32):
    return torch.randn(*shape, layer.hidden_size).to(dtype)


def assert_close(got, expected, dtype=torch.float32, what=""):
    scale = expected.abs().max().clamp(min=1)
    error = (got.double() - expected).abs().max() / scale
    assert error <= TOLERANCE[dtype], f"{what}: relative error {error:.2e}"


def randomised(layer, rows):
    states = layer.allocate(rows)
    states.conv.normal_()
    states.state.normal_()
    return states


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@torch.no_grad()
def test_prefill_then_decode(shape, dtype):
    layer = make(shape, dtype)
    x = inputs(layer, 2, 21, dtype=dtype)
    states = layer.allocate(2)
    want, conv, state = oracle(layer, x, states.conv, states.state)
    parts = [layer.prefill(x[:, :17], states), layer.prefill(x[:, 17:19], states)]
    parts += [layer.decode(x[:, t : t + 1], states) for t in (19, 20)]
    got = torch.cat(parts, 1)
    assert got.dtype == dtype and states.state.dtype == torch.float32
    assert_close(got, want, dtype, "output")
    assert_close(states.conv, conv, dtype, "conv")
    assert_close(states.state, state, dtype, "state")


@torch.no_grad()
def test_rows_of_a_pool():
    """Named rows move, padding gives zeros, other rows keep every bit, a fresh row is not read."""
    layer = make()
    states = randomised(layer, 6)
    states.state[1], states.conv[1] = float("nan"), float("nan")
    before = [t.clone() for t in states[:2]]
    rows = torch.tensor([4, -1, 1, 0], dtype=torch.int32)
    has = torch.tensor([True, True, False, True])
    for call, T in ((layer.decode, 1), (layer.decode, 3), (layer.prefill, 18), (layer.prefill, 2)):
        x = inputs(layer, 4, T)
        if call == layer.decode:
            x[1] = float("nan")
        clean = [t.nan_to_num() for t in states[:2]]
        want, conv, state = oracle(layer, x, *clean, state_indices=rows, has_initial_state=has)
        y = call(x, states, rows, has)
        assert torch.equal(y[1], torch.zeros_like(y[1]))
        live = [0, 2, 3]
        assert_close(y[live], want[live])
        assert_close(states.conv[rows[live]], conv[rows[live]], what="conv")
        assert_close(states.state[rows[live]], state[rows[live]], what="state")
        for pool, old in zip(states[:2], before, strict=True):
            assert torch.equal(pool[[2, 3, 5]], old[[2, 3, 5]])


@torch.no_grad()
def test_packed_sequences_equal_single_ones():
    layer = make()
    lengths = [3, 0, 20, 1]
    cu = torch.tensor([0, 3, 3, 23, 24])
    x = inputs(layer, 1, 24)
    packed = layer.allocate(4)
    y = layer.prefill(x, packed, cu_seqlens=cu)
    start = 0
    for n, length in enumerate(lengths):
        alone = layer.allocate(1)
        part = x[:, start : start + length]
        if length:
            want, conv, state = oracle(layer, part, alone.conv, alone.state)
            assert_close(y[:, start : start + length], want)
            assert_close(packed.conv[n : n + 1], conv)
            assert_close(packed.state[n : n + 1], state)
        else:
            assert torch.equal(packed.state[n], alone.state[0])
        start += length
    assert torch.equal(layer(x, cu_seqlens=cu), y)


@torch.no_grad()
def test_decode_after_prefill_of_one_token_is_the_same_step():
    layer = make()
    x = inputs(layer, 3, 1)
    a, b = randomised(layer, 3), None
    b = layers.States(*(None if t is None else t.clone() for t in a))
    y, z = layer.decode(x, a), layer.prefill(x, b)
    torch.testing.assert_close(y, z, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(a.state, b.state, rtol=1e-6, atol=1e-6)
    assert torch.equal(a.conv, b.conv)


@torch.no_grad()
def test_forward_without_states_keeps_nothing():
    layer = make()
    x = inputs(layer, 2, 9)
    states = layer.allocate(2)
    want, _, _ = oracle(layer, x, states.conv, states.state)
    assert_close(layer(x), want)
    assert_close(layer(x, states), want)
    step = inputs(layer, 2, 1)
    both, _, _ = oracle(layer, torch.cat([x, step], 1), *layer.allocate(2)[:2])
    assert_close(layer(step, states), both[:, -1:])


@torch.no_grad()
def test_state_dtypes():
    layer = make()
    x = inputs(layer, 2, 1)
    for dtype in (torch.bfloat16, torch.float16):
        states = layer.allocate(2, state_dtype=dtype)
        states.state.normal_()
        want, _, state = oracle(layer, x, states.conv, states.state)
        y = layer.decode(x, states)
        assert_close(y, want)
        assert states.state.dtype == dtype
        torch.testing.assert_close(states.state.double(), state, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_gradients(shape):
    layer = make(shape)
    x = inputs(layer, 2, 19).requires_grad_()
    if not _support.trainable("cpu"):
        with pytest.raises(NotImplementedError, match="no backward on cpu"):
            layer(x)
        return
    weights = torch.randn(2, 19, layer.hidden_size)
    (layer(x) * weights).sum().backward()
    p = {n: t.detach().double().requires_grad_() for n, t in layer.named_parameters()}
    xd = x.detach().double().requires_grad_()
    states = layer.allocate(2)
    y, _, _ = reference.decode(
        xd @ p["in_proj.weight"].T, p["conv_weight"], None, p["A_log"], p["dt_bias"],
        p["norm_weight"], states.conv, states.state, layer.heads.num_k_heads,
        layer.heads.head_k_dim, eps=layer.eps,
    )  # fmt: skip
    ((y @ p["out_proj.weight"].T) * weights).sum().backward()
    pairs = {"x": (x.grad, xd.grad)}
    pairs |= {n: (t.grad, p[n].grad) for n, t in layer.named_parameters()}
    _, history, state = layers.mix_functional(layer.in_proj(x), layer.mixer)
    assert history.shape == states.conv.shape and state.shape == states.state.shape
    for name, (got, want) in pairs.items():
        error = (got.double() - want).abs().max() / want.abs().max()
        assert error < 1e-4, f"{name}: relative error {error:.2e}"


def test_grad_mode_with_states_is_refused():
    layer = make()
    x = inputs(layer, 1, 1)
    states = layer.allocate(1)
    with pytest.raises(RuntimeError, match="requires grad"):
        layer.decode(x, states)
    assert not states.state.any()


def test_bad_arguments_are_named():
    with pytest.raises(ValueError, match="multiple of num_k_heads = 2, got 3"):
        GatedDeltaNet(8, 2, 3)
    with pytest.raises(ValueError, match="state_mode: expected one of .* got 'some'"):
        GatedDeltaNet(8, 1, 1, state_mode="some")
    with pytest.raises(ValueError, match="window: expected 1 to 64 entries, got 0"):
        GatedDeltaNet(8, 1, 1, window=0)
    for name, sizes in (
        ("hidden_size", (0, 1, 1)),
        ("num_k_heads", (8, 0, 3)),
        ("num_v_heads", (8, 1, -1)),
        ("head_k_dim", (8, 1, 1, 513)),
        ("head_v_dim", (8, 1, 1, 8, 0)),
        ("conv_kernel_size", (8, 1, 1, 8, 8, 9)),
    ):
        with pytest.raises(ValueError, match=f"^{name}: expected"):
            GatedDeltaNet(*sizes)
    with pytest.raises(ValueError, match="^drafts: expected 0 to 15, got 16"):
        GatedDeltaNet(8, 1, 1, drafts=16)
    with pytest.raises(ValueError, match="^drafts: expected 0 to 3, got 4"):
        GatedDeltaNet(8, 1, 1, state_mode="buffered", window=4, drafts=4)
    with pytest.raises(ValueError, match="^dtype: expected .* got torch.float64"):
        GatedDeltaNet(8, 1, 1, dtype=torch.float64)
    layer = make()
    with pytest.raises(ValueError, match="^rows: expected at least 0, got -1"):
        layer.allocate(-1)
    with pytest.raises(ValueError, match="^window: expected 1 to 64 entries, got 65"):
        layers.States.allocate(1, layer.heads, 4, state_mode="lowrank", window=65)
    for mode in layers.STATE_MODES:
        for other in set(layers.STATE_MODES) - {mode}:
            states = make(state_mode=other).allocate(2)
            with torch.no_grad(), pytest.raises(ValueError, match=f"of state_mode '{mode}'"):
                make(state_mode=mode).decode(torch.zeros(2, 1, 32), states)
    for name, options in (
        ("dtype", {"dtype": torch.float64}),
        ("state_dtype", {"state_dtype": torch.float64}),
        ("window_dtype", {"window_dtype": torch.float64, "state_mode": "buffered"}),
        ("drafts", {"drafts": -1}),
    ):
        with pytest.raises(ValueError, match=f"^{name}: expected"):
            layers.States.allocate(1, layer.heads, 4, **options)
    for grad in (True, False):
        for shape in ((5, 32), (1, 5, 31)):
            with torch.set_grad_enabled(grad), pytest.raises(ValueError, match=r"T, 32\], got"):
                layer(torch.zeros(shape))
    with torch.no_grad(), pytest.raises(ValueError, match="num_accepted"):
        h = layer.heads
        layers.mix(
            torch.zeros(1, 2, h.projected_dim), layer.mixer, layer.allocate(1),
            num_accepted=torch.ones(1, dtype=torch.int32), decode=False,
        )  # fmt: skip


@pytest.mark.parametrize("tokens", [3, 20])
@pytest.mark.parametrize("mode", layers.STATE_MODES)
@torch.no_grad()
def test_a_prefill_into_rows_a_token_has_written_nothing(mode, tokens):
    layer = make(state_mode=mode)
    states = layer.allocate(4)
    layer.decode(inputs(layer, 4, 1), states)
    before = [t.clone() for t in states if t is not None]
    with pytest.raises(ValueError, match=r"state_indices: expected shape \[N\] .* got \[2, 3\]"):
        layer.prefill(inputs(layer, 2, tokens), states, torch.tensor([[0, 1, 2], [3, 2, 1]]))
    assert all(map(torch.equal, before, (t for t in states if t is not None)))


@pytest.mark.parametrize("mode", ["buffered", "lowrank"])
@torch.no_grad()
def test_windows(mode):
    """Buffered is exact at any R; lowrank while R holds every token."""
    layer = make(state_mode=mode, window=4 if mode == "buffered" else 40)
    x = inputs(layer, 3, 31)
    states = layer.allocate(5)
    rows = torch.tensor([3, 0, 4])
    if reason := _support.missing(mode, "cpu"):
        with pytest.raises(NotImplementedError) as refused:
            layer.decode(x[:, :1], states, rows)
        assert reason in str(refused.value)
        return
    full = layers.States.allocate(3, layer.heads, 4)
    want, conv, _ = oracle(layer, x, full.conv, full.state)
    parts = [layer.prefill(x[:, :7], states, rows)]
    parts += [layer.decode(x[:, t : t + 1], states, rows) for t in range(7, 18)]
    if mode == "buffered":
        parts += [layer.decode(x[:, 18:21], states, rows)]
        parts += [layer.prefill(x[:, 21:25], states, rows)]
    else:
        parts += [layer.prefill(x[:, 18:25], states, rows)]
    parts += [layer.decode(x[:, t : t + 1], states, rows) for t in range(25, 31)]
    assert_close(torch.cat(parts, 1), want)
    assert_close(states.conv[rows], conv, what="conv")
    assert not states.conv[[1, 2]].any() and not states.win_u[[1, 2]].any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@torch.no_grad()
def test_windows_follow_the_dtype_of_the_states(dtype):
    """Beside a 16-bit base a f32 window would be a third of the pool; the error is of the dtype."""
    layer = make(state_mode="buffered", window=6)
    states = layer.allocate(3, state_dtype=dtype)
    assert {states.state.dtype, states.win_k.dtype, states.win_u.dtype} == {dtype}
    wide = layer.allocate(3, state_dtype=dtype, window_dtype=torch.float32)
    assert {wide.win_k.dtype, wide.win_u.dtype} == {torch.float32}
    if reason := _support.missing("buffered", "cpu"):
        pytest.skip(reason)
    x = inputs(layer, 3, 20)
    full = layers.States.allocate(3, layer.heads, 4)
    want, _, _ = oracle(layer, x, full.conv, full.state)
    parts = [layer.prefill(x[:, :7], states)]
    parts += [layer.decode(x[:, t : t + 1], states) for t in range(7, 20)]
    error = (torch.cat(parts, 1).double() - want).norm() / want.norm()
    assert 1e-6 < error < torch.finfo(dtype).eps


@pytest.mark.parametrize("mode", layers.STATE_MODES)
@pytest.mark.parametrize("drafts", [1, 3])
@torch.no_grad()
def test_rejected_drafts_are_forgotten(mode, drafts):
    """``num_accepted`` of the layer used to be refused whatever it was: its histories kept none."""
    if reason := _support.missing(mode, "cpu"):
        pytest.skip(reason)
    window = {"full": 16, "buffered": 5, "lowrank": 64}[mode]
    layer = make(state_mode=mode, window=window, drafts=drafts)
    N, T, calls = 2, 1 + drafts, 8
    x = inputs(layer, N, 19 + calls * T + 2)
    full = layers.States.allocate(N, layer.heads, 4)
    want = oracle(layer, x, full.conv, full.state)[0]
    rows = torch.tensor([[5, 1, 2, 7], [0, 6, 3, 4]])[:, :T]
    indices = rows if mode == "full" else rows[:, 0]  # "full" keeps a state a token
    states = layer.allocate(8)
    assert_close(layer.prefill(x[:, :19], states, rows[:, 0]), want[:, :19])
    done, accepted = torch.tensor([19, 19]), torch.ones(N, dtype=torch.int32)
    gen = torch.Generator().manual_seed(drafts)
    for _ in range(calls):
        right = torch.randint(1, T + 1, (N,), generator=gen)
        tokens = inputs(layer, N, T)
        for n in range(N):
            tokens[n, : right[n]] = x[n, done[n] : done[n] + right[n]]
        y = layer.decode(tokens, states, indices, None, None, accepted)
        for n in range(N):
            assert_close(y[n, : right[n]], want[n, done[n] : done[n] + right[n]])
        done, accepted = done + right, right.int()
    # A call of one token brings the last count into the states; then a prefill may follow.
    token = torch.stack([x[n, done[n] : done[n] + 1] for n in range(N)])
    y = layer.decode(token, states, indices, None, None, accepted)
    for n in range(N):
        assert_close(y[n, 0], want[n, done[n]])
        rest = layer.prefill(x[n : n + 1, done[n] + 1 :], states, rows[n : n + 1, 0])
        assert_close(rest[0], want[n, done[n] + 1 :])


@torch.no_grad()
def test_a_prefill_folds_no_window_but_those_of_its_sequences():
    """Row 2 of the pool waits with drafts that nobody has accepted yet."""
    layer = make(state_mode="buffered", window=4)
    states = layer.allocate(3)
    layer.decode(inputs(layer, 3, 3), states)
    before = [t[2].clone() for t in states]
    layer.prefill(inputs(layer, 2, 20), states)
    assert all(torch.equal(t[2], old) for t, old in zip(states, before, strict=True))


def test_packed_projection_order():
    """Rows of in_proj: q, k, v of all heads, then z, b and a."""
    layer = make()
    h = layer.heads
    assert sum(h.split) == h.projected_dim == layer.in_proj.weight.shape[0]
    assert h.split == [2 * 2 * 16 + 6 * 16, 6 * 16, 6, 6]
    assert set(layer.state_dict()) == {
        "in_proj.weight", "conv_weight", "A_log", "dt_bias", "norm_weight", "out_proj.weight"
    }  # fmt: skip
    assert make(dtype=torch.bfloat16).A_log.dtype == torch.float32


@pytest.mark.parametrize("mode", layers.STATE_MODES)
@torch.no_grad()
def test_copies_of_a_layer_and_its_states_compute_the_same(mode):
    """deepcopy, pickle and torch.save, of a sequence at work; the copies share nothing."""
    layer = make(state_mode=mode, window=4)
    states = layer.allocate(3)
    x = inputs(layer, 3, 6)
    layer.prefill(x[:, :4], states)
    saved = io.BytesIO()
    torch.save({"layer": layer.state_dict(), "states": tuple(states)}, saved)
    saved.seek(0)
    loaded = torch.load(saved, weights_only=True)
    other = make(state_mode=mode, window=4, seed=1)
    other.load_state_dict(loaded["layer"])
    pairs = [
        copy.deepcopy((layer, states)),
        pickle.loads(pickle.dumps((layer, states))),
        (other, layers.States(*loaded["states"])),
    ]
    want = [layer.decode(x[:, t : t + 1], states) for t in (4, 5)]
    for again, pools in pairs:
        got = [again.decode(x[:, t : t + 1], pools) for t in (4, 5)]
        assert all(map(torch.equal, got, want))
        assert all(a is None or torch.equal(a, b) for a, b in zip(pools, states, strict=True))


@pytest.mark.parametrize("kind", ["forward", "forward_pre", "full_backward", "full_backward_pre"])
def test_hooks_of_the_projections_run(kind):
    """Those of 16-bit layers too, whose products are not torch's."""
    layer = make(dtype=torch.bfloat16)
    seen = []
    for projection in (layer.in_proj, layer.out_proj):
        hook = lambda module, *_: seen.append(module)  # noqa: E731
        getattr(projection, f"register_{kind}_hook")(hook)
    layer(inputs(layer, 2, 3).bfloat16()).sum().backward()
    assert {id(m) for m in seen} == {id(layer.in_proj), id(layer.out_proj)}


@pytest.mark.parametrize("mode", layers.STATE_MODES)
def test_on_the_meta_device(mode):
    """Shapes without memory, with gradients too; then parameters of its own, and the same layer."""
    layer = make(state_mode=mode).to("meta")
    states = layer.allocate(3)
    with torch.no_grad():
        for y, T in (
            (layer.prefill(torch.empty(3, 20, 32, device="meta"), states), 20),
            (layer.decode(torch.empty(3, 1, 32, device="meta"), states), 1),
        ):
            assert y.shape == (3, T, 32) and y.is_meta
    layer(torch.empty(2, 20, 32, device="meta")).sum().backward()
    assert layer.A_log.grad.is_meta and layer.A_log.grad.shape == (6,)
    layer = layer.to_empty(device="cpu").requires_grad_(False)
    want = make(state_mode=mode)
    layer.load_state_dict(want.state_dict())
    x = inputs(layer, 2, 17)
    with torch.no_grad():
        assert torch.equal(layer(x), want(x))


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
@torch.no_grad()
def test_a_layer_of_quantised_projections():
    layer = make()
    quantised = torch.ao.quantization.quantize_dynamic(layer, {torch.nn.Linear})
    x = inputs(layer, 2, 18)
    outputs = []
    for each in (quantised, layer):
        states = each.allocate(2)
        outputs.append(
            torch.cat([each.prefill(x[:, :17], states), each.decode(x[:, 17:], states)], 1)
        )
    error = (outputs[0] - outputs[1]).norm() / outputs[1].norm()
    assert 0 < error < 0.15  # of products of 8 bits


@pytest.mark.parametrize("dtype", _limits.DTYPES, ids=str)
def test_a_projection_is_linear_whoever_calls(dtype):
    """The same bits with and without gradients, and none of it a module's call."""
    linear = torch.nn.Linear(48, 40, bias=False, dtype=dtype)
    x = torch.randn(3, 2, 48).to(dtype)
    expected = gdn_ops.linear(x, linear.weight.detach())
    assert torch.equal(_modules.project(linear, x), expected)
    assert _modules.project(linear, x).requires_grad
    with torch.no_grad():
        assert torch.equal(_modules.project(linear, x), expected)
    with torch.inference_mode():
        assert torch.equal(_modules.project(linear, x.clone()), expected)
    # Rows of weights that stand beside change nothing: a packed projection is that of its parts.
    parts = [_modules.product(x, part) for part in linear.weight.split([7, 20, 13])]
    assert torch.equal(torch.cat(parts, -1), expected)


@pytest.mark.parametrize("dtype", _limits.DTYPES, ids=str)
@pytest.mark.parametrize("to", [torch.bfloat16, torch.float16], ids=str)
def test_autocast_converts_as_it_would_a_module(to, dtype):
    linear = torch.nn.Linear(48, 40, bias=False, dtype=dtype)
    x = torch.randn(3, 48).to(dtype)

    def run(x):
        with torch.autocast("cpu", to):
            return _modules.project(linear, x)

    torch._dynamo.reset()
    for project in (run, torch.compile(run, backend="aot_eager", fullgraph=True)):
        got = project(x)
        assert got.dtype == to
        if dtype == to:  # nothing to convert
            assert torch.equal(got, gdn_ops.linear(x, linear.weight))
        else:
            with torch.autocast("cpu", to):
                assert torch.equal(got, linear(x))
    # The compiled form sees that it is called elsewhere.
    compiled = torch.compile(lambda x: _modules.project(linear, x), backend="eager")
    with torch.autocast("cpu", to):
        assert compiled(x).dtype == to
    assert torch.equal(compiled(x), gdn_ops.linear(x, linear.weight))


@torch.no_grad()
def test_parameters_from_elsewhere_are_the_layers_own():
    """functional_call and FSDP's first form put plain tensors in the place of parameters."""
    layer = make()
    given = {name: p.detach().clone() for name, p in layer.named_parameters()}
    x = inputs(layer, 2, 3)
    states, want = layer.allocate(2), layer.allocate(2)
    y = torch.func.functional_call(make(seed=1), given, (x, states))
    assert torch.equal(y, layer(x, want))
    assert torch.equal(states.state, want.state)
