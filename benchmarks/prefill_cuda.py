"""Chunked prefill of this package on one NVIDIA device.

    python benchmarks/prefill_cuda.py [--json out.json]

Each call is first compared with the float64 oracle on fresh random inputs (the first sequence, its
first 512 tokens where it is longer); one out of tolerance gets no speed. Times are medians of
CUDA-graph replays over rotating inputs larger than the L2 cache. "Bytes alone" is the fewest bytes
over the copy bandwidth measured in the same run; it says nothing of arithmetic.
"""

from __future__ import annotations

import argparse
import itertools
from functools import partial

import torch
from cuda_timing import graph_time, relative_error, table_of

import gdn_ops  # noqa: F401  loads the library
from gdn_ops import reference

ops = torch.ops.gdn
K = V = 128
CHECKED = 512  # tokens


def inputs(B: int, T: int, H: int, HV: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    q, k = (torch.randn(B, T, H, K, device="cuda").to(dtype) for _ in range(2))
    v = torch.randn(B, T, HV, V, device="cuda").to(dtype)
    g = -torch.rand(B, T, HV, device="cuda")
    return q, k, v, g, torch.rand(B, T, HV, device="cuda")


def packed(x: torch.Tensor) -> torch.Tensor:
    return x.reshape(1, -1, *x.shape[2:])


def new_window(P, H, HV, R, dtype):
    return [
        torch.zeros(P, H, R, K, device="cuda").to(dtype),
        torch.zeros(P, HV, R, V, device="cuda").to(dtype),
        torch.zeros(P, HV, R, device="cuda"),
        torch.zeros(P, dtype=torch.int32, device="cuda"),
    ]


def measure(table, bandwidth, B, T, H, HV, dtype, op):
    item = 4 if dtype == torch.float32 else 2
    tokens = B * T * (2 * H * K + 2 * HV * V) * item + B * T * HV * 8
    state = 2 * B * HV * K * V * 4 if op == "chunk_prefill" else 0
    sets = max(1, min(8, -(-400_000_000 // (tokens + state))))
    cu = torch.arange(0, B * T + 1, T, device="cuda")
    cases = []
    for _ in range(sets):
        args = [packed(x) for x in inputs(B, T, H, HV, dtype)]
        if op == "chunk_prefill":
            pool = torch.randn(B, HV, V, K, device="cuda")
            cases.append(partial(ops.chunk_prefill, *args, pool, cu_seqlens=cu, qk_l2norm=True))
        else:
            win = new_window(B, H, HV, 16, dtype)
            cases.append(partial(ops.chunk_lowrank, *args, *win, cu_seqlens=cu, qk_l2norm=True))
    n = min(T, CHECKED)
    first = [x[:, :n].cpu() for x in cases[0].args[:5]]
    if op == "chunk_prefill":
        want, want_state = reference.chunk(*first, cases[0].args[5][:1].cpu(), qk_l2norm=True)
    else:
        want = reference.chunk_lowrank(*first, *(x[:1].cpu() for x in cases[0].args[5:9]),
                                       qk_l2norm=True)[0]  # fmt: skip
    error = relative_error(cases[0]()[:, :n], want)
    errors = [error]
    if op == "chunk_prefill" and n == T:
        errors.append(relative_error(cases[0].args[5][:1], want_state))
    limit = {torch.float32: 4e-6, torch.float16: 8e-4, torch.bfloat16: 6e-3}[dtype]
    name = f"{op} {str(dtype).removeprefix('torch.')} {H}/{HV} {B}x{T}"
    if max(errors) > limit:
        print(f"{name}: out of tolerance {errors}, not timed")
        return
    seconds, spread = graph_time(cases, repeats=7, least=4)
    floor = (tokens + state) / bandwidth
    table.append({"call": name, "us": seconds * 1e6, "spread_us": spread * 1e6,
                  "floor_us": floor * 1e6, "errors": errors})  # fmt: skip
    print(
        f"{name:<44} {seconds * 1e6:9.1f} us +-{spread * 1e6:.1f}  bytes alone {floor * 1e6:7.1f}  "
        f"{B * T / seconds / 1e6:6.1f} M tokens/s  err {' '.join(f'{e:.1e}' for e in errors)}",
        flush=True,
    )


def fill(table, bandwidth, args) -> None:
    shapes = ((1, 4096), (1, 16384), (256, 64), (16, 1024))
    bf16, f16, f32 = torch.bfloat16, torch.float16, torch.float32
    heads = (16, 48, (bf16, f16, f32)), (8, 24, (bf16,)), (4, 12, (bf16,)), (2, 6, (bf16,))
    for H, HV, dtypes in heads:
        for dtype, (B, T) in itertools.product(dtypes, shapes):
            for op in ("chunk_prefill", "chunk_lowrank"):
                measure(table, bandwidth, B, T, H, HV, dtype, op)
                torch.cuda.empty_cache()


if __name__ == "__main__":
    table_of(argparse.ArgumentParser(description=__doc__), fill)
