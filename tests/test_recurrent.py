"""``recurrent`` and ``recurrent_gated`` against the float64 oracle."""

from __future__ import annotations

import itertools

import pytest
import torch
from common import (
    ACTIVATIONS,
    assert_close,
    at_thread_counts,
    clone_pool,
    make_pool,
    make_qkv,
    offsets,
)

import gdn_ops
from gdn_ops import reference

HEAD_DIMS = [1, 8, 16, 64, 80, 100, 128, 256]


def check(args, pool, *, act, state_dtype, rows, slack=1.0, **kwargs):
    """Run op and oracle; compare outputs, named rows, and that all other rows kept their bits."""
    before = clone_pool(pool)
    expected_o, expected_pool = reference.recurrent(*args, pool, **kwargs)
    o = gdn_ops.recurrent(*args, pool, **kwargs)
    assert o.dtype == act and o.is_contiguous()
    assert_close("o", o, expected_o, act, slack)
    assert_close("state", pool[rows], expected_pool[rows], state_dtype, slack)
    others = [r for r in range(pool.shape[0]) if r not in rows]
    assert torch.equal(pool[others], before[others])
    return o


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(
    "K, V", [(d, d) for d in HEAD_DIMS] + [(100, 8), (8, 130), (512, 1), (1, 512)]
)
def test_head_dims(K, V, transposed):
    for T, ratio in ((1, 3), (3, 2)):
        args = make_qkv(2, T, 2, 2 * ratio, K, V)
        pool = make_pool(4, 2 * ratio, V, K, transposed=transposed)
        idx = torch.tensor([3, 1], dtype=torch.int32)
        check(args, pool, act=torch.float32, state_dtype=torch.float32, rows=[3, 1],
              state_indices=idx)  # fmt: skip


@pytest.mark.parametrize("ratio", [1, 2, 3, 6])
@pytest.mark.parametrize("act, state", list(itertools.product(ACTIVATIONS, ACTIVATIONS)))
def test_dtypes(act, state, ratio):
    for transposed, T in itertools.product((False, True), (1, 4)):
        args = make_qkv(3, T, 2, 2 * ratio, 64, 32, dtype=act)
        pool = make_pool(5, 2 * ratio, 32, 64, dtype=state, transposed=transposed)
        idx = torch.tensor([4, 0, 2])
        check(args, pool, act=act, state_dtype=state, rows=[4, 0, 2], state_indices=idx,
              qk_l2norm=True)  # fmt: skip


@pytest.mark.parametrize("state", ACTIVATIONS)
@pytest.mark.parametrize("V", [64, 128])
def test_transposed_rows_of_whole_registers(V, state):
    for T in (1, 3):
        args = make_qkv(3, T, 2, 6, 128, V)
        pool = make_pool(5, 6, V, 128, dtype=state, transposed=True)
        check(args, pool, act=torch.float32, state_dtype=state, rows=[4, 0, 2],
              state_indices=torch.tensor([4, 0, 2]), qk_l2norm=True)  # fmt: skip


def test_state_dtype_rounds_once_not_per_token():
    """Eight tokens in one call carry the error of one rounding."""
    args = make_qkv(1, 8, 1, 1, 64, 64)
    pool = make_pool(1, 1, 64, 64, dtype=torch.bfloat16)
    check(args, pool, act=torch.float32, state_dtype=torch.bfloat16, rows=[0])


def test_strided_views_equal_contiguous():
    q, k, v, g, beta = make_qkv(2, 3, 2, 4, 24, 20)
    wide = torch.randn(2, 3, 2 * 24 * 2 + 4 * 20 + 7)
    packed = wide.clone()
    packed[..., 3:51] = q.flatten(2)
    packed[..., 51:99] = k.flatten(2)
    packed[..., 99:179] = v.flatten(2)
    qs = packed[..., 3:51].unflatten(-1, (2, 24))
    ks = packed[..., 51:99].unflatten(-1, (2, 24))
    vs = packed[..., 99:179].unflatten(-1, (4, 20))
    every_other = torch.stack([v, torch.full_like(v, 9.0)], -1)[..., 0]
    gs = g.transpose(1, 2).contiguous().transpose(1, 2)
    gates = torch.stack([beta, g], -1)
    expected, actual, odd = (make_pool(2, 4, 20, 24) for _ in range(3))
    o = gdn_ops.recurrent(q, k, v, g, beta, expected)
    assert torch.equal(o, gdn_ops.recurrent(qs, ks, vs, gs, gates[..., 0], actual))
    assert torch.equal(expected, actual)
    assert torch.equal(o, gdn_ops.recurrent(q, k, every_other, gates[..., 1], beta, odd))
    assert torch.equal(expected, odd)


