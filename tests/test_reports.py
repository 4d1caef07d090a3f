"""Public bug reports of this field as tests.

The names carry the letter of docs/reports.md, which maps each report to its tests, here or where
their tools are. Expected numbers are worked by hand with the scalar form: S <- e^g S,
e = beta (v - k S), S <- S + k e, o = q S.
"""

from __future__ import annotations

import ast
import functools
import itertools
import math
import re
from pathlib import Path

import pytest
import torch
from common import ACTIVATIONS, assert_close, at_thread_counts, make_layer, make_pool, make_qkv

import gdn_ops
from gdn_ops import reference, windows

ROOT = Path(__file__).resolve().parent.parent

DIGITS = torch.tensor([[1.0, 10.0, 100.0, 1000.0]])


def scalar(q=1.0, k=1.0, v=1.0, g=0.0, beta=1.0, T=1):
    """q, k, v, g, beta of one head of size one, the same at each of T tokens."""
    q, k, v = (torch.full((1, T, 1, 1), x) for x in (q, k, v))
    g, beta = (torch.full((1, T, 1), x) for x in (g, beta))
    return q, k, v, g, beta


def conv(x, weight, state, **kw):
    return gdn_ops.short_conv(x, weight, None, state, activation="none", **kw)


@pytest.mark.parametrize("T", [1, 2, 3, 4, 5])
def test_a1_conv_gradient_when_the_chunk_is_shorter_than_the_state(T):
    x = torch.full((1, T, 1), 4.0, requires_grad=True)
    initial = torch.tensor([[[0.0, 1.0, 2.0, 3.0]]], requires_grad=True)
    y, final = gdn_ops.conv1d(x, DIGITS, None, initial, activation="none")
    upstream = torch.tensor([[[5.0, 10.0, 20.0, 30.0]]])
    torch.autograd.backward([final], [upstream])
    joined = torch.cat([torch.tensor([0.0, 1.0, 2.0, 3.0]), torch.full((T,), 4.0)])
    grads = torch.cat([torch.zeros(T), upstream.flatten()])
    assert torch.equal(final.flatten(), joined[T:])
    assert torch.equal(initial.grad.flatten(), grads[:4])
    assert torch.equal(x.grad.flatten(), grads[4:])


@pytest.mark.parametrize("stride", ["cat", "every second"])
def test_a2_conv_gradient_of_a_strided_upstream_gradient(stride):
    x = torch.arange(12.0).view(1, 2, 6).requires_grad_()
    weights = [torch.randn(2, 4, requires_grad=True) for _ in range(3)]
    upstream = torch.randn(1, 4, 6)[:, ::2] if stride != "cat" else torch.randn(1, 2, 6)
    parts = [
        gdn_ops.conv1d(x[..., 2 * i : 2 * i + 2], w, activation="none")[0]
        for i, w in enumerate(weights)
    ]
    got = torch.autograd.grad([torch.cat(parts, -1)], [x, *weights], [upstream])
    exact = [t.detach().double().requires_grad_() for t in (x, *weights)]
    padded = torch.nn.functional.pad(exact[0].transpose(1, 2), (3, 0))
    y = torch.nn.functional.conv1d(padded, torch.cat(exact[1:])[:, None], groups=6).transpose(1, 2)
    expected = torch.autograd.grad([y], exact, [upstream.double()])
    for name, a, b in zip("x123", got, expected, strict=True):
        assert_close(name, a, b)


@pytest.mark.parametrize("T", [63, 64, 65, 127, 128, 129, 257])
def test_a3_metadata_is_never_read_past_its_end(T):
    tail = torch.full((4,), 2147483647, dtype=torch.int32)
    cu = torch.cat([torch.tensor([0, 5, T], dtype=torch.int32), tail])[:3]
    x, w = torch.randn(1, T, 4), torch.randn(4, 4)
    one, two = torch.zeros(2, 4, 3), torch.zeros(2, 4, 3)
    y = conv(x, w, one, cu_seqlens=cu)
    assert torch.equal(y, conv(x, w, two, cu_seqlens=cu.clone())) and torch.equal(one, two)


