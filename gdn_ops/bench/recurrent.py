"""One decode step of ``recurrent`` against its floor and against the other ways to compute it.

The shapes are one Gated DeltaNet layer of Qwen3.5 (16 key heads, 48 value heads, K = V = 128) and
the slices that a rank of a tensor-parallel group of 4 or 8 holds.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from gdn_ops import reference
from gdn_ops._tolerance import ROUNDED_FACTOR, TOLERANCE, scaled_error
from gdn_ops.bench import _onnxruntime
from gdn_ops.bench._timing import (
    DTYPES,
    SHORT,
    Candidate,
    Options,
    buffers,
    generator,
    in_mode,
    keep_freed_memory,
    measure,
    nbytes,
)
from gdn_ops.bench._transformers import rule

TITLE = "decode step of the recurrence, T = 1"
K = V = 128
HEADS = ((16, 48), (4, 12), (2, 6))
BATCHES = (1, 4, 16, 64, 256)
# The peers are timed up to here by default; beyond, einsum and the fallback need gigabytes of
# temporaries.
PEER_STATE_BYTES = 2**30


class Inputs:
    """Activations of one step, like a trained model's: q, k of any length, g < 0, 0 < beta < 1."""

    def __init__(self, B: int, H: int, HV: int, dtype: torch.dtype, seed: int, T: int = 1):
        gen = generator(seed)
        self.q = torch.randn(B, T, H, K, generator=gen).to(dtype)
        self.k = torch.randn(B, T, H, K, generator=gen).to(dtype)
        self.v = torch.randn(B, T, HV, V, generator=gen).to(dtype)
        self.g = -torch.rand(B, T, HV, generator=gen)
        self.beta = torch.sigmoid(torch.randn(B, T, HV, generator=gen))
        self.rows = torch.arange(B, dtype=torch.int32)

    @property
    def bytes(self) -> int:
        tensors = (self.q, self.k, self.v, self.v, self.g, self.beta, self.rows)  # v twice: o
        return nbytes(*tensors)

    @functools.cached_property
    def ready(self) -> tuple[Tensor, Tensor, Tensor]:
        """q, k, v in float32, q and k normalised: for peers that leave this to the caller."""
        q, k = reference.l2norm(self.q.float()), reference.l2norm(self.k.float())
        return q, k, self.v.float()


