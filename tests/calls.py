"""Random calls of the ops, each judged by the float64 oracles.

``Call(op, seed)`` draws everything on the CPU, so that a seed is the same call on every device:
sizes, dtypes, strides, gaps, expanded dimensions, padding, packed and empty sequences, fresh rows,
rings, fills, drafts and extreme gates. Whatever may not be read holds NaN: gaps in and around a
tensor, tokens of padding, pool rows and slots of windows that the call does not use.

``Call.check`` runs it twice and holds results against :mod:`gdn_ops.reference`, everything that may
not be written against its bytes before, and the second run against the bits of the first. A new op
needs a function here that draws a call and says what is expected, and its line in ``OPS``.
scripts/random_calls.py runs these for a long time, tests/test_random_calls.py a few.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import accumulate
from unittest import mock

import torch
from common import ACTIVATIONS, at_thread_counts, bits
from torch import Tensor

from gdn_ops import reference
from gdn_ops._on_device import OnDevice, refused
from gdn_ops._tolerance import ROUNDED_FACTOR, TOLERANCE

ALL = 9  # dimensions, and more than a tensor has
RINGS = [1, 2, 3, 4, 5, 8, 16, 17, 31, 32, 33, 63, 64]
EDGES = [1, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 65, 96, 100, 127, 129]
LENGTHS = [0, 1, 2, 5, 15, 16, 17, 31, 33, 48, 63, 64, 65, 80, 127, 128, 129, 150, 200]
CHANNELS = [1, 2, 7, 8, 15, 16, 17, 33, 64, 100, 128, 257, 640]


class Refused(Exception):
    """The device says that it does not do this, and has written nothing."""


def whole(x: Tensor) -> Tensor:
    """All bytes of the storage of ``x``."""
    return torch.empty(0, dtype=torch.uint8).set_(x.untyped_storage())


def copied(x):
    """``x`` in a copy of its whole storage."""
    if not isinstance(x, Tensor):
        return x
    storage = whole(x).clone().untyped_storage()
    return torch.empty(0, dtype=x.dtype).set_(storage, x.storage_offset(), x.size(), x.stride())


def unit(x: Tensor) -> Tensor:
    return x / x.norm(dim=-1, keepdim=True).clamp(min=1e-6)


@dataclass
class Expected:
    """A tensor that a call returns (``what``: its place) or writes (its name), and its limit."""

    what: int | str
    want: Tensor  # float64
    factor: float = 1.0
    via: tuple[torch.dtype, ...] = ()  # what was rounded to on the way, beside the tensor's dtype
    least: float = 0.0  # the size that absolute errors are relative to, at least
    slack: Tensor | float = 1.0  # of the absolute part, by element
    handed: Tensor | float = 0.0  # what 16-bit activations between launches change, on a device
    column: int | None = None  # in chunks: the dimension that runs down a column of V
    exact: bool = False
    part: Callable[[Tensor], Tensor] = lambda x: x
    worst: str = ""  # after error(): where it is

    def error(self, got: Tensor, call: Call, on_device: bool) -> float:
        """Largest error over its limit; infinite where there is a NaN too many or too few."""
        got, want = self.part(got), self.part(self.want)
        assert got.shape == want.shape, f"shape {tuple(got.shape)}, {tuple(want.shape)}"
        if not want.numel():
            return 0.0
        if self.exact:
            same = got.double() == want.to(got.dtype).double()
            return 0.0 if bool((same | got.isnan() & want.isnan()).all()) else math.inf
        # Below 1e-37 float32 has no digits.
        got, want = (torch.where(x.abs() < 1e-37, 0, x) for x in (got, want))
        factor, via, more = self.factor, self.via, 0.0
        if on_device and self.column is not None and call.act != torch.float32:
            # Factors of 16 bits, which have one scale a column.
            via, factor = (*via, call.act), max(factor, ROUNDED_FACTOR)
            largest = want.abs().amax(self.column, keepdim=True)
            more = 2 * torch.finfo(call.act).eps * largest
        if on_device and call.op.startswith("decode"):
            # Launches hand each other 16-bit activations.
            via, factor = (*via, call.act), max(factor, ROUNDED_FACTOR**2)
            more = 4 * self.handed
        rtol, atol = TOLERANCE[got.dtype]
        coarse = max(via, key=lambda d: TOLERANCE[d], default=torch.float32)
        if coarse != torch.float32:
            rtol, atol = rtol + TOLERANCE[coarse][0], atol + TOLERANCE[coarse][1]
        # Errors are relative to the size of the tensor, and to that of a row if it is larger.
        of_rows = want.square().mean(-1, keepdim=True).sqrt()
        size = of_rows.clamp(min=max(float(want.square().mean().sqrt()), self.least))
        limit = factor * (rtol * want.abs() + atol * size * self.slack) + more
        limit += 2.0**-24 if torch.float16 in (got.dtype, *via) else 1e-37
        error = torch.where(got.double() == want, 0.0, (got.double() - want).abs() / limit)
        at = tuple(int(i) for i in torch.unravel_index(error.argmax(), error.shape))
        self.worst = (
            f"{float(got[at])} at {at}, expected {float(want[at])} +- {float(limit[at]):.3g}"
        )
        return math.inf if bool(error.isnan().any()) else float(error[at])


class Call:
    """One call: arguments, which rows of which pools it may write, and what is expected."""

    def __init__(self, op: str, seed: int) -> None:
        self.op, self.rng = op, random.Random(f"{op} {seed}")
        self.generator = torch.Generator().manual_seed(self.rng.getrandbits(31))
        self.act = self.pick(*ACTIVATIONS)
        self.dense = self.chance(0.4)  # no gaps, and usual dtypes: what fast kernels ask for
        self.args: dict = {}
        self.written: dict[str, Iterable[int]] = {}
        self.expected: list[Expected] = []
        self.factor = 1.0  # of limits, where a drawing says so
        with torch.no_grad():
            OPS[op](self)

    # --- drawing

    def chance(self, p: float) -> bool:
        return self.rng.random() < p

    def pick(self, *options):
        return self.rng.choice(options)

    def dtype(self) -> torch.dtype:
        return self.act if self.dense and self.chance(0.5) else self.pick(*ACTIVATIONS)

    def randn(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator)

    def rand(self, *shape: int) -> Tensor:
        return torch.rand(*shape, generator=self.generator)

    def some_of(self, x: Tensor, kinds: int, *values: float) -> None:
        """Each value in one of ``kinds`` elements."""
        kind = torch.randint(0, kinds, x.shape, generator=self.generator)
        for i, value in enumerate(values):
            x[kind == i] = value

    def put(self, name: str, x: Tensor, inner=None, expand: int = 0) -> None:
        """An argument as a view of storage of its own. ``inner``: dimensions of which one has to
        lie innermost and dense; ``expand``: so many of the first may have stride 0."""
        messy = not self.dense and self.chance(0.7)
        order, dims = list(range(x.dim())), range(x.dim())
        may = messy and not (x.is_floating_point() and x.isnan().any())
        flat = [may and d < expand and x.size(d) > 1 and self.chance(0.08) for d in dims]
        if messy and self.chance(0.5):
            self.rng.shuffle(order)
        if inner and order[-1] not in inner:
            order.append(order.pop(order.index(self.pick(*inner))))
        strides, step = [0] * x.dim(), 1
        for i, d in enumerate(reversed(order)):
            if not flat[d]:
                if messy and (i > 0 or inner is None) and self.chance(0.3):
                    step = step * self.pick(1, 2, 3) + self.pick(0, 0, 1, 5)
                strides[d] = step
                step *= max(x.size(d), 1)
        start = self.pick(0, 0, 1, 3, 8, 17) if messy else 0
        used = 1 + sum((max(x.size(d), 1) - 1) * strides[d] for d in dims)
        nonsense = math.nan if x.is_floating_point() else x.dtype == torch.bool or 7777
        storage = torch.full((start + used + self.pick(0, 0, 1, 16),), nonsense, dtype=x.dtype)
        self.args[name] = view = storage.as_strided(x.shape, strides, start)
        first = tuple(slice(0, 1) if f else slice(None) for f in flat)
        view[first].copy_(x[first])

    def integers(self, name: str, values: list, *shape: int) -> None:
        x = torch.tensor(values, dtype=self.pick(torch.int32, torch.int64))
        self.put(name, x.reshape(shape) if shape else x)

    def odd(self) -> int:
        return self.pick(self.rng.randint(1, 20), self.pick(*EDGES), self.rng.randint(1, 257))

    def sizes(self, tokens: int, most: float = 4e6) -> None:
        self.H, ratio = self.pick(1, 1, 2, 3), self.pick(1, 1, 2, 3, 3, 4, 5)
        self.K, self.V = self.odd(), self.odd()
        if self.chance(0.55):
            self.K = self.pick(64, 128, 128, 128, 256)
            self.V = self.pick(64, 128, 128, 32 * self.rng.randint(1, 8))
        self.B, self.T = self.pick(0, 1, 1, 2, 3, 5, 8), tokens
        if self.chance(0.04):
            self.B = self.rng.randint(9, 160)
        cost = tokens * self.H * self.K * self.V
        while self.B * ratio * cost > most and (self.B, ratio) > (1, 1):
            self.B, ratio = max(1, self.B // 2), max(1, ratio // 2)
        self.HV = self.H * ratio

    def sequences(self, begin: bool = True) -> None:
        """``B`` sequences of up to ``T`` tokens, a batch or packed; some ``begin`` anew."""
        N, T = self.B, self.T
        self.slices, self.N, self.packed = [(b, 0, T) for b in range(N)], N, False
        if N and self.chance(0.45):
            lengths = [self.pick(T, T, 0, self.rng.randint(0, T), min(T, 1)) for _ in range(N)]
            cu = [0, *accumulate(lengths)]
            self.slices = [(0, a, b) for a, b in zip(cu, cu[1:], strict=False)]
            self.B, self.T, self.packed = 1, cu[-1], True
            self.integers("cu_seqlens", cu)
        self.lengths = [end - start for _, start, end in self.slices]
        self.longest = max(self.lengths, default=0)
        # Rows need so many columns, and histories room for so many drafts.
        self.columns = max(1, self.longest if self.packed else self.T)
        self.fresh, self.live, self.rows = [False] * N, [True] * N, list(range(N))
        if begin and self.chance(0.5):
            self.fresh = [self.chance(0.3) for _ in range(N)]
            self.put("has_initial_state", ~torch.tensor(self.fresh, dtype=torch.bool))

    def draw_rows(self, columns: int = 0, padding: float = 0.2, first=False) -> list[list[int]]:
        """``state_indices``, ``[N]`` or ``[N, columns]``, padding among them; the rows of each.
        ``first``: where column 0 is padding, all are."""
        if not columns and self.chance(0.15):
            self.P = self.N + self.rng.randint(0, 2)
            return [[n] for n in range(self.N)]
        width = max(columns, 1)
        self.P = self.N * width + self.rng.randint(1, 4)
        rows = self.rng.sample(range(self.P), self.N * width)
        rows = [-self.pick(1, 2, 9) if self.chance(padding) else row for row in rows]
        if first:
            firsts = [rows[i - i % width] for i in range(len(rows))]
            rows = [row if f >= 0 else f for row, f in zip(rows, firsts, strict=True)]
        self.integers("state_indices", rows, self.N, *([columns] if columns else []))
        return [rows[n * width : (n + 1) * width] for n in range(self.N)]

    def draw_accepted(self, draw: Callable[[int], int]) -> list[int]:
        """``num_accepted``, of which there may be more than sequences."""
        accepted = [draw(n) for n in range(self.N)]
        self.integers("num_accepted", accepted + [9] * self.pick(0, 1))
        return accepted

    def own_rows(self, rows: list[list[int]], accepted: list[int] | None = None) -> None:
        """The row that each sequence continues, and whether it is no padding."""
        self.rows = [own[0] for own in rows]
        counts = accepted or [1] * self.N
        self.live = [row >= 0 and a > 0 for row, a in zip(self.rows, counts, strict=True)]

    def each(self):
        return zip(self.rows, self.live, self.fresh, self.lengths, strict=True)

    def read_rows(self) -> set[int]:
        return {row for row, live, fresh, _ in self.each() if live and not fresh}

    def written_rows(self) -> set[int]:
        return {row for row, live, _, length in self.each() if live and length}

    def put_tokens(self, name: str, x: Tensor, dtype=None, expand: int = ALL) -> None:
        """An argument with NaN in the tokens of padding."""
        x = x.to(dtype or self.act)
        for (b, start, end), live in zip(self.slices, self.live, strict=True):
            if not live:
                x[b, start:end] = math.nan
        self.put(name, x, expand=expand)

    def pool(self, name: str, x: Tensor, read: set[int], inner=None) -> torch.dtype:
        """A pool whose other rows hold what must not be read."""
        for row in set(range(len(x))) - read:
            x[row] = self.pick(math.nan, math.nan, 1.0, math.inf)
        self.put(name, x.to(self.dtype()), inner)
        return self.args[name].dtype

    def state(self, read: set[int]) -> torch.dtype:
        return self.pool("state", 0.5 * self.randn(self.P, self.HV, self.V, self.K), read, (2, 3))

    def tokens(self) -> None:
        """q, k, v and what decays them."""
        shape, l2norm = (self.B, self.T, self.HV), self.chance(0.5)
        q, k = (self.randn(self.B, self.T, self.H, self.K) for _ in range(2))
        if not l2norm:
            # A rounding may lengthen a key, and with beta = 2 such a recurrence grows.
            q, k = unit(q), unit(k) * (1.0 if self.act == torch.float32 else 0.98)
        mild = False
        if self.op == "recurrent_gated":
            self.raw_gates()
        else:
            g = -self.rand(*shape) * self.pick(1, 1, 3, 0, 1e-3)
            if self.chance(0.2):
                self.some_of(g, 6, 0.0, -math.inf, -316.0, math.log(1e-12), -1e-5)
            beta = self.rand(*shape)
            # Beyond 1 a state that drops its oldest updates grows, and errors with it.
            if self.chance(0.4):
                self.some_of(beta, *self.pick((1, 0.0), (1, 1.0), (1, 2.0), (3, 0.0, 1.0, 2.0)))
            if self.op.endswith("lowrank"):
                beta = beta.clamp(max=1)
            mild = bool((beta <= 1).all())
            self.factor *= 1 if mild else 2  # beyond 1 the inverse of a chunk grows
            for name, x in (("g", g), ("beta", beta)):
                self.put_tokens(name, x, self.pick(torch.float32, self.act, self.dtype()))
        self.put_tokens("q", q)
        # Keys that are all alike with beta above 1 cancel: float32 itself is far off then.
        self.put_tokens("k", k, expand=3 if mild else 0)
        self.put_tokens("v", self.randn(*shape, self.V))
        self.args |= dict(qk_l2norm=l2norm, scale=self.pick(None, None, 1.0, 0.3, -2.0, 0.0))

    def raw_gates(self) -> None:
        for name in ("a", "b"):
            x = self.randn(self.B, self.T, self.HV) * self.pick(1, 5, 50)
            self.put_tokens(name, x, self.dtype())
        self.layer_gates()

    def layer_gates(self) -> None:
        self.put("A_log", (self.rand(self.HV) * self.pick(1, 3)).to(self.dtype()))
        self.put("dt_bias", self.randn(self.HV).to(self.dtype()))

    def window(self, read: set[int]) -> tuple[torch.dtype, ...]:
        """Windows with any fill, and any head where there is no base; dtypes of k and u."""
        P, R, base = self.P, self.R, not self.op.endswith("lowrank")
        k, u = 0.98 * unit(self.randn(P, self.H, R, self.K)), self.randn(P, self.HV, R, self.V)
        g, fill = -self.rand(P, self.HV, R), torch.zeros(P, dtype=torch.int32)
        self.some_of(g, 12, -math.inf, 0.0, -316.0)
        # Counts of fresh rows are those of whoever had the row before, of others not even that.
        stale, begun = self.pick(0, 12345678, 2**24 - 1), {row for row in self.rows if row >= 0}
        for row in range(P):
            count = self.pick(0, R, self.rng.randint(0, R)) if row in read else 0
            head = 0 if base else self.pick(0, self.rng.randrange(R))
            drafts = self.rng.randint(0, max(count - 1, 0))
            fill[row] = stale if row in begun else self.pick(0, -1, 2**31 - 1)
            if row in read:
                fill[row] = count | drafts << 8 | head << 16
            for slot in set(range(R)).difference((head + i) % R for i in range(count)):
                k[row, :, slot] = u[row, :, slot] = g[row, :, slot] = math.nan
        for name, x in (("win_k", k.to(self.dtype())), ("win_u", u.to(self.dtype()))):
            self.put(name, x, (3,))
        self.put("win_g", g)
        self.put("win_fill", fill)
        return self.args["win_k"].dtype, self.args["win_u"].dtype

    def window_rows(self, speculative: bool = True) -> tuple[torch.dtype, ...]:
        """Rows with windows, and how many of the last call's tokens were accepted."""
        rows = self.draw_rows(self.pick(0, 0, 0, 0, 0, 3) if speculative else 0)
        self.own_rows(rows)
        read = self.read_rows()
        dtypes, fill = self.window(read), self.args["win_fill"]
        if speculative and self.chance(0.5):
            drafts = [1 + (int(fill[row]) >> 8 & 255 if row in read else 5) for row in self.rows]
            draw = lambda n: self.pick(0, -1, 1, drafts[n], self.rng.randint(1, drafts[n]))  # noqa: E731
            self.own_rows(rows, self.draw_accepted(draw))
        return dtypes

    # --- what is expected

    def oracle(self):
        return getattr(reference, self.op)(**self.args)

    def expect(self, what: int | str, want: Tensor, **how) -> None:
        self.expected.append(Expected(what, want, **how))

    def expect_rows(self, name: str, want: Tensor, rows: Iterable[int], **how) -> None:
        self.written[name] = rows
        for row in rows:
            self.expect(name, want, part=lambda x, row=row: x[row], **how)

    def expect_bases(self, want: Tensor, factor: float) -> None:
        """What lies behind an entry of g = -inf, where a sequence began, nobody reads."""
        self.expect_rows("state", want, self.written_rows() & self.read_rows(), factor=factor)
        self.written["state"] = self.written_rows()

    def expect_window(self, want: tuple[Tensor, ...], via: tuple, factor: float = 4.0) -> None:
        fused, rows = self.op.startswith("decode"), self.written_rows()
        self.expect_rows("win_fill", want[3], rows, exact=True)
        self.written |= dict.fromkeys(("win_k", "win_u", "win_g"), rows)
        for row in rows:
            fill = int(want[3][row])
            slots = [((fill >> 16) + i) % self.R for i in range(fill & 255)]
            how = dict(part=lambda x, row=row, slots=slots: x[row][:, slots])
            self.expect("win_k", want[0], factor=factor, least=0.05 if fused else 1e-3, **how)
            self.expect("win_u", want[1], factor=factor, least=0.1, via=(self.act, *via), **how)
            self.expect("win_g", want[2], exact=not fused, **how)

    # --- running

    def run(self, device: torch.device | None, threads: int) -> tuple[list[Tensor], dict]:
        """Outputs, and the arguments after a call on copies of them."""
        args = {name: copied(x) for name, x in self.args.items()}

        def call():
            with torch.no_grad(), OnDevice(device) if device else nullcontext():
                return getattr(torch.ops.gdn, self.op)(**args)

        try:
            (out,) = at_thread_counts([threads], call)
        except RuntimeError as error:
            if device is None or not refused(error):
                raise
            self.check_bytes(args, {})
            raise Refused(str(error).splitlines()[0]) from error
        return [out] if isinstance(out, Tensor) else list(out or ()), args

    def check_bytes(self, after: dict, written: dict) -> None:
        """What may not be written has the bytes of before."""
        for name, x in self.args.items():
            if isinstance(x, Tensor):
                wrong = (whole(x) != whole(after[name])).view(-1, x.element_size()).any(1)
                rows = wrong.as_strided(x.size(), x.stride(), x.storage_offset())
                for row in written.get(name, ()):
                    rows[row] = False
                count = int(wrong.sum())
                assert not count, f"{name}: {count} elements were written that may not be"

    def check(self, device: torch.device | None = None) -> float:
        """Raises where something is wrong; the largest error over its limit."""
        threads = [self.pick(1, 1, 2), self.pick(1, 2, 3, 5)]
        if device is not None or self.op == "linear":  # torch's product is cut by threads
            threads[1] = threads[0]
        (out, after), (out_again, after_again) = (self.run(device, n) for n in threads)
        self.check_bytes(after, self.written)
        worst = 0.0
        for e in self.expected:
            got = out[e.what] if isinstance(e.what, int) else after[e.what]
            error = e.error(got, self, device is not None)
            assert error <= 1, f"{e.what} ({got.dtype}): {error:.3g} of its limit\n{e.worst}"
            worst = max(worst, error)
        pools = [(name, after[name], after_again[name]) for name in self.written]
        for name, x, y in [*pools, *zip(range(ALL), out, out_again, strict=False)]:
            assert torch.equal(bits(x), bits(y)), f"{name}: other bits again, {threads} threads"
        return worst


