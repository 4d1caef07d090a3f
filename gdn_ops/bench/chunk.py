"""Prefill with ``chunk`` against the other ways to compute it, and a training step.

One Qwen3.5 layer (16 key heads, 48 value heads, K = V = 128). Work is counted as the useful
operations of the 64-token chunk form, whatever a candidate does: rates of all candidates then
compare like times. Every row has ``op``, ``dtype``, ``tokens``, ``ms``, ``gflops`` and ``peer_ms``
(the fastest timed peer). torch's matrix product of the same dtype, with its own operations, says
what the machine gave during the run.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from gdn_ops import reference
from gdn_ops._tolerance import TOLERANCE, column_error, rounded_error, scaled_error
from gdn_ops.bench import _onnxruntime
from gdn_ops.bench._timing import (
    SHORT,
    Candidate,
    Options,
    generator,
    in_mode,
    keep_freed_memory,
    measure,
    nbytes,
)
from gdn_ops.bench._transformers import rule

TITLE = "prefill in chunks, and a training step"
K = V = 128
HEADS = ((16, 48),)
LENGTHS = ((1, 512), (1, 2048), (1, 4096), (256, 64))  # (sequences, tokens of each)
TRAINING_TOKENS = 1024
CHUNK = 64
MATMUL = 2048  # rows and columns of torch's product


def useful_flops(tokens: int, H: int, HV: int) -> float:
    """Operations of the WY form in chunks of 64: two products a key head, five a value head."""
    per_value_head = 6 * K * V + 2 * CHUNK * (K + 2 * V)
    return float(tokens) * (HV * per_value_head + H * 4 * CHUNK * K)


class Inputs:
    def __init__(self, N: int, T: int, H: int, HV: int, dtype: torch.dtype, seed: int):
        gen = generator(seed)
        total = N * T
        self.N, self.T, self.H, self.HV = N, T, H, HV
        unit = [torch.randn(1, total, H, K, generator=gen) for _ in range(2)]
        self.q, self.k = (reference.l2norm(x).to(dtype) for x in unit)
        self.v = torch.randn(1, total, HV, V, generator=gen).to(dtype)
        self.g = -torch.rand(1, total, HV, generator=gen)
        self.beta = torch.sigmoid(torch.randn(1, total, HV, generator=gen))
        self.cu = torch.arange(0, total + 1, T, dtype=torch.int32) if N > 1 else None
        self.state = 0.05 * torch.randn(N, HV, V, K, generator=gen)

    @property
    def bytes(self) -> int:
        tensors = (self.q, self.k, self.v, self.v, self.g, self.beta, self.state, self.state)
        return nbytes(*tensors)

    def batched(self, x: Tensor) -> Tensor:
        """Equal sequences as batch rows, for peers that know no cu_seqlens."""
        return x.view(self.N, self.T, *x.shape[2:])

    def error(
        self, o: Tensor, final: Tensor, out_dtype: torch.dtype, rounded: bool = False
    ) -> float:
        """Against the oracle on the first and last sequence, one key head and its value heads.

        ``rounded``: products may take operands of ``out_dtype``.
        """
        ratio, worst = self.HV // self.H, 0.0
        for n in sorted({0, self.N - 1}):
            h = n % self.H
            heads, rows = slice(h * ratio, (h + 1) * ratio), slice(n * self.T, (n + 1) * self.T)
            part = (
                self.q[:, rows, h : h + 1], self.k[:, rows, h : h + 1], self.v[:, rows, heads],
                self.g[:, rows, heads], self.beta[:, rows, heads], self.state[n : n + 1, heads],
            )  # fmt: skip
            want_o, want_s = reference.chunk(*part)
            got_o, got_s = o[:, rows, heads], final[n : n + 1, heads]
            if rounded and not o.is_cpu:
                errors = (
                    column_error(got_o, want_o, 1, out_dtype),
                    column_error(got_s, want_s, -1, out_dtype),
                )
            elif rounded:
                of_o, of_rows = reference.chunk_magnitudes(*part)
                errors = (
                    rounded_error(got_o, want_o, of_o, K),
                    rounded_error(got_s, want_s, of_rows[:, -1, ..., None], K),
                )
            else:
                errors = (
                    scaled_error(got_o, want_o, *TOLERANCE[out_dtype]),
                    scaled_error(got_s, want_s, *TOLERANCE[torch.float32]),
                )
            worst = max(worst, *errors)
        return worst


def ours(x: Inputs, mode: str) -> Candidate:
    op = torch.ops.gdn.chunk.default
    call = in_mode(mode, lambda i: op(x.q, x.k, x.v, x.g, x.beta, x.state, x.cu))
    name = "gdn_ops" if mode == "exact" else f"gdn_ops {mode}"
    rounded = mode != "exact" if x.q.is_cpu else x.q.dtype != torch.float32
    return Candidate(name, call, lambda: x.error(*call(0), x.q.dtype, rounded))


def matmul(dtype: torch.dtype) -> Candidate:
    a, b = (torch.randn(MATMUL, MATMUL).to(dtype) for _ in range(2))
    note = f"{MATMUL} cubed, its own operations"
    return Candidate("torch matmul", lambda i: a @ b, note=note, fields={"flops": 2.0 * MATMUL**3})


def vllm_peer(x: Inputs) -> Candidate:
    """The op of vLLM's CPU engine (and of sglang, whose text it is)."""
    name = "vLLM chunk_gated_delta_rule_cpu"
    if not x.q.is_cpu:
        return Candidate(name, skipped="timed on the CPU only")
    try:
        import vllm._C  # noqa: F401 - registers the op
        from vllm import __version__ as version
    except ImportError as error:
        return Candidate(name, skipped=f"no CPU build of vLLM: {error}")
    op = torch.ops._C.chunk_gated_delta_rule_cpu.default
    beta = x.beta.to(x.q.dtype)
    cu = torch.arange(0, x.N * x.T + 1, x.T, dtype=torch.int32)
    rows = torch.arange(x.N, dtype=torch.int32)
    pool = x.state.transpose(2, 3).contiguous()

    def call(i: int) -> tuple[Tensor, Tensor]:
        return op(x.q, x.k, x.v, x.g, beta, pool, True, cu, False, False, rows, 1e-6)

    def check() -> float:
        o, _ = call(0)
        return x.error(o.reshape(x.v.shape), pool.transpose(2, 3), x.q.dtype, True) / 2

    return Candidate(
        name, call, check, note=f"version {version}; beta in bfloat16; twice the limit"
    )


