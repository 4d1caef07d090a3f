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

INTEGERS = (torch.int32, torch.int64)
ALL = 9
WINDOW = ("win_k", "win_u", "win_g", "win_fill")


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
    column: int | None = None  # in chunks: the dimension that runs down a column of V
    exact: bool = False
    part: Callable[[Tensor], Tensor] = lambda x: x

    def error(self, got: Tensor, call: Call, device: str) -> float:
        """Largest error over its limit; infinite where there is a NaN too many or too few."""
        got, want = self.part(got), self.part(self.want)
        assert got.shape == want.shape, f"shape {tuple(got.shape)}, {tuple(want.shape)}"
        if not want.numel():
            return 0.0
        # Below this float32 has no digits.
        got, want = (torch.where(x.abs() < 1e-37, 0, x) for x in (got, want))
        if self.exact:
            same = got.double() == want.to(got.dtype).double()
            return 0.0 if bool((same | got.isnan() & want.isnan()).all()) else math.inf
        factor, via = self.factor, self.via
        column = 0.0
        if device != "cpu" and self.column is not None and call.act != torch.float32:
            # Factors of 16 bits, which have one scale a column.
            via = (*via, call.act)
            largest = want.abs().amax(self.column, keepdim=True)
            column = 2 * torch.finfo(call.act).eps * largest
        if device != "cpu" and call.op.startswith("decode"):
            # Launches hand each other 16-bit activations.
            via, factor = (*via, call.act), max(factor, ROUNDED_FACTOR**2)
        rtol, atol = TOLERANCE[got.dtype]
        for dtype in sorted(via, key=lambda d: TOLERANCE[d])[-1:]:
            if dtype != torch.float32:
                rtol, atol = rtol + TOLERANCE[dtype][0], atol + TOLERANCE[dtype][1]
        size = max(float(want.square().mean().sqrt()), self.least)
        # The last: below it float16 has no digits, and float32 no numbers.
        least = 2.0**-24 if torch.float16 in (got.dtype, *via) else 1e-37
        slack = self.part(self.slack) if isinstance(self.slack, Tensor) else self.slack
        limit = factor * (rtol * want.abs() + atol * size * slack) + least + column
        error = (got.double() - want).abs() / limit
        worst = float(torch.where(got.double() == want, 0.0, error).max())
        return worst if worst == worst else math.inf