@pytest.mark.parametrize("layout", ["row", "transposed"])
def test_packed_equals_separate(layout):
    lengths = [0, 3, 0, 2, 1, 0]
    cu = offsets(lengths)
    args = make_qkv(1, sum(lengths), 2, 6, 40, 24)
    pool = make_pool(8, 6, 24, 40, transposed=layout == "transposed")
    idx = torch.tensor([7, 2, 5, 0, 3, 1], dtype=torch.int64)
    alone, before = clone_pool(pool), clone_pool(pool)
    o = gdn_ops.recurrent(*args, pool, idx, cu_seqlens=cu)
    for n, (start, end) in enumerate(itertools.pairwise(cu.tolist())):
        part = [x[:, start:end] for x in args]
        o_n = gdn_ops.recurrent(*part, alone, idx[n : n + 1])
        assert torch.equal(o[:, start:end], o_n)
    assert torch.equal(pool, alone)
    assert torch.equal(pool[[7, 5, 1, 4, 6]], before[[7, 5, 1, 4, 6]])


@pytest.mark.parametrize("state", ACTIVATIONS)
@pytest.mark.parametrize("transposed", [False, True])
def test_speculative(state, transposed):
    """Read column accepted-1, write the state after token j to column j; negatives are skipped."""
    args = make_qkv(3, 3, 1, 3, 32, 16)
    pool = make_pool(12, 3, 16, 32, dtype=state, transposed=transposed)
    idx = torch.tensor([[4, 5, 6], [1, -1, 3], [9, 10, 11]], dtype=torch.int32)
    accepted = torch.tensor([2, 1, 0, 77], dtype=torch.int32)
    o = check(args, pool, act=torch.float32, state_dtype=state, rows=[4, 5, 6, 1, 3],
              state_indices=idx, num_accepted=accepted)  # fmt: skip
    assert torch.equal(o[2], torch.zeros_like(o[2]))


def test_gated_equals_gating_then_recurrent():
    q, k, v, _, _ = make_qkv(3, 2, 2, 6, 64, 64, dtype=torch.bfloat16)
    a, b = torch.randn(3, 2, 6), torch.randn(3, 2, 6)
    A_log, dt_bias = torch.rand(6), torch.randn(6)
    one, two = make_pool(3, 6, 64, 64), make_pool(3, 6, 64, 64)
    g, beta = gdn_ops.gating(a, b, A_log, dt_bias)
    expected = gdn_ops.recurrent(q, k, v, g, beta, two, qk_l2norm=True)
    got = gdn_ops.recurrent_gated(q, k, v, a, b, A_log, dt_bias, one, qk_l2norm=True)
    assert torch.equal(got, expected) and torch.equal(one, two)
    oracle, _ = reference.recurrent_gated(q, k, v, a, b, A_log, dt_bias,
                                          make_pool(3, 6, 64, 64), qk_l2norm=True)  # fmt: skip
    assert_close("o", got, oracle)


def test_empty():
    for B, T in ((0, 1), (2, 0), (0, 0)):
        args = make_qkv(B, T, 2, 4, 16, 8)
        pool = make_pool(3, 4, 8, 16)
        before = pool.clone()
        o = gdn_ops.recurrent(*args, pool)
        assert o.shape == (B, T, 4, 8) and torch.equal(pool, before)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("T", [1, 5])
@pytest.mark.parametrize(
    "K, V, state",
    [(72, 56, torch.float16), *((128, 128, state) for state in ACTIVATIONS)],
)
def test_threads_and_neighbours_change_no_bit(K, V, state, T, transposed):
    args = make_qkv(8, T, 2, 6, K, V, dtype=torch.bfloat16)

    def call():
        pool = make_pool(8, 6, V, K, dtype=state, transposed=transposed)
        return gdn_ops.recurrent(*args, pool), pool

    results = at_thread_counts((1, 2, 3, 7, 64), call)
    for o, pool in results[1:]:
        assert torch.equal(o, results[0][0]) and torch.equal(pool, results[0][1])
    alone = make_pool(8, 6, V, K, dtype=state, transposed=transposed)
    part = [x[5:6] for x in args]
    o = gdn_ops.recurrent(*part, alone, torch.tensor([5]))
    assert torch.equal(o, results[0][0][5:6]) and torch.equal(alone[5], results[0][1][5])


