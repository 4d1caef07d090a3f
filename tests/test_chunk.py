"""``chunk``, ``chunk_prefill``, ``chunk_lowrank`` against the float64 oracle."""

from __future__ import annotations

import itertools
import math
from pathlib import Path

import pytest
import torch
from common import (
    ACTIVATIONS,
    EXTREMES,
    assert_close,
    at_thread_counts,
    clone_pool,
    extreme,
    make_pool,
    make_qkv,
    offsets,
)
from torch.library import opcheck

import gdn_ops
from gdn_ops import reference, windows
from gdn_ops._tolerance import rounded_error

# f32 sums in another order than the oracle's, over chunks of up to 128 tokens.
SLACK = 4.0


def state(N, HV, V, K, seed=7):
    return torch.randn(N, HV, V, K, generator=torch.Generator().manual_seed(seed))


def check(args, initial=None, act=torch.float32, **kwargs):
    o, final = gdn_ops.chunk(*args, initial, **kwargs)
    expected_o, expected_final = reference.chunk(*args, initial, **kwargs)
    assert o.dtype == act and final.dtype == torch.float32
    assert o.is_contiguous() and final.is_contiguous()
    assert_close("o", o, expected_o, act, SLACK)
    assert_close("final_state", final, expected_final, torch.float32, SLACK)
    return o, final


DIMS = [1, 8, 16, 64, 80, 100, 128, 256]


@pytest.mark.parametrize(
    "K, V", [(d, d) for d in DIMS] + [(8, 130), (100, 8), (1, 512), (512, 1), (64, 33), (512, 512)]
)
def test_head_dims(K, V):
    """G3."""
    for act in ACTIVATIONS:
        check(make_qkv(2, 70, 1, 2, K, V, dtype=act), state(2, 2, V, K), act=act)


@pytest.mark.parametrize("chunk_size", [16, 17, 32, 50, 64, 100, 128])
@pytest.mark.parametrize("T", [1, 5, 15, 16, 63, 64, 65, 127, 128, 129, 200])
def test_lengths_and_chunk_sizes(T, chunk_size):
    check(make_qkv(1, T, 2, 6, 24, 40), state(1, 6, 40, 24), chunk_size=chunk_size)


@pytest.mark.parametrize("act", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("chunk_size", [16, 33, 50, 64, 96, 128])
def test_sixteen_bit_lengths(act, chunk_size):
    """Blocks of 16 and 32 tokens, whole and not, in whatever products the processor has."""
    for T in (1, 15, 16, 17, 31, 32, 33, 64, 97, 128, 130):
        args = make_qkv(1, T, 1, 2, 40, 72, dtype=act)
        check(args, state(1, 2, 72, 40), act=act, chunk_size=chunk_size, qk_l2norm=T % 2 == 0)


@pytest.mark.parametrize("act", ACTIVATIONS)
def test_keys_that_are_not_unit_length(act):
    """The substitution sums terms that are larger than what comes out."""
    q, k, v, g, beta = make_qkv(1, 100, 1, 2, 32, 32, dtype=act)
    check((q, (2.5 * k).to(act), v, g, 0.3 * beta), state(1, 2, 32, 32), act=act)


@pytest.mark.parametrize("act", ACTIVATIONS)
def test_a_later_token_changes_no_earlier_output(act):
    for at in (5, 31, 32, 70, 99):
        args = make_qkv(1, 130, 1, 2, 40, 72, dtype=act)
        expected, _ = gdn_ops.chunk(*args)
        for x in args:
            x[:, at] = math.nan
        assert torch.equal(gdn_ops.chunk(*args)[0][:, :at], expected[:, :at])


@pytest.mark.parametrize("act", ACTIVATIONS)
@pytest.mark.parametrize("ratio", [1, 2, 3, 6])
def test_dtypes_and_ratios(act, ratio):
    q, k, v, g, beta = make_qkv(2, 80, 2, 2 * ratio, 64, 32, dtype=act)
    check((q, k, v, g, beta), act=act, qk_l2norm=True, scale=0.3)
    check((q, k, v, g.to(act), beta.to(act)), state(2, 2 * ratio, 32, 64), act=act)


def test_value_head_reads_its_key_head():
    """G2: value head h uses key head h // ratio."""
    q, k, v, g, beta = make_qkv(1, 40, 2, 6, 16, 16)
    o, _ = gdn_ops.chunk(q, k, v, g, beta)
    for h in range(6):
        part = (q[:, :, h // 3, None], k[:, :, h // 3, None], v[:, :, h, None],
                g[..., h, None], beta[..., h, None])  # fmt: skip
        assert torch.equal(o[:, :, h, None], gdn_ops.chunk(*part)[0])
    with pytest.raises(RuntimeError, match="HV = 3 and H = 2"):
        gdn_ops.chunk(q, k, v[:, :, :3], g[..., :3], beta[..., :3])


def test_strided_views_equal_contiguous():
    q, k, v, g, beta = make_qkv(2, 70, 2, 4, 24, 20)
    qt, kt, vt = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v))
    odd = torch.stack([v, torch.full_like(v, 9.0)], -1)[..., 0]
    gates = torch.stack([beta, g], -1)
    S = state(2, 4, 20, 24)
    St = S.transpose(2, 3).contiguous().transpose(2, 3)
    expected = gdn_ops.chunk(q, k, v, g, beta, S)
    for got in (
        gdn_ops.chunk(qt, kt, vt, gates[..., 1], gates[..., 0], St),
        gdn_ops.chunk(q, k, odd, g, beta, S),
    ):
        assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
        assert all(x.is_contiguous() for x in got)


@pytest.mark.parametrize("lengths", [[0, 3, 0, 2, 0], [0], [0, 0], [64, 0, 65, 1], [130, 2, 64]])
def test_packed_and_zero_length_sequences(lengths):
    """C1, E5: each sequence equals a run of its own, to the bit; empty ones keep their state."""
    cu = offsets(lengths)
    args = make_qkv(1, sum(lengths), 2, 4, 32, 24)
    S = state(len(lengths), 4, 24, 32)
    o, final = gdn_ops.chunk(*args, S, cu)
    for n, (start, end) in enumerate(itertools.pairwise(cu.tolist())):
        part = [x[:, start:end] for x in args]
        o_n, final_n = gdn_ops.chunk(*part, S[n : n + 1])
        assert torch.equal(o[:, start:end], o_n)
        assert torch.equal(final[n], final_n[0])
        if start == end:
            assert torch.equal(final[n], S[n])
    assert torch.equal(gdn_ops.chunk(*args, None, cu)[1][0] * (lengths[0] == 0),
                       torch.zeros_like(final[0]))  # fmt: skip
    assert torch.equal(gdn_ops.chunk(*args, S, cu.long())[0], o)


