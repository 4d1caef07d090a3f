"""The causal-conv1d names: channels first, every keyword honoured or refused."""

import inspect

import pytest
import torch
from common import ACTIVATIONS, assert_close

import gdn_ops
from gdn_ops import reference

B, C, T, W = 2, 5, 7, 4


def inputs(dtype=torch.float32):
    gen = torch.Generator().manual_seed(4)
    x, weight, bias, states = (
        torch.randn(*shape, generator=gen).to(dtype)
        for shape in ((B, C, T), (C, W), (C,), (B, C, W - 1))
    )
    return x, weight, bias, states


def test_signatures():
    """Those of causal-conv1d 1.6."""
    assert list(inspect.signature(gdn_ops.causal_conv1d_fn).parameters) == [
        "x", "weight", "bias", "seq_idx", "initial_states", "return_final_states",
        "final_states_out", "activation",
    ]  # fmt: skip
    assert list(inspect.signature(gdn_ops.causal_conv1d_update).parameters) == [
        "x", "conv_state", "weight", "bias", "activation", "cache_seqlens", "conv_state_indices",
    ]  # fmt: skip


@pytest.mark.parametrize("dtype", ACTIVATIONS)
@pytest.mark.parametrize("activation", [None, "silu", "swish"])
def test_fn(dtype, activation):
    x, weight, bias, states = inputs(dtype)
    name = "silu" if activation else "none"
    y = gdn_ops.causal_conv1d_fn(x, weight, bias, activation=activation)
    expected, _ = reference.conv1d(x.transpose(1, 2), weight, bias, activation=name)
    assert_close("y", y, expected.transpose(1, 2))
    out = torch.empty_like(states)
    y, final = gdn_ops.causal_conv1d_fn(
        x, weight, None, None, states, True, out, activation=activation
    )
    expected, last = reference.conv1d(x.transpose(1, 2), weight, None, states, activation=name)
    assert final is out
    assert_close("y", y, expected.transpose(1, 2))
    assert torch.equal(final.double(), last)
    fresh = gdn_ops.causal_conv1d_fn(x, weight, None, None, states, True, activation=activation)[1]
    assert torch.equal(fresh, final)


def test_fn_over_segments():
    """seq_idx: as if every run of equal numbers had been passed alone; rows never mix."""
    x, weight, bias, _ = inputs()
    seq_idx = torch.tensor([[0, 0, 0, 1, 1, 2, 2], [2, 2, 2, 2, 2, 2, 5]], dtype=torch.int32)
    y = gdn_ops.causal_conv1d_fn(x, weight, bias, seq_idx, activation="silu")
    for b, start, end in ((0, 0, 3), (0, 3, 5), (0, 5, 7), (1, 0, 6), (1, 6, 7)):
        part = x[b : b + 1, :, start:end].transpose(1, 2)
        expected, _ = reference.conv1d(part, weight, bias)
        assert_close("y", y[b : b + 1, :, start:end], expected.transpose(1, 2))


def test_negative_segments_are_padding():
    """As in causal-conv1d: output zero, and what they hold reaches nothing, no gradient either."""
    x, weight, bias, _ = inputs()
    seq_idx = torch.tensor([[-1, -1, 0, 0, 1, 1, -1], [0, 0, 0, 0, 0, 0, 0]], dtype=torch.int32)
    padding = (seq_idx < 0)[:, None].expand_as(x)
    leaves = [t.requires_grad_() for t in (x.masked_fill(padding, torch.nan), weight, bias)]
    y = gdn_ops.causal_conv1d_fn(*leaves, seq_idx, activation="silu")
    assert not y[padding].any()
    for b, start, end in ((0, 2, 4), (0, 4, 6), (1, 0, 7)):
        part = x[b : b + 1, :, start:end].transpose(1, 2)
        expected, _ = reference.conv1d(part, weight, bias)
        assert_close("y", y[b : b + 1, :, start:end], expected.transpose(1, 2))
    y.sum().backward()
    assert not leaves[0].grad[padding].any() and all(t.grad.isfinite().all() for t in leaves)


