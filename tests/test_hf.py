"""Patched transformers models against the unmodified classes of the installed transformers."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
import warnings
from multiprocessing.reduction import ForkingPickler

import pytest
import torch
from common import generate, left_padded, tokens
from torch._subclasses import FakeTensorMode
from torch.multiprocessing import reductions

transformers = pytest.importorskip(
    "transformers", reason="the Hugging Face tests need transformers"
)

import gdn_ops  # noqa: E402
from gdn_ops import _modules, _support  # noqa: E402
from gdn_ops import nn as layers  # noqa: E402
from gdn_ops.hf import layers as hf_layers  # noqa: E402
from gdn_ops.hf.tiny import FAMILIES, tiny_config, tiny_model  # noqa: E402

# One of each way the projections are stored.
STORAGES = ("qwen3_next", "qwen3_5")
SPLITS_OF_65 = ([64, 1], [1, 64], [63, 2], [32, 33], [1] * 65)

needs = {
    mode: pytest.mark.skipif(
        _support.missing(mode, "cpu") is not None, reason=str(_support.missing(mode, "cpu"))
    )
    for mode in layers.STATE_MODES
}


@pytest.fixture(autouse=True)
def no_grad():
    with torch.no_grad():
        yield


@pytest.fixture(autouse=True)
def every_reason_anew():
    hf_layers._announced.clear()


@pytest.fixture(scope="module", params=FAMILIES)
def pair(request):
    """(unpatched, patched) models of equal weights."""
    model = tiny_model(request.param)
    return model, gdn_ops.patch(copy.deepcopy(model))


@pytest.fixture(scope="module", params=STORAGES)
def storage_pair(request):
    model = tiny_model(request.param)
    return model, gdn_ops.patch(copy.deepcopy(model))


def first_layer(model):
    return model.model.layers[0].linear_attn


def hidden(batch: int, length: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(batch, length, 64, generator=torch.Generator().manual_seed(seed))


def new_cache(model):
    return transformers.DynamicCache(config=model.config)


def run_split(layer, cache, x, lengths):
    name = hf_layers.cache_argument(hf_layers.Qwen3_5GatedDeltaNet)
    parts = [layer(part, **{name: cache}) for part in x.split(lengths, dim=1)]
    state = cache.layers[0]
    return torch.cat(parts, dim=1), state.conv_states[0], state.recurrent_states[0]


# --- generation, token for token


@pytest.mark.parametrize("batch", [1, 5])
def test_greedy_64_tokens(pair, batch):
    plain, patched = pair
    ids = tokens(batch, 7)
    expected = generate(plain, ids)
    assert torch.equal(generate(patched, ids), expected)
    assert expected.shape[1] == 71
    assert len(expected[:, 7:].unique()) > 5, "a model that repeats itself would prove nothing"


def test_beam_search(storage_pair):
    plain, patched = storage_pair
    ids = tokens(2, 6)
    options = {"num_beams": 3, "max_new_tokens": 16}
    assert torch.equal(generate(patched, ids, **options), generate(plain, ids, **options))


def test_left_padding(storage_pair):
    plain, patched = storage_pair
    ids, options = left_padded()
    out = generate(patched, ids, **options)
    assert torch.equal(out, generate(plain, ids, **options))
    alone = generate(patched, ids[1:2, 4:], max_new_tokens=16)
    assert torch.equal(out[1, 4:], alone[0])


def test_static_cache(storage_pair):
    plain, patched = storage_pair
    ids = tokens(2, 7)
    options = {"max_new_tokens": 16, "cache_implementation": "static", "disable_compile": True}
    assert torch.equal(generate(patched, ids, **options), generate(plain, ids, **options))


def test_no_cache(storage_pair):
    plain, patched = storage_pair
    ids = tokens(2, 20)
    got, expected = (m(ids, use_cache=False).logits for m in (patched, plain))
    torch.testing.assert_close(got, expected, rtol=1e-3, atol=1e-3)


def test_bfloat16_model(storage_pair):
    plain, patched = (copy.deepcopy(m).to(torch.bfloat16) for m in storage_pair)
    exact = copy.deepcopy(storage_pair[0]).to(torch.bfloat16).double()
    x = hidden(2, 24).to(torch.bfloat16)
    want, _, want_state = run_split(first_layer(exact), new_cache(exact), x.double(), [20, 1, 3])
    errors = {}
    for name, model in (("ours", patched), ("theirs", plain)):
        y, _, state = run_split(first_layer(model), new_cache(model), x, [20, 1, 3])
        assert y.dtype == torch.bfloat16 and state.dtype == torch.float32
        errors[name] = (y.double() - want).pow(2).mean().sqrt()
        errors[name + " state"] = (state.double() - want_state).pow(2).mean().sqrt()
    assert errors["ours"] <= 1.1 * errors["theirs"]
    assert errors["ours state"] <= 1.1 * errors["theirs state"]


# --- one layer, split anywhere


@pytest.mark.parametrize("lengths", SPLITS_OF_65, ids=lambda s: "+".join(map(str, s[:4])))
def test_split_anywhere(storage_pair, lengths):
    """However 65 tokens are split: as near to float64 as the unpatched layer in one piece."""
    plain, patched = storage_pair
    exact = copy.deepcopy(first_layer(plain)).double()
    x = hidden(2, 65)
    expected = run_split(exact, new_cache(plain), x.double(), [65])
    theirs = run_split(first_layer(plain), new_cache(plain), x, [65])
    ours = run_split(first_layer(patched), new_cache(patched), x, lengths)
    for name, a, b, want in zip(("output", "conv", "state"), ours, theirs, expected, strict=True):
        error, allowed = ((t.double() - want).abs().max() for t in (a, b))
        assert error <= 1.5 * allowed, f"{name}: error {error:.2e}, unpatched {allowed:.2e}"


def test_multi_token_with_history(storage_pair):
    """transformers PR 45513: a cached call with more than one token must not forget the state."""
    plain, patched = storage_pair
    x = hidden(3, 8, seed=1)
    whole = run_split(first_layer(plain), new_cache(plain), x, [8])
    for lengths in ([5, 3], [5, 1, 2], [2, 6]):
        parts = run_split(first_layer(patched), new_cache(patched), x, lengths)
        for a, b in zip(parts, whole, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_model_level_prompt_in_pieces(pair):
    plain, patched = pair
    ids = tokens(2, 30)
    cache = new_cache(patched)
    newer = first_layer(patched).gdn_cache_argument == "cache"
    kwarg = "cache" if newer else "past_key_values"
    logits = [patched(part, **{kwarg: cache}).logits for part in ids.split([11, 1, 18], dim=1)]
    expected = plain(ids).logits
    torch.testing.assert_close(torch.cat(logits, 1), expected, rtol=2e-3, atol=2e-3)


def test_cache_reset_starts_anew(storage_pair):
    _, patched = storage_pair
    layer, cache, x = first_layer(patched), new_cache(patched), hidden(2, 6)
    first = run_split(layer, cache, x, [5, 1])
    first = tuple(t.clone() for t in first)
    cache.layers[0].reset()
    for a, b in zip(run_split(layer, cache, x, [5, 1]), first, strict=True):
        assert torch.equal(a, b)


def test_caches_move_between_patched_and_plain(storage_pair):
    plain, patched = storage_pair
    x = hidden(2, 9)
    expected = run_split(first_layer(plain), new_cache(plain), x, [5, 4])
    for first, second in ((plain, patched), (patched, plain)):
        cache = new_cache(plain)
        a, _, _ = run_split(first_layer(first), cache, x[:, :5], [5])
        b, conv, state = run_split(first_layer(second), cache, x[:, 5:], [1] * 4)
        for got, want in zip((torch.cat([a, b], 1), conv, state), expected, strict=True):
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


def test_deprecated_cache_name(storage_pair):
    _, patched = storage_pair
    layer, x = first_layer(patched), hidden(1, 4)
    cache = new_cache(patched)
    layer(x, cache_params=cache)
    assert cache.layers[0].has_previous_state[0]


def test_neighbours_change_nothing(storage_pair):
    _, patched = storage_pair
    layer, x = first_layer(patched), hidden(8, 6)
    projected = layer._gdn_project(x, packed=True)
    states = layers.States.allocate(8, layers.Heads(2, 6, 128, 128), 4)
    mixer = layers.Mixer(
        layers.Heads(2, 6, 128, 128), layer.conv1d.weight.squeeze(1), None, layer.A_log,
        layer.dt_bias, layer.norm.weight,
    )  # fmt: skip
    together = layers.mix(projected, mixer, states)
    for row in (0, 7):
        alone = layers.States.allocate(1, mixer.heads, 4)
        assert torch.equal(layers.mix(projected[row : row + 1], mixer, alone)[0], together[row])
        assert torch.equal(alone.state[0], states.state[row])


# --- packed documents


def test_packed_documents_stay_apart(storage_pair):
    """transformers issue 46851: neither convolution nor state may cross a document boundary."""
    _, patched = storage_pair
    layer, x = first_layer(patched), hidden(1, 5)
    cu = torch.tensor([0, 3, 5], dtype=torch.int32)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        packed = layer(x, cu_seq_lens_q=cu)
    for start, end in ((0, 3), (3, 5)):
        torch.testing.assert_close(packed[:, start:end], layer(x[:, start:end]))
    changed = x.clone()
    changed[:, 0] += 1
    assert torch.equal(layer(changed, cu_seq_lens_q=cu)[:, 3:], packed[:, 3:])


def test_packed_documents_leave_the_last_in_the_cache(storage_pair):
    plain, patched = storage_pair
    layer, x = first_layer(patched), hidden(1, 45)
    cache = new_cache(patched)
    name = layer.gdn_cache_argument
    layer(x, cu_seq_lens_q=torch.tensor([0, 40, 40, 45]), **{name: cache})
    _, conv, state = run_split(first_layer(plain), new_cache(plain), x[:, 40:], [5])
    torch.testing.assert_close(cache.layers[0].conv_states[0], conv, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(cache.layers[0].recurrent_states[0], state, rtol=1e-4, atol=1e-5)


# --- weights


def test_state_dict_is_unchanged(pair):
    plain, patched = pair
    a, b = plain.state_dict(), patched.state_dict()
    assert list(a) == list(b)
    assert all(torch.equal(a[k], b[k]) for k in a)
    assert [n for n, _ in plain.named_parameters()] == [n for n, _ in patched.named_parameters()]


def test_packed_projection_shares_memory():
    layer = first_layer(gdn_ops.patch(tiny_model("qwen3_5")))
    begin = layer.gdn_packed.data_ptr()
    end = begin + layer.gdn_packed.numel() * 4
    for name in layer.gdn_projections:
        assert begin <= getattr(layer, name).weight.data_ptr() < end


def test_projections_one_by_one_are_the_packed_one(storage_pair):
    """A call that wants gradients takes them so: the same bits for the rows of a decode step."""
    layer = first_layer(storage_pair[1])
    for dtype in (torch.float32, torch.bfloat16):
        layer = copy.deepcopy(layer).to(dtype)
        x = hidden(2, 3).to(dtype)
        with torch.enable_grad():
            parts = layer._gdn_project(x, packed=False)
        assert parts.requires_grad and torch.equal(parts, layer._gdn_project(x, packed=True))


def shifted_state_dict(model):
    return {k: v + 0.01 if "in_proj" in k else v.clone() for k, v in model.state_dict().items()}


@pytest.mark.filterwarnings("error:Accessing the data pointer")
def test_fake_weights_are_not_packed():
    """Nothing asks them for an address; the projections are linear all the same."""
    config = tiny_config("qwen3_5")
    with FakeTensorMode():
        layer = gdn_ops.patch(hf_layers.Qwen3_5GatedDeltaNet(config, 0))
        assert layer.gdn_packed is None
        assert layer(torch.ones(2, 5, config.hidden_size)).shape == (2, 5, config.hidden_size)
        assert _modules.is_plain(layer.out_proj)


@pytest.mark.parametrize("assign", [False, True])
def test_weights_loaded_after_patching_count(storage_pair, assign):
    plain, patched = (copy.deepcopy(m) for m in storage_pair)
    weights = shifted_state_dict(plain)
    before = patched(tokens(1, 9)).logits
    for model in (plain, patched):
        model.load_state_dict(weights, assign=assign)
    # Without an eager forward in between, as compiled code would find it.
    layer = first_layer(patched)
    x = hidden(1, 3)
    parts = torch.cat([getattr(layer, n)(x) for n in layer.gdn_projections], -1)
    rows = layer.gdn_rows(torch.device("cpu"))
    torch.testing.assert_close(
        torch.nn.functional.linear(x, layer.gdn_packed), parts if rows is None else parts[..., rows]
    )
    after = patched(tokens(1, 9)).logits
    torch.testing.assert_close(after, plain(tokens(1, 9)).logits, rtol=2e-3, atol=2e-3)
    assert (after - before).abs().max() > 0.01


def test_weights_written_in_place_count(storage_pair):
    plain, patched = (copy.deepcopy(m) for m in storage_pair)
    for model in (plain, patched):
        for name, weight in model.named_parameters():
            if "in_proj" in name:
                weight.add_(0.01)
    got, expected = (first_layer(m)(hidden(1, 6)) for m in (patched, plain))
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)


def test_weights_written_without_a_trace_count_after_eval(storage_pair):
    """Through ``data``, as copies of weights from elsewhere are written: no version tells."""
    plain, patched = (copy.deepcopy(m) for m in storage_pair)
    x = hidden(2, 5)
    for model in (plain, patched):
        layer = first_layer(model)
        layer(x)
        for name, weight in layer.named_parameters():
            if "in_proj" in name:
                weight.data.copy_(0.7 * weight.data)
        model.eval()
    torch.testing.assert_close(first_layer(patched)(x), first_layer(plain)(x), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("how", ["hook", "forward", "module"])
def test_a_changed_norm_runs(storage_pair, how):
    """Whatever was put around or in place of the gated norm: the code of transformers calls it."""

    class Other(torch.nn.Module):
        def __init__(self, norm):
            super().__init__()
            self.norm, self.weight = norm, norm.weight
            self.activation, self.variance_epsilon = norm.activation, norm.variance_epsilon

        def forward(self, *args):
            return 2 * self.norm(*args)

    plain, patched = (copy.deepcopy(m) for m in storage_pair)
    for model in (plain, patched):
        layer = first_layer(model)
        if how == "hook":
            layer.norm.register_forward_hook(lambda module, given, out: 2 * out)
        elif how == "forward":
            layer.norm.forward = lambda *a, own=layer.norm.forward: 2 * own(*a)
        else:
            layer.norm = Other(layer.norm)
    x = hidden(2, 5)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        got, expected = (first_layer(m)(x) for m in (patched, plain))
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)
    assert ["the norm" in str(w.message) for w in said] == [True]
    name, reason = next(iter(gdn_ops.active(patched).items()))
    assert name.endswith("layers.0.linear_attn") and reason.startswith("transformers (the norm")


def test_a_norm_that_is_moved_between_devices_is_no_other_norm(storage_pair):
    """The forward that accelerate puts on every module of a model over several devices, while it
    is there and after it was taken off."""

    class AlignDevicesHook:
        pass

    plain, patched = (copy.deepcopy(m) for m in storage_pair)
    layer = first_layer(patched)
    for module in (
        layer.norm,
        layer.in_proj_ba if hasattr(layer, "in_proj_ba") else layer.in_proj_b,
    ):
        own = module.forward
        module._hf_hook, module.forward = AlignDevicesHook(), lambda *a, own=own: own(*a)
    x = hidden(2, 5)
    expected = first_layer(plain)(x)
    for packed in (False, True):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            torch.testing.assert_close(layer(x), expected, rtol=1e-4, atol=1e-4)
        assert (layer.gdn_packed is not None) == packed
        assert set(gdn_ops.active(patched).values()) == {"gdn_ops (full)"}
        for module in (layer.norm, *(getattr(layer, n) for n in layer.gdn_projections)):
            if hasattr(module, "_hf_hook"):
                del module._hf_hook
                module.forward = type(module).forward.__get__(module)


def test_weights_replaced_and_moved_count(storage_pair):
    plain, patched = (copy.deepcopy(m) for m in storage_pair)
    name = first_layer(patched).gdn_projections[0]
    for model in (plain, patched):
        linear = getattr(first_layer(model), name)
        linear.weight = torch.nn.Parameter(linear.weight * 1.5)
        model.half().float()
    got, expected = (first_layer(m)(hidden(1, 6)) for m in (patched, plain))
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)
    twin = copy.deepcopy(patched)
    getattr(first_layer(twin), name).weight.mul_(0)
    assert not torch.equal(first_layer(twin)(hidden(1, 6)), got)
    assert torch.equal(first_layer(patched)(hidden(1, 6)), got)


def test_weights_that_torch_swaps_count(storage_pair):
    """With this switch ``to`` and ``load_state_dict`` exchange what two tensors are."""
    plain, patched = (copy.deepcopy(m) for m in storage_pair)
    ids = tokens(1, 9)
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        patched.bfloat16().float()
        for assign in (False, True):
            for parameter in patched.parameters():
                parameter.mul_(2)
            patched.load_state_dict(plain.state_dict(), assign=assign)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    assert first_layer(patched).gdn_packed is not None
    torch.testing.assert_close(patched(ids).logits, plain(ids).logits, rtol=1e-3, atol=1e-3)


def _scaled(weight):
    return torch.nn.Parameter(weight * 1.5)


def _give_data(module, name="weight"):
    getattr(module, name).data = 1.5 * getattr(module, name).data


def _first(layer):
    return getattr(layer, layer.gdn_projections[0])


def _swap(layer):
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        layer.bfloat16().float()
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)


CHANGES = {
    "nothing": lambda m: None,
    "input weight written": lambda m: _first(m).weight.mul_(1.5),
    "input weight replaced": lambda m: setattr(_first(m), "weight", _scaled(_first(m).weight)),
    "input weight's data": lambda m: _give_data(_first(m)),
    "input projection replaced": lambda m: setattr(
        m, m.gdn_projections[0], copy.deepcopy(_first(m))
    ),
    "hook of an input projection": lambda m: _first(m).register_forward_hook(
        lambda module, given, out: 2 * out
    ),
    "output weight written": lambda m: m.out_proj.weight.mul_(1.5),
    "output weight's data": lambda m: _give_data(m.out_proj),
    "output bias": lambda m: setattr(m.out_proj, "bias", torch.nn.Parameter(torch.ones(64))),
    "hook of the output projection": lambda m: m.out_proj.register_forward_pre_hook(
        lambda module, given: (2 * given[0],)
    ),
    "forward of the output projection": lambda m: setattr(
        m.out_proj, "forward", lambda x: 2 * torch.nn.functional.linear(x, m.out_proj.weight)
    ),
    "hook of the norm": lambda m: m.norm.register_forward_hook(lambda module, given, out: 2 * out),
    "norm weight's data": lambda m: _give_data(m.norm),
    "norm's epsilon": lambda m: setattr(m.norm, "variance_epsilon", 0.1),
    "conv weight's data": lambda m: _give_data(m.conv1d),
    "conv weight replaced": lambda m: setattr(m.conv1d, "weight", _scaled(m.conv1d.weight)),
    "A_log replaced": lambda m: setattr(m, "A_log", _scaled(m.A_log)),
    "dt_bias entry": lambda m: m._parameters.__setitem__("dt_bias", _scaled(m.dt_bias)),
    "state dict": lambda m: m.load_state_dict({k: 1.5 * v for k, v in m.state_dict().items()}),
    "other dtype and back": lambda m: m.half().float(),
    "other dtype and back, swapped": _swap,
    "state mode": lambda m: gdn_ops.patch(m, state_mode="buffered"),
}


NO_EFFECT = (
    "nothing", "input projection replaced", "state mode", "other dtype and back",
    "other dtype and back, swapped",
)  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
def test_a_decode_step_remembers_nothing_that_changed(storage_pair, change):
    """What the last step was decided from is looked at again: a copy, which remembers nothing,
    gives the same."""
    layer = first_layer(copy.deepcopy(storage_pair[1]))
    cache = new_cache(storage_pair[1])
    for x in (hidden(2, 5), hidden(2, 1, 1), hidden(2, 1, 2)):
        layer(x, cache)
    assert layer._gdn_step is not None
    other = copy.deepcopy(cache)
    before = layer(hidden(2, 1, 3), copy.deepcopy(cache))
    CHANGES[change](layer)
    fresh = copy.deepcopy(layer)
    assert fresh._gdn_step is None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for seed in (3, 4):
            got, expected = (m(hidden(2, 1, seed), c) for m, c in ((layer, cache), (fresh, other)))
            assert torch.equal(got, expected)
            if seed == 3 and change not in NO_EFFECT:
                assert not torch.allclose(got, before, rtol=1e-2)
    assert torch.equal(cache.layers[0].recurrent_states[0], other.layers[0].recurrent_states[0])


def test_a_decode_step_that_differs_from_the_last(storage_pair):
    """Another dtype, more tokens, a mask, gradients, a hook on every module."""
    layer = first_layer(copy.deepcopy(storage_pair[1]))
    cache = new_cache(storage_pair[1])
    for x in (hidden(2, 5), hidden(2, 1, 1)):
        layer(x, cache)
    assert layer._gdn_step is not None
    fresh, other = copy.deepcopy(layer), copy.deepcopy(cache)
    mask = torch.tensor([[1], [0]])
    for x, kwargs in (
        (hidden(2, 3, 2), {}),
        (hidden(2, 1, 3), {"attention_mask": mask}),
        (hidden(2, 1, 4), {}),
    ):
        got, expected = (m(x, c, **kwargs) for m, c in ((layer, cache), (fresh, other)))
        fresh._gdn_step = None
        assert torch.equal(got, expected)
    hook = torch.nn.modules.module.register_module_forward_hook(
        lambda module, given, out: 2 * out if type(module) is torch.nn.Linear else out
    )
    try:
        got, expected = (m(hidden(2, 1, 5), c) for m, c in ((layer, cache), (fresh, other)))
    finally:
        hook.remove()
    assert torch.equal(got, expected)
    with torch.enable_grad(), warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        layer(hidden(2, 1, 6), cache)
    assert any("gradients are needed" in str(w.message) for w in said)


def test_shared_parameters_stay_shared(storage_pair):
    """Processes that were handed the model see each other's updates."""
    plain, patched = storage_pair
    model = copy.deepcopy(patched)
    model.share_memory()
    assert all(p.is_shared() for p in model.parameters())
    assert torch.equal(model(tokens(1, 9)).logits, patched(tokens(1, 9)).logits)
    fresh = copy.deepcopy(plain).share_memory()
    gdn_ops.patch(fresh)
    assert all(p.is_shared() for p in fresh.parameters())


