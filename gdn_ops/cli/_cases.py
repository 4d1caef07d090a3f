"""Random calls of every op beside their float64 oracle, for ``gdn-ops verify``.

A case builds its inputs, calls the op, and yields ``(what, got, expected)`` for each tensor the op
returns or writes, and the magnitude of what was summed where products may be rounded. Inputs look
like a trained model's (unit-length keys, g < 0, 0 < beta < 1), include a padding row and a row that
starts fresh, and pools have rows that no sequence names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

import gdn_ops
from gdn_ops import reference, windows

WINDOW = 4  # entries: few, so that a short run folds
TOKENS = 70  # of the chunked ops: one whole chunk and a part
FOLD = ", folding"
# What, got, expected; of products that a mode may round, also their magnitude.
Compared = Iterator[tuple[str, Tensor, Tensor] | tuple[str, Tensor, Tensor, Tensor]]


@dataclass(frozen=True)
class Setting:
    """Shapes and dtypes of a case."""

    H: int
    HV: int
    K: int
    V: int
    activation: torch.dtype
    state: torch.dtype
    seed: int = 0
    N: int = 5
    W: int = 4

    @property
    def generator(self) -> torch.Generator:
        return torch.Generator().manual_seed(self.seed)

    @property
    def C(self) -> int:
        return 2 * self.H * self.K + self.HV * self.V


class Inputs:
    """The tensors that the cases of one setting draw on."""

    def __init__(self, s: Setting, T: int):
        gen, N = s.generator, s.N

        def randn(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=gen)

        act = s.activation
        self.q = reference.l2norm(randn(N, T, s.H, s.K)).to(act)
        self.k = reference.l2norm(randn(N, T, s.H, s.K)).to(act)
        self.v = randn(N, T, s.HV, s.V).to(act)
        self.g = -torch.rand(N, T, s.HV, generator=gen)
        self.beta = torch.sigmoid(randn(N, T, s.HV))
        self.a, self.b = randn(N, T, s.HV).to(act), randn(N, T, s.HV).to(act)
        self.A_log, self.dt_bias = torch.rand(s.HV, generator=gen), randn(s.HV)
        self.x = randn(N, T, s.C).to(act)
        self.conv_weight, self.conv_bias = randn(s.C, s.W).to(act), randn(s.C).to(act)
        self.norm_weight = (1 + 0.1 * randn(s.V)).to(act)
        self.z = randn(N, T, s.HV, s.V).to(act)
        self.projected = torch.cat([self.x, self.z.flatten(2), self.b, self.a], -1)
        self.state = (0.1 * randn(N + 2, s.HV, s.V, s.K)).to(s.state)
        self.conv_state = randn(N + 2, s.C, s.W - 1).to(act)
        self.rows = torch.randperm(N + 2, generator=gen)[:N].to(torch.int32)
        self.rows[1] = -1
        self.has_initial_state = torch.ones(N, dtype=torch.bool)
        self.has_initial_state[2] = False


def recurrent(s: Setting, T: int = 1) -> Compared:
    x = Inputs(s, T)
    call = (x.rows, x.has_initial_state)
    want, want_state = reference.recurrent(x.q, x.k, x.v, x.g, x.beta, x.state, *call)
    o = gdn_ops.recurrent(x.q, x.k, x.v, x.g, x.beta, x.state, *call)
    yield "output", o, want
    yield "state", x.state, want_state


def recurrent_tokens(s: Setting) -> Compared:
    yield from recurrent(s, T=7)


def recurrent_gated(s: Setting) -> Compared:
    x = Inputs(s, 1)
    gates = (x.a, x.b, x.A_log, x.dt_bias)
    call = {"state_indices": x.rows, "qk_l2norm": True}
    want, want_state = reference.recurrent_gated(x.q, x.k, x.v, *gates, x.state, **call)
    o = gdn_ops.recurrent_gated(x.q, x.k, x.v, *gates, x.state, **call)
    yield "output", o, want
    yield "state", x.state, want_state


def gating(s: Setting) -> Compared:
    x = Inputs(s, 33)
    want = reference.gating(x.a, x.b, x.A_log, x.dt_bias)
    got = gdn_ops.gating(x.a, x.b, x.A_log, x.dt_bias)
    yield from zip(("g", "beta"), got, want, strict=True)


def short_conv(s: Setting, T: int = 1) -> Compared:
    x = Inputs(s, T)
    call = (x.rows, x.has_initial_state)
    args = (x.x, x.conv_weight, x.conv_bias, x.conv_state)
    want, want_state = reference.short_conv(*args, *call)
    y = gdn_ops.short_conv(*args, *call)
    yield "output", y, want
    yield "state", x.conv_state, want_state


def short_conv_tokens(s: Setting) -> Compared:
    yield from short_conv(s, T=7)


def conv1d(s: Setting) -> Compared:
    x = Inputs(s, 9)
    args = (x.x, x.conv_weight, x.conv_bias, x.conv_state[: s.N])
    yield from zip(
        ("output", "final state"), gdn_ops.conv1d(*args), reference.conv1d(*args), strict=True
    )


def conv_gating(s: Setting) -> Compared:
    x = Inputs(s, 1)
    args = (x.x, x.a, x.b, x.conv_weight, None, x.A_log, x.dt_bias, x.conv_state, s.H, s.K, x.rows)
    want = reference.conv_gating(*args, qk_l2norm=True)
    got = gdn_ops.conv_gating(*args, qk_l2norm=True)
    yield from zip(("q", "k", "v", "g", "beta"), got, want[:5], strict=True)
    yield "state", x.conv_state, want[5]


def gated_rms_norm(s: Setting) -> Compared:
    x = Inputs(s, 3)
    want = reference.gated_rms_norm(x.v, x.z, x.norm_weight)
    yield "output", gdn_ops.gated_rms_norm(x.v, x.z, x.norm_weight), want


def linear(s: Setting) -> Compared:
    gen = s.generator
    for rows, columns in ((s.N, 96), (1, 96), (s.N, 83)):
        x = torch.randn(rows, columns, generator=gen).to(s.activation)
        weight = (torch.randn(s.C, columns, generator=gen) / columns**0.5).to(s.activation)
        what = f"{rows} x {columns}"
        yield what, gdn_ops.linear(x, weight), reference.linear(x, weight)


def decode(s: Setting, T: int = 1) -> Compared:
    x = Inputs(s, T)
    args = (
        x.projected, x.conv_weight, None, x.A_log, x.dt_bias, x.norm_weight, x.conv_state, x.state,
        s.H, s.K, x.rows,
    )  # fmt: skip
    want, want_conv, want_state = reference.decode(*args)
    y = gdn_ops.decode(*args)
    yield "output", y, want
    yield "conv state", x.conv_state, want_conv
    yield "state", x.state, want_state


def _window(s: Setting) -> windows.Window:
    return windows.allocate(s.N + 2, s.H, s.HV, s.K, s.V, WINDOW)


def _at_fold(s: Setting, step: int) -> str:
    """Marks the call that folds: it rounds the base to the state's dtype and then reads it, which
    the oracle does not, so what it returns is judged by the tolerance of that dtype."""
    return FOLD if step == WINDOW and s.state != torch.float32 else ""


def recurrent_buffered(s: Setting) -> Compared:
    x, window = Inputs(s, 1), _window(s)
    for step in range(WINDOW + 2):  # until the window has been folded once
        args = (x.q, x.k, x.v, x.g, x.beta, x.state, *window, x.rows)
        want, want_state, want_window = reference.recurrent_buffered(*args)
        fold = _at_fold(s, step)
        yield "output" + fold, gdn_ops.recurrent_buffered(*args), want
        yield "state", x.state, want_state
        yield "window" + fold, window.u, want_window[1]


def recurrent_lowrank(s: Setting) -> Compared:
    x, window = Inputs(s, 1), _window(s)
    for _ in range(WINDOW + 2):
        args = (x.q, x.k, x.v, x.g, x.beta, *window, x.rows)
        want, want_window = reference.recurrent_lowrank(*args)
        yield "output", gdn_ops.recurrent_lowrank(*args), want
        yield "window", window.u, want_window[1]


def window_flush(s: Setting) -> Compared:
    x, window = Inputs(s, 3), _window(s)
    gdn_ops.recurrent_buffered(x.q, x.k, x.v, x.g, x.beta, x.state, *window, x.rows)
    want, want_fill = reference.window_flush(x.state, *window, x.rows)
    gdn_ops.window_flush(x.state, *window, x.rows)
    yield "state", x.state, want
    yield "fill", window.fill.float(), want_fill.double()


def window_reset(s: Setting) -> Compared:
    x, window = Inputs(s, 3), _window(s)
    gdn_ops.recurrent_buffered(x.q, x.k, x.v, x.g, x.beta, x.state, *window, x.rows)
    want = reference.window_reset(window.fill, x.rows[:3])
    gdn_ops.window_reset(window.fill, x.rows[:3])
    yield "fill", window.fill.float(), want.double()


def decode_buffered(s: Setting) -> Compared:
    x, window = Inputs(s, 1), _window(s)
    for step in range(WINDOW + 2):
        args = (
            x.projected, x.conv_weight, None, x.A_log, x.dt_bias, x.norm_weight, x.conv_state,
            x.state, *window, s.H, s.K, x.rows,
        )  # fmt: skip
        want, want_conv, want_state, want_window = reference.decode_buffered(*args)
        fold = _at_fold(s, step)
        yield "output" + fold, gdn_ops.decode_buffered(*args), want
        yield "conv state", x.conv_state, want_conv
        yield "state", x.state, want_state
        yield "window" + fold, window.u, want_window[1]


def decode_lowrank(s: Setting) -> Compared:
    x, window = Inputs(s, 1), _window(s)
    for _ in range(WINDOW + 2):
        args = (
            x.projected, x.conv_weight, None, x.A_log, x.dt_bias, x.norm_weight, x.conv_state,
            *window, s.H, s.K, x.rows,
        )  # fmt: skip
        want, want_conv, want_window = reference.decode_lowrank(*args)
        yield "output", gdn_ops.decode_lowrank(*args), want
        yield "conv state", x.conv_state, want_conv
        yield "window", window.u, want_window[1]


def chunk(s: Setting) -> Compared:
    x = Inputs(s, TOKENS)
    args = (x.q, x.k, x.v, x.g, x.beta, x.state[: s.N].float())
    of_o, of_rows = reference.chunk_magnitudes(*args)
    o, final = gdn_ops.chunk(*args)
    want, want_final = reference.chunk(*args)
    yield "output", o, want, of_o
    yield "final state", final, want_final, of_rows[:, -1, ..., None]


def chunk_prefill(s: Setting) -> Compared:
    x = Inputs(s, TOKENS)
    args = (x.q, x.k, x.v, x.g, x.beta, x.state, x.rows, x.rows, x.has_initial_state)
    want, want_state = reference.chunk_prefill(*args)
    start = x.state[x.rows.clamp(min=0).long()] * x.has_initial_state[:, None, None, None]
    of_o, of_rows = reference.chunk_magnitudes(*args[:5], start)
    live = x.rows >= 0
    of_state = torch.zeros(x.state.shape, dtype=torch.float64)
    of_state[x.rows[live].long()] = of_rows[live, -1, ..., None].expand(-1, -1, -1, s.K)
    yield "output", gdn_ops.chunk_prefill(*args), want, of_o * live[:, None, None, None]
    yield "state", x.state, want_state, of_state


def chunk_lowrank(s: Setting) -> Compared:
    x, window = Inputs(s, TOKENS), _window(s)
    args = (x.q, x.k, x.v, x.g, x.beta, *window, x.rows)
    want = reference.chunk_lowrank(*args)
    of_o, of_rows = reference.chunk_magnitudes(*args[:5])
    live = x.rows >= 0
    of_window = torch.zeros(window.u.shape, dtype=torch.float64)
    of_window[x.rows[live].long()] = of_rows[live, -WINDOW:].transpose(1, 2)
    yield "output", gdn_ops.chunk_lowrank(*args), want[0], of_o * live[:, None, None, None]
    yield "window", window.u, want[2], of_window


CASES: dict[str, tuple[Callable[[Setting], Compared], ...]] = {
    "recurrent": (recurrent, recurrent_tokens),
    "recurrent_gated": (recurrent_gated,),
    "gating": (gating,),
    "short_conv": (short_conv, short_conv_tokens),
    "conv1d": (conv1d,),
    "conv_gating": (conv_gating,),
    "gated_rms_norm": (gated_rms_norm,),
    "linear": (linear,),
    "decode": (decode,),
    "recurrent_buffered": (recurrent_buffered,),
    "recurrent_lowrank": (recurrent_lowrank,),
    "window_flush": (window_flush,),
    "window_reset": (window_reset,),
    "decode_buffered": (decode_buffered,),
    "decode_lowrank": (decode_lowrank,),
    "chunk": (chunk,),
    "chunk_prefill": (chunk_prefill,),
    "chunk_lowrank": (chunk_lowrank,),
}
# Ops whose products with bfloat16 inputs a mode other than exact may round.
ROUNDED = {"chunk", "chunk_prefill", "chunk_lowrank"}
# Ops that keep no recurrent state: its dtype does not touch them.
STATELESS = {
    "gating", "short_conv", "conv1d", "conv_gating", "gated_rms_norm", "linear",
    "recurrent_lowrank", "decode_lowrank", "chunk", "chunk_lowrank",
}  # fmt: skip
# Ops of several launches on a device, which hand each other 16-bit activations rounded.
FUSED = {"decode", "decode_buffered", "decode_lowrank"}
# Of the tensors of chunked ops, the dimension that runs down a column of V.
COLUMNS = {"output": 1, "final state": -1, "state": -1, "window": -2}