def fill_pool(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> Tensor:
    """A pool of states of the size that decoding settles at; every row is different."""
    gen = generator(seed)
    row = torch.randn(shape[1:], generator=gen) * 0.05
    pool = torch.empty(shape, dtype=dtype)
    for p in range(shape[0]):
        pool[p] = row * (1 + p / shape[0])
    return pool


def checker(
    inputs: Inputs,
    state: Callable[[], Tensor],
    run: Callable[[], tuple[Tensor, Callable[[], Tensor]]],
    out_dtype: torch.dtype,
    state_dtype: torch.dtype,
) -> Callable[[], float]:
    """Compares a call on its real buffers with the oracle, on the first, a middle and the last row.

    ``state()`` is the pool as ``[B, HV, V, K]``; ``run()`` returns the output and a getter of the
    pool after the call.
    """

    def check() -> float:
        B = inputs.q.shape[0]
        rows = sorted({0, B // 2, B - 1})
        before = state()[rows].clone()
        want_o, want_s = reference.recurrent(
            inputs.q[rows],
            inputs.k[rows],
            inputs.v[rows],
            inputs.g[rows],
            inputs.beta[rows],
            before,
            qk_l2norm=True,
        )
        o, after = run()
        return max(
            scaled_error(o[rows], want_o, *TOLERANCE[out_dtype]),
            scaled_error(after()[rows], want_s, *TOLERANCE[state_dtype]),
        )

    return check


def ours(inputs: Inputs, pools: list[Tensor], layout: str) -> Candidate:
    views = pools if layout == "VK" else [p.transpose(-1, -2) for p in pools]
    op = torch.ops.gdn.recurrent.default
    x = inputs

    def call(i: int) -> Tensor:
        return op(x.q, x.k, x.v, x.g, x.beta, views[i], x.rows, None, None, None, None, True)

    def run() -> tuple[Tensor, Callable[[], Tensor]]:
        return call(0), lambda: views[0]

    check = checker(x, lambda: views[0], run, x.q.dtype, views[0].dtype)
    return Candidate("gdn_ops", call, check)


def ours_fast(inputs: Inputs, pools: list[Tensor]) -> Candidate:
    """The same call under ``set_precision("fast")``, which rounds once more."""
    exact = ours(inputs, pools, "VK")
    check = in_mode("fast", exact.check)
    return Candidate("gdn_ops fast", in_mode("fast", exact.call), lambda: check() / ROUNDED_FACTOR)


def einsum_step(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, S: Tensor, scale: float
) -> Tensor:
    """The recurrence as one writes it in torch; S ``[B, HV, K, V]`` in place."""
    S.mul_(g.exp()[..., None, None])
    u = (v - torch.einsum("bhkv,bhk->bhv", S, k)) * beta[..., None]
    S.add_(torch.einsum("bhk,bhv->bhkv", k, u))
    return torch.einsum("bhkv,bhk->bhv", S, q) * scale


def einsum(inputs: Inputs, pools: list[Tensor], compiled: bool = False) -> Candidate:
    q, k, v = inputs.ready
    ratio = v.shape[2] // q.shape[2]
    q, k = (x[:, 0].repeat_interleave(ratio, 1) for x in (q, k))
    v, g, beta = v[:, 0], inputs.g[:, 0], inputs.beta[:, 0]

    step = torch.compile(einsum_step, dynamic=False) if compiled else einsum_step

    def call(i: int) -> Tensor:
        return step(q, k, v, g, beta, pools[i], K**-0.5)

    def run() -> tuple[Tensor, Callable[[], Tensor]]:
        return call(0)[:, None], lambda: pools[0].transpose(-1, -2)

    check = checker(inputs, lambda: pools[0].transpose(-1, -2), run, torch.float32, torch.float32)
    name = "torch einsum compiled" if compiled else "torch einsum"
    return Candidate(name, call, check, note="q, k normalised and repeated beforehand")


def transformers_peer(inputs: Inputs, pools: list[Tensor], compiled: bool) -> Candidate:
    name = "transformers compiled" if compiled else "transformers eager"
    try:
        fallback = rule("torch_recurrent_gated_delta_rule")
    except ImportError as error:
        return Candidate(name, skipped=f"transformers is not usable: {error}")
    x = inputs

    def step(q, k, v, g, beta, S):
        return fallback(
            q, k, v, g=g, beta=beta, initial_state=S, output_final_state=True,
            use_qk_l2norm_in_kernel=True,
        )  # fmt: skip

    if compiled:
        torch._dynamo.reset()
        step = torch.compile(step, dynamic=False)
    after: list[Tensor] = []

    def call(i: int) -> Tensor:
        o, S = step(x.q, x.k, x.v, x.g, x.beta, pools[i])
        after[:] = [S]
        return o

    def run() -> tuple[Tensor, Callable[[], Tensor]]:
        return call(0), lambda: after[0].transpose(-1, -2)

    check = checker(x, lambda: pools[0].transpose(-1, -2), run, x.q.dtype, torch.float32)
    return Candidate(name, call, check, note="new state returned, not copied into the cache")


def onnxruntime_peer(inputs: Inputs, pools: list[Tensor]) -> Candidate:
    name = "onnxruntime LinearAttention"
    q, k, v = (t.flatten(2).contiguous() for t in inputs.ready)
    feeds = {
        "query": q, "key": k, "value": v, "past_state": pools[0],
        "decay": inputs.g.contiguous(), "beta": inputs.beta.contiguous(),
    }  # fmt: skip
    out, present = torch.empty_like(v), torch.empty_like(pools[0])
    outputs = {"output": out, "present_state": present}
    H, HV = inputs.q.shape[2], inputs.v.shape[2]
    try:
        session = _onnxruntime.session(feeds, outputs, H, HV)
    except _onnxruntime.Unusable as error:
        return Candidate(name, skipped=str(error))
    bindings = [_onnxruntime.bind(session, feeds | {"past_state": p}, outputs) for p in pools]

    def call(i: int, feeds=feeds) -> Tensor:  # holds what the bindings point at
        session.run_with_iobinding(bindings[i])
        return out

    def run() -> tuple[Tensor, Callable[[], Tensor]]:
        call(0)
        return out.unflatten(2, (HV, V)), lambda: present.transpose(-1, -2)

    check = checker(inputs, lambda: pools[0].transpose(-1, -2), run, torch.float32, torch.float32)
    note = f"version {_onnxruntime.version()}; q, k normalised beforehand"
    return Candidate(name, call, check, note=note)


def case_rows(
    heads: tuple[int, int],
    B: int,
    dtype: torch.dtype,
    layout: str,
    hot: bool,
    peers: bool,
    options: Options,
) -> list[dict]:
    H, HV = heads
    inputs = Inputs(B, H, HV, torch.bfloat16, options.seed)
    shape = (B, HV, V, K)
    size = B * HV * V * K * dtype.itemsize
    pools = buffers(size, lambda i: fill_pool(shape, dtype, options.seed + i), hot)
    candidates = [ours(inputs, pools, layout)]
    has_fast = pools[0].is_cpu and torch.ops.gdn.cpu_isa() in ("avx512bf16", "amx")
    if layout == "VK" and dtype == torch.bfloat16 and has_fast:
        candidates.append(ours_fast(inputs, pools))
    if peers:
        candidates.append(einsum(inputs, pools))
        candidates.append(transformers_peer(inputs, pools, compiled=False))
        if options.compiled:
            # First the peer that resets the compiler.
            candidates.append(transformers_peer(inputs, pools, compiled=True))
            candidates.append(einsum(inputs, pools, compiled=True))
        candidates.append(onnxruntime_peer(inputs, pools))
    case = {
        "family": "recurrent", "op": "recurrent", "heads": f"{H}/{HV}", "batch": B, "tokens": 1,
        "dtype": "bf16", "state": SHORT[dtype], "layout": layout,
        "mode": "hot" if hot else "rotated",
    }  # fmt: skip
    return measure(case, candidates, pools, 2 * size + inputs.bytes, options)


def run(options: Options) -> list[dict]:
    """Every case that ``options`` leaves in: state dtypes, both layouts, rotated and hot, peers."""
    keep_freed_memory()
    heads = options.heads or (HEADS[:1] if options.quick else HEADS)
    batches = options.batches or ((1, 16) if options.quick else BATCHES)
    dtypes = options.dtypes or tuple(DTYPES.values())
    rows: list[dict] = []
    for pair in heads:
        for B in batches:
            for dtype in dtypes:
                f32 = dtype == torch.float32
                small = B * pair[1] * V * K * 4 <= PEER_STATE_BYTES
                peers = options.peers and f32 and small
                rows += case_rows(pair, B, dtype, "VK", False, peers, options)
                rows += case_rows(pair, B, dtype, "KV", False, False, options)
                if B == 1 and f32:
                    rows += case_rows(pair, B, dtype, "VK", True, peers, options)
                    rows += case_rows(pair, B, dtype, "KV", True, False, options)
    return rows