def test_a4_a_slice_of_a_wider_projection_needs_no_alignment():
    x = torch.randn(2, 5, 13)[..., 3:8]
    w, one, two = torch.randn(5, 4), torch.zeros(2, 5, 3), torch.zeros(2, 5, 3)
    assert torch.equal(conv(x, w, one), conv(x.contiguous(), w, two))


def test_a5_a_stale_row_is_not_history():
    state = torch.tensor([[[math.nan] * 3], [[1.0, 2.0, 3.0]]])
    has = torch.tensor([False, True])
    y = conv(torch.full((2, 1, 1), 4.0), DIGITS, state, has_initial_state=has)
    assert y.flatten().tolist() == [4000.0, 4321.0]
    pool = torch.tensor([math.nan, 2.0]).view(2, 1, 1, 1)
    args = [x.expand(2, *x.shape[1:]) for x in scalar(v=3.0)]
    o = gdn_ops.recurrent(*args, pool, has_initial_state=has)
    assert o.flatten().tolist() == [3.0, 3.0] and pool.isfinite().all()


def test_a6_width_one_leaves_the_state_alone():
    state = torch.tensor([[[7.0, 8.0]]])
    y = conv(torch.tensor([[[3.0], [4.0]]]), torch.tensor([[2.0]]), state)
    assert y.flatten().tolist() == [6.0, 8.0] and state.flatten().tolist() == [7.0, 8.0]
    for T in (1, 2, 3):
        y, _ = gdn_ops.conv1d(torch.ones(1, T, 1), DIGITS, activation="none")
        assert y.flatten().tolist() == [1000.0, 1100.0, 1110.0][:T]


def test_b1_gaps_between_pool_rows_keep_their_bytes():
    storage = torch.full((60,), 777.0)
    pool = storage.as_strided((3, 1, 4, 4), (20, 16, 4, 1)).zero_()
    gdn_ops.recurrent(*make_qkv(1, 1, 1, 1, 4, 4), pool, torch.tensor([1]))
    assert pool[1].abs().sum() > 0 and pool[0].abs().sum() == pool[2].abs().sum() == 0
    gaps = [i for i in range(60) if i % 20 >= 16]
    assert len(gaps) == 12 and (storage[gaps] == 777).all()


def test_b2_padding_rows_read_nothing_write_nothing_and_give_zeros():
    args = [x.clone() for x in make_qkv(4, 1, 1, 1, 4, 4)]
    for x in args[:3]:
        x[1] = x[3] = math.nan
    pool = torch.ones(3, 1, 4, 4)
    pool[1] = 5.0
    idx = torch.tensor([2, -1, 0, -1])
    expected_o, expected_pool = reference.recurrent(*args, pool, idx)
    o = gdn_ops.recurrent(*args, pool, idx)
    assert_close("o", o[[0, 2]], expected_o[[0, 2]])
    assert_close("state", pool[[0, 2]], expected_pool[[0, 2]])
    assert (o[[1, 3]] == 0).all() and (pool[1] == 5).all()
    with pytest.raises(RuntimeError, match="N = 4, got 3"):
        gdn_ops.recurrent(*args, pool, idx[:3])


def test_b3_offsets_beyond_31_bits():
    """Virtual memory only: three elements of the pool are touched."""
    pool = torch.empty(2**31 + 16, dtype=torch.bfloat16).as_strided((3, 1, 1, 1), (2**30, 1, 1, 1))
    pool[2] = 1.0
    gdn_ops.recurrent(*scalar(v=3.0), pool, torch.tensor([2]))
    assert pool[2].item() == 3.0
    v = torch.empty(2**31 + 16, dtype=torch.bfloat16).as_strided((1, 5, 1, 1), (1, 2**29, 1, 1))
    for t in range(5):
        v[0, t] = float(t)
    q, k, _, g, beta = scalar(T=5)
    o = gdn_ops.recurrent(q.bfloat16(), k.bfloat16(), v, g, beta, torch.zeros(1, 1, 1, 1))
    assert o.flatten().tolist() == [0.0, 1.0, 2.0, 3.0, 4.0]


