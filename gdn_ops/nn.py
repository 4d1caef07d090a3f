"""The Gated DeltaNet layer on the ops of this package: packed projection, prefill and decode.

:class:`GatedDeltaNet` owns its parameters. :func:`mix` is the same layer between its two
projections as a function of tensors; the classes of :mod:`gdn_ops.hf` call it on the parameters of
transformers.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn

from gdn_ops import windows
from gdn_ops._compile import keep_address
from gdn_ops._limits import (
    DECODE_TOKENS,
    MAX_CONV_WIDTH,
    MAX_HEAD_DIM,
    check_dtype,
    check_range,
    check_window_size,
)
from gdn_ops._modules import local, project
from gdn_ops._support import STATE_MODES, check_mode, missing, prefills_in_chunks, trainable

__all__ = ["STATE_MODES", "GatedDeltaNet", "Heads", "Mixer", "States", "mix", "mix_functional"]

# Whether States has no window, and no state.
_ABSENT = {"full": (True, False), "buffered": (False, False), "lowrank": (False, True)}

# Below this many tokens the recurrence reads the state less often than a chunk's set-up costs.
CHUNK_FROM = 16

_ops = torch.ops.gdn


class Heads(NamedTuple):
    """Sizes of a layer; the names of the derived ones are those of the config of transformers."""

    num_k_heads: int
    num_v_heads: int
    head_k_dim: int
    head_v_dim: int

    @property
    def key_dim(self) -> int:
        return self.num_k_heads * self.head_k_dim

    @property
    def value_dim(self) -> int:
        return self.num_v_heads * self.head_v_dim

    @property
    def conv_dim(self) -> int:
        return 2 * self.key_dim + self.value_dim

    @property
    def split(self) -> list[int]:
        """Columns of the packed projection: qkv | z | b | a."""
        return [self.conv_dim, self.value_dim, self.num_v_heads, self.num_v_heads]

    @property
    def projected_dim(self) -> int:
        return self.conv_dim + self.value_dim + 2 * self.num_v_heads

    def part(self, groups: int) -> Heads:
        """Sizes of one of ``groups`` equal parts of the heads."""
        return self._replace(
            num_k_heads=self.num_k_heads // groups, num_v_heads=self.num_v_heads // groups
        )


class States(NamedTuple):
    """Pools that a layer reads and writes in place; P rows, one a sequence.

    ``conv [P, C, L]``; ``state [P, HV, V, K]`` (absent with lowrank); with a window ``win_k
    [P, H, R, K]``, ``win_u [P, HV, R, V]``, ``win_g [P, HV, R]`` and ``win_fill [P]``.
    """

    conv: Tensor
    state: Tensor | None = None
    win_k: Tensor | None = None
    win_u: Tensor | None = None
    win_g: Tensor | None = None
    win_fill: Tensor | None = None

    @staticmethod
    def allocate(
        rows: int,
        heads: Heads,
        conv_width: int,
        *,
        state_mode: str = "full",
        window: int = 16,
        dtype: torch.dtype = torch.float32,
        state_dtype: torch.dtype = torch.float32,
        window_dtype: torch.dtype | None = None,
        drafts: int = 0,
        device: torch.device | str | None = None,
    ) -> States:
        """Empty pools: zero states and histories, empty windows.

        Args:
            rows: P, the most sequences alive at once.
            conv_width: W; the conv pool gets ``L = W`` columns, as the caches of transformers have,
                or the ``W - 1 + drafts`` of a speculative call.
            window: R, entries of a window, 1 to 64 (buffered and lowrank only).
            dtype: of the conv pool, the activation dtype.
            state_dtype: of the base state.
            window_dtype: of a window's keys and updates, that of the states if absent: there
                16-bit windows still halve the error of a state written each step
                (docs/windows.md).
            drafts: most speculative tokens of a call beyond its first.

        Raises:
            ValueError: another state_mode, a window outside 1 to 64, fewer than no rows or drafts,
                a dtype other than float32, bfloat16 and float16.
        """
        check_range("rows", rows, 0)
        check_range("drafts", drafts, 0)
        check_mode(state_mode)
        check_window_size(window)
        check_dtype("dtype", dtype)
        check_dtype("state_dtype", state_dtype)
        kept = window_dtype or state_dtype
        check_dtype("window_dtype", kept)
        _, HV, K, V = heads
        columns = conv_width - 1 + max(1, drafts)
        conv = torch.zeros(rows, heads.conv_dim, columns, dtype=dtype, device=device)
        state = None
        if state_mode != "lowrank":
            state = torch.zeros(rows, HV, V, K, dtype=state_dtype, device=device)
        if state_mode == "full":
            return States(conv, state)
        entries = windows.allocate(
            rows, *heads, window, update_dtype=kept, key_dtype=kept, device=device
        )
        return States(conv, state, *entries)


def window_of(states: States) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The pools of the window. Not a property: torch.compile of 2.9 knows none of a named tuple."""
    return states.win_k, states.win_u, states.win_g, states.win_fill