def test_document_does_not_leak():
    """E5: documents 3 + 2; a change in the first leaves the second alone."""
    args = make_qkv(1, 5, 1, 2, 8, 8)
    cu = offsets([3, 2])
    o, _ = gdn_ops.chunk(*args, None, cu)
    changed = [x.clone() for x in args]
    for x in changed:
        x[:, 0] += 1
    assert torch.equal(gdn_ops.chunk(*changed, None, cu)[0][:, 3:], o[:, 3:])


@pytest.mark.parametrize("parts", [[65], [64, 1], [1, 64], [63, 2], [32, 33], [1] * 65])
def test_split_anywhere_equals_whole(parts):
    """E2, E3: across chunk and recurrent, T = 65 however it is cut."""
    args = make_qkv(1, 65, 1, 2, 8, 8)
    whole, final = reference.chunk(*args)
    S, pool, outs = None, make_pool(1, 2, 8, 8), []
    pool.zero_()
    for t, n in zip(itertools.accumulate([0, *parts[:-1]]), parts, strict=True):
        part = [x[:, t : t + n] for x in args]
        o, S = gdn_ops.chunk(*part, S)
        outs.append(o)
        # Every other piece goes through the recurrence instead.
        if t % 2:
            gdn_ops.recurrent(*part, pool)
        else:
            gdn_ops.chunk_prefill(*part, pool)
    assert_close("o", torch.cat(outs, 1), whole, torch.float32, 2.5)
    assert_close("state", S, final, torch.float32, 2.5)
    assert_close("pool", pool, final, torch.float32, 2.5)


@pytest.mark.parametrize("parts", [[64, 1], [1, 64], [63, 2], [32, 33], [1] * 65])
@pytest.mark.parametrize("first", range(3))
def test_split_anywhere_across_all_three_forms(parts, first):
    """E2: chunk, recurrent and recurrent_buffered take the pieces in turn, on one pool."""
    args = make_qkv(1, 65, 1, 2, 16, 24)
    whole, final = reference.chunk(*args)
    pool = torch.zeros(1, 2, 24, 16)
    window = windows.allocate(1, 1, 2, 16, 24, 64)
    outs, t = [], 0
    for turn, n in enumerate(parts, first):
        # The window holds 64 tokens: a longer piece could not wait in it.
        part = [x[:, t : t + n] for x in args]
        if turn % 3 == 2:
            outs.append(gdn_ops.recurrent_buffered(*part, pool, *window))
        else:
            gdn_ops.window_flush(pool, *window)
            outs.append((gdn_ops.chunk_prefill, gdn_ops.recurrent)[turn % 3](*part, pool))
        t += n
    gdn_ops.window_flush(pool, *window)
    assert_close("o", torch.cat(outs, 1), whole, torch.float32, SLACK)
    assert_close("pool", pool, final, torch.float32, SLACK)


def test_right_padding_changes_nothing():
    """E6: tokens past the end of a sequence are not read."""
    args = make_qkv(1, 8, 1, 2, 8, 8)
    expected = gdn_ops.chunk(*(x[:, :5] for x in args))
    bad = [x.clone() for x in args]
    for x in bad:
        x[:, 5:] = math.nan
    got = gdn_ops.chunk(*(x[:, :5] for x in bad))
    assert torch.equal(got[0], expected[0]) and torch.equal(got[1], expected[1])


def test_threads_neighbours_and_places_change_no_bit():
    """E4."""
    args = make_qkv(8, 100, 2, 6, 40, 56, dtype=torch.bfloat16)
    S = state(8, 6, 56, 40)
    results = at_thread_counts((1, 2, 3, 4, 7, 64), lambda: gdn_ops.chunk(*args, S))
    for o, final in results[1:]:
        assert torch.equal(o, results[0][0]) and torch.equal(final, results[0][1])
    for place in (0, 7):
        o, final = gdn_ops.chunk(*(x[place : place + 1] for x in args), S[place : place + 1])
        assert torch.equal(o, results[0][0][place : place + 1])
        assert torch.equal(final, results[0][1][place : place + 1])


@pytest.mark.parametrize("act", ACTIVATIONS)
@pytest.mark.parametrize("kind", EXTREMES)
def test_extreme_gates(kind, act):
    """F1, F2: only products of decays, so nothing overflows and nothing is 0 times inf."""
    q, k, v, _, beta = make_qkv(1, 130, 1, 2, 16, 16, dtype=act)
    o, final = check((q, k, v, extreme(kind), beta), state(1, 2, 16, 16), act=act)
    assert torch.isfinite(o).all() and torch.isfinite(final).all()


@pytest.mark.parametrize("act", ACTIVATIONS)
def test_minus_inf_clears_even_an_infinite_state(act):
    q, k, v, _, beta = make_qkv(1, 130, 1, 2, 16, 16, dtype=act)
    g = extreme("all -inf")
    S = torch.full((1, 2, 16, 16), math.inf)
    o, final = gdn_ops.chunk(q, k, v, g, beta, S)
    expected = gdn_ops.chunk(q, k, v, g, beta)
    assert torch.equal(o, expected[0]) and torch.equal(final, expected[1])


def test_decay_comes_before_the_error():
    """F2: S = 2, k = v = q = 1, g = ln 0.5, beta = 1 leaves 1."""
    one = torch.ones(1, 1, 1, 1)
    g = torch.full((1, 1, 1), math.log(0.5))
    o, final = gdn_ops.chunk(one, one, one, g, torch.ones(1, 1, 1), 2 * torch.ones(1, 1, 1, 1))
    assert final.item() == 1.0 and o.item() == 1.0


def test_negative_eigenvalue():
    one = torch.ones(1, 3, 1, 1)
    gates = torch.zeros(1, 3, 1)
    o, _ = gdn_ops.chunk(one, one, 0 * one, gates, gates + 2, torch.ones(1, 1, 1, 1))
    assert o.flatten().tolist() == [-1.0, 1.0, -1.0]


