"""Chunked prefill on CUDA against the float64 oracles: both kernels, packing, pools, low rank."""

from __future__ import annotations

import math

import pytest
import torch
from common import EXTREMES, extreme, offsets
from test_cuda import DTYPES, close, gpu, inputs, ops, pool

from gdn_ops import reference

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA device")

BF16 = torch.bfloat16
F16 = torch.float16
# 16 bits: X, U and D U are rounded one after the other. float32: sums over a whole sequence.
SLACK = {torch.float32: 2.0, BF16: 1.5, F16: 1.5}


def states(N, HV, V, K, seed=7):
    return torch.randn(N, HV, V, K, generator=torch.Generator().manual_seed(seed))


def on_card(form, *args, **kwargs):
    """The oracle of long sequences in float64 on the card: thousands of small products."""
    with torch.device("cuda"):
        return form(*gpu(*args), **dict(zip(kwargs, gpu(*kwargs.values()), strict=True)))


def check(args, initial=None, cu=None, factor=1.0, **kwargs):
    """16-bit inputs may go through 16-bit products, so their state is judged as they are."""
    factor *= SLACK[args[0].dtype]
    if args[0].shape[1] > 1900:
        want_o, want_s = on_card(reference.chunk, *args, initial, cu, **kwargs)
    else:
        want_o, want_s = reference.chunk(*args, initial, cu, **kwargs)
    o, final = ops.chunk(*gpu(*args), *gpu(initial, cu), **kwargs)
    assert o.dtype == args[0].dtype and final.dtype == torch.float32
    assert o.is_contiguous() and final.is_contiguous()
    products = args[0].shape[-1] in (64, 128) and args[2].shape[-1] % 64 == 0
    state_dtype = args[0].dtype if products else torch.float32
    close("o", o, want_o, args[0].dtype, factor)
    close("final state", final, want_s, state_dtype, factor)
    return o, final


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "K, V", [(1, 1), (16, 8), (64, 64), (64, 192), (100, 130), (128, 128), (128, 100), (128, 256),
             (256, 256), (512, 512), (8, 512)]
)  # fmt: skip
def test_head_dims(K, V, dtype):
    check(inputs(2, 70, 1, 2, K, V, dtype), states(2, 2, V, K), qk_l2norm=True)


@pytest.mark.parametrize("chunk_size", [16, 50, 64, 128])
@pytest.mark.parametrize("T", [1, 5, 16, 63, 64, 65, 128, 129, 200])
@pytest.mark.parametrize("dtype", DTYPES)
def test_lengths_and_chunk_sizes(T, chunk_size, dtype):
    check(inputs(1, T, 2, 6, 64, 64, dtype), states(1, 6, 64, 64), chunk_size=chunk_size)


@pytest.mark.parametrize("ratio", [1, 2, 3, 8])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("l2norm", [False, True])
def test_ratios(ratio, dtype, l2norm):
    q, k, v, g, beta = inputs(2, 150, 2, 2 * ratio, 128, 128, dtype)
    if l2norm:
        q, k = 3 * q, 0.2 * k
    check((q, k, v, g, beta), states(2, 2 * ratio, 128, 128), qk_l2norm=l2norm, scale=0.3)
    check((q, k, v, g.to(dtype), beta.to(dtype)), qk_l2norm=l2norm)


def test_long_sequence():
    for dtype in DTYPES:
        check(inputs(1, 2000, 1, 3, 128, 128, dtype), qk_l2norm=True)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("lengths", [[0, 3, 0, 2, 0], [0], [0, 0], [64, 0, 65, 1], [130, 2, 64],
                                     [1] * 70 + [0] * 5 + [63, 65, 200]])  # fmt: skip
def test_packed_and_zero_length_sequences(lengths, dtype):
    """Each sequence equals a run of its own, to the bit; empty ones keep their state."""
    cu = offsets(lengths)
    args = inputs(1, sum(lengths), 2, 4, 64, 128, dtype)
    S = states(len(lengths), 4, 128, 64)
    o, final = check(args, S, cu, qk_l2norm=True)
    device = gpu(*args)
    for n in {0, len(lengths) // 2, len(lengths) - 1}:
        start, end = cu[n].item(), cu[n + 1].item()
        alone, final_n = ops.chunk(*[x[:, start:end] for x in device], S[n : n + 1].cuda(),
                                   qk_l2norm=True)  # fmt: skip
        assert torch.equal(o[:, start:end], alone) and torch.equal(final[n], final_n[0])
        if start == end:
            assert torch.equal(final[n].cpu(), S[n])
    assert torch.equal(ops.chunk(*device, S.cuda(), cu.long().cuda(), qk_l2norm=True)[0], o)


@pytest.mark.parametrize("dtype", DTYPES)
def test_neighbours_and_places_change_no_bit(dtype):
    args = gpu(*inputs(40, 100, 2, 6, 128, 128, dtype))
    S = states(40, 6, 128, 128).cuda()
    o, final = ops.chunk(*args, S)
    again = ops.chunk(*args, S)
    assert torch.equal(o, again[0]) and torch.equal(final, again[1])
    for n in (0, 39):
        alone = ops.chunk(*[x[n : n + 1] for x in args], S[n : n + 1])
        assert torch.equal(alone[0], o[n : n + 1]) and torch.equal(alone[1], final[n : n + 1])


@pytest.mark.parametrize("dtype", DTYPES)
def test_strided_views_equal_contiguous(dtype):
    q, k, v, g, beta = gpu(*inputs(2, 70, 2, 4, 64, 64, dtype))
    qt, kt, vt = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v))
    wide = torch.cat([q, k], -1)
    gates = torch.stack([beta, g], -1)
    S = states(2, 4, 64, 64).cuda()
    St = S.transpose(2, 3).contiguous().transpose(2, 3)
    expected = ops.chunk(q, k, v, g, beta, S)
    for got in (
        ops.chunk(qt, kt, vt, gates[..., 1], gates[..., 0], St),
        ops.chunk(wide[..., :64], wide[..., 64:], v, g, beta, S),
    ):
        assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
    odd = torch.stack([v, torch.full_like(v, 9.0)], -1)[..., 0]  # token by token
    got = ops.chunk(q, k, odd, g, beta, S)
    close("o", got[0], expected[0], dtype, 2)
    close("final state", got[1], expected[1], dtype, 2)