# --- the ops


def recurrent(c: Call) -> None:
    c.sizes(c.pick(1, 1, 1, 1, 2, 3, 4, 5, 8, 0, c.rng.randint(9, 33)))
    c.sequences()
    if c.chance(0.35):  # drafts: a row for the state after each token
        columns = c.columns + c.pick(0, 0, 1)
        table, accepted = c.draw_rows(columns), [1] * c.N
        if c.chance(0.7):
            accepted = c.draw_accepted(lambda n: c.pick(1, 1, 0, -3, c.rng.randint(1, columns)))
        read = [own[a - 1] if a > 0 else -1 for own, a in zip(table, accepted, strict=True)]
        c.own_rows([[row] for row in read])
        written = written_columns(c, table)
    else:
        c.own_rows(c.draw_rows())
        written = c.written_rows()
    c.tokens()
    c.state(c.read_rows())
    o, state = c.oracle()
    c.expect(0, o, factor=1.5)
    c.expect_rows("state", state, written, factor=1.5)


def written_columns(c: Call, table: list[list[int]]) -> set[int]:
    each = zip(table, c.live, c.lengths, strict=True)
    return {row for rows, live, n in each if live for row in rows[:n] if row >= 0}


def recurrent_window(c: Call) -> None:
    base, c.R = c.op == "recurrent_buffered", c.pick(*RINGS)
    tokens = c.pick(1, 1, 1, 1, 2, 3, 4, 4, 5, 8, 0, c.rng.randint(9, 33))
    c.sizes(min(tokens, c.R) if base else tokens)
    c.sequences()
    via = c.window_rows()
    c.tokens()
    if base:
        via += (c.state(c.read_rows()),)
    o, *state, window = c.oracle()
    c.expect(0, o, via=via, factor=4)
    c.expect_window(window, via)
    if base:
        c.expect_bases(*state, factor=2)