def test_stale_scratch_is_never_read():
    """B6: a call of NaN first, then the same answer as before."""
    args = make_qkv(1, 65, 1, 3, 72, 40)
    expected = gdn_ops.chunk(*args)
    gdn_ops.chunk(*(torch.full_like(x, math.nan) for x in make_qkv(2, 128, 1, 3, 72, 40)),
                  chunk_size=128)  # fmt: skip
    got = gdn_ops.chunk(*args)
    assert torch.equal(got[0], expected[0]) and torch.equal(got[1], expected[1])


# --- fast: products of bfloat16 inputs with operands rounded once


ROUNDS = torch.ops.gdn.cpu_isa() in ("amx", "avx512bf16")
CPU = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""


def check_rounded(args, initial=None, **kwargs):
    """By the norms of what is summed, element by element, and as a whole in the 2-norm."""
    o, final = gdn_ops.chunk(*args, initial, **kwargs)
    expected = reference.chunk(*args, initial, **kwargs)
    kwargs.pop("chunk_size", None)
    of_o, of_rows = reference.chunk_magnitudes(*args, initial, **kwargs)
    K = args[0].shape[3]
    assert rounded_error(o, expected[0], of_o, K) <= 1
    if kwargs.get("cu_seqlens") is None:
        assert rounded_error(final, expected[1], of_rows[:, -1, ..., None], K) <= 1
    for got, want in zip((o, final), expected, strict=True):
        assert (got.double() - want).norm() <= 2**-8 * want.norm()
    return o, final


@pytest.mark.parametrize(
    "K, V", [(1, 16), (8, 8), (15, 33), (16, 16), (31, 64), (40, 72), (64, 31), (80, 80), (100, 81),
             (128, 128), (130, 1), (256, 64), (512, 40)]
)  # fmt: skip
def test_fast_head_dims(fast, K, V):
    for l2norm in (False, True):
        args = make_qkv(2, 70, 1, 2, K, V, dtype=torch.bfloat16)
        S = state(2, 2, V, K)
        o, _ = check_rounded(args, S, qk_l2norm=l2norm)
        check_rounded(args, qk_l2norm=l2norm)
        gdn_ops.set_precision("exact")
        assert torch.equal(gdn_ops.chunk(*args, S, None, None, l2norm)[0], o) <= (not ROUNDS)
        gdn_ops.set_precision("fast")


@pytest.mark.parametrize("chunk_size", [16, 17, 33, 50, 64, 96, 128])
def test_fast_lengths(fast, chunk_size):
    for T in (1, 2, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65, 97, 128, 130, 200):
        args = make_qkv(1, T, 1, 3, 40, 72, dtype=torch.bfloat16, seed=T)
        check_rounded(args, state(1, 3, 72, 40), chunk_size=chunk_size, qk_l2norm=T % 2 == 0)


@pytest.mark.parametrize("kind", EXTREMES)
def test_fast_extreme_gates(fast, kind):
    q, k, v, _, beta = make_qkv(1, 130, 1, 2, 64, 48, dtype=torch.bfloat16)
    args = (q, k, v, extreme(kind), beta)
    o, final = check_rounded(args, state(1, 2, 48, 64))
    assert torch.isfinite(o).all() and torch.isfinite(final).all()
    if kind == "all -inf":
        infinite = torch.full((1, 2, 48, 64), math.inf)
        again = gdn_ops.chunk(*args, infinite)
        assert torch.equal(again[0], o) and torch.equal(again[1], final)


def test_fast_keys_that_are_not_unit_length(fast):
    q, k, v, g, beta = make_qkv(1, 100, 1, 2, 64, 32, dtype=torch.bfloat16)
    check_rounded((q, (2.5 * k).bfloat16(), v, g, 0.3 * beta), state(1, 2, 32, 64))


def test_fast_long_run_that_forgets_nothing(fast):
    """Each chunk adds its roundings to a state that keeps them."""
    q, k, v, g, beta = make_qkv(1, 1000, 1, 2, 64, 64, dtype=torch.bfloat16)
    check_rounded((q, k, v, 0 * g, beta), state(1, 2, 64, 64))


def test_fast_a_later_token_changes_no_earlier_output(fast):
    for value in (math.nan, math.inf):
        for at in (1, 5, 8, 16, 31, 32, 50, 70, 99):
            args = make_qkv(1, 130, 1, 2, 40, 72, dtype=torch.bfloat16)
            expected, _ = gdn_ops.chunk(*args)
            for x in args:
                x[:, at] = value
            assert torch.equal(gdn_ops.chunk(*args)[0][:, :at], expected[:, :at])


def test_fast_strided_views_equal_contiguous(fast):
    q, k, v, g, beta = make_qkv(2, 70, 2, 4, 24, 20, dtype=torch.bfloat16)
    qt, kt, vt = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v))
    odd = torch.stack([v, torch.full_like(v, 9.0)], -1)[..., 0]
    keys = torch.stack([k, torch.full_like(k, 9.0)], -1)[..., 0]
    S = state(2, 4, 20, 24)
    expected = gdn_ops.chunk(q, k, v, g, beta, S)
    for x in ((qt, kt, vt, g, beta, S), (q, keys, odd, g, beta, S)):
        assert all(torch.equal(a, b) for a, b in zip(gdn_ops.chunk(*x), expected, strict=True))


@pytest.mark.parametrize("parts", [[130], [129, 1], [1, 129], [64, 66], [65, 65], [10] * 13])
def test_fast_split_anywhere(fast, parts):
    """Pieces round at other places; each is as far from the oracle as the whole may be."""
    args = make_qkv(1, 130, 1, 2, 64, 64, dtype=torch.bfloat16)
    of_o, of_rows = reference.chunk_magnitudes(*args)
    expected, final = reference.chunk(*args)
    S, outs, pool = None, [], torch.zeros(1, 2, 64, 64)
    for t, n in zip(itertools.accumulate([0, *parts[:-1]]), parts, strict=True):
        part = [x[:, t : t + n] for x in args]
        o, S = gdn_ops.chunk(*part, S)
        outs.append(o)
        assert torch.equal(gdn_ops.chunk_prefill(*part, pool), o) and torch.equal(pool, S)
    assert rounded_error(torch.cat(outs, 1), expected, of_o, 64) <= 1
    assert rounded_error(S, final, of_rows[:, -1, ..., None], 64) <= 1


