"""The names of flash-linear-attention at the top level: what their keywords do, and which are
refused."""

import pytest
import torch
from common import assert_close, make_qkv

import gdn_ops
from gdn_ops import reference

SLACK = 4.0  # as in test_chunk.py


def test_fla_names():
    q, k, v, g, beta = make_qkv(2, 40, 2, 4, 16, 24)
    S = torch.randn(2, 4, 16, 24)
    expected_o, expected = reference.chunk(q, k, v, g, beta, S.transpose(2, 3), qk_l2norm=True)
    before = S.clone()
    for f in (gdn_ops.chunk_gated_delta_rule, gdn_ops.fused_recurrent_gated_delta_rule):
        kwargs = {"g": g, "beta": beta, "use_qk_l2norm_in_kernel": True, "output_final_state": True}
        o, final = f(q, k, v, initial_state=S, **kwargs)
        assert_close("o", o, expected_o, torch.float32, SLACK)
        assert_close("final", final, expected.transpose(2, 3), torch.float32, SLACK)
        assert torch.equal(S, before)
        flipped = S.transpose(2, 3).contiguous()
        o2, final2 = f(q, k, v, initial_state=flipped, transpose_state_layout=True, **kwargs)
        # The recurrence sums in another order over a transposed pool.
        assert_close("o", o2, o.double(), torch.float32, SLACK)
        assert_close("final", final2.transpose(2, 3), final.double(), torch.float32, SLACK)
        assert f(q, k, v, g=g, beta=beta)[1] is None
        a, A_log, dt_bias = torch.randn(2, 40, 4), torch.rand(4), torch.randn(4)
        ready, _ = gdn_ops.gating(a, a, A_log, dt_bias)
        raw = f(q, k, v, g=a, beta=beta, use_gate_in_kernel=True, A_log=A_log, dt_bias=dt_bias)
        assert torch.equal(raw[0], f(q, k, v, g=ready, beta=beta)[0])
        ones = f(q, k, v)[0]
        assert torch.equal(ones, f(q, k, v, g=torch.zeros_like(g), beta=torch.ones_like(g))[0])
        packed = [x[:1] for x in (q, k, v)]
        cu = torch.tensor([0, 3, 40])
        _, final = f(*packed, g=g[:1], beta=beta[:1], cu_seqlens=cu, cu_seqlens_cpu=cu,
                     output_final_state=True)  # fmt: skip
        assert final.shape == (2, 4, 16, 24)
        for name, value in (("gk", g), ("head_first", True), ("cp_context", object())):
            with pytest.raises(NotImplementedError, match=name) as error:
                f(q, k, v, g=g, beta=beta, **{name: value})
            assert len(str(error.value)) < 200  # not the numbers of a tensor
        with pytest.raises((RuntimeError, ValueError), match="initial_state: expected"):
            three = torch.zeros(3, 4, 16, 24)
            f(*packed, g=g[:1], beta=beta[:1], cu_seqlens=cu, initial_state=three)
        with pytest.raises(ValueError, match="initial_state: expected four dimensions, got"):
            f(q, k, v, g=g, beta=beta, initial_state=S[0])
        f(q, k, v, g=g, beta=beta, head_first=False)
        with pytest.raises(TypeError, match="nonsense"):
            f(q, k, v, g=g, beta=beta, nonsense=1)
        with pytest.raises(ValueError, match="use_gate_in_kernel"):
            f(q, k, v, g=g, beta=beta, A_log=A_log)


@pytest.mark.parametrize("state_dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_fla_takes_states_of_any_dtype(dtype, state_dtype):
    q, k, v, *_ = (x.to(dtype) for x in make_qkv(1, 20, 1, 2, 8, 8))
    S = torch.randn(1, 2, 8, 8).to(state_dtype)
    o, final = gdn_ops.chunk_gated_delta_rule(
        q, k, v, initial_state=S, use_qk_l2norm_in_kernel=True, output_final_state=True
    )
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    plain = (v.new_zeros(1, 20, 2, dtype=wide), v.new_ones(1, 20, 2, dtype=wide))
    want, want_final = gdn_ops.chunk(q, k, v, *plain, S.to(wide).mT, qk_l2norm=True)
    assert o.dtype == dtype and torch.equal(o, want)
    assert final.dtype == wide and torch.equal(final, want_final.mT)


@pytest.mark.parametrize("v_first", [False, True])
@pytest.mark.parametrize("name", ["chunk_gated_delta_rule", "fused_recurrent_gated_delta_rule"])
def test_fla_takes_states_of_any_layout(name, v_first):
    """FLA copies a state that its kernels cannot read as it lies."""
    q, k, v, g, beta = make_qkv(2, 20, 2, 4, 8, 12)
    S = torch.randn((2, 4, 12, 8) if v_first else (2, 4, 8, 12))
    kwargs = dict(g=g, beta=beta, output_final_state=True, state_v_first=v_first)
    want = getattr(gdn_ops, name)(q, k, v, initial_state=S, **kwargs)
    gaps = torch.full((*S.shape, 2), float("nan"))
    gaps[..., 0] = S
    for other in (gaps[..., 0], S.transpose(1, 3).contiguous().transpose(1, 3), S.mT.clone().mT):
        got = getattr(gdn_ops, name)(q, k, v, initial_state=other, **kwargs)
        for a, b in zip(got, want, strict=True):
            assert_close("result", a, b.double(), torch.float32, SLACK)
