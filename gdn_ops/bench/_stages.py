"""The parts of a Gated DeltaNet layer of transformers, one callable each, theirs and ours.

One decode step of an unmodified Qwen3.5 layer and of its patched copy on the same input and the
same history; used by the layer benchmark and by the demo's table.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import DynamicCache
from transformers.models.qwen3_5 import modeling_qwen3_5 as modeling

from gdn_ops import reference
from gdn_ops._modules import product, project
from gdn_ops.bench._transformers import grouped
from gdn_ops.hf import patch
from gdn_ops.hf.tiny import tiny_config

ops = torch.ops.gdn
STAGES = ("input projection", "conv", "gating", "recurrence", "norm", "output projection")
HISTORY = 4  # tokens before the step, so that both states are in use


@dataclass
class Layers:
    """An unmodified layer and its patched copy, with the input of a step and fresh caches."""

    plain: nn.Module
    ours: nn.Module
    x: Tensor
    config: object

    @classmethod
    def build(
        cls,
        hidden: int,
        heads: tuple[int, int],
        batch: int,
        dtype: torch.dtype,
        seed: int = 0,
        device: str = "cpu",
    ) -> Layers:
        H, HV = heads
        config = tiny_config(
            "qwen3_5", hidden_size=hidden, layers=1, num_k_heads=H, num_v_heads=HV,
            layer_types=["linear_attention"],
        )  # fmt: skip
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            plain = modeling.Qwen3_5GatedDeltaNet(config, 0).to(device, dtype).eval()
            x = torch.randn(batch, 1, hidden, dtype=dtype).to(device)
        plain.requires_grad_(False)
        return cls(plain, patch(copy.deepcopy(plain)), x, config)

    def cache(self, layer: nn.Module) -> DynamicCache:
        """A cache that ``layer`` filled with a few tokens."""
        cache = DynamicCache(config=self.config)
        gen = torch.Generator().manual_seed(1)
        B, _, hidden = self.x.shape
        prompt = torch.randn(B, HISTORY, hidden, generator=gen).to(self.x)
        with torch.no_grad():
            layer(prompt, cache)
        return cache

    def oracle(self, cache: DynamicCache) -> Tensor:
        """The layer's output for ``x`` after ``cache``, in float64 on the CPU; the cache stays as
        it is."""
        p, states = self.plain, cache.layers[0]
        x = self.x.cpu().double()
        weights = (p.in_proj_qkv, p.in_proj_z, p.in_proj_b, p.in_proj_a)
        projected = torch.cat([x @ w.weight.cpu().double().T for w in weights], -1)
        parameters = (p.A_log, p.dt_bias, p.norm.weight, states.conv_states[0])
        y, _, _ = reference.decode(
            projected, p.conv1d.weight.squeeze(1).cpu(), None, *(t.cpu() for t in parameters),
            states.recurrent_states[0].cpu().transpose(-1, -2), p.num_k_heads, p.head_k_dim,
            eps=p.norm.variance_epsilon,
        )  # fmt: skip
        return y @ p.out_proj.weight.cpu().double().T


Stage = Callable[[], object]


def theirs(layers: Layers) -> dict[str, Stage]:
    """The stages of the layer's forward, in its own code, each on the true input of that stage."""
    p, x = layers.plain, layers.x
    states = layers.cache(p).layers[0]
    conv_state, state = states.conv_states[0], states.recurrent_states[0]
    weight = p.conv1d.weight.squeeze(1)
    mixed, z, b, a = p.in_proj_qkv(x), p.in_proj_z(x), p.in_proj_b(x), p.in_proj_a(x)
    B = x.shape[0]

    def project():
        return p.in_proj_qkv(x), p.in_proj_z(x), p.in_proj_b(x), p.in_proj_a(x)

    def conv():
        return modeling.causal_conv1d_update(
            mixed.transpose(1, 2), conv_state, weight, p.conv1d.bias, p.activation
        )

    def gating():
        return b.sigmoid(), -p.A_log.float().exp() * F.softplus(a.float() + p.dt_bias)

    q, k, v = conv().transpose(1, 2).split([p.key_dim, p.key_dim, p.value_dim], -1)
    q, k = (t.reshape(B, 1, -1, p.head_k_dim) for t in (q, k))
    v = v.reshape(B, 1, -1, p.head_v_dim)
    beta, g = gating()

    rule = grouped(modeling.torch_recurrent_gated_delta_rule)

    def recurrence():
        o, new = rule(
            q, k, v, g=g, beta=beta, initial_state=state, output_final_state=True,
            use_qk_l2norm_in_kernel=True,
        )  # fmt: skip
        state.copy_(new)
        return o

    o = recurrence().reshape(-1, p.head_v_dim)
    gate = z.reshape(-1, p.head_v_dim)

    def norm():
        return p.norm(o, gate)

    y = norm().reshape(B, 1, -1)
    return dict(
        zip(STAGES, (project, conv, gating, recurrence, norm, lambda: p.out_proj(y)), strict=True)
    )


def ours(layers: Layers) -> tuple[dict[str, Stage], Stage]:
    """The same stages on our ops, and ``decode``, which does the four middle ones in one call."""
    p, x = layers.ours, layers.x
    states = layers.cache(p).layers[0]
    conv_state, state = states.conv_states[0], states.recurrent_states[0].transpose(-1, -2)
    weight, packed = p.conv1d.weight.squeeze(1), p.gdn_packed
    heads = (p.num_k_heads, p.head_k_dim)
    projected = product(x, packed)
    mixed, z, b, a = projected.split(
        [2 * p.key_dim + p.value_dim, p.value_dim, p.num_v_heads, p.num_v_heads], -1
    )

    def project_in():
        return product(x, packed)

    def conv():
        return ops.short_conv.default(mixed, weight, p.conv1d.bias, conv_state)

    def gating():
        return ops.gating.default(a, b, p.A_log, p.dt_bias)

    q, k, v = conv().split([p.key_dim, p.key_dim, p.value_dim], -1)
    q, k = (t.unflatten(-1, heads) for t in (q, k))
    v = v.unflatten(-1, (p.num_v_heads, p.head_v_dim))
    g, beta = gating()

    def recurrence():
        return ops.recurrent.default(q, k, v, g, beta, state, None, None, None, None, None, True)

    o = recurrence()

    def norm():
        gate = z.contiguous().unflatten(-1, (p.num_v_heads, p.head_v_dim))
        return ops.gated_rms_norm.default(o, gate, p.norm.weight, p.norm.variance_epsilon)

    y = norm().flatten(-2)

    def fused():
        return ops.decode.default(
            projected, weight, p.conv1d.bias, p.A_log, p.dt_bias, p.norm.weight, conv_state, state,
            *heads, None, None, None, None, None, True, p.norm.variance_epsilon,
        )  # fmt: skip

    def project_out():
        return project(p.out_proj, y)

    stages = (project_in, conv, gating, recurrence, norm, project_out)
    return dict(zip(STAGES, stages, strict=True)), fused
