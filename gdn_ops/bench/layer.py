"""One decode step of a whole Qwen3.5 Gated DeltaNet layer, patched and as transformers has it.

Hidden size 256 makes the projections nearly free, so that the rest of the layer shows. The floor
counts the weights, both states read and written, and the hidden states in and out.
"""

from __future__ import annotations

import copy
import itertools

import torch
from torch import Tensor

from gdn_ops._tolerance import TOLERANCE, scaled_error
from gdn_ops.bench._timing import (
    SHORT,
    Candidate,
    Options,
    buffers,
    keep_freed_memory,
    measure,
    nbytes,
)

TITLE = "whole patched layer of Qwen3.5 against transformers, eager and compiled"
ON_DEVICE = False  # benchmarks/layer_cuda.py
HIDDEN = 256
HEADS = (16, 48)
BATCHES = (1, 16)
DTYPES = (torch.bfloat16, torch.float32)
# Tolerances of one rounding: projections, conv, recurrence, norm and output are each rounded.
ROUNDINGS = 8


def case_rows(
    heads: tuple[int, int], batch: int, dtype: torch.dtype, hot: bool, options: Options
) -> list[dict]:
    from gdn_ops.bench._stages import Layers

    layers = Layers.build(HIDDEN, heads, batch, dtype, options.seed)
    own = {"gdn_ops": layers.ours, "transformers": layers.plain}
    filled = {name: layers.cache(layer) for name, layer in own.items()}
    one = filled["gdn_ops"].layers[0]
    state_bytes = nbytes(one.recurrent_states[0])
    caches = {
        name: buffers(state_bytes, lambda _, cache=cache: copy.deepcopy(cache), hot)
        for name, cache in filled.items()
    }
    # Memory as it lies there, whichever way the cache's strides go.
    pools = [c.layers[0].recurrent_states[0].transpose(-1, -2) for c in caches["gdn_ops"]]

    def candidate(name: str, compiled: bool) -> Candidate:
        step = own[name]
        if compiled:
            step = torch.compile(step, dynamic=False)

        def call(i: int) -> Tensor:
            return step(layers.x, caches[name][i])

        def check() -> float:
            want = layers.oracle(caches[name][0])
            rtol, atol = (ROUNDINGS * t for t in TOLERANCE[dtype])
            return scaled_error(call(0), want, rtol, atol)

        return Candidate(f"{name} {'compiled' if compiled else 'eager'}", call, check)

    torch._dynamo.reset()
    candidates = [candidate("gdn_ops", False)]
    if options.compiled:
        candidates.append(candidate("gdn_ops", True))
    if options.peers:
        candidates.append(candidate("transformers", False))
        if options.compiled:
            candidates.append(candidate("transformers", True))
    moved = 2 * state_bytes + 2 * nbytes(one.conv_states[0]) + 2 * nbytes(layers.x)
    moved += nbytes(*layers.plain.parameters())
    case = {
        "family": "layer", "op": f"layer, hidden {HIDDEN}", "heads": f"{heads[0]}/{heads[1]}",
        "batch": batch, "tokens": 1, "dtype": SHORT[dtype],
        "state": SHORT[one.recurrent_states[0].dtype], "mode": "hot" if hot else "rotated",
    }  # fmt: skip
    with torch.no_grad():
        return measure(case, candidates, pools, moved, options)


def run(options: Options) -> list[dict]:
    """Batch 1 and 16, weights and activations bf16 and f32, rotated and hot."""
    try:
        import transformers  # noqa: F401
    except ImportError as error:
        return measure(
            {"family": "layer", "op": f"layer, hidden {HIDDEN}"},
            [Candidate("gdn_ops", skipped=f"transformers is not usable: {error}")], [], 0, options,
        )  # fmt: skip
    keep_freed_memory()
    rows: list[dict] = []
    cases = itertools.product(
        options.heads or (HEADS,), options.batches or BATCHES, DTYPES, (False, True)
    )
    for case in cases:
        rows += case_rows(*case, options)
    return rows
