"""Sequences in pools, as an engine drives them, each call judged by the float64 oracles.

:class:`Lifecycle` owns a small layer, its pools and a float64 model of every live sequence. Each
method is one thing an engine does: start, extend, fork, decode, speculate, verify, flush, reorder,
free. All choices come from a ``random.Random``, so that hypothesis (tests/test_state_machine.py)
and a long run (scripts/soak.py) drive the same code.

Every call is checked for four things: outputs and states against :mod:`gdn_ops.reference`, zeros
for padding, pool rows that the call does not name bit for bit as before (free rows hold NaN), and,
for a sample of calls, that a sequence alone gives the same bits as in its batch.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from itertools import accumulate

import torch
from common import ACTIVATIONS, bits, make_layer
from torch import Tensor

import gdn_ops
from gdn_ops import reference, windows

W = 4  # width of the convolution
CHUNK = 16
# One rounding of a value near 1; for float32 a few of them, since sums have no wider type to be in.
UNIT = {torch.float32: 1e-6, torch.bfloat16: 2**-8, torch.float16: 2**-11}
LAYER = ("conv_weight", "conv_bias", "A_log", "dt_bias")


@dataclass(frozen=True)
class Config:
    mode: str = "full"  # full, buffered, lowrank
    speculative: bool = False
    act: torch.dtype = torch.float32
    state_dtype: torch.dtype = torch.float32
    transposed: bool = False
    H: int = 1
    ratio: int = 3
    K: int = 5
    V: int = 3
    R: int = 5
    rows: int = 14
    columns: int = 3  # most drafts a call

    @staticmethod
    def sample(rng: random.Random) -> Config:
        return Config(
            mode=rng.choice(["full", "buffered", "lowrank"]),
            speculative=rng.random() < 0.5,
            act=rng.choice(ACTIVATIONS),
            state_dtype=rng.choice(ACTIVATIONS),
            transposed=rng.random() < 0.5,
            H=rng.choice([1, 2]),
            ratio=rng.choice([1, 2, 3]),
            # The last are whole registers and tiles, where some kernels have forms of their own.
            K=rng.choice([1, 5, 8, 17, 64]),
            V=rng.choice([1, 3, 8, 20, 32]),
            R=rng.choice([3, 4, 5, 8]),
        )


@dataclass
class Sequence:
    """The float64 truth of one live sequence, after each token of its last call."""

    rows: list[int]  # one pool row a draft column, or one
    histories: list[Tensor] = field(default_factory=list)  # [W-1, C]
    states: list[Tensor] = field(default_factory=list)  # [HV, V, K], full and buffered
    window: windows.Window | None = None  # float64, lowrank
    accepted: int = 1  # of the last call's tokens
    slack: float = 0.0  # on top of the tolerance: keys that were short before they got length 1
    frozen: bool = False  # a cached prefix: never decoded, only read

    @property
    def history(self) -> Tensor:
        return self.histories[self.accepted - 1]

    @property
    def state(self) -> Tensor:
        return self.states[self.accepted - 1]


@dataclass
class Pools:
    conv: Tensor
    state: Tensor | None
    window: windows.Window | None

    def tensors(self) -> list[Tensor]:
        return [self.conv, *([] if self.state is None else [self.state]), *(self.window or ())]

    def clone(self) -> Pools:
        def same(x: Tensor) -> Tensor:
            return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype).copy_(x)

        state = None if self.state is None else same(self.state)
        window = None if self.window is None else windows.Window(*map(same, self.window))
        return Pools(same(self.conv), state, window)


class Lifecycle:
    def __init__(self, config: Config, rng: random.Random) -> None:
        self.config, self.rng = c, _ = config, rng
        self.HV = c.H * c.ratio
        self.C = 2 * c.H * c.K + self.HV * c.V
        self.per_token_rows = c.mode == "full" and c.speculative
        self.gen = torch.Generator().manual_seed(rng.getrandbits(31))
        layer = make_layer(1, 1, c.H, self.HV, c.K, c.V, W, c.act, seed=rng.getrandbits(31))
        self.layer = [layer[name] for name in LAYER]
        self.norm_weight = layer["norm_weight"]
        L = W - 1 + (c.columns - 1 if c.speculative else rng.choice([0, 2]))
        conv = torch.full((c.rows, self.C, L), torch.nan, dtype=c.act)
        shape = (c.rows, self.HV, c.K, c.V) if c.transposed else (c.rows, self.HV, c.V, c.K)
        state = torch.full(shape, torch.nan, dtype=c.state_dtype)
        window = None
        if c.mode != "full":
            window = windows.allocate(
                c.rows, c.H, self.HV, c.K, c.V, c.R,
                update_dtype=c.state_dtype, key_dtype=c.state_dtype,
            )  # fmt: skip
        state = None if c.mode == "lowrank" else state
        if state is not None and c.transposed:
            state = state.transpose(2, 3)
        self.pools = Pools(conv, state, window)
        self.free_rows = list(range(c.rows))
        self.live: list[Sequence] = []
        for row in self.free_rows:
            self._poison(row)
        # What a state may differ by: roundings of what the pools store and of q, k, v between the
        # composed ops, one a token, that fade with the decay.
        self.tolerance = 6 * max(UNIT[c.act], UNIT[c.state_dtype])
        self.worst = 0.0  # largest error in units of its limit, over the life
        self.calls = 0

    # --- what an engine does

    def start(self) -> None:
        """New sequences, by prefill or straight by decode, in rows that hold NaN."""
        count = min(self.rng.randint(1, 3), self._room())
        if count and self.rng.random() < 0.75:
            self._prefill([(None, self._claim(), self._length(1)) for _ in range(count)])
        elif count:
            self._decode([self._claim() for _ in range(count)], self._tokens())

    def extend(self) -> None:
        """Prefill that continues sequences, beside new ones."""
        plan = [(s, s, self._length(0)) for s in self._some(self._decodable())]
        if self._room() and self.rng.random() < 0.5:
            plan.append((None, self._claim(), self._length(1)))
        self._prefill(plan)

    def fork(self) -> None:
        """Children of one prefix: each reads the parent's row and writes its own."""
        if not self.live or not self._room():
            return
        parent = self.rng.choice(self.live)
        children = [self._claim() for _ in range(min(self.rng.randint(1, 2), self._room()))]
        self._prefill([(parent, child, self._length(0)) for child in children])

    def decode(self) -> None:
        self._decode(self._some(self._decodable()), 1)

    def speculate(self) -> None:
        self._decode(self._some(self._decodable()), self._tokens())

    def pad(self) -> None:
        """A call of nothing but padding, as the warm-up of a captured graph makes."""
        self._decode([], self._tokens(), padding=self.rng.randint(1, 3))

    def verify(self) -> None:
        """Another count of accepted drafts than the one drawn after their call."""
        if self.config.speculative:
            for s in self._decodable():
                s.accepted = self.rng.randint(1, len(s.histories))

    def flush(self) -> None:
        """Fold windows into their base, as before a snapshot."""
        if self.config.mode == "buffered":
            self._flush(self._some(self._decodable()))

    def reorder(self) -> None:
        """A beam takes the place of another: a copy of rows, made by the engine."""
        beams = self._decodable()
        if len(beams) < 2:
            return
        kept, dropped = self.rng.sample(beams, 2)
        for x in self.pools.tensors():
            x[dropped.rows] = x[kept.rows]
        dropped.histories, dropped.states = list(kept.histories), list(kept.states)
        dropped.accepted, dropped.window, dropped.slack = kept.accepted, kept.window, kept.slack

    def free(self) -> None:
        """Rows go back and hold NaN from then on."""
        for s in self._some(self.live, most=2):
            self.live.remove(s)
            for row in s.rows:
                self._poison(row)
            self.free_rows += s.rows
        self.rng.shuffle(self.free_rows)

    STEPS = ("start", "extend", "fork", "decode", "decode", "speculate", "speculate", "verify",
             "pad", "flush", "reorder", "free")  # fmt: skip

    def step(self) -> str:
        """One of the above, at random."""
        name = self.rng.choice(self.STEPS)
        getattr(self, name)()
        return name

    # --- choices

    def _decodable(self) -> list[Sequence]:
        return [s for s in self.live if not s.frozen]

    def _some(self, of: list[Sequence], most: int = 4) -> list[Sequence]:
        count = min(len(of), most)
        return self.rng.sample(of, self.rng.randint(min(1, count), count))

    def _room(self) -> int:
        return len(self.free_rows) // (self.config.columns if self.per_token_rows else 1)

    def _claim(self) -> Sequence:
        count = self.config.columns if self.per_token_rows else 1
        return Sequence([self.free_rows.pop() for _ in range(count)])

    def _length(self, least: int) -> int:
        return self.rng.choice([least, 1, 2, 5, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK + 3])

    def _tokens(self) -> int:
        most = self.config.columns
        return self.rng.randint(1, min(most, self.config.R))

    def _poison(self, row: int) -> None:
        for x in self.pools.tensors():
            x[row] = torch.nan if x.is_floating_point() else 0x7FFFFFFF

    def _index(self, values: list) -> Tensor:
        return torch.tensor(values, dtype=self.rng.choice([torch.int32, torch.int64]))

    def _projected(self, *shape: int) -> Tensor:
        """Inputs of the layer; some tokens clear the state, some hardly decay it."""
        x = torch.randn(*shape, self.C + (self.config.V + 2) * self.HV, generator=self.gen)
        if self.rng.random() < 0.2:
            x[..., -self.HV :] *= self.rng.choice([0.0, 30.0, 300.0])
        return x.to(self.config.act)

    # --- the calls

    def _prefill(self, plan: list[tuple[Sequence | None, Sequence, int]]) -> None:
        """``plan``: (read from, write to, tokens) of each sequence; None starts from zero."""
        if not plan:
            return
        c, rng = self.config, self.rng
        sources = {id(s): s for s, _, _ in plan if s is not None}.values()
        self._settle([s for s in sources if not s.frozen])
        before = self.pools.clone()
        # The engine brings the history of the convolution into the row that will be written.
        first = 0 if c.speculative else self.pools.conv.shape[2] - (W - 1)
        for source, target, _ in plan:
            if source is not None:
                columns = slice(first, first + W - 1)
                if c.speculative:
                    columns = slice(source.accepted - 1, source.accepted + W - 2)
                kept = self.pools.conv[source.rows[0], :, columns].clone()
                self.pools.conv[target.rows[0]] = 0
                self.pools.conv[target.rows[0], :, first : first + W - 1] = kept
                if c.mode == "lowrank" and source is not target:
                    for x in self.pools.window:
                        x[target.rows[0]] = x[source.rows[0]]
        padding = rng.randint(0, 1)
        lengths = [n for _, _, n in plan] + [rng.randint(0, 3) for _ in range(padding)]
        cu = list(accumulate(lengths, initial=0))
        projected = self._projected(1, cu[-1])
        edges = self._edge_rows(plan) + [[]] * padding
        slots = [t.rows[0] for _, t, _ in plan] + [-1] * padding
        reads = [t.rows[0] if s is None else s.rows[s.accepted - 1 if self.per_token_rows else 0]
                 for s, t, _ in plan] + [-7] * padding  # fmt: skip
        has = torch.tensor([s is not None for s, _, _ in plan] + [True] * padding)
        l2norm_later = rng.random() < 0.5

        def call(pools: Pools, x: Tensor, n: slice, cu: Tensor) -> Tensor:
            qkv, z, b, a = x.split([self.C, self.HV * c.V, self.HV, self.HV], dim=-1)
            q, k, v, g, beta = gdn_ops.conv_gating(
                qkv, a, b, *self.layer, pools.conv, c.H, c.K, self._index(slots[n]), has[n], cu,
                qk_l2norm=not l2norm_later, conv_leading=c.speculative,
            )  # fmt: skip
            kw = dict(has_initial_state=has[n], cu_seqlens=cu, chunk_size=CHUNK,
                      qk_l2norm=l2norm_later)  # fmt: skip
            if c.mode == "lowrank":
                rows = self._index(slots[n])
                o = gdn_ops.chunk_lowrank(q, k, v, g, beta, *pools.window, rows, **kw)
            else:
                o = gdn_ops.chunk_prefill(
                    q, k, v, g, beta, pools.state, self._index(reads[n]), self._index(slots[n]),
                    edge_rows=self._index([e + [-1] * (3 - len(e)) for e in edges[n]]), **kw,
                )  # fmt: skip
                if c.mode == "buffered":
                    gdn_ops.window_reset(pools.window.fill, self._index(slots[n]))
            return gdn_ops.gated_rms_norm(o, z.unflatten(-1, (self.HV, -1)), self.norm_weight)

        ready = self.pools.clone()
        y = call(self.pools, projected, slice(None), self._index(cu))
        touched = [r for r in slots if r >= 0]
        for i, (source, target, n) in enumerate(plan):
            part = projected[0, cu[i] : cu[i + 1]]
            self._advance(source, target, part, y[0, cu[i] : cu[i + 1]], prefill=True)
            # Snapshots at chunk edges become prefixes of their own.
            for j, row in enumerate(edges[i]):
                touched.append(row)
                at = CHUNK * (j + 1) - 1
                kept = Sequence([row], [target.histories[at]], [target.states[at]], frozen=True)
                kept.slack = target.slack
                self.pools.conv[row] = 0
                self.pools.conv[row, :, first : first + W - 1] = kept.history.T
                self._compare("edge", self.pools.state[row], kept.state, kept)
                self.live.append(kept)
            if n > 0:
                target.histories, target.states = target.histories[-1:], target.states[-1:]
            target.accepted = 1
            if not any(target is s for s in self.live):
                self.live.append(target)
        assert not y[0, cu[len(plan)] :].any(), "padding gives zeros"
        self._check_states([t for _, t, _ in plan])
        self._check_frame(before, touched)
        self._check_alone(ready, y, lambda pools, i: call(
            pools, projected[:, cu[i] : cu[i + 1]], slice(i, i + 1),
            self._index([0, cu[i + 1] - cu[i]])), plan, cu)  # fmt: skip

    def _edge_rows(self, plan: list) -> list[list[int]]:
        """Rows for the states at the chunk edges of some sequences, of those that are left."""
        edges = []
        for _, _, n in plan:
            take = self.config.mode != "lowrank" and not self.per_token_rows
            count = n // CHUNK if take and self.rng.random() < 0.3 else 0
            count = min(count, len(self.free_rows))
            edges.append([self.free_rows.pop() for _ in range(count)])
        return edges

    def _decode(self, seqs: list[Sequence], T: int, padding: int | None = None) -> None:
        c, rng = self.config, self.rng
        padding = rng.randint(0, 2) if padding is None else padding
        order: list[Sequence | None] = [*seqs, *[None] * padding]
        rng.shuffle(order)
        if not order:
            return
        N = len(order)
        packed = rng.random() < 0.4
        lengths = [rng.randint(0, T) if packed and s and s.histories else T for s in order]
        cu = list(accumulate(lengths, initial=0))
        projected = self._projected(*((1, cu[-1]) if packed else (N, T)))
        pad_row = [-1] * c.columns
        table = [pad_row if s is None else s.rows for s in order]
        rows = table if self.per_token_rows else [r[0] for r in table]
        has = torch.tensor([s is None or bool(s.histories) for s in order])
        accepted = [1 if s is None else s.accepted for s in order]
        idle = [False] * N  # live sequences whose count makes them padding in this call
        if c.speculative:
            for i, s in enumerate(order):
                if s is not None and s.histories and rng.random() < 0.05:
                    idle[i], accepted[i] = True, rng.choice([0, -3])
        fused = rng.random() < 0.5

        def call(pools: Pools, x: Tensor, n: slice, cu: Tensor | None) -> Tensor:
            window = pools.window or ()
            base = [] if pools.state is None else [pools.state]
            kw = dict(
                state_indices=self._index(rows[n]),
                has_initial_state=has[n],
                cu_seqlens=cu,
                num_accepted=self._index(accepted[n] + [77]) if c.speculative else None,
            )
            suffix = "" if c.mode == "full" else f"_{c.mode}"
            if fused:
                cw, cb, *gates = self.layer
                y = getattr(gdn_ops, f"decode{suffix}")(
                    x, cw, cb, *gates, self.norm_weight, pools.conv, *base, *window, c.H, c.K,
                    conv_leading=c.speculative, **kw,
                )  # fmt: skip
                return y.unflatten(-1, (self.HV, -1))
            qkv, z, b, a = x.split([self.C, self.HV * c.V, self.HV, self.HV], dim=-1)
            first = {**kw, "state_indices": self._index([r[0] for r in table[n]])}
            q, k, v, g, beta = gdn_ops.conv_gating(
                qkv, a, b, *self.layer, pools.conv, c.H, c.K, qk_l2norm=True,
                conv_leading=c.speculative, **first,
            )  # fmt: skip
            o = getattr(gdn_ops, f"recurrent{suffix}")(q, k, v, g, beta, *base, *window, **kw)
            return gdn_ops.gated_rms_norm(o, z.unflatten(-1, (self.HV, -1)), self.norm_weight)

        before = self.pools.clone()
        y = call(self.pools, projected, slice(None), self._index(cu) if packed else None)
        touched, moved = [], []
        for i, s in enumerate(order):
            part = (0, slice(cu[i], cu[i + 1])) if packed else (i, slice(None))
            if s is None or idle[i]:
                assert not y[part].any(), "padding gives zeros"
            elif lengths[i]:
                source = s if s.histories else None
                self._advance(source, s, projected[part], y[part], prefill=False)
                touched += s.rows[: lengths[i]]
                moved.append(s)
                s.accepted = rng.randint(1, lengths[i]) if c.speculative else lengths[i]
                if source is None:
                    self.live.append(s)
        self._check_states(moved)
        self._check_frame(before, touched)

        def alone(pools: Pools, i: int) -> Tensor:
            x = projected[:, cu[i] : cu[i + 1]] if packed else projected[i : i + 1]
            one = self._index([0, lengths[i]]) if packed else None
            return call(pools, x, slice(i, i + 1), one)

        flat = y if packed else y.flatten(0, 1)[None]
        self._check_alone(before, flat, alone, order, cu)

    def _settle(self, seqs: list[Sequence]) -> None:
        """Before a prefill: drop rejected drafts, fold what is pending."""
        if self.config.mode == "buffered":
            self._flush(seqs)
        elif self.config.mode == "lowrank" and self.config.speculative and seqs:
            self._drop_rejected(seqs)

    def _flush(self, seqs: list[Sequence]) -> None:
        if not seqs:
            return
        before = self.pools.clone()
        if self.config.speculative:
            self._drop_rejected(seqs)
        rows = self._index([s.rows[0] for s in seqs] + [-1])
        gdn_ops.window_flush(self.pools.state, *self.pools.window, rows)
        for s in seqs:
            self._compare("flushed", self.pools.state[s.rows[0]], s.state, s)
            assert self.pools.window.fill[s.rows[0]] == 0
            s.histories, s.states = [s.history], [s.state]
            s.accepted = 1
        self._check_frame(before, [s.rows[0] for s in seqs])

    def _drop_rejected(self, seqs: list[Sequence]) -> None:
        """From here on the last accepted token counts as the only one of its call."""
        rows = self._index([s.rows[0] for s in seqs] + [-1])
        windows.accept(self.pools.window.fill, self._index([s.accepted for s in seqs] + [1]), rows)
        for s in seqs:
            columns = slice(s.accepted - 1, s.accepted + W - 2)
            kept = self.pools.conv[s.rows[0], :, columns].clone()
            self.pools.conv[s.rows[0], :, : W - 1] = kept
            if s.window is not None:
                s.window = s.window._replace(
                    fill=s.window.fill.clone()
                )  # another beam may share it
                windows.accept(s.window.fill, torch.tensor([s.accepted]))
            s.histories, s.states = [s.history], s.states and [s.state]
            s.accepted = 1

    # --- the truth

    def _advance(self, source: Sequence | None, target: Sequence, x: Tensor, y: Tensor,
                 prefill: bool) -> None:  # fmt: skip
        """The tokens ``x [T, D]`` in float64, and their outputs ``y`` against it."""
        c, T = self.config, len(x)
        start = source if source is not None else self._blank()
        history, state, window = start.history, None, start.window
        if c.mode != "lowrank":
            state = start.state
        if T == 0:
            target.histories, target.accepted = [history], 1
            target.states = [] if state is None else [state]
            target.window, target.slack = window, start.slack
            return
        qkv, z, b, a = x.split([self.C, self.HV * c.V, self.HV, self.HV], dim=-1)
        q, k, v, g, beta, _ = reference.conv_gating(
            qkv[None], a[None], b[None], *self.layer, history.T[None], c.H, c.K
        )
        # A float32 rounding of the convolution grows as a short key is stretched to length 1.
        shortest = min(float(x.square().sum(-1).min()) for x in (q, k))
        faded = start.slack * float(g[0, 0].max().exp())  # what an error before this call is now
        target.slack = max(faded, 5e-7 / (shortest + reference.L2_EPS) ** 0.5)
        q, k = reference.l2norm(q), reference.l2norm(k)
        joined = torch.cat([history, qkv.double()])
        histories = [joined[t + 1 : t + W] for t in range(T)]
        if c.mode == "lowrank":
            if prefill:
                o, *window = reference.chunk_lowrank(q, k, v, g, beta, *window, chunk_size=CHUNK)
                window = windows.Window(*window)
            else:
                accepted = torch.tensor([start.accepted]) if c.speculative else None
                o, window = reference.recurrent_lowrank(
                    q, k, v, g, beta, *window, num_accepted=accepted
                )
                window = windows.Window(*window)
            size = float(windows.state_of(window, dtype=torch.float64).abs().max())
            states = []
        else:
            pool = torch.zeros(T, *state.shape, dtype=torch.float64)
            pool[0] = state
            o, pool = reference.recurrent(q, k, v, g, beta, pool, torch.arange(T)[None])
            states, size = list(pool), float(pool.abs().max())
        target.histories, target.states, target.window = histories, states, window
        # An error of the state reaches the output divided by the root mean square of o.
        o, gate = o[0], z.double().unflatten(-1, (self.HV, -1))
        expected = reference.gated_rms_norm(o, gate, self.norm_weight.double())
        rms = (o.square().mean(-1, keepdim=True) + 1e-6).sqrt()
        factor = (self.norm_weight.double() * gate * gate.sigmoid()).abs()
        rounding = 4 * UNIT[c.act] * expected.abs().clamp(min=1)
        limit = rounding + 2 * factor * (self.tolerance + target.slack) * max(1.0, size) / rms
        self._within("y", y.double(), expected, limit)

    def _blank(self) -> Sequence:
        c = self.config
        state = torch.zeros(self.HV, c.V, c.K, dtype=torch.float64)
        window = None
        if c.mode == "lowrank":
            k, u, g, fill = windows.allocate(1, c.H, self.HV, c.K, c.V, c.R)
            window = windows.Window(k.double(), u.double(), g.double(), fill)
        return Sequence([-1], [torch.zeros(W - 1, self.C, dtype=torch.float64)], [state], window)

    def _within(self, name: str, got: Tensor, expected: Tensor, limit: Tensor | float) -> None:
        ratio = ((got - expected).abs() / limit).max().item()
        assert ratio <= 1.0, f"{name}: {ratio:.2f} times the limit"  # false for NaN, too
        self.worst = max(self.worst, ratio)

    def _compare(self, name: str, got: Tensor, expected: Tensor, of: Sequence) -> None:
        limit = (self.tolerance + of.slack) * max(1.0, float(expected.abs().max()))
        self._within(name, got.double(), expected, limit)

    def _check_states(self, seqs: list[Sequence]) -> None:
        c = self.config
        for s in seqs:
            row = s.rows[0]
            columns = slice(0, W - 1) if c.speculative else slice(-(W - 1), None)
            if c.speculative and len(s.histories) > 1:
                # Column j on is the history after token j.
                for j, history in enumerate(s.histories):
                    kept = self.pools.conv[row, :, j : j + W - 1].double()
                    assert torch.equal(kept, history.T), "conv history"
            else:
                kept = self.pools.conv[row, :, columns].double()
                assert torch.equal(kept, s.histories[-1].T), "conv history"
            if c.mode == "full":
                for j, state in enumerate(s.states if self.per_token_rows else s.states[-1:]):
                    self._compare("state", self.pools.state[s.rows[j]], state, s)
            elif c.mode == "buffered":
                got = windows.state_of(self.pools.window, self.pools.state, torch.tensor([row]))
                self._compare("base and window", got[0], s.states[-1], s)
            else:
                got = windows.state_of(self.pools.window, None, torch.tensor([row]))
                expected = windows.state_of(s.window, dtype=torch.float64)
                self._compare("window", got, expected, s)
                assert self.pools.window.fill[row] == s.window.fill[0], "win_fill"

    def _check_frame(self, before: Pools, touched: list[int]) -> None:
        """Rows that the call did not name hold the same bits."""
        kept = sorted(set(range(self.config.rows)) - set(touched))
        self.calls += 1
        for old, new in zip(before.tensors(), self.pools.tensors(), strict=True):
            assert torch.equal(bits(old[kept]), bits(new[kept])), "a row that no one named"

    def _check_alone(self, before: Pools, y: Tensor, call, plan: list, cu: list[int]) -> None:
        """One sequence of the batch again, with no neighbours."""
        if self.rng.random() < 0.25 and plan:
            i = self.rng.randrange(len(plan))
            again = call(before, i)
            again = again.flatten(0, 1)
            assert torch.equal(bits(again), bits(y[0, cu[i] : cu[i + 1]])), "alone, other bits"