def test_fn_has_gradients():
    """Also through segments and into the initial states."""
    x, weight, bias, states = (t.double() for t in inputs())
    seq_idx = torch.tensor([[0, 0, 0, 1, 1, 2, 2], [2, 2, 2, 2, 2, 2, 5]])
    for kwargs in ({"seq_idx": seq_idx}, {"initial_states": states}):
        leaves = [t.float().requires_grad_() for t in (x, weight, bias)]
        y = gdn_ops.causal_conv1d_fn(*leaves, **{k: v if k == "seq_idx" else v.float()
                                                 for k, v in kwargs.items()})  # fmt: skip
        y.square().sum().backward()
        exact = [t.clone().requires_grad_() for t in (x, weight, bias)]
        padded = torch.cat([kwargs.get("initial_states", torch.zeros_like(states)), exact[0]], 2)
        columns = torch.stack([padded[:, :, w : w + T] for w in range(W)], -1)
        if "seq_idx" in kwargs:
            lags = torch.arange(W - 1, -1, -1)
            source = torch.arange(T)[:, None] - lags
            same = seq_idx[:, source.clamp(min=0)] == seq_idx[:, :, None]
            columns = columns * (same & (source >= 0))[:, None]
        ((columns * exact[1][:, None]).sum(-1) + exact[2][:, None]).square().sum().backward()
        for name, got, expected in zip("xwb", leaves, exact, strict=True):
            assert_close(name, got.grad, expected.grad, torch.float32, 10.0)


@pytest.mark.parametrize("dtype", ACTIVATIONS)
@pytest.mark.parametrize("tokens", [0, 3])
def test_update(dtype, tokens):
    x, weight, bias, _ = inputs(dtype)
    x = x[:, :, 0] if tokens == 0 else x[:, :, :tokens]
    pool = torch.randn(4, C, W + 1).to(dtype)
    before = pool.clone()
    indices = torch.tensor([3, -1], dtype=torch.int32)
    y = gdn_ops.causal_conv1d_update(x, pool, weight, bias, "silu", conv_state_indices=indices)
    wide = x[:, None] if tokens == 0 else x.transpose(1, 2)
    expected, states = reference.short_conv(wide, weight, bias, before, indices)
    assert_close("y", y, expected[:, 0] if tokens == 0 else expected.transpose(1, 2))
    assert_close("state", pool, states)
    assert torch.equal(pool[:3], before[:3]) and not y[1].any()


def test_refuses_by_name():
    x, weight, _, states = inputs()
    seq_idx = torch.zeros(B, T, dtype=torch.int32)
    for kwargs, name in (
        ({"seq_idx": seq_idx, "initial_states": states}, "seq_idx"),
        ({"seq_idx": seq_idx, "return_final_states": True}, "seq_idx"),
        ({"seq_idx": seq_idx[:, 1:]}, "seq_idx"),
        ({"seq_idx": seq_idx.float()}, "seq_idx"),
        ({"initial_states": torch.zeros(B, C, W)}, "initial_states"),
        ({"final_states_out": states}, "final_states_out"),
        ({"activation": "gelu"}, "activation"),
    ):
        with pytest.raises(ValueError, match=name):
            gdn_ops.causal_conv1d_fn(x, weight, **kwargs)
    for out in (states.int(), states[:1], torch.empty(B + 1, *states.shape[1:]), states.to("meta")):
        with pytest.raises(ValueError, match="final_states_out"):
            gdn_ops.causal_conv1d_fn(x, weight, return_final_states=True, final_states_out=out)
    before = states.clone()
    with pytest.raises(ValueError, match=r"x: expected shape \[B, C, T\], got \[4, 9\]"):
        gdn_ops.causal_conv1d_fn(torch.zeros(4, 9), torch.zeros(4, 3))
    with pytest.raises(NotImplementedError, match="cache_seqlens"):
        gdn_ops.causal_conv1d_update(x, states, weight, cache_seqlens=torch.zeros(B))
    with pytest.raises(ValueError, match="activation"):
        gdn_ops.causal_conv1d_update(x, states, weight, activation="gelu")
    for wrong in (x[0, 0], x[None]):
        with pytest.raises(ValueError, match=r"x: expected shape \[B, C\] or"):
            gdn_ops.causal_conv1d_update(wrong, states, weight)
    with pytest.raises(ValueError, match="conv_state: expected 1 rows"):
        gdn_ops.causal_conv1d_update(x[:1], states, weight)
    assert torch.equal(states, before)
