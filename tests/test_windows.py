"""Windows of pending updates: buffered (exact) and low-rank, against the float64 oracles."""

from __future__ import annotations

import functools
import itertools
import math

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
    make_qkv,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from test_conv import conv_pool

import gdn_ops
from gdn_ops import reference, windows

H, HV = 2, 6


def make_window(fills, K, V, R, u_dtype=torch.float32, k_dtype=torch.float32, heads=None, seed=0):
    """Windows at the given fill levels; slots that are not live hold NaN."""
    gen = torch.Generator().manual_seed(seed + 7)
    P = len(fills)
    k = torch.randn(P, H, R, K, generator=gen)
    k = (k / k.norm(dim=-1, keepdim=True)).to(k_dtype)
    u = torch.randn(P, HV, R, V, generator=gen).to(u_dtype)
    g = -torch.rand(P, HV, R, generator=gen)
    packed = []
    for p, fill in enumerate(fills):
        head = heads[p] if heads else 0
        dead = [(head + i) % R for i in range(fill, R)]
        for x in (k, u, g):
            x[p, :, dead] = math.nan
        packed.append(fill | head << 16)
    return windows.Window(k, u, g, torch.tensor(packed, dtype=torch.int32))


def copy(window):
    return windows.Window(*(x.clone() for x in window))


def live(window):
    """Entries oldest first with everything that is not live set to zero, as the oracle's floats."""
    slots, alive = windows._ordered(window.fill, window.g.shape[2])
    return [
        torch.where(
            alive.view(len(alive), 1, -1, *[1] * (x.dim() - 3)), windows._gather(x, slots), 0
        )
        for x in (w.double() for w in window[:3])
    ]


def assert_windows(got, expected, dtype=torch.float32, slack=1.0):
    assert torch.equal(got.fill, expected[3])
    for name, x, y in zip(("k", "u", "g"), live(got), live(windows.Window(*expected)), strict=True):
        finite = torch.isfinite(y)
        assert torch.equal(torch.isfinite(x), finite), name
        limit = torch.float32 if name == "g" else dtype
        assert_close(f"win_{name}", x[finite], y[finite], limit, slack)


def test_by_hand():
    """K = V = 1 and numbers that show the order: decay first, then the error."""
    state = torch.full((1, 1, 1, 1), 2.0)
    w = windows.allocate(1, 1, 1, 1, 1, 2)
    one = torch.ones(1, 1, 1, 1)
    g = torch.full((1, 1, 1), math.log(0.5))
    beta = torch.ones(1, 1, 1)
    o = gdn_ops.recurrent_buffered(one, one, 3 * one, g, beta, state, *w, scale=1.0)
    # decayed state 1, error 2, new state 3; the base stays as it was.
    assert o.item() == 3.0 and state.item() == 2.0
    assert w.u[0, 0, 0, 0].item() == 2.0 and w.fill.tolist() == [1]
    gdn_ops.window_flush(state, *w)
    assert state.item() == 3.0 and w.fill.tolist() == [0]


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("act, state_dtype", list(itertools.product(ACTIVATIONS, ACTIVATIONS)))
def test_buffered_against_oracle(act, state_dtype, transposed):
    K, V, R = 40, 24, 5
    for T in (1, 3, 5):
        q, k, v, g, beta = make_qkv(6, T, H, HV, K, V, act)
        state = make_pool(8, HV, V, K, state_dtype, transposed)
        state[3] = math.nan  # row of a sequence that starts from zero
        state[[1, 4]] = math.nan  # rows that no sequence names
        w = make_window([0, 2, 5, 4, 1, 3, 4, 2], K, V, R)
        kw = {
            "state_indices": torch.tensor([7, 0, 2, -1, 3, 6], dtype=torch.int32),
            "has_initial_state": torch.tensor([True, True, True, True, False, True]),
        }
        o_ref, state_ref, w_ref = reference.recurrent_buffered(q, k, v, g, beta, state, *w, **kw)
        before, w_before = clone_pool(state), copy(w)
        o = gdn_ops.recurrent_buffered(q, k, v, g, beta, state, *w, **kw)
        # Right after a fold the base has been rounded once to its dtype.
        coarse = max(act, state_dtype, key=lambda d: torch.finfo(d).eps)
        assert_close("o", o, o_ref, coarse, slack=2)
        assert torch.equal(o[3], torch.zeros_like(o[3]))
        folded = [r for r, f in ((7, 2), (2, 5), (6, 4)) if f + T > R]
        kept = [r for r in range(8) if r not in folded]
        assert_close("state", state[folded], state_ref[folded], state_dtype, slack=2)
        assert torch.equal(state[kept].nan_to_num(9), before[kept].nan_to_num(9))
        used = [7, 0, 2, 3, 6]
        entry = torch.float32 if state_dtype == torch.float32 else state_dtype
        assert_windows(
            windows.Window(*(x[used] for x in w)), [x[used] for x in w_ref], entry, slack=4
        )
        for x, y in zip(w, w_before, strict=True):
            assert torch.equal(x[[1, 4, 5]].nan_to_num(9), y[[1, 4, 5]].nan_to_num(9))


