"""The CUDA backend against the float64 oracles: layouts, dtypes, sequences, windows, capture."""

from __future__ import annotations

import copy
import itertools

import pytest
import test_arguments as arguments
import torch

import gdn_ops
from gdn_ops import _native, reference

_native.load()
ops = torch.ops.gdn

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA device")

# Largest error over the largest reference value: f32 sums of up to 512 terms, or one rounding.
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 6e-3, torch.float16: 8e-4}
DTYPES = list(TOLERANCE)


def close(name, got, want, dtype, factor=1.0):
    got, want = got.detach().cpu().double(), want.cpu().double()
    assert torch.isfinite(got).all(), f"{name}: not finite"
    error = (got - want).abs().max().item() if got.numel() else 0.0
    scale = max(want.abs().max().item(), 1e-3) if want.numel() else 1.0
    assert error <= factor * TOLERANCE[dtype] * scale, (name, error, scale)


def inputs(B, T, H, HV, K, V, dtype=torch.float32, seed=0):
    r = torch.Generator().manual_seed(seed)
    q, k = (torch.randn(B, T, H, K, generator=r) for _ in range(2))
    # Keys of unit length, as the model's: longer ones make the recurrence grow without bound.
    q, k = ((x / x.norm(dim=-1, keepdim=True)).to(dtype) for x in (q, k))
    v = torch.randn(B, T, HV, V, generator=r).to(dtype)
    g = -torch.rand(B, T, HV, generator=r)
    beta = torch.rand(B, T, HV, generator=r)
    return q, k, v, g, beta


def pool(P, HV, V, K, dtype=torch.float32, layout="vk", seed=1):
    r = torch.Generator().manual_seed(seed)
    if layout == "vk":
        return torch.randn(P, HV, V, K, generator=r).to(dtype)
    return torch.randn(P, HV, K, V, generator=r).to(dtype).transpose(2, 3)


def gpu(*tensors):
    return [t.cuda() if isinstance(t, torch.Tensor) else t for t in tensors]


def run_recurrent(args, state, dtype, **kwargs):
    want_o, want_s = reference.recurrent(*args, state, **kwargs)
    device_state = state.cuda()
    if state.stride() != device_state.stride():
        device_state = state.transpose(2, 3).contiguous().cuda().transpose(2, 3)
    device = {k: v.cuda() if isinstance(v, torch.Tensor) else v for k, v in kwargs.items()}
    o = ops.recurrent(*gpu(*args), device_state, **device)
    close("o", o, want_o, args[0].dtype)
    close("state", device_state, want_s, dtype)
    return o, device_state


@pytest.mark.parametrize("layout", ["vk", "kv"])
@pytest.mark.parametrize("state_dtype", DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("T", [1, 3])
def test_recurrent_dtypes_and_layouts(T, dtype, state_dtype, layout):
    args = inputs(5, T, 2, 6, 128, 128, dtype)
    index = torch.tensor([6, -1, 0, 3, 2])
    fresh = torch.tensor([True, True, False, True, True])
    run_recurrent(
        args, pool(8, 6, 128, 128, state_dtype, layout), state_dtype,
        state_indices=index, has_initial_state=fresh, qk_l2norm=True,
    )  # fmt: skip


@pytest.mark.parametrize("state_dtype", DTYPES)
@pytest.mark.parametrize("K", [64, 128, 256])
@pytest.mark.parametrize("V", [4, 60, 64, 130, 192])  # 130: no whole vectors
def test_recurrent_transposed_shapes(K, V, state_dtype):
    index, fresh = torch.tensor([4, -1, 2]), torch.tensor([True, True, False])
    for T in (1, 4):
        run_recurrent(
            inputs(3, T, 2, 6, K, V, torch.bfloat16), pool(5, 6, V, K, state_dtype, "kv"),
            state_dtype, state_indices=index, has_initial_state=fresh, qk_l2norm=True,
        )  # fmt: skip


def test_recurrent_transposed_inside_a_bigger_pool():
    """Bytes beside the pool stay, and heads whose distance is no whole vector take another path."""
    for gap in (8, 1):
        base = torch.full((3, 4, 128 * 64 + gap), 7.0, device="cuda")
        state = base[:, :, : 128 * 64].unflatten(2, (128, 64)).transpose(2, 3)
        state.normal_()
        start, args = state.cpu(), inputs(3, 2, 2, 4, 128, 64)
        want_o, want_s = reference.recurrent(*args, start)
        close("o", ops.recurrent(*gpu(*args), state), want_o, torch.float32)
        close("state", state, want_s, torch.float32)
        assert (base[:, :, 128 * 64 :] == 7).all()


@pytest.mark.parametrize("K", [1, 8, 16, 64, 80, 100, 256, 512])
@pytest.mark.parametrize("V", [1, 8, 64, 130])
def test_recurrent_shapes(K, V):
    run_recurrent(inputs(2, 2, 1, 3, K, V), pool(2, 3, V, K), torch.float32, qk_l2norm=True)


@pytest.mark.parametrize("layout", ["vk", "kv"])
def test_recurrent_packed_with_empty_sequences(layout):
    cu = torch.tensor([0, 0, 3, 3, 8, 9], dtype=torch.int32)
    args = inputs(1, 9, 2, 4, 128, 128)
    index = torch.tensor([1, 0, 4, 3, -1], dtype=torch.int32)
    state = pool(6, 4, 128, 128, layout=layout)
    run_recurrent(args, state, torch.float32, cu_seqlens=cu, state_indices=index)


@pytest.mark.parametrize("layout", ["vk", "kv"])
@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16])
def test_recurrent_speculative(state_dtype, layout):
    args = inputs(3, 3, 2, 6, 128, 128)
    table = torch.tensor([[4, 5, 6], [1, 2, -1], [7, 8, 9]])
    accepted = torch.tensor([0, 2, 3])
    run_recurrent(
        args, pool(10, 6, 128, 128, state_dtype, layout), state_dtype,
        state_indices=table, num_accepted=accepted, qk_l2norm=True,
    )  # fmt: skip


@pytest.mark.parametrize("layout", ["vk", "kv"])
def test_untouched_rows_and_poisoned_padding(layout):
    args = [x.clone() for x in inputs(4, 1, 2, 4, 128, 128)]
    for x in args[:3]:
        x[1] = x[3] = float("nan")
    state = torch.full((8, 4, 128, 128), 5.0)
    state[6] = float("nan")
    index = torch.tensor([2, -1, 6, -7])
    fresh = torch.tensor([True, True, False, True])
    device = state.cuda()
    view = device if layout == "vk" else device.transpose(2, 3)
    o = ops.recurrent(*gpu(*args), view, index.cuda(), fresh.cuda())
    assert (o[1] == 0).all() and (o[3] == 0).all() and torch.isfinite(o).all()
    untouched = [0, 1, 3, 4, 5, 7]
    assert torch.equal(device[untouched].cpu(), state[untouched])
    assert torch.isfinite(device).all()


@pytest.mark.parametrize("layout", ["vk", "kv"])
@pytest.mark.parametrize("state_dtype", DTYPES)
def test_same_bits_alone_and_in_a_batch(state_dtype, layout):
    """Large batches take other tiles than small ones; a row must not notice."""
    B, HV = 192, 16
    args = inputs(B, 1, 4, HV, 128, 128, torch.bfloat16)
    state = pool(B, HV, 128, 128, state_dtype, layout).cuda()
    assert state.stride(3 if layout == "vk" else 2) == 1
    alone = state[7:8].clone()
    o = ops.recurrent(*gpu(*args), state, qk_l2norm=True)
    o1 = ops.recurrent(*[x[7:8].cuda() for x in args], alone, qk_l2norm=True)
    assert torch.equal(o[7:8], o1) and torch.equal(state[7:8], alone)


def test_offsets_beyond_32_bits():
    base = torch.empty(2**31 + 2**17, dtype=torch.bfloat16, device="cuda")
    state = base.as_strided((3, 1, 128, 128), (2**30, 2**14, 128, 1))
    state[2] = 1.0
    args = inputs(1, 1, 1, 1, 128, 128)
    want_o, want_s = reference.recurrent(*args, torch.ones(1, 1, 128, 128))
    o = ops.recurrent(*gpu(*args), state, torch.tensor([2], device="cuda"))
    close("o", o, want_o, torch.float32)
    close("state", state[2:], want_s, torch.bfloat16)


def test_batch_beyond_the_grid():
    B = 66000
    args = inputs(B, 1, 1, 1, 2, 2)
    state = torch.zeros(B, 1, 2, 2)
    device = state.cuda()
    o = ops.recurrent(*gpu(*args), device)
    want, _ = reference.recurrent(*[x[-3:] for x in args], state[-3:])
    close("o", o[-3:], want, torch.float32)