@pytest.mark.parametrize("N", [1025, 2048, 4097])
def test_b4_any_batch(N):
    args = make_qkv(1, N, 4, 32, 2, 2)
    cu = torch.arange(N + 1)
    o = gdn_ops.recurrent(*args, torch.zeros(N, 32, 2, 2), cu_seqlens=cu)
    for n in (0, N - 1):
        one = gdn_ops.recurrent(*[x[:, n : n + 1] for x in args], torch.zeros(1, 32, 2, 2))
        assert torch.equal(o[:, n : n + 1], one)


@pytest.mark.parametrize("HV", [1, 3, 5, 6, 12, 48])
def test_b5_no_head_past_the_last(HV):
    def call():
        guarded = torch.full((HV * 16 + 128,), 99.0)
        pool = guarded[64:-64].view(1, HV, 4, 4).zero_()
        gdn_ops.recurrent(*make_qkv(1, 2, 1, HV, 4, 4), pool)
        return guarded

    for guarded in at_thread_counts((1, 2, 7, 64), call):
        assert (guarded[:64] == 99).all() and (guarded[-64:] == 99).all()


def test_b6_results_do_not_depend_on_what_memory_held():
    args = make_qkv(3, 1, 1, 3, 65, 65)
    first = None
    for _ in range(3):
        junk = [torch.full_like(args[2], math.nan) for _ in range(8)]
        del junk
        o = gdn_ops.recurrent(*args, make_pool(3, 3, 65, 65))
        first = o if first is None else first
        assert torch.equal(o, first)


def test_b7_invalid_metadata_is_an_error_before_any_write():
    args = make_qkv(1, 4, 1, 1, 4, 4)
    table = torch.tensor([[0, 1, 2, 3]])
    cases = [
        (dict(cu_seqlens=torch.tensor([0, 8])), "end at T = 4, got 8"),
        (dict(state_indices=torch.tensor([10])), "below P = 4, got 10"),
        (dict(cu_seqlens=torch.tensor([0, 5, 4])), "ascending offsets, got 5 then 4"),
        (dict(state_indices=table, num_accepted=torch.tensor([5])), "at most 4, got 5"),
    ]
    for kw, message in cases:
        pool = make_pool(4, 1, 4, 4)
        with pytest.raises(RuntimeError, match=message):
            gdn_ops.recurrent(*args, pool, **kw)
        assert torch.equal(pool, make_pool(4, 1, 4, 4))
    # An integer scale is a number like any other.
    a, b = make_pool(4, 1, 4, 4), make_pool(4, 1, 4, 4)
    assert torch.equal(gdn_ops.recurrent(*args, a, scale=1), gdn_ops.recurrent(*args, b, scale=1.0))


@pytest.mark.parametrize("cu", [[0, 0, 3, 3, 5, 5], [0, 0], [0, 0, 0]])
def test_c1_zero_length_sequences(cu):
    T, N = cu[-1], len(cu) - 1
    args = make_qkv(1, T, 1, 2, 4, 4)
    pool = make_pool(N, 2, 4, 4)
    before = pool.clone()
    o = gdn_ops.recurrent(*args, pool, cu_seqlens=torch.tensor(cu))
    for n, (start, end) in enumerate(itertools.pairwise(cu)):
        if start == end:
            assert torch.equal(pool[n], before[n])
        else:
            one = gdn_ops.recurrent(*[x[:, start:end] for x in args], before[n : n + 1].clone())
            assert torch.equal(o[:, start:end], one)


@pytest.mark.parametrize("cu", [[0, 0, 3, 3, 5, 5], [0, 0], [0, 0, 0]])
def test_c1_zero_length_sequences_of_a_prefill(cu):
    T, N = cu[-1], len(cu) - 1
    args = make_qkv(1, T, 1, 2, 4, 4)
    initial = make_pool(N, 2, 4, 4)
    o, final = gdn_ops.chunk(*args, initial, torch.tensor(cu))
    _, fresh = gdn_ops.chunk(*args, None, torch.tensor(cu))
    for n, (start, end) in enumerate(itertools.pairwise(cu)):
        if start == end:
            assert torch.equal(final[n], initial[n]) and not fresh[n].any()
        else:
            one, state = gdn_ops.chunk(*[x[:, start:end] for x in args], initial[n : n + 1])
            assert torch.equal(o[:, start:end], one) and torch.equal(final[n], state[0])


