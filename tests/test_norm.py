"""``gated_rms_norm`` against the float64 oracle."""

from __future__ import annotations

import itertools

import pytest
import torch
from common import ACTIVATIONS, assert_close

import gdn_ops
from gdn_ops import reference


@pytest.mark.parametrize("act, param", list(itertools.product(ACTIVATIONS, ACTIVATIONS)))
@pytest.mark.parametrize("V", [1, 7, 64, 100, 128, 512])
def test_against_oracle(V, act, param):
    x, gate = torch.randn(3, 5, V).to(act), (2 * torch.randn(3, 5, V)).to(act)
    weight = (1 + torch.randn(V)).to(param)
    y = gdn_ops.gated_rms_norm(x, gate, weight, 1e-6)
    ref = reference.gated_rms_norm(x, gate, weight, 1e-6)
    # Each of the two roundings in the middle may fall on the other side of a tie: one unit more.
    assert_close("y", y, ref, act, slack=1 if act == torch.float32 else 4)


def test_strided_gate_and_gate_dtype():
    wide = torch.randn(6, 4, 200)
    x = torch.randn(6, 4, 64, dtype=torch.bfloat16)
    gate = wide[..., 100:164]
    weight = torch.ones(64)
    y = gdn_ops.gated_rms_norm(x, gate, weight)
    assert torch.equal(y, gdn_ops.gated_rms_norm(x, gate.contiguous(), weight))
    assert y.dtype == torch.bfloat16


def test_heads_inside_tokens_have_their_own_stride():
    """z inside a packed projection, and one more stride than that is refused."""
    projected = torch.randn(2, 5, 300)
    gate = projected[..., 100:196].unflatten(-1, (4, 24))
    x = torch.randn(2, 4, 5, 24).transpose(1, 2)[:1]
    y = gdn_ops.gated_rms_norm(x, gate[:1], torch.ones(24))
    dense = gdn_ops.gated_rms_norm(x.contiguous(), gate[:1].contiguous(), torch.ones(24))
    assert torch.equal(y, dense)
    wide = torch.randn(2, 3, 4, 5, 8).permute(1, 0, 2, 3, 4)
    with pytest.raises(RuntimeError, match="one stride"):
        gdn_ops.gated_rms_norm(wide, wide, torch.ones(8))


def test_large_and_empty():
    x = torch.full((2, 64), 1e18)
    y = gdn_ops.gated_rms_norm(x, torch.full((2, 64), 50.0), torch.ones(64))
    assert torch.allclose(y, torch.full_like(y, 50.0))
    for shape in ((0, 64), (3, 0, 8)):
        z = torch.zeros(shape)
        assert gdn_ops.gated_rms_norm(z, z, torch.ones(shape[-1])).shape == shape


def test_raises():
    with pytest.raises(RuntimeError, match="V <= 512, got V = 600"):
        gdn_ops.gated_rms_norm(torch.zeros(2, 600), torch.zeros(2, 600), torch.ones(600))
    with pytest.raises(RuntimeError, match="shape of x"):
        gdn_ops.gated_rms_norm(torch.zeros(2, 6), torch.zeros(2, 5), torch.ones(6))