class Call:
    """One call: arguments, which rows of which pools it may write, and what is expected."""

    def __init__(self, op: str, seed: int) -> None:
        self.op = op
        self.rng = random.Random(f"{op} {seed}")
        self.generator = torch.Generator().manual_seed(self.rng.getrandbits(31))
        self.act = self.pick(ACTIVATIONS)
        self.dense = self.chance(0.4)  # no gaps, and usual dtypes: what fast kernels ask for
        self.args: dict = {}
        self.written: dict[str, Iterable[int]] = {}
        self.expected: list[Expected] = []
        with torch.no_grad():
            OPS[op](self)

    # --- drawing

    def chance(self, p: float) -> bool:
        return self.rng.random() < p

    def pick(self, options):
        return self.rng.choice(options)

    def dtype(self) -> torch.dtype:
        return self.act if self.dense and self.chance(0.5) else self.pick(ACTIVATIONS)

    def randn(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator)

    def rand(self, *shape: int) -> Tensor:
        return torch.rand(*shape, generator=self.generator)

    def integers(self, values: list, *shape: int) -> Tensor:
        return torch.tensor(values, dtype=self.pick(INTEGERS)).reshape(shape or (len(values),))

    def put(self, name: str, x: Tensor | None, inner=None, expand: int = 0) -> None:
        """An argument as a view of storage of its own. ``inner``: dimensions of which one has to
        lie innermost and dense; ``expand``: so many of the first may have stride 0."""
        if x is None:
            self.args[name] = None
            return
        messy = not self.dense and self.chance(0.7)
        order = list(range(x.dim()))
        may = messy and not (x.is_floating_point() and x.isnan().any())
        flat = [may and d < expand and n > 1 and self.chance(0.08) for d, n in enumerate(x.shape)]
        if messy and self.chance(0.5):
            self.rng.shuffle(order)
        if inner and x.dim() and order[-1] not in inner:
            last = self.pick(inner)
            order = [d for d in order if d != last] + [last]
        strides, step = [0] * x.dim(), 1
        for i, d in enumerate(reversed(order)):
            if flat[d]:
                continue
            if messy and (i > 0 or inner is None) and self.chance(0.3):
                step = step * self.pick([1, 2, 3]) + self.pick([0, 0, 1, 5])
            strides[d] = step
            step *= max(x.size(d), 1)
        start = self.pick([0, 0, 1, 3, 8, 17]) if messy else 0
        used = 1 + sum((max(n, 1) - 1) * s for n, s in zip(x.shape, strides, strict=True))
        nonsense = {torch.bool: True, torch.int32: 7777, torch.int64: 7777}.get(x.dtype, math.nan)
        storage = torch.full((start + used + self.pick([0, 0, 1, 16]),), nonsense, dtype=x.dtype)
        view = storage.as_strided(x.shape, strides, start)
        first = tuple(slice(0, 1) if f else slice(None) for f in flat)
        view[first].copy_(x[first])
        self.args[name] = view

    def sizes(self, tokens: int, most: float = 4e6) -> None:
        self.H, ratio = self.pick([1, 1, 2, 3]), self.pick([1, 1, 2, 3, 3, 4, 5])
        if self.chance(0.55):
            self.K = self.pick([64, 128, 128, 128, 256])
            self.V = self.pick([64, 128, 128, 32 * self.rng.randint(1, 8)])
        else:
            self.K, self.V = self.odd(), self.odd()
        self.B, self.T = self.pick([0, 1, 1, 2, 3, 5, 8]), tokens
        if self.chance(0.04):
            self.B = self.rng.randint(9, 160)
        while self.B * self.T * self.H * ratio * self.K * self.V > most and (self.B, ratio) > (
            1,
            1,
        ):
            self.B, ratio = max(1, self.B // 2), max(1, ratio // 2)
        self.HV = self.H * ratio

    def odd(self) -> int:
        edges = [1, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 65, 96, 100, 127, 129]
        return self.pick([self.rng.randint(1, 20), self.pick(edges), self.rng.randint(1, 257)])

    def sequences(self) -> None:
        """``B`` sequences of up to ``T`` tokens, a batch or packed; some begin anew."""
        N, T = self.B, self.T
        self.slices = [(b, 0, T) for b in range(N)]
        self.N, cu = N, None
        if N and self.chance(0.45):
            lengths = [self.pick([T, T, 0, self.rng.randint(0, T), min(T, 1)]) for _ in range(N)]
            cu = [0, *accumulate(lengths)]
            self.slices = [(0, a, b) for a, b in zip(cu, cu[1:], strict=False)]
            self.B, self.T = 1, cu[-1]
        self.lengths = [end - start for _, start, end in self.slices]
        self.longest = max(self.lengths, default=0)
        self.packed = cu is not None
        if self.packed:
            self.put("cu_seqlens", self.integers(cu))

    def fresh_rows(self) -> None:
        self.fresh = [False] * self.N
        if self.chance(0.5):
            self.fresh = [self.chance(0.3) for _ in range(self.N)]
            self.put("has_initial_state", ~torch.tensor(self.fresh, dtype=torch.bool))

    def rows_of(self, columns: int = 0, padding: float = 0.2) -> list:
        """Pool rows of the sequences, ``[N]`` or ``[N, columns]``, padding among them; ``P``."""
        if not columns and self.chance(0.15):
            self.P = self.N + self.rng.randint(0, 2)
            return list(range(self.N))
        count = self.N * max(columns, 1)
        self.P = count + self.rng.randint(1, 4)
        rows = self.rng.sample(range(self.P), count)
        rows = [-self.pick([1, 2, 9]) if self.chance(padding) else row for row in rows]
        shape = (self.N, columns) if columns else (self.N,)
        self.put("state_indices", self.integers(rows, *shape))
        return [rows[n * columns : (n + 1) * columns] for n in range(self.N)] if columns else rows

    def accepted_of(self, draw: Callable[[int], int]) -> list[int]:
        """``num_accepted`` of each sequence, of which there may be more than sequences."""
        accepted = [draw(n) for n in range(self.N)]
        self.put("num_accepted", self.integers(accepted + [9] * self.pick([0, 1])))
        return accepted

    def padded(self, *tensors: Tensor) -> None:
        """NaN in the tokens of padding."""
        for (b, start, end), live in zip(self.slices, self.live, strict=True):
            if not live:
                for x in tensors:
                    x[b, start:end] = math.nan

    def pool(self, name: str, x: Tensor, read: set[int], inner=None, dtype=None) -> torch.dtype:
        """A pool whose other rows hold what must not be read."""
        for row in set(range(len(x))) - read:
            x[row] = self.pick([math.nan, math.nan, 1.0, math.inf])
        self.put(name, x.to(dtype or self.dtype()), inner)
        return self.args[name].dtype

    def state(self, read: set[int]) -> torch.dtype:
        return self.pool("state", 0.5 * self.randn(self.P, self.HV, self.V, self.K), read, (2, 3))

    def read_rows(self) -> set[int]:
        """Rows that live sequences continue, where each has one."""
        rows = zip(self.rows, self.live, self.fresh, strict=True)
        return {row for row, live, fresh in rows if live and not fresh}

    def written_rows(self) -> set[int]:
        rows = zip(self.rows, self.live, self.lengths, strict=True)
        return {row for row, live, length in rows if live and length}

    def gates(self) -> tuple[Tensor, Tensor]:
        shape = self.B, self.T, self.HV
        g = -self.rand(*shape) * self.pick([1, 1, 3, 0, 1e-3])
        if self.chance(0.2):
            kind = torch.randint(0, 6, shape, generator=self.generator)
            for i, value in enumerate([0.0, -math.inf, -316.0, math.log(1e-12), -1e-5]):
                g[kind == i] = value
        beta = self.rand(*shape)
        if self.chance(0.4):
            values = torch.tensor(self.pick([[0.0], [1.0], [2.0], [0.0, 1.0, 2.0]]))
            beta = values[torch.randint(0, len(values), shape, generator=self.generator)]
        kinds = (torch.float32, torch.float32, self.act, self.pick(ACTIVATIONS))
        return g.to(self.pick(kinds)), beta.to(self.pick(kinds))

    def tokens(self, raw_gates: bool = False) -> None:
        """q, k, v and what decays them."""
        l2norm = self.chance(0.5)
        q, k = (self.randn(self.B, self.T, self.H, self.K) for _ in range(2))
        if not l2norm:
            # A rounding may lengthen a key, and with beta = 2 such a recurrence grows.
            q, k = unit(q), unit(k) * (1.0 if self.act == torch.float32 else 0.98)
        v = self.randn(self.B, self.T, self.HV, self.V)
        q, k, v = (x.to(self.act) for x in (q, k, v))
        if raw_gates:
            self.padded(q, k, v)
            self.raw_gates()
        else:
            g, beta = self.gates()
            self.padded(q, k, v, g, beta)
            self.put("g", g, expand=ALL)
            self.put("beta", beta, expand=ALL)
        self.put("q", q, expand=ALL)
        # Keys that are all alike with beta above 1 cancel: float32 itself is far off then.
        mild = not raw_gates and bool((beta <= 1).all())
        self.put("k", k, expand=3 if mild else 0)
        self.put("v", v, expand=ALL)
        self.args["qk_l2norm"] = l2norm
        self.scale()

    def scale(self) -> None:
        scale = self.pick([None, None, 1.0, 0.3, -2.0, 0.0])
        if scale is not None:
            self.args["scale"] = scale

    def raw_gates(self) -> None:
        for name in ("a", "b"):
            x = (self.randn(self.B, self.T, self.HV) * self.pick([1, 5, 50])).to(self.dtype())
            self.padded(x)
            self.put(name, x, expand=ALL)
        self.layer_gates()

    def layer_gates(self) -> None:
        self.put("A_log", (self.rand(self.HV) * self.pick([1, 3])).to(self.dtype()))
        self.put("dt_bias", self.randn(self.HV).to(self.dtype()))

    def window(self, base: bool, read: set[int]) -> tuple[torch.dtype, torch.dtype]:
        """Windows with any fill, and any head where there is no base."""
        P, R, H, HV = self.P, self.R, self.H, self.HV
        k, u, g = (
            unit(self.randn(P, H, R, self.K)),
            self.randn(P, HV, R, self.V),
            -self.rand(P, HV, R),
        )
        kind = torch.randint(0, 12, g.shape, generator=self.generator)
        for i, value in enumerate([-math.inf, 0.0, -316.0]):
            g[kind == i] = value
        fill = torch.zeros(P, dtype=torch.int32)
        stale = self.pick([0, 0, -1, 2**31 - 1, 12345678])
        for row in range(P):
            count = self.pick([0, R, self.rng.randint(0, R)])
            head = 0 if base else self.pick([0, self.rng.randrange(R)])
            drafts = self.rng.randint(0, max(count - 1, 0))
            used = {(head + i) % R for i in range(count)} if row in read else ()
            fill[row] = count | drafts << 8 | head << 16 if row in read or not stale else stale
            for slot in set(range(R)).difference(used):
                k[row, :, slot] = u[row, :, slot] = g[row, :, slot] = math.nan
        dtypes = self.dtype(), self.dtype()
        self.put("win_k", (0.98 * k).to(dtypes[0]), (3,))
        self.put("win_u", u.to(dtypes[1]), (3,))
        self.put("win_g", g)
        self.put("win_fill", fill)
        return dtypes

    # --- what is expected

    def oracle(self):
        return getattr(reference, self.op)(**self.args)

    def expect(self, what: int | str, want: Tensor, **how) -> None:
        self.expected.append(Expected(what, want, **how))

    def expect_rows(self, name: str, want: Tensor, rows: Iterable[int], **how) -> None:
        self.written[name] = rows = sorted(rows)
        for row in rows:
            self.expect(name, want, part=lambda x, row=row: x[row], **how)

    def expect_window(self, want: tuple[Tensor, ...], rows: set[int], via, exact_g=True, **how):
        for name in WINDOW:
            self.written[name] = rows
        for row in rows:
            fill = int(want[3][row])
            slots = [((fill >> 16) + i) % self.R for i in range(fill & 255)]
            self.expect("win_fill", want[3], exact=True, part=lambda x, row=row: x[row])

            def live(x, row=row, slots=slots):
                return x[row][:, slots]

            fused = self.op.startswith("decode")
            self.expect("win_k", want[0], part=live, least=0.05 if fused else 1e-3, **how)
            self.expect("win_u", want[1], part=live, via=via, least=0.1, **how)
            self.expect("win_g", want[2], part=live, exact=exact_g)

    # --- running

    def run(self, device: torch.device | None, threads: int):
        """Outputs and arguments after a call on copies of the latter."""
        args = {name: copied(x) for name, x in self.args.items()}
        op = getattr(torch.ops.gdn, self.op)

        def call():
            with torch.no_grad(), OnDevice(device) if device else nullcontext():
                return op(**args)

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
            if not isinstance(x, Tensor):
                continue
            differ = (whole(x) != whole(after[name])).view(-1, x.element_size()).any(1)
            allowed = torch.zeros(len(differ), dtype=torch.bool)
            rows = allowed.as_strided(x.size(), x.stride(), x.storage_offset())
            for row in written.get(name, ()):
                rows[row] = True
            wrong = int((differ & ~allowed).sum())
            assert not wrong, f"{name}: {wrong} elements were written that may not be"

    def check(self, device: torch.device | None = None) -> float:
        """Raises where something is wrong; the largest error over its limit."""
        counts = [self.pick([1, 1, 2]), self.pick([1, 2, 3, 5])]
        if device is not None or self.op == "linear":  # torch's product cuts by threads
            counts[1] = counts[0]
        (out, after), (again, after_again) = (self.run(device, n) for n in counts)
        self.check_bytes(after, self.written)
        worst = 0.0
        for e in self.expected:
            got = out[e.what] if isinstance(e.what, int) else after[e.what]
            error = e.error(got, self, device.type if device else "cpu")
            assert error <= 1, f"{e.what} ({got.dtype}): {error:.3g} of its limit"
            worst = max(worst, error)
        for name, x, y in [*zip(range(9), out, again, strict=False)] + [
            (name, after[name], after_again[name]) for name in self.written
        ]:
            assert torch.equal(bits(x), bits(y)), (
                f"{name}: other bits in a second run, threads {counts}"
            )
        return worst


# --- the ops


def recurrent(c: Call) -> None:
    c.sizes(c.pick([1, 1, 1, 1, 2, 3, 4, 5, 8, 0, c.rng.randint(9, 33)]))
    c.sequences()
    c.fresh_rows()
    if c.chance(0.35):  # drafts: a row for the state after each token
        columns = max(1, c.longest, 0 if c.packed else c.T) + c.pick([0, 0, 1])
        table, accepted = c.rows_of(columns), [1] * c.N
        if c.chance(0.7):
            accepted = c.accepted_of(lambda n: c.pick([1, 1, 0, -3, c.rng.randint(1, columns)]))
        c.rows = [row[a - 1] if a > 0 else -1 for row, a in zip(table, accepted, strict=True)]
        c.live = [row >= 0 for row in c.rows]
        written = {
            row for rows, live, n in zip(table, c.live, c.lengths, strict=True) if live
            for row in rows[:n] if row >= 0
        }  # fmt: skip
    else:
        c.rows = c.rows_of()
        c.live = [row >= 0 for row in c.rows]
        written = c.written_rows()
    c.tokens(raw_gates=c.op == "recurrent_gated")
    c.state(c.read_rows())
    o, state = c.oracle()
    c.expect(0, o, factor=1.5)
    c.expect_rows("state", state, written, factor=1.5)


def draw_window(c: Call, base: bool) -> tuple[torch.dtype, ...]:
    """Rows, windows and accepted drafts; dtypes that were rounded to before this call's outputs."""
    c.rows = c.rows_of(0 if c.op == "chunk_lowrank" else c.pick([0] * 6 + [3]))
    c.rows = [row[0] if isinstance(row, list) else row for row in c.rows]
    c.live = [row >= 0 for row in c.rows]
    read = c.read_rows()
    dtypes = c.window(base, read)
    fill = c.args["win_fill"]
    accepted = [1] * c.N
    if c.chance(0.5) and c.op != "chunk_lowrank":
        drafts = [int(fill[row]) >> 8 & 255 if row in read else 5 for row in c.rows]
        accepted = c.accepted_of(
            lambda n: c.pick([1, drafts[n] + 1, c.rng.randint(1, drafts[n] + 1), 0, -1])
        )
    c.live = [row >= 0 and a > 0 for row, a in zip(c.rows, accepted, strict=True)]
    return dtypes


RINGS = [1, 2, 3, 4, 5, 8, 16, 17, 31, 32, 33, 63, 64]


def recurrent_window(c: Call) -> None:
    base = c.op == "recurrent_buffered"
    c.R = c.pick(RINGS)
    tokens = c.pick([1, 1, 1, 1, 2, 3, 4, 4, 5, 8, 0, c.rng.randint(9, 33)])
    c.sizes(min(tokens, c.R) if base else tokens)
    c.sequences()
    c.fresh_rows()
    via = draw_window(c, base)
    c.tokens()
    if base:
        via += (c.state(c.read_rows()),)
    out = c.oracle()
    c.expect(0, out[0], via=via, factor=4)
    if base:
        expect_bases(c, out[1])
    c.expect_window(out[-1], c.written_rows(), (c.act, *via), factor=4)


def expect_bases(c: Call, want: Tensor, factor: float = 2.0) -> None:
    """What lies behind an entry of g = -inf, where a sequence began, nobody reads."""
    c.written["state"] = c.written_rows()
    for row, live, fresh, n in zip(c.rows, c.live, c.fresh, c.lengths, strict=True):
        if live and n and not fresh:
            c.expect("state", want, factor=factor, part=lambda x, row=row: x[row])


def window_flush(c: Call) -> None:
    c.R = c.pick(RINGS)
    c.sizes(1)
    c.N = c.B
    c.rows = c.rows_of()
    rows = {row for row in c.rows if row >= 0} if "state_indices" in c.args else set(range(c.P))
    c.window(True, rows)
    if c.op == "window_reset":
        c.args = {n: x for n, x in c.args.items() if n in ("win_fill", "state_indices")}
        fill = c.oracle()
    else:
        c.state(rows)
        state, fill = c.oracle()
        c.expect_rows("state", state, rows, factor=2)
    c.expect("win_fill", fill, exact=True)
    c.written["win_fill"] = rows


LENGTHS = [0, 1, 2, 5, 15, 16, 17, 31, 33, 48, 63, 64, 65, 80, 127, 128, 129, 150, 200]


def draw_chunks(c: Call) -> None:
    c.sizes(c.pick(LENGTHS))
    c.B = min(c.B, 3)
    if c.H == 1 and c.chance(0.05):  # so long that a device cuts it into segments
        c.B, c.T, c.HV = 1, c.rng.randint(1000, 3000), c.H * c.pick([1, 2])
    c.sequences()
    c.args["chunk_size"] = c.pick([64, 64, 64, 16, 17, 31, 32, 33, 63, 65, 100, 127, 128])


def chunk(c: Call) -> None:
    draw_chunks(c)
    c.live = [True] * c.N
    c.tokens()
    if c.chance(0.6):
        c.put("initial_state", 0.5 * c.randn(c.N, c.HV, c.V, c.K), (2, 3))
    o, final = c.oracle()
    c.expect(0, o, factor=2, column=1)
    c.expect(1, final, factor=2, column=-1)


def chunk_prefill(c: Call) -> None:
    """Sequences may share a row that they read, and write others, edges of chunks among them."""
    draw_chunks(c)
    c.fresh_rows()
    edges = c.pick([0, 1, 3]) if c.chance(0.4) else None
    in_place = c.chance(0.3)
    c.P = c.N * (2 + (edges or 0)) + 3
    free = c.rng.sample(range(c.P), c.P)
    shared = free.pop() if not in_place and c.chance(0.4) else None
    read, write = [], []
    for _ in range(c.N):
        own, other = free.pop(), free.pop()
        read.append(own if shared is None or c.chance(0.4) else shared)
        write.append(own if read[-1] == own and c.chance(0.5) else other)
        if c.chance(0.2):
            read[-1] = -1
        if c.chance(0.2):
            write[-1] = -3
    if in_place:
        write = read = list(range(c.N)) if c.chance(0.3) else read
        if read == list(range(c.N)):
            edges = None
    if read != list(range(c.N)) or not in_place:
        c.put("read_indices", c.integers(read))
    if not in_place:
        c.put("write_indices", c.integers(write))
    c.live = [row >= 0 for row in read]
    c.rows = read
    written = {row for row, live in zip(write, c.live, strict=True) if live and row >= 0}
    if edges is not None:
        table = [[-1 if c.chance(0.3) else free.pop() for _ in range(edges)] for _ in range(c.N)]
        c.put("edge_rows", c.integers([row for rows in table for row in rows], c.N, edges))
        size = c.args["chunk_size"]
        for rows, live, n in zip(table, c.live, c.lengths, strict=True):
            written |= {row for row in rows[: n // size] if live and row >= 0}
    c.tokens()
    c.state(c.read_rows())
    o, state = c.oracle()
    c.expect(0, o, factor=2, column=1)
    c.expect_rows("state", state, written, factor=2, column=-1)


def chunk_lowrank(c: Call) -> None:
    c.R = c.pick(RINGS)
    draw_chunks(c)
    c.fresh_rows()
    via = draw_window(c, False)
    c.tokens()
    o, *window = c.oracle()
    c.expect(0, o, via=via, factor=3, column=1)
    c.expect_window(window, c.written_rows(), (c.act, *via), factor=4)


def weights(c: Call, C: int, prefix: str = "") -> None:
    c.W = c.pick([1, 2, 3, 4, 4, 4, 4, 5, 8])
    c.put(f"{prefix}weight", (c.randn(C, c.W) / c.W**0.5).to(c.dtype()))
    c.put(f"{prefix}bias", c.randn(C).to(c.dtype()) if c.chance(0.5) else None)


def histories(c: Call, C: int, accepted: list[int] | None, length: int, read: set[int]) -> None:
    c.args["conv_leading"] = accepted is not None or c.chance(0.5)
    c.pool("conv_state", c.randn(c.P, C, length), read)


def expect_histories(c: Call, want: Tensor) -> None:
    c.expect_rows("conv_state", want, c.written_rows() if c.W > 1 else (), exact=True)


def draw_conv(c: Call, C: int) -> None:
    c.rows = [
        r[0] if isinstance(r, list) else r
        for r in c.rows_of(c.pick([0, 0, 0, max(1, c.longest, c.T)]))
    ]
    accepted, length = None, c.W - 1 + c.pick([0, 0, 1, 3])
    if c.N and c.chance(0.35):
        length += max(c.longest, 1) - 1
        most = length - (c.W - 1) + 1
        if "state_indices" in c.args and c.args["state_indices"].dim() == 2:
            most = min(most, c.args["state_indices"].size(1))
        accepted = c.accepted_of(lambda n: c.pick([0, -2, 1, 1, c.rng.randint(1, most)]))
    c.live = [row >= 0 and a > 0 for row, a in zip(c.rows, accepted or [1] * c.N, strict=True)]
    histories(c, C, accepted, length, c.read_rows())


CHANNELS = [1, 2, 7, 8, 15, 16, 17, 33, 64, 100, 128, 257, 640]


def short_conv(c: Call) -> None:
    C, c.B = c.pick(CHANNELS), c.pick([0, 1, 2, 3, 5])
    c.T = c.pick([0, 1, 1, 1, 2, 3, 4, 5, 9, 33, 70])
    c.sequences()
    c.fresh_rows()
    weights(c, C)
    draw_conv(c, C)
    x = c.randn(c.B, c.T, C).to(c.act)
    c.padded(x)
    c.put("x", x, expand=ALL)
    c.args["activation"] = c.pick(["silu", "none"])
    y, pool = c.oracle()
    c.expect(0, y)
    expect_histories(c, pool)


def conv1d(c: Call) -> None:
    C, c.B = c.pick(CHANNELS), c.pick([0, 1, 2, 3, 5])
    c.T = c.pick([0, 1, 2, 3, 4, 5, 9, 33, 70])
    c.sequences()
    weights(c, C)
    length = c.W - 1 + (c.pick([0, 0, 1, 3]) if c.W > 1 else 0)
    if c.chance(0.6):
        c.put("initial_state", c.randn(c.N, C, length).to(c.dtype()))
    elif c.chance(0.5):
        c.args["state_len"] = length
    c.put("x", c.randn(c.B, c.T, C).to(c.act), expand=ALL)
    c.args["activation"] = c.pick(["silu", "none"])
    y, final = c.oracle()
    c.expect(0, y)
    c.expect(1, final, exact=True)


def gating(c: Call) -> None:
    shape = c.pick([[3], [2, 5], [2, 3, 7], [0, 3], [2, 0, 4], [1, 1, 1], [4, 9, 33]])
    for name in ("a", "b"):
        x = c.randn(*shape) * c.pick([1, 10, 200])
        if c.chance(0.3):
            kind = torch.randint(0, 6, shape, generator=c.generator)
            x[kind == 0] = math.inf
            x[kind == 1] = -math.inf
        c.put(name, x.to(c.dtype()), expand=ALL)
    c.HV = shape[-1]
    c.layer_gates()
    g, beta = c.oracle()
    c.expect(0, g)
    c.expect(1, beta)


def fused_sizes(c: Call, tokens: int) -> int:
    """Sizes of a layer that the oracle takes quickly; its channels."""
    c.sizes(tokens, 1e6)
    c.K, c.V = max(c.K, 8), max(c.V, 8)
    while 2 * c.H * c.K + c.HV * c.V > 3000:
        c.HV, c.H = c.HV // c.H, 1
        c.V = c.V // 2 if c.HV * c.V > 2000 else c.V
    return 2 * c.H * c.K + c.HV * c.V


def conv_gating(c: Call) -> None:
    C = fused_sizes(c, c.pick([0, 1, 1, 2, 3, 4, 5, 17]))
    c.sequences()
    c.fresh_rows()
    weights(c, C, "conv_")
    draw_conv(c, C)
    c.raw_gates()
    x = c.randn(c.B, c.T, C).to(c.act)
    c.padded(x)
    c.put("mixed_qkv", x, expand=ALL)
    l2norm = c.chance(0.5)
    c.args |= dict(num_k_heads=c.H, head_k_dim=c.K, qk_l2norm=l2norm)
    c.args["activation"] = c.pick(["silu", "none"])
    *out, pool = c.oracle()
    for i, want in enumerate(out):
        c.expect(i, want, factor=8 if l2norm else 2)  # a norm scales errors of small heads up
    expect_histories(c, pool)


def gated_rms_norm(c: Call) -> None:
    V = c.pick([1, 2, 7, 8, 16, 17, 33, 64, 100, 128, 256, 257, 512])
    shape = c.pick([[V], [3, V], [2, 3, V], [0, V], [2, 0, V], [2, 3, 4, V]])
    dtypes = c.dtype(), c.dtype()
    for name, size, dtype in zip(("x", "gate"), ([1, 1e-3, 100], [1, 30]), dtypes, strict=True):
        rows = c.randn(math.prod(shape[:-1]), V) * c.pick(size)
        c.put(name, rows.to(dtype), (1,))
        c.args[name] = c.args[name].view(shape)
    c.put("weight", c.randn(V).to(c.dtype()))
    c.args["eps"] = c.pick([1e-6, 1e-5, 0.1])
    c.expect(0, c.oracle(), factor=1.5)


def linear(c: Call) -> None:
    K = c.pick([1, 2, 7, 16, 31, 32, 33, 64, 100, 129, 257])
    N = c.pick([1, 3, 8, 16, 17, 33, 100])
    shape = c.pick([[K], [1, K], [4, K], [2, 3, K], [0, K], [40, K]])
    c.put("x", c.randn(*shape).to(c.act), expand=ALL)
    c.put("weight", (c.randn(N, K) / K**0.5).to(c.act), expand=ALL)
    c.expect(0, c.oracle(), factor=2)


def decode(c: Call) -> None:
    window, base = c.op != "decode", c.op != "decode_lowrank"
    c.R = c.pick(RINGS)
    tokens = c.pick([0, 1, 1, 1, 1, 2, 3, 4, 5, 16])
    C = fused_sizes(c, min(tokens, c.R) if c.op == "decode_buffered" else tokens)
    c.sequences()
    c.fresh_rows()
    weights(c, C, "conv_")
    via, accepted, written = (), None, None
    if window:
        via = draw_window(c, base)
        if "num_accepted" in c.args:
            accepted = c.args["num_accepted"][: c.N].tolist()
        state_rows = c.read_rows()
    elif c.chance(0.3):
        columns = max(1, c.longest, 0 if c.packed else c.T)
        table = c.rows_of(columns, padding=0.1)
        if c.chance(0.6):
            accepted = c.accepted_of(
                lambda n: c.pick(
                    [a for a in (0, 1, *range(1, columns + 1)) if not a or table[n][a - 1] >= 0]
                )
            )
        taken = accepted or [1] * c.N
        c.rows = [row[0] for row in table]
        c.live = [row >= 0 and a > 0 for row, a in zip(c.rows, taken, strict=True)]
        each = list(zip(table, taken, c.live, c.fresh, c.lengths, strict=True))
        state_rows = {row[a - 1] for row, a, live, fresh, _ in each if live and not fresh}
        written = {r for row, _, live, _, n in each if live for r in row[:n] if r >= 0}
    else:
        c.rows = c.rows_of()
        c.live = [row >= 0 for row in c.rows]
        state_rows = c.read_rows()
    length = c.W - 1 + c.pick([0, 0, 2])
    if accepted is not None:
        most = max([1, c.longest if c.packed else c.T, *accepted])
        length = c.W - 2 + most + c.pick([0, 1])
    histories(c, C, accepted, length, c.read_rows())
    x = c.randn(c.B, c.T, C + c.HV * c.V + 2 * c.HV).to(c.act)
    c.padded(x)
    c.put("projected", x)
    c.layer_gates()
    c.put("norm_weight", (1 + 0.1 * c.randn(c.V)).to(c.dtype()))
    if base:
        via += (c.state(state_rows),) if window else ()
        if not window:
            c.state(state_rows)
    l2norm = c.chance(0.8)
    if not l2norm:  # keys must not grow longer than 1
        for name in ("conv_weight", "conv_bias"):
            if c.args[name] is not None:
                c.args[name].mul_(0.3 / c.K**0.5)
    c.args |= dict(num_k_heads=c.H, head_k_dim=c.K, qk_l2norm=l2norm, eps=c.pick([1e-6, 1e-5]))
    c.args["activation"] = c.pick(["silu", "silu", "none"]) if l2norm else "silu"
    norm = mock.patch.object(reference, "gated_rms_norm", wraps=reference.gated_rms_norm)
    with norm as of:
        y, pool, *rest = c.oracle()
    # The norm scales errors of outputs that cancelled up.
    o = of.call_args.args[0].nan_to_num().square().mean(-1, keepdim=True).sqrt()
    slack = (o.square().mean().sqrt() / o.clamp(min=1e-30)).clamp(min=1).expand(*o.shape[:-1], c.V)
    for (b, start, end), live in zip(c.slices, c.live, strict=True):
        if not live:
            y[b, start:end] = 0
    c.expect(0, y, via=(c.act, *via) if window else (), factor=12, slack=slack.flatten(-2))
    expect_histories(c, pool)
    if not window:
        c.expect_rows("state", rest[0], c.written_rows() if written is None else written, factor=6)
        return
    if base:
        expect_bases(c, rest[0], factor=4)
    c.expect_window(rest[-1], c.written_rows(), (c.act, *via), exact_g=False, factor=12)


OPS: dict[str, Callable[[Call], None]] = {
    "recurrent": recurrent, "recurrent_gated": recurrent, "recurrent_buffered": recurrent_window,
    "recurrent_lowrank": recurrent_window, "window_flush": window_flush,
    "window_reset": window_flush, "chunk": chunk, "chunk_prefill": chunk_prefill,
    "chunk_lowrank": chunk_lowrank, "conv1d": conv1d, "short_conv": short_conv, "gating": gating,
    "conv_gating": conv_gating, "gated_rms_norm": gated_rms_norm, "linear": linear,
    "decode": decode, "decode_buffered": decode, "decode_lowrank": decode,
}  # fmt: skip