def transformers_peer(x: Inputs) -> Candidate:
    name = "transformers eager"
    try:
        fallback = rule("torch_chunk_gated_delta_rule")
    except ImportError as error:
        return Candidate(name, skipped=f"transformers is not usable: {error}")
    ratio = x.HV // x.H
    q, k = (x.batched(t.repeat_interleave(ratio, 2)) for t in (x.q, x.k))
    v, g, beta = (x.batched(t) for t in (x.v, x.g, x.beta))
    state = x.state.transpose(2, 3).contiguous()

    def call(i: int) -> tuple[Tensor, Tensor]:
        return fallback(q, k, v, g=g, beta=beta, initial_state=state, output_final_state=True)

    def check() -> float:
        o, final = call(0)
        return x.error(o.reshape(x.v.shape), final.transpose(2, 3), x.q.dtype) / 4

    return Candidate(name, call, check, note="q, k repeated beforehand; four times the tolerance")


def onnxruntime_peer(x: Inputs) -> Candidate:
    name = "onnxruntime LinearAttention"
    feeds = {
        n: x.batched(t.float()).flatten(2).contiguous()
        for n, t in (("query", x.q), ("key", x.k), ("value", x.v))
    }
    feeds["past_state"] = x.state.transpose(2, 3).contiguous()
    feeds |= {"decay": x.batched(x.g).contiguous(), "beta": x.batched(x.beta).contiguous()}
    out, present = torch.empty_like(feeds["value"]), torch.empty_like(feeds["past_state"])
    outputs = {"output": out, "present_state": present}
    try:
        session = _onnxruntime.session(feeds, outputs, x.H, x.HV)
    except _onnxruntime.Unusable as error:
        return Candidate(name, skipped=str(error))
    binding = _onnxruntime.bind(session, feeds, outputs)

    def call(i: int, feeds=feeds) -> tuple[Tensor, Tensor]:  # holds what the binding points at
        session.run_with_iobinding(binding)
        return out, present

    def check() -> float:
        call(0)
        return x.error(out.view(x.v.shape), present.transpose(2, 3), torch.float32)

    return Candidate(name, call, check, note=f"version {_onnxruntime.version()}, float32")


