"""opcheck for every op of the decode family, and the gradients of the functional ones."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from common import assert_close, layer_args, make_layer, make_pool, make_qkv
from test_conv import conv_pool

import gdn_ops
from gdn_ops import reference

H, HV, K, V = 2, 6, 8, 4
C = 2 * H * K + HV * V


def samples():
    for dtype in (torch.float32, torch.bfloat16):
        for B in (0, 1, 3):
            rows = torch.tensor([4, -1, 0])[:B].to(torch.int32)
            big = make_pool(12, HV, V, K, dtype=dtype)
            state = big[2:10:1] if B != 3 else big[::2]
            qkv = make_qkv(B, 2, H, HV, K, V, dtype=dtype)
            layer = make_layer(B, 1, H, HV, K, V, dtype=dtype)
            mixed, z, b, a = layer["projected"].split([C, HV * V, HV, HV], dim=-1)
            if B == 0:  # opcheck cannot clone an empty view that starts inside its storage
                mixed, z, b, a = (torch.zeros(x.shape, dtype=dtype) for x in (mixed, z, b, a))
            gates = (a, b, layer["A_log"], layer["dt_bias"])
            pool = conv_pool(12, C, 4, dtype)[2:10]
            yield "recurrent", (*qkv, state), dict(state_indices=rows)
            a2, b2 = a.expand(B, 2, HV), b.expand(B, 2, HV)
            yield "recurrent_gated", (*qkv[:3], a2, b2, *gates[2:], state), dict(state_indices=rows)
            yield "gating", gates, {}
            weight, bias = layer["conv_weight"], layer["conv_bias"]
            yield "short_conv", (mixed, weight, bias, pool), dict(state_indices=rows)
            yield "conv1d", (mixed, weight, None), {}
            args = (mixed, a, b, weight, bias, *gates[2:], pool, H, K)
            yield "conv_gating", args, dict(state_indices=rows, qk_l2norm=True)
            heads = z.unflatten(-1, (HV, V))
            yield "gated_rms_norm", (heads, heads, layer["norm_weight"]), {}
            yield "linear", (mixed, torch.randn(24, C, dtype=dtype)), {}
            args = (*layer_args(layer), pool, state, H, K)
            yield "decode", args, dict(state_indices=rows)
            if B == 3:
                packed = make_qkv(1, 3, H, HV, K, V, dtype=dtype)
                table = torch.tensor([[1, 2, 3], [5, -1, 4]])
                cu = torch.tensor([0, 2, 3])
                accepted = torch.tensor([1, 2])
                yield "recurrent", (*packed, state), dict(
                    state_indices=table, cu_seqlens=cu, num_accepted=accepted,
                    has_initial_state=torch.tensor([True, False]),
                )  # fmt: skip


@pytest.mark.parametrize("name", dict.fromkeys(op for op, _, _ in samples()))
def test_opcheck(name):
    count = 0
    for op, args, kwargs in samples():
        if op == name:
            torch.library.opcheck(getattr(torch.ops.gdn, name).default, args, kwargs)
            count += 1
    assert count >= 6


def double(*tensors):
    return [t.detach().double().requires_grad_() for t in tensors]


def check_gradients(ours, oracle, inputs, slack=4):
    """Gradients of a random projection of every output, against autograd through the oracle."""
    leaves = [t.detach().clone().requires_grad_() for t in inputs]
    exact = double(*inputs)
    outs, refs = ours(*leaves), oracle(*exact)
    seeds = [torch.randn_like(o) for o in outs]
    torch.autograd.backward(outs, seeds)
    torch.autograd.backward(refs, [s.double() for s in seeds])
    for i, (leaf, ref) in enumerate(zip(leaves, exact, strict=True)):
        scale = ref.grad.abs().max().clamp(min=1.0)
        assert_close(f"gradient {i}", leaf.grad / scale, ref.grad / scale, slack=slack)


def test_gating_gradients():
    inputs = (torch.randn(2, 5, 6), torch.randn(2, 5, 6), torch.rand(6), torch.randn(6))
    check_gradients(gdn_ops.gating, reference.gating, inputs)


def test_norm_gradients():
    inputs = (torch.randn(7, 3, 24), torch.randn(7, 3, 24), torch.randn(24))
    check_gradients(
        lambda *x: [gdn_ops.gated_rms_norm(*x)], lambda *x: [reference.gated_rms_norm(*x)], inputs
    )


@pytest.mark.parametrize("activation", ["silu", "none"])
@pytest.mark.parametrize("lengths", [None, [1, 0, 4, 2], [7]])
def test_conv1d_gradients(lengths, activation):
    T = 5 if lengths is None else sum(lengths)
    B = 2 if lengths is None else 1
    cu = None if lengths is None else torch.tensor([0, *torch.tensor(lengths).cumsum(0)])
    N = B if lengths is None else len(lengths)
    inputs = (torch.randn(B, T, 6), torch.randn(6, 4), torch.randn(6), torch.randn(N, 6, 4))
    check_gradients(
        lambda x, w, b, s: gdn_ops.conv1d(x, w, b, s, cu, activation),
        lambda x, w, b, s: reference.conv1d(x, w, b, s, cu, activation),
        inputs,
    )


def test_conv1d_gradient_with_views_and_views_of_the_gradient():
    """The gradient of a cat of slices arrives with a wide row stride."""
    x = torch.arange(12.0).view(1, 2, 6).requires_grad_()
    weight = torch.randn(6, 4)
    parts = [
        gdn_ops.conv1d(x[..., i : i + 2], weight[i : i + 2], activation="none")[0]
        for i in (0, 2, 4)
    ]
    torch.cat(parts, -1).mul(torch.arange(12.0).view(1, 2, 6)).sum().backward()
    y = x.detach().double().requires_grad_()
    conv = F.conv1d(y.transpose(1, 2), weight.double()[:, None], padding=3, groups=6)[..., :2]
    conv.transpose(1, 2).mul(torch.arange(12.0).view(1, 2, 6)).sum().backward()
    assert_close("dx", x.grad, y.grad, slack=64)


def test_backward_under_compile_and_twice():
    def loss(a, b, A_log, dt):
        g, beta = gdn_ops.gating(a, b, A_log, dt)
        return (g * beta).sum()

    inputs = [torch.randn(4, 6), torch.randn(4, 6), torch.rand(6), torch.randn(6)]
    eager = [t.clone().requires_grad_() for t in inputs]
    compiled = [t.clone().requires_grad_() for t in inputs]
    loss(*eager).backward()
    torch.compile(loss, fullgraph=True)(*compiled).backward()
    for e, c in zip(eager, compiled, strict=True):
        assert_close("compiled gradient", c.grad, e.grad)
    a = inputs[0].clone().requires_grad_()
    (grad,) = torch.autograd.grad(gdn_ops.gating(a, *inputs[1:])[0].sum(), a, create_graph=True)
    (second,) = torch.autograd.grad(grad.sum(), a)
    exact = a.detach().double().requires_grad_()
    (ref,) = torch.autograd.grad(
        reference.gating(exact, *inputs[1:])[0].sum(), exact, create_graph=True
    )
    assert_close("second derivative", second, torch.autograd.grad(ref.sum(), exact)[0], slack=2)
