"""Shapes and strides at the edges, through the dispatcher, against the CPU ops."""

import itertools

import pytest
import torch

from gdn_ops import windows

ops = torch.ops.gdn
f32, f16, bf16 = torch.float32, torch.float16, torch.bfloat16
TOLERANCE = {f32: 1e-4, f16: 4e-3, bf16: 3e-2}


@pytest.fixture
def g():
    return torch.Generator().manual_seed(0)


def moved(x, where):
    """The whole storage, so that views stay the views they are."""
    if not isinstance(x, torch.Tensor):
        return x
    n = x.untyped_storage().nbytes() // x.element_size()
    flat = x.as_strided((n,), (1,), 0).clone().to(where)
    return flat.as_strided(x.size(), x.stride(), x.storage_offset())


def tensors(x):
    return [x] if isinstance(x, torch.Tensor) else list(x or ())


def agree(device, op, *args, dtype=f32):
    """Results and every argument after the call, mutated or not."""
    results = []
    for where in ("cpu", device):
        mine = [moved(x, where) for x in args]
        with torch.no_grad():
            out = op(*mine)
        results.append([t.cpu() for t in (*tensors(out), *tensors(mine_tensors(mine)))])
    tol = TOLERANCE[dtype]
    for want, got in zip(*results, strict=True):
        torch.testing.assert_close(got, want, rtol=tol, atol=tol, equal_nan=True)


def mine_tensors(args):
    return [x for x in args if isinstance(x, torch.Tensor)]


def tokens(g, B, T, H, HV, K, V, act=f32):
    q, k, v = (torch.randn(B, T, h, d, generator=g).to(act) for h, d in ((H, K), (H, K), (HV, V)))
    return q, k, v, -torch.rand(B, T, HV, generator=g), torch.rand(B, T, HV, generator=g)


def window(g, P, H, HV, K, V, R, dtype=f32):
    entries = [
        x.to(dtype) if i < 2 else x for i, x in enumerate(windows.allocate(P, H, HV, K, V, R))
    ]
    entries[3] = torch.arange(P, dtype=torch.int32) % (R + 1)
    for x in entries[:3]:
        x.copy_(0.2 * torch.randn(x.shape, generator=g) - 0.5)
    return entries


SHAPES = [
    (0, 1, 2, 4, 64, 64),
    (2, 0, 2, 4, 64, 64),
    (1, 1, 1, 1, 1, 1),
    (2, 3, 1, 1, 1, 1),
    (2, 1, 3, 9, 64, 64),
    (1, 1, 1, 3, 5, 7),
    (2, 2, 2, 2, 129, 33),
    (1, 1, 1, 1, 256, 256),
    (2, 1, 1, 8, 1, 64),
]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(("act", "state"), [(f32, f32), (f32, bf16), (f16, f16), (bf16, bf16)])
def test_recurrent(device, g, shape, act, state):
    B, T, H, HV, K, V = shape
    pool = torch.randn(B + 1, HV, V, K, generator=g).to(state)
    x = tokens(g, *shape, act)
    rows = torch.arange(B, dtype=torch.int32)
    dtype = max((act, state), key=lambda d: TOLERANCE[d])
    agree(device, ops.recurrent, *x, pool, rows, None, None, None, None, True, dtype=dtype)


@pytest.mark.parametrize("cu", [[0, 0, 3, 3, 7], [0, 0, 0, 0, 0], [0]], ids=str)
@pytest.mark.parametrize("index", [torch.int32, torch.int64])
def test_packed(device, g, cu, index):
    x = tokens(g, 1, cu[-1], 2, 6, 64, 32)
    rows = torch.tensor([0, -1, 3, 2])[: len(cu) - 1].to(index)
    cu = torch.tensor(cu, dtype=index)
    pool = torch.randn(5, 6, 32, 64, generator=g)
    agree(device, ops.recurrent, *x, pool, rows, None, cu, None, None, True)
    agree(device, ops.chunk_prefill, *x, pool, rows, rows, None, cu, None, None, True, 16)
    pools = window(g, 5, 2, 6, 64, 32, 4)
    agree(device, ops.chunk_lowrank, *x, *pools, rows, None, cu, None, True, 16)


