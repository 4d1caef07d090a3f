"""Decode speed of a whole model with the geometry of Qwen3.5-27B, random weights, one device.

    python benchmarks/model.py --batch 64,256,512 --weights fp8 --mode buffered
    python benchmarks/model.py --batch 64 --weights fp8 --mode buffered --tokens 4 --accept 0.8

64 layers (three Gated DeltaNet layers, then one of attention, sixteen times), hidden 5120, 16/48
linear heads of 128, 24 query and 4 key heads of 256, intermediate 17408, vocabulary 248,320. The
weights are random (made on the device), so the text means nothing and the work is the model's:
every projection, norm, convolution, state update, attention over a full context, greedy sampling
and the embedding of the next token. One step is captured in a CUDA graph; before it is timed, a
captured step of the first eight layers is compared with the same step run eagerly (all layers would
need every cache twice). 8-bit weights have one scale an output channel, activations one a token,
multiplied by torch's own scaled product, which sums in the tensor cores (`use_fast_accum`, as
serving engines do). What stands between projections and layers is in model_kernels.py, each kernel
compared with its plain form first.

With --tokens T a step verifies T - 1 drafts a sequence: it drops what the step before rejected,
takes all T tokens through the model, and keeps those up to the first wrong draft and one more.
Which drafts are right is drawn beforehand, each with the chance --accept while those before it are,
as random weights agree with no draft; making drafts is not counted.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics

import torch
from cuda_timing import captured, timed

import gdn_ops  # noqa: F401  loads the library

try:
    import model_kernels as between
except ModuleNotFoundError as missing:  # for --help on a machine without it
    if missing.name != "triton":
        raise
    between = None

ops = torch.ops.gdn
HIDDEN, INTER, VOCAB = 5120, 17408, 248_320
H, HV, D = 16, 48, 128
QH, KH, AD, ROT = 24, 4, 256, 64
CONV = 2 * H * D + HV * D
GDN_IN = CONV + HV * D + 2 * HV
ATT_IN = 2 * QH * AD + 2 * KH * AD
STATES = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}
DRAWN = 64  # steps of which it is drawn beforehand which drafts are right


class Linear:
    """[in] -> [out], bf16 or 8-bit."""

    def __init__(self, n_in: int, n_out: int, fp8: bool):
        w = torch.randn(n_out, n_in, device="cuda", dtype=torch.bfloat16) * n_in**-0.5
        self.fp8 = fp8
        if fp8:
            parts = [between.quantize_plain(p) for p in w.split(8192)]
            self.w = torch.cat([p[0].view(torch.uint8) for p in parts]).view(between.FP8)
            self.scale = torch.cat([p[1] for p in parts]).T.contiguous()
        else:
            self.w = w

    def __call__(self, x):
        if self.fp8:
            q, scale = x
            return torch._scaled_mm(
                q, self.w.T, scale_a=scale, scale_b=self.scale, out_dtype=torch.bfloat16,
                use_fast_accum=True,
            )  # fmt: skip
        return x @ self.w.T


class Model:
    def __init__(self, args: argparse.Namespace, batch: int):
        self.B, self.T, self.L = batch, args.tokens, args.layers
        self.fp8, self.buffered = args.weights == "fp8", args.mode == "buffered"
        B, T = self.B, self.T
        # Without a window the state after each draft has a row of its own.
        P = B if self.buffered else B * T
        self.rows = torch.randperm(P, device="cuda", dtype=torch.int32)
        if not self.buffered and T > 1:
            self.rows = self.rows.view(B, T)
        state = STATES[args.state]
        R = args.window or (8 if args.state == "f32" else 16)
        self.embedding = torch.randn(VOCAB, HIDDEN, device="cuda", dtype=torch.bfloat16)
        self.layers = []
        for i in range(self.L):
            full = i % 4 == 3
            layer = {
                "full": full,
                "norms": [torch.ones(HIDDEN, device="cuda") for _ in range(2)],
                "in": Linear(HIDDEN, ATT_IN if full else GDN_IN, self.fp8),
                "out": Linear(QH * AD if full else HV * D, HIDDEN, self.fp8),
                "up": Linear(HIDDEN, 2 * INTER, self.fp8),
                "down": Linear(INTER, HIDDEN, self.fp8),
            }
            if full:
                shape = (B, KH, args.context, AD)
                layer["kv"] = [
                    torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(2)
                ]
                layer["qk_norm"] = [torch.ones(AD, device="cuda") for _ in range(2)]
            else:
                layer["params"] = [
                    (torch.randn(CONV, 4, device="cuda") / 2).bfloat16(), None,
                    torch.rand(HV, device="cuda"), torch.rand(HV, device="cuda"),
                    torch.ones(D, device="cuda"),
                ]  # fmt: skip
                history = torch.randn(P, 3 + T - 1, CONV, device="cuda").bfloat16()
                layer["conv"] = history.transpose(1, 2)
                layer["state"] = (torch.randn(P, HV, D, D, device="cuda") / 8).to(state)
                if self.buffered:
                    layer["window"] = [
                        torch.zeros(P, H, R, D, dtype=state, device="cuda"),
                        torch.zeros(P, HV, R, D, dtype=state, device="cuda"),
                        torch.zeros(P, HV, R, device="cuda"),
                        torch.arange(P, device="cuda", dtype=torch.int32) % R,
                    ]
            self.layers.append(layer)
        self.final_norm = torch.ones(HIDDEN, device="cuda")
        self.head = Linear(HIDDEN, VOCAB, self.fp8)
        self.token = torch.randint(VOCAB, (B, T), device="cuda")
        # The cache is a ring: a step attends to the whole context and writes the oldest places.
        self.position = torch.zeros(B, dtype=torch.long, device="cuda")
        self.context = args.context
        angle = torch.rand(T, ROT // 2, device="cuda")
        self.cos, self.sin = angle.cos(), angle.sin()
        right = torch.rand(DRAWN, B, T - 1, device="cuda") < args.accept
        self.drawn = 1 + right.int().cumprod(-1).sum(-1, dtype=torch.int32)
        self.number = torch.zeros(1, dtype=torch.long, device="cuda")
        self.kept = torch.ones(B, dtype=torch.int32, device="cuda")  # of the step before

    def gdn(self, layer, projected):
        x = projected.view(self.B, self.T, GDN_IN)
        op, window = (ops.decode_buffered, layer["window"]) if self.buffered else (ops.decode, [])
        drafts = {"num_accepted": self.kept, "conv_leading": True} if self.T > 1 else {}
        y = op(
            x, *layer["params"], layer["conv"], layer["state"], *window, H, D, self.rows, **drafts
        )
        return y.view(self.B * self.T, HV * D)

    def attend(self, layer, projected):
        return between.attention(
            projected, *layer["qk_norm"], self.cos, self.sin, *layer["kv"], self.position
        )

    def step(self) -> torch.Tensor:
        x, more = self.embedding[self.token.view(-1)], None  # the residual stream is x + more
        for layer in self.layers:
            projected = layer["in"](between.norm(x, more, layer["norms"][0], self.fp8))
            y = self.attend(layer, projected) if layer["full"] else self.gdn(layer, projected)
            more = layer["out"](between.quantize(y) if self.fp8 else y)
            hidden = between.norm(x, more, layer["norms"][1], self.fp8)
            more = layer["down"](between.swiglu(layer["up"](hidden), self.fp8))
        self.logits = self.head(between.norm(x, more, self.final_norm, self.fp8))
        self.sample(self.logits)
        return self.token

    def sample(self, logits):
        """The greedy token behind the last one kept; what follows it serves as the next drafts."""
        best = logits.argmax(-1).view(self.B, self.T)
        if self.T == 1:
            self.token.copy_(best)
            self.position.copy_((self.position + 1) % self.context)
            return
        self.kept.copy_(self.drawn[self.number][0])
        self.number.copy_((self.number + 1) % DRAWN)
        order = torch.arange(self.T, device="cuda") + self.kept[:, None] - 1
        self.token.copy_(best.gather(1, order % self.T))
        self.position.copy_((self.position + self.kept) % self.context)

    # The parts alone, for the shares.
    def only_gdn(self):
        x = torch.randn(self.B * self.T, GDN_IN, device="cuda", dtype=torch.bfloat16)
        return lambda: [self.gdn(layer, x) for layer in self.layers if not layer["full"]]

    def only_attention(self):
        x = torch.randn(self.B * self.T, ATT_IN, device="cuda", dtype=torch.bfloat16)
        return lambda: [self.attend(layer, x) for layer in self.layers if layer["full"]]

    def only_projections(self):
        def inputs(n):
            x = torch.randn(self.B * self.T, n, device="cuda", dtype=torch.bfloat16)
            return between.quantize(x) if self.fp8 else x

        by_size = {n: inputs(n) for n in (HIDDEN, INTER, HV * D)}

        def run():
            for layer in self.layers:
                layer["in"](by_size[HIDDEN])
                layer["out"](by_size[HV * D])
                layer["up"](by_size[HIDDEN])
                layer["down"](by_size[INTER])
            self.head(by_size[HIDDEN])

        return run

    def only_sampling(self):
        logits = torch.randn(self.B * self.T, VOCAB, device="cuda", dtype=torch.bfloat16)
        return lambda: self.sample(logits)

    def mutable(self) -> list[torch.Tensor]:
        found = [self.token, self.position, self.kept, self.number]
        for layer in self.layers:
            found += layer["kv"] if layer["full"] else [layer["conv"], layer["state"]]
            found += layer.get("window", [])
        return found


def milliseconds(step, repeats: int) -> float:
    graph, _ = captured(step)
    return 1e3 * statistics.median(timed(graph.replay, repeats))


def verify(model: Model) -> None:
    """A replay from the same caches gives the tokens, logits and states of an eager step."""
    layers = model.layers
    model.layers = layers[:8]
    graph, _ = captured(model.step)
    kept = [x.clone() for x in model.mutable()]
    model.step()
    eager = [x.clone() for x in (model.token, model.logits)]
    states = [x.double().sum().item() for x in model.mutable()[1:]]
    for x, saved in zip(model.mutable(), kept, strict=True):
        x.copy_(saved)
    del kept
    graph.replay()
    torch.cuda.synchronize()
    if not torch.equal(model.token, eager[0]):
        raise SystemExit("the captured step chose other tokens than the eager step")
    if states != [x.double().sum().item() for x in model.mutable()[1:]]:
        raise SystemExit("the captured step left other states than the eager step")
    if not torch.isfinite(eager[1]).all():
        raise SystemExit("logits are not finite")
    model.layers = layers


def measure(args: argparse.Namespace, batch: int) -> dict:
    torch.manual_seed(0)
    torch.cuda.reset_peak_memory_stats()
    model = Model(args, batch)
    verify(model)
    step = milliseconds(model.step, args.steps)
    kept = model.drawn.double().mean().item()
    shares = {
        name: milliseconds(make(), 8)
        for name, make in (
            ("gdn", model.only_gdn),
            ("projections", model.only_projections),
            ("attention", model.only_attention),
            ("sampling", model.only_sampling),
        )
    }
    return {
        "batch": batch,
        "tokens_kept_a_step": kept,
        "step_ms": step,
        "tokens_per_s": batch * kept / step * 1e3,
        "alone_ms": shares,
        "rest_ms": step - sum(shares.values()),
        "memory_GiB": torch.cuda.max_memory_allocated() / 2**30,
    }


def batches(text: str) -> list[int]:
    return [int(n) for n in text.split(",")]


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--batch", type=batches, default=[256], help="sequences: 64,256,512")
    parser.add_argument("--weights", choices=["bf16", "fp8"], default="bf16")
    parser.add_argument("--state", choices=list(STATES), default="bf16")
    parser.add_argument("--mode", choices=["full", "buffered"], default="full")
    parser.add_argument("--window", type=int, help="R of --mode buffered; 8 for f32, else 16")
    parser.add_argument("--tokens", type=int, default=1, help="a step and sequence, T - 1 drafts")
    parser.add_argument("--accept", type=float, default=0.8, help="chance of a draft to be right")
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--layers", type=int, default=64)
    parser.add_argument("--steps", type=int, default=32, help="of which the median is taken")
    parser.add_argument("--json", help="write the results here as well")
    args = parser.parse_args()
    if between is None:
        parser.error("needs Triton, which torch's CUDA wheels bring along")
    if not torch.cuda.is_available():
        parser.error("needs an NVIDIA device")
    between.check(HIDDEN, INTER, "cuda")
    drafts = f", {args.tokens} tokens a step, drafts right with {args.accept}"
    print(
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}, weights {args.weights}, "
        f"state {args.state}, mode {args.mode}, context {args.context}"
        + (drafts if args.tokens > 1 else "")
    )
    rows = []
    for batch in args.batch:
        row = measure(args, batch)
        rows.append(row)
        alone = itertools.chain(row["alone_ms"].items(), [("rest", row["rest_ms"])])
        print(
            f"batch {batch}: {row['step_ms']:.2f} ms a step, {row['tokens_per_s']:.0f} tokens/s"
            + (f" ({row['tokens_kept_a_step']:.2f} kept a step)" if args.tokens > 1 else "")
            + "; alone (ms): "
            + ", ".join(f"{name} {ms:.2f}" for name, ms in alone)
            + f"; memory {row['memory_GiB']:.0f} GiB",
            flush=True,
        )
        torch.cuda.empty_cache()
    if args.json:
        options = vars(args) | {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
        with open(args.json, "w") as f:
            json.dump({"options": options, "rows": rows}, f, indent=1)


if __name__ == "__main__":
    main()
