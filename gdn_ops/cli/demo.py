"""Decode with an unmodified Hugging Face Qwen3.5 model (tiny, random) with our ops and without.

Greedy tokens of the patched model are compared one by one with those of the library's own fallback;
the status is 1 if they differ. Then: tokens per second of both, eager and under torch.compile, and
where the time of one Gated DeltaNet layer goes. Nothing is downloaded.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
from collections.abc import Callable, Hashable
from typing import TypeVar

import torch

from gdn_ops import bench
from gdn_ops.cli import _arguments
from gdn_ops.cli._arguments import SEED, whole
from gdn_ops.cli._output import Output

HELP = "a tiny Qwen3.5 decodes with our ops and with its own fallback"
HEADS = (16, 48)  # of Qwen3.5-27B: key heads, value heads; K = V = 128
PROMPT = 16
Name = TypeVar("Name", bound=Hashable)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tokens", type=whole(2), default=64, help="new tokens (default 64)")
    parser.add_argument("--batch", type=whole(1), default=1, help="sequences (default 1)")
    parser.add_argument("--hidden", type=whole(1), default=256, help="hidden size (default 256)")
    parser.add_argument("--no-compile", action="store_true", help="eager only: much shorter")
    parser.add_argument(
        "--device", choices=("cpu", "cuda"), default="cpu", help="where the model runs (cpu)"
    )
    parser.add_argument("--seed", type=SEED, default=0, help="of the model and the prompt (0)")


def _now(x: torch.Tensor) -> float:
    """The time when what was asked of x's device is done."""
    if x.is_cuda:
        torch.cuda.synchronize()
    return time.perf_counter()


def _generate(model, ids: torch.Tensor, tokens: int, compiled: bool) -> tuple[torch.Tensor, float]:
    """New greedy tokens, and tokens a second over the steps after the prompt's."""
    times: list[float] = []

    def clock(input_ids, scores, **kwargs):
        times.append(_now(input_ids))
        return input_ids.new_zeros(input_ids.shape[0], dtype=torch.bool)  # never a reason to stop

    out = model.generate(
        ids,
        max_new_tokens=tokens,
        min_new_tokens=tokens,
        do_sample=False,
        pad_token_id=0,
        stopping_criteria=[clock],
        # A compiled step wants shapes that stay; what is compiled is our choice, not generate()'s.
        cache_implementation="static" if compiled else None,
        disable_compile=True,
    )
    seconds = times[-1] - times[0]
    return out[:, ids.shape[1] :], ids.shape[0] * (tokens - 1) / seconds


def _speed(model, ids: torch.Tensor, tokens: int, compiled: bool) -> tuple[torch.Tensor, float]:
    """:func:`_generate` once to warm up (and compile), once to count."""
    if compiled:
        torch._dynamo.reset()
        model.forward = torch.compile(model.forward)
    try:
        _generate(model, ids, tokens, compiled)
        return _generate(model, ids, tokens, compiled)
    finally:
        if compiled:
            del model.forward


def tokens_part(args: argparse.Namespace, out: Output, status) -> tuple[bool, dict]:
    import gdn_ops.hf
    from gdn_ops.hf.tiny import tiny_model

    H, HV = HEADS
    plain = tiny_model(
        "qwen3_5", seed=args.seed, hidden_size=args.hidden, num_k_heads=H, num_v_heads=HV
    ).to(args.device)
    patched = gdn_ops.hf.patch(copy.deepcopy(plain))
    gen = torch.Generator().manual_seed(args.seed)
    ids = torch.randint(1, plain.config.vocab_size, (args.batch, PROMPT), generator=gen)
    ids = ids.to(args.device)
    rows, expected = [], None
    for compiled in (False,) if args.no_compile else (False, True):
        for name, model in (("transformers", plain), ("gdn_ops", patched)):
            mode = "compiled" if compiled else "eager"
            status(f"generate, {name} {mode}")
            found, rate = _speed(model, ids, args.tokens, compiled)
            expected = found if expected is None else expected
            rows.append(
                {
                    "candidate": name,
                    "mode": mode,
                    "tokens_per_s": rate,
                    "tokens": found.tolist(),
                    "equal": torch.equal(found, expected),
                }
            )
    layers = gdn_ops.hf.active(patched)
    out.console.print(
        f"model: Qwen3.5, {plain.config.num_hidden_layers} layers, {len(layers)} of them Gated "
        f"DeltaNet with {H} key and {HV} value heads of 128, hidden {args.hidden}, float32, "
        f"random weights, batch {args.batch}; patched: {', '.join(set(layers.values()))}",
        markup=False,
    )
    for row in rows:
        if row["mode"] == "eager":
            head = " ".join(str(t) for t in row["tokens"][0][:16])
            out.console.print(f"{row['candidate']:>12}: {head} ...", markup=False)
    equal = all(r["equal"] for r in rows)
    out.console.print(
        f"verdict: {args.batch} x {args.tokens} greedy tokens of all runs are "
        + ("EQUAL" if equal else "DIFFERENT"),
        style="bold green" if equal else "bold red",
    )
    base = {r["mode"]: r["tokens_per_s"] for r in rows if r["candidate"] == "transformers"}
    out.table(
        "decode speed of the whole model",
        ["implementation", "mode", "tokens/s", "times transformers"],
        [
            [
                r["candidate"],
                r["mode"],
                f"{r['tokens_per_s']:.1f}",
                f"{r['tokens_per_s'] / base[r['mode']]:.2f}x",
            ]
            for r in rows
        ],
    )
    return equal, {"generation": rows, "active": layers}