def test_processes_see_each_others_weights(storage_pair):
    layer = copy.deepcopy(first_layer(storage_pair[1])).share_memory()
    x = hidden(1, 5)
    before = layer(x)
    sent = bytes(ForkingPickler.dumps(layer))
    reductions.shared_cache.clear()  # so that what arrives is mapped anew, as in another process
    there = pickle.loads(sent)
    weight, theirs = (getattr(m, m.gdn_projections[0]).weight for m in (layer, there))
    assert weight.data_ptr() != theirs.data_ptr()
    assert torch.equal(there(x), before)
    weight.mul_(2)
    assert torch.equal(there(x), layer(x)) and not torch.equal(layer(x), before)
    theirs.mul_(0.5)
    assert torch.equal(there(x), before) and torch.equal(layer(x), before)


def test_a_copy_is_packed_before_its_first_call(storage_pair):
    """Compiled code could not see that the weights it was made of are none of the packed ones."""
    patched = copy.deepcopy(first_layer(storage_pair[1]))
    for made in (patched, pickle.loads(pickle.dumps(patched))):
        assert made.gdn_packed is not None
        weights = [getattr(made, name).weight for name in made.gdn_projections]
        assert made._gdn_packed_from == made._gdn_fingerprint(weights)
        if not made.gdn_reorders:
            with torch.no_grad():
                weights[-1].fill_(7)
            assert (made.gdn_packed[-weights[-1].shape[0] :] == 7).all()