def window_pool(c: Call) -> None:
    """window_flush and window_reset."""
    c.R = c.pick(*RINGS)
    c.sizes(1)
    c.N = c.B
    c.rows = [own[0] for own in c.draw_rows()]
    if "state_indices" not in c.args:
        c.rows = list(range(c.P))
    rows = {row for row in c.rows if row >= 0}
    c.window(rows)
    if c.op == "window_reset":
        c.args = {n: x for n, x in c.args.items() if n in ("win_fill", "state_indices")}
        fill = c.oracle()
    else:
        c.state(rows)
        state, fill = c.oracle()
        c.expect_rows("state", state, rows, factor=2)
    c.expect_rows("win_fill", fill, rows, exact=True)


def chunk_sequences(c: Call, begin: bool = True) -> None:
    c.sizes(c.pick(*LENGTHS))
    c.B, c.factor = min(c.B, 3), 2.0
    if c.H == 1 and c.chance(0.05):  # so long that a device cuts it into segments
        c.B, c.T, c.HV = 1, c.rng.randint(1000, 3000), c.pick(1, 2)
        c.factor = 2 + c.T / 50  # a decay near 1 is off by a rounding, each time
    c.sequences(begin)
    c.args["chunk_size"] = c.pick(64, 64, 64, 16, 17, 31, 32, 33, 63, 65, 100, 127, 128)