def test_fast_threads_neighbours_and_places_change_no_bit(fast):
    args = make_qkv(8, 100, 2, 6, 40, 56, dtype=torch.bfloat16)
    S = state(8, 6, 56, 40)
    results = at_thread_counts((1, 2, 3, 4, 7, 64), lambda: gdn_ops.chunk(*args, S))
    for o, final in results[1:]:
        assert torch.equal(o, results[0][0]) and torch.equal(final, results[0][1])
    lengths = [0, 3, 64, 1, 32]
    packed = [x[:1] for x in args]
    o, final = gdn_ops.chunk(*packed, S[:5], offsets(lengths))
    for n, (start, end) in enumerate(itertools.pairwise(offsets(lengths).tolist())):
        o_n, final_n = gdn_ops.chunk(*(x[:, start:end] for x in packed), S[n : n + 1])
        assert torch.equal(o[:, start:end], o_n) and torch.equal(final[n], final_n[0])


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("dtype", ACTIVATIONS)
def test_fast_prefill_rows(fast, dtype, transposed):
    """Rows of a pool, edges, fresh and padding ones, as `chunk` computes them; others untouched."""
    lengths = [70, 64, 0, 3, 20]
    cu = offsets(lengths)
    args = make_qkv(1, sum(lengths), 2, 4, 40, 24, dtype=torch.bfloat16)
    pool = make_pool(12, 4, 24, 40, dtype=dtype, transposed=transposed)
    pool[4] = math.nan  # read by nobody
    pool[8] = math.nan
    read = torch.tensor([1, 1, 3, 4, -1])
    write = torch.tensor([2, 6, 7, 8, 9])
    has = torch.tensor([True, True, True, False, True])
    edges = torch.tensor([[10, 0], [11, -1], [-1, -1], [0, -1], [0, 0]])
    before = clone_pool(pool)
    o = gdn_ops.chunk_prefill(*args, pool, read, write, has, cu, edges)
    start = torch.zeros(5, 4, 24, 40)
    start[:3] = before[read[:3]].float()
    expected, final = gdn_ops.chunk(*args, start, cu)
    _, edge = gdn_ops.chunk(*(x[:, :64] for x in args), start[:1])
    assert torch.equal(o[:, :137], expected[:, :137])
    assert torch.equal(o[:, 137:], torch.zeros_like(o[:, 137:]))
    assert torch.equal(pool[[2, 6, 7, 8]], final[:4].to(dtype))
    assert torch.equal(pool[10], edge[0].to(dtype)) and torch.equal(pool[11], pool[6])
    others = [0, 1, 3, 5, 9]
    assert torch.equal(pool[others], before[others])


@pytest.mark.parametrize("R", [4, 16, 64])
def test_fast_lowrank(fast, R):
    args = make_qkv(2, 130, 1, 2, 64, 40, dtype=torch.bfloat16)
    win = windows.allocate(2, 1, 2, 64, 40, R)
    want = reference.chunk_lowrank(*args, *win)
    of_o, of_rows = reference.chunk_magnitudes(*args)
    o = gdn_ops.chunk_lowrank(*args, *win)
    assert rounded_error(o, want[0], of_o, 64) <= 1
    assert rounded_error(win.u, want[2], of_rows[:, -R:].transpose(1, 2), 64) <= 1
    part = [x[:, :R] for x in args]
    win = windows.allocate(2, 1, 2, 64, 40, R)
    assert torch.equal(gdn_ops.chunk_lowrank(*part, *win), gdn_ops.chunk(*part)[0])


@pytest.mark.parametrize("act", [torch.float32, torch.float16])
def test_fast_rounds_bfloat16_only(fast, act):
    """A bfloat16 operand would lose what float16 and float32 inputs carry."""
    args = make_qkv(2, 100, 2, 4, 64, 40, dtype=act)
    got = gdn_ops.chunk(*args)
    gdn_ops.set_precision("exact")
    assert all(torch.equal(a, b) for a, b in zip(got, gdn_ops.chunk(*args), strict=True))


def test_auto_is_fast_where_it_pays_and_gradients_stay_exact(fast):
    args = make_qkv(2, 100, 2, 4, 64, 40, dtype=torch.bfloat16)
    results, gradients = {}, {}
    for mode in ("exact", "fast", "auto"):
        gdn_ops.set_precision(mode)
        results[mode] = gdn_ops.chunk(*args)[0]
        gradients[mode] = chunk_gradients(gdn_ops, args, None, None, results["exact"], None)
    pays = torch.ops.gdn.cpu_isa() == "amx" or "AuthenticAMD" in CPU
    assert torch.equal(results["auto"], results["fast" if pays else "exact"])
    assert torch.equal(results["exact"], results["fast"]) == (not ROUNDS)
    for mode in ("fast", "auto"):
        for a, b in zip(gradients[mode], gradients["exact"], strict=True):
            assert torch.equal(a, b)


# --- chunk_prefill


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("dtype", ACTIVATIONS)
def test_prefill_rows(dtype, transposed):
    """Read and write rows, a shared prefix, fresh and padding ones; no other row is touched."""
    lengths = [70, 64, 0, 3, 20, 5]
    cu = offsets(lengths)
    args = make_qkv(1, sum(lengths), 2, 4, 40, 24)
    pool = make_pool(12, 4, 24, 40, dtype=dtype, transposed=transposed)
    pool[4] = math.nan  # read by nobody
    read = torch.tensor([1, 1, 3, 4, -1, 5])
    write = torch.tensor([2, 6, 7, 8, 9, -1])
    has = torch.tensor([True, True, True, False, True, True])
    edges = torch.tensor([[10, 0], [11, -1], [-1, -1], [0, -1], [0, 0], [-1, -1]])
    before = clone_pool(pool)
    kwargs = {"has_initial_state": has, "cu_seqlens": cu, "edge_rows": edges, "chunk_size": 64}
    expected_o, expected = reference.chunk_prefill(*args, before, read, write, **kwargs)
    o = gdn_ops.chunk_prefill(*args, pool, read, write, **kwargs)
    assert_close("o", o, expected_o, torch.float32, SLACK)
    written = [2, 6, 7, 8, 10, 11]
    assert_close(
        "pool", pool[written], expected[written], dtype, SLACK if dtype == torch.float32 else 1.1
    )
    others = [0, 1, 3, 5, 9]
    assert torch.equal(pool[others], before[others])
    assert torch.equal(o[:, 137:157], torch.zeros_like(o[:, 137:157]))
    assert torch.equal(pool[7], before[3])