@pytest.mark.parametrize("u_dtype, k_dtype", list(itertools.product(ACTIVATIONS, ACTIVATIONS)))
def test_lowrank_against_oracle(u_dtype, k_dtype):
    K, V, R = 33, 17, 4
    entry = max((u_dtype, k_dtype), key=lambda d: torch.finfo(d).eps)
    for T in (1, 3, 9):
        q, k, v, g, beta = make_qkv(4, T, H, HV, K, V)
        w = make_window([4, 4, 2, 3], K, V, R, u_dtype, k_dtype, heads=[0, 3, 0, 0])
        kw = {
            "state_indices": torch.tensor([1, 0, -5, 3]),
            "has_initial_state": torch.tensor([True, True, True, False]),
        }
        o_ref, w_ref = reference.recurrent_lowrank(q, k, v, g, beta, *w, **kw)
        o = gdn_ops.recurrent_lowrank(q, k, v, g, beta, *w, **kw)
        assert_close("o", o, o_ref, torch.float32 if T == 1 else entry, slack=2)
        assert torch.equal(o[2], torch.zeros_like(o[2]))
        used = [1, 0, 3]
        assert_windows(
            windows.Window(*(x[used] for x in w)), [x[used] for x in w_ref], entry, slack=2
        )


@pytest.mark.parametrize("K, V", [(1, 1), (8, 3), (16, 130), (64, 64), (127, 65), (128, 128),
                                  (256, 40), (512, 512)])  # fmt: skip
@pytest.mark.parametrize("transposed", [False, True])
def test_head_sizes(K, V, transposed):
    R = 3
    q, k, v, g, beta = make_qkv(2, 2, H, HV, K, V)
    state = make_pool(2, HV, V, K, transposed=transposed)
    w = make_window([1, 3], K, V, R)
    o_ref, state_ref, _ = reference.recurrent_buffered(q, k, v, g, beta, state, *w)
    o_low, _ = reference.recurrent_lowrank(q, k, v, g, beta, *w)
    low = gdn_ops.recurrent_lowrank(q, k, v, g, beta, *copy(w))
    o = gdn_ops.recurrent_buffered(q, k, v, g, beta, state, *w)
    assert_close("buffered", o, o_ref, slack=2)
    assert_close("low rank", low, o_low, slack=2)
    assert_close("state", state, state_ref, slack=2)


@pytest.mark.parametrize("R", [1, 2, 7, 16, 64])
def test_buffered_equals_recurrent_at_every_step(R):
    K, V, steps = 64, 32, 80
    q, k, v, g, beta = make_qkv(2, steps, H, HV, K, V)
    state = make_pool(2, HV, V, K)
    full, w = state.clone(), windows.allocate(2, H, HV, K, V, R)
    for t in range(steps):
        x = [y[:, t : t + 1] for y in (q, k, v, g, beta)]
        o = gdn_ops.recurrent_buffered(*x, state, *w, qk_l2norm=True)
        expected = gdn_ops.recurrent(*x, full, qk_l2norm=True)
        assert_close(f"step {t}", o, expected.double(), torch.float32)
        assert_close(f"state {t}", windows.state_of(w, state), full.double())
    gdn_ops.window_flush(state, *w)
    assert_close("flushed", state, full.double())


@pytest.mark.parametrize("cuts", [[65], [64, 1], [1, 64], [63, 2], [32, 33], [1] * 65])
def test_split_anywhere(cuts):
    """REPORTS E2: any cut gives the whole, with windows as with the plain recurrence."""
    q, k, v, g, beta = make_qkv(1, 65, H, HV, 8, 8)
    full = torch.zeros(1, HV, 8, 8)
    expected = gdn_ops.recurrent(q, k, v, g, beta, full)
    state, w = torch.zeros_like(full), windows.allocate(1, H, HV, 8, 8, 64)
    start, parts = 0, []
    for n in cuts:
        for piece in [n] if n <= 64 else [64, n - 64]:
            x = [y[:, start : start + piece] for y in (q, k, v, g, beta)]
            parts.append(gdn_ops.recurrent_buffered(*x, state, *w))
            start += piece
    assert_close("o", torch.cat(parts, 1), expected.double())
    assert_close("state", windows.state_of(w, state), full.double())


@pytest.mark.parametrize("dtype", ACTIVATIONS)
def test_cutting_a_call_changes_nothing(dtype):
    """Later tokens of a call see what an earlier call would have stored."""
    q, k, v, g, beta = make_qkv(1, 6, H, HV, 40, 24)
    for op in ("buffered", "lowrank"):
        outs = []
        for cuts in ([6], [1] * 6, [2, 4]):
            state = make_pool(1, HV, 24, 40)
            w = windows.allocate(1, H, HV, 40, 24, 6, update_dtype=dtype, key_dtype=dtype)
            start, parts = 0, []
            for n in cuts:
                x = [y[:, start : start + n] for y in (q, k, v, g, beta)]
                start += n
                if op == "buffered":
                    parts.append(gdn_ops.recurrent_buffered(*x, state, *w))
                else:
                    parts.append(gdn_ops.recurrent_lowrank(*x, *w))
            outs.append(torch.cat(parts, 1))
        assert torch.equal(outs[0], outs[1]) and torch.equal(outs[0], outs[2]), op


