"""``short_conv``, ``conv1d`` and ``conv_gating`` against the float64 oracle."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F
from common import ACTIVATIONS, assert_close, at_thread_counts, make_layer, offsets

import gdn_ops
from gdn_ops import reference


def conv_pool(P, C, L, dtype=torch.float32, layout="rows", seed=3):
    gen = torch.Generator().manual_seed(seed)
    if layout == "rows":
        return torch.randn(P, C, L, generator=gen).to(dtype)
    return torch.randn(P, L, C, generator=gen).to(dtype).transpose(1, 2)


def clone(pool):
    return torch.empty_strided(pool.shape, pool.stride(), dtype=pool.dtype).copy_(pool)


@pytest.mark.parametrize("layout", ["rows", "columns"])
@pytest.mark.parametrize(
    "W, L", [(4, 3), (4, 4), (4, 7), (4, 20), (2, 1), (1, 0), (1, 2), (8, 7), (3, 4)]
)
@pytest.mark.parametrize("T", [1, 2, 5, 40])
def test_trailing(T, W, L, layout):
    for C, bias, activation in ((5, True, "silu"), (130, False, "none"), (600, True, "silu")):
        x, weight = torch.randn(3, T, C), torch.randn(C, W)
        b = torch.randn(C) if bias else None
        pool = conv_pool(5, C, L, layout=layout)
        before = clone(pool)
        idx = torch.tensor([4, -1, 2], dtype=torch.int32)
        has = torch.tensor([True, True, False])
        kw = dict(state_indices=idx, has_initial_state=has, activation=activation)
        y_ref, pool_ref = reference.short_conv(x, weight, b, pool, **kw)
        y = gdn_ops.short_conv(x, weight, b, pool, **kw)
        assert_close("y", y, y_ref, slack=4)
        assert torch.equal(y[1], torch.zeros_like(y[1]))
        assert torch.equal(pool.double(), pool_ref)  # states are copies: exact
        assert torch.equal(pool[[0, 1, 3]], before[[0, 1, 3]])


@pytest.mark.parametrize("act, state", list(itertools.product(ACTIVATIONS, ACTIVATIONS)))
@pytest.mark.parametrize("layout", ["rows", "columns"])
def test_dtypes(act, state, layout):
    for C in (64, 77):
        x, weight = torch.randn(2, 3, C).to(act), torch.randn(C, 4).to(act)
        pool = conv_pool(2, C, 4, state, layout)
        y_ref, pool_ref = reference.short_conv(x, weight, None, pool)
        y = gdn_ops.short_conv(x, weight, None, pool)
        assert_close("y", y, y_ref, act)
        assert_close("state", pool, pool_ref, state)


@pytest.mark.parametrize("act, state", list(itertools.product(ACTIVATIONS, ACTIVATIONS)))
@pytest.mark.parametrize("L", [3, 4])
@pytest.mark.parametrize("layout", ["rows", "columns", "strided"])
def test_update(layout, L, act, state):
    """One token: the path that keeps the columns in registers, next to bytes that stay."""
    for C, activation, N in ((16, "silu", 2), (208, "none", 2), (704, "silu", 19)):
        x, weight = (4 * torch.randn(N, 1, C)).to(act), torch.randn(C, 4).to(act)
        page = torch.full((N + 2, C * L + 5), 7.0, dtype=state)
        if layout == "strided":
            page = torch.full((N + 2, 2 * C * L + 5), 7.0, dtype=state)
            pool = page[:, : 2 * C * L].unflatten(1, (C, 2 * L))[..., ::2]
        elif layout == "rows":
            pool = page[:, : C * L].unflatten(1, (C, L))
        else:
            pool = page[:, : C * L].unflatten(1, (L, C)).transpose(1, 2)
        pool.copy_(torch.randn(pool.shape))
        before = page.clone()
        idx = torch.randperm(N + 2)[:N]
        y_ref, pool_ref = reference.short_conv(
            x, weight, None, pool, state_indices=idx, activation=activation
        )
        y = gdn_ops.short_conv(x, weight, None, pool, state_indices=idx, activation=activation)
        assert_close("y", y, y_ref, act, slack=8)
        assert torch.equal(pool, pool_ref.to(state))
        pool.copy_(torch.zeros(()))  # every byte outside the pool's own
        mask = page == 0
        assert torch.equal(page[~mask], before[~mask])


@pytest.mark.parametrize("layout", ["rows", "columns"])
@pytest.mark.parametrize("N", [3, 8, 19])
@pytest.mark.parametrize("act", ACTIVATIONS)
def test_update_beside_others(act, N, layout):
    """Beside any others, padding and fresh ones too, a sequence has the bits it has alone."""
    C = 720
    x, weight, bias = torch.randn(N, 1, C).to(act), torch.randn(C, 4).to(act), torch.randn(C)
    rows = torch.randperm(N + 1)[:N]
    rows[N // 2] = -1
    live = torch.ones(N, dtype=torch.bool)
    live[N - 1] = False
    together, alone = (conv_pool(N + 1, C, 3, act, layout) for _ in range(2))
    y = gdn_ops.short_conv(x, weight, bias, together, state_indices=rows, has_initial_state=live)
    for n in range(N):
        one = gdn_ops.short_conv(
            x[n : n + 1], weight, bias, alone,
            state_indices=rows[n : n + 1], has_initial_state=live[n : n + 1],
        )  # fmt: skip
        assert torch.equal(one[0], y[n])
    assert torch.equal(together, alone)


@pytest.mark.parametrize("layout", ["rows", "columns"])
@pytest.mark.parametrize("l2norm, V", [(False, 32), (True, 32), (True, 24)])
@pytest.mark.parametrize("N", [3, 19])
@pytest.mark.parametrize("act", ACTIVATIONS)
def test_conv_gating_beside_others(act, N, l2norm, V, layout):
    """The same of the convolution with gates, and the convolution is that of short_conv."""
    H, HV, K = 5, 15, 48
    C = 2 * H * K + HV * V
    layer = make_layer(N, 1, H, HV, K, V, dtype=act)
    mixed, _, b, a = layer["projected"].split([C, HV * V, HV, HV], dim=-1)
    weight, bias = layer["conv_weight"], layer["conv_bias"]
    rows = torch.randperm(N + 1)[:N]
    rows[N // 2] = -1
    live = torch.ones(N, dtype=torch.bool)
    live[N - 1] = False
    together, alone, plain = (conv_pool(N + 1, C, 3, act, layout) for _ in range(3))

    def call(pool, n):
        gates = a[n], b[n], weight, bias, layer["A_log"], layer["dt_bias"]
        kw = dict(state_indices=rows[n], has_initial_state=live[n], qk_l2norm=l2norm)
        return gdn_ops.conv_gating(mixed[n], *gates, pool, H, K, **kw)

    got = call(together, slice(None))
    for n in range(N):
        for one, x in zip(call(alone, slice(n, n + 1)), got, strict=True):
            assert torch.equal(one[0], x[n])
    assert torch.equal(together, alone)
    y = gdn_ops.short_conv(mixed, weight, bias, plain, state_indices=rows, has_initial_state=live)
    assert torch.equal(together, plain)
    q, k, v = (x.flatten(1) for x in got[:3])
    assert torch.equal(v, y[:, 0, 2 * H * K :])
    if not l2norm:
        assert torch.equal(torch.cat([q, k], 1), y[:, 0, : 2 * H * K])


@pytest.mark.parametrize("L", [3, 4])
@pytest.mark.parametrize("layout", ["rows", "columns"])
@pytest.mark.parametrize("act", ACTIVATIONS)
def test_update_has_the_bits_of_prefill(act, layout, L):
    """Token by token or all at once, and whatever the strides of the weight."""
    C, T = 720, 6
    x, weight = torch.randn(2, T, C).to(act), torch.randn(C, 4).to(act)
    bias = torch.randn(C).to(act)
    strided = weight.t().contiguous().t()
    whole, steps, odd = (conv_pool(2, C, L, act, layout) for _ in range(3))
    y = gdn_ops.short_conv(x, weight, bias, whole)
    for t in range(T):
        one = x[:, t : t + 1]
        assert torch.equal(gdn_ops.short_conv(one, weight, bias, steps), y[:, t : t + 1])
        assert torch.equal(gdn_ops.short_conv(one, strided, bias, odd), y[:, t : t + 1])
    assert torch.equal(steps, whole) and torch.equal(odd, whole)


@pytest.mark.parametrize("layout", ["rows", "columns"])
@pytest.mark.parametrize("accepted", [1, 2, 3])
def test_leading_speculative(accepted, layout):
    C, T, W = 19, 3, 4
    pool = conv_pool(4, C, W - 1 + T - 1, layout=layout)
    x, weight = torch.randn(2, T, C), torch.randn(C, W)
    kw = dict(
        state_indices=torch.tensor([2, 0]),
        num_accepted=torch.tensor([accepted, 0]),
        conv_leading=True,
    )
    y_ref, pool_ref = reference.short_conv(x, weight, None, pool, **kw)
    y = gdn_ops.short_conv(x, weight, None, pool, **kw)
    assert_close("y", y, y_ref, slack=4)
    assert torch.equal(pool.double(), pool_ref)


def test_leading_plain_keeps_the_tail():
    pool = conv_pool(2, 6, 5)
    before = pool.clone()
    x, weight = torch.randn(2, 2, 6), torch.randn(6, 4)
    y_ref, pool_ref = reference.short_conv(x, weight, None, pool, conv_leading=True)
    y = gdn_ops.short_conv(x, weight, None, pool, conv_leading=True)
    assert_close("y", y, y_ref, slack=4)
    assert torch.equal(pool.double(), pool_ref) and torch.equal(pool[..., 3:], before[..., 3:])


def test_packed():
    lengths, C = [0, 5, 1, 0, 33], 24
    cu = offsets(lengths, torch.int64)
    x, weight = torch.randn(1, sum(lengths), C), torch.randn(C, 4)
    pool = conv_pool(5, C, 3)
    y_ref, pool_ref = reference.short_conv(x, weight, None, pool, cu_seqlens=cu)
    y = gdn_ops.short_conv(x, weight, None, pool, cu_seqlens=cu)
    assert_close("y", y, y_ref, slack=4)
    assert torch.equal(pool.double(), pool_ref)


def test_strided_input_and_threads():
    wide = torch.randn(40, 2, 700)
    x = wide[..., 13:613]
    odd = wide[..., ::2][..., :300]
    weight = torch.randn(600, 4)

    def call():
        pool = conv_pool(40, 600, 4)
        return gdn_ops.short_conv(x, weight, None, pool), pool

    results = at_thread_counts((1, 2, 5), call)
    pool = conv_pool(40, 600, 4)
    y = gdn_ops.short_conv(x.contiguous(), weight, None, pool)
    for other_y, other_pool in results:
        assert torch.equal(y, other_y) and torch.equal(pool, other_pool)
    a, b = conv_pool(40, 300, 3), conv_pool(40, 300, 3)
    assert torch.equal(
        gdn_ops.short_conv(odd, weight[:300], None, a),
        gdn_ops.short_conv(odd.contiguous(), weight[:300], None, b),
    )


@pytest.mark.parametrize("T", [1, 2, 7])
def test_conv1d_equals_torch(T):
    x, weight, bias = torch.randn(2, T, 10), torch.randn(10, 4), torch.randn(10)
    y, final = gdn_ops.conv1d(x, weight, bias, activation="none")
    expected = F.conv1d(x.transpose(1, 2).double(), weight[:, None].double(), bias.double(),
                        padding=3, groups=10)[..., :T].transpose(1, 2)  # fmt: skip
    assert_close("y", y, expected, slack=4)
    _, final_ref = reference.conv1d(x, weight, bias, activation="none")
    assert torch.equal(final.double(), final_ref)


@pytest.mark.parametrize(
    "T, l2norm, act", list(itertools.product((1, 20), (False, True), ACTIVATIONS))
)
def test_conv_gating(T, l2norm, act):
    H, HV, K, V = 2, 6, 40, 24
    layer = make_layer(3, T, H, HV, K, V, dtype=act)
    C = 2 * H * K + HV * V
    mixed, _, b, a = layer["projected"].split([C, HV * V, HV, HV], dim=-1)
    pool = conv_pool(4, C, 4, act)
    args = (mixed, a, b, layer["conv_weight"], layer["conv_bias"], layer["A_log"], layer["dt_bias"])
    kw = dict(state_indices=torch.tensor([3, -1, 0]), qk_l2norm=l2norm)
    *expected, pool_ref = reference.conv_gating(*args, pool, H, K, **kw)
    got = gdn_ops.conv_gating(*args, pool, H, K, **kw)
    for name, x, ref in zip("qkvgb", got, expected, strict=True):
        assert_close(name, x, ref, slack=2)
    assert torch.equal(pool.double(), pool_ref)


@pytest.mark.parametrize("B, T", [(0, 3), (2, 0)])
def test_conv_gating_of_nothing(B, T):
    """In the oracle too, which once could not tell V without a token."""
    args = (
        torch.randn(B, T, 2 * 2 * 8 + 6 * 4),
        *torch.randn(2, B, T, 6),
        torch.randn(56, 4),
        None,
    )
    args += (torch.randn(6), torch.randn(6), conv_pool(2, 56, 3), 2, 8)
    rows = torch.arange(B)
    for ops in (gdn_ops, reference):
        shapes = [tuple(x.shape) for x in ops.conv_gating(*args, rows)[:5]]
        assert shapes == [(B, T, 2, 8), (B, T, 2, 8), (B, T, 6, 4), (B, T, 6), (B, T, 6)]


def test_raises_before_writing():
    x, weight = torch.randn(2, 3, 8), torch.randn(8, 4)
    cases = [
        (dict(activation="gelu"), "activation.*'silu' or 'none', got 'gelu'"),
        (dict(state_indices=torch.tensor([0, 7])), "below P = 2"),
        (dict(num_accepted=torch.tensor([1, 1])), "conv_leading"),
        (dict(num_accepted=torch.tensor([1, 1]), conv_leading=True), "L >= W - 1 \\+ T - 1 = 5"),
        (
            dict(num_accepted=torch.tensor([1, 4]), conv_leading=True, L=5),
            "L >= 6 columns for 3 tokens and 4 accepted ones in sequence 1, got 5",
        ),
    ]
    for kw, message in cases:
        L = kw.pop("L", 4)
        pool = conv_pool(2, 8, L)
        with pytest.raises(RuntimeError, match=message):
            gdn_ops.short_conv(x, weight, None, pool, **kw)
        assert torch.equal(pool, conv_pool(2, 8, L))
    for width, given, message in (
        (4, dict(initial_state=torch.zeros(2, 8, 2)), "initial_state: .* W - 1 = 3 columns, got 2"),
        (4, dict(state_len=2), "state_len: expected at least W - 1 = 3 columns, got 2"),
        (
            1,
            dict(initial_state=torch.zeros(2, 8, 1)),
            "initial_state: .* expected no columns, got 1",
        ),
    ):
        with pytest.raises(RuntimeError, match=f"conv1d: {message}"):
            gdn_ops.conv1d(x, torch.randn(8, width), **given)
    with pytest.raises(RuntimeError, match="L >= W - 1 = 3"):
        gdn_ops.short_conv(x, weight, None, conv_pool(2, 8, 2))
    with pytest.raises(RuntimeError, match="W <= 8"):
        gdn_ops.short_conv(x, torch.randn(8, 9), None, conv_pool(2, 8, 9))


@pytest.mark.parametrize("offsets", [[[0, 6]], [0, 3, 6]], ids=["2-D", "batch of two"])
def test_the_backward_refuses_offsets_of_another_form(offsets):
    """Offsets beside a batch of two were taken for those of the tokens of both rows."""
    y, weight, cu = torch.randn(2, 3, 4), torch.randn(4, 2), torch.tensor(offsets)
    with pytest.raises(RuntimeError, match="^conv1d_backward: cu_seqlens: expected"):
        torch.ops.gdn.conv1d_backward(y, None, y, weight, None, None, cu, "silu", 1)


def test_silu_at_its_ends():
    """Infinities, the far negative side and NaN go through the activation as through torch's."""
    ends = torch.tensor([0.0, -0.0, 1e-30, -1e-30, 20.0, -20.0, 88.0, -86.0, 1e30, torch.inf])
    x = torch.cat([ends, torch.linspace(-30, 30, 1014)])[None, None]
    weight = torch.zeros(1024, 4)
    weight[:, 3] = 1
    y = gdn_ops.short_conv(x, weight, None, torch.zeros(1, 1024, 3))
    want = F.silu(x.double())
    assert torch.isinf(y[..., 9]).all()
    finite = want.isfinite()
    assert ((y.double() - want).abs()[finite] <= 4e-6 * want.abs()[finite]).all()
    x = torch.tensor([-torch.inf, -1e30, -100.0, torch.nan]).repeat(256)[None, None]
    y = gdn_ops.short_conv(x, weight, None, torch.zeros(1, 1024, 3))
    assert (y[0, 0, 0::4] == 0).all() and (y[0, 0, 1::4] == 0).all()
    assert (y[0, 0, 2::4].abs() < 1e-30).all() and y[0, 0, 3::4].isnan().all()