def _times(
    calls: dict[Name, Callable[[], object]],
    on: torch.Tensor,
    seconds: float = 0.4,
    rounds: int = 7,
) -> dict[Name, float]:
    """Median milliseconds of each call on the device of ``on``, taken in turns."""
    samples: dict[Name, list[float]] = {name: [] for name in calls}
    reps = {}
    for name, call in calls.items():
        for _ in range(3):
            call()
        start = _now(on)
        call()
        reps[name] = max(1, int(seconds / rounds / len(calls) / (_now(on) - start)))
    for _ in range(rounds):
        for name, call in calls.items():
            start = _now(on)
            for _ in range(reps[name]):
                call()
            samples[name].append((_now(on) - start) / reps[name] * 1e3)
    return {name: statistics.median(found) for name, found in samples.items()}


def layer_part(args: argparse.Namespace, out: Output, status, dtype: torch.dtype) -> dict:
    """Each part of a layer of ``dtype``, as transformers computes it and as we do."""
    from gdn_ops.bench._stages import STAGES, Layers, ours, theirs

    layers = Layers.build(args.hidden, HEADS, args.batch, dtype, args.seed, args.device)
    caches = {"transformers": layers.cache(layers.plain), "gdn_ops": layers.cache(layers.ours)}
    tables = {}
    for compiled in (False,) if args.no_compile else (False, True):
        mode = "compiled" if compiled else "eager"
        if compiled:
            torch._dynamo.reset()

        def made(call, compiled=compiled):
            return torch.compile(call, dynamic=False) if compiled else call

        stages, fused = ours(layers)
        calls = {("transformers", s): made(c) for s, c in theirs(layers).items()}
        calls |= {("gdn_ops", s): made(c) for s, c in stages.items()}
        calls["gdn_ops", "conv to norm in one call"] = made(fused)
        for name, layer in (("transformers", layers.plain), ("gdn_ops", layers.ours)):
            step = made(layer)
            calls[name, "whole layer"] = lambda step=step, cache=caches[name]: step(layers.x, cache)
        status(f"time of a layer's parts, {mode}" + (": compiling" if compiled else ""))
        times = _times(calls, layers.x)
        tables[mode] = [
            {"stage": s, **{n: times.get((n, s)) for n in ("transformers", "gdn_ops")}}
            for s in (*STAGES, "conv to norm in one call", "whole layer")
        ]
        # The patched layer runs the fused call in place of the four separate ones between.
        total = {
            "transformers": sum(times["transformers", s] for s in STAGES),
            "gdn_ops": times["gdn_ops", STAGES[0]]
            + times["gdn_ops", "conv to norm in one call"]
            + times["gdn_ops", STAGES[-1]],
        }
        shown = []
        for row in tables[mode]:
            cells = [row["stage"]]
            for n in ("transformers", "gdn_ops"):
                ms = row[n]
                cells.append("-" if ms is None else f"{ms:.4f}")
                inside = n == "gdn_ops" and row["stage"] in STAGES[1:-1]
                share = None if ms is None or row["stage"] == "whole layer" else ms / total[n]
                row[f"{n}_share"] = share
                cells.append("-" if share is None else f"{share * 100:.0f}%" + "*" * inside)
            shown.append(cells)
        out.table(
            f"measured: one decode step of a layer, {str(dtype)[6:]}, {mode}, hot, "
            f"batch {args.batch}",
            ["part", "transformers ms", "share", "gdn_ops ms", "share"],
            shown,
        )
    out.console.print(
        "* measured as separate calls; the layer runs them as one, so our shares count that one. "
        "Compiled parts are compiled one by one, the whole layer at once.",
        markup=False,
    )
    return {"layer": tables}


def run(args: argparse.Namespace, out: Output) -> tuple[int, dict]:
    _arguments.need_transformers("the demo")
    from transformers.utils import logging

    _arguments.device(args.device)
    machine = bench.machine(args.device)
    out.console.print(", ".join(f"{k}: {v}" for k, v in machine.items()), markup=False)
    # It advises to install other kernels where its own fallback, the peer here, runs.
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        with torch.no_grad(), out.progress("demo", lines=True) as status:
            equal, tokens = tokens_part(args, out, status)
            layer = layer_part(args, out, status, torch.float32)
    finally:
        logging.set_verbosity(verbosity)
    return int(not equal), {"machine": machine, "verdict": equal, **tokens, **layer}
