"""Sample inputs and tolerances shared by every test: one place for what 'right' means."""

from __future__ import annotations

import itertools
import math

import torch
from torch import Tensor

ACTIVATIONS = (torch.float32, torch.bfloat16, torch.float16)

# Per element, relative to max(1, |expected|): one rounding to the dtype, plus f32 sums of up to 512
# terms. Half a unit in the last place is 2^-8 for bfloat16 and 2^-11 for float16, of values near 1.
TOLERANCE = {torch.float32: 4e-6, torch.bfloat16: 2**-8 * 1.01, torch.float16: 2**-11 * 1.02}


def assert_close(name: str, got: Tensor, expected: Tensor, dtype=None, slack: float = 1.0) -> None:
    """Every element within the tolerance of ``dtype`` (that of ``got`` if None)."""
    assert got.shape == expected.shape, f"{name}: shape {tuple(got.shape)}, {tuple(expected.shape)}"
    if got.numel() == 0:
        return
    limit = TOLERANCE[dtype or got.dtype] * slack
    error = (got.double() - expected.double()).abs() / expected.double().abs().clamp(min=1.0)
    worst = error.max().item()
    assert worst <= limit, f"{name}: largest error {worst:.3e}, limit {limit:.3e}"


def generator(seed: int) -> torch.Generator:
    """Random numbers of their own, on the device where tensors are made."""
    # Not get_default_device: torch 2.5 cannot say it after a `with torch.device`.
    return torch.Generator(torch.empty(0).device).manual_seed(seed)


def at_thread_counts(counts, call) -> list:
    """What ``call()`` returns with each number of threads."""
    threads, results = torch.get_num_threads(), []
    try:
        for n in counts:
            torch.set_num_threads(n)
            results.append(call())
    finally:
        torch.set_num_threads(threads)
    return results


def offsets(lengths, dtype=torch.int32) -> Tensor:
    """``cu_seqlens`` of sequences of these lengths."""
    return torch.tensor([0, *itertools.accumulate(lengths)], dtype=dtype)


def make_pool(P, HV, V, K, dtype=torch.float32, transposed=False, seed=0) -> Tensor:
    """A pool of states with ``[P, HV, V, K]`` logical shape, in either layout."""
    gen = generator(seed + 1)
    if transposed:
        return torch.randn(P, HV, K, V, generator=gen).to(dtype).transpose(2, 3)
    return torch.randn(P, HV, V, K, generator=gen).to(dtype)


def clone_pool(pool: Tensor) -> Tensor:
    """A copy with the strides of ``pool``."""
    copy = torch.empty_strided(pool.shape, pool.stride(), dtype=pool.dtype)
    return copy.copy_(pool)


def make_qkv(B, T, H, HV, K, V, dtype=torch.float32, seed=0, unit=True):
    """``q, k, v, g, beta`` that resemble the model: unit keys, g < 0, 0 < beta < 1."""
    gen = generator(seed)
    q = torch.randn(B, T, H, K, generator=gen)
    k = torch.randn(B, T, H, K, generator=gen)
    if unit:
        q, k = (x / x.norm(dim=-1, keepdim=True).clamp(min=1e-6) for x in (q, k))
    v = torch.randn(B, T, HV, V, generator=gen)
    g = -torch.rand(B, T, HV, generator=gen)
    beta = torch.rand(B, T, HV, generator=gen)
    return q.to(dtype), k.to(dtype), v.to(dtype), g, beta


def make_layer(B, T, H, HV, K, V, W=4, dtype=torch.float32, seed=0) -> dict[str, Tensor]:
    """Tensors of one layer between its projections, for ``conv_gating`` and ``decode``."""
    gen = generator(seed)
    C = 2 * H * K + HV * V

    def randn(*shape):
        return torch.randn(*shape, generator=gen)

    return {
        "projected": randn(B, T, C + HV * V + 2 * HV).to(dtype),
        "conv_weight": (randn(C, W) / W**0.5).to(dtype),
        "conv_bias": (0.1 * randn(C)).to(dtype),
        "A_log": torch.rand(HV, generator=gen),
        "dt_bias": randn(HV),
        "norm_weight": (1 + 0.1 * randn(V)).to(dtype),
    }


LAYER = ("projected", "conv_weight", "conv_bias", "A_log", "dt_bias", "norm_weight")


def layer_args(layer: dict[str, Tensor]) -> list[Tensor]:
    """What every ``decode`` op takes first, of a :func:`make_layer`."""
    return [layer[name] for name in LAYER]


def bits(x: Tensor) -> Tensor:
    """For comparisons in which NaN equals itself."""
    return x.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[x.element_size()])


EXTREMES = ["vanishing", "one -316", "zero", "alternating", "-inf", "all -inf"]


def extreme(kind: str, T: int = 130, HV: int = 2) -> Tensor:
    """Log decays ``[1, T, HV]`` that a running total would get wrong; T > 129 for "-inf"."""
    g = torch.zeros(1, T, HV)
    if kind == "vanishing":
        g.fill_(math.log(1e-12))
    elif kind == "one -316":
        g.fill_(-1e-4)
        g[:, 31] = -316.0
    elif kind == "alternating":
        g[:, ::2] = -0.5
    elif kind == "-inf":
        g.fill_(-0.1)
        g[:, 0, 0] = g[:, 17, 0] = g[:, 18, 0] = g[:, 64, 1] = g[:, 129, 1] = -math.inf
    elif kind == "all -inf":
        g.fill_(-math.inf)
    return g


# --- what models of transformers are run on


def tokens(batch: int, length: int, seed: int = 0) -> Tensor:
    """Token ids, none of them 0, on the CPU."""
    return torch.randint(1, 256, (batch, length), generator=torch.Generator().manual_seed(seed))


def left_padded() -> tuple[Tensor, dict]:
    """Three prompts, two of them padded on the left, and the options that say so."""
    ids = tokens(3, 9)
    mask = torch.ones_like(ids)
    for row, pad in enumerate((0, 4, 7)):
        ids[row, :pad], mask[row, :pad] = 0, 0
    return ids, {"attention_mask": mask, "max_new_tokens": 16}


@torch.no_grad()
def generate(model, ids: Tensor, **options) -> Tensor:
    """Greedy tokens, 64 new ones unless told otherwise."""
    options = {"max_new_tokens": 64, "do_sample": False, "pad_token_id": 0} | options
    return model.generate(ids, **options)