def test_d1_an_accepted_count_of_zero_is_padding():
    args = make_qkv(2, 3, 1, 1, 2, 2)
    pool = make_pool(8, 1, 2, 2)
    before = pool.clone()
    table = torch.tensor([[4, 5, 6], [1, 2, 3]])
    pool[[0, 1, 3, 4, 5, 6, 7]] = math.nan
    o = gdn_ops.recurrent(*args, pool, table, num_accepted=torch.tensor([0, 2]))
    assert (o[0] == 0).all() and o[1].isfinite().all() and pool[[1, 2, 3]].isfinite().all()
    assert pool[[0, 4, 5, 6, 7]].isnan().all() and not torch.equal(pool[2], before[2])


def test_d2_the_conv_window_ends_at_the_last_accepted_token():
    state = torch.zeros(1, 1, 5)
    state[0, 0, :3] = torch.tensor([1.0, 2.0, 3.0])
    kw = dict(state_indices=torch.tensor([0]), conv_leading=True)
    drafts = torch.tensor([4.0, 5.0, 6.0]).view(1, 3, 1)
    conv(drafts, DIGITS, state, num_accepted=torch.tensor([1]), **kw)
    y = conv(torch.tensor([[[7.0]]]), DIGITS, state, num_accepted=torch.tensor([2]), **kw)
    assert y.item() == 7543.0


def test_e1_snapshots_count_the_tokens_of_their_own_sequence():
    lengths, C = [20, 28], 16
    args = make_qkv(1, sum(lengths), 1, 2, 8, 8)
    pool = torch.full((4, 2, 8, 8), math.nan)
    gdn_ops.chunk_prefill(
        *args, pool, torch.tensor([0, 1]), has_initial_state=torch.tensor([False, False]),
        cu_seqlens=torch.tensor([0, 20, 48]), edge_rows=torch.tensor([[2], [3]]), chunk_size=C,
    )  # fmt: skip
    for row, start, end in ((2, 0, 16), (3, 20, 36), (0, 0, 20), (1, 20, 48)):
        _, alone = gdn_ops.chunk(*[x[:, start:end] for x in args], chunk_size=C)
        assert torch.equal(pool[row], alone[0]), (row, start, end)


@pytest.mark.parametrize("parts", [[64, 1], [1, 64], [63, 2], [32, 33], [1] * 65])
@pytest.mark.parametrize("op", ["chunk_prefill", "recurrent", "recurrent_buffered"])
def test_e2_split_anywhere_equals_whole(op, parts):
    args = make_qkv(1, 65, 2, 4, 8, 8)
    expected, exact = reference.recurrent(*args, torch.zeros(1, 4, 8, 8))
    pool, w = torch.zeros(1, 4, 8, 8), windows.allocate(1, 2, 4, 8, 8, 64)
    outputs, start = [], 0
    for n in parts:
        more = w if op == "recurrent_buffered" else ()
        piece = [x[:, start : start + n] for x in args]
        outputs.append(getattr(gdn_ops, op)(*piece, pool, *more))
        start += n
    if op == "recurrent_buffered":
        gdn_ops.window_flush(pool, *w)
    assert (torch.cat(outputs, 1) - expected).abs().max() <= 1e-5 * expected.abs().max()
    assert (pool - exact).abs().max() <= 1e-5 * exact.abs().max()


def test_e3_a_call_of_several_tokens_uses_the_history():
    """5 then 3 tokens equal 8, and 5 then 0 equal 5, for conv and state."""
    H, HV, K, V = 1, 3, 8, 4
    layer = make_layer(1, 8, H, HV, K, V)
    C = 2 * H * K + HV * V

    def run(parts):
        conv_state, state, outputs, start = torch.zeros(1, C, 3), torch.zeros(1, HV, V, K), [], 0
        for n in parts:
            x = layer["projected"][:, start : start + n]
            qkv, _, b, a = x.split([C, HV * V, HV, HV], -1)
            inputs = gdn_ops.conv_gating(
                qkv, a, b, layer["conv_weight"], layer["conv_bias"], layer["A_log"],
                layer["dt_bias"], conv_state, H, K, qk_l2norm=True,
            )  # fmt: skip
            outputs.append(gdn_ops.chunk_prefill(*inputs, state))
            start += n
        return torch.cat(outputs, 1), conv_state, state

    for got, expected in zip(run([5, 3]), run([8]), strict=True):
        assert_close("5 then 3", got, expected.double())
    for got, expected in zip(run([5, 0]), run([5]), strict=True):
        assert torch.equal(got, expected)