def test_rows_do_not_feel_when_others_fold():
    """REPORTS E4: one row beside rows at any fill level, first or last, any threads."""
    K, V, R = 40, 24, 4
    q, k, v, g, beta = make_qkv(8, 1, H, HV, K, V)
    base = make_pool(8, HV, V, K)
    window = make_window([2] * 8, K, V, R)

    def call(fills, order):
        state = base.clone()
        w = make_window(fills, K, V, R)
        w.k[0], w.u[0], w.g[0] = window.k[0], window.u[0], window.g[0]
        x = [y[order] for y in (q, k, v, g, beta)]
        for _ in range(3):
            o = gdn_ops.recurrent_buffered(*x, state, *w, state_indices=torch.tensor(order))
        return o[order.index(0)], state[0], windows.state_of(w, state)[0]

    results = []
    for fills in ([2] * 8, [2, 4, 4, 0, 1, 4, 3, 4], [2, 0, 0, 4, 4, 4, 4, 0]):
        for order in (list(range(8)), [7, 1, 2, 3, 4, 5, 6, 0]):
            results += at_thread_counts((1, 2, 3), functools.partial(call, fills, order))
    for got in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(got, results[0], strict=True))


@pytest.mark.parametrize("op", ["buffered", "lowrank"])
def test_thread_counts(op):
    """One task a key head, or blocks of rows of a value head: the same bits."""
    h, hv, K, V, R = 1, 3, 128, 200, 4
    q, k, v, g, beta = make_qkv(1, 3, h, hv, K, V)

    def call():
        state = make_pool(1, hv, V, K)
        w = windows.allocate(1, h, hv, K, V, R)
        outs = []
        for _ in range(3):
            if op == "buffered":
                outs.append(gdn_ops.recurrent_buffered(q, k, v, g, beta, state, *w))
            else:
                outs.append(gdn_ops.recurrent_lowrank(q, k, v, g, beta, *w))
        return [*outs, state, *w]

    results = at_thread_counts((1, 2, 3, 7), call)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


def test_speculate_accept_reject():
    """Drafts appended, some rejected by the next call; the base moves only in a fold."""
    T, R, K, V = 4, 8, 32, 16
    gen = torch.Generator().manual_seed(3)
    for state_dtype in (torch.float32, torch.bfloat16):
        state = make_pool(3, HV, V, K, state_dtype)
        w = windows.allocate(3, H, HV, K, V, R)
        exact = state.double()
        accepted = torch.ones(3, dtype=torch.int32)
        history = [[] for _ in range(3)]  # inputs of the last call
        for step in range(12):
            q, k, v, g, beta = make_qkv(3, T, H, HV, K, V, seed=step)
            for n, last in enumerate(history):
                if last:
                    x = [y[n : n + 1, : accepted[n]] for y in last]
                    _, exact[n : n + 1] = reference.recurrent(*x, exact[n : n + 1])
            before = state.clone()
            o = gdn_ops.recurrent_buffered(q, k, v, g, beta, state, *w, num_accepted=accepted)
            expected, _ = reference.recurrent(q, k, v, g, beta, exact)
            limit = state_dtype
            assert_close(
                f"step {step}", o, expected, limit, slack=2 if limit == torch.float32 else 8
            )
            pending = windows.counts(w.fill).fill
            for n in range(3):
                if pending[n] > T:
                    assert torch.equal(state[n], before[n])
            history = [(q, k, v, g, beta)] * 3
            accepted = torch.randint(1, T + 1, (3,), generator=gen, dtype=torch.int32)


def test_speculation_needs_no_more_than_the_window():
    q, k, v, g, beta = make_qkv(1, 5, H, HV, 8, 8)
    state, w = make_pool(1, HV, 8, 8), windows.allocate(1, H, HV, 8, 8, 4)
    before = state.clone()
    with pytest.raises(RuntimeError, match="T <= R = 4 tokens a call, got T = 5"):
        gdn_ops.recurrent_buffered(q, k, v, g, beta, state, *w)
    cu = torch.tensor([0, 5])
    with pytest.raises(RuntimeError, match="expected at most 4 tokens a sequence, got 5"):
        gdn_ops.recurrent_buffered(q, k, v, g, beta, state, *w, cu_seqlens=cu)
    assert torch.equal(state, before) and w.fill.tolist() == [0]
    gdn_ops.recurrent_lowrank(q, k, v, g, beta, *w)
    assert windows.counts(w.fill).fill.tolist() == [4]


def test_accepted_counts_out_of_range():
    q, k, v, g, beta = make_qkv(2, 2, H, HV, 8, 8)
    state, w = make_pool(2, HV, 8, 8), windows.allocate(2, H, HV, 8, 8, 4)
    gdn_ops.recurrent_buffered(q, k, v, g, beta, state, *w)
    before = copy(w)
    with pytest.raises(RuntimeError, match="at most the 2 tokens of the call before, got 3"):
        gdn_ops.recurrent_buffered(q, k, v, g, beta, state, *w, num_accepted=torch.tensor([2, 3]))
    assert all(torch.equal(a, b) for a, b in zip(w, before, strict=True))
    o = gdn_ops.recurrent_buffered(
        q, k, v, g, beta, state, *w, num_accepted=torch.tensor([0, 2, 9])
    )
    assert torch.equal(o[0], torch.zeros_like(o[0]))
    assert w.fill[0] == before.fill[0]
    assert all(torch.equal(a[0], b[0]) for a, b in zip(w[:3], before[:3], strict=True))