def test_weights_made_in_inference_mode(storage_pair):
    """torch can use one nowhere whose data was replaced by what no inference made."""
    plain, _ = storage_pair
    ids = tokens(1, 9)
    expected = plain(ids).logits
    with torch.inference_mode():
        made = gdn_ops.patch(copy.deepcopy(plain))
        first = made(ids).logits
    layer = first_layer(made)
    assert getattr(layer, layer.gdn_projections[0]).weight.is_inference()
    with torch.no_grad():
        outside = made(ids).logits
        x = hidden(1, 5)
        one_by_one, packed = (layer._gdn_project(x, packed=how) for how in (False, True))
        torch.testing.assert_close(one_by_one, packed, rtol=1e-4, atol=1e-5)
        gdn_ops.unpatch(made)
        for got in (first, outside, made(ids).logits):
            torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)


def test_a_default_device_does_not_matter(storage_pair):
    plain, _ = storage_pair
    with torch.device("meta"):
        made = gdn_ops.patch(copy.deepcopy(plain))
    layer, x = first_layer(made), hidden(1, 5)
    assert layer.gdn_packed is not None
    torch.testing.assert_close(layer(x), first_layer(plain)(x), rtol=1e-4, atol=1e-5)


def test_patched_on_the_meta_device(storage_pair):
    """A skeleton may be patched before its weights come."""
    plain, _ = storage_pair
    model = gdn_ops.patch(copy.deepcopy(plain).to("meta"))
    model.load_state_dict(plain.state_dict(), assign=True)
    model.model.rotary_emb = copy.deepcopy(plain.model.rotary_emb)  # its buffers are not saved
    layer = first_layer(model)
    assert layer.gdn_packed is not None
    assert gdn_ops.active(model)["model.layers.0.linear_attn"] == "gdn_ops (full)"
    torch.testing.assert_close(
        model(tokens(1, 9)).logits, plain(tokens(1, 9)).logits, rtol=2e-3, atol=2e-3
    )
    with pytest.raises(ValueError, match="state_mode"):
        gdn_ops.patch(copy.deepcopy(plain).to("meta"), state_mode="half")