class Mixer(NamedTuple):
    """Parameters and constants of a layer between its projections.

    ``conv_weight [C, W]``, ``conv_bias [C]`` or None, ``A_log`` and ``dt_bias [HV]``,
    ``norm_weight [V]``: float32 or the activation dtype.
    """

    heads: Heads
    conv_weight: Tensor
    conv_bias: Tensor | None
    A_log: Tensor
    dt_bias: Tensor
    norm_weight: Tensor
    eps: float = 1e-6
    activation: str = "silu"


def mix(
    projected: Tensor,
    mixer: Mixer,
    states: States,
    state_indices: Tensor | None = None,
    has_initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    num_accepted: Tensor | None = None,
    *,
    state_mode: str = "full",
    decode: bool | None = None,
    conv_leading: bool = False,
) -> Tensor:
    """The layer between its projections, on pools of states that are updated in place. No backward.

    Args:
        projected: ``[B, T, D]``, the packed projection, columns qkv | z | b | a.
        states: the pools; row ``state_indices[n]`` belongs to sequence n.
        state_indices, has_initial_state, cu_seqlens, num_accepted: as in :func:`gdn_ops.recurrent`.
        decode: true runs the one fused call (every token of a sequence in turn), false the prefill
            path (convolution and gates, then the chunked rule). Absent: fused for T = 1.
        conv_leading: the layout of the conv pool (docs/ops/conv.md); ``num_accepted`` needs it.

    Returns:
        ``[B, T, HV * V]``, what the output projection takes.

    With "buffered" the prefill path first folds the window into the base, so that the chunked rule
    sees the whole state and the window is empty afterwards.
    """
    h = mixer.heads
    if decode is None:
        decode = projected.shape[1] == 1
    parameters = (
        projected, mixer.conv_weight, mixer.conv_bias, mixer.A_log, mixer.dt_bias, mixer.norm_weight
    )  # fmt: skip
    sequences = (state_indices, has_initial_state, cu_seqlens, num_accepted)
    if decode:
        tail = (
            h.num_k_heads, h.head_k_dim, *sequences, None, True, mixer.eps, mixer.activation,
            conv_leading,
        )  # fmt: skip
        if state_mode == "full":
            return _ops.decode.default(*parameters, states.conv, states.state, *tail)
        if state_mode == "buffered":
            return _ops.decode_buffered.default(
                *parameters, states.conv, states.state, *window_of(states), *tail
            )
        return _ops.decode_lowrank.default(*parameters, states.conv, *window_of(states), *tail)

    if num_accepted is not None:
        raise ValueError("num_accepted: speculative tokens run on the decode path, not on prefill")
    if state_indices is not None and state_indices.dim() != 1:
        # The convolution would take its rows from column 0, before the rule refuses them.
        raise ValueError(
            f"state_indices: expected shape [N] on prefill, got {[*state_indices.shape]}"
        )
    qkv, z, b, a = projected.split(h.split, dim=-1)
    q, k, v, g, beta = _ops.conv_gating.default(
        qkv, a, b, mixer.conv_weight, mixer.conv_bias, mixer.A_log, mixer.dt_bias, states.conv,
        h.num_k_heads, h.head_k_dim, *sequences, False, mixer.activation, conv_leading,
    )  # fmt: skip
    # The l2norm is left to the rule, which takes it in float32: here q and k would round again.
    if state_mode == "lowrank":
        o = _ops.chunk_lowrank.default(
            q, k, v, g, beta, *window_of(states), state_indices, has_initial_state, cu_seqlens,
            None, True,
        )  # fmt: skip
    else:
        if state_mode == "buffered":
            rows = state_indices
            if rows is None:
                # Those of this call: without indices the op would fold every row of the pool.
                n = projected.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
                rows = torch.arange(n, device=projected.device)
            _ops.window_flush.default(states.state, *window_of(states), rows)
        if projected.shape[1] >= CHUNK_FROM and prefills_in_chunks(projected.device.type):
            o = _ops.chunk_prefill.default(
                q, k, v, g, beta, states.state, state_indices, state_indices, has_initial_state,
                cu_seqlens, None, None, True,
            )  # fmt: skip
        else:
            o = _ops.recurrent.default(q, k, v, g, beta, states.state, *sequences, None, True)
    # Not unflatten: under a default device torch 2.11 cannot trace it.
    z = z.view(*z.shape[:-1], h.num_v_heads, h.head_v_dim)
    return _ops.gated_rms_norm.default(o, z, mixer.norm_weight, mixer.eps).flatten(-2)