@pytest.mark.parametrize("op", ["recurrent", "chunk_prefill"])
def test_e4_neighbours_and_threads_change_no_bit(op):
    T, N = 64, 8
    one = make_qkv(1, T, 2, 4, 16, 16, seed=1)
    rest = make_qkv(1, 100, 2, 4, 16, 16, seed=2)
    call = getattr(gdn_ops, op)

    def alone():
        pool = torch.zeros(1, 4, 16, 16)
        return call(*one, pool), pool[0]

    def among_others(place):
        args = [x.clone() for x in make_qkv(N, T, 2, 4, 16, 16, seed=3)]
        for x, y in zip(args, one, strict=True):
            x[place] = y[0]
        pool = torch.zeros(N, 4, 16, 16)
        return call(*args, pool)[place : place + 1], pool[place]

    def beside_a_prefill():
        args = [torch.cat([a, b], 1) for a, b in zip(one, rest, strict=True)]
        pool = torch.zeros(2, 4, 16, 16)
        return call(*args, pool, cu_seqlens=torch.tensor([0, T, T + 100]))[:, :T], pool[0]

    results = at_thread_counts((2,), alone)
    for place in (0, 7):
        results += at_thread_counts((1, 2, 4), functools.partial(among_others, place))
    results += at_thread_counts((1, 2), beside_a_prefill)
    for o, state in results[1:]:
        assert torch.equal(o, results[0][0]) and torch.equal(state, results[0][1])


@pytest.mark.parametrize("op", ["recurrent", "chunk_prefill", "short_conv"])
def test_e5_packed_documents_stay_apart(op):
    cu = torch.tensor([0, 3, 5])
    if op == "short_conv":
        x, w = torch.randn(1, 5, 4), torch.randn(4, 4)

        def run(x, cu):
            return gdn_ops.short_conv(x, w, None, torch.zeros(2, 4, 3), cu_seqlens=cu)

        args = [x]
    else:
        args = list(make_qkv(1, 5, 1, 2, 8, 8))

        def run(*args):
            *inputs, cu = args
            return getattr(gdn_ops, op)(*inputs, torch.zeros(2, 2, 8, 8), cu_seqlens=cu)

    packed = run(*args, cu)
    alone = run(*[x[:, 3:] for x in args], torch.tensor([0, 2]))
    assert torch.equal(packed[:, 3:], alone)
    changed = [x.clone() for x in args]
    for x in changed:
        x[:, 0] *= 0.5
    again = run(*changed, cu)
    assert torch.equal(again[:, 3:], packed[:, 3:]) and not torch.equal(again[:, :3], packed[:, :3])


def test_e6_a_padded_suffix_leaves_the_states_alone():
    """The suffix is a sequence of its own that is padding; what it holds does not matter."""
    args = [x.clone() for x in make_qkv(1, 8, 1, 2, 8, 8)]
    x, w = torch.randn(1, 8, 4), torch.randn(4, 4)
    for t in (*args, x):
        t[:, 5:] = math.nan
    cu, rows = torch.tensor([0, 5, 8]), torch.tensor([0, -1])
    kw = dict(cu_seqlens=cu, has_initial_state=torch.tensor([False, False]))
    for op in (gdn_ops.recurrent, gdn_ops.chunk_prefill):
        padded, exact = torch.zeros(1, 2, 8, 8), torch.zeros(1, 2, 8, 8)
        o = op(*args, padded, rows, **kw)
        assert torch.equal(o[:, :5], op(*[t[:, :5] for t in args], exact))
        assert torch.equal(padded, exact) and not o[:, 5:].any()
    window = torch.zeros(1, 4, 4)
    gdn_ops.short_conv(x, w, None, window, rows, **kw)
    assert torch.equal(window[0], x[0, 1:5].T)