def test_packed_sequences():
    K, V, R = 24, 40, 4
    cu = torch.tensor([0, 0, 3, 3, 5, 6], dtype=torch.int32)
    q, k, v, g, beta = make_qkv(1, 6, H, HV, K, V)
    kw = {"cu_seqlens": cu, "state_indices": torch.tensor([4, 2, 0, 1, -1]),
              "num_accepted": torch.tensor([1, 1, 1, 1, 1])}  # fmt: skip
    state, w = make_pool(5, HV, V, K), make_window([1, 2, 3, 0, 2], K, V, R)
    o_ref, state_ref, w_ref = reference.recurrent_buffered(q, k, v, g, beta, state, *w, **kw)
    low_ref, _ = reference.recurrent_lowrank(q, k, v, g, beta, *w, **kw)
    low = gdn_ops.recurrent_lowrank(q, k, v, g, beta, *copy(w), **kw)
    o = gdn_ops.recurrent_buffered(q, k, v, g, beta, state, *w, **kw)
    assert_close("o", o, o_ref)
    assert_close("low rank", low, low_ref)
    assert_close("state", state, state_ref)
    assert_windows(w, w_ref)


@pytest.mark.parametrize("packed", [False, True], ids=["batch", "packed"])
def test_rows_of_drafts_may_be_fewer_than_the_tokens(packed):
    """Of [N, S] rows the first column counts, whatever the others hold and however many tokens."""
    K, V, R, T = 5, 3, 4, 3
    inputs = make_qkv(1 if packed else 2, 2 * T if packed else T, H, HV, K, V)
    tail = (None, torch.tensor([0, T, 2 * T]) if packed else None)
    rows = torch.tensor([[2, 900], [0, -1]])
    pool, window = make_pool(3, HV, V, K), make_window([1, 0, 4], K, V, R)
    results = []
    for x in (rows, rows[:, 0]):
        state, win, low = pool.clone(), copy(window), copy(window)
        o = gdn_ops.recurrent_buffered(*inputs, state, *win, x, *tail)
        results.append((o, state, gdn_ops.recurrent_lowrank(*inputs, *low, x, *tail)))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("op", ["buffered", "lowrank"])
def test_extreme_gates(op):
    """REPORTS F1, F2: vanished decay for a whole window, one -316, no decay at all, -inf."""
    K = V = 16
    T = 64
    q, k, v, g, beta = make_qkv(4, T, H, HV, K, V)
    g[0] = math.log(1e-12)
    g[1] = -1e-4
    g[1, 31] = -316
    g[2] = 0
    g[3] = -1e-4
    g[3, 17] = -math.inf
    for R in (4, 32, 64):
        state, w = make_pool(4, HV, V, K), windows.allocate(4, H, HV, K, V, R)
        state[3] = math.inf  # cleared at token 17
        exact = state.double()
        for t in range(T):
            x = [y[:, t : t + 1] for y in (q, k, v, g, beta)]
            rows = [0, 1, 2] if t < 17 and op == "buffered" else [0, 1, 2, 3]
            if op == "buffered":
                expected, exact = reference.recurrent(*x, exact)
                o = gdn_ops.recurrent_buffered(*x, state, *w)
                if t == 17:
                    exact[3] = 0
                    one = [y[3:] for y in x]
                    expected[3:], exact[3:] = reference.recurrent(*one, exact[3:])
                    if R == 4:  # what was pending came from an infinite state
                        assert not torch.isfinite(w.u[3]).all()
            else:
                expected, _ = reference.recurrent_lowrank(*x, *w)
                o = gdn_ops.recurrent_lowrank(*x, *w)
            assert_close(f"R = {R}, token {t}", o[rows], expected[rows], slack=4)


def test_one_huge_decay_costs_no_digits():
    """g = -316 once: a running cumulative sum would lose 5.6e-6 here."""
    K = V = 32
    R = 32
    q, k, v, g, beta = make_qkv(1, R, H, HV, K, V)
    g[:, 3] = -316
    state, w = torch.zeros(1, HV, V, K), windows.allocate(1, H, HV, K, V, R)
    expected, _ = reference.recurrent(q, k, v, g, beta, state)
    o = gdn_ops.recurrent_buffered(q, k, v, g, beta, state, *w)
    assert (o - expected).abs().max() < 5e-7


