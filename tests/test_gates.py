"""``gating`` against the float64 oracle."""

from __future__ import annotations

import itertools

import pytest
import torch
from common import ACTIVATIONS, assert_close, at_thread_counts

import gdn_ops
from gdn_ops import reference


@pytest.mark.parametrize("act, param", list(itertools.product(ACTIVATIONS, ACTIVATIONS)))
@pytest.mark.parametrize("shape", [(5, 48), (2, 3, 6), (300, 70), (1, 1, 1), (7,)])
def test_against_oracle(shape, act, param):
    a, b = (3 * torch.randn(shape)).to(act), (3 * torch.randn(shape)).to(act)
    A_log, dt_bias = torch.rand(shape[-1]).to(param), torch.randn(shape[-1]).to(param)
    g, beta = gdn_ops.gating(a, b, A_log, dt_bias)
    g_ref, beta_ref = reference.gating(a, b, A_log, dt_bias)
    assert g.dtype == beta.dtype == torch.float32
    assert_close("g", g, g_ref)
    assert_close("beta", beta, beta_ref)


def test_wide_range_is_accurate_relative_to_the_value():
    """softplus and sigmoid keep their digits where they are tiny, and never overflow."""
    a = torch.linspace(-40, 40, 4001)[:, None]
    g, beta = gdn_ops.gating(a, a, torch.zeros(1), torch.zeros(1))
    g_ref, beta_ref = reference.gating(a, a, torch.zeros(1), torch.zeros(1))
    for name, x, ref in (("g", g, g_ref), ("beta", beta, beta_ref)):
        assert ((x.double() - ref).abs() / ref.abs()).max() < 1e-6, name


def test_views_and_threads():
    packed = torch.randn(900, 2 * 50)
    a, b = packed[..., 1::2], packed[..., 0::2]
    A_log, dt = torch.rand(50), torch.randn(50)
    expected = gdn_ops.gating(a.contiguous(), b.contiguous(), A_log, dt)
    for got in at_thread_counts((1, 2, 3), lambda: gdn_ops.gating(a, b, A_log, dt)):
        assert all(torch.equal(x, y) for x, y in zip(got, expected, strict=True))


def test_extremes():
    inf = float("inf")
    a = torch.tensor([[inf, -inf, 200.0, -200.0, float("nan")]])
    g, beta = gdn_ops.gating(a, a, torch.zeros(5), torch.zeros(5))
    assert g[0].tolist()[:4] == [-inf, 0.0, -200.0, 0.0] and g[0, 4].isnan()
    assert beta[0].tolist()[:4] == [1.0, 0.0, 1.0, 0.0] and beta[0, 4].isnan()


def test_empty():
    for shape in ((0, 6), (2, 0, 6)):
        g, beta = gdn_ops.gating(
            torch.zeros(shape), torch.zeros(shape), torch.zeros(6), torch.zeros(6)
        )
        assert g.shape == beta.shape == shape
