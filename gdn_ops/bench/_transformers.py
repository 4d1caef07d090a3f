"""What benchmarks need to call the rules of transformers, of any version."""

from __future__ import annotations

from collections.abc import Callable

import torch


def rule(name: str) -> Callable:
    """A rule of Qwen3.5's module by name, without what looks for other kernels in its place.

    Raises:
        ImportError: no transformers that has it.
    """
    from transformers.models.qwen3_5 import modeling_qwen3_5 as modeling

    found = getattr(modeling, name)
    return grouped(getattr(found, "__wrapped__", found))


def grouped(rule: Callable) -> Callable:
    """``rule(q, k, v, ...)`` with fewer key heads than value heads.

    transformers 5.24 repeats q and k in its rules, 5.17 before it calls them.
    """
    qk, v, gate = torch.zeros(1, 1, 2, 2), torch.zeros(1, 1, 4, 2), torch.zeros(1, 1, 4)
    try:
        rule(qk, qk, v, g=gate, beta=gate)
        return rule
    except RuntimeError:

        def repeated(q, k, v, **options):
            ratio = v.shape[2] // q.shape[2]
            q, k = (t.repeat_interleave(ratio, 2) for t in (q, k))
            return rule(q, k, v, **options)

        return repeated