def test_wrapped_projections_are_called(storage_pair):
    """An adapter around a projection must not be bypassed by the packed weight."""
    plain, patched = (copy.deepcopy(m) for m in storage_pair)

    class Adapter(torch.nn.Module):
        def __init__(self, base):
            super().__init__()
            self.base = base

        def forward(self, x):
            return 2 * self.base(x)

        @property
        def weight(self):
            return self.base.weight

    for model in (plain, patched):
        layer = first_layer(model)
        name = hf_layers.CLASSES.get(type(layer), type(layer)).gdn_projections[0]
        setattr(layer, name, Adapter(getattr(layer, name)))
    got, expected = (first_layer(m)(hidden(1, 6)) for m in (patched, plain))
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)


def test_save_and_load(storage_pair, tmp_path):
    plain, patched = storage_pair
    patched.save_pretrained(tmp_path)
    ids = tokens(2, 7)
    again = type(plain).from_pretrained(tmp_path)
    assert torch.equal(
        generate(again, ids, max_new_tokens=8), generate(plain, ids, max_new_tokens=8)
    )
    gdn_ops.register_transformers()
    gdn_ops.register_transformers()
    try:
        ours = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
        fresh = transformers.AutoModelForCausalLM.from_config(plain.config)
    finally:
        gdn_ops.unregister_transformers()
    assert first_layer(ours).gdn_packed is not None, "packed before the first forward"
    for model in (ours, fresh):
        assert set(gdn_ops.active(model).values()) == {"gdn_ops (full)"}
    assert torch.equal(
        generate(ours, ids, max_new_tokens=8), generate(plain, ids, max_new_tokens=8)
    )
    other = transformers.AutoModelForCausalLM.from_config(plain.config)
    assert set(gdn_ops.active(other).values()) == {"transformers"}