@pytest.mark.parametrize("kind", EXTREMES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_extreme_gates(kind, dtype):
    q, k, v, _, beta = inputs(1, 130, 1, 2, 64, 64, dtype)
    check((q, k, v, extreme(kind, 130, 2), beta), states(1, 2, 64, 64))


@pytest.mark.parametrize("dtype", [torch.float32, F16])
@pytest.mark.parametrize("values, keys", [(1e4, 1.0), (1e-3, 1.0), (1.0, 1e-2), (1.0, 30.0)])
def test_factors_in_float16_keep_their_range(dtype, values, keys):
    """Rows of V a thousand times apart, large or small ones, long or short keys; a large state."""
    q, k, v, g, beta = inputs(1, 200, 1, 2, 128, 64, dtype)
    rows = torch.logspace(-3, 0, 64)
    v = (values * rows * v).to(dtype)
    initial = values * 100 * rows[:, None] * states(1, 2, 64, 128)
    args = (q, (keys * k).to(dtype), v, g, beta)
    want_o, want_s = reference.chunk(*args, initial, qk_l2norm=True)
    o, final = ops.chunk(*gpu(*args, initial), qk_l2norm=True)
    for row in range(64):
        close(f"state, row {row}", final[:, :, row], want_s[:, :, row], dtype, 2)
    representable = want_o.abs().amax((0, 1, 2)).lt(6e4) | (dtype == torch.float32)
    close("o", o[..., representable], want_o[..., representable], dtype, 2)


@pytest.mark.parametrize("dtype", DTYPES)
def test_minus_inf_clears_even_an_infinite_state(dtype):
    q, k, v, _, beta = gpu(*inputs(1, 130, 1, 2, 64, 64, dtype))
    g = extreme("all -inf", 130, 2).cuda()
    got = ops.chunk(q, k, v, g, beta, torch.full((1, 2, 64, 64), math.inf, device="cuda"))
    expected = ops.chunk(q, k, v, g, beta)
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


@pytest.mark.parametrize("dtype", DTYPES)
def test_tokens_past_the_end_are_not_read(dtype):
    args = gpu(*inputs(1, 80, 1, 2, 64, 64, dtype))
    expected = ops.chunk(*(x[:, :70] for x in args))
    for x in args:
        x[:, 70:] = math.nan
    got = ops.chunk(*(x[:, :70] for x in args))
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


@pytest.mark.parametrize("layout", ["vk", "kv"])
@pytest.mark.parametrize("pool_dtype", DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_prefill_rows(dtype, pool_dtype, layout):
    """Read and write rows, a shared prefix, fresh and padding ones; no other row is touched."""
    lengths = [70, 64, 0, 3, 20, 5]
    args = inputs(1, sum(lengths), 2, 4, 64, 64, dtype)
    start = pool(12, 4, 64, 64, pool_dtype, layout)
    start[4] = math.nan  # read by nobody
    rows = {
        "read_indices": torch.tensor([1, 1, 3, 4, -1, 5]),
        "write_indices": torch.tensor([2, 6, 7, 8, 9, -1]),
        "has_initial_state": torch.tensor([True, True, True, False, True, True]),
        "cu_seqlens": offsets(lengths),
        "edge_rows": torch.tensor([[10, 0], [11, -1], [-1, -1], [0, -1], [0, 0], [-1, -1]]),
    }
    want_o, want = reference.chunk_prefill(*args, start, **rows, chunk_size=64)
    device = start.cuda()
    if layout == "kv":
        device = start.transpose(2, 3).contiguous().cuda().transpose(2, 3)
    o = ops.chunk_prefill(*gpu(*args), device, **{k: x.cuda() for k, x in rows.items()})
    close("o", o, want_o, dtype, SLACK[dtype])
    written = [2, 6, 7, 8, 10, 11]
    worse = max(dtype, pool_dtype, key=lambda d: torch.finfo(d).eps)
    close("pool", device[written], want[written], worse, SLACK[worse])
    others = [0, 1, 3, 4, 5, 9]
    assert torch.equal(device[others].cpu().nan_to_num(7.0), start[others].nan_to_num(7.0))
    assert (o[:, 137:157] == 0).all()
    assert torch.equal(device[7].cpu(), start[3])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("chunk_size", [16, 64, 128])
def test_edges_count_from_each_sequence(dtype, chunk_size):
    lengths = [chunk_size + 2, 2 * chunk_size + 1]
    args = gpu(*inputs(1, sum(lengths), 1, 2, 64, 64, dtype))
    state = torch.zeros(8, 2, 64, 64, device="cuda")
    edges = torch.tensor([[2, -1, 5], [3, 4, 5]], dtype=torch.int32, device="cuda")
    ops.chunk_prefill(*args, state, cu_seqlens=offsets(lengths).cuda(), edge_rows=edges,
                      chunk_size=chunk_size)  # fmt: skip
    c, first, total = chunk_size, lengths[0], sum(lengths)
    for row, start, end in ((2, 0, c), (3, first, first + c), (4, first, first + 2 * c),
                            (0, 0, first), (1, first, total)):  # fmt: skip
        _, final = ops.chunk(*(x[:, start:end] for x in args))
        close(f"row {row}", state[row], final[0], dtype, SLACK[dtype])
    assert (state[5:] == 0).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_prefill_then_decode_equals_one_run(dtype):
    args = inputs(2, 70, 2, 6, 128, 128, dtype)
    device, state = gpu(*args), torch.zeros(2, 6, 128, 128, device="cuda")
    outs = [ops.chunk_prefill(*(x[:, :66] for x in device), state)]
    for t in range(66, 70):
        outs.append(ops.recurrent(*(x[:, t : t + 1] for x in device), state))
    want_o, want_s = reference.chunk(*args)
    close("o", torch.cat(outs, 1), want_o, dtype, SLACK[dtype])
    close("state", state, want_s, dtype, SLACK[dtype])


def test_prefill_rows_outside_the_pool_are_padding():
    args = gpu(*inputs(3, 20, 1, 2, 64, 64, BF16))
    state = pool(3, 2, 64, 64).cuda()
    before = state.clone()
    rows = torch.tensor([5, 1, -2], device="cuda")
    o = ops.chunk_prefill(*args, state, rows, torch.tensor([0, 9, 2], device="cuda"))
    assert (o[0] == 0).all() and (o[2] == 0).all() and (o[1] != 0).any()
    assert torch.equal(state, before)


@pytest.mark.parametrize("B,T", [(0, 3), (2, 0), (0, 0)])
def test_empty(B, T):
    o, final = ops.chunk(*gpu(*inputs(B, T, 1, 2, 64, 64, BF16)))
    assert o.shape == (B, T, 2, 64) and torch.equal(final.cpu(), torch.zeros(B, 2, 64, 64))


def test_batch_beyond_the_grid():
    args = gpu(*inputs(1, 66000, 1, 1, 64, 64, BF16))
    cu = torch.arange(66001, device="cuda")
    o, final = ops.chunk(*args, None, cu)
    assert final.shape[0] == 66000
    want_o, want_s = reference.chunk(*[x[:, -3:].cpu() for x in args], None, torch.arange(4))
    close("o", o[:, -3:], want_o, BF16, SLACK[BF16])
    close("final state", final[-3:], want_s, BF16, SLACK[BF16])


def test_offsets_beyond_32_bits():
    base = torch.empty(2**31 + 2**17, dtype=torch.float32, device="cuda")
    state = base.as_strided((3, 1, 64, 64), (2**30, 2**12, 64, 1))
    state[2] = 1.0
    args = inputs(1, 70, 1, 1, 64, 64, BF16)
    want_o, want_s = reference.chunk(*args, torch.ones(1, 1, 64, 64))
    o = ops.chunk_prefill(*gpu(*args), state, torch.tensor([2], device="cuda"))
    close("o", o, want_o, BF16, SLACK[BF16])
    close("state", state[2:], want_s, BF16, SLACK[BF16])


def test_capture_and_replay():
    """A captured call, replayed with other lengths, rows and flags, equals the eager call."""
    args = gpu(*inputs(1, 200, 2, 4, 128, 128, BF16))
    state = pool(8, 4, 128, 128).cuda()
    keep = state.clone()
    cu = torch.tensor([0, 64, 128, 200], device="cuda")
    rows = torch.tensor([0, 1, 2], device="cuda")
    fresh = torch.tensor([True, True, True], device="cuda")
    ops.chunk_prefill(*args, state, rows, None, fresh, cu)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o = ops.chunk_prefill(*args, state, rows, None, fresh, cu)
    state.copy_(keep)
    cu.copy_(torch.tensor([0, 3, 3, 200]))
    rows.copy_(torch.tensor([7, -1, 5]))
    fresh.copy_(torch.tensor([False, True, True]))
    graph.replay()
    want_o, want_s = reference.chunk_prefill(
        *[x.cpu() for x in args], keep.cpu(), rows.cpu(), None, fresh.cpu(), cu.cpu()
    )
    close("o", o, want_o, BF16, SLACK[BF16])
    close("state", state, want_s, BF16, SLACK[BF16])


def test_other_stream():
    args = gpu(*inputs(2, 100, 1, 1, 128, 128, BF16))
    want = ops.chunk(*args)
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        got = ops.chunk(*args)
    side.synchronize()
    assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])