def test_views(device, g):
    """Slices, transposes and expansions of every argument; rows that are all padding."""
    B, T, H, HV, K, V = 3, 1, 2, 4, 64, 64
    qk = torch.randn(B, T, H, 2 * K, generator=g)
    v = torch.randn(B, HV, T, V, generator=g).transpose(1, 2)
    gate = -torch.rand(HV, B, T, generator=g).permute(1, 2, 0)
    beta = torch.rand(B, 2 * T, HV, generator=g)[:, ::2]
    pools = [
        torch.randn(9, HV, V, K, generator=g)[::3],
        torch.randn(3, 2 * HV, V, K, generator=g)[:, ::2],
        torch.randn(3, HV, 2 * V, K, generator=g)[:, :, ::2],
        torch.randn(3, HV, K, V, generator=g).transpose(2, 3),
    ]
    rows = [
        torch.tensor([2, 5, -1, 5, 0, 5], dtype=torch.int32)[::2],
        torch.tensor([2, -7, 0]),
        torch.tensor([-1, -1, -1]),
    ]
    q, k = qk[..., :K], qk[..., K:]
    for pool, idx in itertools.product(pools, rows):
        agree(device, ops.recurrent, q, k, v, gate, beta, pool, idx, None, None, None, None, True)
    has = torch.tensor([True, True, False, False, True, False])[::2]
    for heads in (qk[..., ::2], torch.randn(B, T, 1, K, generator=g).expand(B, T, H, K)):
        u = v.transpose(2, 3).contiguous().transpose(2, 3)
        one = torch.tensor([[[-0.5]]]).expand(B, T, HV)
        agree(device, ops.recurrent, heads, heads, u, one, beta.half(), pools[0], rows[0], has)
        agree(device, ops.chunk, heads, heads, u, one, beta, None, None, None, True, 16)


