"""The twin as a torch device: dispatcher, CPU fallback, torch.compile, against the CPU backend."""

import copy

import pytest
import torch
from twin import to_device

import gdn_ops
from gdn_ops import xpu_twin


def call(device, B=3, H=2, HV=6, K=128, V=128):
    g = torch.Generator().manual_seed(0)
    q, k = torch.randn(B, 1, H, K, generator=g), torch.randn(B, 1, H, K, generator=g)
    v, state = torch.randn(B, 1, HV, V, generator=g), torch.randn(B, HV, V, K, generator=g)
    gate, beta = -torch.rand(B, 1, HV, generator=g), torch.rand(B, 1, HV, generator=g)
    moved = [x.to(device) for x in (q, k, v, gate, beta, state)]
    with torch.no_grad():
        o = gdn_ops.recurrent(*moved, qk_l2norm=True)
    return o, moved[-1]


def test_to_device_reaches_the_xpu_kernels(device):
    xpu_twin.reports()
    o, state = call(device)
    assert o.device.type == "xpu_twin" and state.device.type == "xpu_twin"
    assert [r["kernel"] for r in xpu_twin.reports()] == ["recurrent"]
    expected, expected_state = call("cpu")
    torch.testing.assert_close(o.cpu(), expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(state.cpu(), expected_state, rtol=1e-5, atol=1e-6)


def test_other_operators_run_on_the_cpu(device):
    x = torch.randn(4, 6)
    y = x.to(device)
    assert torch.equal((y @ y.T).cpu(), x @ x.T)
    assert torch.equal(
        torch.nn.functional.silu(y[1:, ::2]).cpu(), torch.nn.functional.silu(x[1:, ::2])
    )
    y[2] = 0
    y += 1
    x[2] = 0
    assert torch.equal(y.cpu(), x + 1)
    assert y.sum().item() == pytest.approx((x + 1).sum().item())
    assert torch.equal(torch.cat([y, y]).view(2, -1).cpu(), torch.cat([x + 1, x + 1]).view(2, -1))
    assert torch.equal(y.to(torch.float16).cpu(), (x + 1).half())
    z = torch.empty(0, device=device)
    assert z.resize_(3).shape == (3,)


@pytest.mark.parametrize("bias", [True, False])
def test_convolutions_run_on_the_cpu(device, bias):
    results = []
    for where in ("cpu", device):
        g = torch.Generator().manual_seed(5)
        x, w, b = (torch.randn(*s, generator=g) for s in ((2, 6, 9), (6, 1, 4), (6,)))
        x, w, b = (t.to(where).requires_grad_() for t in (x, w, b))
        y = torch.nn.functional.conv1d(x, w, b if bias else None, groups=6, padding=3)
        y.square().sum().backward()
        results.append([y, x.grad, w.grad] + ([b.grad] if bias else []))
    for mine, theirs in zip(results[1], results[0], strict=True):
        assert mine.device.type == "xpu_twin"
        torch.testing.assert_close(mine.cpu(), theirs)


def test_tensors_are_copied_saved_and_loaded(device, tmp_path):
    x = torch.arange(6.0, device=device).view(2, 3)
    assert torch.equal(copy.deepcopy(x).cpu(), x.cpu()) and copy.deepcopy(x).device == x.device
    torch.save({"x": x.T}, tmp_path / "x.pt")
    back = torch.load(tmp_path / "x.pt")["x"]
    assert back.device.type == "xpu_twin" and torch.equal(back.cpu(), x.T.cpu())
    assert torch.equal(
        torch.ones(3).pin_memory().to(device, non_blocking=True).cpu(), torch.ones(3)
    )


def test_the_accelerator_interface(device, tmp_path):
    assert torch.get_device_module("xpu_twin") is torch.xpu_twin
    if hasattr(torch, "accelerator"):
        assert torch.accelerator.is_available() and torch.accelerator.device_count() == 1
        torch.accelerator.synchronize()
    # A barrier of gloo asks the accelerator where it is.
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1
    )
    try:
        torch.distributed.barrier()
    finally:
        torch.distributed.destroy_process_group()


def test_a_view_of_a_pool_is_written_in_place(device):
    pool = torch.zeros(4, 2, 64, 64).to(device)
    inputs = [to_device(torch.ones(2, 1, 2, 64)) for _ in range(3)]
    gates = [to_device(torch.zeros(2, 1, 2)), to_device(torch.ones(2, 1, 2))]
    with torch.no_grad():
        gdn_ops.recurrent(*inputs, *gates, pool[1:3])
    changed = pool.cpu().flatten(1).ne(0).any(1).tolist()
    assert changed == [False, True, True, False]


@pytest.mark.parametrize(
    ("state_mode", "length"), [("full", 7), ("full", 20), ("buffered", 20), ("lowrank", 20)]
)
def test_a_whole_layer_agrees_with_the_cpu(device, state_mode, length):
    from gdn_ops.nn import GatedDeltaNet

    torch.manual_seed(0)
    layer = GatedDeltaNet(96, 2, 4, head_k_dim=64, head_v_dim=64, state_mode=state_mode, window=4)
    on_twin = GatedDeltaNet(96, 2, 4, head_k_dim=64, head_v_dim=64, state_mode=state_mode, window=4)
    on_twin.load_state_dict(layer.state_dict())
    on_twin = on_twin.to(device)
    prompt, token = torch.randn(3, length, 96), torch.randn(6, 3, 1, 96)
    with torch.no_grad():
        states, twin_states = layer.allocate(3), on_twin.allocate(3)
        want = [layer.prefill(prompt, states)]
        got = [on_twin.prefill(prompt.to(device), twin_states)]
        xpu_twin.reports()
        for x in token:
            want.append(layer.decode(x, states))
            got.append(on_twin.decode(x.to(device), twin_states))
    assert xpu_twin.reports(), "the decode steps did not reach the XPU kernels"
    for mine, theirs in zip(got, want, strict=True):
        torch.testing.assert_close(mine.cpu(), theirs, rtol=1e-4, atol=1e-5)