def test_a_fresh_sequence_reads_nothing():
    q, k, v, g, beta = make_qkv(1, 3, H, HV, 8, 8)
    g[0, 0] = 0
    zero = torch.zeros(1, HV, 8, 8)
    expected = gdn_ops.recurrent(q, k, v, g, beta, zero)
    for tokens in ([3], [1, 1, 1], [1, 2]):
        state = torch.full((1, HV, 8, 8), math.nan)
        w = make_window([2], 8, 8, 3)
        fresh, start, parts = torch.tensor([False]), 0, []
        for n in tokens:
            x = [y[:, start : start + n] for y in (q, k, v, g, beta)]
            parts.append(gdn_ops.recurrent_buffered(*x, state, *w, has_initial_state=fresh))
            fresh, start = torch.tensor([True]), start + n
        assert_close("o", torch.cat(parts, 1), expected.double())
        assert torch.isnan(state).all(), "the base is only written by a fold"
        assert_close("state", windows.state_of(w, state), zero.double())
        gdn_ops.window_flush(state, *w)
        assert_close("flushed", state, zero.double())


@pytest.mark.parametrize("u_dtype", ACTIVATIONS)
@pytest.mark.parametrize("state_dtype", ACTIVATIONS)
def test_drift_over_2000_steps(state_dtype, u_dtype):
    """A 16-bit base is rounded R times less often: at most the plain recurrence's error."""
    K, V, R, steps = 32, 32, 16, 2000
    q, k, v, g, beta = make_qkv(1, steps, 1, 2, K, V, seed=5)
    g = g * 0.05
    full = torch.zeros(1, 2, V, K, dtype=state_dtype)
    state = full.clone()
    w = windows.allocate(1, 1, 2, K, V, R, update_dtype=u_dtype)
    expected, _ = reference.recurrent(q, k, v, g, beta, full)
    errors = torch.zeros(2, dtype=torch.float64)
    for t in range(steps):
        x = [y[:, t : t + 1] for y in (q, k, v, g, beta)]
        for i, o in enumerate(
            (gdn_ops.recurrent_buffered(*x, state, *w), gdn_ops.recurrent(*x, full))
        ):
            errors[i] += (o.double() - expected[:, t : t + 1]).square().mean()
    buffered, plain = (errors / steps).sqrt().tolist()
    if state_dtype == torch.float32 and u_dtype == torch.float32:
        assert buffered <= 1e-6 and plain <= 1e-6
    elif torch.finfo(u_dtype).eps <= torch.finfo(state_dtype).eps:
        assert buffered <= plain, (buffered, plain)
    else:
        assert buffered <= 2 * torch.finfo(u_dtype).eps, (buffered, plain)


def test_lowrank_probe():
    """T = 128, g uniform in (-3, 0), unit keys, R = 16, f32: at most 1e-6 from full rank."""
    gen = torch.Generator().manual_seed(0)
    q, k, v, _, beta = make_qkv(1, 128, 16, 48, 128, 128)
    g = -3 * torch.rand(1, 128, 48, generator=gen)
    full = gdn_ops.recurrent(q, k, v, g, beta, torch.zeros(1, 48, 128, 128))
    w = windows.allocate(1, 16, 48, 128, 128, 16)
    assert (gdn_ops.recurrent_lowrank(q, k, v, g, beta, *w) - full).abs().max() <= 1e-6


def test_lowrank_error_falls_with_rank():
    gen = torch.Generator().manual_seed(1)
    q, k, v, _, beta = make_qkv(1, 128, H, HV, 64, 64)
    g = -0.5 * torch.rand(1, 128, HV, generator=gen)
    full = gdn_ops.recurrent(q, k, v, g, beta, torch.zeros(1, HV, 64, 64))
    errors = []
    for R in (8, 16, 32):
        w = windows.allocate(1, H, HV, 64, 64, R)
        errors.append((gdn_ops.recurrent_lowrank(q, k, v, g, beta, *w) - full).abs().max().item())
    assert errors[0] > errors[1] > errors[2] > 0


@pytest.mark.parametrize("T", [1, 5, 16, 64])
def test_lowrank_with_enough_rank_is_exact(T):
    q, k, v, g, beta = make_qkv(2, T, H, HV, 64, 32)
    full = gdn_ops.recurrent(q, k, v, g, beta, torch.zeros(2, HV, 32, 64))
    w = windows.allocate(2, H, HV, 64, 32, T)
    assert_close("o", gdn_ops.recurrent_lowrank(q, k, v, g, beta, *w), full.double())


def test_lowrank_long_call_equals_steps():
    """More tokens than the kernel holds at a time, and a ring that wraps several times."""
    q, k, v, g, beta = make_qkv(1, 150, H, HV, 24, 40)
    whole, steps = (windows.allocate(1, H, HV, 24, 40, 7) for _ in range(2))
    o = gdn_ops.recurrent_lowrank(q, k, v, g, beta, *whole)
    parts = [
        gdn_ops.recurrent_lowrank(*[x[:, t : t + 1] for x in (q, k, v, g, beta)], *steps)
        for t in range(150)
    ]
    assert torch.equal(o, torch.cat(parts, 1))
    for x, y in zip(whole[:3], steps[:3], strict=True):
        assert torch.equal(x, y)
    assert [c.tolist() for c in windows.counts(whole.fill)] == [[7], [149], [150 % 7]]