def test_every_saver_finds_every_weight(storage_pair, tmp_path):
    """Those of accelerate keep one tensor of each storage, those of safetensors whole storages."""
    from safetensors.torch import load_model, save_model

    plain, patched = (copy.deepcopy(m) for m in storage_pair)
    patched(tokens(1, 2))  # a copy of a model packs its weights at its first call
    saved = patched.state_dict()
    assert list(saved) == list(plain.state_dict())
    storages = [t.untyped_storage() for n, t in saved.items() if n != "lm_head.weight"]
    assert len({s.data_ptr() for s in storages}) == len(storages)
    assert all(s.nbytes() == t.nbytes for t in saved.values() for s in [t.untyped_storage()])
    save_model(patched, tmp_path / "model.safetensors")
    again = copy.deepcopy(plain)
    for parameter in again.parameters():
        parameter.zero_()
    load_model(again, tmp_path / "model.safetensors")
    for name, value in plain.state_dict().items():
        assert torch.equal(again.state_dict()[name], value)
    # Still the weights, not copies of them.
    for name, value in saved.items():
        value.copy_(plain.state_dict()[name] / 2)
        assert patched.get_parameter(name).data_ptr() == value.data_ptr()
    again.load_state_dict(saved)
    ids = tokens(2, 7)
    torch.testing.assert_close(patched(ids).logits, again(ids).logits, rtol=1e-4, atol=1e-4)
    kept = first_layer(patched).state_dict(keep_vars=True)
    assert kept["out_proj.weight"] is first_layer(patched).out_proj.weight
    assert all(isinstance(value, torch.nn.Parameter) for value in kept.values())