def mix_functional(
    projected: Tensor,
    mixer: Mixer,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The layer between its projections from an empty state, with a backward for everything.

    Args:
        projected: ``[B, T, D]``, the packed projection, columns qkv | z | b | a.
        cu_seqlens: ``[N+1]`` offsets of packed sequences (then B is 1).

    Returns:
        ``([B, T, HV * V], conv history [N, C, W], final state [N, HV, V, K] float32)``.
    """
    h = mixer.heads
    B, T = projected.shape[:2]
    W = mixer.conv_weight.shape[1]
    qkv, z, b, a = projected.split(h.split, dim=-1)
    qkv, conv_final = _ops.conv1d.default(
        qkv, mixer.conv_weight, mixer.conv_bias, None, cu_seqlens, mixer.activation,
        W if W > 1 else 0,
    )  # fmt: skip
    if W == 1:  # keeps no history: as in a pool, a column that nobody reads
        conv_final = nn.functional.pad(conv_final, (1, 0))
    q, k, v = qkv.split([h.key_dim, h.key_dim, h.value_dim], dim=-1)
    g, beta = _ops.gating.default(a, b, mixer.A_log, mixer.dt_bias)
    o, state_final = _ops.chunk.default(
        q.reshape(B, T, h.num_k_heads, h.head_k_dim),
        k.reshape(B, T, h.num_k_heads, h.head_k_dim),
        v.reshape(B, T, h.num_v_heads, h.head_v_dim),
        g, beta, None, cu_seqlens, None, True,
    )  # fmt: skip
    z = z.reshape(B, T, h.num_v_heads, h.head_v_dim)
    y = _ops.gated_rms_norm.default(o, z, mixer.norm_weight, mixer.eps)
    return y.flatten(-2), conv_final, state_final


class GatedDeltaNet(nn.Module):
    """Gated DeltaNet layer: one GEMM in, the recurrence, one GEMM out.

    The input projection is packed, rows in the order q | k | v | z | b | a with all heads of a part
    together (:attr:`Heads.split`), so that decode is one product, :func:`gdn_ops.decode` and one
    product.

    Args:
        hidden_size: width of the input and the output.
        num_k_heads, num_v_heads: H and HV; HV must be a multiple of H.
        head_k_dim, head_v_dim: K and V, 1 to 512.
        conv_kernel_size: W, 1 to 8.
        eps: of the gated norm.
        state_mode: "full" writes the state each step; "buffered" is exact too and keeps the last
            ``window`` updates beside it, folding them in when the window is full; "lowrank" keeps
            those updates only, an approximation (docs/windows.md).
        window: R, 1 to 64; unused with "full".
        drafts: most speculative tokens that a call of :meth:`decode` may bring beyond its first, 0
            to 15, and below ``window`` with "buffered". Above 0 the conv pool keeps what may be
            rejected, in the layout with the history first.

    Parameters: ``in_proj.weight [D, hidden]``, ``conv_weight [C, W]``, ``A_log`` and ``dt_bias
    [HV]`` (float32 whatever ``dtype``), ``norm_weight [V]``, ``out_proj.weight [hidden, HV * V]``.

    Example::

        layer = GatedDeltaNet(1024, 16, 48)
        states = layer.allocate(rows=8)
        with torch.no_grad():
            layer.prefill(prompt, states, rows)      # [N, T, hidden]
            layer.decode(token, states, rows)        # [N, 1, hidden]
    """

    def __init__(
        self,
        hidden_size: int,
        num_k_heads: int,
        num_v_heads: int,
        head_k_dim: int = 128,
        head_v_dim: int = 128,
        conv_kernel_size: int = 4,
        *,
        eps: float = 1e-6,
        state_mode: str = "full",
        window: int = 16,
        drafts: int = 0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_range("hidden_size", hidden_size, 1)
        check_range("num_k_heads", num_k_heads, 1)
        check_range("num_v_heads", num_v_heads, 1)
        if num_v_heads % num_k_heads:
            raise ValueError(
                f"num_v_heads: expected a multiple of num_k_heads = {num_k_heads}, "
                f"got {num_v_heads}"
            )
        check_range("head_k_dim", head_k_dim, 1, MAX_HEAD_DIM)
        check_range("head_v_dim", head_v_dim, 1, MAX_HEAD_DIM)
        check_range("conv_kernel_size", conv_kernel_size, 1, MAX_CONV_WIDTH)
        check_mode(state_mode)
        check_window_size(window)
        most = DECODE_TOKENS if state_mode != "buffered" else min(DECODE_TOKENS, window)
        check_range("drafts", drafts, 0, most - 1)
        check_dtype("dtype", dtype or torch.get_default_dtype())
        self.heads = Heads(num_k_heads, num_v_heads, head_k_dim, head_v_dim)
        self.hidden_size = hidden_size
        self.eps = eps
        self.state_mode = state_mode
        self.window = window
        self.drafts = drafts
        options = {"device": device, "dtype": dtype}
        self.in_proj = nn.Linear(hidden_size, self.heads.projected_dim, bias=False, **options)
        self.conv_weight = nn.Parameter(
            torch.empty(self.heads.conv_dim, conv_kernel_size, **options)
        )
        self.A_log = nn.Parameter(torch.empty(num_v_heads, device=device, dtype=torch.float32))
        self.dt_bias = nn.Parameter(torch.empty(num_v_heads, device=device, dtype=torch.float32))
        self.norm_weight = nn.Parameter(torch.empty(head_v_dim, **options))
        self.out_proj = nn.Linear(self.heads.value_dim, hidden_size, bias=False, **options)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialise as the Qwen models do: A uniform in (0.01, 16), dt_bias and norm one."""
        nn.init.kaiming_uniform_(self.conv_weight, a=math.sqrt(5))
        with torch.no_grad():
            self.A_log.uniform_(0.01, 16).log_()
            self.dt_bias.fill_(1)
            self.norm_weight.fill_(1)

    def extra_repr(self) -> str:
        h = self.heads
        return (
            f"heads {h.num_k_heads}/{h.num_v_heads}, dims {h.head_k_dim}/{h.head_v_dim}, "
            f"state_mode={self.state_mode}"
        )

    @property
    def mixer(self) -> Mixer:
        return Mixer(
            self.heads, local(self.conv_weight), None, local(self.A_log), local(self.dt_bias),
            local(self.norm_weight), self.eps,
        )  # fmt: skip

    def allocate(
        self,
        rows: int,
        state_dtype: torch.dtype = torch.float32,
        window_dtype: torch.dtype | None = None,
    ) -> States:
        """Empty pools of ``rows`` sequences for this layer; dtypes as :meth:`States.allocate` has
        them.

        CUDA graphs that torch.compile makes may write these (docs/cuda.md).
        """
        pools = States.allocate(
            rows,
            self.heads,
            self.conv_weight.shape[1],
            state_mode=self.state_mode,
            window=self.window,
            dtype=self.conv_weight.dtype,  # a quantised projection has no dtype to ask for
            state_dtype=state_dtype,
            window_dtype=window_dtype,
            drafts=self.drafts,
            device=self.conv_weight.device,
        )
        keep_address(*pools)
        return pools

    def _check_shape(self, x: Tensor) -> None:
        if x.dim() != 3 or x.shape[2] != self.hidden_size:
            raise ValueError(
                f"GatedDeltaNet: x: expected shape [B, T, {self.hidden_size}], got {[*x.shape]}"
            )

    def _run(self, x: Tensor, states: States, *sequences: Tensor | None, decode: bool) -> Tensor:
        if reason := missing(self.state_mode, x.device.type):
            raise NotImplementedError(f"GatedDeltaNet: {reason}")
        self._check_shape(x)
        if (states.win_k is None, states.state is None) != _ABSENT[self.state_mode]:
            raise ValueError(
                f"GatedDeltaNet: states: expected those of state_mode {self.state_mode!r}, which "
                "allocate() of this layer gives"
            )
        y = mix(
            project(self.in_proj, x), self.mixer, states, *sequences, state_mode=self.state_mode,
            decode=decode, conv_leading=self.drafts > 0,
        )  # fmt: skip
        return project(self.out_proj, y)

    def prefill(
        self,
        x: Tensor,
        states: States,
        state_indices: Tensor | None = None,
        has_initial_state: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
    ) -> Tensor:
        """Many tokens a sequence. No backward.

        Args:
            x: ``[B, T, hidden]`` in the dtype of the projections.
            states: of :meth:`allocate`, **written in place**.
            state_indices, has_initial_state, cu_seqlens: as in :func:`gdn_ops.recurrent`, but
                ``state_indices`` of shape ``[N]``.

        Returns:
            The shape and dtype of x; zeros for padding whose x is finite.

        Raises:
            ValueError: a shape of x or state_indices is not as above, or ``states`` are those of
                another state_mode.
            NotImplementedError: this build lacks an op of the state_mode on x's device.
            RuntimeError: as :func:`gdn_ops.chunk_prefill`.
        """
        return self._run(x, states, state_indices, has_initial_state, cu_seqlens, decode=False)

    def decode(
        self,
        x: Tensor,
        states: States,
        state_indices: Tensor | None = None,
        has_initial_state: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        num_accepted: Tensor | None = None,
    ) -> Tensor:
        """One token a sequence or, with ``drafts``, a few: one fused call between two products.

        ``num_accepted`` says how many tokens of the call before were right; the others are
        forgotten first. With "full" each token has a row for its state, so ``state_indices`` is
        ``[N, S]``. A prefill takes no such count: let a call of one token precede it. Padding gives
        zeros whatever its x holds.

        Arguments, result and errors are otherwise those of :meth:`prefill`; RuntimeError as
        :func:`gdn_ops.decode`.
        """
        return self._run(
            x, states, state_indices, has_initial_state, cu_seqlens, num_accepted, decode=True
        )

    def forward(
        self, x: Tensor, states: States | None = None, cu_seqlens: Tensor | None = None
    ) -> Tensor:
        """Whole sequences ``x [B, T, hidden]``, packed with ``cu_seqlens [N+1]`` (then B is 1).

        With ``states``: continue them (row n is sequence n), as :meth:`prefill` or :meth:`decode`
        do. Without: start from nothing and keep nothing; this form has gradients where this build
        has a backward of every op, and asking for them elsewhere is a NotImplementedError. What
        gradients are asked for is the exact rule in every state mode, "lowrank" too.

        Returns:
            The shape and dtype of x.
        """
        if states is not None:
            return self._run(
                x, states, None, None, cu_seqlens, decode=x.shape[1] == 1 and cu_seqlens is None
            )
        if torch.is_grad_enabled() and (
            x.requires_grad or any(p.requires_grad for p in self.parameters())
        ):
            if not trainable(x.device.type):
                raise NotImplementedError(
                    f"GatedDeltaNet: this build has no backward on {x.device.type}; run under "
                    "torch.no_grad()"
                )
            self._check_shape(x)
            y, _, _ = mix_functional(project(self.in_proj, x), self.mixer, cu_seqlens)
            return project(self.out_proj, y)
        rows = x.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
        return self._run(x, self.allocate(rows), None, None, cu_seqlens, decode=False)