def test_flush_and_reset():
    K, V, R = 24, 40, 5
    for transposed, dtype in itertools.product((False, True), ACTIVATIONS):
        state = make_pool(5, HV, V, K, dtype, transposed)
        w = make_window([0, 3, 5, 2, 1], K, V, R)
        rows = torch.tensor([1, -1, 2, 0])
        expected, fill = reference.window_flush(state, *w, state_indices=rows)
        assert_close("state_of", windows.state_of(w, state)[[1, 2]].double(), expected[[1, 2]],
                     torch.float32, slack=2)  # fmt: skip
        before = clone_pool(state)
        gdn_ops.window_flush(state, *w, state_indices=rows)
        assert_close("state", state, expected, dtype, slack=2)
        assert torch.equal(w.fill, fill)
        assert torch.equal(state[[0, 3, 4]], before[[0, 3, 4]])
        assert torch.equal(reference.window_reset(w.fill, torch.tensor([3, -1])),
                           torch.tensor([0, 0, 0, 0, 1], dtype=torch.int32))  # fmt: skip
        gdn_ops.window_reset(w.fill, torch.tensor([3, -1]))
        assert w.fill.tolist() == [0, 0, 0, 0, 1]
        gdn_ops.window_reset(w.fill)
        assert w.fill.tolist() == [0] * 5


def test_accept_before_flush():
    q, k, v, g, beta = make_qkv(2, 4, H, HV, 8, 8)
    state, w = make_pool(2, HV, 8, 8), windows.allocate(2, H, HV, 8, 8, 8)
    _, exact = reference.recurrent(q[:, :3], k[:, :3], v[:, :3], g[:, :3], beta[:, :3], state)
    gdn_ops.recurrent_buffered(q, k, v, g, beta, state, *w)
    windows.accept(w.fill, torch.tensor([3, 1, 3]), torch.tensor([0, -1, 1]))
    assert w.fill.tolist() == [3, 3]
    gdn_ops.window_flush(state, *w)
    assert_close("state", state, exact)


def test_accept_of_more_or_fewer_counts_than_rows():
    w = windows.allocate(3, H, HV, 8, 8, 8)
    w.fill.fill_(4 + 3 * 256)
    windows.accept(w.fill, torch.tensor([1, 4, 9, 1, 1]))  # two more than the pool has rows
    assert w.fill.tolist() == [1, 4, 4]
    for counts, rows in (([1], [0, 1]), ([1, 1], [[0], [1]]), (1, [0])):
        with pytest.raises(ValueError, match="^accept: "):
            windows.accept(w.fill, torch.tensor(counts), torch.tensor(rows))
    assert w.fill.tolist() == [1, 4, 4]


def test_uv_round_trip():
    K, V, R = 24, 40, 4
    w = make_window([2, 4, 4], K, V, R, heads=[0, 3, 0])
    UV, slot = windows.to_uv(w)
    assert UV.shape == (3, HV, K + V, R) and slot.tolist() == [2, 4, 4]
    S = torch.einsum("nhvr,nhkr->nhvk", UV[:, :, K:], UV[:, :, :K])
    assert_close("UV", S, windows.state_of(w).double())
    back = windows.from_uv(UV, slot, H, K)
    assert_close("state", windows.state_of(back), windows.state_of(w).double())
    # A ring that has wrapped: six updates, the oldest in column 2.
    turned = windows.from_uv(UV.roll(2, dims=-1)[1:], torch.tensor([6, 6]), H, K)
    assert [c.tolist() for c in windows.counts(turned.fill)] == [[4, 4], [0, 0], [2, 2]]
    q, k, v, g, beta = make_qkv(2, 6, H, HV, K, V)
    low = windows.Window(*(x[1:].clone() for x in w))
    assert_close("o", gdn_ops.recurrent_lowrank(q, k, v, g, beta, *turned),
                 gdn_ops.recurrent_lowrank(q, k, v, g, beta, *low).double())  # fmt: skip
    # Columns that hold no update yet may hold anything.
    UV[0, ..., 2:] = torch.randn_like(UV[0, ..., 2:])
    UV[0, 0, 0, 3] = float("nan")
    unused = windows.from_uv(UV, slot, H, K)
    assert_close("unused", windows.state_of(unused), windows.state_of(w).double())
    for wrong, says in (
        ((UV[0], slot, H, K), "UV: expected shape"),
        ((UV, slot, H, K + V), "UV: expected shape"),
        ((torch.zeros(3, HV, K + V, 65), slot, H, K), "R from 1 to 64"),
        ((UV, slot, HV + 1, K), "multiple of H"),
        ((UV, slot[:2], H, K), r"shape \[3\], got torch.int32 of shape \[2\]"),
        ((UV, slot.float(), H, K), "got torch.float32"),
        ((UV, slot - 3, H, K), "from 0 on, got -1"),
        ((UV.double(), slot, H, K), "key_dtype: expected .* got torch.float64"),
    ):
        with pytest.raises(ValueError, match=says):
            windows.from_uv(*wrong)
    UV[0, 0, 0, 0] += 1
    with pytest.raises(ValueError, match="share a key head hold different keys"):
        windows.from_uv(UV, slot, H, K)


def test_fla_state():
    state = make_pool(2, HV, 8, 16)
    fla = windows.to_fla_state(state)
    assert fla.shape == (2, HV, 16, 8) and fla.is_contiguous()
    assert torch.equal(windows.from_fla_state(fla), state)