def test_f1_vanishing_decay_stays_finite():
    for g in (torch.full((64,), math.log(1e-12)), torch.full((64,), -1e-4)):
        g = g.clone()
        g[31] = -316.0
        q, k, v, _, beta = make_qkv(1, 64, 1, 1, 8, 8)
        pool = make_pool(1, 1, 8, 8)
        expected, expected_pool = reference.recurrent(q, k, v, g.view(1, 64, 1), beta, pool)
        o = gdn_ops.recurrent(q, k, v, g.view(1, 64, 1), beta, pool)
        assert_close("o", o, expected)
        assert_close("state", pool, expected_pool)


def test_f2_decay_comes_before_the_error():
    pool = torch.full((1, 1, 1, 1), 2.0)
    gdn_ops.recurrent(*scalar(g=math.log(0.5)), pool)
    assert pool.item() == pytest.approx(1.0)


@pytest.mark.parametrize("value", [0.0, -math.inf])
def test_f2_gate_of_exactly_one_and_of_zero(value):
    q, k, v, g, beta = make_qkv(1, 129, 1, 2, 8, 8)
    g[:] = 0.0
    g[:, 1::2] = value if value else -0.5
    pool = make_pool(1, 2, 8, 8)
    expected, expected_pool = reference.recurrent(q, k, v, g, beta, pool)
    o = gdn_ops.recurrent(q, k, v, g, beta, pool)
    assert_close("o", o, expected)
    assert_close("state", pool, expected_pool)


def test_f3_beta_stays_float32_and_decode_equals_prefill_of_one():
    b = torch.full((1, 1, 1), 0.5, dtype=torch.bfloat16)
    _, beta = gdn_ops.gating(b, b, torch.zeros(1), torch.zeros(1))
    assert beta.item() == pytest.approx(0.62245933, rel=1e-6)
    args = make_qkv(1, 1, 2, 4, 16, 16, dtype=torch.bfloat16)
    one, two = make_pool(1, 4, 16, 16), make_pool(1, 4, 16, 16)
    o = gdn_ops.recurrent(*args, one)
    packed = gdn_ops.recurrent(*args, two, cu_seqlens=torch.tensor([0, 1]))
    assert torch.equal(o, packed) and torch.equal(one, two)


def test_f4_bf16_state_cannot_hold_a_slow_decay_and_f32_can():
    for dtype, expected in ((torch.float32, math.exp(-1.0)), (torch.bfloat16, 1.0)):
        pool = torch.ones(1, 1, 1, 1, dtype=dtype)
        step = scalar(g=-0.001, beta=0.0)
        for _ in range(1000):
            gdn_ops.recurrent(*step, pool)
        assert pool.item() == pytest.approx(expected, rel=1e-4)


def test_f5_gate_parameters_in_half_precision():
    target = math.log(math.expm1(0.001))
    a = torch.full((1, 1), target)
    g, _ = gdn_ops.gating(a, a, torch.full((1,), 12.0, dtype=torch.float16), torch.zeros(1))
    assert g.item() == pytest.approx(-162.7548, rel=1e-4)


def test_g1_gates_that_are_views_of_a_packed_split():
    packed = torch.randn(1, 3, 4)
    a, b = packed[..., 1::2], packed[..., 0::2]
    q, k, v, _, _ = make_qkv(1, 3, 2, 2, 4, 4)
    params = (torch.rand(2), torch.randn(2))
    one, two = make_pool(1, 2, 4, 4), make_pool(1, 2, 4, 4)
    o = gdn_ops.recurrent_gated(q, k, v, a, b, *params, one)
    dense = gdn_ops.recurrent_gated(q, k, v, a.contiguous(), b.contiguous(), *params, two)
    assert torch.equal(o, dense) and torch.equal(one, two)


def test_g2_value_head_h_uses_key_head_h_over_ratio():
    q = torch.tensor([1.0, 2.0]).view(1, 1, 2, 1)
    ones = torch.ones(1, 1, 6)
    pool = torch.zeros(1, 6, 1, 1)
    o = gdn_ops.recurrent(q, q, torch.ones(1, 1, 6, 1), 0 * ones, ones, pool, scale=1.0)
    assert o.flatten().tolist() == [1.0, 1.0, 1.0, 4.0, 4.0, 4.0]
    with pytest.raises(RuntimeError, match="HV = 3 and H = 2"):
        gdn_ops.recurrent(q, q, torch.ones(1, 1, 3, 1), ones[..., :3], ones[..., :3], pool[:, :3])