# --- patch, unpatch, active


def test_unpatch_restores(storage_pair):
    plain, patched = (copy.deepcopy(m) for m in storage_pair)
    assert set(gdn_ops.active(patched).values()) == {"gdn_ops (full)"}
    assert gdn_ops.unpatch(patched) is patched
    assert set(gdn_ops.active(patched).values()) == {"transformers"}
    ours, theirs = first_layer(patched), first_layer(plain)
    assert type(ours) is type(theirs)
    assert set(vars(ours)) == set(vars(theirs))
    assert not ours._load_state_dict_post_hooks
    assert list(ours.named_buffers()) == []
    for weight in ours.parameters():
        assert weight.untyped_storage().nbytes() == weight.numel() * weight.element_size()
    x = hidden(2, 5)
    assert torch.equal(ours(x), theirs(x))


def test_active_names_every_layer():
    model = tiny_model("qwen3_5", layers=4)
    assert list(gdn_ops.active(model)) == [f"model.layers.{i}.linear_attn" for i in range(3)]
    gdn_ops.patch(model.model.layers[1].linear_attn)
    assert list(gdn_ops.active(model).values()) == [
        "transformers",
        "gdn_ops (full)",
        "transformers",
    ]
    assert "gdn_ops" in type(model.model.layers[1].linear_attn).__module__
    assert "GatedDeltaNet" in type(model.model.layers[1].linear_attn).__name__


def test_active_says_why_a_layer_never_runs_here():
    model = gdn_ops.patch(tiny_model("qwen3_5", hidden_act="gelu"))
    assert set(gdn_ops.active(model).values()) == {"transformers (activation 'gelu' is not silu)"}
    twin = tiny_model("qwen3_5", hidden_act="gelu")
    with pytest.warns(UserWarning, match="gelu"):
        assert torch.equal(model(tokens(1, 5)).logits, twin(tokens(1, 5)).logits)


def test_patch_refuses():
    with pytest.raises(ValueError, match="no layer of Qwen3_5GatedDeltaNet"):
        gdn_ops.patch(torch.nn.Linear(2, 2))
    with pytest.raises(ValueError, match="window: expected 1 to 64"):
        gdn_ops.patch(tiny_model("qwen3_5"), window=65)
    with pytest.raises(ValueError, match="state_mode: expected one of"):
        gdn_ops.patch(tiny_model("qwen3_5"), state_mode="half")
    with pytest.raises(ValueError, match="family: expected one of"):
        tiny_config("qwen2")