def test_decay_of_minus_infinity_clears():
    q, k, v, g, beta = inputs(2, 2, 1, 2, 128, 128)
    g[0, 0] = -float("inf")
    run_recurrent((q, k, v, g, beta), pool(2, 2, 128, 128), torch.float32)


def test_gates_inside():
    q, k, v, _, _ = inputs(3, 2, 2, 6, 128, 128, torch.bfloat16)
    r = torch.Generator().manual_seed(3)
    packed = torch.randn(3, 2, 12, generator=r).bfloat16()
    a, b = packed[..., 1::2], packed[..., 0::2]
    A_log, dt_bias = torch.rand(6, generator=r), torch.rand(6, generator=r).bfloat16()
    state = pool(3, 6, 128, 128)
    want_o, want_s = reference.recurrent_gated(q, k, v, a, b, A_log, dt_bias, state)
    device = state.cuda()
    on = packed.cuda()
    o = ops.recurrent_gated(
        *gpu(q, k, v), on[..., 1::2], on[..., 0::2], *gpu(A_log, dt_bias), device
    )
    close("o", o, want_o, torch.bfloat16)
    close("state", device, want_s, torch.float32)
    g, beta = ops.gating(on[..., 1::2], on[..., 0::2], *gpu(A_log, dt_bias))
    want_g, want_beta = reference.gating(a, b, A_log, dt_bias)
    close("g", g, want_g, torch.float32)
    close("beta", beta, want_beta, torch.float32)


def window(P, H, HV, R, K, V, k_dtype, u_dtype):
    """Garbage that a correct kernel never reads."""
    return [
        torch.full((P, H, R, K), float("nan"), dtype=k_dtype, device="cuda"),
        torch.full((P, HV, R, V), float("nan"), dtype=u_dtype, device="cuda"),
        torch.full((P, HV, R), float("nan"), device="cuda"),
        torch.zeros(P, dtype=torch.int32, device="cuda"),
    ]


@pytest.mark.parametrize("R", [1, 4, 8, 33])
@pytest.mark.parametrize("K,V", [(128, 128), (64, 40), (256, 64)])
def test_buffered_equals_recurrent_at_every_step(R, K, V):
    B, H, HV, P = 3, 2, 4, 5
    state = pool(P, HV, V, K)
    exact = state.clone()
    device, win = state.cuda(), window(P, H, HV, R, K, V, torch.float32, torch.float32)
    index = torch.tensor([4, -1, 0])
    for step in range(2 * R + 3):
        args = inputs(B, 1, H, HV, K, V, seed=step)
        fresh = torch.tensor([step != R, True, True])
        want, exact = reference.recurrent(
            *args, exact, state_indices=index, has_initial_state=fresh, qk_l2norm=True
        )
        o = ops.recurrent_buffered(
            *gpu(*args), device, *win, index.cuda(), fresh.cuda(), qk_l2norm=True
        )
        close(f"o {step}", o, want, torch.float32, 4)
    ops.window_flush(device, *win, index.cuda())
    assert win[3].cpu().tolist() == [0] * P
    close("state", device, exact, torch.float32, 4)