@pytest.mark.parametrize("K", [1, 8, 16, 64, 80, 100, 128, 256])
@pytest.mark.parametrize("V", [1, 8, 64, 128, 130])
def test_g3_any_head_size(K, V):
    args = make_qkv(1, 3, 1, 2, K, V)
    for op in ("recurrent", "chunk_prefill"):
        pool = make_pool(1, 2, V, K)
        expected, exact = reference.recurrent(*args, pool)
        assert_close("o", getattr(gdn_ops, op)(*args, pool), expected)
        assert_close("state", pool, exact)


@pytest.mark.parametrize("act, param", list(itertools.product(ACTIVATIONS, ACTIVATIONS)))
def test_g4_mixed_dtypes_with_and_without_autocast(act, param):
    q, k, v, _, _ = make_qkv(1, 2, 1, 2, 8, 8, dtype=act)
    a = torch.randn(1, 2, 2).to(act)
    params = (torch.rand(2).to(param), torch.randn(2).to(param))
    plain, cast = make_pool(1, 2, 8, 8), make_pool(1, 2, 8, 8)
    o = gdn_ops.recurrent_gated(q, k, v, a, a, *params, plain)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(o, gdn_ops.recurrent_gated(q, k, v, a, a, *params, cast))
    assert torch.equal(plain, cast)
    leaves = [t.clone().requires_grad_() for t in (a, a, *params)]
    g, beta = gdn_ops.gating(*leaves)
    (g.sum() + beta.sum()).backward()
    assert all(t.grad.dtype == t.dtype and t.grad.isfinite().all() for t in leaves)


def test_h1_fake_and_real_strides_agree():
    from torch._subclasses.fake_tensor import FakeTensorMode

    q, k, v, g, beta = make_qkv(2, 4, 3, 3, 8, 8)
    q = q.transpose(1, 2).contiguous().transpose(1, 2)
    pool = make_pool(2, 3, 8, 8)
    real = gdn_ops.recurrent(q, k, v, g, beta, pool)
    with FakeTensorMode() as mode:
        fakes = [mode.from_tensor(x) for x in (q, k, v, g, beta, pool)]
        fake = torch.ops.gdn.recurrent(*fakes)
    assert fake.stride() == real.stride() and fake.shape == real.shape


@pytest.mark.parametrize("op", ["recurrent", "chunk"])
def test_h2_sizes_stay_symbolic(op):
    """Exported once with any batch and length, run with several."""

    class Layer(torch.nn.Module):
        def forward(self, q, k, v, g, beta):
            if op == "chunk":
                return gdn_ops.chunk(q, k, v, g, beta)[0]
            return gdn_ops.recurrent(q, k, v, g, beta, v.new_zeros(q.shape[0], 4, 8, 8))

    B, T = (torch.export.Dim(n, min=2, max=64) for n in "BT")
    with torch.no_grad():
        exported = torch.export.export(
            Layer(), make_qkv(2, 7, 2, 4, 8, 8), dynamic_shapes=({0: B, 1: T},) * 5
        ).module()
        for size in ((2, 7), (3, 9), (5, 7)):
            args = make_qkv(*size, 2, 4, 8, 8)
            assert torch.equal(exported(*args), Layer()(*args))


def test_h3_outputs_alias_nothing():
    args, pool = make_qkv(2, 1, 1, 1, 4, 4), make_pool(2, 1, 4, 4)
    o = gdn_ops.recurrent(*args, pool)
    y, final = gdn_ops.conv1d(torch.randn(1, 2, 4), torch.randn(4, 4))
    pointers = [t.untyped_storage().data_ptr() for t in (*args, pool, o, y, final)]
    assert len(set(pointers)) == len(pointers)


