"""Decode speed of a whole model with the geometry of Qwen3.5-27B, random weights, one device.

    python benchmarks/model.py --batch 256 --weights fp8 --state bf16 --mode full

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
"""

from __future__ import annotations

import argparse
import statistics

import model_kernels as between
import torch

import gdn_ops  # noqa: F401  loads the library

ops = torch.ops.gdn
HIDDEN, INTER, VOCAB = 5120, 17408, 248_320
H, HV, D = 16, 48, 128
QH, KH, AD, ROT = 24, 4, 256, 64
CONV = 2 * H * D + HV * D
GDN_IN = CONV + HV * D + 2 * HV
ATT_IN = 2 * QH * AD + 2 * KH * AD


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
    def __init__(self, args: argparse.Namespace):
        self.B, self.L = args.batch, args.layers
        self.fp8, self.buffered = args.weights == "fp8", args.mode == "buffered"
        B, R, P = self.B, args.window, self.B
        state = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}[args.state]
        window = torch.float32 if state == torch.float32 else torch.bfloat16
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
                layer["conv"] = torch.randn(P, 3, CONV, device="cuda").bfloat16().transpose(1, 2)
                layer["state"] = (torch.randn(P, HV, D, D, device="cuda") / 8).to(state)
                if self.buffered:
                    layer["window"] = [
                        torch.zeros(P, H, R, D, dtype=window, device="cuda"),
                        torch.zeros(P, HV, R, D, dtype=window, device="cuda"),
                        torch.zeros(P, HV, R, device="cuda"),
                        torch.arange(P, device="cuda", dtype=torch.int32) % R,
                    ]
            self.layers.append(layer)
        self.final_norm = torch.ones(HIDDEN, device="cuda")
        self.head = Linear(HIDDEN, VOCAB, self.fp8)
        self.rows = torch.randperm(B, device="cuda", dtype=torch.int32)
        self.token = torch.randint(VOCAB, (B,), device="cuda")
        # The cache is a ring: a step writes one place and attends to the whole context.
        self.position = torch.zeros(1, dtype=torch.long, device="cuda")
        self.context = args.context
        angle = torch.rand(ROT // 2, device="cuda")
        self.cos, self.sin = angle.cos(), angle.sin()

    def gdn(self, layer, projected):
        x = projected.view(self.B, 1, GDN_IN)
        if self.buffered:
            y = ops.decode_buffered(
                x, *layer["params"], layer["conv"], layer["state"], *layer["window"], H, D,
                self.rows,
            )  # fmt: skip
        else:
            y = ops.decode(x, *layer["params"], layer["conv"], layer["state"], H, D, self.rows)
        return y.view(self.B, HV * D)

    def attend(self, layer, projected):
        return between.attention(
            projected, *layer["qk_norm"], self.cos, self.sin, *layer["kv"], self.position
        )

    def step(self) -> torch.Tensor:
        x, more = self.embedding[self.token], None  # the residual stream is x + more
        for layer in self.layers:
            projected = layer["in"](between.norm(x, more, layer["norms"][0], self.fp8))
            y = self.attend(layer, projected) if layer["full"] else self.gdn(layer, projected)
            more = layer["out"](between.quantize(y) if self.fp8 else y)
            hidden = between.norm(x, more, layer["norms"][1], self.fp8)
            more = layer["down"](between.swiglu(layer["up"](hidden), self.fp8))
        self.logits = self.head(between.norm(x, more, self.final_norm, self.fp8))
        self.token.copy_(self.logits.argmax(-1))
        self.position.copy_((self.position + 1) % self.context)
        return self.token

    # The parts alone, for the shares.
    def only_gdn(self):
        x = torch.zeros(self.B, GDN_IN, device="cuda", dtype=torch.bfloat16).normal_()
        return lambda: [self.gdn(layer, x) for layer in self.layers if not layer["full"]]

    def only_attention(self):
        x = torch.randn(self.B, ATT_IN, device="cuda", dtype=torch.bfloat16)
        return lambda: [self.attend(layer, x) for layer in self.layers if layer["full"]]

    def only_projections(self):
        def inputs(n):
            x = torch.randn(self.B, n, device="cuda", dtype=torch.bfloat16)
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
        logits = torch.randn(self.B, VOCAB, device="cuda", dtype=torch.bfloat16)
        return lambda: self.token.copy_(logits.argmax(-1))

    def mutable(self) -> list[torch.Tensor]:
        found = [self.token, self.position]
        for layer in self.layers:
            found += layer["kv"] if layer["full"] else [layer["conv"], layer["state"]]
            found += layer.get("window", [])
        return found


def captured(run) -> torch.cuda.CUDAGraph:
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        run()
        run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph


def milliseconds(graph: torch.cuda.CUDAGraph, repeats: int) -> float:
    times = []
    for i in range(repeats + 3):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        if i >= 3:
            times.append(start.elapsed_time(end))
    return statistics.median(times)


def verify(model: Model) -> None:
    """A replay from the same caches gives the tokens, logits and states of an eager step."""
    layers = model.layers
    model.layers = layers[:8]
    graph = captured(model.step)
    kept = [x.clone() for x in model.mutable()]
    model.step()
    eager = [x.clone() for x in (model.token, model.logits)]
    states = [x.double().sum().item() for x in model.mutable()[2:8]]
    for x, saved in zip(model.mutable(), kept, strict=True):
        x.copy_(saved)
    del kept
    graph.replay()
    torch.cuda.synchronize()
    if not torch.equal(model.token, eager[0]):
        raise SystemExit("the captured step chose other tokens than the eager step")
    if states != [x.double().sum().item() for x in model.mutable()[2:8]]:
        raise SystemExit("the captured step left other states than the eager step")
    if not torch.isfinite(eager[1]).all():
        raise SystemExit("logits are not finite")
    model.layers = layers


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--weights", choices=["bf16", "fp8"], default="bf16")
    parser.add_argument("--state", choices=["f32", "bf16", "f16"], default="bf16")
    parser.add_argument("--mode", choices=["full", "buffered"], default="full")
    parser.add_argument("--window", type=int, help="R of --mode buffered; 8 for f32, else 16")
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--layers", type=int, default=64)
    parser.add_argument("--steps", type=int, default=32)
    args = parser.parse_args()
    args.window = args.window or (8 if args.state == "f32" else 16)
    torch.manual_seed(0)
    between.check(HIDDEN, INTER, "cuda")
    model = Model(args)
    verify(model)
    graph = captured(model.step)
    total = milliseconds(graph, args.steps)
    shares = {
        name: milliseconds(captured(make()), 8)
        for name, make in (
            ("gdn", model.only_gdn),
            ("projections", model.only_projections),
            ("attention", model.only_attention),
            ("sampling", model.only_sampling),
        )
    }
    rest = total - sum(shares.values())
    print(
        f"{torch.cuda.get_device_name()} batch {args.batch} weights {args.weights} "
        f"state {args.state} mode {args.mode} context {args.context}: {total:.2f} ms a step, "
        f"{args.batch / total * 1e3:.0f} tokens/s; alone (ms): "
        + ", ".join(f"{k} {v:.2f}" for k, v in shares.items())
        + f", rest {rest:.2f}; memory {torch.cuda.max_memory_allocated() / 2**30:.0f} GiB",
        flush=True,
    )


if __name__ == "__main__":
    main()