@pytest.mark.parametrize("state_dtype", DTYPES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_buffered_16_bit(dtype, state_dtype):
    B, H, HV, R = 2, 2, 4, 8
    state = pool(B, HV, 128, 128, state_dtype)
    exact = state.double()
    k_dtype = torch.float32 if state_dtype == torch.float32 else dtype
    win = window(B, H, HV, R, 128, 128, k_dtype, torch.float32)
    device = state.cuda()
    for step in range(20):
        args = inputs(B, 1, H, HV, 128, 128, dtype, seed=step)
        want, exact = reference.recurrent(*args, exact, qk_l2norm=True)
        o = ops.recurrent_buffered(*gpu(*args), device, *win, qk_l2norm=True)
        close(f"o {step}", o, want, torch.bfloat16, 2)


@pytest.mark.parametrize("state_dtype,R", [(torch.float32, 8), (torch.bfloat16, 16),
                                           (torch.float16, 5)])  # fmt: skip
def test_buffered_large_batch(state_dtype, R):
    """The same bits as a row alone, and the result of recurrent."""
    B, H, HV, P = 96, 4, 16, 100
    dtype = torch.bfloat16
    start = pool(P, HV, 128, 128, state_dtype).cuda()
    index = torch.randperm(P, generator=torch.Generator().manual_seed(1))[:B]
    index[5] = -1
    index = index.cuda()
    exact, many = start.clone().float(), start.clone()
    one = start.clone()
    k_dtype = torch.float32 if state_dtype == torch.float32 else dtype
    win = window(P, H, HV, R, 128, 128, k_dtype, torch.float32)
    win[3].copy_(torch.zeros(P, dtype=torch.int32))
    win1 = [x.clone() for x in win]
    for step in range(2 * R + 3):
        args = gpu(*inputs(B, 1, H, HV, 128, 128, dtype, seed=step))
        fresh = torch.ones(B, dtype=torch.bool, device="cuda")
        fresh[step % B] = False
        want = ops.recurrent(*args, exact, index, fresh, qk_l2norm=True)
        o = ops.recurrent_buffered(*args, many, *win, index, fresh, qk_l2norm=True)
        close(f"o {step}", o, want, dtype, 2)
        assert (o[5] == 0).all()
        alone = ops.recurrent_buffered(
            *[x[7:8] for x in args], one, *win1, index[7:8], fresh[7:8], qk_l2norm=True
        )
        assert torch.equal(o[7:8], alone), step
    row = index[7]
    assert torch.equal(many[row], one[row])
    ops.window_flush(many, *win)
    close("state", many, exact, torch.bfloat16 if state_dtype != torch.float32 else state_dtype, 8)


@pytest.mark.parametrize("T,R", [(4, 8), (4, 16), (3, 3)])
def test_buffered_speculation(T, R):
    """Drafts are appended, the rejected ones dropped by the next call."""
    B, H, HV, P = 3, 2, 4, 3
    state = pool(P, HV, 128, 128)
    device, win = state.cuda(), window(P, H, HV, R, 128, 128, torch.float32, torch.float32)
    r = torch.Generator().manual_seed(9)
    now = state.double()
    accepted = torch.full((B,), T)
    history = now
    for step in range(9):
        args = inputs(B, T, H, HV, 128, 128, seed=step)
        base = now if step == 0 else torch.stack(
            [history[int(accepted[n])][n] for n in range(B)]
        )  # fmt: skip
        history = {0: base}
        for t in range(T):
            want, after = reference.recurrent(*[x[:, : t + 1] for x in args], base)
            history[t + 1] = after
        o = ops.recurrent_buffered(*gpu(*args), device, *win, num_accepted=accepted.cuda())
        close(f"o {step}", o, want, torch.float32, 4)
        accepted = torch.randint(1, T + 1, (B,), generator=r)


def same_window(name, got, want, live_rows, dtype=torch.float32, factor=4.0):
    """Counts equal, live entries close; dead slots hold anything."""
    assert got[3].cpu().tolist() == want[3].tolist(), name
    R = got[0].shape[2]
    for row in live_rows:
        packed = int(want[3][row])
        slots = [((packed >> 16 & 255) + i) % R for i in range(packed & 255)]
        for x, y in zip(got[:3], want[:3], strict=True):
            a, b = x[row][:, slots].cpu().double(), y[row][:, slots].double()
            same = torch.isneginf(a) & torch.isneginf(b)
            close(name, a.masked_fill(same, 0), b.masked_fill(same, 0), dtype, factor)


@pytest.mark.parametrize("K,V,R", [(128, 128, 5), (128, 128, 16), (64, 40, 40), (256, 130, 3)])
@pytest.mark.parametrize("T", [1, 3])
def test_lowrank(T, R, K, V):
    B, H, HV, P = 3, 2, 4, 5
    win = window(P, H, HV, R, K, V, torch.float32, torch.float32)
    want_win = tuple(torch.zeros_like(x, device="cpu") for x in win)
    index = torch.tensor([4, -1, 0])
    for step in range(2 * R // T + 3):
        args = inputs(B, T, H, HV, K, V, seed=step)
        fresh = torch.tensor([step != R // 2, True, True])
        want, want_win = reference.recurrent_lowrank(*args, *want_win, index, fresh, qk_l2norm=True)
        o = ops.recurrent_lowrank(*gpu(*args), *win, index.cuda(), fresh.cuda(), qk_l2norm=True)
        close(f"o {step}", o, want, torch.float32, 4)
        same_window(f"window {step}", win, want_win, [4, 0])


@pytest.mark.parametrize("dtype,wide", [(torch.bfloat16, True), (torch.bfloat16, False),
                                        (torch.float16, True), (torch.float16, False)])  # fmt: skip
@pytest.mark.parametrize("T,R,ratio", [(1, 16, 3), (1, 4, 1), (1, 40, 4), (2, 32, 2), (3, 7, 3),
                                       (4, 16, 3), (4, 64, 4), (4, 4, 1), (6, 16, 3), (9, 4, 2),
                                       (12, 40, 1)])  # fmt: skip
def test_lowrank_of_whole_key_heads(T, R, ratio, dtype, wide):
    """K = V = 128, 16-bit activations: a kernel of its own, four tokens at a time. From an
    empty window until its ring has gone round, with padding, a row that starts anew and rejected
    drafts."""
    B, H, P = 4, 2, 6
    HV, kept = H * ratio, torch.float32 if wide else dtype
    win = window(P, H, HV, R, 128, 128, kept, kept)
    want_win = tuple(torch.zeros_like(x, device="cpu") for x in win)
    index = torch.tensor([4, -1, 0, 2])
    r = torch.Generator().manual_seed(3)
    for step in range(R // T + 6):
        args = inputs(B, T, H, HV, 128, 128, dtype, seed=step)
        fresh = torch.tensor([step != R // T // 2, True, True, True])
        accepted = torch.randint(1, T + 1, (B,), generator=r)
        accepted[3] -= 5 * (step % 7 == 3)  # padding too
        where = (index, fresh, None, accepted)
        want, want_win = reference.recurrent_lowrank(*args, *want_win, *where, qk_l2norm=True)
        o = ops.recurrent_lowrank(*gpu(*args), *win, *gpu(*where), qk_l2norm=True)
        close(f"o {step}", o, want, dtype, 1 if wide else 2)
        same_window(f"window {step}", win, want_win, [4, 0, 2], kept)


@pytest.mark.parametrize("dtype,wide", [(torch.bfloat16, True), (torch.bfloat16, False),
                                        (torch.float16, False)])  # fmt: skip
@pytest.mark.parametrize("R,lengths", [(16, [4, 0, 1, 3, 2, 2]), (16, [4, 6, 1, 0, 9, 5]),
                                       (5, [8, 4, 3, 0, 1, 17]), (40, [1, 70, 3, 9])])  # fmt: skip
def test_lowrank_of_whole_key_heads_packed(lengths, R, dtype, wide):
    """Sequences of none to many times the four tokens that a block takes at a time."""
    H, HV, N = 2, 6, len(lengths)
    P, kept = N + 1, torch.float32 if wide else dtype
    win = window(P, H, HV, R, 128, 128, kept, kept)
    want_win = tuple(torch.zeros_like(x, device="cpu") for x in win)
    index = torch.arange(N, 0, -1)
    index[-1] = -1
    cu = torch.tensor([0, *lengths]).cumsum(0)
    r = torch.Generator().manual_seed(3)
    for step in range(6):
        args = inputs(1, int(cu[-1]), H, HV, 128, 128, dtype, seed=step)
        fresh = torch.ones(N, dtype=torch.bool)
        fresh[0] = step != 3
        accepted = torch.stack([torch.randint(1, max(n, 1) + 1, (), generator=r) for n in lengths])
        where = (index, fresh, cu, accepted)
        want, want_win = reference.recurrent_lowrank(*args, *want_win, *where, qk_l2norm=True)
        o = ops.recurrent_lowrank(*gpu(*args), *win, *gpu(*where), qk_l2norm=True)
        close(f"o {step}", o, want, dtype, 1 if wide else 2)
        same_window(f"window {step}", win, want_win, [int(i) for i in index if i >= 0], kept)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("T", [1, 3])
def test_lowrank_skips_what_weighs_nothing(T, dtype):
    """Infinite updates before an entry whose log decay is minus infinity, in a full ring."""
    B, H, HV, R = 2, 2, 6, 16
    win = window(B, H, HV, R, 128, 128, dtype, dtype)
    r = torch.Generator().manual_seed(5)
    win[0][:] = (torch.randn(B, H, R, 128, generator=r) / 11).to(dtype)
    win[1][:] = torch.randn(B, HV, R, 128, generator=r).to(dtype)
    win[2][:] = -torch.rand(B, HV, R, generator=r)
    head = 5
    win[2][:, ::2, (head + 8) % R] = -float("inf")
    win[1][:, ::2, head : head + 6] = float("inf")
    win[3][:] = R + 65536 * head
    args = inputs(B, T, H, HV, 128, 128, dtype)
    clean = [x.cpu() for x in win]
    clean[1][:, ::2, head : head + 6] = 0
    want, _ = reference.recurrent_lowrank(*args, *clean)
    close("o", ops.recurrent_lowrank(*gpu(*args), *win), want, dtype, 2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_lowrank_more_tokens_than_entries_and_rollback(dtype):
    B, H, HV, K, V, R = 2, 1, 3, 128, 128, 4
    win = window(B, H, HV, R, K, V, torch.float32, torch.float32)
    want_win = tuple(torch.zeros_like(x, device="cpu") for x in win)
    for step, (T, accepted) in enumerate([(11, [1, 1]), (3, [9, 11]), (2, [1, 3]), (6, [2, 0])]):
        args = inputs(B, T, H, HV, K, V, dtype, seed=step)
        kept = torch.tensor(accepted)
        want, want_win = reference.recurrent_lowrank(*args, *want_win, num_accepted=kept)
        o = ops.recurrent_lowrank(*gpu(*args), *win, num_accepted=kept.cuda())
        close(f"o {step}", o, want, dtype)
        same_window(f"window {step}", win, want_win, range(B))


@pytest.mark.parametrize("state_dtype", DTYPES)
@pytest.mark.parametrize("kd,ud", [(torch.bfloat16, torch.float32), (torch.float32, torch.float16),
                                   (torch.float16, torch.float16),
                                   (torch.bfloat16, torch.bfloat16)])  # fmt: skip
@pytest.mark.parametrize("l2norm", [True, False])
def test_buffered_window_dtypes(l2norm, kd, ud, state_dtype):
    """Every dtype of a window, more tokens than one group, against the same window in float64."""
    B, T, H, HV, R = 2, 6, 2, 4, 13
    dtype = torch.bfloat16
    state = pool(B, HV, 128, 128, state_dtype)
    device, want_state = state.cuda(), state.double()
    win = window(B, H, HV, R, 128, 128, kd, ud)
    want_win = tuple(torch.zeros_like(x, device="cpu").double() for x in win[:3])
    want_win = (*want_win, torch.zeros(B, dtype=torch.int32))
    for step in range(4):
        args = inputs(B, T, H, HV, 128, 128, dtype, seed=step)
        want, want_state, want_win = reference.recurrent_buffered(
            *args, want_state, *want_win, qk_l2norm=l2norm
        )
        o = ops.recurrent_buffered(*gpu(*args), device, *win, qk_l2norm=l2norm)
        close(f"o {step}", o, want, torch.bfloat16, 3)
        assert win[3].cpu().tolist() == want_win[3].tolist()
    close("state", device, want_state, torch.bfloat16, 3)


# Base, tokens, window: what has kernels of its own (csrc/cuda/kernels/buffered_launch.cuh).
USUAL = [
    (torch.float32, torch.bfloat16, torch.float32), (torch.float32, torch.float16, torch.float32),
    (torch.float32, torch.bfloat16, torch.bfloat16), (torch.float32, torch.bfloat16, torch.float16),
    (torch.float32, torch.float16, torch.float16),
    (torch.bfloat16, torch.bfloat16, torch.bfloat16),
    (torch.bfloat16, torch.bfloat16, torch.float32), (torch.float16, torch.bfloat16, torch.float32),
    (torch.float16, torch.bfloat16, torch.float16), (torch.float16, torch.float16, torch.float16),
]  # fmt: skip


def coarsest(*dtypes):
    return max(dtypes, key=TOLERANCE.get)


@pytest.mark.parametrize("state_dtype,dtype,win_dtype", USUAL)
@pytest.mark.parametrize("T,R,V", [(1, 16, 128), (2, 13, 40), (3, 33, 128), (4, 16, 72),
                                   (4, 8, 36)])  # fmt: skip
def test_buffered_usual_dtypes(T, R, V, state_dtype, dtype, win_dtype):
    """What a model has; over a fold and more, and a rejected draft."""
    B, H, HV = 2, 2, 6
    state = pool(B, HV, V, 128, state_dtype)
    exact, device = state.double(), state.cuda()
    win = window(B, H, HV, R, 128, V, win_dtype, win_dtype)
    worst = coarsest(state_dtype, dtype, win_dtype)
    for step in range(R // T + 3):
        args = inputs(B, T, H, HV, 128, V, dtype, seed=step)
        want, exact = reference.recurrent(*args, exact, qk_l2norm=True)
        kept = None if step == 0 else torch.full((B,), T, device="cuda")
        if T > 1 and step == 2:  # the same tokens behind a draft that does not hold
            drafts = inputs(B, T, H, HV, 128, V, dtype, seed=99)
            kept = torch.full((B,), T, device="cuda")
            wrong = [torch.cat([x[:, :1], y[:, 1:]], 1) for x, y in zip(args, drafts, strict=True)]
            ops.recurrent_buffered(*gpu(*wrong), device, *win, num_accepted=kept, qk_l2norm=True)
            o = ops.recurrent_buffered(
                *gpu(*[x[:, 1:] for x in args]), device, *win, num_accepted=kept // T,
                qk_l2norm=True,
            )  # fmt: skip
            close("o behind a draft", o, want[:, 1:], worst, 3)
            continue
        if T > 1 and step == 3:
            kept = kept - 1
        o = ops.recurrent_buffered(*gpu(*args), device, *win, num_accepted=kept, qk_l2norm=True)
        close(f"o {step}", o, want, worst, 3)
    ops.window_flush(device, *win)
    close("state", device, exact, worst, 3)


def same_bytes(a, b):
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


@pytest.mark.parametrize("state_dtype,dtype,win_dtype", USUAL)
@pytest.mark.parametrize("T,R", [(1, 6), (4, 16), (3, 40)])
@pytest.mark.parametrize("op", ["buffered", "decode"])
def test_buffered_many_blocks(op, T, R, state_dtype, dtype, win_dtype):
    """Calls large enough to be ordered by a kernel before them: the bytes of the same sequences in
    small calls, with padding, fresh sequences and drafts, so that folds come at any time; then the
    same step captured and replayed."""
    B, H, HV, K, P, part = 120, 4, 12, 128, 130, 40
    r = torch.Generator().manual_seed(R)
    base = pool(P, HV, 128, K, state_dtype).cuda()
    conv = torch.randn(P, 3 + T - 1, 2 * H * K + HV * 128, generator=r).to(dtype).cuda()
    many, few = (
        (conv.clone().transpose(1, 2), base.clone(),
         *window(P, H, HV, R, K, 128, win_dtype, win_dtype))
        for _ in range(2)
    )  # fmt: skip

    def call(pools, args, index, fresh, kept):
        more = {"num_accepted": kept} if T > 1 else {}
        if op == "buffered":
            return ops.recurrent_buffered(*args, *pools[1:], index, fresh, qk_l2norm=True, **more)
        if T > 1:
            more["conv_leading"] = True
        return ops.decode_buffered(*args.values(), *pools, H, K, index, fresh, **more)

    def cut(args, n):
        if op == "buffered":
            return [x[n : n + part] for x in args]
        return {**args, "projected": args["projected"][n : n + part]}

    for step in range(2 * R // T + 3):
        if op == "buffered":
            args = gpu(*inputs(B, T, H, HV, K, 128, dtype, seed=step))
        else:
            args = layer(B, T, H, HV, K, 128, dtype, seed=step)
            args = {k: x if x is None else x.cuda() for k, x in args.items()}
        index = torch.randperm(P, generator=r)[:B]
        index[torch.rand(B, generator=r) < 0.1] = -1
        fresh = torch.rand(B, generator=r) > 0.05
        kept = torch.randint(0 if step and T > 1 else T, T + 1, (B,), generator=r)
        index, fresh, kept = gpu(index, fresh, kept)
        captured = step == R // T
        if captured:
            before = [x.clone() for x in many]
        o = call(many, args, index, fresh, kept)
        pieces = [
            call(few, cut(args, n), *[x[n : n + part] for x in (index, fresh, kept)])
            for n in range(0, B, part)
        ]
        assert same_bytes(o, torch.cat(pieces)), step
        assert (o[(index < 0) | (kept < 1)] == 0).all()
        for a, b in zip(many, few, strict=True):
            assert same_bytes(a, b), step
        if captured:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                again = call(many, args, index, fresh, kept)
            for x, old in zip(many, before, strict=True):
                x.copy_(old)
            graph.replay()
            assert same_bytes(o, again)
            for a, b in zip(many, few, strict=True):
                assert same_bytes(a, b), "captured"


@pytest.mark.parametrize("state_dtype", DTYPES)
def test_a_cleared_window_forgets_what_was_not_finite(state_dtype):
    B, H, HV, R = 2, 2, 4, 8
    outputs = []
    for value in (1.0, float("inf")):
        state = pool(B, HV, 128, 128, state_dtype).cuda()
        win = window(B, H, HV, R, 128, 128, state_dtype, state_dtype)
        for step in range(2):
            args = gpu(*inputs(B, 1, H, HV, 128, 128, torch.bfloat16, seed=step))
            if step == 0:
                args[2][0, 0, 1, 5] = value
            else:
                args[3].fill_(-float("inf"))
            o = ops.recurrent_buffered(*args, state, *win, qk_l2norm=True)
        assert torch.isfinite(o).all()
        outputs.append(o)
    assert torch.equal(*outputs)


def test_window_counts_survive_more_blocks_than_a_byte_counts():
    H, HV, K, V, R = 2, 130, 64, 130, 4
    state = pool(2, HV, V, K)
    exact, device = state.double(), state.cuda()
    win = window(2, H, HV, R, K, V, torch.float32, torch.float32)
    for step in range(R + 2):
        args = inputs(2, 1, H, HV, K, V, seed=step)
        want, exact = reference.recurrent(*args, exact)
        close("o", ops.recurrent_buffered(*gpu(*args), device, *win), want, torch.float32, 4)
    assert win[3].cpu().tolist() == [2, 2]


@pytest.mark.parametrize("dtype,state_dtype", list(itertools.product(DTYPES, DTYPES)))
def test_window_of_any_dtypes(dtype, state_dtype):
    """Every dtype of keys and updates beside those of tokens and base, in the general kernel."""
    B, T, H, HV, R, K, V = 2, 3, 2, 4, 5, 40, 36
    for kd, ud, layout in itertools.product(DTYPES, DTYPES, ["vk", "kv"]):
        state = pool(B, HV, V, K, state_dtype, layout)
        device, want_state = state.cuda(), state.double()
        win = window(B, H, HV, R, K, V, kd, ud)
        want_win = [torch.zeros_like(x, device="cpu").double() for x in win[:3]]
        want_win = (*want_win, torch.zeros(B, dtype=torch.int32))
        coarse = max((dtype, state_dtype, kd, ud), key=lambda d: torch.finfo(d).eps)
        for step in range(4):
            args = inputs(B, T, H, HV, K, V, dtype, seed=step)
            want, want_state, want_win = reference.recurrent_buffered(
                *args, want_state, *want_win, qk_l2norm=True
            )
            o = ops.recurrent_buffered(*gpu(*args), device, *win, qk_l2norm=True)
            close(f"o {step}", o, want, coarse, 3)
            assert win[3].cpu().tolist() == want_win[3].tolist()
        close("state", device, want_state, coarse, 3)


def views(win, gap):
    """The window inside larger tensors whose other elements are `gap` wide and all sevens."""
    bases, inside = [], []
    for x in win[:3]:
        base = torch.full((*x.shape[:2], x.shape[2] + 1, *x.shape[3:]), 7.0, dtype=x.dtype)
        base = torch.nn.functional.pad(base, (gap, gap), value=7.0).cuda()
        view = base[:, :, 1:, gap:-gap] if x.dim() == 4 else base[:, :, gap + 1 : -gap]
        bases.append(base)
        inside.append(view.copy_(x))
    return bases, [*inside, win[3].repeat_interleave(3)[::3]]


@pytest.mark.parametrize("K,layout", [(128, "vk"), (128, "kv"), (64, "vk"), (96, "kv")])
def test_strided_windows(K, layout):
    """Views whose keys start off a vector, every other element of q, k, v: what a dense call gives,
    and nothing beside the views is touched."""
    B, H, HV, R, V = 3, 2, 6, 5, 40
    index, has = torch.tensor([4, -1, 2]), torch.tensor([True, True, False])
    state = pool(6, HV, V, K, layout=layout).cuda()
    plain = window(6, H, HV, R, K, V, torch.float32, torch.bfloat16)
    bases, mine = views(plain, 3)
    low = window(6, H, HV, R, K, V, torch.float32, torch.bfloat16)
    low_bases, my_low = views(low, 3)
    dense = state.contiguous()
    wide = torch.full((6, 2 * HV, *((V, K) if layout == "vk" else (K, V))), 7.0, device="cuda")
    own = wide[:, ::2] if layout == "vk" else wide[:, ::2].transpose(2, 3)
    own.copy_(state)
    for step in range(8):
        args = gpu(*inputs(B, 1 + step % 2, H, HV, K, V, torch.bfloat16, seed=step))
        where = (index.cuda(), has.cuda() if step == 2 else None)
        odd = [x.repeat_interleave(2, -1)[..., ::2] for x in args[:3]] + args[3:]
        want = ops.recurrent_buffered(*args, dense, *plain, *where, qk_l2norm=True)
        close("o", ops.recurrent_buffered(*odd, own, *mine, *where, qk_l2norm=True), want,
              torch.bfloat16)  # fmt: skip
        want = ops.recurrent_lowrank(*args, *low, *where, qk_l2norm=True)
        close("low rank", ops.recurrent_lowrank(*odd, *my_low, *where, qk_l2norm=True), want,
              torch.bfloat16)  # fmt: skip
        for a, b in ((plain, mine), (low, my_low)):
            counts = b[3].cpu()
            same_window("window", b, [*(x.cpu() for x in a[:3]), counts], [4, 2], torch.bfloat16)
            assert torch.equal(a[3].cpu(), counts)
    for x, y in ((dense, plain), (own, mine)):
        ops.window_flush(x, *y, index.cuda())
    close("state", own, dense, torch.bfloat16)
    assert (wide[:, 1::2] == 7).all()
    for base, view in zip(bases + low_bases, mine[:3] + my_low[:3], strict=True):
        view.fill_(7.0)
        assert (base == 7).all()


@pytest.mark.parametrize("K", [100, 128])
def test_layouts_of_a_base_give_the_same_bits(K):
    """In the general kernel, which K = 128 takes by keys that start off a vector."""
    B, H, HV, R, V = 4, 2, 6, 5, 72
    found = []
    for layout in ("vk", "kv"):
        state = pool(B, HV, V, K, torch.bfloat16).cuda()
        if layout == "kv":
            state = state.transpose(2, 3).contiguous().transpose(2, 3)
        _, win = views(window(B, H, HV, R, K, V, torch.bfloat16, torch.float32), 1)
        outs = [
            ops.recurrent_buffered(*gpu(*inputs(B, T, H, HV, K, V, seed=T)), state, *win)
            for T in (1, 3, 4, 2)
        ]
        ops.window_flush(state, *win)
        found.append([*outs, state])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    assert torch.cat(found[0][:-1], 1).isfinite().all()


def test_window_offsets_beyond_32_bits():
    """Inside one row: entries 2^30 elements apart."""
    H = HV = 1
    R, K, V = 3, 128, 128
    memory = torch.empty(2**31 + 2**17, dtype=torch.bfloat16, device="cuda")
    far = memory.as_strided((1, 1, R, K), (2**30, 2**30, 2**30, 1))
    near = torch.empty(1, 1, R, K, dtype=torch.bfloat16, device="cuda")
    state = pool(1, HV, V, K)
    for keys, updates in ((far, near), (near, far)):
        win = [keys, updates, torch.empty(1, 1, R, device="cuda"),
               torch.zeros(1, dtype=torch.int32, device="cuda")]  # fmt: skip
        exact, device = state.double(), state.cuda()
        for step in range(R + 2):
            args = inputs(1, 1, H, HV, K, V, torch.bfloat16, seed=step)
            want, exact = reference.recurrent(*args, exact, qk_l2norm=True)
            o = ops.recurrent_buffered(*gpu(*args), device, *win, qk_l2norm=True)
            close(f"o {step}", o, want, torch.bfloat16, 2)
        ops.window_flush(device, *win)
        close("state", device, exact, torch.bfloat16, 2)


def test_window_batch_beyond_the_grid():
    B, R, K, V = 66000, 2, 3, 2
    win, low = (window(B, 1, 1, R, K, V, torch.float32, torch.float32) for _ in range(2))
    state = torch.zeros(B, 1, V, K, device="cuda")
    exact, want_low = state[-3:].cpu(), tuple(torch.zeros_like(x[-3:], device="cpu") for x in low)
    for step in range(4):
        args = inputs(B, 1, 1, 1, K, V, seed=step)
        last = [x[-3:] for x in args]
        o = ops.recurrent_buffered(*gpu(*args), state, *win)
        want, exact = reference.recurrent(*last, exact)
        close("o", o[-3:], want, torch.float32, 4)
        o = ops.recurrent_lowrank(*gpu(*args), *low)
        want, want_low = reference.recurrent_lowrank(*last, *want_low)
        close("low rank", o[-3:], want, torch.float32, 4)
    ops.window_flush(state, *win)
    close("state", state[-3:], exact, torch.float32, 4)
    assert (win[3] == 0).all() and torch.equal(low[3], torch.full_like(low[3], R + 65536 * (4 % R)))


@pytest.mark.parametrize("K", [100, 128])
def test_a_packed_sequence_longer_than_its_window_is_padding(K):
    """Only the device knows its length: zeros, and nothing written."""
    H, HV, R, V = 1, 3, 3, 40
    cu = torch.tensor([0, 2, 6, 9], device="cuda")
    state = pool(3, HV, V, K, layout="kv" if K == 128 else "vk").cuda()
    win = window(3, H, HV, R, K, V, torch.float32, torch.float32)
    before, args = state[1].clone(), gpu(*inputs(1, 9, H, HV, K, V))
    alone = ops.recurrent_buffered(
        *[x[:, 6:] for x in args], state[2:].clone(), *[x[2:].clone() for x in win]
    )
    o = ops.recurrent_buffered(*args, state, *win, cu_seqlens=cu)
    assert (o[:, 2:6] == 0).all() and torch.equal(o[:, 6:], alone) and o[:, :2].ne(0).any()
    assert win[3].tolist() == [2 + 256, 0, 3 + 2 * 256] and torch.equal(state[1], before)
    assert win[0][1].isnan().all() and win[1][1].isnan().all() and win[2][1].isnan().all()


def test_a_length_beyond_the_tokens_is_cut():
    """The last sequence has three tokens and says six: only the device knows."""
    K, R, args = 128, 8, gpu(*inputs(1, 8, 1, 3, 128, 128, torch.bfloat16))
    results = []
    for end in (8, 11):
        win = window(2, 1, 3, R, K, K, torch.bfloat16, torch.bfloat16)
        o = ops.recurrent_lowrank(*args, *win, cu_seqlens=torch.tensor([0, 5, end], device="cuda"))
        results.append((o, win[3], *[x[row, :, : 5 - 2 * row] for x in win[:3] for row in (0, 1)]))
    assert results[0][1].tolist() == [5 + 256 * 4, 3 + 256 * 2]
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("op", ["recurrent", "transposed", "buffered", "lowrank", "lowrank heads"])
@pytest.mark.parametrize("state_dtype", DTYPES)
def test_drift_over_2000_steps(state_dtype, op):
    """The error against float64 settles: it must not grow with the steps. Low rank is compared with
    its own approximation, the state that the last R updates make; "heads": the kernel that takes 16
    bits only, whose outputs are rounded."""
    B, H, HV, K, steps, R = 2, 1, 2, 128, 2000, 16
    r = torch.Generator().manual_seed(11)
    kw = {"generator": r, "dtype": torch.float64}
    q, k = (torch.randn(steps, B, H, K, **kw) for _ in range(2))
    q, k = ((x / x.norm(dim=-1, keepdim=True)).float() for x in (q, k))
    v = torch.randn(steps, B, HV, K, **kw).float()
    g = -0.05 * torch.rand(steps, B, HV, **kw).float()
    beta = torch.rand(steps, B, HV, **kw).float()
    q, k, v, g, beta = gpu(q, k, v, g, beta)
    state = torch.zeros(B, HV, K, K, dtype=state_dtype, device="cuda")
    win = window(B, H, HV, R, K, K, state_dtype, torch.float32)
    heads = op == "lowrank heads"
    if heads:
        op = "lowrank"
        narrow = torch.bfloat16 if state_dtype == torch.float32 else state_dtype
        q, k, v = (x.to(narrow) for x in (q, k, v))
        win = window(B, H, HV, R, K, K, state_dtype, state_dtype)
    S = torch.zeros(B, HV, K, K, dtype=torch.float64, device="cuda")
    errors, entries = [], []
    for t in range(steps):
        row = [x[t][:, None] for x in (q, k, v, g, beta)]
        if op == "recurrent":
            o = ops.recurrent(*row, state)
        elif op == "transposed":
            o = ops.recurrent(*row, state.transpose(2, 3))
        elif op == "buffered":
            o = ops.recurrent_buffered(*row, state, *win)
        else:
            o = ops.recurrent_lowrank(*row, *win)
        key, query = (x[t].double().repeat_interleave(HV // H, 1) for x in (k, q))
        if op == "lowrank" and entries:
            us, keys, logs = (torch.stack(x, -1) for x in zip(*entries[-R:], strict=True))
            after = logs.flip(-1).cumsum(-1).flip(-1) - logs
            S = torch.einsum("bhvr,bhkr->bhvk", us * after.exp()[:, :, None], keys)
        S = S * g[t].double().exp()[..., None, None]
        u = beta[t].double()[..., None] * (v[t].double() - torch.einsum("bhvk,bhk->bhv", S, key))
        S = S + u[..., None] * key[:, :, None]
        entries.append((u, key, g[t].double()))
        want = torch.einsum("bhvk,bhk->bhv", S, query) * K**-0.5
        errors.append((o[:, 0].double() - want).norm() / want.norm())
    errors = torch.stack(errors).cpu()
    most = {torch.float32: 1e-6, torch.float16: 1.5e-3, torch.bfloat16: 1.2e-2}[state_dtype]
    most = 3e-3 if heads and state_dtype == torch.float32 else most
    assert errors[-200:].mean() < most, errors[-200:].mean()
    assert errors[-200:].mean() < 2 * errors[200:400].mean() + 1e-7


@pytest.mark.parametrize("op", ["recurrent", "buffered", "lowrank"])
@pytest.mark.parametrize("K,V", [(128, 128), (100, 72)])
def test_same_bits_over_runs_and_neighbours(K, V, op):
    B, H, HV, R = 32, 4, 12, 6
    args = gpu(*inputs(B, 1, H, HV, K, V, torch.bfloat16))
    start = pool(B, HV, V, K, torch.bfloat16).cuda()

    def run(rows, steps=R + 3):
        state = start[rows].clone()
        win = window(len(rows), H, HV, R, K, V, torch.bfloat16, torch.bfloat16)
        mine = [x[rows] for x in args]
        outs = []
        for _ in range(steps):
            if op == "recurrent":
                outs.append(ops.recurrent(*mine, state))
            elif op == "buffered":
                outs.append(ops.recurrent_buffered(*mine, state, *win))
            else:
                outs.append(ops.recurrent_lowrank(*mine, *win))
        return torch.cat(outs, 1), state

    every = list(range(B))
    o, state = run(every)
    for _ in range(3):
        again, state2 = run(every)
        assert torch.equal(o, again) and torch.equal(state, state2)
    some = [31, 0, 17]
    few, state2 = run(some)
    assert torch.equal(few, o[some]) and torch.equal(state2, state[some])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("initial,state_len", [(False, None), (True, None), (True, 5)])
def test_conv1d_and_its_gradients(initial, state_len, dtype):
    B, T, C, W = 2, 9, 24, 4
    r = torch.Generator().manual_seed(12)
    x = torch.randn(B, T, C, generator=r).to(dtype)
    weight, bias = (torch.randn(*s, generator=r).to(dtype) for s in ((C, W), (C,)))
    state = torch.randn(B, C, state_len or W - 1, generator=r).to(dtype) if initial else None
    given = [x, weight, bias, state]

    def grads(tensors, convert, call):
        leaves = [None if t is None else convert(t).requires_grad_() for t in tensors]
        y, final = call(*leaves)
        (y.square().sum() + final.square().sum()).backward()
        return y, final, [t.grad for t in leaves if t is not None]

    want = grads(given, lambda t: t.double(), lambda x, w, b, s: reference.conv1d(
        x, w, b, s, state_len=state_len))  # fmt: skip
    got = grads(given, lambda t: t.cuda(), lambda x, w, b, s: ops.conv1d(
        x, w, b, s, state_len=state_len))  # fmt: skip
    for name, a, b in zip(("y", "final", "grads"), got, want, strict=True):
        for i, (c, d) in enumerate(zip(a, b, strict=True) if name == "grads" else [(a, b)]):
            close(f"{name} {i}", c, d, dtype, 8)


def test_conv1d_packed():
    r = torch.Generator().manual_seed(13)
    cu = torch.tensor([0, 4, 4, 300, 900], dtype=torch.int32)
    x, weight = torch.randn(1, 900, 40, generator=r), torch.randn(40, 4, generator=r)
    state = torch.randn(4, 40, 3, generator=r)
    want, want_state = reference.conv1d(x, weight, None, state, cu)
    y, final = ops.conv1d(*gpu(x, weight), None, state.cuda(), cu.cuda())
    close("y", y, want, torch.float32)
    assert torch.equal(final.cpu(), want_state.float())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("L,leading,channels_last", [(3, False, False), (4, False, False),
                                                     (3, True, True), (5, True, True),
                                                     (4, False, True)])  # fmt: skip
@pytest.mark.parametrize("T", [1, 2, 6])
def test_short_conv(T, L, leading, channels_last, dtype):
    B, C, W, P = 4, 272, 4, 6
    r = torch.Generator().manual_seed(5)
    x = torch.randn(B, T, C, generator=r).to(dtype)
    weight, bias = (torch.randn(*s, generator=r).to(dtype) for s in ((C, W), (C,)))
    if channels_last:
        state = torch.randn(P, L, C, generator=r).to(dtype).transpose(1, 2)
    else:
        state = torch.randn(P, C, L, generator=r).to(dtype)
    index, fresh = torch.tensor([3, -1, 0, 5]), torch.tensor([True, True, True, False])
    args = {"state_indices": index, "has_initial_state": fresh}
    want, want_state = reference.short_conv(x, weight, bias, state, conv_leading=leading, **args)
    device = state.cuda()
    if channels_last:
        device = state.transpose(1, 2).contiguous().cuda().transpose(1, 2)
    y = ops.short_conv(
        *gpu(x, weight, bias), device, index.cuda(), fresh.cuda(), conv_leading=leading
    )
    close("y", y, want, dtype)
    assert torch.equal(device.cpu(), want_state.to(dtype))


def test_short_conv_packed_and_long():
    r = torch.Generator().manual_seed(6)
    cu = torch.tensor([0, 300, 300, 301, 1000])
    x, weight = torch.randn(1, 1000, 40, generator=r), torch.randn(40, 4, generator=r)
    state = torch.randn(4, 40, 3, generator=r)
    want, want_state = reference.short_conv(x, weight, None, state, cu_seqlens=cu)
    device = state.cuda()
    y = ops.short_conv(*gpu(x, weight), None, device, cu_seqlens=cu.cuda())
    close("y", y, want, torch.float32)
    assert torch.equal(device.cpu(), want_state.float())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("lengths", [[300, 0, 1, 64, 255, 513, 0, 3, 0], [1, 0, 2, 1], [256, 256],
                                     [i % 5 for i in range(300)]])  # fmt: skip
@pytest.mark.parametrize("channels_last", [True, False])
def test_conv_gating_packed(channels_last, lengths, dtype):
    """Blocks take pieces of sequences, of which some lie behind the last token."""
    H, HV, K, N = 1, 2, 64, len(lengths)
    C, P = 2 * H * K + HV * 128, N + 2
    r = torch.Generator().manual_seed(8)
    index = torch.randperm(P, generator=r)[:N]
    index[1] = -1
    fresh = torch.rand(N, generator=r) < 0.7
    cu = torch.tensor([0, *lengths]).cumsum(0)
    T = int(cu[-1])
    x = torch.randn(1, T, C + 2 * HV, generator=r).to(dtype)
    weight = (torch.randn(C, 4, generator=r) / 2).to(dtype)
    A_log, dt_bias = torch.rand(2, HV, generator=r)
    state = torch.randn(P, C, 4, generator=r).to(dtype)
    args = (x[..., :C], x[..., C : C + HV], x[..., C + HV :], weight, None, A_log, dt_bias)
    where = (index, fresh, cu)
    *want, want_state = reference.conv_gating(*args, state, H, K, *where, qk_l2norm=True)
    device = state.cuda()
    if channels_last:
        device = device.transpose(1, 2).contiguous().transpose(1, 2)
    args = gpu(*args)
    got = ops.conv_gating(*args, device, H, K, *gpu(*where), qk_l2norm=True)
    for name, a, b in zip("qkv", got, want, strict=False):
        close(name, a, b, dtype)
    for name, a, b in zip(("g", "beta"), got[3:], want[3:], strict=True):
        close(name, a, b, torch.float32 if dtype == torch.float32 else dtype)
    assert torch.equal(device.cpu(), want_state.to(dtype))


def test_short_conv_speculative():
    r = torch.Generator().manual_seed(7)
    x, weight = torch.randn(3, 3, 40, generator=r), torch.randn(40, 4, generator=r)
    state, accepted = torch.randn(5, 40, 5, generator=r), torch.tensor([1, 3, 0])
    index = torch.tensor([4, 2, 1])
    want, want_state = reference.short_conv(
        x, weight, None, state, index, num_accepted=accepted, conv_leading=True
    )
    device = state.cuda()
    y = ops.short_conv(
        *gpu(x, weight), None, device, index.cuda(), num_accepted=accepted.cuda(),
        conv_leading=True,
    )  # fmt: skip
    close("y", y, want, torch.float32)
    assert torch.equal(device.cpu(), want_state.float())


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("T", [1, 3])
def test_more_accepted_drafts_than_a_history_holds(T, channels_last):
    """Only the device knows the count: it means the last columns, and none behind them is read."""
    r = torch.Generator().manual_seed(7)
    x, weight = torch.randn(2, T, 64, generator=r), torch.randn(64, 4, generator=r)
    start = torch.randn(2, 64, 6, generator=r)
    results = []
    for count in (4, 5, 2**31 - 1, 2**62):
        state = start.cuda()
        if channels_last:
            state = state.transpose(1, 2).contiguous().transpose(1, 2)
        accepted = torch.tensor([count, 2], device="cuda")
        y = ops.short_conv(*gpu(x, weight), None, state, num_accepted=accepted, conv_leading=True)
        results.append(torch.cat([y.mT, state], 2))
    assert all(torch.equal(results[0], other) for other in results[1:])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("L", [3, 6])
@pytest.mark.parametrize("form", ["trailing", "leading", "accepted"])
@pytest.mark.parametrize("T,lengths", [(2, None), (4, None), (7, None), (300, None),
                                       (20, [4, 0, 15, 1]), (700, [2, 600, 0, 98])])  # fmt: skip
def test_layouts_of_a_convolution_give_the_same_bits(T, lengths, form, L, dtype):
    """Channels together are taken in vectors, columns together one by one."""
    B, P, C = 4, 6, 24
    L += T - 1 if form == "accepted" else 0
    r = torch.Generator().manual_seed(5)
    x = torch.randn(1 if lengths else B, T, C, generator=r).to(dtype).cuda()
    weight, bias = (torch.randn(*s, generator=r).to(dtype).cuda() for s in ((C, 4), (C,)))
    taps = torch.randn(P, C, L, generator=r).to(dtype).cuda()
    last = taps.transpose(1, 2).contiguous().transpose(1, 2)
    index = torch.tensor([3, -1, 0, 5], device="cuda")
    has = torch.tensor([True, True, True, False], device="cuda")
    cu = torch.tensor([0, *itertools.accumulate(lengths)], device="cuda") if lengths else None
    more = {} if form == "trailing" else {"conv_leading": True}
    if form == "accepted":
        more["num_accepted"] = torch.tensor([L - 2, 2, 1, 1], device="cuda")
    outs = [
        ops.short_conv(x, weight, bias, pool_, index, has, cu, **more) for pool_ in (taps, last)
    ]
    assert torch.equal(*outs) and torch.equal(taps, last) and outs[0].isfinite().all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("V,first", [(128, 64), (128, 61), (20, 3)])
def test_gated_rms_norm_of_heads_inside_tokens(V, first, dtype):
    r = torch.Generator().manual_seed(9)
    x = torch.randn(2, 5, 6, V, generator=r).to(dtype)[:, :, 1:5]
    gate = torch.randn(2, 5, 7 * V, generator=r).to(dtype)[..., first:][..., : 4 * V]
    gate, w = gate.unflatten(-1, (4, V)), torch.randn(V, generator=r)
    y = ops.gated_rms_norm(*gpu(x, gate, w))
    close("y", y, reference.gated_rms_norm(x, gate, w), dtype, 2)
    dense = ops.gated_rms_norm(*(t.cuda().contiguous() for t in (x, gate, w)))
    assert torch.equal(y, dense) and y.is_contiguous()


@pytest.mark.parametrize("dtype,gate,weight", list(itertools.product(DTYPES, DTYPES, [0, 1])))
@pytest.mark.parametrize("V", [128, 256, 100])
def test_gated_rms_norm(V, dtype, gate, weight):
    r = torch.Generator().manual_seed(8)
    x = torch.randn(3, 5, V, generator=r).to(dtype)
    z = torch.randn(3, 5, 2 * V, generator=r).to(gate)[..., :V]
    w = torch.randn(V, generator=r).to(dtype if weight else torch.float32)
    y = ops.gated_rms_norm(*gpu(x, z, w))
    close("y", y, reference.gated_rms_norm(x, z, w), dtype, 2)


def layer(B, T, H, HV, K, V, dtype, seed=2):
    r = torch.Generator().manual_seed(seed)
    C = 2 * H * K + HV * V
    D = C + HV * V + 2 * HV
    return {
        "projected": torch.randn(B, T, D, generator=r).to(dtype),
        "conv_weight": (torch.randn(C, 4, generator=r) / 2).to(dtype),
        "conv_bias": None,
        "A_log": torch.rand(HV, generator=r),
        "dt_bias": torch.rand(HV, generator=r),
        "norm_weight": torch.rand(V, generator=r).to(dtype),
    }


@pytest.mark.parametrize("layout", ["vk", "kv"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("T,K,V", [(1, 128, 128), (3, 128, 128), (1, 48, 20)])
def test_decode(T, K, V, dtype, layout):
    H, HV, P, B = 2, 6, 5, 3
    x = layer(B, T, H, HV, K, V, dtype)
    C = 2 * H * K + HV * V
    conv = torch.randn(P, C, 3, generator=torch.Generator().manual_seed(4)).to(dtype)
    state = pool(P, HV, V, K, layout=layout)
    index = torch.tensor([3, -1, 1])
    x["projected"][1] = float("nan")
    want, want_conv, want_state = reference.decode(*x.values(), conv, state, H, K, index)
    conv_d, state_d = conv.cuda(), state.cuda()
    y = ops.decode(*gpu(*x.values()), conv_d, state_d, H, K, index.cuda())
    assert (y[1] == 0).all()
    live = [0, 2]
    close("y", y[live], want[live], dtype, 4)
    assert torch.equal(conv_d.cpu(), want_conv.to(dtype))
    close("state", state_d, want_state, dtype, 2)


@pytest.mark.parametrize("op", ["decode", "decode_buffered", "decode_lowrank"])
@pytest.mark.parametrize("K,V", [(128, 128), (40, 24)])
def test_every_other_column_of_a_projection(K, V, op):
    H, HV, P, R = 2, 6, 3, 4
    x = layer(P, 2, H, HV, K, V, torch.bfloat16)
    wide = x["projected"].repeat_interleave(2, -1)
    found = []
    for projected in (x["projected"].cuda(), wide.cuda()[..., ::2]):
        conv = torch.ones(P, 2 * H * K + HV * V, 3, device="cuda").bfloat16()
        base = [] if op == "decode_lowrank" else [pool(P, HV, V, K).cuda()]
        win = window(P, H, HV, R, K, V, torch.float32, torch.float32) if op != "decode" else []
        args = [projected, *gpu(*list(x.values())[1:]), conv, *base, *win, H, K]
        found.append(getattr(ops, op)(*args))
    close("y", *found, torch.bfloat16)


def test_decode_buffered_follows_decode():
    H, HV, K, V, P, B, R = 2, 6, 128, 128, 4, 3, 4
    index = torch.tensor([3, 0, 1], device="cuda")
    conv = torch.randn(P, 2 * H * K + HV * V, 3, device="cuda").bfloat16()
    state = pool(P, HV, V, K).cuda()
    conv2, state2 = conv.clone(), state.clone()
    win = window(P, H, HV, R, K, V, torch.float32, torch.float32)
    for step in range(10):
        x = gpu(*layer(B, 1, H, HV, K, V, torch.bfloat16, seed=step).values())
        y = ops.decode(*x, conv, state, H, K, index)
        y2 = ops.decode_buffered(*x, conv2, state2, *win, H, K, index)
        close(f"y {step}", y2, y, torch.bfloat16, 2)
        assert torch.equal(conv, conv2)
    ops.window_flush(state2, *win)
    close("state", state2, state, torch.float32, 50)


@pytest.mark.parametrize("op,T", [("buffered", 1), ("buffered", 3), ("lowrank", 1), ("lowrank", 3)])
@pytest.mark.parametrize("K,V,layout", [(128, 128, "vk"), (128, 130, "vk"), (128, 128, "kv"),
                                        (40, 24, "kv"), (100, 100, "vk")])  # fmt: skip
def test_decode_windows(K, V, layout, op, T):
    """Against the oracle, padding included; the norm is a launch of its own but for the first."""
    H, HV, P, B, R = 2, 6, 5, 3, 4
    dtype = torch.bfloat16
    index = torch.tensor([3, -1, 1])
    conv = torch.randn(P, 2 * H * K + HV * V, 3, generator=torch.Generator().manual_seed(4))
    conv_d = conv.to(dtype).cuda()
    want_conv = conv.to(dtype).double()
    state = pool(P, HV, V, K, layout=layout)
    want_state, state_d = state.double(), state.cuda()
    assert state_d.stride() == state.stride()
    win = window(P, H, HV, R, K, V, torch.float32, torch.float32)
    want_win = tuple(torch.zeros_like(x, device="cpu") for x in win)
    for step in range(7):
        x = layer(B, T, H, HV, K, V, dtype, seed=step)
        x["projected"][1] = float("nan")
        if op == "buffered":
            want, want_conv, want_state, want_win = reference.decode_buffered(
                *x.values(), want_conv, want_state, *want_win, H, K, index
            )
            y = ops.decode_buffered(*gpu(*x.values()), conv_d, state_d, *win, H, K, index.cuda())
        else:
            want, want_conv, want_win = reference.decode_lowrank(
                *x.values(), want_conv, *want_win, H, K, index
            )
            y = ops.decode_lowrank(*gpu(*x.values()), conv_d, *win, H, K, index.cuda())
        assert (y[1] == 0).all()
        close(f"y {step}", y[[0, 2]], want[[0, 2]], dtype, 4)
        assert win[3].cpu().tolist() == want_win[3].tolist()
    assert torch.equal(conv_d.cpu(), want_conv.to(dtype))


@pytest.mark.parametrize("state_dtype,dtype,win_dtype", USUAL)
@pytest.mark.parametrize("V", [128, 136])
def test_decode_buffered_verifies_drafts(V, state_dtype, dtype, win_dtype):
    """Against the oracle, some drafts rejected; layouts of the histories give the same bits."""
    H, HV, K, P, B, R, T = 2, 6, 128, 5, 4, 9, 4
    index = torch.tensor([3, -1, 1, 4])
    r = torch.Generator().manual_seed(4)
    taps = torch.randn(P, 2 * H * K + HV * V, 3 + T - 1, generator=r).to(dtype)
    state = pool(P, HV, V, K, state_dtype)
    accepted = torch.randint(1, T + 1, (6, B), generator=r, dtype=torch.int32)
    found = []
    for channels_last in (False, True):
        conv = taps.cuda()
        if channels_last:
            conv = conv.transpose(1, 2).contiguous().transpose(1, 2)
        base, win = state.cuda(), window(P, H, HV, R, K, V, win_dtype, win_dtype)
        want_conv, want_state = taps.double(), state.double()
        want_win = tuple(torch.zeros_like(x, device="cpu").double() for x in win[:3])
        want_win = (*want_win, torch.zeros(P, dtype=torch.int32))
        ys = []
        for step, kept in enumerate(accepted):
            x = layer(B, T, H, HV, K, V, dtype, seed=step)
            x["projected"][1] = float("nan")
            more = {"num_accepted": kept, "conv_leading": True}
            want, want_conv, want_state, want_win = reference.decode_buffered(
                *x.values(), want_conv, want_state, *want_win, H, K, index, **more
            )
            more["num_accepted"] = kept.cuda()
            y = ops.decode_buffered(*gpu(*x.values()), conv, base, *win, H, K, index.cuda(), **more)
            assert (y[1] == 0).all()
            live = [0, 2, 3]
            close(f"y {step}", y[live], want[live], coarsest(dtype, state_dtype, win_dtype), 4)
            assert win[3].cpu().tolist() == want_win[3].tolist()
            ys.append(y)
        assert torch.equal(conv.cpu(), want_conv.to(dtype))
        found.append([*ys, conv, base, *win])
    for a, b in zip(*found, strict=True):  # as bytes: unused entries of the window are NaN
        assert torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


@pytest.mark.parametrize("state_dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("L", [3, 4])
@pytest.mark.parametrize("V", [128, 136])
def test_layouts_of_histories_give_the_same_bits(V, L, state_dtype):
    H, HV, K, P, B, R = 2, 6, 128, 5, 4, 3
    index = torch.tensor([3, -1, 1, 4], dtype=torch.int32, device="cuda")
    fresh = torch.tensor([True, True, False, True], device="cuda")
    taps = torch.randn(P, 2 * H * K + HV * V, L, device="cuda").bfloat16()
    last = taps.transpose(1, 2).contiguous().transpose(1, 2)
    state = pool(P, HV, V, K, dtype=state_dtype).cuda()
    found = []
    for conv in (taps, last):
        base, win = state.clone(), window(P, H, HV, R, K, V, state_dtype, state_dtype)
        ys = []
        for step in range(5):
            x = layer(B, 1, H, HV, K, V, torch.bfloat16, seed=step)
            x["conv_bias"] = torch.randn(taps.shape[1], generator=torch.Generator().manual_seed(9))
            has = fresh if step == 2 else None
            ys.append(ops.decode_buffered(*gpu(*x.values()), conv, base, *win, H, K, index, has))
        found.append([*ys, conv, base, *win])
    for a, b in zip(*found, strict=True):  # as bytes: unused entries of the window are NaN
        assert torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))
    assert torch.cat(found[0][:5]).isfinite().all() and found[0][4].norm() > 0


@pytest.mark.parametrize("K,layout", [(128, "vk"), (128, "kv"), (100, "vk")])
def test_capture_and_replay(K, layout):
    """A captured step, replayed with other rows, lengths and flags, equals the eager step."""
    args = gpu(*inputs(4, 1, 2, 4, K, 128, torch.bfloat16))
    state = pool(8, 4, 128, K, layout=layout).cuda()
    win = window(8, 2, 4, 4, K, 128, torch.float32, torch.float32)
    low = window(8, 2, 4, 4, K, 128, torch.float32, torch.float32)
    index = torch.tensor([0, 1, 2, 3], device="cuda", dtype=torch.int32)
    keep = state.clone()
    ops.recurrent_buffered(*args, state, *win, index)
    ops.recurrent_lowrank(*args, *low, index)
    torch.cuda.synchronize()
    graph, flush = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o = ops.recurrent_buffered(*args, state, *win, index)
        o_low = ops.recurrent_lowrank(*args, *low, index)
    with torch.cuda.graph(flush):
        ops.window_flush(state, *win, index)
    state.copy_(keep)
    win[3].zero_()
    low[3].zero_()
    index.copy_(torch.tensor([7, -1, 5, 2]))
    exact = keep.double().cpu()
    entries = tuple(torch.zeros_like(x, device="cpu") for x in low)
    for _ in range(6):
        graph.replay()
        host = [x.cpu() for x in args]
        want, exact = reference.recurrent(*host, exact, index.cpu())
        close("o", o, want, torch.bfloat16)
        want, entries = reference.recurrent_lowrank(*host, *entries, index.cpu())
        close("o", o_low, want, torch.bfloat16)
    flush.replay()
    close("state", state, exact, torch.float32, 4)
    assert win[3].tolist() == [0] * 8


def test_other_stream():
    args = gpu(*inputs(2, 1, 1, 1, 128, 128))
    state = pool(2, 1, 128, 128).cuda()
    want, _ = reference.recurrent(*[x.cpu() for x in args], state.cpu())
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        o = ops.recurrent(*args, state)
    side.synchronize()
    close("o", o, want, torch.float32)


def test_unbuilt_ops_are_refused_by_name():
    with pytest.raises(NotImplementedError, match="gdn::sweep"):
        ops.sweep(torch.zeros(8, device="cuda"))


# With a device of its own an op has no host that reads indices, lengths and counts; what is left of
# every invalid call of test_arguments.py, and a tensor on the CPU among the others.
@pytest.mark.parametrize("K", [arguments.K, 64])  # of windows: the general kernel, the fast ones
@pytest.mark.parametrize("packed", [False, True], ids=["batch", "packed"])
@pytest.mark.parametrize("op", [op for op in arguments.OPS if op != "linear"])  # torch's product
def test_every_invalid_call_raises_before_any_write(op, packed, K, monkeypatch):
    monkeypatch.setattr(arguments, "K", K)
    monkeypatch.setattr(arguments, "C", 2 * arguments.H * K + arguments.HV * arguments.V)
    call = getattr(gdn_ops, op)
    torch.manual_seed(0)
    args = arguments.on("cuda", arguments.valid(op, packed))

    def valid_call():
        own = copy.deepcopy(args)
        results = arguments.outputs(call(**own))
        return [*results, *(own[name] for name in arguments.written(own))]

    before = valid_call()
    cases = list(arguments.breaks(op, args))
    assert len(cases) >= 10
    wrong = arguments.wrongly_answered(op, cases)
    assert not wrong, "\n".join(wrong)
    torch.cuda.synchronize()  # no error that a later call would find
    assert all(map(torch.equal, valid_call(), before))
