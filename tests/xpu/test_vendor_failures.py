"""What the vendor's operators were reported to get wrong, on the XPU kernels."""

import torch
from twin import assert_close, to_device

import gdn_ops
from gdn_ops import reference, xpu_twin

f16, f32 = torch.float16, torch.float32


def qkvgb(B, T, H, HV, K, V, act, seed=0):
    g = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=g).to(act)

    return (
        normal(B, T, H, K), normal(B, T, H, K), normal(B, T, HV, V),
        -torch.rand(B, T, HV, generator=g), torch.rand(B, T, HV, generator=g),
    )  # fmt: skip


def test_prefill_of_256_sequences_in_one_call():
    lengths = torch.arange(256) % 7  # empty ones too
    cu = torch.cat([torch.zeros(1, dtype=torch.long), lengths.cumsum(0)]).int()
    inputs = qkvgb(1, int(cu[-1]), 1, 2, 64, 64, f16)
    state = torch.zeros(256, 2, 64, 64, dtype=f16)
    want, pool = reference.recurrent(*inputs, state, None, None, cu, None, None, True)
    device_state = to_device(state)
    with torch.no_grad():
        o = gdn_ops.recurrent(
            *map(to_device, inputs), device_state, cu_seqlens=to_device(cu), qk_l2norm=True
        )
    assert_close("o", o, want, noise=16)
    assert_close("state", device_state, pool, noise=16)


def test_chunked_prefill_of_256_sequences_in_one_call():
    lengths = 1 + torch.arange(256) % 21
    lengths[[7, 100]] = 0
    cu = torch.cat([torch.zeros(1, dtype=torch.long), lengths.cumsum(0)]).int()
    inputs = qkvgb(1, int(cu[-1]), 1, 2, 64, 64, f16)
    state = torch.zeros(300, 2, 64, 64, dtype=f16)
    rows = torch.randperm(300, generator=torch.Generator().manual_seed(3))[:256]
    want, pool = reference.chunk_prefill(*inputs, state, rows, None, None, cu, None, None, True, 32)
    device_state = to_device(state)
    with torch.no_grad():
        o = gdn_ops.chunk_prefill(
            *map(to_device, inputs), device_state, to_device(rows), cu_seqlens=to_device(cu),
            qk_l2norm=True, chunk_size=32,
        )  # fmt: skip
    assert_close("o", o, want, noise=16)
    assert_close("state", device_state, pool, noise=16)
    kernels = {r["kernel"] for r in xpu_twin.reports()}
    assert kernels >= {"chunk_rows", "chunk_gates", "chunk_decay", "chunk_solve"}


def test_speculative_convolution_of_two_tokens():
    """Accepted tokens end the window at the last of them: history 1 2 3, drafts 4 5 6."""
    weight = torch.tensor([[1.0, 10.0, 100.0, 1000.0]])
    pool = torch.zeros(2, 5, 1).transpose(1, 2)
    pool[1, 0, :3] = torch.tensor([1.0, 2.0, 3.0])
    device_pool = to_device(pool)
    rows = to_device(torch.tensor([[1, 1, 1]]))

    def step(tokens, accepted):
        x = to_device(torch.tensor(tokens).reshape(1, -1, 1))
        with torch.no_grad():
            return torch.ops.gdn.short_conv(
                x, to_device(weight), None, device_pool, rows, None, None,
                to_device(torch.tensor([accepted])), "none", True,
            ).cpu().flatten().tolist()  # fmt: skip

    assert step([4.0, 5.0, 6.0], 1) == [4321.0, 5432.0, 6543.0]
    # After two accepted tokens the history is 3 4 5.
    assert step([7.0, 8.0], 2) == [7543.0, 8754.0]


def test_accepted_count_zero_is_padding():
    inputs = qkvgb(2, 1, 1, 2, 64, 64, f16)
    rows = torch.tensor([[4, 5, 6], [1, 2, 3]])
    state = torch.randn(8, 2, 64, 64).to(f16)
    device_state = to_device(state)
    with torch.no_grad():
        o = gdn_ops.recurrent(
            *map(to_device, inputs), device_state, state_indices=to_device(rows),
            num_accepted=to_device(torch.tensor([0, 2])), qk_l2norm=True,
        )  # fmt: skip
    assert o.cpu()[0].eq(0).all()
    assert o.cpu()[1].ne(0).any()
    changed = [r for r in range(8) if not torch.equal(device_state.cpu()[r], state[r])]
    assert changed == [1], "only the row of the first token of sequence 1 may change"


def test_padding_rows_are_finite_and_change_nothing():
    inputs = [x.clone() for x in qkvgb(3, 1, 1, 2, 64, 64, f16)]
    for x in inputs:
        x[1] = float("nan")
    state = torch.full((4, 2, 64, 64), float("nan"), dtype=f16)
    state[[0, 2]] = 0.1
    device_state = to_device(state)
    with torch.no_grad():
        o = gdn_ops.recurrent(
            *map(to_device, inputs), device_state,
            state_indices=to_device(torch.tensor([0, -1, 2])), qk_l2norm=True,
        )  # fmt: skip
    assert o.cpu()[1].eq(0).all() and o.isfinite().all()
    assert device_state.cpu()[[1, 3]].isnan().all()


def test_float16_state_with_everything_else_float32():
    inputs = qkvgb(4, 1, 2, 4, 128, 128, f32)
    state = (0.1 * torch.randn(4, 4, 128, 128)).to(f16)
    want, pool = reference.recurrent(*inputs, state, qk_l2norm=True)
    device_state = to_device(state)
    with torch.no_grad():
        o = gdn_ops.recurrent(*map(to_device, inputs), device_state, qk_l2norm=True)
    assert o.dtype is f32 and device_state.dtype is f16
    assert_close("o", o, want)
    assert_close("state", device_state, pool)


def test_a_row_does_not_depend_on_its_neighbours():
    inputs = qkvgb(8, 1, 2, 4, 128, 128, f16)
    state = (0.1 * torch.randn(8, 4, 128, 128)).to(f16)
    together = to_device(state)
    with torch.no_grad():
        o = gdn_ops.recurrent(*map(to_device, inputs), together, qk_l2norm=True)
        alone = to_device(state[5:6].clone())
        o5 = gdn_ops.recurrent(*[to_device(x[5:6].clone()) for x in inputs], alone, qk_l2norm=True)
    assert torch.equal(o.cpu()[5:6], o5.cpu())
    assert torch.equal(together.cpu()[5:6], alone.cpu())


def test_limits_are_refused_by_name():
    inputs = qkvgb(1, 1, 1, 1, 300, 8, f32)
    state = torch.zeros(1, 1, 8, 300)
    import pytest

    with torch.no_grad():
        with pytest.raises(RuntimeError, match="K = 300"):
            gdn_ops.recurrent(*map(to_device, inputs), to_device(state))
        with pytest.raises(RuntimeError, match="K = 300"):
            gdn_ops.chunk(*map(to_device, inputs))