@pytest.mark.parametrize("shift", [0, 1])
@pytest.mark.parametrize("K, V", [(128, 128), (64, 96)])
@pytest.mark.parametrize("dtype", ACTIVATIONS)
@pytest.mark.parametrize("act", ACTIVATIONS)
def test_large_calls_equal_their_sequences(act, dtype, K, V, shift):
    """More outputs and states than caches hold, which some levels store past them; one element
    further, where no row begins a line."""
    N, T, HV = 96, 70, 4
    args = make_qkv(1, N * T, 2, HV, K, V, dtype=act)
    storage = make_pool(N + 1, HV, V, K, dtype=dtype).flatten()
    pool = storage[shift : shift + N * HV * V * K].view(N, HV, V, K)
    before, rest = pool.clone(), storage[shift + pool.numel() :].clone()
    rows = torch.arange(N)
    o = gdn_ops.chunk_prefill(*args, pool, rows, rows, cu_seqlens=offsets([T] * N))
    assert o.nbytes > 4 << 20 and pool.nbytes > 4 << 20
    assert torch.equal(storage[shift + pool.numel() :], rest)
    for n in range(N):
        alone = before[n : n + 1].clone()
        part = [x[:, n * T : (n + 1) * T] for x in args]
        o_n = gdn_ops.chunk_prefill(*part, alone, rows[:1], rows[:1])
        assert torch.equal(o[:, n * T : (n + 1) * T], o_n) and torch.equal(pool[n], alone[0])
    expected_o, expected = reference.chunk(*part, before[-1:].float())
    assert_close("o", o_n, expected_o, act, SLACK)
    assert_close("pool", alone, expected, dtype, SLACK if dtype == torch.float32 else 1.1)


def test_snapshots_count_from_each_sequence():
    """E1 (with the smallest chunk): snapshots are after token C * (i + 1) of that sequence."""
    lengths = [18, 33]
    args = make_qkv(1, 51, 1, 2, 8, 8)
    pool = torch.zeros(8, 2, 8, 8)
    edges = torch.tensor([[2, -1], [3, 4]], dtype=torch.int32)
    gdn_ops.chunk_prefill(*args, pool, cu_seqlens=offsets(lengths), edge_rows=edges, chunk_size=16)
    for row, start, end in ((2, 0, 16), (3, 18, 34), (4, 18, 50), (0, 0, 18), (1, 18, 51)):
        _, final = gdn_ops.chunk(*(x[:, start:end] for x in args), chunk_size=16)
        assert torch.equal(pool[row], final[0])


def test_prefill_then_decode_equals_one_run():
    args = make_qkv(2, 70, 2, 6, 32, 32)
    pool = torch.zeros(2, 6, 32, 32)
    outs = [gdn_ops.chunk_prefill(*(x[:, :66] for x in args), pool)]
    for t in range(66, 70):
        outs.append(gdn_ops.recurrent(*(x[:, t : t + 1] for x in args), pool))
    expected, final = reference.chunk(*args)
    assert_close("o", torch.cat(outs, 1), expected, torch.float32, SLACK)
    assert_close("pool", pool, final, torch.float32, SLACK)


def test_raises_before_writing():
    args = make_qkv(1, 8, 2, 4, 16, 8)
    pool = make_pool(3, 4, 8, 16)
    before = pool.clone()
    bad = [
        ({"chunk_size": 8}, "chunk_size: expected 16 to 128, got 8"),
        ({"chunk_size": 129}, "got 129"),
        ({"read_indices": torch.tensor([3])}, "below P = 3, got 3"),
        ({"write_indices": torch.tensor([9])}, "write_indices.*below P = 3, got 9"),
        ({"write_indices": torch.tensor([0, 1])}, "write_indices.*N = 1"),
        ({"edge_rows": torch.tensor([[0, 7]])}, "edge_rows.*below P = 3, got 7"),
        ({"edge_rows": torch.tensor([0])}, "edge_rows.*\\[N, E\\]"),
        ({"read_indices": torch.tensor([[0]])}, "read_indices"),
        ({"cu_seqlens": torch.tensor([0, 9])}, "end at T = 8, got 9"),
        ({"cu_seqlens": torch.tensor([0, 5, 3, 8])}, "ascending"),
    ]
    for kwargs, message in bad:
        with pytest.raises(RuntimeError, match=message):
            gdn_ops.chunk_prefill(*args, pool, **kwargs)
        assert torch.equal(pool, before)
    with pytest.raises(RuntimeError, match="requires grad"):
        gdn_ops.chunk_prefill(args[0].clone().requires_grad_(), *args[1:], pool)
    with pytest.raises(RuntimeError, match="initial_state: expected float32"):
        gdn_ops.chunk(*args, pool[:1].bfloat16())
    with pytest.raises(RuntimeError, match="N = 1"):
        gdn_ops.chunk(*args, pool)
    with pytest.raises(RuntimeError, match="device"):
        gdn_ops.chunk_prefill(*args, pool.to("meta"))


def test_empty():
    for B, T in ((0, 3), (2, 0), (0, 0)):
        o, final = gdn_ops.chunk(*make_qkv(B, T, 1, 2, 8, 8))
        assert o.shape == (B, T, 2, 8) and torch.equal(final, torch.zeros(B, 2, 8, 8))


# --- gradients


def leaves(args, *extra):
    return [x.clone().requires_grad_() if x is not None else None for x in (*args, *extra)]


@pytest.mark.parametrize("l2norm", [False, True])
@pytest.mark.parametrize("cu", [None, [0, 5, 5, 23, 40]])
def test_gradcheck(l2norm, cu):
    cu_seqlens = None if cu is None else torch.tensor(cu)
    B, T = (2, 20) if cu is None else (1, 40)
    N = B if cu is None else len(cu) - 1
    args = [x.double() for x in make_qkv(B, T, 1, 2, 3, 4)]
    inputs = leaves(args, state(N, 2, 4, 3).double())

    def run(*x):
        return gdn_ops.chunk(*x, cu_seqlens, 0.7, l2norm, 16)

    assert torch.autograd.gradcheck(run, inputs, nondet_tol=0.0)