def test_h5_each_optional_left_out_or_given_by_place_or_name():
    args = make_qkv(2, 1, 1, 2, 4, 4)
    options = {
        "state_indices": torch.tensor([1, 0]),
        "has_initial_state": torch.tensor([True, True]),
        "cu_seqlens": None,
        "num_accepted": None,
        "scale": 0.5,
        "qk_l2norm": True,
    }
    pool = make_pool(2, 2, 4, 4)

    def call(state, *extra, **kw):
        return gdn_ops.recurrent(*args, state, *extra, **kw)

    # Without Python bindings for an optional pool there is nothing to leave out: it is required.
    with pytest.raises(TypeError, match="state"):
        gdn_ops.recurrent(*args)
    for n in range(len(options) + 1):
        torch._dynamo.reset()  # each set of options is a graph of its own, and those are counted
        compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
        some = dict(itertools.islice(options.items(), n))
        results = []
        for f in (call, compiled):
            for by_name in (False, True):
                state = pool.clone()
                o = f(state, **some) if by_name else f(state, *some.values())
                results.append((o, state))
        for o, state in results[1:]:
            assert torch.equal(o, results[0][0]) and torch.equal(state, results[0][1])


def test_h6_schemas_live_in_the_library():
    """The shared library alone, without the Python package, offers every op."""
    import subprocess
    import sys

    library = gdn_ops._native.load()
    code = (
        f"import torch; torch.ops.load_library({str(library)!r}); "
        "print(torch.ops.gdn.decode.default._schema, torch.ops.gdn.recurrent.default._schema)"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd="/")
    assert run.returncode == 0 and "Tensor(b!) state" in run.stdout, run.stderr


def test_h7_lengths_are_never_read_by_the_compiler():
    """Four layers in one graph; other numbers of segments add at most one more."""
    from torch._dynamo.testing import CompileCounterWithBackend

    def layers(x, pools, cu):
        q, k, v, g, beta = x
        for pool in pools:
            v = gdn_ops.recurrent(q, k, v, g, beta, pool, cu_seqlens=cu)
        return v

    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(layers, fullgraph=True, backend=counter)
    x = make_qkv(1, 12, 1, 2, 4, 4)
    for cu in ([0, 5, 12], [0, 5, 7, 12], [0, 1, 2, 3, 12]):
        pools, twins = ([torch.zeros(4, 2, 4, 4) for _ in range(4)] for _ in range(2))
        cu = torch.tensor(cu)
        assert torch.equal(compiled(x, pools, cu), layers(x, twins, cu))
        assert all(torch.equal(a, b) for a, b in zip(pools, twins, strict=True))
    assert counter.frame_count <= 2


def test_h8_mixed_devices_are_named():
    args = make_qkv(1, 1, 1, 1, 4, 4)
    with pytest.raises(RuntimeError, match="device cpu.*meta|expected device cpu, got meta"):
        gdn_ops.recurrent(*args, make_pool(1, 1, 4, 4).to("meta"))


def test_negative_eigenvalues():
    """beta = 2 with a unit key reflects the state: bounded, alternating."""
    pool = torch.ones(1, 1, 1, 1)
    seen = []
    for _ in range(3):
        gdn_ops.recurrent(*scalar(v=0.0, beta=2.0), pool)
        seen.append(pool.item())
    assert seen == [-1.0, 1.0, -1.0]


# --- the table


def test_every_report_has_a_test_that_exists():
    """Each row of docs/reports.md names its tests in full, and each letter here has a row."""
    rows = dict(
        re.findall(r"^\| ([A-I]\d) \|.*\| (.*) \|$", (ROOT / "docs/reports.md").read_text(), re.M)
    )
    counts = {"A": 6, "B": 7, "C": 1, "D": 2, "E": 6, "F": 5, "G": 4, "H": 8, "I": 2}
    assert list(rows) == [f"{letter}{i + 1}" for letter, n in counts.items() for i in range(n)]

    def functions(file: str) -> set[str]:
        tree = ast.parse((ROOT / "tests" / file).read_text())
        return {x.name for x in tree.body if isinstance(x, ast.FunctionDef)}

    here = functions("test_reports.py")
    for case, cell in rows.items():
        named = re.findall(r"`(?:([\w/]+\.py)::)?(test_\w+)`", cell)
        assert named, f"{case}: no test in {cell!r}"
        for file, test in named:
            assert test in functions(file or "test_reports.py"), f"{case}: {file}::{test}"
        own = {t for t in here if t.startswith(f"test_{case.lower()}_")}
        assert own <= {t for _, t in named}, f"{case}: the table leaves out {own}"
