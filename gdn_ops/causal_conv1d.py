"""The causal convolution under the names and keywords of the causal-conv1d package.

Channels come first, ``[B, C, T]``, and histories end with the newest column. The work is done by
:func:`gdn_ops.conv1d` and :func:`gdn_ops.short_conv`; unlike that package's kernels these take any
strides, any width from 1 to 8 and any dtype of float32, bfloat16 and float16. A keyword is honoured
or refused by name.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gdn_ops.ops.conv import conv1d, short_conv

__all__ = ["causal_conv1d_fn", "causal_conv1d_update"]


def activation_name(op: str, activation: str | None) -> str:
    """The activation argument of :func:`gdn_ops.short_conv` for that package's."""
    if activation is None:
        return "none"
    if activation in ("silu", "swish"):
        return "silu"
    raise ValueError(f"{op}: activation: expected None, 'silu' or 'swish', got {activation!r}")


def causal_conv1d_fn(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    seq_idx: Tensor | None = None,
    initial_states: Tensor | None = None,
    return_final_states: bool = False,
    final_states_out: Tensor | None = None,
    activation: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """:func:`gdn_ops.conv1d` with channels first. Differentiable.

    Args:
        x: ``[B, C, T]``. weight: ``[C, W]``; bias: ``[C]`` or None.
        seq_idx: ``[B, T]`` integers; the history starts anew wherever the number changes, and
            tokens with negative ones are padding (output zero). Finding the changes synchronises a
            device once.
        initial_states: ``[B, C, W-1]``, zeros if absent.
        return_final_states: return the last W-1 columns too. final_states_out: ``[B, C, W-1]``,
            receives them and is what is returned.
        activation: None, ``"silu"`` or ``"swish"``.

    Returns:
        ``[B, C, T]`` in the dtype of x, or that and ``[B, C, W-1]``.

    Raises:
        ValueError: another activation; a shape, dtype or device of x, seq_idx, initial_states or
            final_states_out is not as above; seq_idx with states; final_states_out without
            return_final_states. RuntimeError: as :func:`gdn_ops.conv1d`.
    """
    op = "causal_conv1d_fn"
    activation = activation_name(op, activation)
    if x.dim() != 3:
        raise ValueError(f"{op}: x: expected shape [B, C, T], got {[*x.shape]}")
    shape = (x.shape[0], x.shape[1], weight.shape[-1] - 1)
    if initial_states is not None and initial_states.shape != shape:
        raise ValueError(
            f"{op}: initial_states: expected shape {shape}, got {tuple(initial_states.shape)}"
        )
    if final_states_out is not None:
        if not return_final_states:
            raise ValueError(f"{op}: final_states_out: needs return_final_states=True")
        out = final_states_out
        if out.shape != shape or out.device != x.device or not out.is_floating_point():
            raise ValueError(
                f"{op}: final_states_out: expected a floating dtype of shape {shape} on "
                f"{x.device}, got {out.dtype} of {tuple(out.shape)} on {out.device}"
            )
    if seq_idx is not None:
        if initial_states is not None or return_final_states:
            raise ValueError(
                f"{op}: seq_idx: a row has no single state; pass no initial_states and no "
                "return_final_states"
            )
        return _over_segments(op, x, weight, bias, seq_idx, activation)
    y, states = conv1d(x.transpose(1, 2), weight, bias, initial_states, None, activation)
    y = y.transpose(1, 2)
    if not return_final_states:
        return y
    return y, states if final_states_out is None else final_states_out.copy_(states)


def _over_segments(op, x, weight, bias, seq_idx, activation) -> Tensor:
    B, C, T = x.shape
    if seq_idx.shape != (B, T) or seq_idx.is_floating_point():
        raise ValueError(
            f"{op}: seq_idx: expected integers of shape [B, T] = {[B, T]}, got {seq_idx.dtype} of "
            f"{list(seq_idx.shape)}"
        )
    starts = torch.ones((B, T), dtype=torch.bool, device=x.device)
    starts[:, 1:] = seq_idx[:, 1:] != seq_idx[:, :-1]
    offsets = starts.flatten().nonzero()[:, 0]
    offsets = torch.cat([offsets, offsets.new_tensor([B * T])])
    padding = (seq_idx < 0)[:, :, None]
    # Before, too: what padding holds, a NaN even, reaches no gradient.
    packed = x.transpose(1, 2).masked_fill(padding, 0).reshape(1, B * T, C)
    y, _ = conv1d(packed, weight, bias, None, offsets, activation)
    return y.view(B, T, C).masked_fill(padding, 0).transpose(1, 2)


def causal_conv1d_update(
    x: Tensor,
    conv_state: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    cache_seqlens: Tensor | None = None,
    conv_state_indices: Tensor | None = None,
) -> Tensor:
    """:func:`gdn_ops.short_conv` with channels first: a few tokens, the state in place.

    Args:
        x: ``[B, C]`` or ``[B, C, T]``.
        conv_state: ``[B, C, L]`` or, with conv_state_indices, ``[P, C, L]``, ``L >= W - 1``,
            **written in place**: the history, newest column last.
        weight: ``[C, W]``; bias: ``[C]`` or None. activation: None, ``"silu"`` or ``"swish"``.
        cache_seqlens: refused: the state is no ring buffer.
        conv_state_indices: ``[B]`` int32 or int64; negative entries are padding (output zero).

    Returns:
        The shape and dtype of x.

    Raises:
        NotImplementedError: cache_seqlens. ValueError: another activation, x of another shape, or
            another number of rows than of sequences without conv_state_indices.
        RuntimeError: as :func:`gdn_ops.short_conv`.
    """
    op = "causal_conv1d_update"
    if cache_seqlens is not None:
        raise NotImplementedError(f"{op}: cache_seqlens is not supported: no ring buffers")
    activation = activation_name(op, activation)
    if x.dim() not in (2, 3):
        raise ValueError(f"{op}: x: expected shape [B, C] or [B, C, T], got {[*x.shape]}")
    if conv_state_indices is None and conv_state.shape[0] != x.shape[0]:
        raise ValueError(
            f"{op}: conv_state: expected {x.shape[0]} rows, one a sequence, got shape "
            f"{tuple(conv_state.shape)}"
        )
    wide = x[:, None] if x.dim() == 2 else x.transpose(1, 2)
    y = short_conv(wide, weight, bias, conv_state, conv_state_indices, activation=activation)
    return y[:, 0] if x.dim() == 2 else y.transpose(1, 2)
