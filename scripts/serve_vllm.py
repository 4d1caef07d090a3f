"""Serves a small Qwen3.5 with vLLM, without and with these ops, and compares the tokens.

    python scripts/serve_vllm.py                  # vLLM's CPU engine, 32 concurrent requests
    python scripts/serve_vllm.py --speculate 2    # the same with n-gram drafts

Needs vLLM (0.32 or later for its CPU engine) and gdn_ops installed in the same environment, so that
vLLM finds the plug-in. Each side runs in a process of its own: greedy decoding, prompts of mixed
lengths, a token budget a step that makes prefill and decode share batches. A warm-up under torch's
profiler shows which operators computed the layers. Prints one line a side, then where tokens differ
and by how much vLLM itself preferred its token there.

A random model's two best logits are often equal in bfloat16, and then any rounding picks another
token. So the random model is first taught, for a minute, to follow chains (the first token picks a
permutation, each further one is the image of the last), on which it is sure of itself; --teach 0
leaves it random.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from datetime import date
from pathlib import Path

import torch

KEYS = 4  # tokens that pick a permutation of the others


def chains(args: argparse.Namespace, count: int, length: int, generator) -> torch.Tensor:
    """``[count, length]`` sequences: a key, a random start, then its images under the key."""
    seeded = torch.Generator().manual_seed(args.seed)
    tables = [torch.randperm(args.vocab - KEYS, generator=seeded) + KEYS for _ in range(KEYS)]
    key = torch.randint(0, KEYS, (count,), generator=generator)
    tokens = [key, torch.randint(KEYS, args.vocab, (count,), generator=generator)]
    for _ in range(length - 2):
        tokens.append(torch.stack(tables)[key, tokens[-1] - KEYS])
    return torch.stack(tokens, 1)


def prompts(args: argparse.Namespace) -> list[dict]:
    generator = torch.Generator().manual_seed(args.seed + 2)
    full = chains(args, args.requests, args.longest, generator)
    lengths = torch.randint(3, args.longest + 1, (args.requests,), generator=generator)
    return [
        {"prompt_token_ids": row[:n].tolist()}
        for row, n in zip(full, lengths.tolist(), strict=True)
    ]


def make_model(args: argparse.Namespace, where: str) -> None:
    from gdn_ops.hf import patch, unpatch
    from gdn_ops.hf.tiny import tiny_model

    model = tiny_model(
        "qwen3_5", seed=args.seed, layers=args.layers, hidden_size=args.hidden,
        num_k_heads=args.k_heads, num_v_heads=args.v_heads, vocab_size=args.vocab,
        initializer_range=0.05,
    )  # fmt: skip
    patch(model)
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.0)
    generator = torch.Generator().manual_seed(args.seed + 1)
    for step in range(args.teach):
        x = chains(args, 8, 40, generator)
        logits = model(x).logits[:, 2:-1].flatten(0, 1).float()
        loss = torch.nn.functional.cross_entropy(logits, x[:, 3:].flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if loss.item() < 0.03:
            print(f"taught in {step + 1} steps, loss {loss.item():.3f}", flush=True)
            break
    unpatch(model)
    model.eval().to(torch.bfloat16).save_pretrained(where)


def serve(args: argparse.Namespace) -> dict:
    """One side, in this process: what the parent reads as JSON."""
    import vllm

    from gdn_ops.compat import plugin

    drafts = {"method": "ngram", "num_speculative_tokens": args.speculate, "prompt_lookup_max": 3}
    engine = vllm.LLM(
        args.model, skip_tokenizer_init=True, dtype="bfloat16", enforce_eager=True, seed=args.seed,
        max_model_len=args.longest + args.tokens + 8, max_num_seqs=args.requests,
        max_num_batched_tokens=args.budget, enable_prefix_caching=False,
        speculative_config=drafts if args.speculate else None,
    )  # fmt: skip

    def generate(requests, tokens):
        settings = vllm.SamplingParams(
            temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False, logprobs=2
        )
        start = time.perf_counter()
        outputs = engine.generate(requests, settings, use_tqdm=False)
        return [o.outputs[0] for o in outputs], time.perf_counter() - start

    requests = prompts(args)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        generate(requests[:4], 4)
    operators = {
        e.key: e.count
        for e in profile.key_averages()
        if e.key.startswith("gdn::")
        or (e.key.startswith("_C::") and any(w in e.key for w in ("delta_rule", "conv1d", "gdn")))
    }
    generate(requests, args.tokens)  # once for allocations and lazily compiled code
    runs = [generate(requests, args.tokens) for _ in range(args.repeats)]
    outputs = runs[0][0]
    if any([o.token_ids for o in again] != [o.token_ids for o in outputs] for again, _ in runs):
        sys.exit("a run gave other tokens than the first")
    margins = []
    for o in outputs:
        ranked = [sorted((p.logprob for p in step.values()), reverse=True) for step in o.logprobs]
        margins.append([best[0] - best[1] for best in ranked])
    return {
        "vllm": vllm.__version__,
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "replaced": plugin.installed(),
        "operators": operators,
        "tokens": [list(o.token_ids) for o in outputs],
        "margins": margins,
        "seconds": [seconds for _, seconds in runs],
    }


def run_side(args: argparse.Namespace, ours: bool) -> dict:
    environment = os.environ | {"GDN_OPS_VLLM": str(int(ours)), "HF_HUB_OFFLINE": "1"}
    # In one process, so that the profiler sees the operators.
    environment |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1"}
    environment.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    with tempfile.NamedTemporaryFile(suffix=".json") as result:
        command = [sys.executable, __file__, *sys.argv[1:], "--model", args.model]
        log = subprocess.run(
            [*command, "--result", result.name], env=environment, text=True, capture_output=True
        )
        if log.returncode:
            sys.exit(f"{log.stdout[-4000:]}\n{log.stderr[-8000:]}")
        side = json.loads(Path(result.name).read_text())
    rate = sum(map(len, side["tokens"])) / min(side["seconds"])
    used = ", ".join(f"{name} x{count}" for name, count in sorted(side["operators"].items()))
    seconds = ", ".join(f"{s:.2f}" for s in side["seconds"])
    print(f"{'with gdn_ops' if ours else 'vLLM alone'}: {seconds} s, best {rate:.0f} tok/s")
    print(f"  operators of 4 requests: {used}", flush=True)
    return side


def compare(alone: dict, ours: dict) -> bool:
    """Prints what differs; true if nothing does."""
    firsts = []
    for n, (a, b) in enumerate(zip(alone["tokens"], ours["tokens"], strict=True)):
        at = next((i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y), None)
        if at is not None:
            firsts.append((n, at, alone["margins"][n][at]))
    requests = len(alone["tokens"])
    smallest = min(map(min, alone["margins"]))
    print(f"tokens: {requests - len(firsts)} of {requests} requests equal")
    print(f"vLLM alone preferred its tokens by {smallest:.3f} nats at least")
    for n, at, margin in firsts:
        print(f"  request {n} differs first at token {at}, preferred by {margin:.3f} nats")
    return not firsts


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=32, help="concurrent requests")
    parser.add_argument("--tokens", type=int, default=32, help="generated a request")
    parser.add_argument("--longest", type=int, default=300, help="longest prompt")
    parser.add_argument("--budget", type=int, default=256, help="tokens a step (chunked prefill)")
    parser.add_argument("--speculate", type=int, default=0, help="n-gram draft tokens")
    parser.add_argument("--repeats", type=int, default=5, help="timed runs a side")
    parser.add_argument("--teach", type=int, default=120, help="most training steps; 0: random")
    parser.add_argument("--layers", type=int, default=4, help="every fourth is full attention")
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--k-heads", type=int, default=2)
    parser.add_argument("--v-heads", type=int, default=6)
    parser.add_argument("--vocab", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--model", default="", help="a checkpoint; absent: a small one is made")
    parser.add_argument("--result", default="", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.result:
        Path(args.result).write_text(json.dumps(serve(args)))
        return
    with tempfile.TemporaryDirectory() as where:
        if not args.model:
            make_model(args, where)
            args.model = where
        alone = run_side(args, ours=False)
        ours = run_side(args, ours=True)
    print(
        f"{date.today()}, vLLM {ours['vllm']}, torch {ours['torch']}, {ours['threads']} threads, "
        f"{platform.machine()}, {len(ours['replaced'])} names replaced"
    )
    same = compare(alone, ours)
    if not any(name.startswith("gdn::") for name in ours["operators"]):
        sys.exit("gdn_ops computed nothing: is it installed in this environment?")
    if any(name.startswith("gdn::") for name in alone["operators"]):
        sys.exit("gdn_ops was not off in the first run")
    sys.exit(0 if same else 1)


if __name__ == "__main__":
    main()
