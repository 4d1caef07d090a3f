"""What the low-rank windows would cost a model: its own activations, run both ways."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import gdn_ops
from gdn_ops import windows
from gdn_ops.cli._arguments import need_transformers
from gdn_ops.cli._output import UsageError
from gdn_ops.nn import CHUNK_FROM

RANKS = (8, 16, 32, 64)


def errors_by_rank(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, full: Tensor, scale: float | None,
    qk_l2norm: bool,
) -> dict[int, Tensor]:  # fmt: skip
    """Relative error ``[HV]`` of each value head's output in the 2-norm, by R, from an empty state.

    Args:
        q, k, v, g, beta: as in :func:`gdn_ops.recurrent_lowrank`.
        full: what the full-rank rule gives for them.
    """
    B, _, H, K = k.shape
    HV, V = v.shape[2:]

    def norm(x: Tensor) -> Tensor:
        return torch.linalg.vector_norm(x, dim=(0, 1, 3), dtype=torch.float64)

    size = norm(full).clamp(min=torch.finfo(torch.float64).tiny)
    found = {}
    for R in RANKS:
        window = windows.allocate(B, H, HV, K, V, R, device=q.device)
        o = gdn_ops.recurrent_lowrank(q, k, v, g, beta, *window, scale=scale, qk_l2norm=qk_l2norm)
        found[R] = norm(o.double() - full) / size
    return found


class Prefills(TorchDispatchMode):
    """Runs every ``gdn::chunk_prefill`` from an empty state a second time, by R, and notes the
    errors: one dict a call."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[dict[int, Tensor]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func is torch.ops.gdn.chunk_prefill.default:
            given = {a.name: x for a, x in zip(func._schema.arguments, args, strict=False)}
            given |= kwargs or {}
            inputs = [given[n] for n in ("q", "k", "v", "g", "beta")]
            scale, l2norm = given.get("scale"), given.get("qk_l2norm", False)
            self.calls.append(errors_by_rank(*inputs, out, scale, l2norm))
        return out


def _model(path: str | None, seed: int):
    """The model and a tokenizer or None; ``path`` None: a small random one."""
    need_transformers("--lowrank")
    from gdn_ops.hf.tiny import tiny_model

    if path is None:
        return tiny_model("qwen3_5", seed=seed), None
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM, AutoTokenizer

    try:
        model = AutoModelForCausalLM.from_pretrained(path, local_files_only=True, dtype="auto")
    except (OSError, ValueError, SafetensorError) as error:
        raise UsageError(
            f"--model: expected a directory with a model, got {path!r}: {error}"
        ) from error
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True)
    except (OSError, ValueError):
        tokenizer = None
    return model.eval(), tokenizer


def measure(path: str | None, text: str | None, tokens: int, seed: int) -> list[dict]:
    """One row for each Gated DeltaNet layer and R: ``rel_l2`` over all heads' mean, ``worst_head``.

    Args:
        path: directory of a Hugging Face model; None: a small random model.
        text: what it reads; None, or a model without a tokenizer: random token ids.
        tokens: how many of them.
    """
    model, tokenizer = _model(path, seed)
    if text is not None and tokenizer is None:
        raise UsageError("--text: the model has no tokenizer beside it")
    if text is None:
        gen = torch.Generator().manual_seed(seed)
        ids = torch.randint(model.get_input_embeddings().num_embeddings, (1, tokens), generator=gen)
    else:
        # Where no tokenizer was saved, transformers may make one without a vocabulary.
        ids = tokenizer(text, return_tensors="pt").input_ids[:, :tokens]
    if ids.shape[1] < CHUNK_FROM:
        raise UsageError(f"expected at least {CHUNK_FROM} tokens to read, got {ids.shape[1]}")
    try:
        gdn_ops.patch(model)
    except ValueError as error:
        raise UsageError(f"--model: {error}") from error
    with torch.no_grad(), Prefills() as seen:
        model(ids, use_cache=False)
    if not seen.calls:
        raise UsageError("--model: its layers ran, but not on chunk_prefill")
    return [
        {
            "layer": layer,
            "tokens": ids.shape[1],
            "R": R,
            "rel_l2": float(error.mean()),
            "worst_head": float(error.max()),
        }
        for layer, call in enumerate(seen.calls)
        for R, error in call.items()
    ]
