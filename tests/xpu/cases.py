"""Calls of every XPU kernel with their oracles, for the numerics tests and the mutation script.

Each case is a function without arguments that raises when the twin and the oracle disagree. Inputs
and oracles are made once; pools are copied for each run, and rows that no sequence owns must stay
as they were to the bit.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from twin import EPS, Ops, assert_close, to_device

from gdn_ops import reference

f32, f16, bf16 = torch.float32, torch.float16, torch.bfloat16
ops = Ops()
CASES: dict[str, Callable[[], None]] = {}


def case(name: str, **kwargs):
    """Registers a family of cases; `make` returns the function that runs one."""

    def register(make):
        run = functools.cache(lambda: make(**kwargs))
        CASES[name] = lambda: run()()
        return make

    return register


def cases(table: dict[str, dict]):
    def register(make):
        for name, kwargs in table.items():
            case(f"{make.__name__}[{name}]", **kwargs)(make)
        return make

    return register


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def tokens(g, B, T, H, HV, K, V, act):
    def normal(*shape):
        return torch.randn(*shape, generator=g)

    q, k, v = (x.to(act) for x in (normal(B, T, H, K), normal(B, T, H, K), normal(B, T, HV, V)))
    return q, k, v, -2 * torch.rand(B, T, HV, generator=g), torch.rand(B, T, HV, generator=g)


def states(g, P, HV, V, K, dtype, strided=False, transposed=False):
    """A pool, as a slice of wider rows or in the layout of transformers if asked."""
    pool = (0.3 * torch.randn(P, HV, V, K, generator=g)).to(dtype)
    if strided:
        wide = torch.zeros(P, HV, V, K + 32).to(dtype)
        wide[..., :K] = pool
        pool = wide[..., :K]
    return pool.transpose(2, 3).contiguous().transpose(2, 3) if transposed else pool


def histories(N, fresh, idx=None, pool=None):
    """has_initial_state of N sequences, false for `fresh` ones, whose rows then hold NaN: nobody
    may read them."""
    if not fresh:
        return None
    has = torch.ones(N, dtype=torch.bool)
    has[list(fresh)] = False
    for n in fresh if pool is not None else ():
        pool[int(idx[n])] = float("nan")
    return has


def untouched(name: str, got: torch.Tensor, before: torch.Tensor, rows) -> None:
    """Rows of a pool that no sequence owns are as they were, bit for bit."""
    other = [r for r in range(before.shape[0]) if r not in set(rows)]
    assert torch.equal(got.cpu()[other], before[other]), f"{name}: a row outside the call changed"


@cases(
    {
        "f16": {"act": f16, "state": f16},
        "f16 odd split": {"act": f16, "state": f16, "B": 5, "HV": 4},
        "f32 acts, f16 state": {"act": f32, "state": f16},
        "bf16 acts, f16 state": {"act": bf16, "state": f16},
        "f32": {"act": f32, "state": f32},
        "bf16": {"act": bf16, "state": bf16},
        "f32 acts, bf16 state": {"act": f32, "state": bf16},
        "f16 acts, f32 state": {"act": f16, "state": f32},
        "no norm": {"act": f32, "state": f32, "l2norm": False, "scale": 0.25},
        "K 64": {"act": f32, "state": f16, "K": 64, "V": 40},
        "K 256": {"act": f32, "state": f32, "K": 256, "V": 24, "HV": 2},
        "K 256, f16 state": {"act": f32, "state": f16, "K": 256, "V": 24, "HV": 2},
        "K 256, bf16 state": {"act": f32, "state": bf16, "K": 256, "V": 24, "HV": 2},
        "K 100, V 70": {"act": f16, "state": f16, "K": 100, "V": 70},
        "K 1, V 1": {"act": f32, "state": f32, "K": 1, "V": 1},
        "rows": {"act": f16, "state": f16, "rows": [3, -1, 6]},
        "rows int32, fresh": {
            "act": f32,
            "state": f32,
            "rows": torch.tensor([4, 2, 7], dtype=torch.int32),
            "fresh": [1],
        },
        "raw gates": {"act": bf16, "state": f32, "raw": True},
        "gates gone": {"act": f32, "state": f16, "clear": True},
        "strided pool": {"act": f32, "state": f16, "strided": True},
        "transposed pool": {"act": f32, "state": f16, "transposed": True, "rows": [3, -1, 6]},
        "many": {"act": f16, "state": f16, "B": 40, "H": 2, "HV": 6, "K": 64, "V": 64},
    }
)
def recurrent(act, state, B=3, H=2, HV=6, K=128, V=128, l2norm=True, scale=None, rows=None,
              fresh=(), raw=False, clear=False, strided=False, transposed=False):  # fmt: skip
    g = generator()
    q, k, v, gates, beta = tokens(g, B, 1, H, HV, K, V, act)
    P = 9 if B < 8 else B + 2
    pool = states(g, P, HV, V, K, state, strided, transposed)
    idx = None if rows is None else torch.as_tensor(rows)
    has = histories(B, fresh, idx, pool)
    if clear:
        gates[0] = float("-inf")
    extra = ()
    op, oracle = ops.recurrent, reference.recurrent
    if raw:
        # Views of one packed projection: head stride 2.
        packed = torch.randn(B, 1, 2 * HV, generator=g).to(act)
        gates, beta = packed[..., 0::2], packed[..., 1::2]
        extra = (torch.rand(HV, generator=g), torch.randn(HV, generator=g))
        op, oracle = ops.recurrent_gated, reference.recurrent_gated
    tail = (idx, has, None, None, scale, l2norm)
    want, want_pool = oracle(q, k, v, gates, beta, *extra, pool, *tail)
    used = range(B) if idx is None else [int(r) for r in idx if r >= 0]

    def run():
        device_pool = to_device(pool)
        head = [to_device(x) for x in (q, k, v, gates, beta, *extra)]
        o = op(*head, device_pool, *[to_device(x) for x in tail])
        assert_close("o", o, want)
        assert_close("state", device_pool[list(used)], want_pool[list(used)])
        untouched("state", device_pool, pool, used)

    return run


@cases(
    {
        "packed f16": {"lengths": [3, 5, 0, 1, 12], "act": f16, "state": f16},
        "packed f32": {"lengths": [3, 5], "act": f32, "state": f32},
        "packed bf16, K 100": {"lengths": [3, 5], "act": bf16, "state": bf16, "K": 100, "V": 70},
        "packed bf16, K 256": {"lengths": [3, 5], "act": f32, "state": bf16, "K": 256, "V": 16},
        "packed f32, bf16 state": {"lengths": [9], "act": f32, "state": bf16, "K": 64, "V": 16},
        "T 4, raw gates": {
            "lengths": [4, 4], "packed": False, "act": f16, "state": f16, "raw": True
        },
        "drafts": {
            "lengths": [2, 2, 2], "packed": False, "act": f16, "state": f16, "HV": 6,
            "rows": [[0, 1, 2], [3, 4, 5], [6, -1, 8]], "accepted": [1, 0, 3],
        },
        "drafts, T 1": {
            "lengths": [1, 1], "packed": False, "act": f32, "state": f32,
            "rows": [[2, 3], [5, 4]], "accepted": [2, 1]
        },
        "drafts, f32 state": {
            "lengths": [3, 3], "packed": False, "act": f16, "state": f32, "V": 40,
            "rows": [[0, 1, 2], [3, 4, 5]], "accepted": [1, 2]
        },
        # More tokens than a group, and more columns than are looked up at a time.
        "nine drafts": {
            "lengths": [9], "packed": False, "act": f16, "state": f16, "V": 40,
            "rows": [[8, 7, -1, 5, 4, 3, 2, 1, 0]], "accepted": [9]
        },
        "nine drafts, bf16 state": {
            "lengths": [9], "packed": False, "act": f16, "state": bf16, "V": 20,
            "rows": [[8, 7, 6, 5, 4, 3, 2, 1, 0]], "accepted": [1]
        },
        "fresh, padding": {
            "lengths": [2, 3, 4], "act": f32, "state": f32, "rows": [9, -1, 3], "fresh": [0],
            "K": 256, "V": 24
        },
        "gates gone": {"lengths": [5], "act": f32, "state": f16, "clear": True},
        "strided pool": {"lengths": [2, 1], "act": f32, "state": f32, "strided": True},
    }
)  # fmt: skip
def recurrent_seq(lengths, act, state, packed=True, H=2, HV=4, K=128, V=128, rows=None,
                  accepted=None, fresh=(), raw=False, clear=False, strided=False):  # fmt: skip
    g = generator(1)
    N = len(lengths)
    B, T = (1, sum(lengths)) if packed else (N, lengths[0])
    q, k, v, gates, beta = tokens(g, B, T, H, HV, K, V, act)
    if clear:
        gates[0, 2] = float("-inf")
    pool = states(g, 12, HV, V, K, state, strided)
    cu = torch.tensor([0, *lengths]).cumsum(0).int() if packed else None
    idx = None if rows is None else torch.tensor(rows)
    acc = None if accepted is None else torch.tensor(accepted)
    has = histories(N, fresh, idx, pool)
    extra = ()
    op, oracle = ops.recurrent, reference.recurrent
    if raw:
        gates, beta = (torch.randn(B, T, HV, generator=g).to(act) for _ in range(2))
        extra = (torch.rand(HV, generator=g), torch.randn(HV, generator=g))
        op, oracle = ops.recurrent_gated, reference.recurrent_gated
    tail = (idx, has, cu, acc, None, True)
    want, want_pool = oracle(q, k, v, gates, beta, *extra, pool, *tail)
    changed = [r for r in range(12) if not torch.equal(want_pool[r], pool[r].double())]

    def run():
        device_pool = to_device(pool)
        head = [to_device(x) for x in (q, k, v, gates, beta, *extra)]
        o = op(*head, device_pool, *[to_device(x) for x in tail])
        assert_close("o", o, want, noise=16)
        assert_close("state", device_pool[changed], want_pool[changed], noise=16)
        untouched("state", device_pool, pool, changed)

    return run


@cases(
    {
        "f32": {"act": f32, "pool": f32, "C": 200},
        "f16": {"act": f16, "pool": f16, "C": 96},
        "bf16, f32 pool, bf16 weight": {
            "act": bf16,
            "pool": f32,
            "C": 130,
            "T": 5,
            "weight": bf16,
            "L": 4,
        },
        "W 2, no bias": {"act": f32, "pool": f32, "C": 70, "T": 5, "W": 2, "L": 4, "bias": False},
        "W 1": {"act": f32, "pool": f32, "C": 33, "W": 1, "L": 1},
        "packed": {
            "act": f32,
            "pool": f32,
            "C": 70,
            "W": 3,
            "L": 4,
            "lengths": [3, 0, 6],
            "rows": [4, -1, 2],
            "fresh": [2],
        },
        "long": {"act": f32, "pool": bf16, "C": 40, "T": 130, "L": 4, "B": 2},
        "long, narrow": {"act": f32, "pool": f32, "C": 40, "T": 130, "L": 3, "B": 1},
        "no activation": {"act": f32, "pool": f32, "C": 64, "silu": "none"},
        "leading": {"act": f16, "pool": f16, "C": 128, "leading": True, "T": 2, "L": 5},
        "drafts": {
            "act": f16,
            "pool": f16,
            "C": 200,
            "T": 2,
            "L": 6,
            "leading": True,
            "accepted": [2, 0, 1],
            "rows": [3, 1, 0],
        },
        "transposed weight": {"act": f32, "pool": f32, "C": 96, "weight_by_tap": True},
        "fresh, one token": {
            "act": f32,
            "pool": f32,
            "C": 70,
            "W": 3,
            "L": 4,
            "lengths": [1, 2],
            "rows": [1, 3],
            "fresh": [0, 1],
        },
        # More sequences than cores, nearly all empty: a core looks up several in a row.
        "many empty": {
            "act": f32,
            "pool": f32,
            "C": 33,
            "W": 2,
            "L": 1,
            "lengths": [0] * 1000 + [2] + [0] * 999,
            "rows": [1] * 2000,
        },
    }
)
def short_conv(act, pool, C, B=3, T=1, W=4, L=3, bias=True, weight=f32, leading=False, lengths=None,
               rows=None, fresh=(), accepted=None, silu="silu", weight_by_tap=False):  # fmt: skip
    g = generator(2)
    N = len(lengths) if lengths else B
    if lengths:
        B, T = 1, sum(lengths)
    x = torch.randn(B, T, C, generator=g).to(act)
    w = torch.randn(C, W, generator=g).to(weight)
    if weight_by_tap:
        w = w.T.contiguous().T
    b = torch.randn(C, generator=g).to(weight) if bias else None
    cu = torch.tensor([0, *lengths]).cumsum(0) if lengths else None
    idx = None if rows is None else torch.tensor(rows)
    acc = None if accepted is None else torch.tensor(accepted, dtype=torch.int32)
    has = histories(N, fresh)
    by_channel = torch.randn(6, C, L, generator=g).to(pool)
    by_column = by_channel.transpose(1, 2).contiguous().transpose(1, 2)
    tail = (idx, has, cu, acc, silu, leading)
    want, want_pool = reference.short_conv(x, w, b, by_channel, *tail)

    def run():
        for state in (by_channel, by_column):
            device_pool = to_device(state)
            y = ops.short_conv(
                *[to_device(t) for t in (x, w, b)], device_pool, *[to_device(t) for t in tail]
            )
            assert_close("y", y, want)
            assert_close("conv_state", device_pool, want_pool, noise=0 if pool is not bf16 else 8)

    return run


@cases(
    {
        "f16": {"act": f16, "B": 3},
        "f32, rows": {"act": f32, "T": 3, "HV": 4, "K": 64, "V": 100, "rows": [3, -1]},
        "wide heads, no norm": {
            "act": f32,
            "B": 2,
            "T": 3,
            "H": 1,
            "HV": 2,
            "K": 200,
            "V": 40,
            "l2norm": False,
        },
        "packed bf16": {"act": bf16, "HV": 4, "K": 64, "V": 64, "lengths": [2, 5]},
        "drafts": {
            "act": f32,
            "B": 3,
            "T": 2,
            "HV": 2,
            "K": 32,
            "V": 32,
            "L": 5,
            "leading": True,
            "accepted": [1, 0, 2],
            "rows": [1, 2, 3],
        },
        "many heads": {"act": f32, "B": 1, "H": 5, "HV": 70, "K": 32, "V": 32},
    }
)
def conv_gating(act, B=2, T=1, H=2, HV=6, K=128, V=128, l2norm=True, rows=None, lengths=None,
                accepted=None, leading=False, L=4):  # fmt: skip
    g = generator(3)
    C = 2 * H * K + HV * V
    if lengths:
        B, T = 1, sum(lengths)
    x = torch.randn(B, T, C, generator=g).to(act)
    w = 0.5 * torch.randn(C, 4, generator=g)
    packed = torch.randn(B, T, 2 * HV, generator=g).to(act)
    a, b = packed[..., 0::2], packed[..., 1::2]
    A_log, dt_bias = torch.rand(HV, generator=g), torch.randn(HV, generator=g)
    pool = torch.randn(7, L, C, generator=g).to(act).transpose(1, 2)
    cu = torch.tensor([0, *lengths]).cumsum(0) if lengths else None
    idx = None if rows is None else torch.tensor(rows)
    acc = None if accepted is None else torch.tensor(accepted)
    tail = (idx, None, cu, acc, l2norm, "silu", leading)
    *want, want_pool = reference.conv_gating(x, a, b, w, None, A_log, dt_bias, pool, H, K, *tail)

    def run():
        device_pool = to_device(pool)
        head = [to_device(t) for t in (x, a, b, w, None, A_log, dt_bias)]
        got = ops.conv_gating(*head, device_pool, H, K, *[to_device(t) for t in tail])
        for name, mine, theirs in zip(("q", "k", "v", "g", "beta"), got, want, strict=True):
            assert_close(name, mine, theirs)
        assert_close("conv_state", device_pool, want_pool, noise=0)

    return run


@cases({"f32": {"act": f32}, "f16": {"act": f16}, "long": {"act": f32, "T": 70, "HV": 50}})
def gating(act, B=3, T=1, HV=6):
    g = generator(4)
    a, b = (10 * torch.randn(B, T, HV, generator=g).to(act) for _ in range(2))
    A_log, dt_bias = torch.randn(HV, generator=g), torch.randn(HV, generator=g)
    want = reference.gating(a, b, A_log, dt_bias)

    def run():
        got = ops.gating(*[to_device(t) for t in (a, b, A_log, dt_bias)])
        for name, mine, theirs in zip(("g", "beta"), got, want, strict=True):
            assert_close(name, mine, theirs, roundings=64, noise=0)

    return run


@cases(
    {
        "f16": {"act": f16, "gate": f16, "weight": f16, "rows": 100},
        "f32, large gates": {"act": f32, "gate": f32, "weight": f32, "rows": 50, "span": 30.0},
        "bf16": {"act": bf16, "gate": bf16, "weight": bf16, "rows": 900},
        "bf16, f32 gate and weight, V 100": {
            "act": bf16,
            "gate": f32,
            "weight": f32,
            "rows": 7,
            "V": 100,
        },
        "f32, bf16 gate, V 256": {"act": f32, "gate": bf16, "weight": f16, "rows": 7, "V": 256},
        "V 1": {"act": f16, "gate": f16, "weight": f32, "rows": 1, "V": 1},
    }
)
def gated_rms_norm(act, gate, weight, rows, V=128, span=1.0):
    g = generator(5)
    x = (3 * torch.randn(rows, V, generator=g)).to(act)
    z = (span * torch.randn(rows, V, generator=g)).to(gate)
    w = torch.randn(V, generator=g).to(weight)
    want = reference.gated_rms_norm(x, z, w)

    def run():
        # A value next to a rounding boundary of the inner casts may fall on the other side.
        y = ops.gated_rms_norm(*[to_device(t) for t in (x, z, w)])
        assert_close("y", y, want, roundings=1 if act is f32 else 6, noise=4)
        # Leaving an inner rounding out, or doing it differently, changes a third of the values.
        same = (y.cpu() == want.to(act)).double().mean()
        assert act is f32 or rows * V < 100 or same > 0.97, (
            f"y: only {same:.3f} of the values are exact"
        )

    return run


@cases(
    {
        "f32": {"act": f32, "state": f32},
        "f16, rows, fresh": {"act": f16, "state": f16, "rows": [4, -1, 0], "fresh": [2]},
        "bf16": {"act": bf16, "state": bf16, "B": 2, "HV": 4, "K": 64, "V": 96},
        "bf16 state, no norm": {
            "act": f32,
            "state": bf16,
            "B": 2,
            "HV": 2,
            "K": 64,
            "V": 32,
            "l2norm": False,
        },
        "f32, bf16 state": {"act": f32, "state": bf16, "B": 30, "K": 64, "V": 64},
        "columns": {"act": f16, "state": f16, "by_column": False, "L": 4},
        "one sequence": {"act": f16, "state": f16, "B": 1, "H": 4, "HV": 8},
        "waves": {"act": f16, "state": f16, "B": 70, "H": 12, "HV": 12, "K": 64, "V": 32},
        "leading": {"act": f16, "state": f32, "leading": True, "L": 3},
        "strided state": {"act": f32, "state": f16, "strided": True, "B": 2},
        "transposed state": {"act": f32, "state": f32, "transposed": True, "B": 2},
        "K 256 in three launches": {
            "act": f32,
            "state": f32,
            "B": 2,
            "H": 1,
            "HV": 2,
            "K": 256,
            "V": 64,
        },
        "T 3 in three launches": {
            "act": f32,
            "state": f32,
            "B": 2,
            "HV": 4,
            "K": 64,
            "V": 64,
            "T": 3,
            "roundings": 4,
        },
    }
)
def decode(act, state, B=3, H=2, HV=6, K=128, V=128, T=1, rows=None, fresh=(), by_column=True, L=4,
           leading=False, strided=False, transposed=False, roundings=1.0, l2norm=True):  # fmt: skip
    g = generator(6)
    C = 2 * H * K + HV * V
    x = torch.randn(B, T, C + HV * V + 2 * HV, generator=g).to(act)
    w = (0.5 * torch.randn(C, 4, generator=g)).to(act)
    A_log, dt_bias = torch.rand(HV, generator=g), torch.randn(HV, generator=g)
    norm = torch.randn(V, generator=g).to(act)
    P = B + 3
    conv = torch.randn(P, C, L, generator=g).to(act)
    if by_column:
        conv = conv.transpose(1, 2).contiguous().transpose(1, 2)
    pool = states(g, P, HV, V, K, state, strided, transposed)
    idx = None if rows is None else torch.tensor(rows)
    has = histories(B, fresh, idx, pool)
    tail = (idx, has, None, None, None, l2norm, 1e-6, "silu", leading)
    y_ref, conv_ref, pool_ref = reference.decode(
        x, w, None, A_log, dt_bias, norm, conv, pool, H, K, *tail
    )
    used = list(range(B)) if idx is None else [int(r) for r in idx if r >= 0]

    def run():
        device_conv, device_pool = to_device(conv), to_device(pool)
        head = [to_device(t) for t in (x, w, None, A_log, dt_bias, norm)]
        y = ops.decode(*head, device_conv, device_pool, H, K, *[to_device(t) for t in tail])
        # The norm divides by the length of o: float32 noise of o grows where o is short.
        assert_close("y", y, y_ref, roundings=roundings, noise=32)
        assert_close("state", device_pool[used], pool_ref[used])
        untouched("state", device_pool, pool, used)
        assert_close("conv_state", device_conv, conv_ref, noise=0)

    return run


@cases(
    {
        "f32, R 3": {"steps": 7, "act": f32, "state": f32, "R": 3},
        "T 3, fresh": {"steps": 7, "act": f32, "state": f32, "R": 4, "T": 3, "fresh": True},
        "f16, R 16": {
            "steps": 18,
            "act": f16,
            "state": f16,
            "R": 16,
            "B": 2,
            "H": 1,
            "HV": 3,
            "k": f16,
            "u": f16,
        },
        # Heads enough for the chip: a core has whole ones and shares no products.
        "whole heads": {
            "steps": 6,
            "act": f32,
            "state": f32,
            "R": 4,
            "B": 5,
            "H": 2,
            "HV": 384,
            "K": 64,
            "V": 32,
            "k": f32,
            "u": f16,
        },
        # Many key heads a cluster: a core takes products of several.
        "many key heads": {
            "steps": 7,
            "act": f16,
            "state": f16,
            "R": 5,
            "B": 65,
            "H": 4,
            "HV": 4,
            "K": 64,
            "V": 64,
            "k": f16,
            "u": f16,
            "fresh": True,
        },
        "R 64": {
            "steps": 67,
            "act": f32,
            "state": f32,
            "R": 64,
            "B": 2,
            "H": 1,
            "HV": 2,
            "K": 64,
            "V": 64,
        },
        "K 256": {
            "steps": 18,
            "act": f32,
            "state": f32,
            "R": 16,
            "B": 2,
            "H": 1,
            "HV": 2,
            "K": 256,
            "V": 32,
        },
        "bf16, V 256": {
            "steps": 7,
            "act": bf16,
            "state": bf16,
            "R": 5,
            "B": 2,
            "H": 1,
            "HV": 2,
            "V": 256,
            "k": bf16,
            "u": f32,
        },
        "drafts": {
            "steps": 8,
            "act": f32,
            "state": f32,
            "R": 6,
            "T": 3,
            "accept": (3, 1, 2, 3, 1, 1, 2, 3),
        },
    }
)
def recurrent_buffered(steps, act, state, R, B=3, H=2, HV=6, K=128, V=128, T=1, k=f32, u=f32,
                       fresh=False, accept=None):  # fmt: skip
    """Against `recurrent` in float64, every step; a flush at the end must give its state."""
    g = generator(7)
    P = B + 1
    start = (0.3 * torch.randn(P, HV, V, K, generator=g)).to(state)
    idx = torch.arange(B - 1, -1, -1)
    if B > 2:
        idx[0] = -1
    exact = start.double()
    script = []
    before = None
    for step in range(steps):
        qkvgb = tokens(g, B, T, H, HV, K, V, act)
        if step == 2:
            qkvgb[3][1] = float("-inf")
        has = torch.full((B,), step > 0) if fresh else None
        accepted = None
        if accept is not None:
            # The previous call's T tokens: keep `accept[step]` of them.
            accepted = torch.full((B,), accept[step])
            if step and accept[step] < T:
                kept = [x[:, : accept[step]] for x in before[0]]
                _, exact = reference.recurrent(
                    *kept, before[1], idx, before[2], None, None, None, True
                )
        before = (qkvgb, exact.clone(), has)
        if accept is not None and step == 0:
            accepted = torch.full((B,), T)
        want, exact = reference.recurrent(*qkvgb, exact, idx, has, None, None, None, True)
        script.append((qkvgb, has, accepted, want))
    used = [int(r) for r in idx if r >= 0]
    # A state stored in 16 bits is rounded once a fold, and errors of u and k enter the next u.
    loose = 1.0 if state is f32 else 4.0
    worst = {f32: 16, f16: 4096, bf16: 32768}
    noise = max(worst[state], worst[k], worst[u])

    def run():
        pool = to_device(start)
        win_k = to_device(torch.zeros(P, H, R, K, dtype=k))
        win_u = to_device(torch.zeros(P, HV, R, V, dtype=u))
        win_g = to_device(torch.zeros(P, HV, R))
        fill = to_device(torch.zeros(P, dtype=torch.int32))
        for step, (qkvgb, has, accepted, want) in enumerate(script):
            o = ops.recurrent_buffered(
                *[to_device(t) for t in qkvgb], pool, win_k, win_u, win_g, fill, to_device(idx),
                to_device(has), None, to_device(accepted), None, True,
            )  # fmt: skip
            assert_close(f"o at step {step}", o, want, roundings=2, noise=noise)
        ops.window_flush(pool, win_k, win_u, win_g, fill, to_device(idx))
        assert_close("state", pool[used], exact[used], roundings=loose, noise=noise)
        untouched("state", pool, start, used)
        assert fill.cpu()[used].eq(0).all(), "window_flush left entries behind"

    return run


@cases(
    {
        "f32, R 5": {"steps": 12, "act": f32, "R": 5},
        "f16, R 16": {
            "steps": 20,
            "act": f16,
            "R": 16,
            "B": 3,
            "H": 2,
            "HV": 4,
            "K": 64,
            "V": 64,
            "k": f16,
            "u": f16,
        },
        "whole heads": {
            "steps": 5,
            "act": f32,
            "R": 3,
            "B": 5,
            "H": 2,
            "HV": 384,
            "K": 64,
            "V": 32,
        },
        "V 256": {"steps": 4, "act": f32, "R": 3, "B": 1, "H": 1, "HV": 1, "K": 64, "V": 256},
    }
)
def recurrent_lowrank(steps, act, R, B=2, H=1, HV=2, K=128, V=128, k=f32, u=f32):
    """Against the definition: no base state, the last R updates and the new one."""
    g = generator(8)
    idx = torch.arange(B)
    script = []
    past: list[tuple] = []
    for _ in range(steps):
        qkvgb = tokens(g, B, 1, H, HV, K, V, act)
        q, key, v, gates, beta = (x.double()[:, 0] for x in qkvgb)
        q, key = (reference.l2norm(x).repeat_interleave(HV // H, 1) for x in (q, key))
        S = torch.zeros(B, HV, V, K, dtype=torch.float64)
        for gi, ui, ki in past[-R:]:
            S = S * gi.exp()[..., None, None] + ui[..., :, None] * ki[..., None, :]
        S = S * gates.exp()[..., None, None]
        update = beta[..., None] * (v - torch.einsum("bhvk,bhk->bhv", S, key))
        S = S + update[..., :, None] * key[..., None, :]
        past.append((gates, update, key))
        want = K**-0.5 * torch.einsum("bhvk,bhk->bhv", S, q)
        script.append((qkvgb, want[:, None]))

    def run():
        win_k = to_device(torch.zeros(B, H, R, K, dtype=k))
        win_u = to_device(torch.zeros(B, HV, R, V, dtype=u))
        win_g = to_device(torch.zeros(B, HV, R))
        fill = to_device(torch.zeros(B, dtype=torch.int32))
        for step, (qkvgb, want) in enumerate(script):
            o = ops.recurrent_lowrank(
                *[to_device(t) for t in qkvgb], win_k, win_u, win_g, fill, to_device(idx),
                None, None, None, None, True,
            )  # fmt: skip
            assert_close(f"o at step {step}", o, want, roundings=2, noise=16 if k is f32 else 4096)
        # Live entries and, once the ring is full, the slot of the oldest.
        packed = min(steps, R) + 65536 * (steps % R if steps > R else 0)
        assert fill.cpu().eq(packed).all(), (
            f"win_fill: expected {packed}, got {fill.cpu().tolist()}"
        )
        ops.window_reset(fill, to_device(idx))
        assert fill.cpu().eq(0).all(), "window_reset left a count"

    return run


@cases(
    {
        "buffered": {"act": f32},
        "buffered, f16": {"act": f16, "state": f16, "window": f16},
        "buffered, drafts": {"act": f32, "T": 2, "accepted": [2, 1, 0, 1]},
        "buffered, transposed": {"act": f32, "transposed": True},
        "lowrank": {"act": f32, "state": None},
        "lowrank, bf16": {"act": bf16, "state": None, "window": bf16},
        "lowrank, drafts": {"act": f32, "state": None, "T": 2, "accepted": [2, 1, 0, 1]},
    }
)
def decode_window(act, state=f32, window=f32, T=1, accepted=None, transposed=False, H=1, HV=3, K=64,
                  V=64, R=4):  # fmt: skip
    """One call at every fill level, one of them a ring that has wrapped; fresh and padding rows."""
    g = generator(10)
    B, P = 4, 6
    C, L = 2 * H * K + HV * V, 4 + T - 1
    x = torch.randn(B, T, C + HV * V + 2 * HV, generator=g).to(act)
    w = (0.5 * torch.randn(C, 4, generator=g)).to(act)
    A_log, dt_bias = torch.rand(HV, generator=g), torch.randn(HV, generator=g)
    norm = torch.randn(V, generator=g).to(act)
    conv = torch.randn(P, L, C, generator=g).to(act).transpose(1, 2)
    keys = torch.nn.functional.normalize(torch.randn(P, H, R, K, generator=g), dim=-1)
    pools = [keys.to(window), (0.3 * torch.randn(P, HV, R, V, generator=g)).to(window),
             -torch.rand(P, HV, R, generator=g)]  # fmt: skip
    pools.append(torch.tensor([R, 2, R + 256, 0, 1, 3], dtype=torch.int32))
    if state is None:
        pools[3][2] += 65536 * 3
    base = []
    if state is not None:
        pool = (0.3 * torch.randn(P, HV, V, K, generator=g)).to(state)
        if transposed:
            pool = pool.transpose(2, 3).contiguous().transpose(2, 3)
        base = [pool]
    idx = torch.tensor([2, 5, -1, 0])
    has = torch.tensor([True, False, True, True])
    acc = None if accepted is None else torch.tensor(accepted)
    tail = (H, K, idx, has, None, acc, None, True, 1e-6, "silu", acc is not None)
    name = "decode_lowrank" if state is None else "decode_buffered"
    head = (x, w, None, A_log, dt_bias, norm, conv)
    want, conv_want, *base_want, window_want = getattr(reference, name)(*head, *base, *pools, *tail)
    stored = max(EPS[window], EPS[state or f32])
    noise = 64 if stored == EPS[f32] else 8 * stored * 2.0**22

    def run():
        moved = [to_device(t) for t in (*head, *base, *pools)]
        y = getattr(ops, name)(*moved, *[to_device(t) for t in tail])
        assert_close("y", y, want, roundings=4, noise=noise)
        assert_close("conv_state", moved[6], conv_want, noise=0)
        if base:
            assert_close("state", moved[7], base_want[0], noise=noise)
        got = moved[-4:]
        assert got[3].cpu().tolist() == window_want[3].tolist(), "win_fill"
        for row in (2, 5, 0):
            word = int(window_want[3][row])
            live = [((word >> 16) + i) % R for i in range(word & 255)]
            for what, mine, theirs in zip(("win_k", "win_u"), got, window_want, strict=False):
                assert_close(what, mine[row, :, live], theirs[row, :, live], noise=noise)
            mine, theirs = (t[2].cpu()[row, :, live].double() for t in (got, window_want))
            assert torch.allclose(mine.exp(), theirs.exp(), atol=1e-6), "win_g"

    return run


def offsets(lengths) -> torch.Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).int()


@cases(
    {
        "f32": {"act": f32, "T": 37, "HV": 6, "initial": True},
        "f16, chunks of 16": {"act": f16, "T": 40, "C": 16, "K": 100, "V": 70},
        "bf16, chunks of 128": {"act": bf16, "T": 130, "H": 1, "HV": 2, "C": 128},
        "f32, chunks of 128": {"act": f32, "T": 128, "H": 1, "HV": 1, "C": 128, "K": 64},
        "packed": {"act": f32, "lengths": [70, 0, 64, 1], "H": 1, "HV": 2, "initial": True},
        "gates gone": {"act": f32, "T": 30, "clear": True, "H": 1, "HV": 2, "initial": True},
        "no norm, K 256": {"act": f32, "T": 9, "K": 256, "V": 32, "l2norm": False, "scale": 0.01},
        # More sequences than cores: the plan of a core is for several, its offsets in many spans.
        "many sequences": {
            "act": f32,
            "lengths": [0] * 500 + [40, 3] + [0] * 400 + [17],
            "H": 1,
            "HV": 1,
            "K": 32,
            "V": 32,
            "C": 16,
        },
        "strided offsets": {
            "act": f32,
            "lengths": [5, 0, 33, 20],
            "H": 1,
            "HV": 1,
            "C": 16,
            "strided": True,
        },
    }
)
def chunk(act, B=1, T=1, H=2, HV=4, K=64, V=64, C=64, lengths=None, initial=False, clear=False,
          l2norm=True, scale=None, strided=False):  # fmt: skip
    g = generator(11)
    N = B
    if lengths:
        N, T = len(lengths), sum(lengths)
    q, k, v, gates, beta = tokens(g, B, T, H, HV, K, V, act)
    if clear:
        gates[:, T // 2] = float("-inf")
    start = torch.randn(N, HV, V, K, generator=g) if initial else None
    cu = offsets(lengths) if lengths else None
    if strided:
        cu = cu.long().repeat_interleave(2)[::2]
    tail = (cu, scale, l2norm, C)
    want, want_state = reference.chunk(q, k, v, gates, beta, start, *tail)

    def run():
        head = [to_device(x) for x in (q, k, v, gates, beta, start)]
        o, final = ops.chunk(*head, *[to_device(x) for x in tail])
        assert_close("o", o, want, noise=16)
        assert_close("final_state", final, want_state, noise=16)

    return run


@cases(
    {
        "f16 pool": {"act": f16, "pool": f16},
        "f32 pool": {"act": f32, "pool": f32, "K": 100, "V": 70},
        "bf16 pool": {"act": f32, "pool": bf16, "V": 40},
        "transposed pool": {"act": f32, "pool": f16, "transposed": True, "V": 40},
        "transposed pool, f32": {"act": f32, "pool": f32, "transposed": True, "K": 40},
    }
)
def chunk_prefill(act, pool, H=1, HV=2, K=64, V=64, transposed=False):
    """Rows read and written, a shared prefix, a fresh sequence, padding, edges, kept nothing."""
    g = generator(12)
    lengths = [40, 33, 0, 5, 20]
    q, k, v, gates, beta = tokens(g, 1, sum(lengths), H, HV, K, V, act)
    P = 12
    shape = (P, HV, K, V) if transposed else (P, HV, V, K)
    state = (0.3 * torch.randn(*shape, generator=g)).to(pool)
    if transposed:
        state = state.transpose(2, 3)
    state[4] = float("nan")  # the fresh sequence's row must not be read
    rows = torch.tensor([1, 1, 3, 4, -1])
    write = torch.tensor([5, -1, 6, 4, 9], dtype=torch.int32)
    has = torch.tensor([True, True, True, False, True])
    edges = torch.tensor([[7, -1, 8], [-1, 10, 8], [9, 9, 9], [9, 9, 9], [9, 9, 9]])
    tail = (rows, write, has, offsets(lengths), edges, None, True, 16)
    want, want_pool = reference.chunk_prefill(q, k, v, gates, beta, state, *tail)
    changed = [4, 5, 6, 7, 10]

    def run():
        device_pool = to_device(state)
        head = [to_device(x) for x in (q, k, v, gates, beta)]
        o = ops.chunk_prefill(*head, device_pool, *[to_device(x) for x in tail])
        assert_close("o", o, want, noise=16)
        assert_close("state", device_pool[changed], want_pool[changed], noise=16)
        untouched("state", device_pool, state, [*changed, 4])

    return run


@cases(
    {
        "f32": {"act": f32, "k": f32, "u": f32, "R": 4},
        "f16 window": {"act": f16, "k": f16, "u": f16, "R": 5, "K": 100, "V": 70},
        "bf16 keys": {"act": f32, "k": bf16, "u": f32, "R": 64, "HV": 4, "V": 40},
        # The last row of every tensor is read and written.
        "whole chunks": {"act": f32, "k": f32, "u": f32, "R": 3, "lengths": [32, 64], "C": 32},
        "whole chunks of one": {"act": f32, "k": f32, "u": f32, "R": 3, "lengths": [64], "C": 32},
        # More heads than cores, nearly all of empty sequences: a core looks up several in a row.
        "many empty": {"act": f32, "k": f32, "u": f32, "R": 2, "lengths": [0] * 400 + [3]},
    }
)
def chunk_lowrank(act, k, u, R, H=2, HV=2, K=64, V=64, lengths=(37, 3, 0, 18, 5), C=16):
    """From a ring that has wrapped, through several chunks, fresh and padding sequences beside."""
    g = generator(13)
    q, key, v, gates, beta = tokens(g, 1, sum(lengths), H, HV, K, V, act)
    P = 6
    window = [
        torch.randn(P, H, R, K, generator=g).to(k),
        torch.randn(P, HV, R, V, generator=g).to(u),
        -torch.rand(P, HV, R, generator=g),
    ]
    fill = torch.zeros(P, dtype=torch.int32)
    rows = torch.tensor([2, 5, 0, 3, -1][: len(lengths)])
    fill[[2, 5, 0, 3]] = torch.tensor([R - 1, R + 65536 * (R - 1), 0, 3], dtype=torch.int32)
    for pool in window:
        pool[3] = float("nan")  # of a sequence that starts afresh
    if len(lengths) > 5:
        rows = torch.tensor([0] * 400 + [2])
    has = rows != 3
    tail = (rows, has, offsets(lengths), None, True, C)
    want, *want_window = reference.chunk_lowrank(q, key, v, gates, beta, *window, fill, *tail)
    changed = {int(r) for r, n in zip(rows, lengths, strict=True) if r >= 0 and n}

    def run():
        pools = [to_device(x) for x in (*window, fill)]
        head = [to_device(x) for x in (q, key, v, gates, beta)]
        o = ops.chunk_lowrank(*head, *pools, *[to_device(x) for x in tail])
        # An entry may round the other way than the oracle's: half a unit more, both ways.
        stored = max(EPS[k], EPS[u])
        noise = 32 if stored == EPS[f32] else 2 * stored * 2.0**22
        assert_close("o", o, want, noise=noise)
        assert pools[3].cpu().tolist() == want_window[3].tolist()
        names = ("win_k", "win_u", "win_g")
        for name, got, theirs, before in zip(names, pools, want_window, window, strict=False):
            for row in changed:
                n = int(want_window[3][row]) & 255
                assert_close(name, got[row, :, :n], theirs[row, :, :n].double(), noise=noise)
            untouched(name, got.nan_to_num(), before.nan_to_num(), changed)

    return run


@case("bf16 ties")
def bf16_ties():
    """1 + 2^-8 lies halfway between two bfloat16 values: ties go to the even one, both ways."""
    K = V = 64
    state = torch.zeros(1, 1, V, K)
    state[..., 0] = 1.0
    state[..., 1::2, 0] += 2.0**-7
    k = torch.zeros(1, 1, 1, K)
    k[..., 0] = 2.0**-8
    v = 1 + state[0, :, :, 0][None, None] * 2.0**-8  # so that u is 1
    want = torch.ones(V)
    want[1::2] += 2.0**-6

    def run():
        pool = to_device(state.bfloat16())
        one = to_device(torch.ones(1, 1, 1))
        ops.recurrent(*[to_device(x) for x in (k, k, v)], 0 * one, one, pool)
        assert torch.equal(pool.cpu()[0, 0, :, 0].float(), want)

    return run