@pytest.mark.parametrize("kind", [None, *EXTREMES])
@pytest.mark.parametrize("dtype", ACTIVATIONS)
def test_gradients_against_the_sequential_oracle(dtype, kind):
    q, k, v, g, beta = make_qkv(1, 130, 2, 4, 16, 24, dtype=dtype)
    if kind is not None:
        g = extreme(kind, HV=4)
    S = state(1, 4, 24, 16)
    ours, theirs = leaves((q, k, v, g, beta), S), leaves((q, k, v, g, beta), S)
    gen = torch.Generator().manual_seed(3)
    # Exact in dtype: the gradient that reaches a 16-bit o is rounded to its dtype by autograd.
    wo = torch.randn(v.shape, generator=gen).to(dtype)
    ws = torch.randn(S.shape, generator=gen)
    o, final = gdn_ops.chunk(*ours, qk_l2norm=True)
    ((o.double() * wo).sum() + (final.double() * ws).sum()).backward()
    o, final = reference.chunk(*theirs, qk_l2norm=True)
    ((o * wo).sum() + (final * ws).sum()).backward()
    for name, x, y in zip(["q", "k", "v", "g", "beta", "S"], ours, theirs, strict=True):
        assert x.grad.dtype == x.dtype
        assert torch.isfinite(x.grad).all(), name
        # At g = -inf the derivative of exp is 0 times an infinite slope for the oracle's autograd.
        expected = torch.nan_to_num(y.grad.double())
        scale = expected.abs().max().clamp(min=1.0)
        assert_close("d" + name, x.grad / scale, expected / scale, x.dtype, 20.0)


def chunk_gradients(module, args, S, cu, wo, ws, **kwargs):
    inputs = [x.detach().requires_grad_() for x in (*args, *([] if S is None else [S]))]
    o, final = module.chunk(*inputs[:5], inputs[5] if S is not None else None, cu, **kwargs)
    outputs, grads = zip(*((x, w) for x, w in ((o, wo), (final, ws)) if w is not None), strict=True)
    grads = [w.to(x.dtype) for x, w in zip(outputs, grads, strict=True)]
    return torch.autograd.grad(outputs, inputs, grads, allow_unused=True)


GRADIENTS = ["q", "k", "v", "g", "beta", "initial_state"]
# Beside the largest element of each gradient: f32 sums, then one rounding to the dtype.
GRADIENT_LIMIT = {torch.float32: 3e-6, torch.bfloat16: 2**-8, torch.float16: 2**-11}


@pytest.mark.parametrize("dtype", ACTIVATIONS)
@pytest.mark.parametrize(
    "B, lengths, H, ratio, K, V, C",
    [
        (2, None, 1, 3, 128, 64, 64),
        (1, None, 2, 1, 33, 65, 50),
        (1, [0, 3, 0, 67, 17, 43, 0], 1, 2, 40, 8, 17),
        (1, [130], 2, 2, 1, 1, 128),
    ],
)
@pytest.mark.parametrize("with_states", [False, True])
def test_gradients_of_any_shape(B, lengths, H, ratio, K, V, C, with_states, dtype):
    """Odd sizes, sequences and chunks, each gradient to rounding; no bit depends on threads."""
    q, k, v, g, beta = make_qkv(B, 130, H, H * ratio, K, V, dtype=dtype)
    args = (3 * q, k / 2, v, g, beta) if K > 1 else (q, k, v, g, beta)
    N, cu = (B, None) if lengths is None else (len(lengths), offsets(lengths))
    gen = torch.Generator().manual_seed(3)
    wo = torch.randn(v.shape, generator=gen).to(dtype)
    S = state(N, H * ratio, V, K) if with_states else None
    ws = torch.randn(N, H * ratio, V, K, generator=gen) if with_states else None
    # At K = 1 the gradient of a unit length is rounding and nothing else.
    kwargs = {"qk_l2norm": K > 1, "scale": 0.4, "chunk_size": C}
    expected = chunk_gradients(reference, args, S, cu, wo, ws, qk_l2norm=K > 1, scale=0.4)
    results = at_thread_counts(
        (1, 2, 3, 64), lambda: chunk_gradients(gdn_ops, args, S, cu, wo, ws, **kwargs)
    )
    for name, x, y in zip(GRADIENTS, results[0], expected, strict=False):
        error = (x.double() - y).abs().max() / y.abs().max()
        assert x.dtype == y.dtype and error <= GRADIENT_LIMIT[x.dtype], (name, error)
    for other in results[1:]:
        assert all(torch.equal(x, y) for x, y in zip(other, results[0], strict=True))


def test_gradients_of_strided_and_expanded_ones():
    """What reaches the outputs may be a view, or one number at every place."""
    args, S = make_qkv(1, 70, 1, 2, 24, 40), state(1, 2, 40, 24)
    wo, ws = torch.randn(args[2].shape), torch.randn(S.shape)
    one = torch.ones(())
    for o, f in (
        (wo.transpose(1, 3).contiguous().transpose(1, 3), ws.mT.contiguous().mT),
        (one.expand_as(wo), one.expand_as(ws)),
    ):
        got = chunk_gradients(gdn_ops, args, S, None, o, f)
        expected = chunk_gradients(gdn_ops, args, S, None, o.contiguous(), f.contiguous())
        assert all(torch.equal(x, y) for x, y in zip(got, expected, strict=True))


def test_gradients_never_read_stale_scratch():
    args, wo = make_qkv(1, 65, 1, 3, 72, 40), torch.randn(1, 65, 3, 40)
    expected = chunk_gradients(gdn_ops, args, None, None, wo, None)
    bad = make_qkv(1, 128, 1, 3, 72, 40)
    chunk_gradients(gdn_ops, [x * math.nan for x in bad], None, None, bad[2], None, chunk_size=128)
    got = chunk_gradients(gdn_ops, args, None, None, wo, None)
    assert all(torch.equal(x, y) for x, y in zip(got, expected, strict=True))


def test_gradient_of_one_output_only():
    args = leaves(make_qkv(1, 20, 1, 2, 8, 8))
    o, _ = gdn_ops.chunk(*args)
    o.sum().backward()
    by_o = [x.grad.clone() for x in args]
    for x in args:
        x.grad = None
    _, final = gdn_ops.chunk(*args)
    final.sum().backward()
    assert torch.equal(args[0].grad, torch.zeros_like(args[0]))
    assert by_o[0].abs().max() > 0 and args[2].grad.abs().max() > 0