@pytest.mark.parametrize("op", ["decode_buffered", "decode_lowrank"])
@pytest.mark.parametrize("act", ACTIVATIONS)
def test_decode_against_oracle(op, act):
    K, V, R = 40, 24, 5
    C = 2 * H * K + HV * V
    for T, threads in ((1, 2), (3, 2), (3, 3), (3, 1)):
        layer = make_layer(4, T, H, HV, K, V, dtype=act)
        conv_state = conv_pool(6, C, 4, act, "rows")
        base = [make_pool(6, HV, V, K)] if op == "decode_buffered" else []
        w = make_window([5, 1, 4, 0, 2, 3], K, V, R)
        kw = {
            "state_indices": torch.tensor([5, -1, 0, 2], dtype=torch.int32),
            "has_initial_state": torch.tensor([True, True, False, True]),
        }
        args = layer_args(layer)
        y_ref, conv_ref, *state_ref, w_ref = getattr(reference, op)(
            *args, conv_state, *base, *w, H, K, **kw
        )
        call = functools.partial(getattr(gdn_ops, op), *args, conv_state, *base, *w, H, K, **kw)
        (y,) = at_thread_counts((threads,), call)
        assert_close("y", y, y_ref, act, slack=16 if act == torch.float32 else 1)
        assert torch.equal(y[1], torch.zeros_like(y[1]))
        assert torch.equal(conv_state.double(), conv_ref)
        used = [5, 0, 2]
        assert_windows(windows.Window(*(x[used] for x in w)), [x[used] for x in w_ref], slack=8)
        if base:
            assert_close("state", base[0][used], state_ref[0][used], slack=8)


@pytest.mark.parametrize("op", ["decode_buffered", "decode_lowrank"])
def test_decode_thread_counts(op):
    """REPORTS B5: whole key heads, or blocks of rows; the same bits."""
    h, hv, K, V, R, T = 1, 3, 64, 100, 4, 2
    layer = make_layer(1, T, h, hv, K, V)
    args = layer_args(layer)

    def call():
        conv_state = conv_pool(1, 2 * h * K + hv * V, 4)
        base = [make_pool(1, hv, V, K)] if op == "decode_buffered" else []
        w = windows.allocate(1, h, hv, K, V, R)
        ys = [getattr(gdn_ops, op)(*args, conv_state, *base, *w, h, K) for _ in range(4)]
        return [*ys, conv_state, *base, *w]

    results = at_thread_counts((1, 2, 3, 7), call)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


def test_decode_speculative():
    K, V, R, T = 24, 16, 6, 3
    C = 2 * H * K + HV * V
    conv_state, state = conv_pool(2, C, 3 + T - 1), make_pool(2, HV, V, K)
    w = windows.allocate(2, H, HV, K, V, R)
    for step, accepted in enumerate(([1, 1], [3, 1], [2, 3], [1, 0])):
        layer = make_layer(2, T, H, HV, K, V, seed=step)
        args = layer_args(layer)
        kw = {"num_accepted": torch.tensor(accepted), "conv_leading": True}
        y_ref, conv_ref, state_ref, w_ref = reference.decode_buffered(
            *args, conv_state, state, *w, H, K, **kw
        )
        y = gdn_ops.decode_buffered(*args, conv_state, state, *w, H, K, **kw)
        assert_close("y", y, y_ref, slack=16)
        assert torch.equal(conv_state.double(), conv_ref)
        assert_close("state", state, state_ref, slack=8)
        assert_windows(w, w_ref, slack=8)


def opcheck(name, *args, **kw):
    torch.library.opcheck(getattr(torch.ops.gdn, name).default, args, kw)


def test_opcheck():
    K, V, R = 8, 16, 4
    q, k, v, g, beta = make_qkv(2, 2, H, HV, K, V)
    state, w = make_pool(3, HV, V, K), windows.allocate(3, H, HV, K, V, R)
    rows = torch.tensor([2, -1], dtype=torch.int32)
    has = torch.tensor([True, True])
    accepted = torch.tensor([1, 1], dtype=torch.int32)
    for extra in ({}, {"state_indices": rows, "has_initial_state": has, "num_accepted": accepted}):
        opcheck("recurrent_buffered", q, k, v, g, beta, state, *w, **extra)
        opcheck("recurrent_lowrank", q, k, v, g, beta, *w, **extra)
    opcheck("window_flush", state, *w, state_indices=rows)
    opcheck("window_flush", state, *w)
    opcheck("window_reset", w.fill, state_indices=rows)
    opcheck("window_reset", w.fill)
    layer = list(make_layer(2, 1, H, HV, K, V).values())
    conv_state = conv_pool(3, 2 * H * K + HV * V, 4)
    opcheck("decode_buffered", *layer, conv_state, state, *w, H, K, state_indices=rows)
    opcheck("decode_lowrank", *layer, conv_state, *w, H, K, state_indices=rows)


