"""Whole models of transformers on the twin: patched, they choose the tokens of the CPU."""

import pytest
import torch

import gdn_ops
from gdn_ops import xpu_twin

pytest.importorskip("transformers")
from gdn_ops.hf.tiny import tiny_model


def tokens(seed: int, *shape: int) -> torch.Tensor:
    return torch.randint(0, 256, shape, generator=torch.Generator().manual_seed(seed))


def generate(model, prompt, device, **options):
    gdn_ops.patch(model.to(device), **options)
    with torch.no_grad():
        out = model.generate(prompt.to(device), max_new_tokens=5, do_sample=False)
    return out.cpu()[:, prompt.shape[1] :]


@pytest.mark.parametrize(
    ("family", "state_mode"),
    [("qwen3_5", "full"), ("qwen3_5", "buffered"), ("qwen3_next", "full")],
)
def test_patched_model_generates_the_same_tokens(device, family, state_mode):
    prompt = tokens(1, 2, 9)
    options = {"state_mode": state_mode, "window": 4}
    want = generate(tiny_model(family), prompt, "cpu", **options)
    xpu_twin.reports()
    got = generate(tiny_model(family), prompt, device, **options)
    assert torch.equal(got, want)
    launched = {r["kernel"] for r in xpu_twin.reports()}
    assert "conv_gating" in launched and "gated_rms_norm" in launched
    assert launched & {"decode", "window_step"}, launched
