"""What the serving functions add to the ops that they call, in microseconds (docs/serving.md).

    python scripts/compat_overhead.py

Each function of gdn_ops.compat against the call of ``torch.ops.gdn`` inside it on tensors that
already have its shapes: one thread, inference mode, tensors too small for the work to matter, with
no sequence and with one. The best of several runs of each, turn about.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch

from gdn_ops.compat import sglang, vllm, vllm_cpu, vllm_kunlun

H, HV, K, V, W, BLOCKS = 2, 6, 8, 8, 4, 8
C = 2 * H * K + HV * V

recurrent = torch.ops.gdn.recurrent.default
recurrent_gated = torch.ops.gdn.recurrent_gated.default
short_conv = torch.ops.gdn.short_conv.default
chunk = torch.ops.gdn.chunk.default
chunk_prefill = torch.ops.gdn.chunk_prefill.default
gating = torch.ops.gdn.gating.default

Pairs = dict[str, tuple[Callable, Callable]]


def pairs(N: int) -> Pairs:
    """name: (the function of an engine, the op alone)."""
    q, v = torch.randn(1, N, H, K), torch.randn(1, N, HV, V)
    g, a = -torch.rand(1, N, HV), torch.randn(N, HV)
    A_log, dt_bias = torch.rand(HV), torch.randn(HV)
    x, out, y = torch.randn(N, C), torch.empty(N, 1, HV, V), torch.empty(N, C)
    rows, cu = torch.ones(N, dtype=torch.int32), torch.arange(N + 1, dtype=torch.int32)
    columns, accepted = rows[:, None], torch.ones(N, dtype=torch.int32)
    has = torch.ones(N, dtype=torch.bool)
    pool = torch.randn(BLOCKS, HV, V, K)
    kv_pool = torch.randn(BLOCKS, HV, K, V)
    first = pool[:N].contiguous()
    kv_first = first.transpose(2, 3).contiguous()
    conv_rows = torch.randn(BLOCKS, W - 1, C)
    conv_pool = conv_rows.transpose(1, 2)
    weight = torch.randn(C, W)
    packed = vllm_cpu.causal_conv1d_weight_pack(weight)
    gates = {"A_log": A_log, "a": a, "b": a, "dt_bias": dt_bias}
    l2 = {"use_qk_l2norm_in_kernel": True}
    paged = {"initial_state": pool, "cu_seqlens": cu, "ssm_state_indices": rows, **l2}
    cpu_pool = {"initial_state_source": kv_pool, "cu_seqlens": cu, **l2}
    # The shapes that the ops take.
    heads = [
        part.view(N, 1, n, d)
        for part, n, d in zip(
            x.split([H * K, H * K, HV * V], 1), (H, H, HV), (K, K, V), strict=True
        )
    ]
    a3, one, tokens, turned, row_gates = a[None], x[:, None], x[None], x.t(), a[:, None]
    vk, q0, v0 = kv_pool.transpose(2, 3), q[0], v[0]

    def conv(x, *args):
        return lambda: short_conv(x, weight, None, conv_pool, rows, *args, "silu", True)

    update, prefill = conv(one, None, None, None), conv(tokens, has, cu, None)

    def gated(rows, accepted=None, pool=vk):
        return lambda: recurrent_gated(
            q, q, v, a3, a3, A_log, dt_bias, pool, rows, None, cu, accepted, None, True
        )

    def packed_heads():
        return recurrent_gated(
            *heads, row_gates, row_gates, A_log, dt_bias, pool, rows, None, None, None, 0.5, True
        )

    def functional():
        return chunk(q, q, v, g, g, first, cu, None, True, 64)

    return {
        "fused_recurrent_gated_delta_rule": (
            lambda: vllm.fused_recurrent_gated_delta_rule(q, q, v, g, g, **paged),
            lambda: recurrent(q, q, v, g, g, pool, rows, None, cu, None, None, True),
        ),
        "fused_sigmoid_gating_delta_rule_update": (
            lambda: vllm.fused_sigmoid_gating_delta_rule_update(**gates, q=q, k=q, v=v, **paged),
            gated(rows, None, pool),
        ),
        "fused_recurrent_gated_delta_rule_packed_decode": (
            lambda: vllm.fused_recurrent_gated_delta_rule_packed_decode(
                mixed_qkv=x, **gates, scale=0.5, initial_state=pool, out=out,
                ssm_state_indices=rows, **l2,
            ),
            packed_heads,
        ),
        "chunk_gated_delta_rule": (
            lambda: vllm.chunk_gated_delta_rule(
                q, q, v, g, g, initial_state=first, output_final_state=True, cu_seqlens=cu, **l2
            ),
            functional,
        ),
        "fused_gdn_gating": (
            lambda: vllm.fused_gdn_gating(A_log, a, a, dt_bias),
            lambda: gating(a3, a3, A_log, dt_bias),
        ),
        "causal_conv1d_update": (
            lambda: vllm.causal_conv1d_update(
                x, conv_pool, weight, None, "silu", conv_state_indices=rows
            ),
            update,
        ),
        "causal_conv1d_update, out": (
            lambda: vllm.causal_conv1d_update(
                x, conv_pool, weight, None, "silu", conv_state_indices=rows, out=y
            ),
            update,
        ),
        "causal_conv1d_fn": (
            lambda: vllm.causal_conv1d_fn(turned, weight, None, conv_pool, cu, rows, has, "silu"),
            prefill,
        ),
        "cpu: fused_sigmoid_gating_delta_rule_update": (
            lambda: vllm_cpu.fused_sigmoid_gating_delta_rule_update_cpu(
                **gates, q=q, k=q, v=v, initial_state_indices=rows, **cpu_pool
            ),
            gated(rows),
        ),
        "cpu: ..._update_spec": (
            lambda: vllm_cpu.fused_sigmoid_gating_delta_rule_update_spec_cpu(
                **gates, q=q0, k=q0, v=v0, spec_state_indices=columns,
                num_accepted_tokens=accepted, **cpu_pool,
            ),
            gated(columns, accepted),
        ),
        "cpu: chunk_gated_delta_rule": (
            lambda: vllm_cpu.chunk_gated_delta_rule_cpu(
                q, q, v, g, g, kv_pool, True, cu, False, True, rows
            ),
            lambda: chunk_prefill(q, q, v, g, g, vk, rows, None, None, cu, None, None, True, 64),
        ),
        "cpu: fused_gdn_gating": (
            lambda: vllm_cpu.fused_gdn_gating_cpu(A_log, a, a, dt_bias),
            lambda: gating(a3, a3, A_log, dt_bias),
        ),
        "cpu: causal_conv1d_update": (
            lambda: vllm_cpu.causal_conv1d_update_cpu(
                x, conv_pool, packed, None, True, rows, True
            ),
            update,
        ),
        "cpu: causal_conv1d_fwd": (
            lambda: vllm_cpu.causal_conv1d_fwd_cpu(
                turned, packed, None, conv_pool, cu, rows, has, True, True
            ),
            prefill,
        ),
        "kunlun: causal_conv1d_update": (
            lambda: vllm_kunlun.causal_conv1d_update(
                x, conv_rows, weight, None, "silu", conv_state_indices=rows
            ),
            update,
        ),
        "kunlun: causal_conv1d_fn": (
            lambda: vllm_kunlun.causal_conv1d_fn(
                x, weight, None, cu, cache_indices=rows, has_initial_state=has,
                conv_states=conv_rows,
            ),
            prefill,
        ),
        "kunlun: chunk_gated_delta_rule": (
            lambda: vllm_kunlun.chunk_gated_delta_rule(
                q, q, v, g, g, initial_state=kv_first, output_final_state=True, cu_seqlens=cu, **l2
            ),
            functional,
        ),
        "kunlun: fused_gdn_gating": (
            lambda: vllm_kunlun.fused_gdn_gating(A_log, a, dt_bias),
            lambda: gating(a, a, A_log, dt_bias),
        ),
        "sglang: fused_sigmoid_gating_delta_rule_update": (
            lambda: sglang.fused_sigmoid_gating_delta_rule_update(
                **gates, q=q, k=q, v=v, softplus_beta=1.0, softplus_threshold=20.0,
                initial_state_source=pool, initial_state_indices=rows, cu_seqlens=cu, **l2,
            ),
            gated(rows, None, pool),
        ),
        "sglang: ..._packed_decode": (
            lambda: sglang.fused_recurrent_gated_delta_rule_packed_decode(
                mixed_qkv=x, **gates, scale=0.5, initial_state=pool, out=out,
                ssm_state_indices=rows, **l2,
            ),
            packed_heads,
        ),
        "sglang: chunk_gated_delta_rule": (
            lambda: sglang.chunk_gated_delta_rule(
                q, q, v, g, g, initial_state=pool, initial_state_indices=rows, cu_seqlens=cu, **l2
            ),
            lambda: chunk_prefill(q, q, v, g, g, pool, rows, None, None, cu, None, None, True, 64),
        ),
        "sglang: causal_conv1d_update": (
            lambda: sglang.causal_conv1d_update(
                x, conv_pool, weight, None, "silu", conv_state_indices=rows
            ),
            update,
        ),
        "sglang: causal_conv1d_fn": (
            lambda: sglang.causal_conv1d_fn(
                turned, weight, None, conv_states=conv_pool, query_start_loc=cu,
                cache_indices=rows, has_initial_state=has,
            ),
            prefill,
        ),
    }  # fmt: skip


def seconds(call: Callable, calls: int) -> float:
    start = time.perf_counter()
    for _ in range(calls):
        call()
    return (time.perf_counter() - start) / calls


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--calls", type=int, default=1000, help="calls a run")
    parser.add_argument("--runs", type=int, default=9)
    args = parser.parse_args()
    torch.set_num_threads(1)
    print(f"torch {torch.__version__}\n{'':48} {'0 sequences':>12} {'1 sequence':>12}")
    added: dict[str, list[float]] = {}
    with torch.inference_mode():
        for N in (0, 1):
            for name, (function, op) in pairs(N).items():
                best = [1.0, 1.0]
                for _ in range(args.runs):
                    for i, call in enumerate((function, op)):
                        best[i] = min(best[i], seconds(call, args.calls))
                added.setdefault(name, []).append(1e6 * (best[0] - best[1]))
    for name, values in added.items():
        print(f"{name:48} " + " ".join(f"{value:12.1f}" for value in values))


if __name__ == "__main__":
    main()
