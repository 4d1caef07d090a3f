"""A decode step under torch.compile and CUDA graphs on one NVIDIA device, patched and as
transformers has it: a Qwen3.5 layer of the true geometry, and a tiny model of four layers.

    PYTHONPATH=. python benchmarks/layer_cuda.py [--batch 1 --batch 256] [--only layer] [--json F]

Every candidate is first compared with float64. Times are the wall's, launches included, over loops
of steps in turns, medians. Floor: weights and hidden states once, both states read and written, at
the copy bandwidth of the same run. transformers runs its own torch code unless
flash-linear-attention or causal-conv1d are installed.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
from collections.abc import Callable

import torch
import transformers
from cuda_timing import captured, relative_error, table_of

import gdn_ops
from gdn_ops.bench._stages import Layers
from gdn_ops.bench._timing import nbytes
from gdn_ops.hf.compat import cache_argument
from gdn_ops.hf.tiny import tiny_model

HIDDEN, HEADS = 5120, (16, 48)
BATCHES = (1, 16, 256)
GRAPHS = "reduce-overhead"
LIMIT = {"layer": 2e-2, "model": 1e-4}  # bfloat16 with its roundings between; float32
ROUNDS = 7

Step = Callable[[], torch.Tensor]


def in_one_graph(step: Step) -> Step:
    """``step`` in a graph of our own."""
    graph, y = captured(step)

    def replay():
        graph.replay()
        return y

    return replay


def forms(name: str, step: Callable) -> dict[str, Callable[[Callable], Step]]:
    """Ways to run ``step(cache)``: name -> cache -> call."""
    calls = {
        f"{name} eager": step,
        f"{name} compiled": torch.compile(step, dynamic=False),
        f"{name} compiled, CUDA graphs": torch.compile(step, dynamic=False, mode=GRAPHS),
    }
    return {way: lambda cache, call=call: lambda: call(cache) for way, call in calls.items()}


def milliseconds(calls: dict[str, Step], each: int) -> dict[str, tuple[float, float]]:
    """Median and half the spread of ``ROUNDS`` loops of ``each`` steps, candidates in turns."""
    times = {name: [] for name in calls}
    for round_ in range(ROUNDS + 1):
        for name, call in calls.items():
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(each):
                call()
            torch.cuda.synchronize()
            if round_:
                times[name].append((time.perf_counter() - start) / each * 1e3)
    return {n: (statistics.median(t), (max(t) - min(t)) / 2) for n, t in times.items()}


def report(table, case, candidates, limit, floor, each) -> None:
    """``candidates``: name -> (call, error of its first output)."""
    calls = {}
    for name, (call, error) in candidates.items():
        if error <= limit:
            calls[name] = call
        else:
            print(f"{case} {name}: out of tolerance {error:.2e}, not timed")
    for name, (ms, spread) in milliseconds(calls, each).items():
        error = candidates[name][1]
        table.append({"case": case, "candidate": name, "ms": ms, "spread_ms": spread,
                      "floor_ms": floor, "error": error})  # fmt: skip
        beside = "" if floor is None else f"  floor {floor:.4f}  {floor / ms:.2f}"
        print(f"{case} {name:<38} {ms:9.4f} ms +-{spread:.4f}{beside}  err {error:.1e}", flush=True)


def layer_table(table, bandwidth, batch) -> None:
    torch._dynamo.reset()
    layers = Layers.build(HIDDEN, HEADS, batch, torch.bfloat16, device="cuda")
    x = layers.x
    filled = layers.cache(layers.ours)
    moved = nbytes(*layers.plain.parameters()) + 2 * nbytes(x)
    moved += 2 * nbytes(filled.layers[0].conv_states[0], filled.layers[0].recurrent_states[0])
    candidates = {}
    for name, layer in (("transformers", layers.plain), ("gdn_ops", layers.ours)):
        start = layers.cache(layer)
        want = layers.oracle(start)
        ways = forms(name, lambda cache, layer=layer: layer(x, cache))
        for way, make in list(ways.items())[:2]:
            ways[f"{way}, in one graph"] = make
        for way, make in ways.items():
            cache = copy.deepcopy(start)
            call = make(cache)
            if way.endswith("in one graph"):
                call = in_one_graph(call)
                restore(cache, start)
            error = relative_error(call(), want)
            for _ in range(4):  # compiled, warmed up, captured
                call()
            candidates[way] = call, error
    report(table, f"layer B={batch}", candidates, LIMIT["layer"], moved / bandwidth * 1e3, 50)


def restore(cache, start) -> None:
    for slot in ("conv_states", "recurrent_states"):
        getattr(cache.layers[0], slot)[0].copy_(getattr(start.layers[0], slot)[0])


def model_table(table, batch) -> None:
    torch._dynamo.reset()
    plain = tiny_model("qwen3_5").cuda()
    ids = torch.randint(1, 256, (batch, 16), device="cuda")
    token = torch.randint(1, 256, (batch, 1), device="cuda")

    # The layers' own name for it changed with the model's.
    newer = cache_argument(type(plain.model.layers[0].linear_attn)) == "cache"
    key = "cache" if newer else "past_key_values"
    candidates = {}
    double = copy.deepcopy(plain).double()
    want = double(torch.cat([ids, token], 1)).logits[:, -1:]
    for name, model in (("transformers", plain), ("gdn_ops", gdn_ops.patch(copy.deepcopy(plain)))):

        def step(cache, model=model):
            return model(token, **{key: cache}).logits

        for way, make in forms(name, step).items():
            cache = transformers.StaticCache(config=model.config, max_cache_len=1024)
            model(ids, **{key: cache})
            call = make(cache)
            error = relative_error(call(), want)
            for _ in range(4):
                call()
            candidates[way] = call, error
    report(table, f"tiny model B={batch}", candidates, LIMIT["model"], None, 20)


def fill(table, bandwidth, args) -> None:
    print(f"transformers {transformers.__version__}")
    with torch.no_grad():
        for batch in args.batch or BATCHES:
            if args.only != "model":
                layer_table(table, bandwidth, batch)
            if args.only != "layer":
                model_table(table, batch)
            torch.cuda.empty_cache()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch", type=int, action="append", help="batches other than 1, 16, 256")
    parser.add_argument("--only", choices=("layer", "model"))
    table_of(parser, fill)