def test_raises_before_writing():
    q, k, v, g, beta = make_qkv(2, 4, 2, 6, 16, 8)
    idx = torch.tensor([0, 1])
    bad = [
        (dict(state_indices=torch.tensor([0, 1, 2])), "state_indices.*N = 2, got 3"),
        (dict(state_indices=torch.tensor([0, 9])), "state_indices.*below P = 3, got 9"),
        (dict(state_indices=torch.tensor([0.0, 1.0])), "state_indices.*int32 or int64"),
        (dict(num_accepted=torch.tensor([1, 1])), "num_accepted.*\\[N, S\\]"),
        (dict(state_indices=idx[:, None]), "S >= T = 4 columns, got 1"),
        (dict(state_indices=idx[:, None].expand(2, 4), num_accepted=torch.tensor([5, 1])),
         "num_accepted.*at most 4, got 5"),
        (dict(has_initial_state=torch.ones(2)), "has_initial_state.*bool"),
        (dict(cu_seqlens=torch.tensor([0, 4])), "cu_seqlens.*B = 1, got B = 2"),
    ]  # fmt: skip
    for kwargs, message in bad:
        pool = make_pool(3, 6, 8, 16)
        before = pool.clone()
        with pytest.raises(RuntimeError, match=message):
            gdn_ops.recurrent(q, k, v, g, beta, pool, **kwargs)
        assert torch.equal(pool, before)
    one = [x[:1] for x in (q, k, v, g, beta)]
    for cu, message in (
        ([0, 8], "end at T = 4, got 8"),
        ([0, 3, 2, 4], "ascending"),
        ([1, 4], "start at 0, got 1"),
    ):
        pool = make_pool(3, 6, 8, 16)
        with pytest.raises(RuntimeError, match=message):
            gdn_ops.recurrent(*one, pool, cu_seqlens=torch.tensor(cu))
        assert torch.equal(pool, make_pool(3, 6, 8, 16))
    pool = make_pool(3, 6, 8, 16)
    with pytest.raises(RuntimeError, match="HV = 3 and H = 2"):
        gdn_ops.recurrent(q, k, v[:, :, :3], g[..., :3], beta[..., :3], pool[:, :3])
    with pytest.raises(RuntimeError, match="requires grad"):
        gdn_ops.recurrent(q.requires_grad_(), k, v, g, beta, pool)
    with pytest.raises(RuntimeError, match="float64|Double"):
        gdn_ops.recurrent(q.detach().double(), k, v, g, beta, pool)
    with pytest.raises(RuntimeError, match="device"):
        gdn_ops.recurrent(q.detach(), k, v, g, beta, pool.to("meta"))
    with pytest.raises(RuntimeError, match="expanded"):
        gdn_ops.recurrent(q.detach(), k, v, g, beta, pool[:1].expand(3, 6, 8, 16))


@pytest.mark.parametrize("K", [64, 128, 256, 100])
@pytest.mark.parametrize("act", ACTIVATIONS)
def test_fast_products(fast, act, K):
    """A bfloat16 state may be multiplied as it is stored; other states and widths stay exact."""
    V = 24
    args = make_qkv(3, 1, 2, 6, K, V, dtype=act)
    for state in ACTIVATIONS:
        pool = make_pool(3, 6, V, K, dtype=state)
        exact_pool = clone_pool(pool)
        before = clone_pool(pool)
        o = gdn_ops.recurrent(*args, pool)
        gdn_ops.set_precision("exact")
        exact = gdn_ops.recurrent(*args, exact_pool)
        gdn_ops.set_precision("fast")
        if (
            torch.ops.gdn.cpu_isa() not in ("avx512bf16", "amx")
            or state != torch.bfloat16
            or K == 100
        ):
            assert torch.equal(o, exact) and torch.equal(pool, exact_pool)
            continue
        # Half a unit of k and q, 2**-9 of each: a sum of K such products of random sign, relative
        # to the norm of a row.
        want_o, want_pool = reference.recurrent(*args, before)
        if act != torch.bfloat16:
            assert not torch.equal(pool, exact_pool)
            scale = before.float().norm(dim=-1).max().item()
            assert (o.double() - want_o).abs().max() <= 4 * 2**-9 * scale * K**-0.5
            assert (pool.double() - want_pool).abs().max() <= 4 * 2**-9 * scale
        else:
            # bfloat16 keys and queries need no rounding: only the order of the sums differs.
            assert_close("o", o, want_o, act)
            assert_close("state", pool, want_pool, state)


def test_fast_rows_do_not_depend_on_threads(fast):
    args = make_qkv(1, 1, 1, 1, 128, 250)

    def call():
        pool = make_pool(1, 1, 250, 128, dtype=torch.bfloat16)
        return gdn_ops.recurrent(*args, pool), pool

    found = at_thread_counts((1, 2, 4), call)
    for o, pool in found[1:]:
        assert torch.equal(o, found[0][0]) and torch.equal(pool, found[0][1])


@pytest.mark.parametrize("K", [64, 128, 256])
@pytest.mark.parametrize("state", ACTIVATIONS)
def test_rows_in_registers_equal_rows_alone(state, K):
    """A row has the same bits in a whole block and in the tail of one."""
    args = make_qkv(1, 1, 1, 1, K, 23)
    pool = make_pool(1, 1, 23, K, dtype=state)
    rows = [pool[:, :, r : r + 1].clone() for r in range(23)]
    o = gdn_ops.recurrent(*args, pool)
    q, k, v, g, beta = args
    for r, row in enumerate(rows):
        alone = gdn_ops.recurrent(q, k, v[..., r : r + 1], g, beta, row)
        assert torch.equal(alone, o[..., r : r + 1]) and torch.equal(row, pool[:, :, r : r + 1])