def test_checkpoint_gives_the_same_gradients():
    from torch.utils.checkpoint import checkpoint

    args = leaves(make_qkv(1, 70, 1, 2, 8, 8))
    gdn_ops.chunk(*args)[0].square().sum().backward()
    expected = [x.grad.clone() for x in args]
    for x in args:
        x.grad = None
    checkpoint(
        lambda *x: gdn_ops.chunk(*x)[0], *args, use_reentrant=False
    ).square().sum().backward()
    for x, y in zip(args, expected, strict=True):
        assert torch.equal(x.grad, y)


@pytest.mark.parametrize(
    "backend, checkpointed", [("aot_eager", False), ("aot_eager", True), ("inductor", False)]
)
def test_compile_forward_and_backward(backend, checkpointed):
    """Elementwise code before and after, so that there is something to fuse around the op."""
    from torch.utils.checkpoint import checkpoint

    def layer(q, k, v, g, beta):
        o, final = gdn_ops.chunk(q * 2, k, v, g - 0.1, beta.sigmoid(), None, None, None, True)
        return o.square().sum() + final.sum()

    def loss(*x):
        return checkpoint(layer, *x, use_reentrant=False) if checkpointed else layer(*x)

    eager, compiled = (leaves(make_qkv(1, 40, 1, 2, 8, 8)) for _ in range(2))
    layer(*eager).backward()
    torch.compile(loss, fullgraph=True, backend=backend)(*compiled).backward()
    for x, y in zip(eager, compiled, strict=True):
        assert_close("grad", y.grad, x.grad, slack=2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_gradients_of_another_shape_are_refused(dtype):
    """Of float64 a gradient for three states where there is one was taken for the first's."""
    args = [x.to(dtype) for x in make_qkv(1, 20, 1, 2, 8, 8)]
    tail = (*args, None, None, None, True, 16)
    grad_o, grad_final = torch.randn(1, 20, 2, 8, dtype=dtype), torch.randn(3, 2, 8, 8, dtype=dtype)
    backward = torch.ops.gdn.chunk_backward.default
    with pytest.raises(RuntimeError, match="chunk_backward: grad_final_state: expected shape"):
        backward(grad_o, grad_final, *tail)
    with pytest.raises(RuntimeError, match="chunk_backward: grad_o: expected the shape of v"):
        backward(grad_o[:, 1:], None, *tail)
    with torch.inference_mode(), pytest.raises(RuntimeError, match="grad_o: expected a tensor"):
        backward(None, None, *tail)
    tail = (*tail[:4], args[4].half() if dtype == torch.float64 else args[4].double(), *tail[5:])
    with pytest.raises(RuntimeError, match="^chunk_backward: beta: expected"):
        backward(grad_o, None, *tail)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_gradients_of_offsets_that_end_early_are_refused(dtype):
    args = [x.to(dtype) for x in make_qkv(1, 20, 1, 2, 8, 8)]
    tail = (*args, None, torch.tensor([0, 7]), None, True, 16)
    message = "^chunk_backward: cu_seqlens: expected to end at T = 20"
    with pytest.raises(RuntimeError, match=message):
        torch.ops.gdn.chunk_backward(torch.randn(1, 20, 2, 8, dtype=dtype), None, *tail)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_gradient_of_a_gradient_is_refused(dtype):
    """It came out as zero, with a warning of torch's: a gradient penalty lost the layer's share."""
    args = leaves([x.to(dtype) for x in make_qkv(1, 20, 1, 2, 8, 8)])
    o, _ = gdn_ops.chunk(*args)
    grads = torch.autograd.grad(o.square().sum(), args, create_graph=True)
    o2, _ = gdn_ops.chunk(*args)
    assert all(map(torch.equal, grads, torch.autograd.grad(o2.square().sum(), args)))
    with pytest.raises(RuntimeError, match="chunk: has no second derivative"):
        sum(x.square().sum() for x in grads).backward()


# --- low rank


def make_window(P, H, HV, R, K, V, k_dtype=torch.float32, u_dtype=torch.float32):
    return (
        torch.zeros(P, H, R, K, dtype=k_dtype),
        torch.zeros(P, HV, R, V, dtype=u_dtype),
        torch.zeros(P, HV, R),
        torch.zeros(P, dtype=torch.int32),
    )


def check_lowrank(args, window, act_slack=SLACK, **kwargs):
    expected = reference.chunk_lowrank(*args, *window, **kwargs)
    o = gdn_ops.chunk_lowrank(*args, *window, **kwargs)
    assert_close("o", o, expected[0], args[0].dtype, act_slack)
    assert torch.equal(window[3], expected[4])
    assert_close("win_k", window[0], expected[1], None, act_slack)
    assert_close("win_u", window[1], expected[2], None, act_slack)
    assert_close("exp(win_g)", window[2].exp(), expected[3].exp())
    return o


@pytest.mark.parametrize("R", [1, 8, 16, 33, 64])
@pytest.mark.parametrize("chunk_size", [16, 64])
def test_lowrank_calls_in_a_row(R, chunk_size):
    """Several calls continue one window, which may start as a ring of any head."""
    window = make_window(4, 2, 4, R, 24, 40)
    for x in window[:3]:
        x.normal_(generator=torch.Generator().manual_seed(5))
    window[0].div_(window[0].norm(dim=-1, keepdim=True))
    window[2].copy_(-window[2].abs())
    window[3].copy_(torch.tensor([0, R + 65536 * (R // 2), R // 2, R]))
    idx = torch.tensor([1, 2, -1, 3, 0])
    lengths = [70, 5, 4, 0, 33]
    has = torch.tensor([True, True, True, True, False])
    for seed in range(2):
        args = make_qkv(1, sum(lengths), 2, 4, 24, 40, seed=seed)
        o = check_lowrank(args, window, state_indices=idx, has_initial_state=has,
                          cu_seqlens=offsets(lengths), chunk_size=chunk_size)  # fmt: skip
        assert torch.equal(o[:, 75:79], torch.zeros_like(o[:, 75:79]))


@pytest.mark.parametrize("act", ACTIVATIONS)
def test_lowrank_window_dtypes(act):
    args = make_qkv(2, 80, 1, 3, 32, 32, dtype=act)
    window = make_window(2, 1, 3, 16, 32, 32, k_dtype=act, u_dtype=act)
    check_lowrank(args, window, 1.0 if act != torch.float32 else SLACK, chunk_size=64)


def test_lowrank_with_a_window_as_long_as_the_sequence_is_full_rank():
    args = make_qkv(1, 60, 2, 4, 16, 16)
    o = gdn_ops.chunk_lowrank(*args, *make_window(1, 2, 4, 64, 16, 16), chunk_size=16)
    assert_close("o", o, reference.chunk(*args)[0], torch.float32, SLACK)


def test_lowrank_error_on_the_vendors_probe():
    """API.md section 3: T = 128, g uniform in (-3, 0), unit k, R = 16: within 1e-6."""
    q, k, v, g, beta = make_qkv(1, 128, 2, 4, 128, 128)
    full, _ = reference.chunk(q, k, v, 3 * g, beta)
    o = gdn_ops.chunk_lowrank(q, k, v, 3 * g, beta, *make_window(1, 2, 4, 16, 128, 128))
    assert (o - full).abs().max() <= 1e-6
    errors = []
    full, _ = reference.chunk(q, k, v, g / 2, beta)
    for R in (8, 16, 32):
        o = gdn_ops.chunk_lowrank(q, k, v, g / 2, beta, *make_window(1, 2, 4, R, 128, 128))
        errors.append((o - full).abs().max().item())
    assert errors[0] > errors[1] > errors[2] > 1e-6


@pytest.mark.parametrize("act", ACTIVATIONS)
@pytest.mark.parametrize("R, prompt", [(16, 70), (16, 9), (33, 64), (64, 40)])
def test_lowrank_prefill_hands_over_to_decode(act, R, prompt):
    """recurrent_lowrank continues the window that chunk_lowrank leaves, as a ring once full."""
    args = make_qkv(2, prompt + 20, 2, 4, 24, 40, dtype=act)
    ours, theirs = (make_window(2, 2, 4, R, 24, 40, act, act) for _ in range(2))
    head = [x[:, :prompt] for x in args]
    check_lowrank(head, ours, chunk_size=64)
    theirs = reference.chunk_lowrank(*head, *theirs, chunk_size=64)[1:]
    for t in range(prompt, prompt + 20):
        token = [x[:, t : t + 1] for x in args]
        expected, theirs = reference.recurrent_lowrank(*token, *theirs)
        o = gdn_ops.recurrent_lowrank(*token, *ours)
        # A key or update that rounds the other way stays a unit away from the oracle's.
        assert_close("o", o, expected, act, SLACK)
    assert torch.equal(ours[3], theirs[3])
    if prompt + 20 <= R:
        full, _ = reference.chunk(*args)
        assert_close("full rank", o, full[:, -1:], act, SLACK)


@pytest.mark.parametrize("act", ACTIVATIONS)
@pytest.mark.parametrize("kind", EXTREMES)
def test_lowrank_extreme_gates(kind, act):
    q, k, v, _, beta = make_qkv(1, 130, 1, 2, 16, 16, dtype=act)
    o = check_lowrank((q, k, v, extreme(kind), beta), make_window(1, 1, 2, 8, 16, 16))
    assert torch.isfinite(o).all()


def test_lowrank_256_sequences_of_mixed_lengths():
    gen = torch.Generator().manual_seed(11)
    lengths = torch.randint(0, 301, (256,), generator=gen).tolist()
    cu = offsets(lengths)
    args = make_qkv(1, sum(lengths), 1, 2, 16, 16)
    window = make_window(256, 1, 2, 16, 16, 16)
    o = gdn_ops.chunk_lowrank(*args, *window, cu_seqlens=cu)
    assert window[3].tolist() == [min(n, 16) for n in lengths]
    for n in (0, 100, 255):
        s, e = cu[n].item(), cu[n + 1].item()
        part = [x[:, s:e] for x in args]
        expected = reference.chunk_lowrank(*part, *make_window(1, 1, 2, 16, 16, 16))
        assert_close("o", o[:, s:e], expected[0], torch.float32, SLACK)
        alone = gdn_ops.chunk_lowrank(*(x[:, s:e] for x in args), *make_window(1, 1, 2, 16, 16, 16))
        assert torch.equal(o[:, s:e], alone)


# --- dispatch


def test_opcheck():
    args = make_qkv(1, 20, 1, 2, 8, 8)
    S, cu = state(2, 2, 8, 8), offsets([7, 13])
    ops = torch.ops.gdn
    for kwargs in ({}, {"initial_state": S, "cu_seqlens": cu}):
        opcheck(ops.chunk.default, args, kwargs)
        opcheck(ops.chunk.default, tuple(leaves(args)), kwargs)
    grads = (torch.randn(1, 20, 2, 8), torch.randn(2, 2, 8, 8))
    opcheck(ops.chunk_backward.default, (*grads, *args, S, cu, None, True, 16))
    opcheck(ops.chunk_backward.default, (grads[0], None, *args, None, None, None, False, 16))
    idx = torch.tensor([0, 2])
    opcheck(ops.chunk_prefill.default, (*args, make_pool(3, 2, 8, 8)))
    opcheck(ops.chunk_prefill.default, (*args, make_pool(5, 2, 8, 8), idx, idx + 1),
            {"cu_seqlens": cu, "edge_rows": torch.tensor([[4], [-1]])})  # fmt: skip
    opcheck(ops.chunk_lowrank.default, (*args, *make_window(3, 1, 2, 8, 8, 8)))
    opcheck(ops.chunk_lowrank.default, (*args, *make_window(3, 1, 2, 8, 8, 8)),
            {"state_indices": idx, "cu_seqlens": cu})  # fmt: skip


def test_fake_strides_and_aliasing():
    """H1, H3: outputs are contiguous and fresh, real and fake."""
    q, k, v, g, beta = make_qkv(2, 4, 3, 3, 8, 8)
    views = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)]
    S = state(2, 3, 8, 8)
    real = gdn_ops.chunk(*views, g, beta, S)
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode() as mode:
        fake = gdn_ops.chunk(*(mode.from_tensor(x) for x in (*views, g, beta, S)))
    for x, y in zip(real, fake, strict=True):
        assert x.stride() == y.stride() and x.shape == y.shape and x.dtype == y.dtype
    assert len({x.data_ptr() for x in (*views, g, beta, S, *real)}) == 8


def test_scratch_does_not_grow_with_tokens():
    """Forward memory beyond inputs and outputs is the threads' scratch, whatever T is."""
    import resource

    def run(T):
        args = make_qkv(1, T, 2, 6, 128, 128)
        gdn_ops.chunk(*args)
        base = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        out = gdn_ops.chunk(*args)
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - base, out[0].numel() * 4 // 1024

    run(4096)
    grown, output = run(16384)
    assert grown <= output + 8 * 1024