# --- sequences cut into segments


CUT = 64 * 63 + 1  # tokens of the shortest that is cut where HV * V / 64 is at most 12
# Sums in tensor cores are cut off, not rounded: what float32 keeps for thousands of tokens drifts,
# in segments and uncut. Factors of the limit where it fades and where it is kept.
DRIFT = {torch.float32: 3.0, BF16: 1.0, F16: 1.0}
KEPT = {torch.float32: 6.0, BF16: 1.0, F16: 1.0}


def slow(total, H, HV, K, V, dtype, seed=0, least=None):
    """Inputs whose state outlives segments, by value heads: kept (float32: fading), fading,
    short-lived, changing."""
    q, k, v, g, beta = inputs(1, total, H, HV, K, V, dtype, seed=seed)
    if least is None:
        least = 1e-3 if dtype == torch.float32 else 0.0
    rates = torch.tensor([least, 1e-3, 1.0, 1e-2])[torch.arange(HV) % 4]
    return q, k, v, g * rates, beta * torch.tensor([0.05, 0.3, 1.0])[torch.arange(HV) % 3]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "T, H, HV, K, V", [(CUT, 1, 2, 128, 128), (6200, 2, 4, 64, 64), (6100, 1, 3, 128, 192),
                       (7000, 2, 6, 128, 128), (8129, 4, 12, 128, 128), (8200, 8, 24, 64, 64)]
)  # fmt: skip
def test_long_sequences(T, H, HV, K, V, dtype):
    args = slow(T, H, HV, K, V, dtype)
    check(args, 3 * states(1, HV, V, K), factor=DRIFT[dtype], qk_l2norm=True)
    if T == 6200:
        check((args[0], 1.3 * args[1], *args[2:]), factor=DRIFT[dtype])
        check(args, states(1, HV, V, K), factor=DRIFT[dtype], scale=0.2, chunk_size=128)
    if T == 6100:
        check(slow(T, H, HV, K, V, dtype, least=0.0), states(1, HV, V, K), factor=KEPT[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "lengths",
    [[CUT, 5, 0, 7000, 70, 0, CUT - 1, CUT], [0, 6300], [1] * 30 + [6400] + [0] * 5 + [CUT, 9]],
)
def test_long_sequences_among_others(lengths, dtype):
    """To the bit as in calls of their own, wherever they stand and whoever is beside them."""
    cu = offsets(lengths)
    args = slow(sum(lengths), 1, 2, 128, 64, dtype)
    S = states(len(lengths), 2, 64, 128)
    o, final = check(args, S, cu, DRIFT[dtype], qk_l2norm=True)
    device = gpu(*args)
    for n in range(0, len(lengths), 1 if len(lengths) < 10 else 6):
        start, end = cu[n].item(), cu[n + 1].item()
        alone, final_n = ops.chunk(*[x[:, start:end] for x in device], S[n : n + 1].cuda(),
                                   qk_l2norm=True)  # fmt: skip
        assert torch.equal(o[:, start:end], alone) and torch.equal(final[n], final_n[0])
    again = ops.chunk(*device, S.cuda(), cu.long().cuda(), qk_l2norm=True)
    assert torch.equal(again[0], o) and torch.equal(again[1], final)


def test_long_sequences_in_a_batch():
    two = (slow(6100, 1, 2, 64, 64, BF16, seed=seed) for seed in range(2))
    args = gpu(*(torch.cat(pair) for pair in zip(*two, strict=True)))
    S = states(2, 2, 64, 64).cuda()
    o, final = ops.chunk(*args, S)
    for n in range(2):
        alone = ops.chunk(*[x[n : n + 1] for x in args], S[n : n + 1])
        assert torch.equal(alone[0], o[n : n + 1]) and torch.equal(alone[1], final[n : n + 1])
    cu = torch.tensor([0, 6100, 12200], device="cuda")
    flat = ops.chunk(*[x.flatten(0, 1)[None] for x in args], S, cu)
    assert torch.equal(flat[0].view_as(o), o) and torch.equal(flat[1], final)


@pytest.mark.parametrize("kind", EXTREMES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_long_sequences_at_extreme_gates(kind, dtype):
    """Now and then, so that some segments cut and others do not."""
    q, k, v, g, beta = slow(6100, 1, 2, 64, 64, dtype)
    short = extreme(kind, 130, 2)
    for start in (300, 1000, 2500, 5000):
        g[:, start : start + 130] = short
    check((q, k, v, g, beta), states(1, 2, 64, 64))
    g = short[:, :64].repeat(1, 96, 1)[:, :6100].contiguous()
    check((q, k, v, g, beta), states(1, 2, 64, 64), factor=KEPT[dtype] if kind == "zero" else 1.0)


@pytest.mark.parametrize("where", [0, 64, 2560, 5952])
@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_of_long_sequences_do_not_mix(dtype, where):
    """An infinite or NaN row of the initial state, and NaN values, stay in their row of V; a decay
    of zero ends what the state held."""
    args = gpu(*slow(6100, 1, 2, 64, 64, dtype))
    S = states(1, 2, 64, 64).cuda()
    values = args[2].clone()
    poisoned = S.clone()
    poisoned[:, :, 5], poisoned[:, :, 9] = math.nan, math.inf
    args[2][:, 3000, :, 40] = math.nan
    bad, rest = [5, 9, 40], [i for i in range(64) if i not in (5, 9, 40)]
    results = [(ops.chunk(*args, poisoned), ops.chunk(*args, S), rest, 0)]
    assert results[0][0][1][:, :, bad].isnan().all()
    args[2].copy_(values)
    args[3][:, where] = -math.inf
    results.append((ops.chunk(*args, poisoned), ops.chunk(*args, S), list(range(64)), where))
    for got, want, rows, start in results:
        for name, x, y in (("o", got[0][:, start:][..., rows], want[0][:, start:][..., rows]),
                           ("final state", got[1][:, :, rows], want[1][:, :, rows])):  # fmt: skip
            # float16 factors are scaled when a row of their warp needs it.
            assert torch.equal(x, y) if dtype == BF16 else close(name, x, y, dtype) is None


@pytest.mark.parametrize("layout", ["vk", "kv"])
@pytest.mark.parametrize("pool_dtype", DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_prefill_rows_of_long_sequences(dtype, pool_dtype, layout):
    """In place and elsewhere, fresh and padding rows, edges in several segments."""
    lengths = [4100, 70, 5500, 4200, CUT]
    args = slow(sum(lengths), 1, 2, 64, 64, dtype)
    start = pool(12, 2, 64, 64, pool_dtype, layout)
    start[4] = math.nan  # read by nobody
    rows = {
        "read_indices": torch.tensor([1, 1, 3, -1, 4]),
        "write_indices": torch.tensor([2, 6, 3, 9, 8]),
        "has_initial_state": torch.tensor([True, True, True, True, False]),
        "cu_seqlens": offsets(lengths),
        "edge_rows": torch.full((5, 48), -1),
    }
    for n, edge, row in ((0, 0, 5), (0, 31, 7), (2, 20, 10), (3, 3, 0), (4, 30, 11), (4, 31, 0)):
        rows["edge_rows"][n, edge] = row
    want_o, want = on_card(reference.chunk_prefill, *args, start, **rows, chunk_size=128)
    device = start.cuda()
    if layout == "kv":
        device = start.transpose(2, 3).contiguous().cuda().transpose(2, 3)
    o = ops.chunk_prefill(
        *gpu(*args), device, **{k: x.cuda() for k, x in rows.items()}, chunk_size=128
    )
    close("o", o, want_o, dtype, SLACK[dtype])
    written = [2, 3, 5, 6, 7, 8, 10, 11]
    worse = max(dtype, pool_dtype, key=lambda d: torch.finfo(d).eps)
    close("pool", device[written], want[written], worse, SLACK[worse])
    others = [0, 1, 4, 9]
    assert torch.equal(device[others].cpu().nan_to_num(7.0), start[others].nan_to_num(7.0))
    assert (o[:, 9670:13870] == 0).all()


def test_long_sequences_captured():
    """A call captured with short sequences, replayed with long ones, equals the eager call."""
    args = gpu(*slow(15000, 1, 2, 128, 128, BF16))
    S = states(3, 2, 128, 128).cuda()
    cu = torch.tensor([0, 5000, 10000, 15000], device="cuda")
    ops.chunk(*args, S, cu)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = ops.chunk(*args, S, cu)
    for lengths in ([7000, 10, 7990], [0, 15000, 0], [5000, 4000, 6000]):
        cu.copy_(offsets(lengths))
        graph.replay()
        want = ops.chunk(*args, S, cu)
        assert all(torch.equal(x, y) for x, y in zip(got, want, strict=True))


# --- low rank


def window(P, H, HV, R, K, V, dtype=torch.float32, seed=5):
    r = torch.Generator().manual_seed(seed)
    k = torch.randn(P, H, R, K, generator=r)
    return [
        (k / k.norm(dim=-1, keepdim=True)).to(dtype),
        torch.randn(P, HV, R, V, generator=r).to(dtype),
        -torch.rand(P, HV, R, generator=r),
        torch.zeros(P, dtype=torch.int32),
    ]


@pytest.mark.parametrize(
    "dtype,K,V",
    [(torch.float32, 24, 40), (torch.float32, 128, 64), (BF16, 128, 64), (BF16, 64, 128),
     (F16, 128, 64), (F16, 64, 128)],
)  # fmt: skip
@pytest.mark.parametrize("R", [1, 8, 33, 64])
@pytest.mark.parametrize("chunk_size", [16, 64])
@pytest.mark.parametrize("l2norm", [False, True])
def test_lowrank_calls_in_a_row(R, chunk_size, dtype, K, V, l2norm):
    """Several calls continue one window, which may start as a ring of any head."""
    win = window(4, 2, 4, R, K, V, dtype)
    win[3].copy_(torch.tensor([0, R + 65536 * (R // 2), R // 2, R]))
    device = gpu(*win)
    rows = {
        "state_indices": torch.tensor([1, 2, -1, 3, 0]),
        "has_initial_state": torch.tensor([True, True, True, True, False]),
        "cu_seqlens": offsets([170, 5, 4, 0, 33]),
    }
    for seed in range(2):
        args = inputs(1, 212, 2, 4, K, V, dtype, seed=seed)
        want = reference.chunk_lowrank(*args, *win, **rows, chunk_size=chunk_size, qk_l2norm=l2norm)
        o = ops.chunk_lowrank(*gpu(*args), *device, **{k: x.cuda() for k, x in rows.items()},
                              chunk_size=chunk_size, qk_l2norm=l2norm)  # fmt: skip
        close("o", o, want[0], dtype, 2)
        assert (o[:, 175:179] == 0).all()
        close("win_k", device[0], want[1], dtype, 1.5)
        close("win_u", device[1], want[2], dtype, 2)
        close("win_g", device[2], want[3], torch.float32)
        assert torch.equal(device[3].cpu(), want[4])
        win = [x.cpu() for x in device]


@pytest.mark.parametrize("R", [8, 16, 33, 64])
@pytest.mark.parametrize("u_dtype", DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_lowrank_few_blocks(dtype, u_dtype, R):
    """Blocks alone on their multiprocessors, several chunks a sequence; rings, few tokens, rows of
    others untouched; a sequence as in a call of its own, where there is one chunk too."""
    win = window(5, 1, 3, R, 128, 64)
    win[0], win[1] = win[0].to(dtype), win[1].to(u_dtype)
    win[3].copy_(torch.tensor([R + 65536 * (R // 3), R // 2, 0, R, R]))
    rows = torch.tensor([1, 0, 4, 2])
    lengths = [170, 200, 5, 130]
    cu = offsets(lengths)
    device = gpu(*win)
    for seed in range(2):
        args = inputs(1, sum(lengths), 1, 3, 128, 64, dtype, seed=seed)
        want = reference.chunk_lowrank(*args, *win, rows, cu_seqlens=cu, qk_l2norm=True)
        before = [x.clone() for x in device]
        o = ops.chunk_lowrank(
            *gpu(*args), *device, rows.cuda(), cu_seqlens=cu.cuda(), qk_l2norm=True
        )
        worst = max(dtype, u_dtype, key=lambda d: torch.finfo(d).eps)
        close("o", o, want[0], worst, 2)
        close("win_k", device[0], want[1], dtype, 1.5)
        close("win_u", device[1], want[2], worst, 2)
        close("win_g", device[2], want[3], torch.float32)
        assert torch.equal(device[3].cpu(), want[4])
        for n, row in enumerate(rows.tolist()):
            start, end = cu[n].item(), cu[n + 1].item()
            own = [x[row : row + 1].clone() for x in before]
            alone = ops.chunk_lowrank(*(x[:, start:end] for x in gpu(*args)), *own, qk_l2norm=True)
            assert torch.equal(o[:, start:end], alone)
            assert all(torch.equal(x[row], y[0]) for x, y in zip(device, own, strict=True))
        win = [x.cpu() for x in device]


@pytest.mark.parametrize("dtype", DTYPES)
def test_lowrank_with_a_window_as_long_as_the_sequence_is_full_rank(dtype):
    args = gpu(*inputs(2, 60, 2, 4, 64, 64, dtype))
    win = gpu(*window(2, 2, 4, 64, 64, 64))
    close("o", ops.chunk_lowrank(*args, *win, chunk_size=16), ops.chunk(*args)[0], dtype, 2)


@pytest.mark.parametrize("odd", [False, True])
@pytest.mark.parametrize(
    "k_dtype, u_dtype", [(torch.float32, BF16), (BF16, F16), (F16, torch.float32)]
)
@pytest.mark.parametrize("dtype", DTYPES)
def test_lowrank_windows_of_other_dtypes_and_strides(dtype, k_dtype, u_dtype, odd):
    """Read and written in vectors or, with odd strides, by elements: the same bits."""
    win = window(3, 1, 2, 16, 128, 64)
    win[0], win[1] = win[0].to(k_dtype), win[1].to(u_dtype)
    win[3].copy_(torch.tensor([16 + 65536 * 5, 7, 0]))
    args = inputs(1, 150, 1, 2, 128, 64, dtype)
    cu = offsets([130, 4, 16])
    want = reference.chunk_lowrank(*args, *win, cu_seqlens=cu, qk_l2norm=True)
    device = gpu(*win)
    if odd:
        device[:2] = (torch.cat([x, x[..., :1]], -1)[..., :-1] for x in device[:2])
    o = ops.chunk_lowrank(*gpu(*args), *device, cu_seqlens=cu.cuda(), qk_l2norm=True)
    worst = max(dtype, k_dtype, u_dtype, key=lambda d: torch.finfo(d).eps)
    close("o", o, want[0], worst, 2)
    close("win_k", device[0], want[1], k_dtype, 1.5)
    close("win_u", device[1], want[2], worst, 2)
    assert device[3].cpu().tolist() == want[4].tolist()
    if odd:
        again = gpu(*win)
        assert torch.equal(
            ops.chunk_lowrank(*gpu(*args), *again, cu_seqlens=cu.cuda(), qk_l2norm=True), o
        )
        assert torch.equal(again[1], device[1])


def test_lowrank_capture_and_many_sequences():
    lengths = torch.randint(0, 301, (64,), generator=torch.Generator().manual_seed(11)).tolist()
    cu = offsets(lengths).cuda()
    args = gpu(*inputs(1, sum(lengths), 1, 2, 128, 128, BF16))
    win = gpu(*window(64, 1, 2, 16, 128, 128))
    o = ops.chunk_lowrank(*args, *win, cu_seqlens=cu)
    assert win[3].tolist() == [min(n, 16) for n in lengths]
    for n in (0, 30, 63):
        s, e = cu[n].item(), cu[n + 1].item()
        alone = ops.chunk_lowrank(*(x[:, s:e] for x in args), *gpu(*window(1, 1, 2, 16, 128, 128)))
        assert torch.equal(o[:, s:e], alone)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = ops.chunk_lowrank(*args, *win, cu_seqlens=cu)
    win[3].zero_()
    graph.replay()
    assert torch.equal(captured, o)


# --- gradients


@pytest.mark.parametrize("l2norm", [False, True])
@pytest.mark.parametrize("cu", [None, [0, 5, 5, 23, 40]])
def test_gradcheck(l2norm, cu):
    B, T = (2, 20) if cu is None else (1, 40)
    N = B if cu is None else len(cu) - 1
    args = [x.double().cuda().requires_grad_() for x in inputs(B, T, 1, 2, 3, 4)]
    args.append(states(N, 2, 4, 3).double().cuda().requires_grad_())
    packed = None if cu is None else torch.tensor(cu).cuda()
    assert torch.autograd.gradcheck(
        lambda *x: ops.chunk(*x, packed, 0.7, l2norm, 16), args, nondet_tol=1e-12
    )


@pytest.mark.parametrize("kind", [None, "one -316", "-inf", "all -inf"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients_equal_those_of_the_cpu(dtype, kind):
    q, k, v, g, beta = inputs(1, 130, 2, 4, 64, 64, dtype)
    if kind is not None:
        g = extreme(kind, 130, 4)
    tensors = (q, k, v, g, beta, states(1, 4, 64, 64))
    r = torch.Generator().manual_seed(3)
    wo, ws = torch.randn(v.shape, generator=r).to(dtype), torch.randn(1, 4, 64, 64, generator=r)
    grads = []
    for device in ("cpu", "cuda"):
        leaves = [x.detach().to(device).requires_grad_() for x in tensors]
        o, final = ops.chunk(*leaves, qk_l2norm=True)
        ((o.float() * wo.to(device)).sum() + (final * ws.to(device)).sum()).backward()
        grads.append([x.grad for x in leaves])
    for name, x, y in zip(["q", "k", "v", "g", "beta", "S"], *grads, strict=True):
        assert y.dtype == x.dtype
        # Gradients of float32 gates and states too come from products of the dtype of q.
        close("d" + name, y, x, dtype, 10)


def test_gradients_packed():
    args = inputs(1, 100, 1, 2, 64, 64)
    cu = offsets([30, 0, 70])
    grads = []
    for device in ("cpu", "cuda"):
        leaves = [x.detach().to(device).requires_grad_() for x in args]
        ops.chunk(*leaves, None, cu.to(device))[0].square().sum().backward()
        grads.append([x.grad for x in leaves])
    for x, y in zip(*grads, strict=True):
        close("grad", y, x, torch.float32, 10)


GRADIENTS = ["q", "k", "v", "g", "beta", "initial state"]


def gradients(module, args, S, cu, wo, ws, **kwargs):
    leaves = [x.detach().requires_grad_() for x in (*args, S)]
    o, final = module.chunk(*leaves, cu, **kwargs)
    loss = (o.double() * wo).sum()
    if ws is not None:
        loss = loss + (final.double() * ws).sum()
    return torch.autograd.grad(loss, leaves)


def check_gradients(args, S, cu=None, factor=1.0, final=True, **kwargs):
    """Every gradient against the sequential oracle in float64; what they are is returned."""
    dtype = args[0].dtype
    r = torch.Generator().manual_seed(3)
    # Exact in dtype: the gradient that reaches a 16-bit o is rounded to its dtype by autograd.
    wo = torch.randn(args[2].shape, generator=r).to(dtype)
    ws = torch.randn(S.shape, generator=r) if final else None
    want = gradients(reference, args, S, cu, wo, ws, **kwargs)
    got = gradients(ops, gpu(*args), S.cuda(), *gpu(cu, wo, ws), **kwargs)
    for name, x, y, like in zip(GRADIENTS, got, want, (*args, S), strict=True):
        assert x.dtype == like.dtype and x.is_contiguous()
        # At g = -inf the derivative of exp is 0 times an infinite slope for the oracle's autograd.
        close(f"gradient of {name}", x, torch.nan_to_num(y), dtype, factor * GRADIENT_SLACK[dtype])
    return got


# 16 bits: what the two scans keep is rounded, and so are the factors of every product.
GRADIENT_SLACK = {torch.float32: 5.0, BF16: 4.0, F16: 4.0}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("K, V", [(64, 64), (64, 128), (128, 128), (128, 192), (24, 40)])
@pytest.mark.parametrize("T", [1, 64, 130])
def test_gradients(T, K, V, dtype):
    args = inputs(2, T, 1, 2, K, V, dtype)
    check_gradients(args, states(2, 2, V, K), qk_l2norm=True, scale=0.3)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("ratio", [1, 3, 8])
@pytest.mark.parametrize("l2norm", [False, True])
def test_gradients_of_shared_keys(ratio, l2norm, dtype):
    q, k, v, g, beta = inputs(1, 100, 2, 2 * ratio, 128, 64, dtype)
    if l2norm:
        q, k = 3 * q, 0.2 * k
    gates = (g.to(dtype), beta.to(dtype))
    check_gradients((q, k, v, *gates), states(1, 2 * ratio, 64, 128), qk_l2norm=l2norm)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("lengths", [[0, 3, 0, 70, 2, 0], [130, 2, 64], [1] * 40 + [0] * 5 + [65]])
def test_packed_gradients(lengths, dtype):
    """Each sequence equals a run of its own, to the bit; the state of an empty one is handed on."""
    cu = offsets(lengths)
    args = inputs(1, sum(lengths), 2, 6, 128, 64, dtype)
    S = states(len(lengths), 6, 64, 128)
    got = check_gradients(args, S, cu, qk_l2norm=True)
    wo = torch.randn(args[2].shape, generator=torch.Generator().manual_seed(4)).to(dtype).cuda()
    ws = states(len(lengths), 6, 64, 128, seed=5).cuda()
    device = gpu(*args)
    got = ops.chunk_backward(wo, ws, *device, S.cuda(), cu.cuda(), None, True, 64)
    again = ops.chunk_backward(wo, ws, *device, S.cuda(), cu.long().cuda(), None, True, 64)
    assert all(torch.equal(x, y) for x, y in zip(got, again, strict=True))
    for n in {0, len(lengths) // 2, len(lengths) - 1}:
        start, end = cu[n].item(), cu[n + 1].item()
        alone = ops.chunk_backward(
            wo[:, start:end], ws[n : n + 1], *[x[:, start:end] for x in device],
            S[n : n + 1].cuda(), None, None, True, 64,
        )  # fmt: skip
        if dtype == BF16:
            assert all(
                torch.equal(x[:, start:end], y) for x, y in zip(got[:5], alone[:5], strict=True)
            )
            assert torch.equal(got[5][n], alone[5][0])
        if start == end:
            assert torch.equal(got[5][n], ws[n])


@pytest.mark.parametrize("kind", EXTREMES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients_at_extreme_gates(kind, dtype):
    q, k, v, _, beta = inputs(1, 130, 1, 2, 64, 64, dtype)
    check_gradients((q, k, v, extreme(kind, 130, 2), beta), states(1, 2, 64, 64))


def test_gradients_without_states_and_of_one_output():
    args = gpu(*inputs(1, 100, 1, 3, 128, 128, BF16))
    zero = torch.zeros(1, 3, 128, 128, device="cuda")
    wo = torch.randn(1, 100, 3, 128, device="cuda").to(BF16)
    got = ops.chunk_backward(wo, None, *args, None, None, None, True, 64)
    want = ops.chunk_backward(wo, zero, *args, zero, None, None, True, 64)
    assert all(torch.equal(x, y) for x, y in zip(got, want, strict=True))
    # The gradient of a sum is one value at every place.
    one = torch.ones((), dtype=BF16, device="cuda").expand_as(wo)
    got = ops.chunk_backward(one, None, *args, None, None, None, True, 64)
    want = ops.chunk_backward(one.contiguous(), None, *args, None, None, None, True, 64)
    assert all(torch.equal(x, y) for x, y in zip(got, want, strict=True))


def test_gradients_of_strided_views():
    q, k, v, g, beta = gpu(*inputs(2, 70, 2, 4, 64, 64, BF16))
    wo = torch.randn(v.shape, device="cuda").to(BF16)
    qt, kt, vt = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v))
    gates = torch.stack([beta, g], -1)
    S = states(2, 4, 64, 64).cuda()
    St = S.transpose(2, 3).contiguous().transpose(2, 3)
    want = ops.chunk_backward(wo, S, q, k, v, g, beta, S, None, None, True, 64)
    got = ops.chunk_backward(
        wo, St, qt, kt, vt, gates[..., 1], gates[..., 0], St, None, None, True, 64
    )
    assert all(torch.equal(x, y) for x, y in zip(got, want, strict=True))


def test_gradients_in_a_graph():
    """A captured step, replayed with other lengths, equals the eager one; so do many sequences."""
    lengths = [64, 64, 72], [3, 0, 197]
    cu = offsets(lengths[0]).cuda()
    args = gpu(*inputs(1, 200, 2, 6, 128, 128, BF16))
    leaves = [x.requires_grad_() for x in args]
    wo = torch.randn(args[2].shape, device="cuda").to(BF16)

    def step():
        return torch.autograd.grad(ops.chunk(*leaves, None, cu, None, True)[0], leaves, wo)

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = step()
    cu.copy_(offsets(lengths[1]))
    graph.replay()
    torch.cuda.synchronize()
    assert all(torch.equal(x, y) for x, y in zip(got, step(), strict=True))


def test_gradients_beyond_the_grid():
    args = gpu(*inputs(1, 66000, 1, 1, 64, 64, BF16))
    wo = torch.randn(1, 66000, 1, 64, device="cuda").to(BF16)
    cu = torch.arange(66001, device="cuda")
    got = ops.chunk_backward(wo, None, *args, None, cu, None, False, 64)
    want = ops.chunk_backward(
        wo[:, -3:], None, *[x[:, -3:] for x in args], None, cu[:4], None, False, 64
    )
    assert all(torch.equal(x[:, -3:], y) for x, y in zip(got[:5], want[:5], strict=True))
    assert torch.equal(got[5][-3:], want[5])