def chunk(c: Call) -> None:
    chunk_sequences(c, begin=False)
    c.tokens()
    if c.chance(0.6):
        c.put("initial_state", 0.5 * c.randn(c.N, c.HV, c.V, c.K), (2, 3))
    o, final = c.oracle()
    c.expect(0, o, factor=c.factor, column=1)
    c.expect(1, final, factor=c.factor, column=-1)


def chunk_prefill(c: Call) -> None:
    """Sequences may share a row that they read, and write others, edges of chunks among them."""
    chunk_sequences(c)
    edges, in_place = c.pick(0, 0, 0, 1, 3), c.chance(0.3)
    c.P = c.N * (2 + edges) + 3
    free = c.rng.sample(range(c.P), c.P)
    shared = free.pop() if not in_place and c.chance(0.4) else None
    write = []
    for n in range(c.N):
        own, other = free.pop(), free.pop()
        c.rows[n] = own if shared is None or c.chance(0.4) else shared
        write.append(own if in_place or (c.rows[n] == own and c.chance(0.5)) else other)
        if c.chance(0.2):
            c.rows[n] = -1
        if c.chance(0.2) and not in_place:
            write[n] = -3
    c.integers("read_indices", c.rows)
    if not in_place:
        c.integers("write_indices", write)
    c.own_rows([[row] for row in c.rows])
    written = {row for row, live in zip(write, c.live, strict=True) if live and row >= 0}
    table = [[-1 if c.chance(0.3) else free.pop() for _ in range(edges)] for _ in range(c.N)]
    if edges or c.chance(0.1):
        c.integers("edge_rows", sum(table, []), c.N, edges)
    for own, live, n in zip(table, c.live, c.lengths, strict=True):
        written |= {row for row in own[: n // c.args["chunk_size"]] if live and row >= 0}
    c.tokens()
    c.state(c.read_rows())
    o, state = c.oracle()
    c.expect(0, o, factor=c.factor, column=1)
    c.expect_rows("state", state, written, factor=c.factor, column=-1)


def chunk_lowrank(c: Call) -> None:
    c.R = c.pick(*RINGS)
    chunk_sequences(c)
    via = c.window_rows(speculative=False)
    c.tokens()
    o, *window = c.oracle()
    c.expect(0, o, via=via, factor=2 * c.factor, column=1)
    c.expect_window(window, via, factor=2 * c.factor)


def weights(c: Call, C: int, prefix: str = "") -> None:
    c.W = c.pick(1, 2, 3, 4, 4, 4, 4, 5, 8)
    c.put(f"{prefix}weight", (c.randn(C, c.W) / c.W**0.5).to(c.dtype()))
    c.args[f"{prefix}bias"] = None
    if c.chance(0.5):
        c.put(f"{prefix}bias", c.randn(C).to(c.dtype()))


def conv_rows(c: Call, C: int) -> None:
    """Rows and histories, in each of the two forms, with accepted drafts or without."""
    columns, length, accepted = c.pick(0, 0, 0, c.columns), c.W - 1 + c.pick(0, 0, 1, 3), None
    rows = c.draw_rows(columns)
    if c.N and c.chance(0.35):
        length += c.columns - 1
        most = min(length - c.W + 2, columns or ALL)
        accepted = c.draw_accepted(lambda n: c.pick(0, -2, 1, 1, c.rng.randint(1, most)))
    c.own_rows(rows, accepted)
    histories(c, C, length, accepted)


def histories(c: Call, C: int, length: int, accepted: list[int] | None) -> None:
    c.args["conv_leading"] = accepted is not None or c.chance(0.5)
    c.pool("conv_state", c.randn(c.P, C, length), c.read_rows())


def expect_histories(c: Call, want: Tensor) -> None:
    c.expect_rows("conv_state", want, c.written_rows() if c.W > 1 else (), exact=True)


def short_conv(c: Call) -> None:
    C, c.B, c.T = (
        c.pick(*CHANNELS),
        c.pick(0, 1, 2, 3, 5),
        c.pick(0, 1, 1, 1, 2, 3, 4, 5, 9, 33, 70),
    )
    c.sequences()
    weights(c, C)
    conv_rows(c, C)
    c.put_tokens("x", c.randn(c.B, c.T, C))
    c.args["activation"] = c.pick("silu", "none")
    y, pool = c.oracle()
    c.expect(0, y)
    expect_histories(c, pool)


def conv1d(c: Call) -> None:
    C, c.B, c.T = c.pick(*CHANNELS), c.pick(0, 1, 2, 3, 5), c.pick(0, 1, 2, 3, 4, 5, 9, 33, 70)
    c.sequences(begin=False)
    weights(c, C)
    length = c.W - 1 + (c.pick(0, 0, 1, 3) if c.W > 1 else 0)
    if c.chance(0.6):
        c.put("initial_state", c.randn(c.N, C, length).to(c.dtype()))
    elif c.chance(0.5):
        c.args["state_len"] = length
    c.put_tokens("x", c.randn(c.B, c.T, C))
    c.args["activation"] = c.pick("silu", "none")
    y, final = c.oracle()
    c.expect(0, y)
    c.expect(1, final, exact=True)


def gating(c: Call) -> None:
    shape = c.pick([3], [2, 5], [2, 3, 7], [0, 3], [2, 0, 4], [1, 1, 1], [4, 9, 33])
    for name in ("a", "b"):
        x = c.randn(*shape) * c.pick(1, 10, 200)
        if c.chance(0.3):
            c.some_of(x, 6, math.inf, -math.inf)
        c.put(name, x.to(c.dtype()), expand=ALL)
    c.HV = shape[-1]
    c.layer_gates()
    for i, want in enumerate(c.oracle()):
        c.expect(i, want)


def layer_sizes(c: Call, tokens: int) -> int:
    """Sizes of a layer that the oracle takes quickly; its channels."""
    c.sizes(tokens, 1e6)
    c.K, c.V = max(c.K, 8), max(c.V, 8)  # a norm of less cancels often
    while 2 * c.H * c.K + c.HV * c.V > 3000:
        c.HV, c.H = c.HV // c.H, 1
        c.V = c.V // 2 if c.HV * c.V > 2000 else c.V
    return 2 * c.H * c.K + c.HV * c.V


def conv_gating(c: Call) -> None:
    C = layer_sizes(c, c.pick(0, 1, 1, 2, 3, 4, 5, 17))
    c.sequences()
    weights(c, C, "conv_")
    conv_rows(c, C)
    c.raw_gates()
    c.put_tokens("mixed_qkv", c.randn(c.B, c.T, C))
    l2norm = c.chance(0.5)
    c.args |= dict(num_k_heads=c.H, head_k_dim=c.K, qk_l2norm=l2norm)
    c.args["activation"] = c.pick("silu", "none")
    *out, pool = c.oracle()
    for i, want in enumerate(out):
        c.expect(i, want, factor=8 if l2norm else 2)  # the norm scales errors of small heads up
    expect_histories(c, pool)


def gated_rms_norm(c: Call) -> None:
    V = c.pick(1, 2, 7, 8, 16, 17, 33, 64, 100, 128, 256, 257, 512)
    shape = c.pick([V], [3, V], [2, 3, V], [0, V], [2, 0, V], [2, 3, 4, V])
    for name, sizes in (("x", (1, 1e-3, 100)), ("gate", (1, 30))):
        rows = c.randn(math.prod(shape[:-1]), V) * c.pick(*sizes)
        c.put(name, rows.to(c.dtype()), (1,))  # rows one stride apart
        c.args[name] = c.args[name].view(shape)
    c.put("weight", c.randn(V).to(c.dtype()))
    c.args["eps"] = c.pick(1e-6, 1e-5, 0.1)
    c.expect(0, c.oracle(), factor=1.5)


def linear(c: Call) -> None:
    K, N = c.pick(1, 2, 7, 16, 31, 32, 33, 64, 100, 129, 257), c.pick(1, 3, 8, 16, 17, 33, 100)
    shape = c.pick([K], [1, K], [4, K], [2, 3, K], [0, K], [40, K])
    c.put("x", c.randn(*shape).to(c.act), expand=ALL)
    c.put("weight", (c.randn(N, K) / K**0.5).to(c.act), expand=ALL)
    c.expect(0, c.oracle(), factor=2)


def decode(c: Call) -> None:
    window, base = c.op != "decode", c.op != "decode_lowrank"
    c.R, tokens = c.pick(*RINGS), c.pick(0, 1, 1, 1, 1, 2, 3, 4, 5, 16)
    C = layer_sizes(c, min(tokens, c.R) if c.op == "decode_buffered" else tokens)
    c.sequences()
    weights(c, C, "conv_")
    via, accepted, table = (), None, None
    if window:
        via = c.window_rows()
        if "num_accepted" in c.args:
            accepted = c.args["num_accepted"][: c.N].tolist()
    elif c.chance(0.3):
        table = c.draw_rows(c.columns, padding=0.1, first=True)
        if c.chance(0.6):  # of columns that are no padding
            held = [[a for a, row in enumerate(own, 1) if row >= 0] for own in table]
            accepted = c.draw_accepted(lambda n: c.pick(0, 1 if 1 in held[n] else 0, *held[n]))
        c.own_rows(table, accepted)
    else:
        c.own_rows(c.draw_rows())
    length = c.W - 1 + c.pick(0, 0, 2)
    if accepted is not None:
        length = c.W - 2 + max([c.columns, *accepted]) + c.pick(0, 1)
    histories(c, C, length, accepted)
    c.put_tokens("projected", c.randn(c.B, c.T, C + c.HV * c.V + 2 * c.HV), expand=0)
    c.layer_gates()
    c.put("norm_weight", (1 + 0.1 * c.randn(c.V)).to(c.dtype()))
    read, written = c.read_rows(), c.written_rows()
    if table is not None:
        each = zip(table, accepted or [1] * c.N, c.live, c.fresh, strict=True)
        read = {own[a - 1] for own, a, live, fresh in each if live and not fresh}
        written = written_columns(c, table)
    if base:
        state = c.state(read)
        via += (state,) if window else ()
    l2norm = c.chance(0.8)
    if not l2norm:  # keys must not grow longer than 1
        for name in ("conv_weight", "conv_bias"):
            if c.args[name] is not None:
                c.args[name][: 2 * c.H * c.K].mul_(c.K**-0.5)
    c.args |= dict(num_k_heads=c.H, head_k_dim=c.K, qk_l2norm=l2norm, eps=c.pick(1e-6, 1e-5))
    c.args["activation"] = c.pick("silu", "silu", "none") if l2norm else "silu"
    norm = mock.patch.object(reference, "gated_rms_norm", wraps=reference.gated_rms_norm)
    with norm as normed:
        y, pool, *states = c.oracle()
    for (b, start, end), live in zip(c.slices, c.live, strict=True):
        if not live:
            y[b, start:end] = 0
    # The norm scales errors of outputs that cancelled up.
    o = normed.call_args.args[0].nan_to_num().square().mean(-1, keepdim=True).sqrt()
    slack = (o.square().mean().sqrt() / o.clamp(min=1e-30)).clamp(min=1)
    slack = slack.expand(*o.shape[:-1], c.V).flatten(-2)
    # More than that where k . q cancels, so that eps keeps the norm from hiding it.
    front = reference._decode_front

    def rounded(*args):
        (q, k, v, *gates), *rest = front(*args)
        return ([x.to(c.act) for x in (q, k, v)] + gates, *rest)

    with mock.patch.object(reference, "_decode_front", rounded):
        handed = (c.oracle()[0] - y).abs().nan_to_num().unflatten(-1, o.shape[-2:-1] + (c.V,))
    handed = handed.amax(-1, keepdim=True).expand_as(handed).flatten(-2)
    c.expect(0, y, via=(c.act, *via) if window else (), factor=12, slack=slack, handed=handed)
    expect_histories(c, pool)
    if window:
        c.expect_window(states[-1], via, factor=12)
        if base:
            c.expect_bases(states[0], factor=4)
    else:
        c.expect_rows("state", states[0], written, factor=6)


OPS: dict[str, Callable[[Call], None]] = {
    "recurrent": recurrent, "recurrent_gated": recurrent, "recurrent_buffered": recurrent_window,
    "recurrent_lowrank": recurrent_window, "window_flush": window_pool,
    "window_reset": window_pool, "chunk": chunk, "chunk_prefill": chunk_prefill,
    "chunk_lowrank": chunk_lowrank, "conv1d": conv1d, "short_conv": short_conv, "gating": gating,
    "conv_gating": conv_gating, "gated_rms_norm": gated_rms_norm, "linear": linear,
    "decode": decode, "decode_buffered": decode, "decode_lowrank": decode,
}  # fmt: skip