def test_compile_traces_the_op(device):
    @torch.compile(backend="aot_eager", fullgraph=True)
    def step(q, k, v, g, beta, state):
        return gdn_ops.recurrent(q, k, v, g, beta, state, qk_l2norm=True) * 2

    g = torch.Generator().manual_seed(1)
    inputs = [torch.randn(2, 1, 2, 64, generator=g) for _ in range(3)]
    inputs += [-torch.rand(2, 1, 2, generator=g), torch.rand(2, 1, 2, generator=g)]
    state = torch.randn(2, 2, 64, 64, generator=g)
    plain, compiled = state.to(device), state.to(device)
    with torch.no_grad():
        moved = [x.to(device) for x in inputs]
        want = gdn_ops.recurrent(*moved, plain, qk_l2norm=True) * 2
        got = step(*moved, compiled)
    assert torch.equal(got.cpu(), want.cpu())
    assert torch.equal(compiled.cpu(), plain.cpu())


def test_compile_traces_a_layer(device):
    """Prefill and decode in one graph each, and the values of eager."""
    from gdn_ops.nn import GatedDeltaNet

    torch.manual_seed(0)
    layer = GatedDeltaNet(32, 1, 2, head_k_dim=64, head_v_dim=64).to(device)
    prompt, token = torch.randn(2, 18, 32).to(device), torch.randn(2, 1, 32).to(device)
    results = []
    for wrap in (lambda f: f, torch.compile(backend="aot_eager", fullgraph=True)):
        states = layer.allocate(2)
        with torch.no_grad():
            y = wrap(layer.prefill)(prompt, states)
            results.append((y, wrap(layer.decode)(token, states), states.state))
    for eager, compiled in zip(*results, strict=True):
        assert torch.equal(eager.cpu(), compiled.cpu())


@pytest.mark.parametrize("op", ["recurrent_buffered", "recurrent_lowrank"])
def test_a_window_moves_between_the_devices(device, op):
    """Whoever wrote an entry, the other reads it; the counts are equal to the bit."""
    from gdn_ops import windows

    H, HV, K, V, R, B = 1, 2, 64, 64, 4, 3
    g = torch.Generator().manual_seed(4)
    pools = [*windows.allocate(B, H, HV, K, V, R)]
    if op == "recurrent_buffered":
        pools.insert(0, torch.zeros(B, HV, V, K))
    alone, shared = [x.clone() for x in pools], pools
    accepted = [[2, 2, 2], [1, 2, 0], [2, 1, 2], [2, 2, 1], [1, 1, 1], [2, 2, 2]]
    for step, counts in enumerate(accepted):
        x = [torch.randn(B, 2, n, d, generator=g) for n, d in ((H, K), (H, K), (HV, V))]
        x += [-torch.rand(B, 2, HV, generator=g), torch.rand(B, 2, HV, generator=g)]
        kw = {"num_accepted": torch.tensor(counts), "qk_l2norm": True}
        where = device if step % 2 else "cpu"
        moved = [t.to(where) for t in shared]
        with torch.no_grad():
            want = getattr(gdn_ops, op)(*x, *alone, **kw)
            kw["num_accepted"] = kw["num_accepted"].to(where)
            got = getattr(gdn_ops, op)(*[t.to(where) for t in x], *moved, **kw)
        shared = [t.cpu() for t in moved]
        torch.testing.assert_close(got.cpu(), want, rtol=1e-5, atol=1e-5)
        assert torch.equal(shared[-1], alone[-1]), f"win_fill after step {step}"
    assert shared[-1].ne(0).all()


def test_inputs_that_require_grad_are_refused(device):
    inputs = [to_device(torch.ones(1, 1, 1, 64)) for _ in range(3)]
    gates = [to_device(torch.zeros(1, 1, 1)) for _ in range(2)]
    inputs[0].requires_grad_()
    with pytest.raises(RuntimeError, match="no gradient"):
        gdn_ops.recurrent(*inputs, *gates, to_device(torch.zeros(1, 1, 64, 64)))


@pytest.mark.parametrize("at", [0, 1, 2])
def test_a_window_that_requires_grad_is_refused(device, at):
    from gdn_ops import windows

    window = [x.to(device) for x in windows.allocate(1, 1, 2, 64, 64, 8)]
    window[at].requires_grad_()
    name = ["win_k", "win_u", "win_g"][at]
    q, v = torch.zeros(1, 1, 1, 64, device=device), torch.zeros(1, 1, 2, 64, device=device)
    g = torch.zeros(1, 1, 2, device=device)
    with pytest.raises(RuntimeError, match=f"{name} requires grad"):
        gdn_ops.recurrent_lowrank(q, q, v, g, g, *window)


def test_two_devices_in_one_call_are_refused(device):
    inputs = [torch.ones(1, 1, 1, 64) for _ in range(3)] + [torch.zeros(1, 1, 1) for _ in range(2)]
    with torch.no_grad(), pytest.raises(RuntimeError, match="expected device"):
        gdn_ops.recurrent(*map(to_device, inputs), torch.zeros(1, 1, 64, 64))