@pytest.mark.parametrize(
    "shape",
    [(0, 1, 2, 4, 64, 64, 4), (2, 0, 2, 4, 64, 64, 4), (1, 1, 1, 1, 64, 32, 1),
     (2, 2, 1, 3, 64, 32, 2), (2, 1, 3, 9, 128, 96, 5)],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("dtype", [f32, f16, bf16])
def test_windows(device, g, shape, dtype):
    B, T, H, HV, K, V, R = shape
    x = tokens(g, B, T, H, HV, K, V, dtype)
    pools = window(g, B + 1, H, HV, K, V, R, dtype)
    pool = torch.randn(B + 1, HV, V, K, generator=g).to(dtype)
    rows = torch.arange(B, dtype=torch.int32)
    tail = (rows, None, None, None, None, True)
    agree(device, ops.recurrent_buffered, *x, pool, *pools, *tail, dtype=dtype)
    agree(device, ops.recurrent_lowrank, *x, *pools, *tail, dtype=dtype)
    agree(device, ops.window_flush, pool, *pools, rows, dtype=dtype)


def test_views_of_windows(device, g):
    x = tokens(g, 3, 1, 1, 3, 64, 64)
    wide = [
        torch.randn(5, 1, 8, 64, generator=g)[:, :, ::2],
        torch.randn(5, 6, 4, 64, generator=g)[:, ::2],
        -torch.rand(5, 4, 3, generator=g).transpose(1, 2),
        torch.tensor([4, 9, 2, 9, 0, 9, 1, 9, 3, 9], dtype=torch.int32)[::2],
    ]
    pool = torch.randn(5, 3, 64, 128, generator=g)[..., :64]
    for rows in (torch.tensor([0, 3, 4]), torch.tensor([0, -1, 4]), torch.tensor([-1, -2, -3])):
        tail = (rows, None, None, None, None, True)
        agree(device, ops.recurrent_buffered, *x, pool, *wide, *tail)
        agree(device, ops.recurrent_lowrank, *x, *wide, *tail)


def test_a_ring_that_came_round_and_lost_drafts(device, g):
    """Fewer live entries than R that do not begin in slot 0; what the others hold is dead."""
    P, H, HV, K, V, R = 4, 1, 2, 64, 32, 8
    x = tokens(g, P, 1, H, HV, K, V)
    for layout in ("rows", "slots first"):
        win = window(g, P, H, HV, K, V, R)
        live = [(5, 2, 2), (7, 1, 4), (3, 0, 7), (8, 7, 3)]  # fill, drafts, slot of the oldest
        win[3] = torch.tensor([f | d << 8 | h << 16 for f, d, h in live], dtype=torch.int32)
        for p, (fill, _, head) in enumerate(live):
            for slot in {*range(R)} - {(head + i) % R for i in range(fill)}:
                for entries in win[:3]:
                    entries[p, :, slot] = torch.nan
        if layout != "rows":
            win[:3] = [y.transpose(0, 2).contiguous().transpose(0, 2) for y in win[:3]]
        for accepted in (None, torch.tensor([1, 2, 1, 3])):
            tail = (None, None, None, accepted, None, True)
            agree(device, ops.recurrent_lowrank, *x, *win, *tail)


def test_a_core_that_passes_sequences_without_tokens(device, g):
    """It reads what describes each into the same bytes, so a read ends before the next transfer."""
    N = 900  # of one head and one row: more than there are cores
    lengths = torch.arange(N) % 3 % 2
    cu = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    x = tokens(g, 1, int(cu[-1]), 1, 1, 6, 1)
    pool = torch.randn(N, 1, 1, 6, generator=g)
    agree(device, ops.recurrent, *x, pool, None, torch.arange(N) % 2 == 0, cu)


@pytest.mark.parametrize(
    "shape", [(0, 1, 8, 4), (2, 0, 8, 4), (1, 1, 1, 1), (3, 2, 33, 2)], ids=str
)
@pytest.mark.parametrize("leading", [False, True])
def test_convolution(device, g, shape, leading):
    B, T, C, W = shape
    x, w = torch.randn(B, T, C, generator=g), torch.randn(C, W, generator=g)
    pool = torch.randn(B + 1, C, max(W - 1, 1), generator=g)
    rows = torch.arange(B, dtype=torch.int32)
    agree(device, ops.short_conv, x, w, None, pool, rows, None, None, None, "silu", leading)


def test_views_of_a_convolution(device, g):
    w, pool = torch.randn(16, 8, generator=g), torch.randn(3, 16, 3, generator=g)
    xs = [torch.randn(2, 16, 3, generator=g).transpose(1, 2), torch.randn(2, 3, 40)[..., 4:20]]
    bias = torch.randn(32, generator=g)[::2]
    for x, weight in itertools.product(xs, (w[:, :4], w[:, ::2], w[:, :4].T.contiguous().T)):
        agree(device, ops.short_conv, x, weight, bias, pool)


@pytest.mark.parametrize("L", [1, 3, 5])
@pytest.mark.parametrize("leading", [False, True])
def test_histories_a_gap_apart(device, g, L, leading):
    """An odd number of 16-bit columns, each channel a transfer of its own."""
    x, w = torch.randn(3, 2, 70, generator=g), torch.randn(70, 2, generator=g)
    pool = torch.randn(4, 70, 9, generator=g).to(bf16)[..., 2 : 2 + L]
    rows, has = torch.tensor([2, -1, 3]), torch.tensor([True, True, False])
    accepted = torch.tensor([2, 1, 1]) if leading and L > 1 else None
    for state in (pool, pool.half()):
        agree(device, ops.short_conv, x, w, None, state, rows, has, None, accepted, "silu", leading)


@pytest.mark.parametrize("shape", [(0, 64), (1, 1), (3, 0, 64), (2, 3, 100), (4, 256)], ids=str)
def test_norm(device, g, shape):
    x, gate = torch.randn(*shape, generator=g), torch.randn(*shape, generator=g)
    weight = torch.randn(2 * shape[-1], generator=g)[::2]
    agree(device, ops.gated_rms_norm, x, gate, weight, 1e-6)
    agree(device, ops.gating, x, gate, weight, weight)


@pytest.mark.parametrize(
    "shape",
    [(0, 1, 2, 4, 64, 64), (2, 0, 2, 4, 64, 64), (2, 1, 3, 9, 64, 64), (1, 1, 1, 1, 1, 1),
     (1, 1, 4, 4, 128, 256), (2, 1, 1, 2, 256, 64), (2, 3, 2, 2, 64, 48)],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize(("act", "state"), [(f32, f32), (f16, f16), (bf16, bf16)])
def test_layer(device, g, shape, act, state):
    B, T, H, HV, K, V = shape
    C = 2 * H * K + HV * V
    x = torch.randn(B, T, 2 * (C + HV * V + 2 * HV), generator=g).to(act)[..., ::2]
    w, norm = torch.randn(C, 4, generator=g).to(act), torch.randn(V, generator=g).to(act)
    A_log, dt_bias = torch.rand(HV, generator=g), torch.randn(HV, generator=g)
    conv = torch.randn(B + 1, C, 3, generator=g).to(act)
    pool = torch.randn(B + 1, HV, V, K, generator=g).to(state)
    rows = torch.arange(B, dtype=torch.int32)
    tail = (H, K, rows, None, None, None, None, True, 1e-6, "silu", False)
    agree(device, ops.decode, x, w, None, A_log, dt_bias, norm, conv, pool, *tail, dtype=act)
    if K >= 64 and V % 32 == 0:
        win = window(g, B + 1, H, HV, K, V, 4, act)
        head = (x, w, None, A_log, dt_bias, norm, conv)
        agree(device, ops.decode_buffered, *head, pool, *win, *tail, dtype=act)
        agree(device, ops.decode_lowrank, *head, *win, *tail, dtype=act)


def test_drafts_without_a_row_of_the_convolution_are_padding(device, g):
    """Column 0 names no row: the row of the accepted column is neither read nor written."""
    H, HV, K, V = 1, 2, 64, 64
    C = 2 * H * K + HV * V
    projected = torch.randn(1, 3, C + HV * V + 2 * HV, generator=g)
    weight, gates = torch.randn(C, 4, generator=g), torch.zeros(HV)
    state = torch.randn(6, HV, V, K, generator=g)
    state[5] = float("nan")
    conv = torch.randn(6, C, 4, generator=g).to(device)
    pool = state.to(device)
    rest = [torch.tensor([[2, 3], [-1, 5]]), None, torch.tensor([0, 1, 3]), torch.tensor([1, 2])]
    rest = [x if x is None else x.to(device) for x in rest]
    head = [x.to(device) for x in (projected, weight)]
    more = [x.to(device) for x in (gates, gates, torch.ones(V))]
    y = ops.decode(*head, None, *more, conv, pool, H, K, *rest, None, True, 1e-6, "silu", True)
    y = y.cpu()
    assert y[0, 0].isfinite().all() and y[0, 0].any() and not y[0, 1:].any()
    others = [0, 1, 3, 4]
    assert torch.equal(pool.cpu()[others], state[others]) and pool.cpu()[5].isnan().all()


def test_tokens_of_a_layer_at_any_stride(device, g):
    """A layer of several launches reads the gate of its norm out of the packed projection."""
    B, T, H, HV, K, V = 2, 3, 1, 2, 32, 32
    C = 2 * H * K + HV * V
    D = C + HV * V + 2 * HV
    w, norm = torch.randn(C, 4, generator=g), torch.randn(V, generator=g)
    A_log, dt_bias = torch.rand(HV, generator=g), torch.randn(HV, generator=g)
    conv, pool = torch.randn(B, C, 3, generator=g), torch.randn(B, HV, V, K, generator=g)
    wide = torch.randn(B, 2 * T, D, generator=g)
    tail = (H, K, None, None, None, None, None, True, 1e-6, "silu", False)
    for x in (wide[:, ::2], wide[:, :T], wide[:1, :T].expand(B, T, D), wide[:, :1].expand(B, T, D)):
        agree(device, ops.decode, x, w, None, A_log, dt_bias, norm, conv, pool, *tail)


@pytest.mark.parametrize(
    "shape",
    [(0, 4, 1, 2, 32, 32, 16), (2, 0, 1, 2, 32, 32, 16), (1, 1, 1, 1, 1, 1, 64),
     (2, 17, 1, 1, 1, 1, 16), (2, 33, 3, 9, 40, 24, 32), (1, 65, 1, 2, 256, 256, 64),
     (1, 40, 1, 1, 16, 16, 24)],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("act", [f32, bf16])
def test_chunk(device, g, shape, act):
    B, T, H, HV, K, V, C = shape
    x = tokens(g, B, T, H, HV, K, V, act)
    start = torch.randn(B, HV, K, V, generator=g).transpose(2, 3)
    pool = torch.randn(B + 1, HV, V, K, generator=g).to(act)
    rows = torch.arange(B)
    agree(device, ops.chunk, *x, start, None, None, True, C, dtype=act)
    tail = (rows.int(), rows, None, None, None, None, True, C)
    agree(device, ops.chunk_prefill, *x, pool, *tail, dtype=act)
    win = window(g, B + 1, H, HV, K, V, 5, act)
    agree(device, ops.chunk_lowrank, *x, *win, rows, None, None, None, True, C, dtype=act)


def test_more_tokens_than_a_launch_can_number_are_refused(device):
    """The kernels count the tokens of a windowed call in 16 bits."""
    shapes = ((1, 64), (1, 64), (1, 32), (1,), (1,))
    q, k, v, gate, beta = (torch.zeros(1, 2**15, *shape) for shape in shapes)
    win = windows.allocate(1, 1, 1, 64, 32, 4)
    with pytest.raises(RuntimeError, match="T = 32768: the XPU windows take up to 32767 tokens"):
        ops.recurrent_lowrank(*(x.to(device) for x in (q, k, v, gate, beta, *win)))