def test_refuses_gradients():
    q, k, v, g, beta = make_qkv(1, 1, H, HV, 8, 8)
    state, w = make_pool(1, HV, 8, 8), windows.allocate(1, H, HV, 8, 8, 2)
    q.requires_grad_()
    with pytest.raises(RuntimeError, match="recurrent_buffered: has no gradient"):
        gdn_ops.recurrent_buffered(q, k, v, g, beta, state, *w)
    with pytest.raises(RuntimeError, match="recurrent_lowrank: has no gradient"):
        gdn_ops.recurrent_lowrank(q, k, v, g, beta, *w)
    with torch.no_grad():
        gdn_ops.recurrent_lowrank(q, k, v, g, beta, *w)


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda w: w._replace(k=w.k.double()), "win_k: expected float32, bfloat16 or float16"),
        (lambda w: w._replace(g=w.g.half()), "win_g: expected float32"),
        (lambda w: w._replace(fill=w.fill.long()), "win_fill: expected int32"),
        (lambda w: w._replace(u=w.u[:, :, :3]), "win_u: expected R = 4"),
        (lambda w: w._replace(fill=w.fill + 5), "win_fill: expected counts that a window of R = 4"),
        (lambda w: w._replace(fill=w.fill + (1 << 16)), "win_fill: expected counts"),
        (lambda w: w._replace(fill=w.fill - 1), "win_fill: expected counts"),
    ],
)
def test_refuses_wrong_windows(change, message):
    q, k, v, g, beta = make_qkv(1, 1, H, HV, 8, 8)
    state, w = make_pool(1, HV, 8, 8), change(windows.allocate(1, H, HV, 8, 8, 4))
    before = copy(w)
    with pytest.raises(RuntimeError, match=message):
        gdn_ops.recurrent_buffered(q, k, v, g, beta, state, *w)
    assert all(torch.equal(a, b) for a, b in zip(w, before, strict=True))


def test_allocate_refuses():
    for kw, message in (
        ({"R": 0}, "R: expected 1 to 64, got 0"),
        ({"R": 65}, "R: expected 1 to 64, got 65"),
        ({"HV": 3}, "multiple of H"),
        ({"HV": 0}, "multiple of H"),
        ({"P": -1}, "P: expected at least 0, got -1"),
        ({"K": 0}, "K: expected 1 to 512, got 0"),
        ({"V": 513}, "V: expected 1 to 512, got 513"),
        ({"key_dtype": torch.float64}, "key_dtype"),
    ):
        with pytest.raises(ValueError, match=message):
            windows.allocate(**{**{"P": 1, "H": 2, "HV": 4, "K": 8, "V": 8, "R": 4}, **kw})


ACTIONS = st.lists(
    st.tuples(
        st.sampled_from(["step", "speculate", "flush", "restart", "pad"]),
        st.integers(1, 4),
        st.integers(0, 2**31 - 1),
    ),
    min_size=1,
    max_size=12,
)


@settings(max_examples=40, deadline=None)
@given(actions=ACTIONS, R=st.sampled_from([4, 5, 8]))
def test_any_sequence_of_calls(actions, R):
    """Decode, speculate, reject, flush, restart, pad and reorder, against the sequential oracle."""
    K, V, rows = 8, 12, 3
    state = make_pool(rows, HV, V, K)
    w = windows.allocate(rows, H, HV, K, V, R)
    exact = state.double()  # with the accepted tokens of earlier calls in it
    last = [None] * rows  # inputs that the next call may still reject
    for kind, T, seed in actions:
        gen = torch.Generator().manual_seed(seed)
        order = torch.randperm(rows, generator=gen)
        accepted = torch.ones(rows, dtype=torch.int64)
        for n, row in enumerate(order.tolist()):
            if last[row] is not None:
                limit = last[row][0].shape[1]
                accepted[n] = int(torch.randint(1, limit + 1, (), generator=gen))
        padded = torch.zeros(rows, dtype=torch.bool)
        if kind == "pad":
            padded[int(torch.randint(rows, (), generator=gen))] = True
        fresh = torch.rand(rows, generator=gen) < (0.5 if kind == "restart" else 0)
        for n, row in enumerate(order.tolist()):
            if padded[n]:
                continue
            if fresh[n]:
                exact[row] = 0
            elif last[row] is not None:
                x = [y[:, : accepted[n]] for y in last[row]]
                _, exact[row : row + 1] = reference.recurrent(*x, exact[row : row + 1])
            last[row] = None
        if kind == "flush":
            windows.accept(w.fill, accepted, order)
            gdn_ops.window_flush(state, *w, state_indices=order)
            assert_close("flushed", state, exact, slack=8)
            continue
        q, k, v, g, beta = make_qkv(rows, T if kind != "step" else 1, H, HV, K, V, seed=seed % 1000)
        indices = torch.where(padded, -1, order)
        o = gdn_ops.recurrent_buffered(
            q, k, v, g, beta, state, *w, state_indices=indices, has_initial_state=~fresh,
            num_accepted=accepted,
        )  # fmt: skip
        expected, _ = reference.recurrent(q, k, v, g, beta, exact, state_indices=indices)
        assert_close(kind, o, expected, slack=8)
        for n, row in enumerate(order.tolist()):
            if not padded[n]:
                last[row] = [y[n : n + 1] for y in (q, k, v, g, beta)]