NO_PEERS = ("gdn_ops", "torch")


def _report(case: dict, candidates: list[Candidate], x: Inputs, flops: float, options: Options):
    """measure(), with the rate and the best peer's time added to each row before it is shown."""
    held: list[dict] = []
    quiet = dataclasses.replace(options, emit=held.append)
    sweep = [torch.empty(16 * 2**20) for _ in range(2)]
    rows = measure(case, candidates, sweep, x.bytes, quiet)
    peers = [r["ms"] for r in rows if r["ms"] and r["candidate"].split()[0] not in NO_PEERS]
    for row in rows:
        work = row.pop("flops", flops)
        row["gflops"] = work / row["ms"] / 1e6 if row["ms"] else None
        row["peer_ms"] = min(peers) if peers else None
        options.emit(row)
    return rows


def _training(x: Inputs, options: Options) -> list[dict]:
    def leaves(*tensors: Tensor) -> list[Tensor]:
        return [t.detach().clone().requires_grad_() for t in tensors]

    q, k, v, g, beta = leaves(x.q, x.k, x.v, x.g, x.beta)
    weight = torch.randn(x.v.shape, generator=generator(1))

    def step(run, inputs: list[Tensor]) -> list[Tensor]:
        return list(torch.autograd.grad((run(*inputs)[0] * weight).sum(), inputs))

    def own(i: int) -> list[Tensor]:
        return step(torch.ops.gdn.chunk.default, [q, k, v, g, beta])

    candidates = [Candidate("gdn_ops", own)]
    try:
        fallback = rule("torch_chunk_gated_delta_rule")
    except ImportError as error:
        candidates.append(
            Candidate("transformers autograd", skipped=f"transformers is not usable: {error}")
        )
    else:

        def peer(q, k, v, g, beta):
            return fallback(q, k, v, g=g, beta=beta)

        def other(i: int) -> list[Tensor]:
            return step(peer, [q, k, v, g, beta])

        def check() -> float:
            pairs = zip(own(0), other(0), strict=True)
            return max(scaled_error(a, b.double(), 1e-3, 1e-3) for a, b in pairs)

        # Each is the other's check: two derivations of the same gradients.
        candidates[0].check = check
        candidates.append(Candidate("transformers autograd", other))
    case = {
        "family": "chunk", "op": "chunk forward+backward", "heads": f"{x.H}/{x.HV}", "batch": x.N,
        "tokens": x.T, "dtype": "f32", "mode": "hot",
    }  # fmt: skip
    return _report(case, candidates, x, 3 * useful_flops(x.N * x.T, x.H, x.HV), options)


def run(options: Options) -> list[dict]:
    """Every length in float32 and bfloat16, then forward + backward at 1024 tokens."""
    keep_freed_memory()
    rows: list[dict] = []
    for H, HV in options.heads or HEADS:
        for N, T in LENGTHS[:1] if options.quick else LENGTHS:
            for dtype in options.dtypes or (torch.float32, torch.bfloat16):
                x = Inputs(N, T, H, HV, dtype, options.seed)
                candidates = [ours(x, "exact")]
                if dtype == torch.bfloat16 and x.q.is_cpu:
                    candidates.append(ours(x, "fast"))
                candidates.append(matmul(dtype))
                if options.peers and dtype == torch.float32:
                    candidates += [onnxruntime_peer(x), transformers_peer(x)]
                if options.peers and dtype == torch.bfloat16:
                    candidates.append(vllm_peer(x))
                case = {
                    "family": "chunk", "op": "chunk", "heads": f"{H}/{HV}", "batch": N,
                    "tokens": T, "dtype": SHORT[dtype], "mode": "hot",
                }  # fmt: skip
                rows += _report(case, candidates, x, useful_flops(N * T, H, HV), options)
        if options.peers and not options.dtypes:
            x = Inputs(
                1, 256 if options.quick else TRAINING_TOKENS, H, HV, torch.float32, options.seed
            )
            rows += _training(x, options)
    return rows