def test_an_older_transformers_is_refused_by_its_version(tmp_path):
    """One from before these models, of which the import of the layers would miss a module."""
    (tmp_path / "transformers.py").write_text("__version__ = '4.57.0'\n")
    script = (
        f"import sys; sys.path[:0] = [{str(tmp_path)!r}, *{sys.path!r}]; import gdn_ops\n"
        "try: gdn_ops.patch\n"
        "except ImportError as error: print(error)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert "expected transformers >= 5.17.0, got 4.57.0" in done.stdout, done.stderr


def test_a_transformers_without_models_for_this_torch_is_refused(monkeypatch):
    """What is newer than torch allows goes on as if torch were not there, and fails somewhere."""
    from gdn_ops.hf.compat import check_version

    monkeypatch.setattr(transformers.utils, "is_torch_available", lambda: False)
    with pytest.raises(ImportError, match=r"does not take torch .*'transformers==5.17.0'"):
        check_version()


def test_a_model_is_patched_whole_or_not_at_all(monkeypatch):
    """A layer on a device without the ops may come after others."""
    model = tiny_model("qwen3_5")
    found = iter((None, None, "no such op"))
    with monkeypatch.context() as patched:
        patched.setattr("gdn_ops.hf.patching.missing", lambda mode, device: next(found))
        with pytest.raises(NotImplementedError, match="no such op"):
            gdn_ops.patch(model)
    assert set(gdn_ops.active(model).values()) == {"transformers"}


@pytest.mark.parametrize("mode", layers.STATE_MODES)
def test_a_missing_op_is_named(mode, monkeypatch):
    op = _support._NEEDS[mode][-1]
    monkeypatch.setitem(_support._KERNELS, op, frozenset())
    with pytest.raises(NotImplementedError, match=f"gdn::{op} on cpu"):
        gdn_ops.patch(tiny_model("qwen3_5"), state_mode=mode)


# --- the written rule for falling back


def test_float64_falls_back_with_one_warning(storage_pair):
    plain, patched = (copy.deepcopy(m).double() for m in storage_pair)
    ids = tokens(2, 6)
    with pytest.warns(UserWarning, match="runs the code of transformers: parameters are") as seen:
        got = patched(ids).logits
    assert torch.equal(got, plain(ids).logits)
    assert len([w for w in seen if "gdn_ops" in str(w.message)]) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        patched(ids)


def test_recorded_past_falls_back(storage_pair):
    plain, patched = storage_pair
    x = hidden(1, 7)
    results = []
    for model in (plain, patched):
        cache = new_cache(model)
        run_split(first_layer(model), cache, x[:, :4], [4])
        cache.layers[0].record_past = True
        results.append(run_split(first_layer(model), cache, x[:, 4:], [2, 1]))
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    assert results[1][1].shape[-1] == 7, "the conv state grows while the past is recorded"


def test_boundaries_that_cannot_be_honoured_reach_transformers(storage_pair):
    _, patched = storage_pair
    layer = first_layer(patched)
    two_rows = hidden(2, 4)
    cu = torch.tensor([0, 4], dtype=torch.int32)
    with pytest.warns(UserWarning, match="packed sequences"), pytest.raises(ValueError):
        layer(two_rows, cu_seq_lens_q=cu)
    with pytest.warns(UserWarning, match="seq_idx"), pytest.raises(ValueError):
        layer(two_rows, seq_idx=torch.zeros(2, 4, dtype=torch.int32))


def test_training_gives_the_gradients_of_transformers(storage_pair):
    plain, patched = (copy.deepcopy(m).train() for m in storage_pair)
    ids = tokens(2, 20)
    losses = []
    with torch.enable_grad():
        for model in (plain, patched):
            loss = model(ids, labels=ids).loss
            loss.backward()
            losses.append(loss)
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-4, atol=1e-4)
    for (name, a), b in zip(patched.named_parameters(), plain.parameters(), strict=True):
        scale = b.grad.abs().max()
        assert (a.grad - b.grad).abs().max() <= 2e-3 * scale + 1e-7, name


@pytest.mark.parametrize("fused", [False, True])
def test_an_optimiser_step_reaches_the_packed_projection(storage_pair, fused):
    """Fused ones leave no trace at the weights."""
    plain, patched = (copy.deepcopy(m) for m in storage_pair)
    ids = tokens(2, 12)
    for model in (plain, patched):
        optimiser = torch.optim.SGD(model.parameters(), lr=0.01, fused=fused)
        model(ids)
        with torch.enable_grad():
            model(ids, labels=ids).loss.backward()
        optimiser.step()
    got, expected = (m(ids).logits for m in (patched, plain))
    torch.testing.assert_close(got, expected, rtol=5e-3, atol=5e-3)


# --- windows


@needs["buffered"]
@pytest.mark.parametrize("window", [1, 5, 16])
def test_buffered_is_exact(window):
    plain = tiny_model("qwen3_5")
    patched = gdn_ops.patch(copy.deepcopy(plain), state_mode="buffered", window=window)
    ids = tokens(3, 7)
    assert torch.equal(generate(patched, ids), generate(plain, ids))
    options = {"num_beams": 3, "max_new_tokens": 12}
    assert torch.equal(generate(patched, ids, **options), generate(plain, ids, **options))


