"""Public bug reports of this field as tests: sections A-D, F-I, for the ops of the decode family.

The names carry the letter of docs/reports.md, which maps each to the report. Expected numbers are
worked by hand with the scalar form: S <- e^g S, e = beta (v - k S), S <- S + k e, o = q S.
"""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from common import ACTIVATIONS, assert_close, make_pool, make_qkv

import gdn_ops
from gdn_ops import reference

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
    threads = torch.get_num_threads()
    try:
        for n in (1, 2, 7, 64):
            torch.set_num_threads(n)
            args = make_qkv(1, 2, 1, HV, 4, 4)
            guarded = torch.full((HV * 16 + 128,), 99.0)
            pool = guarded[64:-64].view(1, HV, 4, 4).zero_()
            gdn_ops.recurrent(*args, pool)
            assert (guarded[:64] == 99).all() and (guarded[-64:] == 99).all()
    finally:
        torch.set_num_threads(threads)


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


def test_h3_outputs_alias_nothing():
    args, pool = make_qkv(2, 1, 1, 1, 4, 4), make_pool(2, 1, 4, 4)
    o = gdn_ops.recurrent(*args, pool)
    y, final = gdn_ops.conv1d(torch.randn(1, 2, 4), torch.randn(4, 4))
    pointers = [t.untyped_storage().data_ptr() for t in (*args, pool, o, y, final)]
    assert len(set(pointers)) == len(pointers)


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
