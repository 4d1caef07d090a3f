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
    ("family", "state_mode", "length"),
    [("qwen3_5", "full", 20), ("qwen3_5", "buffered", 9), ("qwen3_5", "lowrank", 20),
     ("qwen3_next", "full", 9)],
)  # fmt: skip
def test_patched_model_generates_the_same_tokens(device, family, state_mode, length):
    prompt = tokens(1, 2, length)
    options = {"state_mode": state_mode, "window": 4}
    want = generate(tiny_model(family), prompt, "cpu", **options)
    xpu_twin.reports()
    got = generate(tiny_model(family), prompt, device, **options)
    assert torch.equal(got, want)
    launched = {r["kernel"] for r in xpu_twin.reports()}
    assert launched >= {"conv_gating", "gated_rms_norm"}
    assert launched & {"decode", "window_step"}, launched
    assert ("chunk_solve" in launched) == (length >= 16), launched


def test_a_cache_that_transformers_began_is_continued(device):
    """Its state lies [K, V]; the layer updates it where it is."""
    from transformers import DynamicCache

    model = tiny_model("qwen3_5")
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(tokens(2, 2, 6), cache=cache)
    layer = next(x for x in cache.layers if hasattr(x, "recurrent_states"))
    history, state = layer.conv_states[0], layer.recurrent_states[0]
    assert state.is_contiguous(), "no longer [K, V]: this test shows nothing"
    mixer = gdn_ops.patch(model.model.layers[0].linear_attn)
    hidden = torch.randn(2, 1, 64)
    results = []
    for where in ("cpu", device):
        mixer.to(where)
        layer.conv_states[0] = history.clone().to(where)
        layer.recurrent_states[0] = state.clone().to(where)
        xpu_twin.reports()
        with torch.no_grad():
            y = mixer(hidden.to(where), cache)
        results.append((y.cpu(), layer.recurrent_states[0].cpu()))
    assert "decode" in {r["kernel"] for r in xpu_twin.reports()}
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    assert not torch.equal(results[0][1], state)