@needs["buffered"]
def test_buffered_window_is_folded_before_other_code_reads_the_state():
    plain = tiny_model("qwen3_5")
    patched = gdn_ops.patch(copy.deepcopy(plain), state_mode="buffered", window=8)
    x = hidden(2, 14)
    expected = run_split(first_layer(plain), new_cache(plain), x, [14])
    cache = new_cache(patched)
    layer = first_layer(patched)
    run_split(layer, cache, x[:, :9], [5, 1, 1, 1, 1])
    assert cache.layers[0].recurrent_states[4].tolist() == [4, 4]
    y, conv, state = run_split(layer, cache, x[:, 9:], [5])
    assert cache.layers[0].recurrent_states[4].tolist() == [0, 0]
    for got, want in zip((y, conv, state), (expected[0][:, 9:], *expected[1:]), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    run_split(layer, cache, x[:, :1], [1])
    gdn_ops.patch(patched, state_mode="full")
    run_split(layer, cache, x[:, 1:2], [1])
    exact = new_cache(plain)
    run_split(first_layer(plain), exact, torch.cat([x, x[:, :2]], 1), [16])
    torch.testing.assert_close(
        cache.layers[0].recurrent_states[0],
        exact.layers[0].recurrent_states[0],
        rtol=1e-4,
        atol=1e-5,
    )


@needs["buffered"]
def test_the_window_of_a_cache_is_made_by_its_prompt():
    """Made by the first step instead, it would live in the memory of that step's CUDA graph."""
    patched = gdn_ops.patch(tiny_model("qwen3_5"), state_mode="buffered", window=8)
    cache, layer = new_cache(patched), first_layer(patched)
    run_split(layer, cache, hidden(2, 5), [5])
    window = dict(cache.layers[0].recurrent_states)
    assert len(window) == 5 and window[4].tolist() == [0, 0]
    run_split(layer, cache, hidden(2, 3), [1, 1, 1])
    assert all(cache.layers[0].recurrent_states[slot] is t for slot, t in window.items())
    # A gradient that reaches into the state finds it without a window, which has none.
    cache = new_cache(patched)
    with torch.enable_grad():
        layer(hidden(2, 5), **{layer.gdn_cache_argument: cache})
    assert cache.layers[0].number_of_states == 1


@needs["lowrank"]
def test_lowrank_is_full_rank_while_the_window_holds_everything():
    plain = tiny_model("qwen3_5")
    patched = gdn_ops.patch(copy.deepcopy(plain), state_mode="lowrank", window=32)
    ids = tokens(2, 7)
    options = {"max_new_tokens": 24}
    assert torch.equal(generate(patched, ids, **options), generate(plain, ids, **options))


@needs["lowrank"]
def test_lowrank_drops_the_old():
    plain = tiny_model("qwen3_5")
    x = hidden(2, 96)
    exact, _, _ = run_split(first_layer(plain), new_cache(plain), x, [96])
    errors = []
    for window in (8, 16, 32):
        patched = gdn_ops.patch(copy.deepcopy(plain), state_mode="lowrank", window=window)
        y, _, _ = run_split(first_layer(patched), new_cache(patched), x, [64] + [1] * 32)
        errors.append(float((y - exact).abs().max()))
    assert errors[0] > errors[1] > errors[2]


@needs["lowrank"]
def test_lowrank_states_are_not_taken_for_full_ones():
    model = gdn_ops.patch(tiny_model("qwen3_5"), state_mode="lowrank")
    cache, layer = new_cache(model), first_layer(model)
    run_split_lowrank = layer(hidden(1, 5), **{layer.gdn_cache_argument: cache})
    assert run_split_lowrank.shape == (1, 5, 64)
    for mode in ("full", "buffered"):
        gdn_ops.patch(model, state_mode=mode)
        with pytest.raises(RuntimeError, match="low-rank windows"):
            layer(hidden(1, 1), **{layer.gdn_cache_argument: cache})


@needs["buffered"]
@needs["lowrank"]
def test_full_states_are_not_left_out_of_low_rank_ones():
    """A buffered cache has windows, but they are not all of its state."""
    plain = tiny_model("qwen3_5")
    x = hidden(2, 14)
    expected = run_split(first_layer(plain), new_cache(plain), x, [14])
    patched = gdn_ops.patch(copy.deepcopy(plain), state_mode="buffered", window=8)
    cache, layer = new_cache(patched), first_layer(patched)
    begun, _, _ = run_split(layer, cache, x[:, :8], [5, 1, 1, 1])
    gdn_ops.patch(patched, state_mode="lowrank", window=32)
    with pytest.warns(UserWarning, match="holds full states"):
        rest, conv, state = run_split(layer, cache, x[:, 8:], [1, 1, 4])
    got = (torch.cat([begun, rest], 1), conv, state)
    for have, want in zip(got, expected, strict=True):
        torch.testing.assert_close(have, want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("mode", layers.STATE_MODES)
def test_a_cache_knows_whether_it_has_a_history(mode):
    patched = gdn_ops.patch(tiny_model("qwen3_5"), state_mode=mode)
    cache, layer = new_cache(patched), first_layer(patched)
    for _ in range(2):
        assert not cache.has_previous_state(0)
        run_split(layer, cache, hidden(2, 6), [4, 1, 1])
        assert cache.has_previous_state(0)
        cache.reset()


@needs["buffered"]
@needs["lowrank"]
def test_a_cache_that_was_reset_starts_in_another_mode():
    plain = tiny_model("qwen3_5")
    x = hidden(2, 12)
    expected, _, _ = run_split(first_layer(plain), new_cache(plain), x, [12])
    patched = gdn_ops.patch(copy.deepcopy(plain), state_mode="full")
    cache, layer = new_cache(patched), first_layer(patched)
    states = cache.layers[0].recurrent_states
    for mode, window in (
        ("full", 16), ("lowrank", 32), ("buffered", 4), ("buffered", 8), ("lowrank", 16)
    ):  # fmt: skip
        gdn_ops.patch(patched, state_mode=mode, window=window)
        cache.reset()
        y, _, _ = run_split(layer, cache, x, [5, 1, 1, 1, 3, 1])
        torch.testing.assert_close(y, expected, rtol=1e-4, atol=1e-5)
        assert (states[0] is None) == (mode == "lowrank")
        if mode != "full":
            assert states[1].shape[2] == window
