"""Gradients of chunk on one NVIDIA device: time beside the forward call, memory, errors.

    python benchmarks/backward_cuda.py [--json out.json]

Each kind of call is first compared with the float64 form on fresh random inputs (two sequences of
200 and 56 tokens); one out of tolerance gets no speed. Times are medians of calls between events,
memory is what a call has allocated at its peak, outputs included.
"""

from __future__ import annotations

import argparse
import itertools
import statistics

import torch
from cuda_timing import relative_error, table_of, timed

import gdn_ops  # noqa: F401  loads the library

ops = torch.ops.gdn
K = V = 128
LIMIT = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.2e-2}


def inputs(lengths, H, HV, dtype):
    """Arguments of chunk_backward: grad_o, grad_final_state, q, k, v, g, beta, S, cu_seqlens."""
    T = sum(lengths)
    q, k = (torch.randn(1, T, H, K, device="cuda").to(dtype) for _ in range(2))
    v, grad_o = (torch.randn(1, T, HV, V, device="cuda").to(dtype) for _ in range(2))
    g, beta = -torch.rand(1, T, HV, device="cuda"), torch.rand(1, T, HV, device="cuda")
    S, grad_final = (torch.randn(len(lengths), HV, V, K, device="cuda") for _ in range(2))
    cu = torch.tensor([0, *itertools.accumulate(lengths)], device="cuda")
    return grad_o, grad_final, q, k, v, g, beta, S, cu


def errors(H, HV, dtype):
    args = inputs([200, 56], H, HV, dtype)
    exact = [x.double() for x in args[:8]]
    got = ops.chunk_backward(*args, None, True, 64)
    want = ops.chunk_backward(*exact, args[8], None, True, 64)
    return [relative_error(x, y) for x, y in zip(got, want, strict=True)]


def microseconds(call) -> float:
    return 1e6 * statistics.median(timed(call, 9))


def fill(table, bandwidth, args) -> None:
    shapes = ((1, 4096), (1, 16384), (16, 1024), (256, 64))
    bf16, f16, f32 = torch.bfloat16, torch.float16, torch.float32
    for (H, HV), dtype in (((16, 48), bf16), ((16, 48), f16), ((16, 48), f32), ((4, 12), bf16)):
        error = errors(H, HV, dtype)
        kind = f"{str(dtype).removeprefix('torch.')} {H}/{HV}"
        print(f"{kind}: errors of dq dk dv dg dbeta dS {' '.join(f'{e:.1e}' for e in error)}")
        if max(error) > LIMIT[dtype]:
            print(f"{kind}: out of tolerance, not timed")
            continue
        for N, T in shapes if dtype == bf16 else shapes[:1]:
            x = inputs([T] * N, H, HV, dtype)
            forward = microseconds(lambda x=x: ops.chunk(*x[2:], None, True, 64))
            held = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            backward = microseconds(lambda x=x: ops.chunk_backward(*x, None, True, 64))
            memory = (torch.cuda.max_memory_allocated() - held) / (N * T)
            table.append({"call": f"{kind} {N}x{T}", "forward_us": forward,
                          "backward_us": backward, "bytes_a_token": memory,
                          "errors": error})  # fmt: skip
            print(
                f"{kind} {N}x{T}: forward {forward:.0f} us, backward {backward:.0f} us "
                f"({backward / forward:.1f}), {memory / 1e3:.0f} KB a token",
                flush=True,
            )
            del x
            torch.cuda.empty_cache()


if __name__ == "__main__":
    table_of(argparse.ArgumentParser(description=__doc__), fill)
