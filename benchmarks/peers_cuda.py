"""Decode kernels of this package and of its peers on one NVIDIA device, in one run.

    python benchmarks/peers_cuda.py [--quick] [--json out.json]

Every candidate is first compared with the float64 oracle on fresh random inputs; one that is out of
tolerance gets no speed. Times are medians of CUDA-graph replays over rotating rows of pools larger
than the L2 cache. The floor is the fewest bytes that the call must move over the copy bandwidth
measured in the same run. Peers: flash-linear-attention where it is installed, torch (einsum),
torch.compile of that.
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
CHECKED = 4  # sequences compared with float64


def rows(P: int, B: int, seed: int = 0) -> list[torch.Tensor]:
    """Disjoint sets of B rows of a pool of P, in random order."""
    order = torch.randperm(P, generator=torch.Generator().manual_seed(seed))
    return [part.int().cuda() for part in order.split(B)]


def sets_of(row_bytes: int, B: int) -> int:
    """Row sets to rotate over: at least 600 MB, the L2 cache of an H200 is 60 MB."""
    return max(1, min(400, -(-600_000_000 // (row_bytes * B))))


class Case:
    def __init__(self, B: int, H: int, HV: int, dtype: torch.dtype, T: int = 1):
        self.B, self.H, self.HV, self.dtype, self.T = B, H, HV, dtype, T
        self.item = torch.tensor([], dtype=dtype).element_size()
        self.row_bytes = HV * V * K * self.item
        sets = sets_of(self.row_bytes, B)
        self.pool = torch.empty(B * sets, HV, V, K, dtype=dtype, device="cuda")
        self.rows = rows(B * sets, B)
        self.q, self.k = (self.unit(B, T, H, K) for _ in range(2))
        self.v = torch.randn(B, T, HV, V, device="cuda").bfloat16()
        self.g = -torch.rand(B, T, HV, device="cuda")
        self.beta = torch.rand(B, T, HV, device="cuda")
        self.refill()

    @staticmethod
    def unit(*shape: int) -> torch.Tensor:
        x = torch.randn(*shape, device="cuda")
        return (x / x.norm(dim=-1, keepdim=True)).bfloat16()

    def refill(self) -> None:
        for part in self.pool.split(64):
            part.normal_()

    @property
    def inputs(self) -> tuple[torch.Tensor, ...]:
        return self.q, self.k, self.v, self.g, self.beta

    def io_bytes(self) -> int:
        return sum(x.numel() * x.element_size() for x in (*self.inputs, self.v))

    def oracle(self, start: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        inputs = [x[: len(start)].cpu() for x in self.inputs]
        return reference.recurrent(*inputs, start.double().cpu(), qk_l2norm=True)


def tolerance(dtype: torch.dtype) -> float:
    return {torch.float32: 2e-6, torch.float16: 6e-4, torch.bfloat16: 5e-3}[dtype]


def torch_step(q, k, v, g, beta, pool, index, ratio):
    """The recurrence in plain torch: what a model runs without a kernel."""
    S = pool[index].float()
    q, k = (
        (x.float() * torch.rsqrt(x.float().square().sum(-1, keepdim=True) + 1e-6))
        .squeeze(1)
        .repeat_interleave(ratio, dim=1)
        for x in (q, k)
    )
    S = S * g.squeeze(1).exp()[..., None, None]
    u = beta.squeeze(1)[..., None] * (v.squeeze(1).float() - torch.einsum("nhvk,nhk->nhv", S, k))
    S = S + u[..., None] * k[:, :, None, :]
    pool[index] = S.to(pool.dtype)
    return (torch.einsum("nhvk,nhk->nhv", S, q) * K**-0.5).to(v.dtype)


def candidates(c: Case, compiled: bool):
    """name -> function of a row set that returns o and writes the pool (or returns the state)."""

    def ours(index):
        return ops.recurrent(*c.inputs, c.pool, index, qk_l2norm=True), None

    transposed = c.pool.transpose(2, 3)

    def columns(index):
        return ops.recurrent(*c.inputs, transposed, index, qk_l2norm=True), None

    found = {"gdn_ops recurrent": ours, "gdn_ops recurrent, [P, HV, K, V]": columns}
    try:
        from fla.ops.gated_delta_rule import fused_recurrent_gated_delta_rule

        # No pool: reads a given state, writes a new one.
        states = [c.pool[i * c.B : (i + 1) * c.B] for i in range(len(c.rows))]

        def fla(index, v_first):
            state = states[next(j for j, r in enumerate(c.rows) if r is index)]
            return fused_recurrent_gated_delta_rule(
                *c.inputs[:3], g=c.g, beta=c.beta, initial_state=state, output_final_state=True,
                use_qk_l2norm_in_kernel=True, state_v_first=v_first,
            )  # fmt: skip

        # The first layout is the one it takes unless told; a program of its kernel owns 8 of V.
        found["flash-linear-attention, [N, HV, K, V]"] = partial(fla, v_first=False)
        found["flash-linear-attention, [N, HV, V, K]"] = partial(fla, v_first=True)
    except ImportError:
        pass
    ratio = c.HV // c.H

    def eager(index):
        return torch_step(*c.inputs, c.pool, index, ratio), None

    found["torch"] = eager
    if compiled:
        step = torch.compile(torch_step)

        def run(index):
            return step(*c.inputs, c.pool, index, ratio), None

        found["torch.compile"] = run
    return found


def report(table, name, c, seconds, spread, floor, error):
    row = {
        "kernel": name, "heads": f"{c.H}/{c.HV}", "B": c.B, "T": c.T,
        "state": str(c.dtype).removeprefix("torch."), "us": seconds * 1e6,
        "spread_us": spread * 1e6, "floor_us": floor * 1e6, "ratio": floor / seconds,
        "error_o": error[0], "error_state": error[1],
    }  # fmt: skip
    table.append(row)
    state_error = "" if error[1] is None else f" {error[1]:.1e}"
    print(
        f"{row['heads']:>6} B={c.B:<4} T={c.T} {row['state']:<9} {name:<38} "
        f"{row['us']:9.2f} us +-{row['spread_us']:.2f}  floor {row['floor_us']:8.2f}  "
        f"{row['ratio']:.3f}  err {error[0]:.1e}{state_error}",
        flush=True,
    )


def decode_table(table, bandwidth, quick):
    shapes = [(256, 16, 48), (1, 16, 48), (256, 4, 12), (1, 4, 12)]
    if not quick:
        shapes += [(16, 16, 48), (64, 16, 48), (512, 16, 48), (16, 4, 12), (64, 4, 12)]
    for B, H, HV in shapes:
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            c = Case(B, H, HV, dtype)
            floor = (2 * B * c.row_bytes + c.io_bytes()) / bandwidth
            small = B == 256 and HV == 12 and dtype == torch.float32
            for name, call in candidates(c, compiled=small).items():
                if name.startswith("torch") and not small:
                    continue
                if "flash" in name and dtype == torch.float16:
                    continue
                c.refill()
                n = min(CHECKED, B)
                # K = V here, so the same bytes serve either layout of a state.
                turned = "HV, K, V]" in name
                of = (lambda s: s.transpose(2, 3)) if turned else (lambda s: s)
                first = slice(n) if "flash" in name else c.rows[0][:n].long()
                want_o, want_s = c.oracle(of(c.pool[first]))
                o, new = call(c.rows[0])
                got_s = of(c.pool[first] if new is None else new[:n])
                errors = (
                    relative_error(o.reshape(B, 1, HV, V)[:n], want_o),
                    relative_error(got_s, want_s),
                )
                if errors[0] > 5e-3 or errors[1] > tolerance(dtype):
                    print(f"{name}: out of tolerance {errors}, not timed")
                    continue
                seconds, spread = graph_time([lambda r=r, f=call: f(r) for r in c.rows])
                report(table, name, c, seconds, spread, floor, errors)
            del c
            torch.cuda.empty_cache()


def new_window(P, H, HV, R, dtype):
    return [
        torch.zeros(P, H, R, K, dtype=dtype, device="cuda"),
        torch.zeros(P, HV, R, V, dtype=dtype, device="cuda"),
        torch.zeros(P, HV, R, device="cuda"),
        torch.zeros(P, dtype=torch.int32, device="cuda"),
    ]


def buffered_case(table, bandwidth, shape, dtype, R, T, folds, win_dtype=None):
    """Calls of T tokens, all kept. With ``folds`` a whole cycle with the phases spread over the
    sequences, so that T / R of the rows fold in every call; without, the calls up to the fold."""
    B, H, HV = shape
    c = Case(B, H, HV, dtype, T)
    P = c.pool.shape[0]
    win = new_window(P, H, HV, R, win_dtype or dtype)
    name = f"gdn_ops recurrent_buffered R={R}"
    name += f", {win_dtype} window".replace("torch.", "") if win_dtype else ""
    name += "" if folds else ", none folds"
    index = c.rows[0]
    want = c.pool[index[:CHECKED].long()].double().cpu()
    worst = 0.0
    for _ in range(R // T + 2):
        c.v.normal_()
        inputs = [x[:CHECKED].cpu() for x in c.inputs]
        want_o, want = reference.recurrent(*inputs, want, qk_l2norm=True)
        o = ops.recurrent_buffered(*c.inputs, c.pool, *win, index, qk_l2norm=True)
        worst = max(worst, relative_error(o[:CHECKED], want_o))
    if worst > 6e-3:
        print(f"{name} {dtype} T={T}: out of tolerance {worst}")
        return
    cycle = R // T
    steps = cycle if folds else cycle - 1
    start = (torch.arange(P, device="cuda", dtype=torch.int32) % cycle + 1) * T * folds
    calls = [
        partial(ops.recurrent_buffered, *c.inputs, c.pool, *win, r, qk_l2norm=True)
        for _ in range(steps)
        for r in c.rows
    ]
    seconds, spread = graph_time(calls, repeats=7, least=steps, before=lambda: win[3].copy_(start))
    # Entries that a call must read: those before it, all of them where they go into the base.
    pending = (R + T) / 2 if folds else (steps - 1) * T / 2
    entry = HV * V * win[1].element_size() + H * K * win[0].element_size() + HV * 4
    base = c.row_bytes * (1 + T / R * folds)
    floor = (B * (base + entry * (pending + T)) + c.io_bytes()) / bandwidth
    report(table, name, c, seconds, spread, floor, (worst, None))


def buffered_table(table, bandwidth):
    for shape in ((256, 16, 48), (256, 4, 12)):
        for dtype, R in ((torch.float32, 8), (torch.bfloat16, 16), (torch.float16, 16)):
            # Speculation: a quarter of the rows folds in a call.
            for R_, T, folds in ((R, 1, True), (16, 4, True), (16, 4, False)):
                buffered_case(table, bandwidth, shape, dtype, R_, T, folds)
                torch.cuda.empty_cache()
    for narrow in (torch.bfloat16, torch.float16):
        buffered_case(table, bandwidth, (256, 16, 48), torch.float32, 16, 1, True, narrow)
        torch.cuda.empty_cache()
    for dtype, R in ((torch.float32, 8), (torch.bfloat16, 16)):
        buffered_case(table, bandwidth, (1, 16, 48), dtype, R, 1, True)
        torch.cuda.empty_cache()


def lowrank_case(table, bandwidth, shape, dtype, R, T):
    """Full windows of ``dtype``, all tokens kept."""
    B, H, HV = shape
    c = Case(B, H, HV, torch.bfloat16, T)
    entry = (H * K + HV * V) * torch.tensor([], dtype=dtype).element_size() + HV * 4
    sets = sets_of(R * entry, B)
    every = rows(B * sets, B)
    win = new_window(B * sets, H, HV, R, dtype)
    name, n = f"gdn_ops recurrent_lowrank R={R}", min(CHECKED, B)
    first = every[0][:n].long()
    want_win, worst = [x[first].cpu() for x in win], 0.0
    for _ in range(R // T + 3):
        c.v.normal_()
        inputs = [x[:n].cpu() for x in c.inputs]
        want, want_win = reference.recurrent_lowrank(*inputs, *want_win, qk_l2norm=True)
        o = ops.recurrent_lowrank(*c.inputs, *win, every[0], qk_l2norm=True)
        worst = max(worst, relative_error(o[:n], want))
    if worst > 6e-3:
        print(f"{name} {dtype} T={T}: out of tolerance {worst}")
        return
    for x, scale in zip(win, (K**-0.5, 1.0, -0.1), strict=False):
        x.uniform_().mul_(scale)
    win[3].fill_(R)
    calls = [partial(ops.recurrent_lowrank, *c.inputs, *win, r, qk_l2norm=True) for r in every]
    seconds, spread = graph_time(calls)
    c.dtype = dtype  # of the window: there is no state
    report(table, name, c, seconds, spread, (B * entry * (R + T) + c.io_bytes()) / bandwidth,
           (worst, None))  # fmt: skip


def lowrank_table(table, bandwidth):
    for shape in ((256, 16, 48), (16, 16, 48), (1, 16, 48), (256, 4, 12)):
        for dtype, T in itertools.product((torch.float32, torch.bfloat16), (1, 4)):
            lowrank_case(table, bandwidth, shape, dtype, 16, T)
            torch.cuda.empty_cache()


def layer_table(table, bandwidth, B, H, HV):
    """The fused decode step, on a state and on base and window, and the convolution of a layer."""
    C = 2 * H * K + HV * V
    x = torch.randn(B, 1, C + HV * V + 2 * HV, device="cuda").bfloat16()
    weight = (torch.randn(C, 4, device="cuda") / 2).bfloat16()
    A_log, dt_bias = torch.rand(HV, device="cuda"), torch.rand(HV, device="cuda")
    params = (x, weight, None, A_log, dt_bias, torch.rand(V, device="cuda").bfloat16())
    n = min(B, CHECKED)
    conv_bytes = B * C * 2 * 6 + weight.numel() * 2
    around = conv_bytes + 2 * (x.numel() + B * HV * V)
    for dtype, R in ((torch.float32, 8), (torch.bfloat16, 16)):
        c = Case(B, H, HV, dtype)
        P, index = c.pool.shape[0], c.rows[0]
        conv = torch.randn(P, 3, C, device="cuda").bfloat16().transpose(1, 2)
        win = new_window(P, H, HV, R, dtype)
        rows_ = index[:n].long()
        inputs = [p[:n].cpu() if p is x else p if p is None else p.cpu() for p in params]
        for name, op, pools in (
            ("decode", ops.decode, (conv, c.pool)),
            (f"decode_buffered R={R}", ops.decode_buffered, (conv, c.pool, *win)),
        ):
            kept = conv.clone(), c.pool[rows_].clone()
            # Of the pools as they are: the times before this have moved them on.
            want, _, want_s = reference.decode(*inputs, kept[0][rows_].cpu(), kept[1].cpu(), H, K)
            y = op(*params, *pools, H, K, index)
            errors = (relative_error(y[:n], want), None)
            if op is ops.decode:
                errors = (errors[0], relative_error(c.pool[rows_], want_s))
            conv.copy_(kept[0])
            c.pool[rows_] = kept[1]
            if errors[0] > 1e-2 or (errors[1] or 0) > 5e-3:
                print(f"{name}: out of tolerance {errors}")
                continue
            cycle = 1 if op is ops.decode else R
            bytes_ = 2 * B * c.row_bytes
            if cycle > 1:
                win[3].copy_(torch.arange(P, device="cuda", dtype=torch.int32) % R)
                entry = HV * V * win[1].element_size() + H * K * win[0].element_size() + HV * 4
                bytes_ = B * (c.row_bytes * (1 + 1 / R) + entry * ((R + 1) / 2 + 1))
            calls = [partial(op, *params, *pools, H, K, r) for r in c.rows for _ in range(cycle)]
            seconds, spread = graph_time(calls, least=max(8, cycle))
            floor = (bytes_ + around) / bandwidth
            report(table, f"gdn_ops {name} (layer step)", c, seconds, spread, floor, errors)
        del c, conv, win
        torch.cuda.empty_cache()

    c = Case(B, H, HV, torch.bfloat16)
    mixed = x[..., :C].contiguous()
    pools = [torch.randn(B, 3, C, device="cuda").bfloat16().transpose(1, 2) for _ in range(40)]
    want, _ = reference.short_conv(
        mixed[:n].cpu(), weight.cpu(), None, pools[0][:n].cpu(), activation="silu"
    )
    y = ops.short_conv(mixed, weight, None, pools[0])
    error = relative_error(y[:n], want)
    if error > 1e-2:
        print(f"short_conv update: out of tolerance {error}, not timed")
        return
    seconds, spread = graph_time([partial(ops.short_conv, mixed, weight, None, p) for p in pools])
    report(table, "gdn_ops short_conv update", c, seconds, spread,
           (conv_bytes + 4 * B * C) / bandwidth, (error, None))  # fmt: skip


def fill(table, bandwidth, args) -> None:
    decode_table(table, bandwidth, args.quick)
    buffered_table(table, bandwidth)
    lowrank_table(table, bandwidth)
    for shape in ((256, 16, 48), (1, 16, 48)):
        layer_table(table, bandwidth, *shape)
        torch.cuda.empty_cache()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="batches 1 and 256 only")
    table_of(parser, fill)
