"""The fused step against the float64 oracle and against the separate ops."""

from __future__ import annotations

import itertools

import pytest
import torch
from common import (
    ACTIVATIONS,
    assert_close,
    at_thread_counts,
    clone_pool,
    layer_args,
    make_layer,
    make_pool,
)
from test_conv import conv_pool

import gdn_ops
from gdn_ops import reference

H, HV, K, V = 2, 6, 40, 24
C = 2 * H * K + HV * V


def run(layer, conv_state, state, **kw):
    args = layer_args(layer)
    expected = reference.decode(*args, conv_state, state, H, K, **kw)
    return gdn_ops.decode(*args, conv_state, state, H, K, **kw), expected


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("act, state_dtype", list(itertools.product(ACTIVATIONS, ACTIVATIONS)))
def test_against_oracle(act, state_dtype, transposed):
    for T, columns in itertools.product((1, 3), ("rows", "columns")):
        layer = make_layer(4, T, H, HV, K, V, dtype=act)
        conv_state = conv_pool(6, C, 4, act, columns)
        state = make_pool(6, HV, V, K, dtype=state_dtype, transposed=transposed)
        before = clone_pool(state)
        kw = dict(
            state_indices=torch.tensor([5, -1, 0, 2], dtype=torch.int32),
            has_initial_state=torch.tensor([True, True, False, True]),
        )
        y, (y_ref, conv_ref, state_ref) = run(layer, conv_state, state, **kw)
        # The norm divides by the size of a row, which may be far below 1: relative error counts.
        assert_close("y", y, y_ref, act, slack=8 if act == torch.float32 else 1)
        assert torch.equal(conv_state.double(), conv_ref)
        assert_close("state", state[[5, 0, 2]], state_ref[[5, 0, 2]], state_dtype, slack=2)
        assert torch.equal(state[[1, 3, 4]], before[[1, 3, 4]])
        assert torch.equal(y[1], torch.zeros_like(y[1]))


def test_speculative():
    T, S = 3, 4
    layer = make_layer(2, T, H, HV, K, V)
    conv_state = conv_pool(9, C, 3 + T - 1)
    state = make_pool(9, HV, V, K)
    kw = dict(
        state_indices=torch.tensor([[3, 4, 5, 6], [1, 0, 8, 7]]),
        num_accepted=torch.tensor([2, 1]),
        conv_leading=True,
    )
    assert kw["state_indices"].shape[1] == S
    y, (y_ref, conv_ref, state_ref) = run(layer, conv_state, state, **kw)
    assert_close("y", y, y_ref, slack=8)
    assert torch.equal(conv_state.double(), conv_ref)
    assert_close("state", state, state_ref, slack=2)


def test_threads_and_splits_change_no_bit():
    """One sequence with few key heads takes the two-pass form when threads outnumber its tasks."""
    layer = make_layer(1, 2, H, HV, K, V)

    def call():
        conv_state, state = conv_pool(1, C, 4), make_pool(1, HV, V, K)
        y, _ = run(layer, conv_state, state)
        return y, conv_state, state

    results = at_thread_counts((1, 2, 3, 16), call)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


def test_packed_equals_batch():
    layer = make_layer(1, 5, H, HV, K, V)
    conv_state, state = conv_pool(3, C, 4), make_pool(3, HV, V, K)
    cu = torch.tensor([0, 2, 2, 5])
    y, (y_ref, conv_ref, state_ref) = run(layer, conv_state, state, cu_seqlens=cu)
    assert_close("y", y, y_ref, slack=8)
    assert torch.equal(conv_state.double(), conv_ref)
    assert_close("state", state, state_ref, slack=2)


def test_padding_is_zero_whatever_its_tokens_hold():
    """In the oracle too, whose zeros once met the gate of the norm."""
    layer = make_layer(3, 2, H, HV, K, V)
    layer["projected"][1:] = torch.nan
    kw = {
        "state_indices": torch.tensor([[2, 3], [-1, -1], [0, 1]]),
        "num_accepted": torch.tensor([1, 1, 0]), "conv_leading": True,
    }  # fmt: skip
    y, (y_ref, _, _) = run(layer, conv_pool(4, C, 4), make_pool(4, HV, V, K), **kw)
    assert_close("y", y, y_ref, slack=8)
    assert not y[1:].any()


def test_raises_before_writing():
    layer = make_layer(2, 1, H, HV, K, V)
    for change, message in (
        (dict(projected=layer["projected"][..., :-1]), "projected: expected D"),
        (dict(projected=torch.randn(2, 17, layer["projected"].shape[-1])), "at most 16 tokens"),
        (dict(norm_weight=torch.ones(3)), "norm_weight"),
        (dict(A_log=torch.ones(2)), "A_log"),
    ):
        conv_state, state = conv_pool(2, C, 4), make_pool(2, HV, V, K)
        with pytest.raises(RuntimeError, match=message):
            gdn_ops.decode(*layer_args(layer | change), conv_state, state, H, K)
        assert torch.equal(conv_state, conv_pool(2, C, 4))
        assert torch.equal(state, make_pool(2, HV, V, K))


def test_overlapping_pools_are_refused_and_interleaved_ones_work():
    layer = make_layer(2, 1, H, HV, K, V)
    n_state, n_conv = HV * V * K, C * 4
    pages = torch.randn(2, n_state + n_conv)
    state = pages[:, :n_state].view(2, HV, V, K)
    conv_state = pages[:, n_state:].view(2, C, 4)
    y, (y_ref, _, _) = run(layer, conv_state, state)
    assert_close("y", y, y_ref, slack=8)
    clash = pages[:, n_state - 8 : -8].view(2, C, 4)
    with pytest.raises(RuntimeError, match="share memory"):
        run(layer, clash, state)


@pytest.mark.parametrize("ndim", [0, 5])
def test_a_conv_pool_of_the_wrong_rank_inside_the_state_is_named(ndim):
    """Its shape is looked at before its memory is: torch's own message named no argument."""
    layer, state = make_layer(2, 1, H, HV, K, V), make_pool(2, HV, V, K)
    clash = state.as_strided((1,) * ndim, (1,) * ndim)
    with pytest.raises(RuntimeError, match=r"^decode: conv_state: expected shape \[P, C, L\]"):
        torch.ops.gdn.decode(*layer_args(layer), clash, state, H, K)
