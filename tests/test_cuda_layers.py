"""Layers and patched models of transformers on a CUDA device, against the CPU and transformers."""

from __future__ import annotations

import copy

import pytest
import torch
from common import generate, left_padded, tokens

from gdn_ops import nn as layers

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA device")

HEADS = layers.Heads(2, 6, 128, 128)


@pytest.fixture(autouse=True)
def exact_products():
    """transformers' convolution goes through cuDNN, which takes TF32 unless told not to."""
    with torch.backends.cudnn.flags(allow_tf32=False):
        yield


def pair(**options):
    """A layer on the CPU and its copy on the device."""
    torch.manual_seed(0)
    cpu = layers.GatedDeltaNet(64, HEADS.num_k_heads, HEADS.num_v_heads, **options)
    return cpu, copy.deepcopy(cpu).cuda()


def near(got, want, tolerance=2e-5):
    error = (got.cpu() - want).abs().max() / want.abs().max()
    assert error <= tolerance, error


@pytest.mark.parametrize("state_mode", layers.STATE_MODES)
@torch.no_grad()
def test_prefill_and_decode_follow_the_cpu(state_mode):
    both = pair(state_mode=state_mode, window=8)
    x = torch.randn(3, 75, 64)
    rows = torch.tensor([4, 0, 2])
    outputs = []
    for layer in both:
        device = next(layer.parameters()).device
        states, part = layer.allocate(6), x.to(device)
        out = [layer.prefill(part[:, :64], states, rows.to(device))]
        out += [layer.decode(part[:, t : t + 1], states, rows.to(device)) for t in range(64, 75)]
        outputs.append(torch.cat(out, 1))
    near(outputs[1], outputs[0])


def test_training_follows_the_cpu():
    cpu, device = pair()
    x = torch.randn(2, 70, 64)
    inputs = [x.clone().requires_grad_(), x.cuda().requires_grad_()]
    for layer, value in zip((cpu, device), inputs, strict=True):
        layer(value).square().sum().backward()
    near(inputs[1].grad, inputs[0].grad, 1e-4)
    for (name, a), b in zip(cpu.named_parameters(), device.parameters(), strict=True):
        assert b.grad is not None, name
        near(b.grad, a.grad, 1e-4)


# --- transformers


@pytest.fixture(scope="module", params=["qwen3_next", "qwen3_next_moe", "qwen3_5", "qwen3_5_moe"])
def models(request):
    """(transformers' own model, its copy to be patched), both on the device."""
    pytest.importorskip("transformers", reason="the Hugging Face tests need transformers")
    from gdn_ops.hf.tiny import tiny_model

    model = tiny_model(request.param).cuda()
    return model, copy.deepcopy(model)


CALLS = {
    "batch 1": lambda: (tokens(1, 7), {}),
    "batch 5": lambda: (tokens(5, 7), {}),
    "long prompt": lambda: (tokens(2, 100), {"max_new_tokens": 16}),
    "beams": lambda: (tokens(2, 6), {"num_beams": 3, "max_new_tokens": 16}),
    "static cache": lambda: (
        tokens(2, 7),
        {"max_new_tokens": 16, "cache_implementation": "static", "disable_compile": True},
    ),
    "left padding": left_padded,
}
# A window of 64 holds every update of a call, so low rank is exact there.
MODES = [("full", 16), ("buffered", 4), ("buffered", 64), ("lowrank", 64)]


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("state_mode,window", MODES)
def test_greedy_tokens_are_those_of_transformers(models, state_mode, window, call):
    import gdn_ops

    plain, patched = models
    ids, options = CALLS[call]()
    ids = ids.cuda()
    if "attention_mask" in options:
        options["attention_mask"] = options["attention_mask"].cuda()
    if state_mode == "lowrank" and ids.shape[1] + options.get("max_new_tokens", 64) > window:
        pytest.skip("more tokens than the window holds")
    gdn_ops.patch(patched, state_mode=state_mode, window=window)
    assert torch.equal(generate(patched, ids, **options), generate(plain, ids, **options))


def test_training_gives_the_gradients_of_transformers(models):
    import gdn_ops

    grads = []
    for model in (models[0], gdn_ops.patch(copy.deepcopy(models[1]))):
        model = copy.deepcopy(model).train()
        ids = tokens(2, 70).cuda()
        model(ids, labels=ids).loss.backward()
        grads.append({n: p.grad for n, p in model.named_parameters() if p.grad is not None})
    assert grads[0].keys() == grads[1].keys()
    for name, want in grads[0].items():
        assert (grads[1][name] - want).norm() <= 1e-3 * want.norm() + 1e-9, name
