"""Small random models of the true architecture, for the demo, the tests and the benchmarks.

The head geometry is that of the large models (three value heads a key head, head size 128 unless
told otherwise, convolution of width 4, one full-attention layer in four); only widths, depth and
vocabulary are small. Nothing is downloaded.
"""

from __future__ import annotations

from typing import Any

import torch
import transformers
from transformers.models.qwen3_5 import modeling_qwen3_5
from transformers.models.qwen3_5_moe import modeling_qwen3_5_moe
from transformers.models.qwen3_next import modeling_qwen3_next

FAMILIES = ("qwen3_next", "qwen3_next_moe", "qwen3_5", "qwen3_5_moe")

_CONFIGS = {
    "qwen3_next": transformers.Qwen3NextConfig,
    "qwen3_next_moe": transformers.Qwen3NextConfig,
    "qwen3_5": transformers.Qwen3_5TextConfig,
    "qwen3_5_moe": transformers.Qwen3_5MoeTextConfig,
}
_MODELS = {
    "qwen3_next": modeling_qwen3_next.Qwen3NextForCausalLM,
    "qwen3_next_moe": modeling_qwen3_next.Qwen3NextForCausalLM,
    "qwen3_5": modeling_qwen3_5.Qwen3_5ForCausalLM,
    "qwen3_5_moe": modeling_qwen3_5_moe.Qwen3_5MoeForCausalLM,
}


def tiny_config(
    family: str,
    *,
    hidden_size: int = 64,
    layers: int = 4,
    num_k_heads: int = 2,
    num_v_heads: int = 6,
    head_dim: int = 128,
    vocab_size: int = 256,
    **overrides: Any,
) -> transformers.PretrainedConfig:
    """Configuration of a small text model of ``family`` (one of :data:`FAMILIES`).

    Args:
        layers: every fourth is full attention, the others are Gated DeltaNet.
        num_k_heads, num_v_heads, head_dim: H, HV and K = V of the Gated DeltaNet layers.
        overrides: any field of the configuration class.
    """
    if family not in FAMILIES:
        raise ValueError(f"family: expected one of {FAMILIES}, got {family!r}")
    fields: dict[str, Any] = {
        "vocab_size": vocab_size,
        "hidden_size": hidden_size,
        "intermediate_size": 2 * hidden_size,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "linear_num_key_heads": num_k_heads,
        "linear_num_value_heads": num_v_heads,
        "linear_key_head_dim": head_dim,
        "linear_value_head_dim": head_dim,
        "max_position_embeddings": 4096,
        # Wide enough that greedy choices of a random model are no near-ties.
        "initializer_range": 0.2,
    }
    if family == "qwen3_next":
        fields |= {"num_experts": 0}
    if family.endswith("moe"):
        fields |= {
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": hidden_size,
            "shared_expert_intermediate_size": hidden_size,
        }
    return _CONFIGS[family](**(fields | overrides))


def tiny_model(
    family: str, *, seed: int = 0, dtype: torch.dtype = torch.float32, **config: Any
) -> transformers.PreTrainedModel:
    """A random model of :func:`tiny_config`, the same for the same seed, in eval mode.

    The global random state is left as it was.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = _MODELS[family](tiny_config(family, **config))
    # Random models get gates that forget within a few tokens; spread them as trained ones are.
    for name, parameter in model.named_parameters():
        if name.endswith("A_log"):
            parameter.data = torch.linspace(-3.0, 1.5, parameter.numel())
    return model.to(dtype).eval()
